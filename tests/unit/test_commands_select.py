"""`weighbridge select` as a person types it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from weighbridge.cli import app
from weighbridge.core.errors import InputError

RUNNER = CliRunner()
KNOWN = (
    "Write a python function to check whether an array contains only one distinct element or not.\n"
    "Your code should pass these tests:\nassert unique_Element([1,1,1],3) == 'YES'"
)


def run(*arguments: str) -> Any:
    result = RUNNER.invoke(app, ["select", *arguments])
    assert result.exit_code == 0, (result.output, result.exception)
    return result.output


def refused(*arguments: str) -> str:
    result = RUNNER.invoke(app, ["select", *arguments])
    assert isinstance(result.exception, InputError), result.exception
    return str(result.exception)


def test_decide_prints_the_model_and_as_json_the_whole_decision() -> None:
    decision = json.loads(run("decide", "--text", KNOWN, "--json"))
    assert run("decide", "--text", KNOWN).startswith(decision["model"])
    explained = json.loads(run("decide", "--text", KNOWN, "--explain", "--json"))
    assert explained["decision"] == decision
    assert len(explained["decision"]["candidates"]) == 8
    assert explained["decision"]["provenance"]["checkpoint"]
    assert explained["words"]
    table = run("decide", "--text", KNOWN, "--explain")
    assert "checkpoint" in table
    assert "familiarity" in table


def test_decide_reads_a_chat_request_and_live_costs(tmp_path: Path) -> None:
    path = tmp_path / "request.json"
    path.write_text(json.dumps({"messages": [{"role": "user", "content": KNOWN}], "tools": []}))
    asked = ("decide", "--messages", str(path), "--json")
    only = json.loads(run(*asked, "--live", "glm-5=0.5:0.01"))
    assert only["model"] == "glm-5"
    assert sum("no healthy instance" in (c.get("excluded") or "") for c in only["candidates"]) == 7
    fixed = json.loads(run(*asked, "--mode", "fixed", "--model", "gpt-5.4"))
    assert fixed["model"] == "gpt-5.4"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("decide",), "exactly one of --text and --messages"),
        (("decide", "--text", "x", "--mode", "best"), "'best' is unknown; use quality"),
        (("decide", "--text", "x", "--live", "glm-5"), "is not MODEL=TTFT_S"),
        (("eval", "--data", ".", "--suite", "x"), "use crb, ood176 or mmlu"),
        (("eval", "--data", "/nowhere"), "cannot be read"),
        (("train", "--data", ".", "--out", "x", "--suite", "mmlu"), "cannot be trained on"),
    ],
)
def test_mistakes_are_named_with_the_remedy(arguments: tuple[str, ...], message: str) -> None:
    assert message in refused(*arguments)


def test_train_calibrate_decide_explain_and_feedback_on_own_data(tmp_path: Path) -> None:
    rows = [
        {"prompt": f"{kind} number {i}", "model": model, "score": float(model == "big" or kind == "poem")}
        for i in range(20)
        for kind in ("poem", "proof", "plan")
        for model in ("big", "small")
    ]
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    pool = tmp_path / "pool.yaml"
    pool.write_text("{pool: own, models: [{name: big, output_usd_per_1m: 50}, {name: small}]}")
    page = tmp_path / "report.html"
    made = json.loads(run("train", "--data", str(data), "--out", str(tmp_path / "ck"), "--report", str(page), "--json"))
    assert made["manifest"]["models"] == ["big", "small"]
    assert made["manifest"]["data"][0]["name"] == "rows.jsonl"
    assert "data:image/png" in page.read_text()
    recalibrated = ("--checkpoint", str(tmp_path / "ck"), "--out", str(tmp_path / "ck2"), "--json")
    again = json.loads(run("calibrate", "--data", str(data), *recalibrated))
    assert again["manifest"]["held_out"]["recalibrated_rows"] == 60
    own = ("--pool", str(pool), "--checkpoint", str(tmp_path / "ck2"))
    assert json.loads(run("decide", "--text", "poem number 3", *own, "--json"))["model"] == "small"
    proof = json.loads(run("decide", "--text", "proof number 3", *own, "--json"))
    assert proof["model"] == "big"
    facts = json.loads(run("explain", *own, "--json"))
    assert facts["fallback"] == "big"
    assert [m["learned_as"] for m in facts["models"]] == ["big", "small"]
    log = tmp_path / "feedback.jsonl"
    for _ in range(9):
        said = ("feedback", "--log", str(log), "--model", "big", "--score", "0", "--text", "proof number 3")
        run(*said, *own)
    taught = json.loads(run("decide", "--text", "proof number 3", *own, "--feedback", str(log), "--json"))
    assert taught["candidates"][0]["quality"] < proof["candidates"][0]["quality"] - 0.4


def test_bench_times_one_size_in_this_process() -> None:
    timed = json.loads(run("bench", "--size", "15", "--iterations", "20"))
    assert {
        "tokens",
        "chars",
        "p50_ms",
        "p95_ms",
        "min_ms",
        "max_ms",
        "cpu_p99_ms",
        "cold_ms",
        "load_s",
    } <= timed.keys()
    assert 0 < timed["min_ms"] <= timed["p50_ms"] <= timed["p95_ms"] <= timed["max_ms"]
