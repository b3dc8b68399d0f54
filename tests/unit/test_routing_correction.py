"""Profiles corrected by clean observations only; instances without one become known."""

import pytest

from weighbridge.core.actions import Dispatch
from weighbridge.core.events import (
    BlocksRemoved,
    BlocksStored,
    FirstToken,
    InstanceUp,
    ProfileUpdated,
    RequestArrived,
    RequestFinished,
    TokensProgressed,
)
from weighbridge.core.instance import InstanceSpec, Limits, StepTerms
from weighbridge.core.request import Request
from weighbridge.routing.router import Router
from weighbridge.routing.settings import RouterSettings

TRUE = StepTerms(base_s=0.02, prefill_s=2e-4, sequence_s=1e-3)


def router(believed: StepTerms | None, **settings: object) -> Router:
    made = Router(RouterSettings(record_decisions=False, **settings))  # type: ignore[arg-type]
    spec = InstanceSpec(name="i", step=believed, limits=Limits(token_budget=2048, kv_blocks=10_000))
    made.handle(InstanceUp(spec=spec, generation=1), 0.0)
    return made


def live(made: Router, seconds: float, *, queue: float = 0.0) -> None:
    """Requests one after another on an engine that costs TRUE; `queue` seconds of waiting that is no rate."""
    now, n = 0.0, 0
    while now < seconds:
        n += 1
        name = f"r{n}"
        made.handle(RequestArrived(request=Request(id=name, arrival_s=now, prompt_tokens=1000, max_tokens=50)), now)
        if queue:
            made.handle(
                RequestArrived(request=Request(id=f"q{n}", arrival_s=now, prompt_tokens=10, max_tokens=50)), now
            )
        now += 1000 * TRUE.prefill_s + TRUE.base_s * 1.5 + queue
        made.handle(FirstToken(request_id=name), now)
        for tokens in range(12, 50, 12):
            now += 12 * (TRUE.base_s + TRUE.sequence_s)
            made.handle(TokensProgressed(request_id=name, output_tokens=tokens), now)
        made.handle(RequestFinished(request_id=name, output_tokens=50), now)
        if queue:
            made.handle(RequestFinished(request_id=f"q{n}", output_tokens=50), now)


@pytest.mark.parametrize("factor", [1 / 7, 1.0, 7.0])
def test_wrong_constants_are_repaired(factor: float) -> None:
    wrong = StepTerms(
        base_s=TRUE.base_s * factor, prefill_s=TRUE.prefill_s * factor, sequence_s=TRUE.sequence_s * factor
    )
    made = router(wrong)
    live(made, 200.0)
    cost = made.fleet.instances["i"].cost
    assert cost is not None
    assert cost.base_s == pytest.approx(TRUE.base_s, rel=0.1)
    assert cost.prefill_s == pytest.approx(TRUE.prefill_s, rel=0.15)


def test_waiting_is_not_taken_for_slowness() -> None:
    made = router(TRUE)
    live(made, 200.0, queue=2.0)
    cost = made.fleet.instances["i"].cost
    assert cost is not None
    assert cost.prefill_scale == pytest.approx(1.0, abs=0.15)
    assert cost.decode_scale == pytest.approx(1.0, abs=0.15)


def test_it_can_be_turned_off_and_a_new_profile_starts_afresh() -> None:
    wrong = StepTerms(base_s=0.2, prefill_s=2e-3)
    off = router(wrong, correct=False)
    live(off, 50.0)
    assert off.fleet.instances["i"].cost is not None
    assert off.fleet.instances["i"].cost.base_s == 0.2
    on = router(wrong)
    live(on, 50.0)
    on.handle(ProfileUpdated(instance="i", step=TRUE), 51.0)
    cost = on.fleet.instances["i"].cost
    assert cost is not None
    assert (cost.prefill_scale, cost.decode_scale) == (1.0, 1.0)


def test_an_instance_without_a_profile_becomes_known() -> None:
    made = router(None)
    assert made.fleet.instances["i"].cost is None
    live(made, 200.0)
    cost = made.fleet.instances["i"].cost
    assert cost is not None
    assert cost.decode_step_s(1, 1000) == pytest.approx(TRUE.base_s + TRUE.sequence_s, rel=0.15)


def test_kv_events_replace_what_was_guessed() -> None:
    made = Router(RouterSettings(policy="least_tokens"))
    for name in "ab":
        made.handle(InstanceUp(spec=InstanceSpec(name=name), generation=1), 0.0)

    def cached(n: int) -> dict[str, int]:
        request = Request(id=f"r{n}", arrival_s=1.0, prompt_tokens=100, max_tokens=9, prefix_hashes=(1, 2, 3))
        (action,) = made.handle(RequestArrived(request=request), 1.0)
        assert isinstance(action, Dispatch)
        assert action.decision is not None
        made.handle(RequestFinished(request_id=f"r{n}", output_tokens=1, cached_tokens=32), 1.0)
        return {c.instance: c.cached_tokens for c in action.decision.candidates}

    made.handle(BlocksStored(instance="b", generation=1, hashes=(1, 2)), 0.5)
    assert cached(1) == {"a": 0, "b": 32}
    made.handle(BlocksRemoved(instance="b", generation=0, hashes=(1,)), 0.6)
    assert cached(2)["b"] == 48, "an old generation's event is ignored, and the dispatch expects one block more"
    made.handle(BlocksRemoved(instance="b", generation=1, hashes=(3,)), 0.7)
    made.handle(BlocksRemoved(instance="b", generation=1, hashes=(2,)), 0.7)
    assert cached(3)["b"] == 16
    made.handle(BlocksRemoved(instance="b", generation=1, all=True), 0.8)
    assert cached(4)["b"] == 0
    credit = made.fleet.prefix_credit
    assert (credit.requests, credit.found_tokens) == (4, 4 * 32)
    assert credit.missed_tokens > 0
