"""The virtual-time driver: every request ends once, the ledger ends at zero, the same seed gives the same bytes."""

from __future__ import annotations

import io
import itertools
import subprocess
import sys
from dataclasses import replace

import pytest

from weighbridge.core.event_log import LogReader
from weighbridge.core.events import FirstToken, RequestArrived, RequestCancelled, RequestFailed, RequestFinished
from weighbridge.core.metrics import RequestRecord
from weighbridge.routing import replay
from weighbridge.routing.router import Router, RouterSettings
from weighbridge.scheduling.scheduler import SchedulerConfig
from weighbridge.sim.cost_runner import Disturbance
from weighbridge.sim.fixed import run_fixed
from weighbridge.sim.fleet import Fault, Link, SimulatedFleet, disaggregated, mixed, two_speeds
from weighbridge.sim.live import SimulationSettings
from weighbridge.sim.simulation import Simulation
from weighbridge.workload import mixes
from weighbridge.workload.trace import TraceRequest


def workload(rate: float = 12.0, duration_s: float = 30.0, seed: int = 1) -> list[TraceRequest]:
    return list(mixes.mixed_bursty(rate).generate(seed, duration_s=duration_s))


def simulate(
    fleet: SimulatedFleet,
    requests: list[TraceRequest],
    settings: SimulationSettings | None = None,
    **router: object,
) -> tuple[Simulation, list[RequestRecord], bytes]:
    log = io.BytesIO()
    made = Router(RouterSettings(record_decisions=False, **router))  # type: ignore[arg-type]
    simulation = Simulation(made, fleet, settings, log=log, keep_stages=True)
    records = simulation.run(requests)
    return simulation, records, log.getvalue()


FLEETS = {
    "mixed": mixed(3, blocks=1_000),
    "two speeds": two_speeds(2, 2),
    "disaggregated": disaggregated(1, 2, blocks=1_500),
    "noisy": mixed(2).changed(disturbance=Disturbance(noise=0.1, bend=0.3)),
    "faulty": replace(
        mixed(3),
        faults=(
            Fault(3.0, "slow", "i0", 4.0),
            Fault(6.0, "fail", "i1"),
            Fault(8.0, "start", "i1"),
            Fault(20.0, "fail", "i2"),
        ),
        cold_start_s=5.0,
    ),
    "faulty disaggregated": replace(
        disaggregated(2, 2),
        faults=(Fault(4.0, "fail", "p0"), Fault(6.0, "fail", "d1"), Fault(9.0, "start", "d1")),
        cold_start_s=2.0,
    ),
}


@pytest.mark.parametrize("name", FLEETS)
@pytest.mark.parametrize("dispatch", ["immediate", "hold"])
def test_every_request_ends_once_and_nothing_is_left(name: str, dispatch: str) -> None:
    requests = workload()
    settings = SimulationSettings(patience_s=4.0, report_delay_s=0.02, report_loss=0.2)
    simulation, records, log = simulate(FLEETS[name], requests, settings, dispatch=dispatch)
    assert len(records) == len(requests)
    assert "unfinished" not in {r.status for r in records}
    assert simulation.router.live_requests == 0
    for instance in simulation.router.fleet:
        assert (instance.in_flight, instance.prefill_tokens, instance.decode_tokens, instance.kv_tokens) == (0, 0, 0, 0)
    for instance in simulation.instances:
        while instance.wake_s < float("inf"):
            instance.advance(instance.wake_s)
        assert instance.idle
        assert instance.used_blocks == 0
    ends: dict[str, int] = {}
    for entry in LogReader(io.BytesIO(log)):
        if isinstance(entry.e, RequestFinished | RequestCancelled) or (
            isinstance(entry.e, RequestFailed) and not entry.e.retriable
        ):
            ends[entry.e.request_id] = ends.get(entry.e.request_id, 0) + 1
        for action in entry.a:
            if type(action).__name__ == "Reject":
                ends[action.request_id] = ends.get(action.request_id, 0) + 1
    assert ends == {r.id: 1 for r in records}
    assert any(r.status == "ok" for r in records)
    if "faulty" in name:
        assert any(r.attempts > 1 for r in records)


@pytest.mark.parametrize("name", FLEETS)
def test_a_fresh_router_repeats_the_log(name: str) -> None:
    _, _, log = simulate(FLEETS[name], workload(), policy="least_tokens", seed=3)
    reader = LogReader(io.BytesIO(log))
    parity = replay.check(reader.header, reader)
    assert parity.entries > 100
    assert not parity.mismatches


def test_equal_seeds_give_equal_bytes_across_processes() -> None:
    code = (
        "import sys, hashlib; sys.path.insert(0, '.');"
        "from tests.unit.test_sim_simulation import *;"
        "settings = SimulationSettings(seed=4, report_loss=.1);"
        "logs = [simulate(FLEETS[n], workload(), settings, seed=2)[2] for n in FLEETS];"
        "print([hashlib.sha256(log).hexdigest() for log in logs])"
    )
    runs = [
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
        for _ in range(2)
    ]
    assert runs[0] == runs[1]
    assert len(set(eval(runs[0]))) == len(FLEETS)


def test_the_log_holds_no_true_output_length_before_the_end() -> None:
    """What a policy sees must not depend on the length that only the engine knows."""
    requests = workload(rate=4.0)
    lengthened = [replace_output(r, r.output_tokens + 40) for r in requests]

    def until_first_tokens(trace: list[TraceRequest]) -> list[object]:
        log = simulate(mixed(4), trace)[2]
        first = next(e.t for e in LogReader(io.BytesIO(log)) if isinstance(e.e, FirstToken))
        return [e.e for e in LogReader(io.BytesIO(log)) if e.t < first or isinstance(e.e, RequestArrived)]

    assert until_first_tokens(requests) == until_first_tokens(lengthened)


def replace_output(request: TraceRequest, output: int) -> TraceRequest:
    import msgspec

    return msgspec.structs.replace(request, output_tokens=output)


def test_ttft_of_a_disaggregated_request_is_the_sum_of_its_parts() -> None:
    fleet = replace(disaggregated(1, 2), link=Link(latency_s=0.01, bytes_per_token=131_072, bandwidth=5e9))
    simulation, records, log = simulate(fleet, workload(rate=6.0), dispatch="immediate")
    step = fleet.instances[0].terms.base_s
    first_in_log = {e.e.request_id: e.t for e in LogReader(io.BytesIO(log)) if isinstance(e.e, FirstToken)}
    for record in records:
        stages = simulation.stages[record.id]
        points = (
            stages.arrived, stages.dispatched, stages.prefilled, stages.transfer_started, stages.decode_added,
            stages.first_token,
        )  # fmt: skip
        assert points == tuple(sorted(points))
        parts = [b - a for a, b in itertools.pairwise(points)]
        assert sum(parts) == pytest.approx(record.ttft_s, abs=1e-9)
        assert first_in_log[record.id] == record.first_token_s
        transfer = fleet.link.latency_s + fleet.link.seconds(record.prompt_tokens)
        assert parts[3] == pytest.approx(transfer, abs=1e-9)
        assert parts[4] >= step


def test_a_link_is_first_in_first_out() -> None:
    fleet = replace(disaggregated(1, 1), link=Link(latency_s=0.0, bytes_per_token=131_072, bandwidth=1e8))
    requests = [TraceRequest(0.001 * k, 400, 5) for k in range(4)]
    simulation, records, _ = simulate(fleet, requests, dispatch="immediate")
    starts = [simulation.stages[r.id].transfer_started for r in records]
    busy = fleet.link.seconds(400)
    assert [b - a for a, b in itertools.pairwise(starts)] == pytest.approx([busy] * 3)


def test_a_slow_down_slows_and_a_recovered_instance_serves_again() -> None:
    requests = [TraceRequest(0.5 * k, 100, 20) for k in range(100)]
    slow = replace(mixed(1), faults=(Fault(20.0, "slow", "i0", 10.0), Fault(35.0, "slow", "i0", 1.0)))
    _, records, _ = simulate(slow, requests)
    before, during, after = (
        [r.tpot_s for r in records if low <= r.scheduled_s < high] for low, high in ((0, 18), (22, 30), (40, 50))
    )
    assert min(during) > 5 * max(before)
    assert max(after) == pytest.approx(max(before), rel=0.2)


def test_late_reports_arrive_late_and_lost_ones_never() -> None:
    from weighbridge.core.events import InstanceReported

    settings = SimulationSettings(poll_s=0.1, report_delay_s=0.03, report_loss=0.5)
    _, _, log = simulate(mixed(2), workload(duration_s=40.0), settings)
    reports = [e for e in LogReader(io.BytesIO(log)) if isinstance(e.e, InstanceReported)]
    end = max(e.t for e in reports)
    assert {round(e.t - e.e.sampled_s, 9) for e in reports} == {0.03}
    assert len(reports) / (2 * end / 0.1) == pytest.approx(0.5, abs=0.07)


def test_progress_comes_at_most_every_quarter_second_per_request() -> None:
    from weighbridge.core.events import TokensProgressed

    _, _, log = simulate(mixed(2), workload(rate=3.0))
    last: dict[str, tuple[float, int]] = {}
    seen = 0
    for entry in LogReader(io.BytesIO(log)):
        if isinstance(entry.e, TokensProgressed):
            seen += 1
            at, tokens = last.get(entry.e.request_id, (-1.0, 0))
            assert entry.t - at >= 0.25 - 1e-9
            assert entry.e.output_tokens > tokens
            last[entry.e.request_id] = (entry.t, entry.e.output_tokens)
    assert seen > 100


def test_a_request_that_fits_no_engine_fails() -> None:
    _, records, _ = simulate(mixed(2, blocks=50), [TraceRequest(0.0, 900, 20), TraceRequest(0.1, 100, 5)])
    assert [r.status for r in records] == ["failed", "ok"]


def test_fixed_assignment_needs_no_router_and_equals_round_robin_of_one_instance() -> None:
    requests = workload(rate=5.0)
    records, _ = run_fixed(mixed(1), requests)
    _, routed, _ = simulate(mixed(1), requests, SimulationSettings(max_tokens=None))
    assert [(r.first_token_s, r.last_token_s) for r in records] == [(r.first_token_s, r.last_token_s) for r in routed]


def test_stepwise_and_fast_forward_fleets_give_the_same_latencies() -> None:
    requests = workload(rate=20.0)
    results = []
    for stepping in ("auto", "stepwise"):
        settings = SimulationSettings(stepping=stepping)  # type: ignore[arg-type]
        _, records, _ = simulate(mixed(3, blocks=900), requests, settings, policy="least_requests")
        results.append([(r.instance, r.ttft_s, r.e2e_s) for r in records])
    for (one, ttft, e2e), (other, ttft2, e2e2) in zip(*results, strict=True):
        assert one == other
        assert (ttft, e2e) == (pytest.approx(ttft2, abs=1e-9), pytest.approx(e2e2, abs=1e-9))


def test_a_prefix_cache_saves_prefill() -> None:
    blocks = tuple(range(1, 41))
    requests = [TraceRequest(1.0 * k, 650, 5, blocks=blocks, block_tokens=16) for k in range(5)]
    caching = SimulatedFleet(
        tuple(replace(i, scheduler=SchedulerConfig(prefix_caching=True)) for i in mixed(1).instances)
    )
    _, records, _ = simulate(caching, requests)
    assert [r.cached_tokens for r in records] == [0, 640, 640, 640, 640]
    assert records[1].ttft_s < 0.6 * records[0].ttft_s
    _, without, _ = simulate(mixed(1), requests)
    assert {r.cached_tokens for r in without} == {0}


@pytest.mark.parametrize("mode", ["swap", "recompute"])
def test_an_engine_preempts_when_it_is_asked_to(mode: str) -> None:
    from weighbridge.core.actions import Preempt
    from weighbridge.core.events import TokensProgressed

    class Preempting(Router):
        """Asks once, when the first request has generated some tokens."""

        asked = False

        def handle(self, event, now_s):
            actions = super().handle(event, now_s)
            if isinstance(event, TokensProgressed) and event.request_id == "r0" and not self.asked:
                self.asked = True
                actions = [*actions, Preempt(request_id="r0", instance="i0", mode=mode)]
            return actions

    fleet = mixed(1).changed(preemption=("swap", "recompute"))
    simulation = Simulation(Preempting(RouterSettings(record_decisions=False)), fleet)
    records = simulation.run([TraceRequest(0.0, 800, 100), TraceRequest(0.1, 100, 60)])
    undisturbed = simulate(mixed(1), [TraceRequest(0.0, 800, 100), TraceRequest(0.1, 100, 60)])[1]
    assert [r.status for r in records] == ["ok", "ok"]
    assert [r.preemptions for r in records] == [1, 0]
    assert simulation.instances[0].used_blocks == 0
    # Dropped KV is computed again; KV in host memory is not.
    lost = records[0].last_token_s - undisturbed[0].last_token_s
    assert (lost > 0.02) == (mode == "recompute")
