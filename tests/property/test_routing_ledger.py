"""Every request ends once, and then every counter it touched is back where it was."""

import random

from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from weighbridge.core.actions import Abort, Action, Dispatch, Hold, Reject
from weighbridge.core.events import (
    FirstToken,
    InstanceDown,
    InstanceGone,
    InstanceUp,
    PrefillFinished,
    RequestAdopted,
    RequestArrived,
    RequestCancelled,
    RequestFailed,
    RequestFinished,
    Tick,
    TokensProgressed,
)
from weighbridge.core.instance import InstanceSpec, Limits, Role
from weighbridge.core.request import DEFAULT_TIERS, Request
from weighbridge.routing.router import Router, RouterSettings


def served_as(tier: str) -> str:
    """A tier that is not defined is served as the default one."""
    return tier if tier in {each.name for each in DEFAULT_TIERS} else "standard"


class Ledger(RuleBasedStateMachine):
    """Drives a router as a gateway would and recounts its ledger from scratch after every step."""

    roles: dict[str, Role] = {"a": "mixed", "b": "mixed", "c": "mixed"}  # noqa: RUF012
    settings = RouterSettings(policy="least_tokens", seed=3)
    limits = Limits()

    def __init__(self) -> None:
        super().__init__()
        self.router = Router(type(self).settings)
        self.now = 0.0
        self.number = 0
        self.held: set[str] = set()
        self.running: dict[str, Dispatch] = {}
        """By request: its last dispatch; removed when its leg ended, so `parked` and `running` do not overlap."""
        self.parked: dict[str, str] = {}
        """Prefill legs that are done: where their KV waits."""
        self.tokens: dict[str, int] = {}
        self.ended: set[str] = set()
        self.generation = dict.fromkeys(self.roles, 0)
        self.alive: set[str] = set()
        self.removed: set[str] = set()
        self.aborting: dict[str, str] = {}

    def send(self, event) -> None:  # type: ignore[no-untyped-def]
        self.now += 0.01
        for action in self.router.handle(event, self.now):
            self.apply(action)

    def apply(self, action: Action) -> None:
        request_id = action.request_id
        assert request_id not in self.ended
        if isinstance(action, Dispatch):
            assert request_id not in self.running
            assert self.alive >= {action.instance}
            role = self.roles[action.instance]
            wanted = {"whole": "mixed", "prefill": "prefill", "decode": "decode", "both": "decode"}[action.leg]
            # with nobody left to start a request, a decode instance computes it whole
            alone = action.leg == "whole" and {self.roles[name] for name in self.alive} == {"decode"}
            # the last try of a disaggregated request needs no pair: an instance that can do it alone gets it whole
            last = action.leg == "whole" and action.attempt == type(self).settings.max_attempts
            assert role in ({"decode", "mixed"} if last else {"decode" if alone else wanted})
            parked = self.parked.pop(request_id, None)
            assert (action.leg == "decode") == (parked is not None)
            if action.leg == "decode":
                assert action.prefill_instance == parked
            if action.leg == "both":
                assert self.roles[str(action.prefill_instance)] == "prefill"
            self.held.discard(request_id)
            self.running[request_id] = action
            self.tokens[request_id] = 0
        elif isinstance(action, Hold):
            assert request_id not in self.running
            self.held.add(request_id)
        elif isinstance(action, Reject):
            assert request_id not in self.running
            self.end(request_id)
        elif isinstance(action, Abort):
            self.aborting[request_id] = action.instance

    def end(self, request_id: str) -> None:
        assert request_id not in self.ended, "ended twice"
        self.ended.add(request_id)
        for place in (self.running, self.parked, self.aborting):
            place.pop(request_id, None)
        self.held.discard(request_id)

    def pick(self, seed: int, *, prefill: bool = False) -> str | None:
        wanted = [r for r, d in self.running.items() if prefill == (d.leg == "prefill")]
        return random.Random(seed).choice(sorted(wanted)) if wanted else None

    @rule(seed=st.integers(0, 1000), restart=st.booleans())
    def up(self, seed: int, restart: bool) -> None:
        name = random.Random(seed).choice(sorted(self.roles))
        if restart or not self.generation[name]:
            self.generation[name] += 1
            # a restart kills what ran there: the driver sees every connection fail
            self.alive.discard(name)
            self.send(InstanceDown(instance=name, reason="restart"))
            self.fail_aborted()
        self.alive.add(name)
        self.removed.discard(name)
        spec = InstanceSpec(name=name, role=self.roles[name], limits=self.limits)
        self.send(InstanceUp(spec=spec, generation=self.generation[name]))

    @rule(seed=st.integers(0, 1000), drain=st.booleans())
    def down(self, seed: int, drain: bool) -> None:
        name = random.Random(seed).choice(sorted(self.roles))
        self.alive.discard(name)
        self.send(InstanceDown(instance=name, reason="test", drain=drain))
        self.fail_aborted()

    @rule(seed=st.integers(0, 1000), abort=st.booleans())
    def gone(self, seed: int, abort: bool) -> None:
        """Out of the fleet for good: at once, or when what runs there has ended."""
        name = random.Random(seed).choice(sorted(self.roles))
        self.alive.discard(name)
        if abort:
            self.send(InstanceDown(instance=name, reason="removed"))
            self.fail_aborted()
        self.send(InstanceGone(instance=name))
        self.removed.add(name)

    def fail_aborted(self) -> None:
        for request_id, instance in sorted(self.aborting.items()):
            self.fail(request_id, instance, retriable=self.tokens.get(request_id, 0) == 0)

    @rule(
        prompt=st.integers(1, 4000),
        budget=st.integers(1, 500),
        blocks=st.integers(0, 30),
        branch=st.integers(0, 3),
        tier=st.sampled_from(["interactive", "standard", "batch", "unheard-of"]),
    )
    def arrive(self, prompt: int, budget: int, blocks: int, branch: int, tier: str) -> None:
        self.number += 1
        request = Request(
            id=f"r{self.number}",
            arrival_s=self.now,
            prompt_tokens=prompt,
            max_tokens=budget,
            prefix_hashes=tuple(range(min(blocks, 10))) + tuple(100 * branch + n for n in range(10, blocks)),
            tier=tier,
        )
        self.send(RequestArrived(request=request))
        assert request.id in self.running or request.id in self.ended or request.id in self.held

    @rule(seed=st.integers(0, 1000), prompt=st.integers(1, 4000), tokens=st.integers(0, 700))
    def adopt(self, seed: int, prompt: int, tokens: int) -> None:
        usable = sorted(name for name in self.alive if self.roles[name] != "prefill")
        if not usable:
            return
        self.number += 1
        name = random.Random(seed).choice(usable)
        request = Request(
            id=f"r{self.number}",
            arrival_s=self.now - 1.0,
            prompt_tokens=prompt,
            max_tokens=300,
            prefix_hashes=tuple(range(seed % 20)),
        )
        self.running[request.id] = Dispatch(request_id=request.id, instance=name)
        self.tokens[request.id] = tokens
        self.send(RequestAdopted(request=request, instance=name, output_tokens=tokens))
        assert self.router.fleet.charges[request.id].output_tokens == tokens

    @rule(steps=st.integers(1, 3), seconds=st.sampled_from([0.05, 0.05, 1.0, 30.0]))
    def tick(self, steps: int, seconds: float) -> None:
        for _ in range(steps):
            self.now += seconds
            self.send(Tick())

    @rule(seed=st.integers(0, 1000), tokens=st.integers(1, 700))
    def progress(self, seed: int, tokens: int) -> None:
        request_id = self.pick(seed)
        if request_id is None:
            return
        if not self.tokens[request_id]:
            self.send(FirstToken(request_id=request_id))
        self.tokens[request_id] = max(self.tokens[request_id], tokens)
        self.send(TokensProgressed(request_id=request_id, output_tokens=tokens))

    @rule(seed=st.integers(0, 1000))
    def prefill_done(self, seed: int) -> None:
        request_id = self.pick(seed, prefill=True)
        if request_id is not None:
            self.parked[request_id] = self.running.pop(request_id).instance
            self.send(PrefillFinished(request_id=request_id))

    @rule(seed=st.integers(0, 1000))
    def finish(self, seed: int) -> None:
        request_id = self.pick(seed)
        if request_id is not None:
            self.end(request_id)
            self.send(RequestFinished(request_id=request_id, output_tokens=5))

    @rule(seed=st.integers(0, 1000))
    def cancel(self, seed: int) -> None:
        anywhere = sorted({*self.running, *self.parked, *self.held})
        if anywhere:
            request_id = random.Random(seed).choice(anywhere)
            self.end(request_id)
            self.send(RequestCancelled(request_id=request_id))

    @rule(seed=st.integers(0, 1000), retriable=st.booleans(), prefill=st.booleans())
    def fail_one(self, seed: int, retriable: bool, prefill: bool) -> None:
        request_id = self.pick(seed, prefill=prefill)
        if request_id is not None:
            self.fail(request_id, self.running[request_id].instance, retriable=retriable)

    def fail(self, request_id: str, instance: str, *, retriable: bool) -> None:
        for place in (self.aborting, self.running, self.parked):
            place.pop(request_id, None)
        if not retriable:
            self.end(request_id)
        self.send(RequestFailed(request_id=request_id, instance=instance, reason="reset", retriable=retriable))
        assert request_id in self.running or request_id in self.ended or request_id in self.held

    @invariant()
    def counters_equal_a_recount(self) -> None:
        fleet = self.router.fleet
        assert self.router.live_requests == len({*self.running, *self.parked, *self.held})
        assert self.router.held_requests == len(self.held)
        assert self.router.wants_tick == bool(self.held)
        assert set(fleet.charges) == set(self.running)
        everything = [*fleet.charges.values(), *fleet.sources.values()]
        assert self.removed.isdisjoint(fleet.instances.keys() - fleet.leaving)
        assert self.removed & fleet.instances.keys() == fleet.leaving
        assert {c.instance for c in everything if c.live} <= set(fleet)
        indexes = [instance.index for instance in fleet]
        assert indexes == sorted(set(indexes))
        assert fleet.places.count <= len(self.roles)
        held = {block for instance in fleet for block in (*instance.prefix._blocks, *instance.prefix._pending)}
        assert fleet.prefix_holders.keys() == held
        for block, bits in fleet.prefix_holders.items():
            assert bits == sum(1 << i.index for i in fleet if block in i.prefix._blocks or block in i.prefix._pending)
        for instance in fleet:
            live = [c for c in everything if c.instance is instance and c.generation == instance.generation]
            decoding = [c for c in live if c.first_token_s is not None]
            assert set(instance.charges) == {c.request.id for c in live}
            assert set(instance.prefilling) == {c.request.id for c in live if c.prefill_left}
            assert instance.prefill_tokens == sum(c.prefill_left for c in live)
            assert instance.decode_tokens == sum(c.decode_left for c in live)
            assert instance.kv_tokens == sum(c.kv_tokens for c in live)
            assert instance.prompt_tokens == sum(c.request.prompt_tokens for c in live)
            sharing = [c.request.prefix_hashes for c in live]
            distinct = {block for blocks in sharing for block in blocks}
            size = 16
            assert instance.shared_kv.tokens == size * (sum(map(len, sharing)) - len(distinct))
            assert instance.decoding == len(decoding)
            for tier, group in instance.groups.items():
                members = [c for c in live if served_as(c.request.tier) == tier and c.group is not None]
                started = [c.first_token_s for c in members if c.first_token_s is not None]
                assert (group.count, group.decoding) == (len(members), len(started))
                assert group.generated == sum(c.output_tokens for c in members)
                assert group.remaining == sum(c.decode_left for c in members)
                assert group.first_us == sum(round(s * 1e6) for s in started)
            assert instance.decoding_kv_tokens == sum(c.kv_tokens for c in decoding)

    def teardown(self) -> None:
        for request_id in sorted({*self.running, *self.parked, *self.held}):
            if request_id not in self.ended:
                self.end(request_id)
                self.send(RequestCancelled(request_id=request_id))
        assert self.router.live_requests == 0
        assert not self.router.fleet.leaving
        for instance in self.router.fleet:
            assert (instance.prefill_tokens, instance.decode_tokens, instance.kv_tokens) == (0, 0, 0)
            assert (instance.decoding, instance.decoding_kv_tokens) == (0, 0)
            assert instance.shared_kv.tokens == 0
            assert not instance.charges
            assert not instance.prefilling


class Holding(Ledger):
    """Requests wait in the router: three small instances, room for little."""

    settings = RouterSettings(policy="least_tokens", dispatch="hold", seed=3)
    limits = Limits(token_budget=512, kv_blocks=300)


class Late(Ledger):
    """Disaggregated, decode bound at hand-off, beside one mixed instance."""

    roles: dict[str, Role] = {"m": "mixed", "p1": "prefill", "p2": "prefill", "d1": "decode", "d2": "decode"}  # noqa: RUF012
    settings = RouterSettings(policy="round_robin", seed=3)


class LateHolding(Late):
    """The same with both queues."""

    settings = RouterSettings(policy="least_requests", dispatch="hold", seed=3)
    limits = Limits(token_budget=512, kv_blocks=300)


class Early(Late):
    """Disaggregated, both instances bound at once."""

    settings = RouterSettings(policy="least_tokens", binding="early", seed=3)


TestLedger = Ledger.TestCase
TestHolding = Holding.TestCase
TestLate = Late.TestCase
TestLateHolding = LateHolding.TestCase
TestEarly = Early.TestCase
for case in (TestLedger, TestHolding, TestLate, TestLateHolding, TestEarly):
    case.settings = hypothesis_settings(max_examples=40, stateful_step_count=40, deadline=None)
