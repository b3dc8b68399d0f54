"""Where a request runs: Router, Fleet ledger, hold queue, prefix index, policies. Pure: events in, actions out.

`Router.handle(event, now_s) -> actions` is the whole interface. It is synchronous, does no I/O, reads no clock and
draws only from its own seeded generator, so the gateway (wall time), the simulator (virtual time) and `weighbridge
replay` (a recorded log) drive the very same code and get the very same actions.

What a driver does
- Feeds every event in order with a time that never decreases, and executes the returned actions in order. An action
  may concern any request, not only the event's: a `FirstToken` of one may dispatch another that was held.
- Sends `Tick` every 50 ms while `router.wants_tick` is true (look after each `handle`), none otherwise.
- Answers each dispatched attempt with exactly one of `RequestFinished`, `RequestFailed`, `RequestCancelled`; a client
  that goes away while its request is held is a `RequestCancelled` too. After `Reject` nothing more is sent.

A request's dispatches, by `Dispatch.leg`
- `whole`: one instance does all. `FirstToken`, `TokensProgressed`, `RequestFinished`.
- Disaggregated, bound late: `Dispatch(leg="prefill", instance=P)`. The driver runs the prompt on P and sends
  `PrefillFinished`; P keeps the KV. The router answers at once or later with `Dispatch(leg="decode", instance=D,
  prefill_instance=P)`, same `attempt`; the driver has D fetch the KV and generate: `FirstToken` (by which P's KV is
  taken to be free), `TokensProgressed`, `RequestFinished`. No second `RequestDispatched` is needed.
- Disaggregated, bound early: `Dispatch(leg="both", instance=D, prefill_instance=P)`; both are contacted at once.
  `PrefillFinished` may be sent when P is done.
- A leg that fails is `RequestFailed(instance=the one at fault)`; the router releases both legs and, if `retriable`,
  starts again with a new attempt (whole or prefill). A cancel ends both legs. A client that leaves, or an `Abort`,
  between the legs must free the KV on P: the driver owes P its release message.
"""
