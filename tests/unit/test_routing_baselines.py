"""Every baseline policy against scores worked out by hand from its published formula."""

import random
from collections.abc import Sequence

import pytest

from weighbridge.core.instance import InstanceSpec, Limits, LoadReport, Rates, StepTerms
from weighbridge.core.request import Request, Tier
from weighbridge.routing.fleet import Fleet, Instance
from weighbridge.routing.policies.registry import make_policy
from weighbridge.routing.policy import Choice, Option, View


def request(name: str = "new", prompt_tokens: int = 160) -> Request:
    return Request(id=name, arrival_s=0.0, prompt_tokens=prompt_tokens, max_tokens=1000)


def load(fleet: Fleet, instance: Instance, *, waiting: Sequence[int] = (), decoding: Sequence[int] = ()) -> None:
    """`waiting`: prompt sizes not computed yet; `decoding`: prompt sizes that have given their first token."""
    for place, size in enumerate((*waiting, *decoding)):
        name = f"{instance.name}-{len(instance.charges)}"
        charged = request(name, size)
        fleet.charge(charged, instance, cached_tokens=0, expected_output_tokens=100, now_s=0.0)
        if place >= len(waiting):
            fleet.first_token(name, 0.1)


def fleet_of(*specs: InstanceSpec) -> tuple[Fleet, list[Instance]]:
    fleet = Fleet()
    return fleet, [fleet.up(spec, 1) for spec in specs]


def ask(
    fleet: Fleet,
    policy: str,
    *,
    prompt_tokens: int = 160,
    output: int = 100,
    cached: Sequence[int] = (),
    seed: int = 0,
    tier: Tier | None = None,
    **options: object,
) -> Choice:
    hits = [*cached, *[0] * len(fleet.instances)]
    made = [
        Option(i, cached_tokens=hit, prefill_tokens=prompt_tokens - hit, decode_tokens=output)
        for i, hit in zip(fleet, hits, strict=False)
    ]
    view = View(
        request(prompt_tokens=prompt_tokens),
        made,
        fleet,
        1.0,
        random.Random(seed),
        True,
        tier=tier or Tier(name="t", priority=0, ttft_s=0.5),
    )
    return make_policy(policy, options).choose(view)


def names(count: int, **fields: object) -> list[InstanceSpec]:
    return [InstanceSpec(name=f"i{n}", **fields) for n in range(count)]  # type: ignore[arg-type]


def test_random_reaches_everyone_and_follows_the_seed() -> None:
    fleet, _ = fleet_of(*names(4))
    drawn = [ask(fleet, "random", seed=seed).index for seed in range(50)]
    assert set(drawn) == {0, 1, 2, 3}
    assert drawn == [ask(fleet, "random", seed=seed).index for seed in range(50)]


def test_power_of_two_never_takes_the_busiest_and_not_always_the_idlest() -> None:
    fleet, (a, b, _) = fleet_of(*names(3))
    load(fleet, a, decoding=[10, 10, 10])
    load(fleet, b, decoding=[10])
    drawn = [ask(fleet, "power_of_two", seed=seed).index for seed in range(60)]
    assert set(drawn) == {1, 2}
    # a pair without the idle one is drawn once in three times
    assert 8 <= drawn.count(1) <= 32


def test_prompt_length_counts_prompts_in_flight_whatever_their_phase() -> None:
    fleet, (a, b) = fleet_of(*names(2))
    load(fleet, a, waiting=[100], decoding=[250])
    load(fleet, b, decoding=[340])
    choice = ask(fleet, "prompt_length")
    assert list(choice.scores) == [350.0, 340.0]
    assert choice.index == 1


def test_length_threshold_splits_the_fleet_by_expected_output() -> None:
    fleet, (a, _, c, d) = fleet_of(*names(4))
    load(fleet, a, decoding=[10])
    load(fleet, c, decoding=[10])
    assert ask(fleet, "length_threshold", output=300).index == 1
    assert ask(fleet, "length_threshold", output=301).index == 3
    assert ask(fleet, "length_threshold", output=301, long_instances=9).index in (1, 3)
    load(fleet, d, decoding=[10, 10])
    assert ask(fleet, "length_threshold", output=301).index == 2


def test_kv_free_compares_shares_of_capacity_after_admission() -> None:
    small = InstanceSpec(name="small", limits=Limits(kv_blocks=50))
    large = InstanceSpec(name="large", limits=Limits(kv_blocks=500))
    fleet, (a, b) = fleet_of(small, large)
    load(fleet, a, waiting=[100])
    load(fleet, b, waiting=[3000])
    choice = ask(fleet, "kv_free", prompt_tokens=160, output=40)
    # (100 + 160 + 40) / 800 and (3000 + 160 + 40) / 8000
    assert list(choice.scores) == pytest.approx([0.375, 0.4])
    assert choice.index == 0
    unknown, (c, d) = fleet_of(small, InstanceSpec(name="silent"))
    load(unknown, c, waiting=[100])
    load(unknown, d, waiting=[3000])
    choice = ask(unknown, "kv_free", prompt_tokens=160, output=40)
    assert list(choice.scores) == [300.0, 3200.0]
    assert "unknown" in choice.note


def test_speed_requests_weighs_the_queue_by_step_time() -> None:
    fast = InstanceSpec(name="fast", step=StepTerms(base_s=0.01, prefill_s=1e-4))
    slow = InstanceSpec(name="slow", step=StepTerms(base_s=0.02, prefill_s=2e-4))
    fleet, (a, _) = fleet_of(fast, slow)
    load(fleet, a, decoding=[10])
    # (1 + 1) * 0.01 against (0 + 1) * 0.02: a tie; one more request in flight breaks it
    choice = ask(fleet, "speed_requests")
    assert list(choice.scores) == pytest.approx([0.02, 0.02])
    load(fleet, a, decoding=[10])
    assert ask(fleet, "speed_requests").index == 1
    bare, _ = fleet_of(*names(2))
    assert "no profile" in ask(bare, "speed_requests").note


def test_prefix_affinity_switches_off_when_loads_differ_too_much() -> None:
    fleet, (a, b) = fleet_of(*names(2))
    load(fleet, a, decoding=[10] * 32)
    kept = ask(fleet, "prefix_affinity", prompt_tokens=160, cached=[96])
    assert (kept.index, kept.note) == (0, "prefix match")
    load(fleet, a, decoding=[10])
    left = ask(fleet, "prefix_affinity", prompt_tokens=160, cached=[96])
    assert (left.index, left.note) == (1, "imbalanced: fewest requests")
    # half of the prompt is not enough, and the emptier index then wins although it is busier
    load(fleet, b, decoding=[10] * 31)
    b.prefix.insert((1, 2, 3))
    missed = ask(fleet, "prefix_affinity", prompt_tokens=160, cached=[80])
    assert (missed.index, missed.note) == (0, "no match: smallest index")
    assert ask(fleet, "prefix_affinity", prompt_tokens=160, cached=[80], on_miss="load").index == 1
    # 64 more and twice as many is still balanced when the relative bound is high
    assert ask(fleet, "prefix_affinity", cached=[96], absolute=1, relative=1.5).note == "prefix match"


def test_drain_time_adds_what_was_sent_since_the_report() -> None:
    fleet, (a, b, c) = fleet_of(*names(3))
    a.report = LoadReport(waiting_tokens=1000, generation_tokens_per_s=500.0, kv_usage=0.5)
    a.sent_since_report_tokens = 250
    b.report = LoadReport(waiting_tokens=3000, kv_usage=1.0)
    load(fleet, c, waiting=[400])
    choice = ask(fleet, "drain_time")
    expected = [1250 / 500 + 0.15 * 1.0, 3000 / 2000 + 0.15 * 0.999 / 0.001, 400 / 2000]
    assert list(choice.scores) == pytest.approx(expected)
    assert choice.index == 2
    assert choice.terms[0] == pytest.approx({"drain_s": 2.5, "pressure_s": 0.15})


def test_block_cost_is_the_linear_sum_in_blocks() -> None:
    fleet, (a, b) = fleet_of(*names(2))
    load(fleet, a, waiting=[320], decoding=[159])
    load(fleet, b, decoding=[799])
    choice = ask(fleet, "block_cost", prompt_tokens=160, cached=[0, 96])
    # a: prefill (20 + 10 - 0), memory 320 + 160 = 30 blocks, own 10; b: (0 + 10 - 6), memory 50, own 10
    assert list(choice.scores) == pytest.approx([30 + 30 + 10, 4 + 50 + 10])
    # the busy prefill queue halves the credit: decay 1 / (1 + 0.5 * 20 / 10)
    decayed = ask(fleet, "block_cost", prompt_tokens=160, cached=[96, 0], decay=0.5, request_weight=2.0)
    assert list(decayed.scores) == pytest.approx([20 + 10 - 6 / 2 + 30 + 10 + 2 * 2, 10 + 50 + 10 + 2])
    product = ask(fleet, "block_cost", prompt_tokens=160, cached=[0, 96], product=True)
    assert list(product.scores) == pytest.approx([(20 + 10) * 3, 4 * 2])


def test_block_cost_with_temperature_draws_by_softmax_of_the_normalised_cost() -> None:
    fleet, (a, _) = fleet_of(*names(2))
    load(fleet, a, waiting=[320])
    drawn = [ask(fleet, "block_cost", temperature=1.0, seed=seed).index for seed in range(400)]
    # weights 1/e and 1
    assert drawn.count(0) / 400 == pytest.approx(0.269, abs=0.06)


def test_affinity_gate_stays_until_the_wait_exceeds_its_patience() -> None:
    fleet, (a, b, c) = fleet_of(*names(3))
    load(fleet, a, waiting=[200_000])
    load(fleet, c, waiting=[10])
    kept = ask(fleet, "affinity_gate", prompt_tokens=100, cached=[80, 79])
    assert (kept.index, kept.note) == (0, "prefix kept")
    load(fleet, a, waiting=[100_000])
    # 300,000 / 15,928 = 18.8 s against 0
    left = ask(fleet, "affinity_gate", prompt_tokens=100, cached=[80, 79])
    assert (left.index, left.note) == (1, "prefix left: too busy")
    load(fleet, b, decoding=[500])
    assert ask(fleet, "affinity_gate", prompt_tokens=100).index == 2


def test_affinity_gate_has_no_bound_on_what_is_cached() -> None:
    """Its wait counts uncached tokens only, so a thousand requests of one cached prefix move nobody elsewhere."""
    fleet, (a, _) = fleet_of(*names(2))
    load(fleet, a, decoding=[2_000] * 1_000)
    assert ask(fleet, "affinity_gate", prompt_tokens=2_000, cached=[1_990]).index == 0


def test_paper_score_adds_backlog_service_and_queue() -> None:
    rates = Rates(prefill_tokens_per_s=1000, decode_tokens_per_s=100)
    specs = [InstanceSpec(name=n, rates=rates, limits=Limits(kv_blocks=100)) for n in ("a", "b")]
    fleet, (a, b) = fleet_of(*specs)
    load(fleet, a, waiting=[500])
    b.report = LoadReport(waiting=40)
    choice = ask(fleet, "paper_score", prompt_tokens=200, output=50, tier=Tier(name="t", priority=0, ttft_s=0.5))
    # a: backlog 500/1000 + 100/100, own 200/1000 + 50/100, press (500 + 250) / 1600; sigma 2
    assert choice.scores[0] == pytest.approx(1.5 * 2 + 0.7 * (1 + 750 / 1600) * 2)
    assert choice.scores[1] == pytest.approx(0.7 * (1 + 250 / 1600) * 2 + 0.05 * 40)
    assert choice.index == 1
    bare, _ = fleet_of(*names(1))
    assert "no rates" in ask(bare, "paper_score").note
