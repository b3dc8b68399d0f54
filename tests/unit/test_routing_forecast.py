"""The forecast's terms against the formulas, by hand."""

import math
import random

import pytest

from weighbridge.core.instance import InstanceSpec, Limits, StepTerms
from weighbridge.core.request import Request, Tier
from weighbridge.routing.cost import cost_of
from weighbridge.routing.fleet import Fleet, Instance
from weighbridge.routing.forecast import Forecast, chance, forecast
from weighbridge.routing.policy import Option, View
from weighbridge.routing.sums import Offered

STEP = StepTerms(base_s=0.01, prefill_s=1e-4, sequence_s=1e-4, kv_s=1e-7)
CHAT = Tier(name="chat", priority=0, ttft_s=0.5, tpot_s=0.04)


def request(name: str, prompt_tokens: int) -> Request:
    return Request(id=name, arrival_s=0.0, prompt_tokens=prompt_tokens, max_tokens=1000, tier="chat")


def busy(waiting: int = 0, decoding: int = 0, *, prompt: int = 1000, kv_blocks: int | None = None) -> Instance:
    fleet = Fleet()
    limits = Limits(token_budget=2048, kv_blocks=kv_blocks)
    instance = fleet.up(InstanceSpec(name="i", step=STEP, limits=limits, error=0.2), 1)
    for n in range(decoding):
        fleet.charge(
            request(f"d{n}", prompt), instance, cached_tokens=0, expected_output_tokens=100, now_s=0.0, tier=CHAT
        )
        fleet.first_token(f"d{n}", 0.5)
    for n in range(waiting):
        fleet.charge(request(f"w{n}", prompt), instance, cached_tokens=0, expected_output_tokens=100, now_s=1.0)
    return instance


def ask(instance: Instance, *, prompt: int = 200, output: int = 50, now_s: float = 1.0, **changes: object) -> Forecast:
    option = Option(instance, cached_tokens=0, prefill_tokens=prompt, decode_tokens=output)
    fields: dict[str, object] = {"tier": CHAT, "deadline_s": now_s + 0.5, "leg": "whole", **changes}
    interference = float(fields.pop("interference", 0.0))  # type: ignore[arg-type]
    cost = cost_of(instance.spec)
    assert cost is not None
    view = View(request("r", prompt), [option], Fleet(), now_s, random.Random(0), False, **fields)  # type: ignore[arg-type]
    return forecast(option, view, cost, 0.2, interference)


def test_an_idle_instance_costs_its_own_prefill_and_step() -> None:
    made = ask(busy())
    assert made.wait_s == 0.0
    assert made.prefill_s == pytest.approx(200 * 1e-4 + 0.01)
    assert made.tpot_s == pytest.approx(0.01 + 1e-4 + 1e-7 * 225)
    assert (made.loss, made.delay_s) == (0.0, 0.0)
    assert made.hit == pytest.approx(1.0, abs=5e-3)


@pytest.mark.parametrize(("error", "width"), [(0.05, 0.2), (0.2, 0.2), (0.45, 0.45)])
def test_a_profile_that_knows_itself_to_be_worse_widens_the_chance(error: float, width: float) -> None:
    fleet = Fleet()
    instance = fleet.up(InstanceSpec(name="i", step=STEP, limits=Limits(token_budget=2048), error=error), 1)
    made = ask(instance, deadline_s=1.0 + 0.1)
    first = chance(0.1 - made.ttft_s, width * 0.5)
    assert made.hit == pytest.approx(first * chance(0.04 - made.tpot_s, width * 0.04), rel=1e-9)


def test_prompts_ahead_are_waited_for_in_chunks_beside_the_running_decodes() -> None:
    instance = busy(waiting=3, decoding=4)
    td = 0.01 + 1e-4 * 4 + 1e-7 * 4 * 1001
    # 3,000 tokens in front, nothing progressed: the head was sent this moment; ceil(3000 / 2044) steps
    assert ask(instance).wait_s == pytest.approx(0.5 * td + 3000 * 1e-4 + 2 * td)


def test_the_head_of_the_queue_progresses_but_never_quite_finishes() -> None:
    instance = busy(waiting=1)
    per_token = 1e-4 + 0.01 / 2048
    owed = 1000 - 0.05 / per_token
    assert ask(instance, now_s=1.05).wait_s == pytest.approx(0.5 * 0.01 + owed * 1e-4 + 0.01)
    assert ask(instance, now_s=9.0).wait_s == pytest.approx(0.5 * 0.01 + 100 * 1e-4 + 0.01)


def test_decoders_slow_each_other_for_as_long_as_they_overlap() -> None:
    made = ask(busy(decoding=8), output=50)
    left = 99.0
    overlap = left * (1 - math.exp(-50 / left)) / 50
    kv = 200 + 25 + (8 * 1001 + 8 * 99 / 2) * overlap
    assert made.tpot_s == pytest.approx(0.01 + 1e-4 * (1 + 8 * overlap) + 1e-7 * kv)
    assert ask(busy(decoding=8), interference=0.5).tpot_s == pytest.approx(2 * made.tpot_s)
    each = 1e-4 + 1e-7 * 225
    assert made.delay_s == pytest.approx(8 * 200 * 1e-4 + 8 * overlap * 50 * each)


def test_hits_fall_as_the_deadline_and_the_bound_come_near() -> None:
    late = ask(busy(), deadline_s=1.0 + 0.03)
    # TTFT is 0.03: exactly at the deadline half of the outcomes make it
    assert late.hit == pytest.approx(0.5, abs=2e-3)
    tight = Tier(name="chat", priority=0, ttft_s=0.5, tpot_s=0.0101225)
    assert ask(busy(), tier=tight).hit == pytest.approx(0.5, abs=5e-3)
    assert ask(busy(), deadline_s=0.5).hit < 0.2


def test_a_long_prompt_takes_hits_from_decoders_near_their_bound() -> None:
    loaded = busy(decoding=60, prompt=5000)
    short, long = ask(loaded, prompt=50), ask(loaded, prompt=8000)
    assert 0.0 < short.loss < long.loss
    assert ask(busy(decoding=2), prompt=50).loss < 1e-3


def test_kv_that_must_free_first_is_waited_for() -> None:
    full = busy(decoding=3, kv_blocks=200)
    # 3 * 1001 held, 200 asked, 3200 there: 3 tokens short of what runs for 99 more tokens on average
    made = ask(full)
    assert made.wait_s == pytest.approx(
        0.5 * (0.01 + 3e-4 + 3003e-7) + -math.log1p(-3 / 3003) * 99 * 0.0106003, rel=1e-6
    )
    assert ask(busy(decoding=3, kv_blocks=180)).kv_over_tokens > 0
    assert ask(busy(decoding=3, kv_blocks=1000)).kv_over_tokens < 0


def test_the_decode_leg_prefills_nothing_and_the_prefill_leg_decodes_nothing() -> None:
    decode = ask(busy(decoding=2), prompt=0, leg="decode", deadline_s=0.0)
    assert decode.prefill_s == pytest.approx(0.01 + 2e-4 + 2002e-7)
    assert decode.hit == pytest.approx(1.0, abs=5e-3)
    prefill = ask(busy(), leg="prefill")
    assert prefill.tpot_s == 0.0


def test_of_an_e2e_bound_counts_what_is_left_of_it() -> None:
    tier = Tier(name="whole", priority=1, e2e_s=2.0)
    chances = [ask(busy(), now_s=now, tier=tier, deadline_s=math.inf).hit for now in (0.0, 1.0, 1.48, 1.9)]
    # 0.03 s to the first token and 50 steps of 0.01 s: needs 0.53 s and a little
    assert chances[0] > 0.99
    assert chances == sorted(chances, reverse=True)
    assert chances[2] == pytest.approx(0.5, abs=0.07)
    assert chances[3] < 0.2


def test_chances() -> None:
    assert chance(0.0, 1.0) == 0.5
    assert chance(1.0, 1.0) == pytest.approx(1 / (1 + math.exp(-1.7)))
    assert (chance(1e9, 1.0), chance(-1e9, 1.0)) == (1.0, 0.0)


def test_offered_load_is_a_share_of_the_prefill_capacity_and_fades() -> None:
    offered = Offered()
    assert offered.share(0.0) == 0.0
    offered.capacity_tokens_per_s = 10_000.0
    for tick in range(1, 2001):
        offered.add(50, tick * 0.01)
    assert offered.share(20.0) == pytest.approx(0.5, rel=0.03)
    assert offered.share(25.0) == pytest.approx(0.5 * math.exp(-1), rel=0.03)
