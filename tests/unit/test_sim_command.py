"""`weighbridge simulate` and `weighbridge trace` as a person uses them."""

from __future__ import annotations

import io
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from weighbridge.cli import app
from weighbridge.core.errors import WeighbridgeError
from weighbridge.core.event_log import LogReader
from weighbridge.routing import replay

FLEET = """
instances:
  - {name: fast, count: 2, preset: rtx-pro-6000}
  - {name: slow, count: 1, preset: rtx-pro-6000, slowdown: 2, kv_blocks: 900}
faults:
  - {at_s: 5, kind: slow, instance: slow0, factor: 3}
"""
TRACE = "arrived_at,num_prefill_tokens,num_decode_tokens\n" + "".join(f"{k * 0.1},{50 + k},20\n" for k in range(60))


def run(*arguments: str) -> str:
    result = CliRunner().invoke(app, list(arguments), catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def fails(*arguments: str) -> str:
    """The error that the command line would print."""
    with pytest.raises(WeighbridgeError) as error:
        CliRunner().invoke(app, list(arguments), catch_exceptions=False)
    return str(error.value)


def test_json_has_the_promised_fields() -> None:
    out = json.loads(
        run(
            "simulate", "--instances", "8", "--requests", "800", "--rate", "80", "--input", "exp:500", "--output",
            "exp:150", "--policy", "least_tokens", "--seed", "1", "--json",
        )
    )  # fmt: skip
    assert out["requests_per_cpu_s"] > 0
    assert out["peak_rss_mb"] > 0
    for metric in ("ttft_s", "tpot_s", "e2e_s"):
        assert 0 < out[metric]["mean"] <= out[metric]["p99"] <= out[metric]["max"]
        assert out[metric]["p50"] <= out[metric]["p90"] <= out[metric]["p95"]
    assert 0.9 < out["attainment"] <= 1.0
    assert out["by_status"] == {"ok": 800}


def test_the_table_fits_a_narrow_terminal() -> None:
    out = run("simulate", "--requests", "200", "--instances", "2")
    assert "TTFT" in out
    assert "attainment" in out
    assert max(len(line) for line in out.splitlines() if "│" in line or "─" in line) <= 80


def test_several_policies_over_seeds_of_a_trace_on_a_fleet(tmp_path: Path) -> None:
    (tmp_path / "fleet.yaml").write_text(FLEET)
    (tmp_path / "trace.csv").write_text(TRACE)
    arguments = (
        "simulate", "--trace", str(tmp_path / "trace.csv"), "--fleet", str(tmp_path / "fleet.yaml"), "--policy",
        "round_robin,least_tokens", "--seeds", "2", "--jobs", "1",
    )  # fmt: skip
    out = json.loads(run(*arguments, "--json"))
    assert set(out["attainment"]) == {"round_robin", "least_tokens"}
    assert out["policies"]["least_tokens"]["difference"]["count"] == 2
    assert {(r["policy"], r["seed"]) for r in out["runs"]} == {
        (p, s) for p in ("round_robin", "least_tokens") for s in (1, 2)
    }
    text = run(*arguments)
    assert "least_tokens" in text
    assert "diff" in text


def test_processes_give_what_one_process_gives(tmp_path: Path) -> None:
    arguments = ("simulate", "--requests", "300", "--rate", "30", "--policy", "random,work", "--seeds", "2", "--json")
    one, two = json.loads(run(*arguments, "--jobs", "1")), json.loads(run(*arguments, "--jobs", "2"))
    assert one["attainment"] == two["attainment"]
    assert [r["ttft_s"] for r in one["runs"]] == [r["ttft_s"] for r in two["runs"]]


def test_log_records_and_chrome_trace_are_written(tmp_path: Path) -> None:
    log, records, chrome = tmp_path / "events.jsonl", tmp_path / "records.jsonl", tmp_path / "steps.json"
    run(
        "simulate", "--requests", "100", "--instances", "2", "--log", str(log), "--records", str(records), "--chrome",
        str(chrome),
    )  # fmt: skip
    reader = LogReader(io.BytesIO(log.read_bytes()))
    assert reader.header.source == "simulator"
    assert not replay.check(reader.header, reader).mismatches
    rows = [json.loads(line) for line in records.read_text().splitlines()]
    assert len(rows) == 100
    assert {"id", "scheduled_s", "status", "first_token_s", "last_token_s"} <= set(rows[0])
    events = json.loads(chrome.read_text())["traceEvents"]
    spans = [e for e in events if e["ph"] == "X"]
    assert {e["args"]["name"] for e in events if e["ph"] == "M"} == {"i0", "i1"}
    for row in (0, 1):
        mine = sorted((s["ts"], s["dur"]) for s in spans if s["tid"] == row)
        assert all(a[0] + a[1] <= b[0] + 1e-3 for a, b in itertools.pairwise(mine))
    assert sum(s["args"]["prefill_tokens"] for s in spans) == sum(r["prompt_tokens"] for r in rows)


def test_fixed_assignment_and_stepwise() -> None:
    fixed = json.loads(run("simulate", "--requests", "300", "--assign", "fixed", "--json"))
    assert fixed["policy"] == "fixed"
    step = json.loads(run("simulate", "--requests", "300", "--assign", "fixed", "--stepwise", "--json"))
    assert step["e2e_s"]["mean"] == pytest.approx(fixed["e2e_s"]["mean"], abs=1e-9)
    assert step["steps"] == fixed["steps"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--input", "exp:-5"), "--input"),
        (("--arrivals", "weibull"), "arrivals"),
        (("--policy", "best"), "unknown policy 'best'; known: "),
        (("--policy", ","), "--policy: name at least one"),
        (("--rate", "0"), "--rate: must be above 0"),
        (("--instances", "0"), "--instances: must be at least 1"),
        (("--mix", "poems"), "--mix: no mix 'poems'"),
        (("--assign", "sticky"), "--assign: must be router or fixed"),
        (("--trace", "absent.csv"), "cannot read trace absent.csv"),
        (("--fleet", "absent.yaml"), "absent.yaml: cannot be read"),
        (("--seeds", "2", "--log", "x"), "need one policy and one seed"),
    ],
)
def test_a_wrong_flag_is_named(arguments: tuple[str, ...], message: str) -> None:
    assert message in fails("simulate", "--requests", "10", *arguments)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("instances: [{name: a, preset: h100}]", "fleet.yaml:1: $.instances[0].preset: no preset 'h100'"),
        ("instances:\n  - {name: a}", "fleet.yaml:2: $.instances[0]: give exactly one of profile, step or preset"),
        ("instances: [{name: a, preset: rtx-4090, speed: 2}]", "unknown key"),
        ("instances: [{name: a, preset: rtx-4090, role: decode}]", "needs prefill and decode"),
        (
            "instances: [{name: a, preset: rtx-4090}]\nfaults: [{at_s: 1, kind: fail, instance: b0}]",
            "no instance is called 'b0'",
        ),
        ("instances: [{name: a, profile: none.json}]", "cannot be read"),
        ("instances: []", "at least one instance"),
    ],
)  # fmt: skip
def test_a_wrong_fleet_file_is_named_with_its_place(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "fleet.yaml"
    path.write_text(text)
    assert message in fails("simulate", "--requests", "10", "--fleet", str(path))


def test_bad_rows_are_named_or_counted(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(TRACE + "7.0,none,5\n")
    assert "line 62, column num_prefill_tokens" in fails("simulate", "--trace", str(path))
    assert json.loads(run("simulate", "--trace", str(path), "--skip-bad", "--json"))["skipped"] == 1


def test_experiments_are_listed_and_run_by_name(tmp_path: Path) -> None:
    assert "two-backends: A slow and a fast backend" in run("simulate", "experiment", "list")
    out = json.loads(run("simulate", "experiment", "scenario-ab", "--quick", "--json", "--out", str(tmp_path)))
    assert {"attainment", "by_trace", "findings", "loses", "seeds"} <= set(out)
    assert "40 times the work" in (tmp_path / "scenario-ab.md").read_text()
    assert (tmp_path / "scenario-ab.png").stat().st_size > 5_000
    assert json.loads((tmp_path / "scenario-ab.json").read_text())["data"] == out["data"]
    assert "no experiment 'x'" in fails("simulate", "experiment", "x")


def test_trace_describe_and_convert(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(TRACE)
    out = json.loads(run("trace", "describe", str(path), "--json"))
    assert (out["format"], out["requests"], out["skipped"]) == ("vidur", 60, 0)
    assert out["rate"] == pytest.approx(10.0)
    assert out["interarrival_cv"] == pytest.approx(0.0, abs=1e-6)
    assert "60 requests" in run("trace", "describe", str(path))
    own = tmp_path / "own.jsonl.gz"
    assert "60 requests written" in run("trace", "convert", str(path), str(own), "--rate", "20")
    again = json.loads(run("trace", "describe", str(own), "--json"))
    assert again["format"] == "weighbridge"
    assert again["rate"] == pytest.approx(20.0, rel=0.03)


def test_ctrl_c_keeps_what_is_done(tmp_path: Path) -> None:
    log = tmp_path / "events.jsonl"
    command = [
        sys.executable, "-m", "weighbridge.cli", "simulate", "--requests", "100000000", "--instances", "2", "--rate",
        "10", "--json", "--log", str(log),
    ]  # fmt: skip
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env={**os.environ})
    deadline = time.monotonic() + 30
    while (not log.exists() or log.stat().st_size < 500_000) and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    out, error = process.communicate(timeout=30)
    assert process.returncode == 130, error
    result = json.loads(out)
    assert result["interrupted"] is True
    assert 0 < result["requests"] < 100_000_000
    assert result["by_status"]["ok"] > 0
