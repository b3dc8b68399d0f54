"""Schedules: fixed by seed, statistically right, and traces scaled as asked."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path

import pytest
from scipy import stats

from weighbridge.bench.schedule import DrawOptions, TraceOptions, drawn, from_trace, shards, with_warmup
from weighbridge.core.errors import ConfigError

TRACE = Path(__file__).resolve().parents[2].parent / "shared" / "traces" / "azure_conv.2023.csv.gz"


def own_trace(tmp_path: Path) -> Path:
    rows = [
        {"arrival_s": 10.0 * k, "prompt_tokens": 800, "output_tokens": 80, "blocks": [1, 2], "block_tokens": 400}
        for k in range(5)
    ]
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in rows))
    return path


def test_the_same_seed_gives_the_same_schedule_and_another_seed_another() -> None:
    options = DrawOptions(rate=10.0, duration_s=20.0, input="exp:200", output="exp:50")
    assert drawn(options, 3) == drawn(options, 3)
    assert drawn(options, 3) != drawn(options, 4)


def test_poisson_gaps_pass_a_kolmogorov_smirnov_test() -> None:
    plan = drawn(DrawOptions(rate=40.0, count=4000), 1)
    gaps = [b.at_s - a.at_s for a, b in itertools.pairwise(plan)]
    assert stats.kstest(gaps, stats.expon(scale=1 / 40.0).cdf).pvalue > 0.01


def test_burstiness_is_the_shape_of_gamma_gaps() -> None:
    plan = drawn(DrawOptions(rate=40.0, count=8000, burstiness=0.25), 1)
    gaps = [b.at_s - a.at_s for a, b in itertools.pairwise(plan)]
    assert stats.kstest(gaps, stats.gamma(0.25, scale=1 / (40.0 * 0.25)).cdf).pvalue > 0.01


@pytest.mark.parametrize("kind", ["linear", "exponential"])
def test_a_ramp_has_the_asked_number_of_arrivals_in_each_half(kind: str) -> None:
    plan = drawn(DrawOptions(rate=math.inf, duration_s=100.0, ramp=kind, ramp_from=10.0, ramp_to=90.0), 2)
    first = sum(p.at_s < 50.0 for p in plan)
    if kind == "linear":
        expected = (10 + 50) / 2 * 50, (50 + 90) / 2 * 50
    else:
        rate = math.log(9) / 100
        expected = (10 * (math.exp(50 * rate) - 1) / rate, (90 - 10 * math.exp(50 * rate)) / rate)
    assert first == pytest.approx(expected[0], rel=0.08)
    assert len(plan) - first == pytest.approx(expected[1], rel=0.08)


def test_a_trace_is_cut_stretched_and_scaled(tmp_path: Path) -> None:
    path = own_trace(tmp_path)
    plan = from_trace(TraceOptions(path, from_s=10.0, for_s=25.0, time_scale=0.1, length_scale=0.125))
    assert [p.at_s for p in plan] == pytest.approx([0.0, 1.0, 2.0])
    assert {(p.prompt_tokens, p.output_tokens, p.block_tokens) for p in plan} == {(100, 10, 50)}
    capped = from_trace(TraceOptions(path, max_prompt_tokens=64, max_output_tokens=16, count=2))
    assert {(p.prompt_tokens, p.output_tokens) for p in capped} == {(64, 16)}
    assert len(capped) == 2


def test_a_trace_can_be_stretched_to_a_rate(tmp_path: Path) -> None:
    plan = from_trace(TraceOptions(own_trace(tmp_path), rate=5.0))
    assert plan[-1].at_s == pytest.approx(1.0)


@pytest.mark.skipif(not TRACE.is_file(), reason="needs ../shared/traces")
def test_ten_minutes_of_a_production_trace() -> None:
    plan = from_trace(TraceOptions(TRACE, for_s=600.0, time_scale=3.0, length_scale=0.125))
    assert 2500 < len(plan) < 4000
    assert plan[-1].at_s <= 1800.0
    assert all(a.at_s <= b.at_s for a, b in itertools.pairwise(plan))


def test_shards_keep_every_request_once() -> None:
    plan = drawn(DrawOptions(rate=10.0, count=10), 0)
    parts = shards(plan, 3)
    assert sorted((p for part in parts for p in part), key=lambda p: p.id) == plan
    assert [len(part) for part in parts] == [4, 3, 3]


def test_warmup_is_marked() -> None:
    plan = with_warmup(drawn(DrawOptions(rate=10.0, duration_s=10.0), 0), 3.0)
    assert all(p.warmup == (p.at_s < 3.0) for p in plan)
    assert any(p.warmup for p in plan)


def test_a_mix_brings_its_tiers_and_prefixes_their_blocks() -> None:
    plan = drawn(DrawOptions(rate=50.0, count=200, mix="mixed"), 0)
    assert {p.tier for p in plan} == {"chat", "document", "reasoning"}
    shared = drawn(DrawOptions(rate=50.0, count=50, prefix="2x64", input="32"), 0)
    heads = {p.blocks[:4] for p in shared}
    assert len(heads) == 2
    assert all(p.prompt_tokens == 96 for p in shared)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (DrawOptions(rate=5.0), "--duration"),
        (DrawOptions(rate=0.0, count=5), "--rate"),
        (DrawOptions(rate=math.inf, duration_s=5.0), "--num-prompts"),
        (DrawOptions(rate=5.0, count=5, mix="soup"), "--mix"),
        (DrawOptions(rate=5.0, count=5, prefix="10"), "--prefix"),
        (DrawOptions(rate=5.0, count=5, input="exp:0"), "--input"),
        (DrawOptions(rate=0.001, duration_s=0.01), "schedule is empty"),
        (DrawOptions(rate=1.0, duration_s=5.0, ramp="steep", ramp_from=1, ramp_to=2), "--ramp-up-strategy"),
    ],
)
def test_bad_options_name_the_flag(options: DrawOptions, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        drawn(options)
