"""Recorded runs: reading, refusing, and the three recorded runs of a real vLLM."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from weighbridge.calibrate.files import read_profile, write_profile
from weighbridge.calibrate.recorded import read_limits, read_requests
from weighbridge.cli import app
from weighbridge.core.errors import InputError, LogError

LOGS = Path(__file__).resolve().parents[2].parent / "shared" / "vllm-logs"
GOOD = {
    "request_id": "a",
    "input_toks": 10,
    "output_toks": 3,
    "arrival_time": 1000.0,
    "queued_ts": 5.5,
    "first_token_ts": 6.0,
    "last_token_ts": 7.0,
}


def _lines(**changes: object) -> list[str]:
    return [
        json.dumps(GOOD),
        json.dumps(GOOD | {"request_id": "b", "arrival_time": 1000.2, "queued_ts": 6.0} | changes),
    ]


def test_boundaries_start_the_clock_where_they_say() -> None:
    engine = read_requests(_lines(), "log")
    client = read_requests(_lines(), "log", "client")
    assert [r.arrival_s for r in engine] == [0.0, 0.5]
    assert client[1].arrival_s == pytest.approx(0.2)
    assert engine[0].ttft_s == pytest.approx(0.5)
    assert engine[0].tpot_s == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"input_toks": 0}, "line 2: input_toks is 0"),
        ({"output_toks": 2.5}, "line 2: output_toks is 2.5"),
        ({"first_token_ts": None}, "line 2: needs a number in first_token_ts"),
        ({"first_token_ts": 5.0}, "line 2: first token before arrival"),
    ],
)
def test_a_bad_row_is_named_with_its_line_and_field(changes: dict[str, object], message: str) -> None:
    with pytest.raises(LogError, match=message):
        read_requests(_lines(**changes), "log")


def test_a_line_that_is_no_json_and_an_empty_file_are_refused() -> None:
    with pytest.raises(LogError, match="line 1: not JSON"):
        read_requests(["{"], "log")
    with pytest.raises(LogError, match="holds no request"):
        read_requests([], "log")


def test_limits_come_from_the_meta_file_or_are_asked_for() -> None:
    limits, told = read_limits(
        json.dumps(
            {
                "model": "m",
                "vllm_version": "0.19.0",
                "engine_kwargs": {"max_num_batched_tokens": 2048, "max_num_seqs": 64},
                "kv_cache": {"num_gpu_blocks": 100, "block_size": 32},
            }
        ).encode(),
        "meta",
    )
    assert (limits.token_budget, limits.max_sequences, limits.kv_tokens) == (2048, 64, 3200)
    assert told["engine"] == "vllm"
    with pytest.raises(LogError, match="lacks max_num_batched_tokens"):
        read_limits(b'{"engine_kwargs": {}}', "meta")


@pytest.mark.skipif(not LOGS.is_dir(), reason="needs shared/vllm-logs beside the checkout")
@pytest.mark.parametrize(
    ("run", "ttft", "tpot", "e2e"),
    [
        ("RTXPRO6000_Llama-3.1-8B", 0.07, 0.06, 0.03),
        ("RTXPRO6000_Qwen3-32B", 0.07, 0.06, 0.03),
        # which requests the full cache preempts decides their TPOT, and that is chance at the margin
        ("RTX4090_Llama-3.1-8B", 0.07, 0.08, 0.03),
    ],
)
def test_recorded_vllm_runs_are_forecast(run: str, ttft: float, tpot: float, e2e: float, tmp_path: Path) -> None:
    out = tmp_path / "profile.json"
    result = CliRunner().invoke(
        app,
        [
            "calibrate",
            *("--from", str(LOGS / f"{run}.requests.jsonl"), "--meta", str(LOGS / f"{run}.meta.json")),
            *("--fit-first", "100", "--json", "--out", str(out)),
        ],
    )
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert report["evaluated"] == 200
    assert report["ttft_mape"] <= ttft
    assert report["tpot_mape"] <= tpot
    assert report["e2e_mape"] <= e2e
    assert report["identifiable"] is False, "saturated runs do not identify every term"
    profile = read_profile(out)
    assert profile.step is not None
    assert profile.residuals["e2e_s"].count == 200
    assert profile.error is not None
    assert profile.error < 0.05


def test_writing_a_profile_leaves_no_half_file(tmp_path: Path) -> None:
    from weighbridge.core.instance import Rates
    from weighbridge.cost.profile import Profile

    profile = Profile(rates=Rates(prefill_tokens_per_s=100.0, decode_tokens_per_s=10.0))
    write_profile(tmp_path / "p.json", profile)
    assert read_profile(tmp_path / "p.json") == profile
    assert [p.name for p in tmp_path.iterdir()] == ["p.json"]
    (tmp_path / "folder").mkdir()
    with pytest.raises(InputError, match="cannot be written"):
        write_profile(tmp_path / "folder", profile)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["folder", "p.json"]
