"""Every request ends once, and then every counter it touched is back where it was."""

import random

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from weighbridge.core.actions import Abort, Action, Dispatch, Reject
from weighbridge.core.events import (
    FirstToken,
    InstanceDown,
    InstanceUp,
    RequestArrived,
    RequestCancelled,
    RequestFailed,
    RequestFinished,
    TokensProgressed,
)
from weighbridge.core.instance import InstanceSpec
from weighbridge.core.request import Request
from weighbridge.routing.router import Router, RouterSettings

NAMES = ("a", "b", "c")


class Ledger(RuleBasedStateMachine):
    """Drives a router as a gateway would and recounts its ledger from scratch after every step."""

    def __init__(self) -> None:
        super().__init__()
        self.router = Router(RouterSettings(policy="least_tokens", seed=3))
        self.now = 0.0
        self.number = 0
        self.running: dict[str, str] = {}
        self.tokens: dict[str, int] = {}
        self.ended: set[str] = set()
        self.generation = dict.fromkeys(NAMES, 0)
        self.aborting: set[str] = set()

    def send(self, event) -> None:  # type: ignore[no-untyped-def]
        self.now += 0.01
        for action in self.router.handle(event, self.now):
            self.apply(action)

    def apply(self, action: Action) -> None:
        if isinstance(action, Dispatch):
            assert action.request_id not in self.running
            assert action.request_id not in self.ended
            self.running[action.request_id] = action.instance
            self.tokens[action.request_id] = 0
        elif isinstance(action, Reject):
            assert action.request_id not in self.running
            self.end(action.request_id)
        elif isinstance(action, Abort):
            assert self.running[action.request_id] == action.instance
            self.aborting.add(action.request_id)

    def end(self, request_id: str) -> None:
        assert request_id not in self.ended, "ended twice"
        self.ended.add(request_id)
        self.running.pop(request_id, None)
        self.aborting.discard(request_id)

    def pick(self, seed: int) -> str:
        return random.Random(seed).choice(sorted(self.running))

    @rule(name=st.sampled_from(NAMES), restart=st.booleans())
    def up(self, name: str, restart: bool) -> None:
        if restart or not self.generation[name]:
            self.generation[name] += 1
            # a restart kills what ran there: the driver sees every connection fail
            for request_id in [r for r, i in self.running.items() if i == name]:
                self.fail(request_id, retriable=self.tokens[request_id] == 0)
        self.send(InstanceUp(spec=InstanceSpec(name=name), generation=self.generation[name]))

    @rule(name=st.sampled_from(NAMES), drain=st.booleans())
    def down(self, name: str, drain: bool) -> None:
        self.send(InstanceDown(instance=name, reason="test", drain=drain))
        for request_id in sorted(self.aborting):
            self.fail(request_id, retriable=self.tokens[request_id] == 0)

    @rule(prompt=st.integers(1, 4000), budget=st.integers(1, 500), blocks=st.integers(0, 30))
    def arrive(self, prompt: int, budget: int, blocks: int) -> None:
        self.number += 1
        request = Request(
            id=f"r{self.number}",
            arrival_s=self.now,
            prompt_tokens=prompt,
            max_tokens=budget,
            prefix_hashes=tuple(range(blocks)),
        )
        self.send(RequestArrived(request=request))
        assert request.id in self.running or request.id in self.ended

    @precondition(lambda self: self.running)
    @rule(seed=st.integers(0, 1000), tokens=st.integers(1, 700))
    def progress(self, seed: int, tokens: int) -> None:
        request_id = self.pick(seed)
        if not self.tokens[request_id]:
            self.send(FirstToken(request_id=request_id))
        self.tokens[request_id] = max(self.tokens[request_id], tokens)
        self.send(TokensProgressed(request_id=request_id, output_tokens=tokens))

    @precondition(lambda self: self.running)
    @rule(seed=st.integers(0, 1000))
    def finish(self, seed: int) -> None:
        request_id = self.pick(seed)
        self.end(request_id)
        self.send(RequestFinished(request_id=request_id, output_tokens=5))

    @precondition(lambda self: self.running)
    @rule(seed=st.integers(0, 1000))
    def cancel(self, seed: int) -> None:
        request_id = self.pick(seed)
        self.end(request_id)
        self.send(RequestCancelled(request_id=request_id))

    @precondition(lambda self: self.running)
    @rule(seed=st.integers(0, 1000), retriable=st.booleans())
    def fail_one(self, seed: int, retriable: bool) -> None:
        self.fail(self.pick(seed), retriable=retriable)

    def fail(self, request_id: str, *, retriable: bool) -> None:
        self.aborting.discard(request_id)
        instance = self.running.pop(request_id)
        if not retriable:
            self.end(request_id)
        self.send(RequestFailed(request_id=request_id, instance=instance, reason="reset", retriable=retriable))
        assert request_id in self.running or request_id in self.ended

    @invariant()
    def counters_equal_a_recount(self) -> None:
        fleet = self.router.fleet
        assert self.router.live_requests == len(self.running)
        assert set(fleet.charges) == set(self.running)
        for instance in fleet:
            live = [c for c in fleet.charges.values() if c.instance is instance and c.generation == instance.generation]
            assert set(instance.charges) == {c.request.id for c in live}
            assert instance.prefill_tokens == sum(c.prefill_left for c in live)
            assert instance.decode_tokens == sum(c.decode_left for c in live)
            assert instance.kv_tokens == sum(c.kv_tokens for c in live)

    def teardown(self) -> None:
        for request_id in sorted(self.running):
            self.end(request_id)
            self.send(RequestCancelled(request_id=request_id))
        for instance in self.router.fleet:
            assert (instance.prefill_tokens, instance.decode_tokens, instance.kv_tokens) == (0, 0, 0)
            assert not instance.charges


TestLedger = Ledger.TestCase
TestLedger.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
