"""One module per page: a pure function from a snapshot and a query to a `View`."""
