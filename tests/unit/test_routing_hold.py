"""The hold queue: order, lateness, room, gate, release, rejection."""

import random

import msgspec
import pytest

from weighbridge.core.actions import Dispatch, Hold, Reject
from weighbridge.core.events import (
    FirstToken,
    InstanceDown,
    InstanceUp,
    RequestArrived,
    RequestCancelled,
    RequestFinished,
    Tick,
)
from weighbridge.core.instance import InstanceSpec, Limits, StepTerms
from weighbridge.core.request import Request, Tier
from weighbridge.routing.hold import WINDOW, HoldQueue
from weighbridge.routing.live import Live
from weighbridge.routing.policies.calibrated import Calibrated
from weighbridge.routing.policy import Choice, View
from weighbridge.routing.router import Router, RouterSettings

STEP = StepTerms(base_s=0.01, prefill_s=1e-4)
TIERS = (
    Tier(name="fast", priority=0, ttft_s=0.5),
    Tier(name="slow", priority=0, ttft_s=5.0),
    Tier(name="firm", priority=0, ttft_s=0.5, sheddable=False),
    Tier(name="later", priority=9),
)


def live(name: str, tier: Tier, arrival_s: float = 0.0, prompt_tokens: int = 100) -> Live:
    made = Live(Request(id=name, arrival_s=arrival_s, prompt_tokens=prompt_tokens, max_tokens=10), tier, 2.0)
    made.stage = "held"
    return made


def drain(queue: HoldQueue, now_s: float = 0.0, seconds_per_token: float = 0.0) -> list[str]:
    names = []
    while (found := queue.first(now_s, seconds_per_token, 0.0)) is not None:
        names.append(found.request.id)
        queue.remove(found.request.id)
    return names


def test_order_is_tier_then_deadline_and_hopeless_last() -> None:
    queue = HoldQueue()
    fast, slow, _, later = TIERS
    for made in (
        live("batch", later),
        live("relaxed", slow),
        live("urgent", fast, 0.1),
        live("hopeless", fast, 0.0, prompt_tokens=9000),
        live("too late", fast, -3.0),
    ):
        queue.push(made)
    # 9,000 tokens need 0.9 s and its deadline is in half a second
    assert drain(queue, 0.0, 1e-4) == ["urgent", "relaxed", "too late", "hopeless", "batch"]


def test_sacrificed_requests_go_behind_those_that_make_it() -> None:
    queue = HoldQueue()
    made = [live(f"r{n}", TIERS[1], n * 0.1) for n in range(4)]
    for each in made:
        queue.push(each)
    made[0].sacrificed = True
    assert drain(queue) == ["r1", "r2", "r3", "r0"]


@pytest.mark.parametrize("seed", range(4))
def test_far_more_than_a_window_comes_out_sorted_with_some_cancelled(seed: int) -> None:
    rng = random.Random(seed)
    queue = HoldQueue()
    made = [live(f"r{n}", TIERS[1], rng.random() * 100) for n in range(5 * WINDOW)]
    gone: set[str] = set()
    for n, each in enumerate(made):
        queue.push(each)
        if n % 3 == 2:
            victim = rng.choice(made[: n + 1]).request.id
            assert (queue.remove(victim) is None) == (victim in gone)
            gone.add(victim)
    left = [each for each in made if each.request.id not in gone]
    assert len(queue) == len(left)
    assert drain(queue) == [each.request.id for each in sorted(left, key=lambda each: each.due_s)]


def router(count: int = 1, kv_blocks: int = 10_000, **settings: object) -> Router:
    fields: dict[str, object] = {"policy": "least_tokens", "dispatch": "hold", "record_decisions": False, **settings}
    made = Router(RouterSettings(tiers=TIERS, **fields))  # type: ignore[arg-type]
    for n in range(count):
        limits = Limits(token_budget=1000, kv_blocks=kv_blocks)
        made.handle(InstanceUp(spec=InstanceSpec(name=f"i{n}", step=STEP, limits=limits), generation=1), 0.0)
    return made


def arrive(made: Router, name: str, tier: str = "slow", prompt_tokens: int = 600, now_s: float = 0.0) -> list[object]:
    request = Request(id=name, arrival_s=now_s, prompt_tokens=prompt_tokens, max_tokens=100, tier=tier)
    return list(made.handle(RequestArrived(request=request), now_s))


def test_room_is_one_step_budget_of_outstanding_prompt() -> None:
    made = router()
    assert [type(a) for a in arrive(made, "a") + arrive(made, "b") + arrive(made, "c")] == [Dispatch, Dispatch, Hold]
    assert made.wants_tick
    (sent,) = made.handle(FirstToken(request_id="a"), 0.1)
    assert sent == Dispatch(request_id="c", instance="i0")
    assert not made.wants_tick


def test_a_slow_instance_gets_a_shorter_queue() -> None:
    made = router()
    slow = InstanceSpec(
        name="slow", step=StepTerms(base_s=0.02, prefill_s=4e-4), limits=Limits(token_budget=1000, kv_blocks=10_000)
    )
    made.handle(InstanceUp(spec=slow, generation=1), 0.0)
    sent = [a for n in range(5) for a in arrive(made, f"r{n}", prompt_tokens=300)]
    # 1,000 tokens on the fast one, 250 on the one that takes four times as long
    assert [a.instance for a in sent if isinstance(a, Dispatch)].count("slow") == 1
    assert sent[-1] == Dispatch(request_id="r4", instance="i0")


def test_room_ends_at_the_kv_share_but_an_empty_instance_takes_anything() -> None:
    made = router(kv_blocks=100)
    assert isinstance(arrive(made, "huge", prompt_tokens=1590)[0], Dispatch)
    made.handle(FirstToken(request_id="huge"), 0.1)
    assert arrive(made, "small", prompt_tokens=10) == [Hold(request_id="small")]
    (sent,) = made.handle(RequestFinished(request_id="huge", output_tokens=1), 0.2)
    assert isinstance(sent, Dispatch)


def test_the_hopeless_are_rejected_from_the_queue_where_their_tier_allows() -> None:
    made = router()
    arrive(made, "a", prompt_tokens=1000)
    assert arrive(made, "b", "fast", 100) == [Hold(request_id="b")]
    assert arrive(made, "c", "firm", 100) == [Hold(request_id="c")]
    assert made.handle(Tick(), 0.3) == []
    actions = made.handle(FirstToken(request_id="a"), 0.6)
    rejected = [a for a in actions if isinstance(a, Reject)]
    assert [(a.request_id, a.status, a.reason) for a in rejected] == [("b", 429, "cannot_meet_slo")]
    assert rejected[0].retry_after_s is not None
    assert [a.request_id for a in actions if isinstance(a, Dispatch)] == ["c"]
    patient = router(reject_hopeless=False)
    arrive(patient, "a", prompt_tokens=1000)
    arrive(patient, "b", "fast", 100)
    assert [type(a) for a in patient.handle(FirstToken(request_id="a"), 0.6)] == [Dispatch]


def test_the_retry_after_of_a_refusal_from_the_queue_is_the_forecast_drain() -> None:
    made = router(count=2, correct=False)
    for name in ("a", "b"):
        arrive(made, name, prompt_tokens=1000)
    arrive(made, "c", prompt_tokens=4000)
    assert arrive(made, "hopeless", "fast", 100) == [Hold(request_id="hopeless")]
    actions = made.handle(FirstToken(request_id="a"), 0.6)
    assert [a.request_id for a in actions if isinstance(a, Dispatch)] == ["c"]
    (refused,) = [a for a in actions if isinstance(a, Reject)]
    # prompts: b's 1,000, c's 4,000 (sent where a has begun) and the 200 tokens that are held, at 10,000/s on both;
    # outputs: 100 each of a, b and c, and a third of the tokens held, 16 at a time in steps of 10 ms on each
    prefill_s = (1000 + 4000 + 200) / 20_000
    decode_s = (300 + 200 / 3) / 3_200
    assert refused.retry_after_s == pytest.approx(max(prefill_s, decode_s))
    assert prefill_s > decode_s


def test_no_request_is_held_for_ever_whatever_its_tier() -> None:
    made = router(max_held_s=5.0)
    arrive(made, "a", prompt_tokens=1000)
    for name in ("b", "c"):
        assert arrive(made, name, "firm", 100) == [Hold(request_id=name)]
    assert made.handle(Tick(), 4.9) == []
    refused = made.handle(Tick(), 6.1)
    assert [(a.request_id, a.status, a.reason) for a in refused if isinstance(a, Reject)] == [
        ("b", 429, "queue_timeout"),
        ("c", 429, "queue_timeout"),
    ]
    assert made.held_requests == 0
    made.handle(RequestFinished(request_id="a", output_tokens=1), 7.0)
    assert made.live_requests == 0


def test_a_held_request_can_be_cancelled_and_leaves_nothing() -> None:
    made = router()
    arrive(made, "a", prompt_tokens=1000)
    arrive(made, "b")
    assert made.handle(RequestCancelled(request_id="b"), 0.1) == []
    assert made.held_requests == 0
    assert not made.wants_tick


def test_when_the_last_instance_goes_the_held_are_refused() -> None:
    made = router()
    arrive(made, "a", prompt_tokens=1000)
    arrive(made, "b")
    actions = made.handle(InstanceDown(instance="i0", reason="x", drain=True), 0.1)
    assert [(a.request_id, a.status) for a in actions if isinstance(a, Reject)] == [("b", 503)]


class Never:
    """A policy that would rather wait, always."""

    def choose(self, view: View) -> Choice:
        return Choice(None) if view.may_hold else Choice(0)


def test_the_release_bound_ends_every_wait() -> None:
    made = router(policy="tests.unit.test_routing_hold:Never", release_after=3.0, reject_hopeless=False)
    assert arrive(made, "a") == [Hold(request_id="a")]
    assert made.handle(Tick(), 14.9) == []
    assert made.handle(Tick(), 15.1) == [Dispatch(request_id="a", instance="i0")]


def test_the_gate_waits_for_better() -> None:
    """An instance whose decoders are near their bound takes no more until some have ended."""
    tier = Tier(name="fast", priority=0, ttft_s=0.5, tpot_s=0.0125, sheddable=False)
    made = Router(RouterSettings(policy="calibrated", tiers=(tier,), record_decisions=False, correct=False))
    step = StepTerms(base_s=0.01, prefill_s=1e-6, sequence_s=1e-4)
    limits = Limits(token_budget=2048, kv_blocks=100_000)
    made.handle(InstanceUp(spec=InstanceSpec(name="i", step=step, limits=limits), generation=1), 0.0)
    sent, held = 0, None
    for n in range(200):
        now = n * 0.001
        actions = arrive(made, f"r{n}", "fast", 20, now)
        if any(isinstance(a, Hold) for a in actions):
            held = f"r{n}"
            break
        sent += 1
        made.handle(FirstToken(request_id=f"r{n}"), now + 0.0005)
    assert held is not None
    assert 5 < sent < 100
    assert made.handle(Tick(), 0.1) == []
    actions = [made.handle(RequestFinished(request_id=f"r{n}", output_tokens=3), 0.12 + 0.02 * n) for n in range(5)]
    assert [a.request_id for done in actions for a in done if isinstance(a, Dispatch)] == [held]


@pytest.mark.parametrize(("tight", "passed"), [(True, True), (False, False)])
def test_those_that_would_miss_anyway_let_others_pass(tight: bool, passed: bool) -> None:
    """Three that are declined end the pass, but not if they would be late wherever they went."""

    class Stub:
        holds = True

        def choose(self, view: View) -> Choice:
            if view.request.id.startswith("stuck"):
                return Choice(None, tight=tight)
            return Choice(0)

    made = router()
    made.policy = Stub()
    for n in range(3):
        arrive(made, f"stuck{n}", "fast", 100, 0.0)
    actions = arrive(made, "free", "slow", 100, 0.02)
    assert [a.request_id for a in actions if isinstance(a, Dispatch)] == (["free"] if passed else [])


CHAT = Tier(name="chat", priority=0, ttft_s=0.5, tpot_s=0.021)
DOCUMENT = Tier(name="document", priority=0, ttft_s=2.0, tpot_s=0.1)


def stalling(bound_s: float, **options: float) -> Router:
    """One instance with thirty decoders, whom a long prompt would stall."""
    tiers = (msgspec.structs.replace(CHAT, tpot_s=bound_s), DOCUMENT)
    settings = RouterSettings(
        policy="calibrated", policy_options=options, tiers=tiers, record_decisions=False, correct=False
    )
    made = Router(settings)
    step = StepTerms(base_s=0.01, prefill_s=1e-4, sequence_s=1e-4)
    limits = Limits(token_budget=2048, kv_blocks=100_000)
    made.handle(InstanceUp(spec=InstanceSpec(name="i", step=step, limits=limits), generation=1), 0.0)
    instance = made.fleet.instances["i"]
    assert instance.cost is not None
    instance.cost.seen = True
    for n in range(30):
        running = Request(id=f"r{n}", arrival_s=0.0, prompt_tokens=20, max_tokens=500, tier="chat")
        made.fleet.charge(running, instance, cached_tokens=0, expected_output_tokens=200, now_s=0.0, tier=tiers[0])
        made.fleet.first_token(running.id, 0.0, 199)
    return made


def sent_at(made: Router) -> float:
    """When the gate lets the long prompt go, to 50 ms."""
    now = 0.0
    while not made.handle(Tick(), now):
        now += 0.05
        for n in range(30):
            made.fleet.progress(f"r{n}", 1 + int(now / 0.0135), 199 - int(now / 0.0135))
    return now


@pytest.mark.parametrize(("bound_s", "sent_s"), [(0.021, 0.5), (0.0165, 1.5)])
def test_the_gate_holds_for_long_only_where_somebody_is_near_a_bound(bound_s: float, sent_s: float) -> None:
    """A long prompt would stall thirty decoders: it waits half a second for a better moment in any case, and until its
    own deadline only if that stall would bring them near their bound."""
    made = stalling(bound_s, tail=100.0)
    assert arrive(made, "long", "document", 3_000, 0.0) == [Hold(request_id="long")]
    assert sent_at(made) == pytest.approx(sent_s, abs=0.2)


@pytest.mark.parametrize("tail", [1.0, 2.0, 3.0])
def test_the_gate_makes_no_ttft_longer_than_so_many_times_what_it_would_have_been(tail: float) -> None:
    """3,000 tokens at 0.1 ms beside steps of 13 ms: 0.35 s if sent at once, and nobody else came of late. Up to half a
    second it may become in any case."""
    made = stalling(0.0165, tail=tail)
    assert arrive(made, "long", "document", 3_000, 0.0) == [Hold(request_id="long")]
    assert sent_at(made) == pytest.approx(max(tail * 0.35, 0.5) - 0.35, abs=0.08)


def test_what_others_would_have_waited_of_late_counts_as_well() -> None:
    """A request that is short itself may be kept back for as long as the tail allows where long ones came before."""
    sent = []
    for long_before in (0, 1):
        made = stalling(0.0165, near=1.0)
        policy = made.policy
        assert isinstance(policy, Calibrated)
        for _ in range(50):
            policy._ungated.add(0.6 if long_before else 0.01)
        assert arrive(made, "long", "document", 3_000, 0.0) == [Hold(request_id="long")]
        sent.append(sent_at(made))
    assert sent[1] == pytest.approx(sent[0] + 2 * (0.6 - 0.35), abs=0.1)


def test_time_without_room_is_not_laid_to_the_gate() -> None:
    """For want of room everybody waits, under any policy: only such time is shown to the policy as its own."""
    seen: list[tuple[str, float]] = []

    class Spy:
        holds = True

        def choose(self, view: View) -> Choice:
            seen.append((view.request.id, view.no_room_s))
            return Choice(None if view.request.id == "c" and view.now_s < 0.9 else 0)

    made = router()
    made.policy = Spy()
    arrive(made, "a", prompt_tokens=1000)
    arrive(made, "b", prompt_tokens=100, now_s=0.1)
    arrive(made, "c", prompt_tokens=100, now_s=0.3)
    made.handle(FirstToken(request_id="a"), 0.5)
    made.handle(Tick(), 1.0)
    assert [(name, round(s, 6)) for name, s in seen] == [("a", 0.0), ("b", 0.4), ("c", 0.2), ("c", 0.2)]
