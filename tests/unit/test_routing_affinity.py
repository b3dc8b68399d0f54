"""Shared prefixes: what they save of KV and prefill, and what a cold placement costs."""

import random

import pytest

from weighbridge.core.actions import Dispatch
from weighbridge.core.events import FirstToken, InstanceUp, RequestArrived
from weighbridge.core.instance import InstanceSpec, Limits, StepTerms
from weighbridge.core.request import Request, Tier
from weighbridge.routing.fleet import Fleet, Instance
from weighbridge.routing.policies.calibrated import Calibrated
from weighbridge.routing.policy import Option, View
from weighbridge.routing.room import Room
from weighbridge.routing.router import Router, RouterSettings
from weighbridge.routing.shared_kv import SharedKv
from weighbridge.sim.experiments.prefix import make_run
from weighbridge.sim.runs import run

STEP = StepTerms(base_s=0.01, prefill_s=4e-5, sequence_s=3e-5, kv_s=8e-8)
CHAT = Tier(name="chat", priority=0, ttft_s=0.5, tpot_s=0.045)
DOCUMENT = tuple(range(1000, 1100))


def request(name: str, prompt: int, hashes: tuple[int, ...] = (), at_s: float = 0.0) -> Request:
    return Request(
        id=name, arrival_s=at_s, prompt_tokens=prompt, max_tokens=100, prefix_hashes=hashes, prefix_block_tokens=16,
        tier="chat",
    )  # fmt: skip


def fleet_of(count: int, blocks: int = 6_000) -> tuple[Fleet, list[Instance]]:
    fleet = Fleet()
    limits = Limits(token_budget=2048, kv_blocks=blocks)
    return fleet, [fleet.up(InstanceSpec(name=f"i{n}", step=STEP, limits=limits), 1) for n in range(count)]


@pytest.mark.parametrize("seed", range(5))
def test_shared_tokens_equal_a_recount_whatever_comes_and_goes(seed: int) -> None:
    rng = random.Random(seed)
    shared = SharedKv()
    running: list[tuple[int, ...]] = []
    for _ in range(400):
        if running and rng.random() < 0.45:
            shared.remove(running.pop(rng.randrange(len(running))), 16)
        else:
            blocks: list[int] = []
            for _ in range(rng.randrange(6)):
                blocks.append(10 * (blocks[-1] if blocks else 1) + rng.randrange(3))
            running.append(tuple(blocks))
            shared.add(running[-1], 16)
        distinct = {block for path in running for block in path}
        assert shared.tokens == 16 * (sum(map(len, running)) - len(distinct))
    for path in running:
        shared.remove(path, 16)
    assert shared.tokens == 0


def test_a_common_prefix_takes_kv_once() -> None:
    fleet, (instance, _) = fleet_of(2)
    for n in range(40):
        hashes = (*DOCUMENT, 5000 + n)
        fleet.charge(request(f"r{n}", 1616, hashes), instance, cached_tokens=1600, expected_output_tokens=50, now_s=0.0)
    assert instance.kv_tokens == 40 * 1616
    assert instance.unique_kv_tokens == 1600 + 40 * 16
    room = Room([instance], 0.8)
    assert instance in room.fitting(1616, cached={instance.index: 1600})


def test_a_prompt_that_is_mostly_cached_is_shown_a_longer_queue_and_all_the_kv() -> None:
    fleet, (warm, cold) = fleet_of(2, blocks=1_000)
    for each in (warm, cold):
        fleet.charge(request(f"o{each.name}", 3000), each, cached_tokens=0, expected_output_tokens=50, now_s=0.0)
    room = Room([warm, cold], 0.8)
    assert room.fitting(1616) == []
    assert room.fitting(1616, cached={warm.index: 1600}) == [warm]
    assert room.fitting(1616, cached={warm.index: 800}) == []
    # nothing is shown twice the queue without end
    fleet.charge(request("more", 1096), warm, cached_tokens=0, expected_output_tokens=50, now_s=0.0)
    assert room.fitting(1616, cached={warm.index: 1600}) == []


def choose(fleet: Fleet, warm: Instance, cold: Instance, now_s: float) -> Instance:
    options = [
        Option(cold, cached_tokens=0, prefill_tokens=1700, decode_tokens=50),
        Option(warm, cached_tokens=1600, prefill_tokens=100, decode_tokens=50),
    ]
    view = View(request("new", 1700, DOCUMENT), options, fleet, now_s, random.Random(0), True, tier=CHAT,
                deadline_s=now_s + 0.5)  # fmt: skip
    index = Calibrated().choose(view).index
    assert index is not None
    return options[index].instance


def test_a_cold_placement_is_cheap_at_leisure_and_dear_under_load() -> None:
    """The warm instance owes enough that its forecast is a little worse: the price decides."""
    places = []
    for rate in (2, 150):
        fleet, (warm, cold) = fleet_of(2)
        fleet.offered.capacity_tokens_per_s = 2 / STEP.prefill_s
        for n in range(rate * 10):
            fleet.offered.add(200, n / rate)
        fleet.charge(request("ahead", 2500), warm, cached_tokens=0, expected_output_tokens=50, now_s=10.0, tier=CHAT)
        places.append(choose(fleet, warm, cold, 10.0) is warm)
    assert places == [False, True]


def test_what_a_cache_holds_is_not_offered_work() -> None:
    router = Router(RouterSettings(policy="calibrated", tiers=(CHAT,)))
    for n in range(2):
        spec = InstanceSpec(name=f"i{n}", step=STEP, limits=Limits(token_budget=2048, kv_blocks=6_000))
        router.handle(InstanceUp(spec=spec, generation=1), 0.0)
    sent: list[Dispatch] = []
    for n in range(50):
        at_s = 0.1 * n
        actions = router.handle(RequestArrived(request=request(f"r{n}", 1616, (*DOCUMENT, n), at_s)), at_s)
        sent += [a for a in actions if isinstance(a, Dispatch)]
        router.handle(FirstToken(request_id=f"r{n}"), at_s + 0.02)
    assert len(sent) == 50
    # 10 requests/s of 16 fresh tokens; all their tokens would be a third of what the two can prefill
    assert router.fleet.offered.share(5.0) < 0.05
    decision = sent[-1].decision
    assert decision is not None
    assert 0.0 < decision.candidates[0].terms["hit"] <= 1.0


def test_never_behind_prefix_affinity_where_documents_are_shared() -> None:
    attained = {
        policy: run(make_run("shared", 6_000, 220.0, 4.0, policy, 301)).summary.attainment
        for policy in ("prefix_affinity", "calibrated")
    }
    assert attained["calibrated"] > attained["prefix_affinity"] - 0.01
