"""Output-length estimates: quantiles conditional on progress, back-off, budgets, alternatives."""

import random

import pytest

from weighbridge.core.request import Request
from weighbridge.routing.lengths import ENOUGH, PRIOR_TOKENS, Lengths, LengthTable


def request(**fields: object) -> Request:
    made: dict[str, object] = {"id": "r", "arrival_s": 0.0, "prompt_tokens": 100, "max_tokens": 4000, **fields}
    return Request(**made)  # type: ignore[arg-type]


def learned(name: str, lengths: list[int], **fields: object) -> Lengths:
    made = Lengths(name)  # type: ignore[arg-type]
    for tokens in lengths:
        made.observe(request(**fields), tokens)
    return made


def expected(made: Lengths, generated: int = 0, **fields: object) -> int:
    asked = request(**fields)
    return made.expected(asked, made.table(asked), generated)


def test_the_median_is_conditional_on_what_is_already_there() -> None:
    # half of the answers have 20 tokens, half 400: at the start 20 to 400, past 50 it must be 400
    made = learned("median", [20, 400] * 200)
    assert 18 <= expected(made) <= 22
    assert expected(made, 50) == pytest.approx(400, rel=0.12)
    mean = learned("mean", [20, 400] * 200)
    assert expected(mean) == pytest.approx(210, rel=0.1)
    assert expected(mean, 50) == pytest.approx(400, rel=0.12)


@pytest.mark.parametrize("generated", [0, 10, 60, 300, 1500])
def test_it_equals_the_sample_quantile_within_a_bin(generated: int) -> None:
    rng = random.Random(5)
    lengths = [max(1, round(rng.lognormvariate(5.0, 0.9))) for _ in range(1400)]
    table = LengthTable(0.5)
    for tokens in lengths:
        table.observe(tokens)
    left = sorted(tokens for tokens in lengths if tokens > generated)
    assert table.expected(generated) == pytest.approx(left[len(left) // 2], rel=0.13)


def test_a_forecast_of_the_request_is_used_until_the_counts_prove_better() -> None:
    made = learned("median", [100, 1000] * 100)
    assert expected(made, expected_output_tokens=1000) == 1000
    for k in range(100):  # forecasts that tell short answers from long ones stay
        tokens = (100, 1000)[k % 2]
        made.observe(request(expected_output_tokens=round(1.2 * tokens)), tokens)
    assert expected(made, expected_output_tokens=1000) == 1000
    assert expected(made, 1000, expected_output_tokens=1000) == 1251
    assert expected(made, expected_output_tokens=9000) == 4000  # never more than the budget
    for k in range(400):  # forecasts that are ten times too long are dropped for the counts
        made.observe(request(model="liar", expected_output_tokens=3000), (290, 310)[k % 2])
    assert expected(made, model="liar", expected_output_tokens=3000) == pytest.approx(300, rel=0.12)
    assert expected(made, expected_output_tokens=1000) == 1000  # each model by itself
    full = learned("full_budget", [100] * 100)
    assert expected(full, expected_output_tokens=50) == 4000


def test_past_everything_seen_a_little_more_is_expected() -> None:
    made = learned("median", [100] * 50)
    assert 1001 <= expected(made, 1000) <= 1500


def test_a_thin_key_backs_off_to_a_coarser_one() -> None:
    made = learned("median", [700] * 100, tenant="a", tier="batch")
    for _ in range(ENOUGH - 1):
        made.observe(request(tenant="b", tier="interactive"), 30)
    # too few for tenant b's own key and for its tier: everything seen answers
    assert expected(made, tenant="b", tier="interactive") == pytest.approx(700, rel=0.12)
    made.observe(request(tenant="b", tier="interactive"), 30)
    assert expected(made, tenant="b", tier="interactive") == pytest.approx(30, rel=0.12)
    assert expected(made, tenant="a", tier="batch") == pytest.approx(700, rel=0.12)


def test_old_observations_fade() -> None:
    made = learned("median", [1000] * 1500)
    for _ in range(1600):
        made.observe(request(), 50)
    assert expected(made) == pytest.approx(50, rel=0.12)


def test_the_budget_caps_and_nothing_known_is_the_prior() -> None:
    assert expected(Lengths("median")) == PRIOR_TOKENS
    assert expected(Lengths("median"), max_tokens=16) == 16
    assert expected(learned("median", [900] * 50), max_tokens=300) == 300
    assert expected(learned("median", [900] * 50), 300, max_tokens=300) == 301


def test_full_budget_and_given() -> None:
    assert expected(Lengths("full_budget")) == 4000
    given = Lengths("given")
    assert expected(given, expected_output_tokens=77) == 77
    assert expected(given, 100, expected_output_tokens=77) > 100
    assert expected(given) == PRIOR_TOKENS


def test_new_token_ratio_starts_at_seven_tenths_and_decays_to_its_floor() -> None:
    made = Lengths("new_token_ratio")
    assert expected(made, max_tokens=1000) == 700
    assert expected(made, max_tokens=100_000) == round(4096 * 0.7)
    for _ in range(2000):
        made.observe(request(), 10)
    assert expected(made, max_tokens=1000) == 98
    assert expected(made, 500, max_tokens=1000) == 500 + 49


def test_injected_error_is_seeded_and_centred() -> None:
    first, second = Lengths("median", noise=1.5, seed=4), Lengths("median", noise=1.5, seed=4)
    scales = [first.draw_scale() for _ in range(500)]
    assert scales == [second.draw_scale() for _ in range(500)]
    assert sorted(scales)[250] == pytest.approx(1.0, rel=0.15)
    assert sorted(scales)[420] == pytest.approx(2.5, rel=0.15)
    assert Lengths("median").draw_scale() == 1.0


def test_keys_are_bounded() -> None:
    made = Lengths("median")
    for n in range(6000):
        made.observe(request(tenant=f"t{n}"), 10)
    assert len(made._tables) <= 4096
    assert expected(made) == pytest.approx(10, abs=1)
