"""Which observations the refinement takes from the router's events, and what it tells the router."""

from __future__ import annotations

import pytest

from weighbridge.core.actions import Dispatch
from weighbridge.core.events import (
    Event,
    FirstToken,
    InstanceUp,
    ProfileUpdated,
    RequestArrived,
    RequestCancelled,
    RequestFinished,
    TokensProgressed,
)
from weighbridge.core.instance import InstanceSpec, StepTerms
from weighbridge.core.request import Request
from weighbridge.cost.online import OnlineCost
from weighbridge.cost.step import attended_tokens, step_seconds
from weighbridge.routing.refinement import Refinement

STEP = StepTerms(base_s=0.01, prefill_s=1e-3, sequence_s=2e-3)


class World:
    """One instance `a` that costs STEP times `factor`; requests are driven by hand."""

    def __init__(self, factor: float = 1.0, step: StepTerms | None = STEP) -> None:
        self.refinement = Refinement()
        self.factor = factor
        self.now = 0.0
        self.updates: list[ProfileUpdated] = []
        self.count = 0
        self.see(InstanceUp(spec=InstanceSpec(name="a", step=step, error=0.05), generation=1))

    @property
    def cost(self) -> OnlineCost:
        cost = self.refinement.cost("a")
        assert cost is not None
        return cost

    def see(self, event: Event, *actions: Dispatch) -> None:
        self.updates += self.refinement.observe(event, actions, self.now)

    def dispatch(self, prompt: int = 100) -> str:
        self.count += 1
        name = f"r{self.count}"
        request = Request(id=name, arrival_s=self.now, prompt_tokens=prompt, max_tokens=64)
        self.see(RequestArrived(request=request), Dispatch(request_id=name, instance="a"))
        return name

    def lone(self, prompt: int = 100, output: int = 20, cached: int | None = None) -> None:
        """A request that is alone from dispatch to its end."""
        name = self.dispatch(prompt)
        computed = prompt - (cached or 0)
        self.now += self.factor * step_seconds(
            STEP, prefill_tokens=computed, attended_tokens=attended_tokens(0, computed)
        )
        self.see(FirstToken(request_id=name))
        self.now += (output - 1) * self.factor * step_seconds(STEP, sequences=1)
        self.see(RequestFinished(request_id=name, output_tokens=output, prompt_tokens=prompt, cached_tokens=cached))
        self.now += 1.0

    def counts(self) -> tuple[int, int]:
        return self.cost.factors["prefill"].count, self.cost.factors["decode"].count


def test_lone_requests_give_both_kinds_and_the_first_is_taken_for_cold() -> None:
    world = World()
    world.lone()
    assert world.counts() == (0, 0)
    assert world.cost.excluded > 0
    world.lone()
    world.lone(cached=40)
    assert world.counts() == (2, 2)
    assert world.cost.step.base_s == pytest.approx(STEP.base_s, rel=1e-6)
    assert world.cost.step.prefill_s == pytest.approx(STEP.prefill_s, rel=1e-6)


def test_a_request_that_found_others_or_was_joined_gives_no_prefill() -> None:
    world = World()
    world.lone()
    first, second = world.dispatch(), world.dispatch()
    for name in (first, second):
        world.now += 0.3
        world.see(FirstToken(request_id=name))
    for name in (first, second):
        world.now += 0.1
        world.see(RequestFinished(request_id=name, output_tokens=9, prompt_tokens=100))
    assert world.counts() == (0, 0), "the batch changed under every one of them"


def test_a_batch_that_stays_together_is_observed_at_its_own_width() -> None:
    world = World()
    world.lone()
    names = [world.dispatch() for _ in range(3)]
    for name in names:
        world.now += 0.1
        world.see(FirstToken(request_id=name))
    world.now += 2 * step_seconds(STEP, sequences=3)
    for name in names:
        world.see(TokensProgressed(request_id=name, output_tokens=3))
    world.now += 10 * step_seconds(STEP, sequences=3)
    for name in names:
        world.see(TokensProgressed(request_id=name, output_tokens=13))
    assert world.counts() == (0, 1), "one request speaks for the batch"
    assert world.cost.step.sequence_s == pytest.approx(STEP.sequence_s, rel=1e-6)


def test_a_cancelled_request_gives_nothing_and_leaves_nothing() -> None:
    world = World()
    world.lone()
    name = world.dispatch()
    world.see(RequestCancelled(request_id=name))
    world.see(FirstToken(request_id=name))
    assert world.counts() == (0, 0)
    world.lone()
    assert world.counts() == (1, 1)


def test_a_throttle_is_told_to_the_router_within_a_minute_of_light_traffic() -> None:
    world = World()
    for _ in range(20):
        world.lone()
    assert not world.updates
    world.factor, began = 2.0, world.now
    while not world.updates:
        world.lone()
        assert world.now - began < 60.0
    world.lone()
    for _ in range(20):
        world.lone()
    update = world.updates[-1]
    assert world.cost.level == "online"
    assert update.step is not None
    assert update.step.base_s == pytest.approx(2 * STEP.base_s, rel=0.05)
    assert update.step.prefill_s == pytest.approx(2 * STEP.prefill_s, rel=0.05)
    assert update.error is not None
    assert update.error > 0.05


def test_own_updates_change_nothing_and_a_new_calibration_starts_anew() -> None:
    world = World()
    world.factor = 2.0
    for _ in range(20):
        world.lone()
    before = world.cost
    assert before.level == "online"
    for update in world.updates:
        if update == world.updates[-1]:
            world.see(update)
    assert world.cost is before
    world.see(ProfileUpdated(instance="a", step=StepTerms(base_s=0.02, prefill_s=2e-3, sequence_s=4e-3), error=0.05))
    assert world.cost is not before
    assert world.cost.level == "profile"
    world.see(ProfileUpdated(instance="a"))
    assert world.refinement.cost("a") is None


def test_an_instance_of_which_nothing_is_known_gets_an_online_estimate() -> None:
    world = World(step=None)
    assert world.refinement.cost("a") is None
    for _ in range(8):
        world.lone(prompt=60)
    names = [world.dispatch() for _ in range(2)]
    for name in names:
        world.now += 0.2
        world.see(FirstToken(request_id=name))
    world.now += 20 * step_seconds(STEP, sequences=2)
    for name in names:
        world.see(TokensProgressed(request_id=name, output_tokens=21))
    assert world.cost.level == "online"
    (first, *_) = world.updates
    assert first.step is not None
    assert first.step.prefill_s == pytest.approx(STEP.prefill_s, rel=0.1)
    assert first.step.base_s + first.step.sequence_s == pytest.approx(STEP.base_s + STEP.sequence_s, rel=0.02)
    assert first.error == 0.5
