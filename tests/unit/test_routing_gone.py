"""Instances that leave the fleet for good: forgotten once nothing is charged to them, their places used again."""

import asyncio
import io
from typing import Any

from tests.support.gateway import Front, answer, front
from tests.support.loop import until
from tests.support.upstream import FakeUpstream
from weighbridge.core.actions import Dispatch
from weighbridge.core.event_log import Entry, Header, LogReader, encode_entry, encode_header
from weighbridge.core.events import (
    BlocksStored,
    Event,
    InstanceDown,
    InstanceGone,
    InstanceUp,
    RequestArrived,
    RequestFinished,
    Tick,
    TokensProgressed,
)
from weighbridge.core.instance import InstanceSpec, StepTerms
from weighbridge.core.request import Request
from weighbridge.dashboard.observer import Observer
from weighbridge.routing.refinement import Refinement
from weighbridge.routing.replay import check
from weighbridge.routing.router import Router, RouterSettings

STEP = StepTerms(base_s=0.01, prefill_s=1e-4)


def arrived(name: str, **fields: Any) -> RequestArrived:
    values: dict[str, Any] = {"arrival_s": 0.0, "prompt_tokens": 100, "max_tokens": 50, **fields}
    return RequestArrived(request=Request(id=name, **values))


def up(name: str, generation: int = 1) -> InstanceUp:
    return InstanceUp(spec=InstanceSpec(name=name, step=STEP), generation=generation)


def placed(router: Router, name: str, **fields: Any) -> Dispatch:
    (action,) = router.handle(arrived(name, **fields), 1.0)
    assert isinstance(action, Dispatch)
    return action


def test_five_hundred_replaced_instances_leave_nothing() -> None:
    router, refinement, observer = Router(RouterSettings(policy="calibrated")), Refinement(), Observer()
    hashes = tuple(range(6))
    for n in range(500):
        events: list[Event] = [up(f"pod-{n}")]
        if n:
            events += [InstanceDown(instance=f"pod-{n - 1}", reason="removed"), InstanceGone(instance=f"pod-{n - 1}")]
        events += [
            arrived(f"r{n}", prefix_hashes=hashes),
            TokensProgressed(request_id=f"r{n}", output_tokens=9),
            RequestFinished(request_id=f"r{n}", output_tokens=20),
        ]
        for event in events:
            actions = router.handle(event, float(n))
            refinement.observe(event, actions, float(n))
            observer.feed(Entry(float(n), event, tuple(actions)))
    action = placed(router, "x")
    assert action.decision is not None
    assert [c.instance for c in action.decision.candidates] == ["pod-499"]
    assert list(router.fleet.instances) == ["pod-499"]
    assert router.fleet.places.count == 2
    assert len(router._placing.candidates._options) == 2
    assert set(router.fleet.prefix_holders) == set(hashes)
    correction = router._correction
    for learned in (
        correction._probes,
        correction._guesses,
        correction._counts,
        correction._scales,
        correction._unseen,
    ):
        assert set(learned) <= {"pod-499"}
    assert set(refinement._instances) == {"pod-499"}
    assert set(observer.instances) == {"pod-499"}


def test_one_that_still_holds_charges_is_forgotten_with_the_last() -> None:
    router = Router(RouterSettings(policy="round_robin"))
    for name in "ab":
        router.handle(up(name), 0.0)
    assert [placed(router, f"r{n}").instance for n in range(4)] == ["a", "b", "a", "b"]
    router.handle(InstanceGone(instance="a"), 2.0)
    assert placed(router, "r4").instance == "b"
    router.handle(RequestFinished(request_id="r0", output_tokens=1), 3.0)
    assert list(router.fleet.instances) == ["a", "b"]
    router.handle(RequestFinished(request_id="r2", output_tokens=1), 3.0)
    assert list(router.fleet.instances) == ["b"]
    assert not router.handle(InstanceGone(instance="a"), 4.0)
    assert not router.handle(InstanceGone(instance="never heard of"), 4.0)


def test_one_that_comes_back_before_its_last_request_ended_stays() -> None:
    router = Router(RouterSettings(policy="round_robin"))
    router.handle(up("a"), 0.0)
    placed(router, "r0")
    router.handle(InstanceGone(instance="a"), 1.0)
    router.handle(up("a", generation=2), 2.0)
    router.handle(RequestFinished(request_id="r0", output_tokens=1), 3.0)
    assert placed(router, "r1").instance == "a"
    assert router.fleet.instances["a"].in_flight == 1


def test_the_place_of_one_that_is_gone_holds_nothing_of_it() -> None:
    router = Router(RouterSettings(policy="least_tokens"))
    for name in "abc":
        router.handle(up(name), 0.0)
    hashes = (11, 12, 13, 14)
    router.handle(BlocksStored(instance="b", generation=1, hashes=hashes), 0.5)
    router.handle(InstanceGone(instance="b"), 1.0)
    router.handle(up("d"), 2.0)
    assert router.fleet.instances["d"].index == 1
    assert list(router.fleet.instances) == ["a", "d", "c"], "the fleet's order is that of the places"
    decision = placed(router, "r", prefix_hashes=hashes, prefix_block_tokens=16).decision
    assert decision is not None
    assert [(c.instance, c.cached_tokens) for c in decision.candidates] == [("a", 0), ("d", 0), ("c", 0)]
    # what the one that is gone said, said late
    router.handle(BlocksStored(instance="b", generation=1, hashes=hashes), 3.0)
    assert placed(router, "s", prefix_hashes=(99,)).decision is not None


def test_after_any_changes_a_fleet_decides_as_one_that_never_had_others() -> None:
    for policy in ("round_robin", "calibrated", "power_of_two", "block_cost"):
        plain, changed = (Router(RouterSettings(policy=policy, dispatch="immediate")) for _ in range(2))
        for name in ("x", "a", "y", "b", "c"):
            changed.handle(up(name), 0.0)
        for name in "xy":
            changed.handle(InstanceGone(instance=name), 0.0)
        for name in "dabc":
            plain.handle(up(name), 0.0)
        changed.handle(up("d"), 0.0)
        hashes = [tuple(range(100 * (n % 3), 100 * (n % 3) + 5)) for n in range(40)]
        both = [[placed(r, f"r{n}", prefix_hashes=h).instance for n, h in enumerate(hashes)] for r in (plain, changed)]
        assert both[0] == both[1], policy


def test_held_requests_of_a_model_that_nobody_serves_any_more_are_refused() -> None:
    router = Router(RouterSettings(policy="least_tokens", dispatch="hold"))
    router.handle(InstanceUp(spec=InstanceSpec(name="a", models=("m",)), generation=1), 0.0)
    router.handle(arrived("running", model="m", prompt_tokens=100_000), 0.0)
    router.handle(arrived("held", model="m"), 0.0)
    assert router.held_requests == 1
    actions = router.handle(InstanceGone(instance="a"), 1.0)
    assert [(a.request_id, a.status) for a in actions] == [("held", 503)]  # type: ignore[union-attr]


def test_a_log_with_departures_replays_alike() -> None:
    settings = RouterSettings(policy="least_tokens")
    router = Router(settings)
    events: list[Event] = [up("a"), up("b"), arrived("r0"), InstanceGone(instance="a"), up("c"), arrived("r1"), Tick()]
    lines = encode_header(Header(router={"policy": "least_tokens"}))
    for n, event in enumerate(events):
        lines += encode_entry(float(n), event, router.handle(event, float(n)))
    log = LogReader(io.BytesIO(lines))
    assert check(log.header, log).mismatches == ()


async def metrics(face: Front) -> str:
    reply = await face.get("/metrics", admin=True)
    return str(reply.body.decode())


def test_a_gateway_forgets_what_was_removed() -> None:
    async def run() -> None:
        async with FakeUpstream(answer) as one, FakeUpstream(answer) as two, front(one, two) as face:
            gateway = face.gateway
            await until(lambda: all(e.up for e in gateway.driver.endpoints.values()))
            assert 'weighbridge_instance_in_flight{instance="i1"}' in await metrics(face)
            assert await gateway.membership.remove("i1")
            assert list(gateway.driver.router.fleet.instances) == ["i0"]
            assert 'weighbridge_instance_in_flight{instance="i1"}' not in await metrics(face)

    asyncio.run(run())
