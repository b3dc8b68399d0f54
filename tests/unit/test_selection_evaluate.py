"""Scores, bootstrap, share curves and tables of labelled requests; the public suites where they are there."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from weighbridge.core.errors import InputError
from weighbridge.selection import evaluate, figures, trial
from weighbridge.selection.data import read_dataset
from weighbridge.selection.decision import Mode
from weighbridge.selection.opening import open_selector
from weighbridge.selection.suites import Cases, CodeRouterBench, read_table
from weighbridge.selection.timing import bench_text, time_decisions

SHARED = Path(__file__).resolve().parents[2].parent / "shared" / "routing"
needs_shared = pytest.mark.skipif(not SHARED.exists(), reason="the public routing tables are not beside the checkout")


def cases() -> Cases:
    scores = np.array([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0], [0.0, 0.0]])
    costs = np.array([[4.0, 1.0], [4.0, 1.0], [4.0, 1.0], [4.0, np.nan]])
    return Cases(("a", "b", "c", "d"), ("a", "b", "c", "d"), ("x", "y", "x", "y"), ("big", "small"), scores, costs)


def silent(stage: str, done: int, total: int) -> None:
    """No progress."""


def test_score_and_cost_of_a_choice() -> None:
    assert evaluate.result(cases(), evaluate.single(cases(), "big")) == evaluate.Result(avg_score=50.0, cost_usd=16.0)
    assert evaluate.result(cases(), evaluate.single(cases(), "small")) == evaluate.Result(avg_score=50.0, cost_usd=3.0)
    assert evaluate.random_result(cases()) == evaluate.Result(avg_score=50.0, cost_usd=9.5)


def test_the_oracle_takes_the_cheapest_of_the_best() -> None:
    assert evaluate.oracle(cases()).tolist() == [0, 1, 1, 0]


def test_the_bootstrap_interval_holds_the_difference_and_shrinks_with_more_cases() -> None:
    generator = np.random.default_rng(0)
    widths = []
    for count in (100, 1600):
        scores = generator.random((count, 2)) + np.array([0.2, 0.0])
        names = tuple(map(str, range(count)))
        many = Cases(names, names, names, ("a", "b"), scores, np.ones((count, 2)))
        gap = evaluate.paired(many, evaluate.single(many, "a"), evaluate.single(many, "b"))
        assert gap.low < gap.difference < gap.high
        assert gap.low < 20.0 < gap.high
        widths.append(gap.high - gap.low)
    assert widths[1] < widths[0] / 2.5
    same = evaluate.single(cases(), "big")
    assert evaluate.paired(cases(), same, same) == evaluate.Paired(difference=0.0, low=0.0, high=0.0)


def test_share_curve_of_perfect_random_and_reversed_orders() -> None:
    weak, strong = np.array([0.0, 1.0] * 500), np.ones(1000)
    perfect = evaluate.share_curve(strong - weak, weak, strong)
    assert perfect.apgr == pytest.approx(0.75, abs=0.001)
    assert perfect.cpt(0.5) == pytest.approx(25.0, abs=0.2)
    worst = evaluate.share_curve(weak - strong, weak, strong)
    assert worst.apgr == pytest.approx(0.25, abs=0.001)
    order = np.random.default_rng(0).random(1000)
    assert evaluate.share_curve(order, weak, strong).apgr == pytest.approx(0.5, abs=0.03)


def test_rows_of_csv_and_json_lines_are_gathered_by_prompt(tmp_path: Path) -> None:
    table = tmp_path / "rows.csv"
    table.write_text('prompt,model,score,family,output_tokens\n"a, b",m,1,x,10\n"a, b",n,0.5,x,\nc,m,0,y,3\n')
    data = read_dataset(table).dataset
    assert data.texts == ("a, b", "c")
    assert data.models == ("m", "n")
    assert data.scores[0].tolist() == [1.0, 0.5]
    assert np.isnan(data.scores[1, 1])
    assert data.output_tokens[:, 0].tolist() == [10.0, 3.0]
    assert data.families == ("x", "y")
    assert len(data.sources[0].sha256) == 64
    lines = tmp_path / "rows.jsonl"
    chat = {"messages": [{"role": "user", "content": "c"}], "model": "m", "score": 1}
    lines.write_text(json.dumps(chat) + "\n\n")
    assert read_dataset(lines).dataset.texts == ("c",)


def test_bad_rows_are_named_with_line_and_column(tmp_path: Path) -> None:
    table = tmp_path / "rows.csv"
    table.write_text("prompt,model,score\na,m,1\n,m,1\nb,m,7\nc,,1\nd,m,good\n")
    with pytest.raises(InputError) as caught:
        read_dataset(table)
    assert "4 bad rows" in str(caught.value)
    for part in ("line 3: prompt: is empty", "line 4: score: must lie", "line 5: model: is empty"):
        assert part in str(caught.value)
    assert "line 6: score: is no number: 'good'" in str(caught.value)
    loaded = read_dataset(table, skip_bad=True)
    assert loaded.dataset.texts == ("a",)
    assert len(loaded.bad) == 4


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("rows.txt", "x", "suffix must be"),
        ("rows.csv", "prompt,score\na,1\n", "has no column model"),
        ("rows.jsonl", "", "no usable row"),
        ("rows.jsonl", "{nope\n", "line 1: not JSON"),
        ("rows.jsonl", "[1]\n", "line 1: not a JSON object"),
        ("rows.jsonl", '{"prompt":"a","model":"m","score":1,"output_tokens":-3}\n', "output_tokens: must be a count"),
    ],
)
def test_files_that_cannot_be_used_say_why(tmp_path: Path, name: str, text: str, message: str) -> None:
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(InputError, match=message):
        read_dataset(path)
    with pytest.raises(InputError, match="cannot be read"):
        read_dataset(tmp_path / "absent.csv")


def test_parquet_is_read_and_refused_by_name(tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "rows.parquet"
    parquet.write_table(arrow.table({"prompt": ["a", "a"], "model": ["m", "n"], "score": [1.0, 0.0]}), path)
    assert read_dataset(path).dataset.scores.tolist() == [[1.0, 0.0]]
    path.write_bytes(b"not parquet")
    with pytest.raises(InputError, match="cannot be read as Parquet"):
        read_table(path)


def test_timing_uses_the_clocks_it_is_given() -> None:
    ticks = iter(range(10_000))
    timed = time_decisions(open_selector(), 60, 20, 0.25, lambda: next(ticks) * 1e-3, lambda: 0.0)
    assert (timed.p50_ms, timed.cold_ms, timed.cpu_p99_ms, timed.load_s) == (1.0, 1.0, 0.0, 0.25)
    assert timed.chars == len(bench_text(60, 0)) == 306
    assert bench_text(60, 0) != bench_text(60, 1)


def test_pictures_are_png_and_the_page_is_whole() -> None:
    pytest.importorskip("matplotlib")
    result = evaluate.Result(avg_score=50.0, cost_usd=1.0)
    picture = figures.score_against_cost([("$1", result)], {"other": result}, "title")
    curve = evaluate.share_curve(np.arange(4.0), np.zeros(4), np.ones(4))
    for png in (picture, figures.share_curves({"a": curve}, "t"), figures.reliability(np.eye(2), np.eye(2), "t")):
        assert png.startswith(b"\x89PNG")
    page = figures.page("a < b", {"x": 1}, [("caption", picture)])
    assert "a &lt; b" in page
    assert page.count("<img") == 1
    assert "http" not in page


@needs_shared
def test_the_packaged_checkpoint_beats_the_best_single_model_on_validation() -> None:
    report = trial.crb(SHARED, open_selector(), Mode.BALANCED, "val", silent)
    best = report.baselines["best_single (claude-opus-4-6)"]
    assert report.rows == 384
    assert report.avg_score > best.avg_score
    assert report.cost_usd < 0.65 * best.cost_usd
    assert report.gated < 12
    assert {"random", "true_label", "oracle"} <= report.baselines.keys()


@needs_shared
def test_unknown_families_all_go_to_the_fallback() -> None:
    report = trial.ood176(SHARED, open_selector(), Mode.BALANCED, silent)
    assert report.gated == report.rows == 176
    assert report.choices["claude-opus-4-6"] == 176


@needs_shared
def test_the_test_split_is_never_trained_on() -> None:
    suite = CodeRouterBench(SHARED)
    with pytest.raises(InputError, match="never trained on"):
        suite.dataset(("train", "test"))
    assert not set(suite.dataset().texts) - {row["prompt"] for row in suite._prompts if row["split"] == "train"}
