"""The forecast against a slow and obvious one that adds up each running request; what it keeps against nothing kept."""

import math
import random

import pytest

from tests.support.compiled import interpreted
from weighbridge.core.actions import Dispatch
from weighbridge.core.instance import InstanceSpec, Limits, StepTerms
from weighbridge.core.request import Request, Tier
from weighbridge.routing.cost import Cost
from weighbridge.routing.fleet import Fleet, Instance
from weighbridge.routing.forecast import Asked, Forecast, forecast_terms, fullest
from weighbridge.routing.policy import Option, View
from weighbridge.sim.lab import REGIMES
from weighbridge.sim.runs import Generated, Run, make_simulation

TIERS = {
    tier.name: tier
    for tier in (
        Tier(name="chat", priority=0, ttft_s=0.5, tpot_s=0.04),
        Tier(name="whole", priority=0, ttft_s=1.0, e2e_s=8.0),
        Tier(name="batch", priority=20),
    )
}
ERROR = 0.2
INTERFERENCE = 0.3


def sigmoid(margin: float, width: float) -> float:
    z = 1.7 * margin / width
    return 1.0 / (1.0 + math.exp(-z)) if z > -30 else 0.0


def obvious(instance: Instance, cost: Cost, request: Request, tier: Tier, output: int, now: float) -> dict[str, float]:
    """The formulas of `forecast.py`, from the charges themselves."""
    charges = list(instance.charges.values())
    decoders = [c for c in charges if c.first_token_s is not None]
    waiting = [c for c in charges if c.first_token_s is None]
    td = cost.base_s + cost.sequence_s * len(decoders) + cost.kv_s * sum(c.kv_tokens for c in decoders)
    room = max(cost.budget - len(decoders), 64)
    wait = 0.5 * td if charges else 0.0
    if waiting:
        head = waiting[0]
        began = max(head.dispatched_s, instance.last_first_token_s)
        owed = float(sum(c.prefill_left for c in waiting))
        owed -= min(0.9 * head.prefill_left, (now - began) / (cost.prefill_s + td / room))
        wait += cost.prefill_s * owed + math.ceil(owed / room) * td
    prefill = cost.prefill_s * request.prompt_tokens + math.ceil(request.prompt_tokens / room) * td
    left = sum(c.decode_left for c in charges) / len(charges) if charges else 0.0
    overlap = left * (1.0 - math.exp(-output / left)) / output if left else 0.0
    own = request.prompt_tokens + 0.5 * output
    beside = sum(c.kv_tokens + 0.5 * c.decode_left for c in charges) * overlap
    step = cost.base_s + cost.sequence_s * (1.0 + len(charges) * overlap) + cost.kv_s * (own + beside)
    tpot = step / (1.0 - INTERFERENCE)
    stall, shared = cost.prefill_s * request.prompt_tokens, overlap * output * (cost.sequence_s + cost.kv_s * own)
    loss = full = 0.0
    for name, bounds in TIERS.items():
        members = [c for c in charges if c.request.tier == name and c.expected_output_tokens]  # others only prefill
        total = sum(c.output_tokens + c.decode_left for c in members)
        if total < 2 * len(members) or not members or name == "batch":
            continue
        bound = bounds.tpot_s or 0.8 * (bounds.e2e_s or 0.0) / max(total / len(members), 8.0)
        running = [c for c in members if c.first_token_s is not None]
        spent = sum(now - round(c.first_token_s or 0.0, 6) for c in running)
        before = spent + sum(c.decode_left for c in members) * tpot
        after = before + len(members) * shared + len(running) * stall
        allowed = bound * total
        chances = [sigmoid(1.0 - seconds / allowed, ERROR) for seconds in (before, after)]
        loss += len(members) * (chances[0] - chances[1])
        full = max(full, after / allowed)
    ttft = wait + prefill
    error = max(ERROR, cost.error)
    hit = sigmoid(tier.ttft_s + request.arrival_s - now - ttft, error * tier.ttft_s) if tier.ttft_s else 1.0
    if tier.tpot_s:
        hit *= sigmoid(tier.tpot_s - tpot, error * tier.tpot_s)
    elif tier.e2e_s:
        hit *= sigmoid(tier.e2e_s + request.arrival_s - now - ttft - output * tpot, error * tier.e2e_s)
    delay = len(decoders) * stall + len(charges) * shared
    return {"wait": wait, "prefill": prefill, "tpot": tpot, "delay": delay, "hit": hit, "loss": loss, "full": full}


@pytest.mark.parametrize("seed", range(8))
def test_the_sums_give_what_adding_up_gives(seed: int) -> None:
    rng = random.Random(seed)
    fleet = Fleet()
    terms = StepTerms(base_s=0.011, prefill_s=4e-5, sequence_s=3e-5, kv_s=8e-8)
    known = (0.05, 0.2, 0.4)[seed % 3]
    spec = InstanceSpec(name="i", step=terms, limits=Limits(token_budget=2048, kv_blocks=50_000), error=known)
    instance = fleet.up(spec, 1)
    cost = instance.cost
    assert cost is not None
    now = 0.0
    for n in range(120):
        now += rng.expovariate(5.0)
        running = list(instance.charges.values())
        kind = rng.choice(("new", "new", "first", "progress", "end", "scale"))
        if kind == "new":
            tier = TIERS[rng.choice(list(TIERS))]
            request = Request(
                id=f"r{n}", arrival_s=now, prompt_tokens=rng.randint(1, 4_000), max_tokens=500, tier=tier.name
            )
            cached = rng.choice((0, request.prompt_tokens // 2))
            expected = rng.choice((0, 1, 150))
            fleet.charge(request, instance, cached_tokens=cached, expected_output_tokens=expected, now_s=now, tier=tier)
        elif kind == "scale":
            cost.rescale(rng.uniform(0.5, 2.0), rng.uniform(0.5, 2.0))
        elif running:
            charge = rng.choice(running)
            if kind == "first":
                fleet.first_token(charge.request.id, now, rng.randint(0, 200))
            elif kind == "progress" and charge.first_token_s is not None:
                fleet.progress(charge.request.id, charge.output_tokens + rng.randint(1, 30), rng.randint(0, 200))
            elif kind == "end":
                fleet.release(charge.request.id)
        for _ in range(2):  # the second is made from what the first left behind
            tier = TIERS[rng.choice(list(TIERS))]
            asked = Request(
                id="asked",
                arrival_s=now - rng.random(),
                prompt_tokens=rng.randint(1, 6_000),
                max_tokens=500,
                tier=tier.name,
            )
            output = rng.randint(1, 300)
            option = Option(instance, cached_tokens=0, prefill_tokens=asked.prompt_tokens, decode_tokens=output)
            deadline = asked.arrival_s + tier.ttft_s if tier.ttft_s else math.inf
            view = View(asked, [option], fleet, now, rng, False, tier=tier, deadline_s=deadline)
            question = Asked(view, output, ERROR, INTERFERENCE)
            made = Forecast(*forecast_terms(option, cost, question))
            assert made.kv_over_tokens < 0
            got = {"wait": made.wait_s, "prefill": made.prefill_s, "tpot": made.tpot_s, "delay": made.delay_s}
            got |= {"hit": made.hit, "loss": made.loss, "full": fullest(option, cost, question, made)}
            assert got == pytest.approx(obvious(instance, cost, asked, tier, output, now), rel=1e-9, abs=1e-4)


@interpreted
@pytest.mark.parametrize("name", ["8/mixed", "2P+4D/mixed", "8/chat"])
def test_nothing_kept_between_forecasts_changes_a_decision(name: str) -> None:
    """The same run with every standing thrown away before each event: the same requests go to the same places."""
    one = REGIMES[name].run("calibrated", 3, load=1.2)
    assert isinstance(one.workload, Generated)
    placed = [_placed(one, forgetful) for forgetful in (False, True)]
    assert placed[0] == placed[1]
    assert len(placed[0]) > 100


def _placed(one: Run, forgetful: bool) -> list[tuple[str, str]]:
    simulation = make_simulation(one)
    router = simulation.router
    placed: list[tuple[str, str]] = []
    handle = router.handle

    def recorded(event: object, now_s: float) -> list[object]:
        if forgetful:
            for instance in router.fleet:
                instance.standing = None
        actions = handle(event, now_s)  # type: ignore[arg-type]
        placed.extend((a.request_id, a.instance) for a in actions if isinstance(a, Dispatch))
        return list(actions)

    router.handle = recorded  # type: ignore[method-assign, assignment]
    assert isinstance(one.workload, Generated)
    requests = [r for r in one.workload.requests(3) if r.arrival_s < 6.0]
    simulation.run(requests)
    return placed
