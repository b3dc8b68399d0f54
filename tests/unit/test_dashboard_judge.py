"""Judgements and the sentences that name the command that helps."""

from __future__ import annotations

from weighbridge.dashboard import judge
from weighbridge.dashboard.demo import DemoSource
from weighbridge.dashboard.snapshot import InstanceView, Pair, Snapshot, TierView


def pairs(ratio: float, number: int = 20) -> tuple[Pair, ...]:
    return tuple(Pair(1.0, ratio, 0.1) for _ in range(number))


def about(*instances: InstanceView, tiers: tuple[TierView, ...] = ()) -> list[judge.Attention]:
    return judge.attention(Snapshot(at_s=0.0, source="test", instances=instances, tiers=tiers))


def test_a_healthy_fleet_needs_nothing() -> None:
    assert about(InstanceView(name="a", level="profile", load=0.5, error_bar=0.1, pairs=pairs(1.02), age_s=0.5)) == []


def test_an_overloaded_instance_comes_first() -> None:
    drifted = InstanceView(name="slow", level="profile", load=0.4, error_bar=0.1, pairs=pairs(1.3))
    full = InstanceView(name="full", level="profile", load=1.02)
    found = about(drifted, full)
    assert [a.subject for a in found] == ["full", "slow"]
    assert "its queue will not drain by itself" in found[0].text
    assert "30 % slower than its forecast" in found[1].text
    assert found[1].command == "weighbridge calibrate slow --config FILE"


def test_a_drift_inside_the_error_bar_is_none() -> None:
    assert about(InstanceView(name="a", level="profile", error_bar=0.35, pairs=pairs(1.3))) == []


def test_few_observations_prove_no_drift() -> None:
    assert judge.spread(InstanceView(name="a", pairs=pairs(2.0, 7))) is None


def test_down_uncalibrated_and_silent_instances_are_named() -> None:
    found = about(
        InstanceView(name="gone", state="down", reason="connection refused"),
        InstanceView(name="new", level="requests"),
        InstanceView(name="mute", level="profile", age_s=60.0),
    )
    texts = {a.subject: a.text for a in found}
    assert texts["gone"] == "is down (connection refused); nothing is sent to it."
    assert texts["new"] == "has no cost model: request counts."
    assert texts["mute"] == "last reported 60.0 s ago."


def test_a_tier_below_its_target_is_named_only_when_it_promises_something() -> None:
    poor = TierView(name="interactive", bounds=(("TTFT", 0.5),), offered=100, met=80)
    free = TierView(name="batch", offered=100, met=10)
    found = about(tiers=(poor, free))
    assert [(a.subject, a.judgement) for a in found] == [("tier:interactive", "bad")]


def test_limits() -> None:
    assert [judge.headroom(x) for x in (None, 0.5, 0.9, 0.98)] == ["none", "good", "watch", "bad"]
    assert [judge.above(x, 0.95) for x in (None, 0.96, 0.93, 0.9)] == ["none", "good", "watch", "bad"]
    assert [judge.below(x, 1.0) for x in (0.9, 1.2, 1.6)] == ["good", "watch", "bad"]


def test_the_demo_has_something_to_say_about_its_sick_instances() -> None:
    subjects = [a.subject for a in judge.attention(DemoSource(7).snapshot())]
    assert subjects[0] == "h100-2"
    assert {"l4-2", "cpu-1"} <= set(subjects)
