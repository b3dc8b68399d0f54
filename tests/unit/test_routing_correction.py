"""Profiles corrected by clean observations only; instances without one become known."""

from dataclasses import replace

import pytest

from weighbridge.core.actions import Action, Dispatch, Reject
from weighbridge.core.events import (
    BlocksRemoved,
    BlocksStored,
    FirstToken,
    InstanceUp,
    ProfileUpdated,
    RequestArrived,
    RequestFinished,
    Tick,
    TokensProgressed,
)
from weighbridge.core.instance import InstanceSpec, Limits, StepTerms
from weighbridge.core.request import Request, Tier
from weighbridge.routing.correction import Correction, Scales
from weighbridge.routing.cost import Cost
from weighbridge.routing.router import Router
from weighbridge.routing.settings import RouterSettings
from weighbridge.sim.fleet import scaled
from weighbridge.sim.lab import REGIMES
from weighbridge.sim.runs import Generated, run

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


@pytest.mark.parametrize("factor", [1 / 7, 7.0])
def test_a_profile_wrong_by_a_factor_is_repaired_by_its_first_observations(factor: float) -> None:
    wrong = StepTerms(
        base_s=TRUE.base_s * factor, prefill_s=TRUE.prefill_s * factor, sequence_s=TRUE.sequence_s * factor
    )
    made = router(wrong, policy="calibrated")
    live(made, 3.0)
    cost = made.fleet.instances["i"].cost
    assert cost is not None
    assert cost.base_s == pytest.approx(TRUE.base_s, rel=0.15)
    assert cost.prefill_s == pytest.approx(TRUE.prefill_s, rel=0.3)
    made.handle(Tick(), 5.0)
    request = Request(id="last", arrival_s=5.0, prompt_tokens=10, max_tokens=9)
    made.handle(RequestArrived(request=request), 5.0)
    capacity = made.fleet.offered.capacity_tokens_per_s
    assert capacity == pytest.approx(1 / cost.prefill_s, rel=0.1), "the share in use follows what was learned"


@pytest.mark.parametrize("beside", [False, True])
def test_what_every_prompt_costs_is_not_taken_for_its_rate(beside: bool) -> None:
    """The last token of a cached prompt takes a call of its own: a hundred of them say nothing of a thousand tokens."""
    made = router(TRUE)
    now = 0.0
    if beside:
        made.handle(
            RequestArrived(request=Request(id="long", arrival_s=0.0, prompt_tokens=1000, max_tokens=9_000)), 0.0
        )
        now = 1000 * TRUE.prefill_s + TRUE.base_s
        made.handle(FirstToken(request_id="long"), now)
    for n in range(100):
        name = f"r{n}"
        made.handle(RequestArrived(request=Request(id=name, arrival_s=now, prompt_tokens=4, max_tokens=50)), now)
        now += 3 * TRUE.base_s
        made.handle(FirstToken(request_id=name), now)
        for tokens in range(12, 50, 12):
            now += 12 * (TRUE.base_s + TRUE.sequence_s * (2 if beside else 1))
            made.handle(TokensProgressed(request_id=name, output_tokens=tokens), now)
        if beside:
            made.handle(TokensProgressed(request_id="long", output_tokens=52 * (n + 1)), now)
        made.handle(RequestFinished(request_id=name, output_tokens=50), now)
    cost = made.fleet.instances["i"].cost
    assert cost is not None
    assert cost.prefill_scale == pytest.approx(1.0, abs=0.15)
    assert cost.decode_scale == pytest.approx(1.0, abs=0.15)


def scales_after(seconds: list[float], cost: Cost, scales: Scales) -> None:
    for each in seconds:
        scales.observe(cost, 0.0, cost.decode_scale * 0.1, each, 0.0)


def test_one_pause_is_no_rate_but_three_in_a_row_are() -> None:
    cost = Cost(InstanceSpec(name="i"), TRUE)
    scales = Scales()
    scales_after([0.1] * 20, cost, scales)
    scales_after([1.0], cost, scales)
    assert cost.decode_scale == pytest.approx(1.0, abs=0.1)
    scales_after([0.1, 1.0, 0.1, 1.0, 0.1], cost, scales)
    assert cost.decode_scale == pytest.approx(1.0, abs=0.15)
    scales_after([0.3] * 4, cost, scales)
    assert cost.decode_scale == pytest.approx(3.0, rel=0.15)


def test_decode_alone_leaves_prefill_alone() -> None:
    cost = Cost(InstanceSpec(name="i"), TRUE)
    scales_after([0.11] * 50, cost, Scales())
    assert cost.decode_scale == pytest.approx(1.1, rel=0.02)
    assert cost.prefill_scale == pytest.approx(1.0)
    cost = Cost(InstanceSpec(name="i"), TRUE)
    scales_after([0.1 / 7] * 5, cost, Scales())
    assert cost.decode_scale == pytest.approx(1 / 7, rel=0.05)
    assert cost.prefill_scale == pytest.approx(1.0)


def test_what_one_instance_shows_holds_for_the_others_until_they_show_their_own() -> None:
    """Else the first one seen looks seven times faster than its equals and gets everything."""
    wrong = StepTerms(base_s=TRUE.base_s * 7, prefill_s=TRUE.prefill_s * 7, sequence_s=TRUE.sequence_s * 7)
    made = router(wrong)
    for name in ("j", "k"):
        made.handle(InstanceUp(spec=InstanceSpec(name=name, step=wrong), generation=1), 0.0)
    shown, other = made.fleet.instances["i"], made.fleet.instances["j"]
    made.fleet.charge(
        Request(id="r", arrival_s=0.0, prompt_tokens=1000, max_tokens=50), shown, cached_tokens=0,
        expected_output_tokens=50, now_s=0.0,
    )  # fmt: skip
    correction = Correction()
    for instance in made.fleet:
        correction.forget(instance)
    correction.first_token(made.fleet.charges["r"], 1000, 1000 * TRUE.prefill_s + TRUE.base_s)
    assert shown.cost is not None
    assert other.cost is not None
    assert shown.cost.prefill_scale < 0.5
    assert (other.cost.prefill_scale, other.cost.decode_scale) == (shown.cost.prefill_scale, shown.cost.decode_scale)
    assert (shown.cost.seen, other.cost.seen) == (True, False)


def test_nothing_is_refused_on_the_word_of_a_profile_that_no_traffic_has_confirmed() -> None:
    """By the profile 1,000 tokens take 1.4 s; the engine does them in 0.2 s and the bound is 0.5 s."""
    wrong = StepTerms(base_s=TRUE.base_s * 7, prefill_s=TRUE.prefill_s * 7, sequence_s=TRUE.sequence_s * 7)
    tier = Tier(name="chat", priority=0, ttft_s=0.5, tpot_s=0.04)

    def answers(made: Router) -> list[Action]:
        actions: list[Action] = []
        for n in range(3):
            asked = Request(id=f"a{n}", arrival_s=0.0, prompt_tokens=600, max_tokens=50, tier="chat")
            actions += made.handle(RequestArrived(request=asked), 0.0)
        actions += made.handle(Tick(), 0.3)
        return actions

    fresh = answers(router(wrong, policy="calibrated", tiers=(tier,)))
    assert not [a for a in fresh if isinstance(a, Reject)]
    assert len([a for a in fresh if isinstance(a, Dispatch)]) == 3
    believed = answers(router(wrong, policy="calibrated", tiers=(tier,), correct=False))
    assert [a for a in believed if isinstance(a, Reject)]


def test_constants_wrong_by_seven_cost_two_points_at_most() -> None:
    attained = {}
    for factor in (1.0, 7.0):
        one = REGIMES["8/mixed"].run("calibrated", 311, load=1.1)
        assert isinstance(one.workload, Generated)
        believed = replace(one.fleet, instances=tuple(
            replace(i, believed=scaled(i.terms, factor)) for i in one.fleet.instances
        ))  # fmt: skip
        attained[factor] = run(
            replace(one, fleet=believed, workload=replace(one.workload, duration_s=20.0))
        ).summary.attainment
    assert attained[7.0] > attained[1.0] - 0.02


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
    before = made.fleet.instances["i"].cost
    assert before is None
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


@pytest.mark.parametrize("share", [0.3, 0.7, 1.0])
def test_a_long_prompt_half_computed_beside_a_decode_is_no_slowness(share: float) -> None:
    """A prompt cut into pieces is booked when it ends; until then its seconds must not count as decoding."""
    made = router(TRUE)
    for name, prompt in (("decoding", 10), ("long", 20_000)):
        made.handle(RequestArrived(request=Request(id=name, arrival_s=0.0, prompt_tokens=prompt, max_tokens=50)), 0.0)
        if name == "decoding":
            made.handle(FirstToken(request_id=name), 0.022)
    seconds = share * 20_000 * TRUE.prefill_s + 8 * (TRUE.base_s + TRUE.sequence_s)
    made.handle(TokensProgressed(request_id="decoding", output_tokens=9), 0.022 + seconds)
    cost = made.fleet.instances["i"].cost
    assert cost is not None
    assert cost.decode_scale == pytest.approx(1.0, abs=0.1)
