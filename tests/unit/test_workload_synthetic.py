"""Synthetic workloads: streams that do not disturb each other, mixes, heterogeneity, prefixes, conversations."""

from __future__ import annotations

import itertools
import subprocess
import sys

import numpy as np
import pytest

from weighbridge.workload import mixes
from weighbridge.workload.arrivals import Poisson
from weighbridge.workload.lengths import Exponential, Fixed, Lognormal
from weighbridge.workload.prefixes import PrefixLevel, PrefixTree
from weighbridge.workload.streams import Streams
from weighbridge.workload.synthetic import Conversations, RequestClass, Synthetic


def test_streams_are_named_and_repeatable() -> None:
    assert Streams(1).get("a").random() == Streams(1).get("a").random()
    assert Streams(1).get("a").random() != Streams(1).get("b").random()
    assert Streams(1).get("a").random() != Streams(2).get("a").random()


def test_a_draw_more_in_one_stream_moves_no_other() -> None:
    def workload(prompt: Exponential | Fixed) -> list[tuple[float, int]]:
        made = Synthetic(Poisson(3.0), (RequestClass("", 1.0, prompt, Exponential(50.0)),)).generate(4, count=200)
        return [(r.arrival_s, r.output_tokens) for r in made]

    # A fixed length draws nothing, an exponential one draws each time: times and outputs stay.
    assert workload(Fixed(10)) == workload(Exponential(10.0))


def test_another_process_generates_the_same_trace() -> None:
    code = (
        "from weighbridge.workload import mixes;"
        "print([(r.arrival_s, r.prompt_tokens, r.kind) for r in mixes.mixed_bursty(5.0).generate(3, count=20)])"
    )
    runs = {
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
        for _ in range(2)
    }
    here = [(r.arrival_s, r.prompt_tokens, r.kind) for r in mixes.mixed_bursty(5.0).generate(3, count=20)]
    assert runs == {f"{here}\n"}


def test_the_mixed_workload_has_its_shares_and_lengths() -> None:
    trace = list(mixes.steady(50.0).generate(1, count=20_000))
    documents = [r for r in trace if r.kind == "document"]
    assert len(documents) / len(trace) == pytest.approx(0.25, abs=0.01)
    assert np.mean([r.prompt_tokens for r in documents]) == pytest.approx(3_400, rel=0.02)
    assert np.mean([r.output_tokens for r in trace if r.kind == "reasoning"]) == pytest.approx(900, rel=0.04)


def test_heterogeneity_scales_the_spread_and_keeps_the_load() -> None:
    def figures(degree: float) -> tuple[float, float, float]:
        trace = list(mixes.steady(50.0, heterogeneity=degree).generate(1, count=20_000))
        prompts = np.array([r.prompt_tokens for r in trace], float)
        outputs = np.array([r.output_tokens for r in trace], float)
        return prompts.mean(), outputs.mean(), float(np.log(prompts).std())

    plain, flat, half = figures(1.0), figures(0.0), figures(0.5)
    assert flat[0] == pytest.approx(plain[0], rel=0.03)
    assert flat[1] == pytest.approx(plain[1], rel=0.05)
    assert flat[2] == pytest.approx(0.0, abs=0.01)
    assert half[2] == pytest.approx(plain[2] / 2, rel=0.1)
    bounds = [c.ttft_slo_s for c in mixes.classes("mixed", 0.0)]
    assert max(bounds) == pytest.approx(min(bounds))


def test_heterogeneity_refuses_lengths_it_cannot_scale() -> None:
    from weighbridge.workload.synthetic import with_heterogeneity

    with pytest.raises(ValueError, match="lognormal"):
        with_heterogeneity((RequestClass("", 1.0, Fixed(3), Lognormal(5, 1.0)),), 0.5)


def test_equal_paths_share_blocks_and_others_do_not() -> None:
    tree = PrefixTree((PrefixLevel(2, 64), PrefixLevel(3, 40)), block_tokens=16)
    first, second, other = tree.prefix((0, 1)), tree.prefix((0, 2)), tree.prefix((1, 1))
    assert len(first) == (64 + 40) // 16
    assert first[:4] == second[:4]
    assert first[4:] != second[4:]
    assert not set(first) & set(other)
    assert tree.prefix((0, 1)) == first


def test_prompts_include_their_shared_prefix() -> None:
    tree = PrefixTree((PrefixLevel(4, 160, skew=1.0),))
    workload = Synthetic(Poisson(10.0), (RequestClass("", 1.0, Fixed(100), Fixed(10)),), prefixes=tree)
    trace = list(workload.generate(1, count=400))
    assert {r.prompt_tokens for r in trace} == {260}
    assert all(len(r.blocks) == 260 // 16 for r in trace)
    heads = [r.blocks[:10] for r in trace]
    assert len(set(heads)) == 4
    assert len({r.blocks for r in trace}) == 400


def test_each_turn_of_a_conversation_extends_the_one_before() -> None:
    made = Conversations(Poisson(1.0), Exponential(60.0), Exponential(80.0), turns=5.0, system_tokens=64)
    trace = list(made.generate(2, duration_s=200.0))
    assert [r.arrival_s for r in trace] == sorted(r.arrival_s for r in trace)
    by_session: dict[str, list] = {}
    for request in trace:
        by_session.setdefault(request.session, []).append(request)
    assert max(len(turns) for turns in by_session.values()) >= 4
    for turns in by_session.values():
        for earlier, later in itertools.pairwise(turns):
            assert later.blocks[: len(earlier.blocks)] == earlier.blocks
            assert later.prompt_tokens > earlier.prompt_tokens + earlier.output_tokens
    systems = {r.blocks[:4] for r in trace}
    assert len(systems) == 1
