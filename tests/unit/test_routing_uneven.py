"""A fast and a slow instance: when the slow one is worth it, and when waiting for the fast one is."""

import pytest

from weighbridge.core.actions import Dispatch
from weighbridge.core.events import FirstToken, InstanceUp, RequestArrived, Tick
from weighbridge.core.instance import InstanceSpec, Limits, StepTerms
from weighbridge.core.request import Request, Tier
from weighbridge.routing.policy import Choice, View
from weighbridge.routing.router import Router, RouterSettings
from weighbridge.scheduling.scheduler import SchedulerConfig
from weighbridge.sim.fleet import SimulatedFleet, SimulatedInstance, scaled
from weighbridge.sim.live import SimulationSettings
from weighbridge.sim.runs import Run, run_with_records
from weighbridge.workload.trace import TraceRequest

BATCH = Tier(name="batch", priority=20)
STRICT = Tier(name="strict", priority=0, ttft_s=1.0, tpot_s=0.2)
SLOTS, OUTPUT = 4, 128


def terms(prefill: float, decode: float) -> StepTerms:
    return StepTerms(base_s=0.006 * decode, prefill_s=0.0025 * prefill, sequence_s=0.003 * decode)


FAST, SLOW = terms(1, 1), terms(35, 6)
PROBED_FAST = StepTerms(base_s=0.003352, prefill_s=0.005547, sequence_s=0.01056)
PROBED_SLOW = StepTerms(base_s=6 * 0.003352, prefill_s=35 * 0.005547, sequence_s=6 * 0.01056)


def placed(count: int, tier: Tier, prompt: int = 20) -> tuple[list[str], Router]:
    """Where requests that come all at once go: the instance of each, or nothing while it is held."""
    router = Router(RouterSettings(policy="calibrated", tiers=(BATCH, STRICT), record_decisions=False))
    for name, step in (("fast", FAST), ("slow", SLOW)):
        spec = InstanceSpec(name=name, step=step, limits=Limits(token_budget=512, max_sequences=SLOTS, kv_blocks=4_000))
        router.handle(InstanceUp(spec=spec, generation=1), 0.0)
    where: dict[str, str] = {}
    now = 0.0
    for n in range(count):
        now = 0.1 * n
        request = Request(id=f"r{n}", arrival_s=now, prompt_tokens=prompt, max_tokens=OUTPUT, tier=tier.name)
        actions = router.handle(RequestArrived(request=request), now)
        for action in actions:
            if isinstance(action, Dispatch):
                where[action.request_id] = action.instance
                router.handle(FirstToken(request_id=action.request_id), now + 0.05)
    for action in router.handle(Tick(), now + 0.1):
        if isinstance(action, Dispatch):
            where[action.request_id] = action.instance
    return [where.get(f"r{n}", "") for n in range(count)], router


def test_a_few_wait_for_the_fast_one() -> None:
    where, router = placed(SLOTS + 3, BATCH)
    assert where == ["fast"] * SLOTS + [""] * 3
    assert router.held_requests == 3


def test_many_use_the_slow_one_too() -> None:
    where, _ = placed(48, BATCH)
    assert 1 <= where.count("slow") <= SLOTS
    assert where[:SLOTS] == ["fast"] * SLOTS


def test_long_prompts_never_go_where_they_take_a_minute() -> None:
    where, _ = placed(12, BATCH, prompt=500)
    assert "slow" not in where


def test_with_bounds_on_both_a_hit_is_a_hit_however_fast() -> None:
    """The slow one keeps a strict tier's bounds, so nothing waits for the fast one."""
    where, router = placed(SLOTS + 2, STRICT, prompt=4)
    assert where[SLOTS:] == ["slow"] * 2
    assert router.held_requests == 0


def burst(
    count: int, prompt: int, fast: StepTerms, slow: StepTerms | None, true_slow: float = 1.0
) -> tuple[float, float, list[str]]:
    """When the last request of a burst ends, the last of all first tokens, and where each ran."""
    config = SchedulerConfig(
        token_budget=512, max_sequences=SLOTS, blocks=8_000, mixing="split", busy_prefill_tokens=64, prefill_rows=64
    )
    fleet = [SimulatedInstance("fast", fast, config)]
    if slow is not None:
        fleet.append(SimulatedInstance("slow", scaled(slow, true_slow), config, believed=slow))

    class Burst:
        def requests(self, seed: int) -> list[TraceRequest]:
            return [TraceRequest(0.05 * n, prompt, OUTPUT, tier="batch") for n in range(count)]

    one = Run(SimulatedFleet(tuple(fleet)), Burst(), policy="calibrated", settings=SimulationSettings(max_tokens=None))
    _, records = run_with_records(one)
    assert all(r.status == "ok" for r in records)
    return (
        max(r.last_token_s or 0.0 for r in records),
        max(r.ttft_s or 0.0 for r in records),
        [r.instance for r in records],
    )


@pytest.mark.parametrize(("count", "most"), [(8, 1.001), (12, 0.93), (48, 0.90), (96, 0.90)])
def test_a_burst_is_done_sooner_and_nobody_waits_longer_than_on_the_fast_one_alone(count: int, most: float) -> None:
    """As a real embedded engine and its throttled twin: of 48 five go to the slow one, which is the best split."""
    alone, latest, _ = burst(count, 20, PROBED_FAST, None)
    both, last, where = burst(count, 20, PROBED_FAST, PROBED_SLOW)
    assert both <= most * alone
    assert last <= 1.001 * latest
    assert count != 48 or where.count("slow") == 5


@pytest.mark.parametrize("count", [8, 12, 16, 20, 48])
def test_a_slow_one_that_is_slower_than_its_profile_holds_nothing_up(count: int) -> None:
    alone, _, _ = burst(count, 20, FAST, None)
    assert burst(count, 20, FAST, SLOW, true_slow=1.25)[0] <= 1.01 * alone


@pytest.mark.parametrize(("fast", "slow"), [("FAST", "SLOW"), ("PROBED_FAST", "PROBED_SLOW")])
def test_a_prompt_that_the_slow_one_computes_for_a_minute_waits_however_long_the_queue(fast: str, slow: str) -> None:
    """Also after the release bound, when requests may wait in the fast one's own queue."""
    assert set(burst(48, 516, globals()[fast], globals()[slow])[2]) == {"fast"}


def test_an_urgent_request_does_not_count_the_batch_behind_it() -> None:
    urgent = Tier(name="urgent", priority=0)
    router = Router(RouterSettings(policy="calibrated", tiers=(BATCH, urgent), record_decisions=False))
    for name, step in (("fast", FAST), ("slow", SLOW)):
        spec = InstanceSpec(name=name, step=step, limits=Limits(token_budget=512, max_sequences=1, kv_blocks=4_000))
        router.handle(InstanceUp(spec=spec, generation=1), 0.0)
    seen: list[tuple[str, int, list[str]]] = []

    class Stub:
        def choose(self, view: View) -> Choice:
            seen.append((view.request.id, view.held, [option.instance.name for option in view.full]))
            names = [option.instance.name for option in view.options]
            return Choice(names.index("fast") if "fast" in names else None)

    router.policy = Stub()
    for n in range(6):
        request = Request(id=f"b{n}", arrival_s=0.0, prompt_tokens=20, max_tokens=OUTPUT, tier="batch")
        router.handle(RequestArrived(request=request), 0.1 * n)
    router.handle(
        RequestArrived(request=Request(id="u", arrival_s=1.0, prompt_tokens=20, max_tokens=9, tier="urgent")), 1.0
    )
    assert max(held for name, held, _ in seen if name != "u") == 6, "five of batch and the urgent one"
    assert next(each for each in seen if each[0] == "u") == ("u", 1, ["fast"])
