"""Admission: tenants and tiers in tokens, fairness, ageing, shedding, deferral, clipping, preemption, hysteresis."""

import random

import pytest

from weighbridge.core.actions import Action, Dispatch, Hold, Preempt, Reject
from weighbridge.core.events import FirstToken, InstanceUp, RequestArrived, RequestCancelled, RequestFinished, Tick
from weighbridge.core.instance import InstanceSpec, Limits, StepTerms
from weighbridge.core.request import Request, Tier
from weighbridge.routing.admission import Admission
from weighbridge.routing.candidates import MOST_POOLS
from weighbridge.routing.fairness import Fairness
from weighbridge.routing.lengths import MOST_KEYS
from weighbridge.routing.pump import MOST_IDLE
from weighbridge.routing.router import Router
from weighbridge.routing.settings import RouterSettings, TenantLimit

STEP = StepTerms(base_s=0.01, prefill_s=1e-4)
FAST = Tier(name="interactive", priority=0, ttft_s=0.5, may_preempt=True, sheddable=False)
PLAIN = Tier(name="standard", priority=10, ttft_s=5.0)
BATCH = Tier(name="batch", priority=20, max_wait_s=10.0)


def router(
    *, tiers: tuple[Tier, ...] = (FAST, PLAIN, BATCH), spec: dict[str, object] | None = None, **fields: object
) -> Router:
    settings: dict[str, object] = {"policy": "least_tokens", "dispatch": "hold", "record_decisions": False, **fields}
    made = Router(RouterSettings(tiers=tiers, **settings))  # type: ignore[arg-type]
    limits = Limits(token_budget=1000, kv_blocks=10_000)
    made.handle(InstanceUp(spec=InstanceSpec(name="i", step=STEP, limits=limits, **(spec or {})), generation=1), 0.0)  # type: ignore[arg-type]
    return made


def arrive(made: Router, name: str, tier: str = "standard", now_s: float = 0.0, **fields: object) -> list[Action]:
    values: dict[str, object] = {"prompt_tokens": 1000, "max_tokens": 100, **fields}
    return made.handle(RequestArrived(request=Request(id=name, arrival_s=now_s, tier=tier, **values)), now_s)  # type: ignore[arg-type]


def finish(made: Router, name: str, now_s: float) -> list[Action]:
    return [
        *made.handle(FirstToken(request_id=name), now_s),
        *made.handle(RequestFinished(request_id=name, output_tokens=100), now_s),
    ]


def sent(actions: list[Action]) -> list[str]:
    return [a.request_id for a in actions if isinstance(a, Dispatch)]


def refused(actions: list[Action]) -> list[tuple[str, int, str]]:
    return [(a.request_id, a.status, a.reason) for a in actions if isinstance(a, Reject)]


def test_a_tenant_spends_its_bucket_and_is_told_when_to_come_back() -> None:
    made = router(tenants={"a": TenantLimit(tokens_per_s=100.0, burst_tokens=2500)})
    for name in ("r1", "r2"):
        assert not refused(arrive(made, name, tenant="a"))
    (refusal,) = arrive(made, "r3", tenant="a", now_s=1.0)
    assert isinstance(refusal, Reject)
    assert (refusal.status, refusal.reason) == (429, "tenant_rate")
    # 2 * 1100 spent of 2500, 100 refilled, 1100 asked
    assert refusal.retry_after_s == pytest.approx((1100 - 400) / 100)
    assert not refused(arrive(made, "other", tenant="b", now_s=1.0))
    assert not refused(arrive(made, "r4", tenant="a", now_s=1.0 + 7.01))
    assert made.admission.counts["standard", "tenant_rate"] == 1


def test_a_tenant_has_a_bulkhead_of_concurrent_requests() -> None:
    made = router(tenants={"*": TenantLimit(max_requests=2)})
    arrive(made, "r1", tenant="a")
    arrive(made, "r2", tenant="a")
    assert refused(arrive(made, "r3", tenant="a")) == [("r3", 429, "tenant_concurrency")]
    assert not refused(arrive(made, "r4", tenant="b"))
    made.handle(RequestCancelled(request_id="r1"), 0.1)
    assert not refused(arrive(made, "r5", tenant="a", now_s=0.1))


def test_held_and_running_tokens_are_bounded_by_tier() -> None:
    tight = Tier(name="batch", priority=20, max_held_tokens=2500, max_running_tokens=1500)
    made = router(tiers=(FAST, PLAIN, tight))
    assert sent(arrive(made, "b1", "batch")) == ["b1"]
    made.handle(FirstToken(request_id="b1"), 0.1)
    # there is room, but a second one would exceed the tier's 1,500 running tokens
    assert arrive(made, "b2", "batch", 0.2) == [Hold(request_id="b2")]
    assert arrive(made, "b3", "batch", 0.2) == [Hold(request_id="b3")]
    assert refused(arrive(made, "b4", "batch", 0.2)) == [("b4", 429, "tier_queue_full")]
    assert sent(arrive(made, "s", "standard", 0.3)) == ["s"]
    made.handle(FirstToken(request_id="s"), 0.4)
    assert sent(made.handle(RequestFinished(request_id="b1", output_tokens=9), 0.5)) == ["b2"]


def test_the_least_urgent_are_shed_first() -> None:
    made = router(max_held_tokens=2500)
    arrive(made, "running")
    arrive(made, "b", "batch")
    arrive(made, "s", "standard")
    # a third would be too much: the batch request makes way, and then the standard one, never the interactive
    assert refused(arrive(made, "i1", "interactive")) == [("b", 429, "queue_full")]
    assert refused(arrive(made, "i2", "interactive")) == [("s", 429, "queue_full")]
    assert not refused(arrive(made, "i3", "interactive"))
    assert made.held_requests == 3
    assert made.admission.held_total == 3 * 1100


def test_an_aged_request_is_served_though_more_urgent_ones_keep_coming() -> None:
    made = router()
    arrive(made, "running")
    arrive(made, "old", "batch")
    order, running = [], "running"
    for n in range(20):
        now = 11.0 + n
        arrive(made, f"s{n}", "standard", now)
        arrive(made, f"t{n}", "standard", now)
        (running,) = sent(finish(made, running, now))
        order.append(running)
    assert order.index("old") == 2, "the fourth to be served, after its ten seconds"


def test_a_tenant_that_floods_waits_behind_one_that_does_not() -> None:
    made = router(fair_tokens=2000)
    arrive(made, "running", tenant="flood")
    for n in range(20):
        arrive(made, f"f{n}", tenant="flood", now_s=0.001 * n)
    for n in range(3):
        arrive(made, f"s{n}", tenant="small", now_s=0.1 + 0.001 * n)
    order, running = [], "running"
    for n in range(8):
        (running,) = sent(finish(made, running, 0.2 + 0.01 * n))
        order.append(running)
    # by deadline all twenty of the flood would go first; by counters the two take turns
    assert [name[0] for name in order] == ["f", "f", "s", "f", "s", "f", "s", "f"]


def test_virtual_counters_lift_a_returning_tenant() -> None:
    fairness = Fairness()
    fairness.arrived("a")
    fairness.served("a", 1000, 100, 1.0)
    assert fairness.counter("a") == 1200
    fairness.arrived("b")
    assert fairness.counter("b") == 1200, "idleness earns no credit"
    fairness.served("b", 100, 0, 0.5)
    assert fairness.counter("b") == 1400
    assert fairness.behind(["a", "b"], 100.0) == ["a"]
    assert fairness.behind(["a", "b"], 200.0) == ["a", "b"]
    fairness.ended("a")
    fairness.arrived("a")
    assert fairness.counter("a") == 1400
    for tenant in ("a", "b"):
        fairness.ended(tenant)
    for n in range(5000):
        fairness.arrived(f"t{n}")
        fairness.served(f"t{n}", 10, 0, 1.0)
        fairness.ended(f"t{n}")
    assert len(fairness) < 1200


def test_defer_before_reject_where_the_client_allows_it() -> None:
    made = router()
    arrive(made, "running")
    arrive(made, "rigid", "standard", prompt_tokens=100)
    arrive(made, "patient", "standard", prompt_tokens=100, allow=("defer",))
    actions = made.handle(Tick(), 5.1)
    assert refused(actions) == [("rigid", 429, "cannot_meet_slo")]
    actions = made.handle(FirstToken(request_id="running"), 5.2)
    assert sent(actions) == ["patient"]
    assert made.admission.counts["standard", "deferred"] == 1
    assert made.admission.counts["standard", "cannot_meet_slo"] == 1


def test_overload_clips_where_allowed_and_has_hysteresis() -> None:
    made = router(overload_enter_s=2.0, overload_leave_s=0.5)
    arrive(made, "running", "batch", prompt_tokens=5000)
    for n in range(30):
        arrive(made, f"r{n}", "batch", prompt_tokens=1000, max_tokens=4000, allow=("clip",))
    assert not made.admission.overloaded, "it looks four times a second"
    made.handle(Tick(), 0.3)
    assert made.admission.overloaded
    actions = finish(made, "running", 0.4)
    clipped = [a.max_tokens for a in actions if isinstance(a, Dispatch)]
    assert clipped == [round(1.5 * 256)]
    assert made.admission.counts["batch", "clipped"] == 1


def test_overload_does_not_flap() -> None:
    made = router(overload_enter_s=1.0, overload_leave_s=0.5)
    admission, instances = made.admission, list(made.fleet)
    turns = []
    # sixteen decoders give 1,600 tokens per second, a third of what is held is output: a second of work is 4,800
    for held in (4_000, 5_000, 4_000, 5_000, 3_000, 2_000, 3_000, 4_000, 5_000):
        admission.held_total = held
        admission.look(instances)
        turns.append(admission.overloaded)
    assert turns == [False, True, True, True, True, False, False, False, True]


def test_preempt_the_least_urgent_on_an_engine_that_can() -> None:
    made = router(spec={"preemption": ("recompute", "swap"), "takes_priority": True})
    made.handle(FirstToken(request_id="x"), 0.0)
    arrive(made, "b", "batch", prompt_tokens=100)
    made.handle(FirstToken(request_id="b"), 0.01)
    fleet_limit = Limits(token_budget=1000, kv_blocks=10_000, max_sequences=1)
    spec = InstanceSpec(name="i", step=STEP, limits=fleet_limit, preemption=("recompute", "swap"), takes_priority=True)
    made.handle(InstanceUp(spec=spec, generation=1), 0.02)
    assert arrive(made, "s", "standard", 0.03) == [Hold(request_id="s")]
    first, second = arrive(made, "i", "interactive", 0.04)
    assert first == Preempt(request_id="b", instance="i", mode="swap")
    assert isinstance(second, Dispatch)
    assert (second.request_id, second.priority) == ("i", 540)
    assert made.admission.counts["batch", "preempted"] == 1
    # it is paused once, not again and again
    made.handle(FirstToken(request_id="i"), 0.05)
    assert arrive(made, "j", "interactive", 0.06) == [Hold(request_id="j")]


def test_less_urgent_tiers_leave_head_room_on_engines_that_cannot_preempt() -> None:
    made = router()
    arrive(made, "a", "batch", prompt_tokens=450)
    arrive(made, "b", "batch", prompt_tokens=460)
    # 910 of 1,000 are owed: beyond the nine tenths that batch may use, within what interactive may
    assert arrive(made, "c", "batch", prompt_tokens=10) == [Hold(request_id="c")]
    assert sent(arrive(made, "d", "interactive", prompt_tokens=10)) == ["d"]


def test_nothing_is_left_counted_after_all_have_ended() -> None:
    made = router(tenants={"*": TenantLimit(tokens_per_s=1e6, max_requests=50)})
    for n in range(12):
        arrive(made, f"r{n}", ("interactive", "standard", "batch")[n % 3], tenant=f"t{n % 2}")
    for n in range(12):
        made.handle(RequestCancelled(request_id=f"r{n}"), 1.0)
    admission: Admission = made.admission
    assert admission.held_total == 0
    assert set(admission.held_tokens.values()) == {0}
    assert set(admission.running_tokens.values()) <= {0}
    assert not admission.fairness._active
    assert all(bucket.requests == 0 for bucket in admission._buckets.values())


def test_late_ones_are_shed_before_more_urgent_ones() -> None:
    late = Tier(name="batch", priority=20, ttft_s=1.0)
    made = router(tiers=(FAST, PLAIN, late), max_held_tokens=2500, reject_hopeless=False)
    arrive(made, "running", "batch")
    arrive(made, "b1", "batch")
    arrive(made, "b2", "batch", 0.1)
    made.handle(Tick(), 10.0)
    assert refused(arrive(made, "s", "standard", 10.0)) == [("b2", 429, "queue_full")]
    made.handle(RequestCancelled(request_id="s"), 10.1)
    made.handle(RequestCancelled(request_id="b1"), 10.1)
    arrive(made, "s1", "standard", 10.2)
    arrive(made, "s2", "standard", 10.2)
    assert refused(arrive(made, "s3", "standard", 10.3)) != []
    assert made.held_requests == 2


def test_of_many_tenants_the_latest_to_come_is_shed() -> None:
    made = router(max_held_tokens=4000)
    arrive(made, "running")
    for n, tenant in enumerate("cab"):
        arrive(made, tenant, "batch", 0.1 * n, tenant=tenant)
    assert refused(arrive(made, "s", "standard", 1.0)) == [("b", 429, "queue_full")]


def test_whoever_a_deferred_request_displaces_is_answered() -> None:
    """Here itself: it passes from a lane whose last is not to be shed to one where it is the last."""
    firm = Tier(name="firm", priority=10, ttft_s=60.0, sheddable=False, max_running_tokens=1200)
    made = router(tiers=(FAST, PLAIN, firm, BATCH), max_held_tokens=2500)
    arrive(made, "running", "firm")
    arrive(made, "patient", allow=("defer",))
    for n in range(2):
        assert not refused(arrive(made, f"f{n}", "firm"))
    assert refused(made.handle(Tick(), 6.0)) == [("patient", 429, "queue_full")]
    assert made.live_requests == 3
    assert made.admission.held_total == 2 * 1100


def test_a_deferred_request_lends_its_bounds_to_no_other_of_its_tier() -> None:
    """On an instance sums are kept by the tier that is served, not by the one that was asked for."""
    made = router(tiers=(FAST, Tier(name="standard", priority=10, ttft_s=5.0, tpot_s=0.05), BATCH))
    arrive(made, "running", "interactive")
    arrive(made, "patient", "standard", allow=("defer",))
    made.handle(Tick(), 5.1)
    assert sent(finish(made, "running", 6.0)) == ["patient"]
    finish(made, "patient", 7.0)
    arrive(made, "strict", "standard", 8.0)
    arrive(made, "unknown", "gold", 8.0)
    groups = made.fleet.instances["i"].groups
    assert set(groups) == {"interactive", "batch", "standard"}
    assert (groups["standard"].tpot_s, groups["batch"].tpot_s) == (0.05, None)


class SearchedFairness:
    """The same counters, the least of them found by a search through all."""

    def __init__(self) -> None:
        self.counters: dict[str, float] = {}
        self.active: dict[str, int] = {}
        self.floor = 0.0

    def arrived(self, tenant: str) -> None:
        self.active[tenant] = self.active.get(tenant, 0) + 1
        if self.active[tenant] == 1:
            self.counters[tenant] = max(self.counters.get(tenant, 0.0), self.least())

    def ended(self, tenant: str) -> None:
        self.active[tenant] -= 1
        if not self.active[tenant]:
            self.floor = self.least(and_of=tenant)
            del self.active[tenant]
            if self.counters[tenant] <= self.floor:
                del self.counters[tenant]

    def served(self, tenant: str, tokens: float) -> None:
        if tenant in self.counters:
            self.counters[tenant] += tokens

    def least(self, and_of: str = "") -> float:
        busy = [t for t, count in self.active.items() if count or t == and_of]
        return min((self.counters[t] for t in busy if t in self.counters), default=self.floor)


@pytest.mark.parametrize("seed", range(5))
def test_counters_are_those_of_a_search_through_all(seed: int) -> None:
    rng = random.Random(seed)
    fairness, searched = Fairness(), SearchedFairness()
    for _ in range(3000):
        tenant = rng.choice("abcdefghijklmnop")
        act, active = rng.random(), searched.active.get(tenant, 0)
        if act < 0.35:
            fairness.arrived(tenant)
            searched.arrived(tenant)
        elif act < 0.65 and active:
            fairness.ended(tenant)
            searched.ended(tenant)
        elif active:
            prompt, output, weight = rng.randrange(100), rng.randrange(-80, 100), rng.choice((0.5, 1.0, 4.0))
            fairness.served(tenant, prompt, output, weight)
            searched.served(tenant, (prompt + 2 * output) / weight)
        assert fairness.least() == searched.least()
        assert [fairness.counter(t) for t in "abcdefghijklmnop"] == [
            searched.counters.get(t, 0.0) for t in "abcdefghijklmnop"
        ]


@pytest.mark.parametrize("busy", [False, True])
def test_model_names_that_clients_invent_leave_nothing(busy: bool) -> None:
    """Where an engine tells no models, any name is served."""
    made = router(policy="calibrated")
    if busy:
        arrive(made, "running", "interactive", model="real")  # so that the others are held, each in its own queue
    for n in range(10_000):
        name = f"m{n}"
        arrive(made, name, model=name, now_s=n * 1e-6)
        made.handle(RequestCancelled(request_id=name), n * 1e-6)
    for n in range(300):
        arrive(made, f"q{n}", model=f"q{n}", now_s=0.02)
        finish(made, f"q{n}", 0.03)
    assert made.live_requests == int(busy)
    pump, placing = made._pump, made._placing
    assert len(pump._held) <= MOST_IDLE + 2
    assert len(pump._handing_off) <= MOST_IDLE + 2
    assert len(placing.candidates._pools) <= MOST_POOLS
    assert len(placing.lengths._tables) <= MOST_KEYS
    assert len(placing.lengths._complete) <= MOST_KEYS
    assert len(made.admission.fairness) <= 1


def test_a_queue_of_many_models_that_hold_is_kept_whole() -> None:
    made = router(policy="least_tokens")
    arrive(made, "running")
    for n in range(100):
        arrive(made, f"r{n}", model=f"m{n}", prompt_tokens=10)
    assert made.held_requests + len(made.fleet.charges) == 101
    out: list[str] = []
    for n in range(101):
        for request_id in list(made.fleet.charges):
            out += sent(finish(made, request_id, 1.0 + n))
    assert made.live_requests == 0
