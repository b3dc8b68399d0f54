"""Virtual time: the fleet simulator that drives the real `Router`.

A policy tried here is the code that runs in the gateway; it sees the same events, as late as there. Build a fleet and a
workload, run policies over seeds:

    from weighbridge.sim import fleet, lab, runs, sweep
    from weighbridge.workload import mixes

    eight = fleet.mixed(8)                          # also two_speeds(4, 4), disaggregated(2, 4, blocks=2_000)
    work = runs.Generated(mixes.mixed_bursty(53.0), duration_s=300.0)
    one = runs.Run(eight, work, policy="least_tokens", seed=1, tiers=lab.tiers_of(mixes.classes("mixed")), skip=0.05)
    result = runs.run(one)                          # result.summary.attainment, .ttft_s.p99, .attainment_by_tier ...

    policies = ("round_robin", "least_tokens")
    many = [lab.REGIMES["2P+4D/mixed"].run(p, s, load=1.25) for p in policies for s in range(1, 6)]
    table = sweep.compare(sweep.run_all(many))      # spreads over seeds, differences paired by seed

`Run.options` are the policy's constructor arguments, `Run.router` further `RouterSettings` fields (`dispatch`, ...),
`Run.settings` how late and how often the router is told (`live.SimulationSettings`; `oracle_error` gives it true
lengths with an error). Disturb the engines with `fleet.changed(disturbance=Disturbance(noise=0.1, bend=0.3))`, faults
with `fleet.Fault`, wrong beliefs with `SimulatedInstance.believed`. `result.hits` is per request, for paired tests.
A new kind of workload is any object with `requests(seed)`.
"""
