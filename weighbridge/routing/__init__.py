"""Where a request runs: Router, Fleet ledger, prefix index, admission, policies. Pure: events in, actions out."""
