"""Comparison, sweep, diff and layers, end to end against known servers."""

from __future__ import annotations

import json
from pathlib import Path

from tests.support.exact_server import Behaviour, running
from weighbridge.bench.compare import compare, server_arms
from weighbridge.bench.decide import bench_decide
from weighbridge.bench.diff import differences, read_run
from weighbridge.bench.run import RunOptions
from weighbridge.bench.schedule import DrawOptions
from weighbridge.bench.slo import tiers_of
from weighbridge.bench.sweep import SweepOptions, picture, sweep
from weighbridge.core.metrics import RequestRecord


def test_a_slower_server_is_told_apart(tmp_path: Path) -> None:
    plan = DrawOptions(rate=25.0, count=12, input="20", output="3")
    with running(Behaviour(ttft=0.05, tpot=0.005)) as (fast, _), running(Behaviour(ttft=0.25, tpot=0.005)) as (slow, _):
        arms = server_arms([f"fast={fast}", f"slow={slow}"])
        found = compare(arms, RunOptions(url="", plan=plan, slo=("ttft=0.15",)), 3, tmp_path, lambda text: None)
    assert sorted(found["order"]) == ["fast"] * 3 + ["slow"] * 3
    difference = found["table"]["slow"]["difference"]
    assert difference["ttft_p50_s"]["low"] > 0.1
    assert difference["ttft_p50_s"]["decided"]
    assert difference["attainment"]["mean"] < -0.5
    # equal schedules: offered work is the same in both arms
    read = [json.loads((tmp_path / f"{arm}-1" / "report.json").read_text()) for arm in ("fast", "slow")]
    assert read[0]["total_output_tokens"] == read[1]["total_output_tokens"]


def test_runs_are_read_back_and_set_side_by_side_live_or_simulated(tmp_path: Path) -> None:
    plan = DrawOptions(rate=50.0, count=10, input="20", output="3")
    from weighbridge.bench.run import measure

    with running(Behaviour(ttft=0.05, tpot=0.005)) as (url, _):
        measure(RunOptions(url=url, plan=plan, out=tmp_path / "live"))
    import msgspec

    simulated = []
    for k in range(10):
        at = 0.02 * k
        record = RequestRecord(id=f"r{k}", scheduled_s=at, status="ok", first_token_s=at + 0.1, last_token_s=at + 0.2)
        record.output_tokens = 3
        simulated.append(record)
    (tmp_path / "sim.jsonl").write_bytes(b"\n".join(msgspec.json.encode(r) for r in simulated))
    tiers = tiers_of(["ttft=0.08"])
    views = [read_run(f"live={tmp_path / 'live'}", tiers), read_run(f"sim={tmp_path / 'sim.jsonl'}", tiers)]
    found = differences(views)["runs"]
    assert found["sim"]["ttft_s"]["p50"]["change"] > 0.5
    assert found["sim"]["attainment"] == 0.0


def test_the_sweep_finds_where_a_server_saturates(tmp_path: Path) -> None:
    # two at a time, 50 ms each: forty a second
    with running(Behaviour(ttft=0.05, tpot=0.001)) as (url, _):
        plan = DrawOptions(rate=1.0, duration_s=1.5, arrivals="constant", input="20", output="1")
        options = RunOptions(url=url, plan=plan, slo=("ttft=0.2",), max_concurrency=2)
        found = sweep(options, SweepOptions(start=15.0, refine=1), tmp_path, lambda text: None)
    assert found["knee_rate"] is not None
    assert 15.0 <= found["knee_rate"] < 60.0
    assert "lies between" in found["why"]
    assert "knee" in picture(found)


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
