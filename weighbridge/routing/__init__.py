"""Where a request runs: Router, Fleet ledger, prefix index, policies. Pure: events in, actions out.

`Router.handle(event, now_s)` is the whole interface. It is synchronous, does no I/O, reads no clock and draws only
from its own seeded generator, so the gateway (wall time), the simulator (virtual time) and `weighbridge replay`
(a recorded log) drive the very same code and get the very same actions.
"""
