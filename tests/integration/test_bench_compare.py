"""Comparison, diff and layers, end to end against known servers."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.support.exact_server import Behaviour, running
from weighbridge.bench.compare import compare, server_arms
from weighbridge.bench.decide import _instance_calls, bench_decide
from weighbridge.bench.diff import differences, read_run
from weighbridge.bench.load import Load
from weighbridge.bench.record import read_records
from weighbridge.bench.run import RunOptions, measure
from weighbridge.bench.schedule import DrawOptions
from weighbridge.bench.slo import tiers_of
from weighbridge.core.metrics import RequestRecord


def test_a_server_that_refuses_half_is_told_apart(tmp_path: Path) -> None:
    plan = DrawOptions(rate=25.0, count=12, input="20", output="3")
    refusing = Behaviour(ttft=0.02, tpot=0.002, reject_every=2)
    with running(Behaviour(ttft=0.02, tpot=0.002)) as (good, _), running(refusing) as (bad, _):
        arms = server_arms([f"good={good}", f"bad={bad}"])
        found = compare(arms, RunOptions(url="", plan=plan, slo=("ttft=60",)), 2, tmp_path, lambda text: None)
    assert sorted(found["order"]) == ["bad"] * 2 + ["good"] * 2
    table = found["table"]
    assert table["good"]["attainment"]["mean"] == 1.0
    assert table["bad"]["difference"]["attainment"]["mean"] == -0.5
    assert table["bad"]["difference"]["attainment"]["decided"]
    assert table["bad"]["shed_rate"]["mean"] == 0.5
    # equal schedules in both arms, other ones in the next repeat
    sent = [
        [r.scheduled_s for r in read_records(tmp_path / f"{arm}/requests.jsonl")]
        for arm in ("good-0", "bad-0", "good-1")
    ]
    assert sorted(sent[0]) == sorted(sent[1])
    assert sorted(sent[0]) != sorted(sent[2])


def test_an_interrupt_ends_the_comparison_and_not_one_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = DrawOptions(rate=5.0, count=50, input="20", output="3")
    begun: list[Any] = []
    run = Load.run

    async def interrupted(load: Load, start: float | None = None) -> Any:
        begun.append(load)
        asyncio.get_running_loop().call_later(0.5, os.kill, os.getpid(), signal.SIGINT)
        return await run(load, start)

    monkeypatch.setattr(Load, "run", interrupted)
    with running(Behaviour(ttft=0.01, tpot=0.001)) as (url, _), pytest.raises(KeyboardInterrupt):
        compare(server_arms([f"a={url}", f"b={url}"]), RunOptions(url="", plan=plan), 3, tmp_path, lambda text: None)
    assert len(begun) == 1
    (kept,) = tmp_path.glob("*/requests.jsonl")
    assert 1 <= len(read_records(kept)) < 50


def test_runs_are_read_back_and_set_side_by_side_live_or_simulated(tmp_path: Path) -> None:
    plan = DrawOptions(rate=50.0, count=10, input="20", output="3")
    with running(Behaviour(ttft=0.05, tpot=0.005)) as (url, _):
        measure(RunOptions(url=url, plan=plan, out=tmp_path / "live"))
    simulated = []
    for k in range(10):
        at = 0.02 * k
        record = RequestRecord(
            id=f"r{k}", scheduled_s=at, status="ok", first_token_s=at + 500.0, last_token_s=at + 600.0
        )
        record.output_tokens = 3
        simulated.append(record)
    (tmp_path / "sim.jsonl").write_bytes(b"\n".join(msgspec.json.encode(r) for r in simulated))
    tiers = tiers_of(["ttft=100"])
    views = [read_run(f"live={tmp_path / 'live'}", tiers), read_run(f"sim={tmp_path / 'sim.jsonl'}", tiers)]
    found = differences(views)["runs"]
    assert found["sim"]["ttft_s"]["p50"]["change"] > 0.5
    assert found["live"]["attainment"] == 1.0
    assert found["sim"]["attainment"] == 0.0


def test_layers_are_timed_apart_and_say_what_was_not_measured() -> None:
    found = bench_decide(sizes=(15, 256), iterations=20)
    assert [row["tokens"] for row in found["sizes"]] == [15, 256]
    for row in found["sizes"]:
        for layer in ("encode_scores", "decide", "instance"):
            values = row[layer]
            assert 0 < values["min_ms"] <= values["p50_ms"] <= values["p95_ms"] <= values["p99_ms"] <= values["max_ms"]
            assert values["cold_ms"] > 0
        assert row["first_token"] is None
    assert "not measured" in found["layers"]["first_token"]
    assert found["device"]["actual"] == "cpu"
    assert found["selector"]["checkpoint"]


@pytest.mark.parametrize("policy", ["calibrated", "least_tokens"])
def test_the_instance_layer_times_placements_at_every_size(policy: str) -> None:
    for tokens in (15, 64, 256, 1024, 2500, 8192):
        prepare = _instance_calls(policy, tokens)
        for _ in range(5):
            prepare()()
        prepare()  # refuses when the call before held the request instead of placing it
