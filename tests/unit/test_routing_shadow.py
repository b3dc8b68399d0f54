"""Shadow policies change nothing and are recorded; offered load against what is sustainable."""

import msgspec
import pytest

from weighbridge.core.actions import Dispatch
from weighbridge.core.event_log import Entry
from weighbridge.core.events import Event, FirstToken, InstanceUp, RequestArrived
from weighbridge.core.instance import InstanceSpec, Limits, StepTerms
from weighbridge.core.request import Request
from weighbridge.routing.replay import shadow_summary
from weighbridge.routing.router import Router
from weighbridge.routing.settings import RouterSettings

STEP = StepTerms(base_s=0.01, prefill_s=1e-4)


def record(**settings: object) -> list[Entry]:
    router = Router(RouterSettings(policy="power_of_two", seed=5, **settings))  # type: ignore[arg-type]
    limits = Limits(token_budget=1000, kv_blocks=1000)
    events: list[Event] = [InstanceUp(spec=InstanceSpec(name=n, step=STEP, limits=limits), generation=1) for n in "abc"]
    for n in range(30):
        request = Request(id=f"r{n}", arrival_s=n * 0.1, prompt_tokens=100 * (1 + n % 7), max_tokens=50)
        events.append(RequestArrived(request=request))
        if n > 5:
            events.append(FirstToken(request_id=f"r{n - 5}"))
    return [Entry(k * 0.1, event, tuple(router.handle(event, k * 0.1))) for k, event in enumerate(events)]


def test_shadows_are_recorded_and_move_nothing() -> None:
    plain, shadowed = record(), record(shadow=("random", "least_tokens"))
    placed = [a for entry in shadowed for a in entry.a if isinstance(a, Dispatch)]
    assert len(placed) == 30
    for action in placed:
        assert action.decision is not None
        assert [s.policy for s in action.decision.shadows] == ["random", "least_tokens"]

    def without(entries: list[Entry]) -> list[object]:
        return [
            msgspec.structs.replace(a.decision, shadows=()) for e in entries for a in e.a if isinstance(a, Dispatch)
        ]  # type: ignore[type-var]

    assert without(shadowed) == without(plain)


def test_the_summary_counts_agreement_and_forecast_difference() -> None:
    entries = record(shadow=("random", "least_tokens"))
    least, drawn = shadow_summary(entries)
    assert (least.policy, drawn.policy) == ("least_tokens", "random")
    assert least.asked == drawn.asked == 30
    assert 0 < least.agreed < 30
    assert least.compared == 30 - least.agreed
    assert least.ttft_s > 0
    assert least.chosen_ttft_s > 0
    assert shadow_summary(record()) == []


def test_stability_is_the_offered_share_of_the_budget_and_of_the_kv() -> None:
    router = Router(RouterSettings(record_decisions=False))
    limits = Limits(token_budget=1000, kv_blocks=1000)
    router.handle(InstanceUp(spec=InstanceSpec(name="i", step=STEP, limits=limits), generation=1), 0.0)
    assert router.stability(0.0).token_load is None
    for n in range(2000):
        request = Request(id=f"r{n}", arrival_s=n * 0.1, prompt_tokens=200, max_tokens=100)
        router.handle(RequestArrived(request=request), n * 0.1)
    loads = router.stability(200.0)
    assert loads.offered_tokens_per_s == pytest.approx(3000, rel=0.02)
    # a full step of 1,000 tokens takes 0.01 + 0.1 seconds
    assert loads.token_load == pytest.approx(3000 * 0.11 / 1000, rel=0.02)
    # 10 per second, each 100 * (200 + 50) token-steps of 0.01 s, against 16,000 tokens
    assert loads.kv_load == pytest.approx(10 * 25_000 * 0.01 / 16_000, rel=0.02)


def test_a_step_without_decodes_that_costs_nothing_is_no_room_without_end() -> None:
    """As a probe may find it: all of a decode step belongs to its sequences, none to its base."""
    router = Router(RouterSettings(record_decisions=False, dispatch="hold"))
    limits = Limits(token_budget=1000, kv_blocks=1000)
    step = StepTerms(base_s=0.0, prefill_s=1e-4, sequence_s=0.01, sequence_knots=((1.0, 0.01), (2.0, 0.02)))
    router.handle(InstanceUp(spec=InstanceSpec(name="i", step=step, limits=limits), generation=1), 0.0)
    request = Request(id="r", arrival_s=0.0, prompt_tokens=200, max_tokens=100)
    router.handle(RequestArrived(request=request), 0.0)
    loads = router.stability(1.0)
    assert loads.token_load is not None and loads.token_load > 0.0
    assert loads.kv_load is not None and loads.kv_load > 0.0
