"""Calibrating from an event log, and looking at profiles on the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.unit.test_calibrate_replay import recorded
from weighbridge.calibrate.recorded import read_run
from weighbridge.cli import app
from weighbridge.core.actions import Action, Dispatch
from weighbridge.core.errors import InputError, LogError, ProfileError
from weighbridge.core.event_log import Header, encode_entry, encode_header
from weighbridge.core.events import Event, FirstToken, InstanceUp, RequestArrived, RequestCancelled, RequestFinished
from weighbridge.core.instance import InstanceSpec, Limits
from weighbridge.core.request import Request

LIMITS = Limits(token_budget=1024, max_sequences=64, kv_blocks=4000)


def write_log(path: Path, instances: tuple[str, ...] = ("a",)) -> None:
    """120 requests of an engine of known cost on the first instance, and one that is cancelled."""
    specs = [InstanceSpec(name=name, kind="vllm", limits=LIMITS) for name in instances]
    rows: list[tuple[float, Event, tuple[Action, ...]]] = [(0.0, InstanceUp(spec=s, generation=1), ()) for s in specs]
    for r in recorded(120, 14.0, 9):
        request = Request(id=r.id, arrival_s=r.arrival_s, prompt_tokens=r.prompt_tokens + 3, max_tokens=4096)
        sent = Dispatch(request_id=r.id, instance=instances[0])
        rows.append((1.0 + r.arrival_s, RequestArrived(request=request), (sent,)))
        rows.append((1.0 + r.first_token_s, FirstToken(request_id=r.id), ()))
        finished = RequestFinished(request_id=r.id, output_tokens=r.output_tokens, prompt_tokens=r.prompt_tokens)
        rows.append((1.0 + r.last_token_s, finished, ()))
    late = Request(id="late", arrival_s=2.0, prompt_tokens=5, max_tokens=5)
    rows.append((2.0, RequestArrived(request=late), (Dispatch(request_id="late", instance=instances[0]),)))
    rows.append((2.1, RequestCancelled(request_id="late"), ()))
    rows.sort(key=lambda row: row[0])
    lines = [encode_header(Header(source="gateway")), *(encode_entry(t, e, a) for t, e, a in rows)]
    path.write_bytes(b"".join(lines))


def test_an_event_log_is_fitted_like_a_recorded_run(tmp_path: Path) -> None:
    log, out = tmp_path / "events.jsonl", tmp_path / "profile.json"
    write_log(log)
    arguments = ["calibrate", "--from", str(log), "--fit-first", "60", "--out", str(out), "--json"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert report["requests"] == 120, "the cancelled one is left out"
    assert report["e2e_mape"] < 0.05
    shown = CliRunner().invoke(app, ["calibrate", "--show", str(out)])
    assert "ms per step" in shown.stdout
    assert "requests that were not fitted" in shown.stdout
    same = CliRunner().invoke(app, ["calibrate", "--diff", str(out), str(out), "--json"])
    assert {row["ratio"] for row in json.loads(same.stdout) if row.get("ratio") is not None} == {1.0}


def test_which_instance_must_be_told_where_there_are_several(tmp_path: Path) -> None:
    log = tmp_path / "events.jsonl"
    write_log(log, ("a", "b"))
    with pytest.raises(LogError, match="name one by --instance; the log has a, b"):
        read_run(log, None)
    with pytest.raises(LogError, match="instance 'b' ended no request"):
        read_run(log, None, "b")
    with pytest.raises(LogError, match="no instance 'c'"):
        read_run(log, None, "c")
    assert len(read_run(log, None, "a")[0]) == 120


def test_request_timings_need_their_meta_file(tmp_path: Path) -> None:
    (tmp_path / "r.jsonl").write_text("{}")
    with pytest.raises(InputError, match="need --meta"):
        read_run(tmp_path / "r.jsonl", None)


def test_a_corrupt_and_a_future_profile_are_refused(tmp_path: Path) -> None:
    bad, future = tmp_path / "bad.json", tmp_path / "future.json"
    bad.write_text('{"schema_version": 1, "rates": {"prefill_tokens_per_s": -1, "decode_tokens_per_s": 1}}')
    future.write_text('{"schema_version": 99, "rates": {}}')
    for path, message in ((bad, "prefill_tokens_per_s is -1"), (future, "schema version 99 is newer")):
        result = CliRunner().invoke(app, ["calibrate", "--show", str(path)])
        assert isinstance(result.exception, ProfileError)
        assert message in str(result.exception)


def test_a_prior_is_written_and_says_that_it_is_none(tmp_path: Path) -> None:
    config, out = tmp_path / "config.json", tmp_path / "prior.json"
    config.write_text(
        '{"hidden_size": 576, "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3, '
        '"intermediate_size": 1536, "vocab_size": 49152, "tie_word_embeddings": true}'
    )
    result = CliRunner().invoke(app, ["calibrate", "--prior", str(config), "--device", "L4", "--out", str(out)])
    assert result.exit_code == 0, result.output
    assert "not a measurement" in " ".join(result.stdout.split())
    assert json.loads(out.read_text())["source"] == "prior"
