"""The load generator against a server whose delays are known: figures, stalls, failures of every kind."""

from __future__ import annotations

import json
import math
import shutil
import ssl
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from tests.support.exact_server import Behaviour, running
from weighbridge.bench.record import read_records
from weighbridge.bench.record_table import read_any
from weighbridge.bench.run import Measurement, RunOptions, measure
from weighbridge.bench.schedule import DrawOptions, TraceOptions
from weighbridge.core.errors import ConfigError, UpstreamError


def run(url: str, tmp_path: Path, plan: DrawOptions | TraceOptions | None = None, **changes: Any) -> Measurement:
    plan = plan or DrawOptions(rate=20.0, count=20, arrivals="constant", input="50", output="10")
    return measure(RunOptions(url=url, plan=plan, out=tmp_path, **changes))


def test_figures_equal_the_known_delays(tmp_path: Path) -> None:
    with running(Behaviour(ttft=0.12, tpot=0.02, per_word=1.5)) as (url, server):
        found = run(url, tmp_path)
    report = found.report
    assert report["by_status"] == {"ok": 20}
    # never less than the known delays; how much more depends on how busy this machine is
    assert report["ttft_s"]["min"] >= 0.119
    assert report["e2e_s"]["min"] >= 0.119 + 9 * 0.02 - 0.002
    assert report["output_tokens_per_s"] > 0
    assert report["tokens"]["from_usage"] == 20
    assert report["tokens"]["output_exact"] == 1.0
    assert report["tokens"]["prompt_over_wanted"] == pytest.approx(1.0, abs=0.03)
    assert report["frame_gap_s"]["count"] == 20 * 9
    assert server.bodies[0]["ignore_eos"] is True
    assert server.bodies[0]["max_tokens"] == 10
    assert report["littles_law"]["sampled"] > 0
    assert len(read_records(tmp_path / "requests.jsonl")) == 20
    assert json.loads((tmp_path / "report.json").read_text())["num_prompts"] == 20


def test_a_stall_of_the_server_appears_in_full(tmp_path: Path) -> None:
    """No coordinated omission: everything scheduled during the stall waits for its end, and is charged for it."""
    with running(Behaviour(ttft=0.01, tpot=0.001, stall_at=0.6, stall_for=1.5)) as (url, server):
        plan = DrawOptions(rate=40.0, count=100, arrivals="constant", input="20", output="2")
        found = run(url, tmp_path, plan)
    ttft = sorted(r.ttft_s or math.inf for r in found.result.records)
    assert found.report["by_status"] == {"ok": 100}
    assert ttft[-1] > 1.4
    # 60 requests were due during the stall, evenly: about half of them waited longer than half of it
    assert sum(t > 0.74 for t in ttft) >= 26
    assert server.count == 100


def test_tokens_come_from_usage_and_gaps_are_told_apart(tmp_path: Path) -> None:
    with running(Behaviour(ttft=0.02, tpot=0.005, tokens_per_frame=4)) as (url, _):
        report = run(url, tmp_path, DrawOptions(rate=50.0, count=10, input="20", output="32")).report
    assert report["tokens"]["output"] == 320
    assert report["tokens"]["frames"] == 80
    assert report["frame_gap_s"]["count"] == 70
    assert report["itl_s"]["count"] == 310
    assert report["itl_s"]["p50"] == 0.0
    assert report["tpot_s"]["count"] == 10


def test_first_token_of_any_kind_and_first_content_are_apart(tmp_path: Path) -> None:
    behaviour = Behaviour(ttft=0.05, tpot=0.02, thinking_tokens=5, empty_first=True)
    with running(behaviour) as (url, _):
        report = run(url, tmp_path, DrawOptions(rate=50.0, count=5, input="20", output="8")).report
    assert report["ttft_s"]["min"] >= 0.049
    assert report["first_content_s"]["min"] >= 0.05 + 5 * 0.02 - 0.002
    assert report["first_byte_s"]["p50"] <= report["ttft_s"]["p50"] <= report["first_content_s"]["p50"]


def test_no_usage_is_counted_from_frames_and_flagged(tmp_path: Path) -> None:
    with running(Behaviour(ttft=0.01, tpot=0.001, usage=False)) as (url, _):
        report = run(url, tmp_path).report
    assert report["tokens"]["from_frames"] == 20
    assert report["tokens"]["output"] == 200
    assert any("counted from frames" in text for text in report["generator"]["warnings"])
    assert any("no usage" in text for text in report["notes"])


@pytest.mark.parametrize(
    ("behaviour", "status", "words"),
    [
        (Behaviour(0.01, 0.001, fail_every=2), "failed", "HTTP 500: the engine fell over"),
        (Behaviour(0.01, 0.001, reject_every=2), "rejected", "HTTP 429"),
        (Behaviour(0.01, 0.001, cut_every=2), "failed", "closed the connection in the middle"),
        (Behaviour(0.01, 0.001, garble_every=2), "failed", "malformed stream"),
        (Behaviour(0.01, 0.001, error_frame_every=2), "failed", "error frame: out of memory"),
    ],
)
def test_half_the_requests_going_wrong(tmp_path: Path, behaviour: Behaviour, status: str, words: str) -> None:
    with running(behaviour) as (url, _):
        report = run(url, tmp_path, slo=("ttft=100",)).report
    assert report["by_status"] == {"ok": 10, status: 10}
    assert report["attainment"] == 0.5
    assert any(words in text for text in report["errors"])
    assert report["adjusted"]["e2e_s"]["p99"] == math.inf
    assert report["shed_rate"] == (0.5 if status == "rejected" else 0.0)


def test_timeouts_impatience_and_the_end_of_the_drain(tmp_path: Path) -> None:
    plan = DrawOptions(rate=20.0, count=10, input="20", output="2")
    with running(Behaviour(0.01, 0.001, never_every=2)) as (url, _):
        late = run(url, tmp_path / "a", plan, timeout_s=1.0).report
        away = run(url, tmp_path / "b", plan, patience_s=1.0).report
        rest = run(url, tmp_path / "c", plan, drain_s=1.0).report
    # five are never answered; on a busy machine one of the others may be late as well
    for report, status in ((late, "timed_out"), (away, "cancelled"), (rest, "unfinished")):
        assert report["by_status"][status] >= 5
        assert sum(report["by_status"].values()) == 10
        assert set(report["by_status"]) <= {"ok", status}


def test_a_cap_on_concurrency_delays_sending_but_not_the_clock(tmp_path: Path) -> None:
    plan = DrawOptions(rate=100.0, count=20, arrivals="constant", input="20", output="1")
    with running(Behaviour(ttft=0.05, tpot=0.001)) as (url, _):
        report = run(url, tmp_path, plan, max_concurrency=2).report
    # two at a time, 50 ms each: the twentieth, due at 0.19 s, is answered after 0.5 s
    assert report["ttft_s"]["max"] >= 0.5 - 0.19 - 0.01
    assert report["median_ttft_ms"] < 1e3 * report["ttft_s"]["p50"]


def test_a_closed_loop_keeps_its_slots_busy_and_says_what_it_is(tmp_path: Path) -> None:
    plan = DrawOptions(rate=math.inf, count=20, input="20", output="1")
    with running(Behaviour(ttft=0.05, tpot=0.001)) as (url, _):
        report = run(url, tmp_path, plan, max_concurrency=4).report
    # five rounds of 50 ms, and nothing waits for a slot that it was not due in
    assert report["window_s"] >= 0.24
    assert report["ttft_s"]["p50"] < report["window_s"]
    assert any("closed loop" in text for text in report["notes"])


def test_several_processes_share_one_schedule(tmp_path: Path) -> None:
    plan = DrawOptions(rate=50.0, count=30, arrivals="constant", input="20", output="4")
    with running(Behaviour(ttft=0.02, tpot=0.005)) as (url, server):
        found = run(url, tmp_path, plan, processes=2)
    assert found.report["by_status"] == {"ok": 30}
    assert [r.id for r in found.result.records] == [f"r{k:06d}" for k in range(30)]
    assert len(read_records(tmp_path / "requests.jsonl")) == 30
    assert found.report["frame_gap_s"]["count"] == 90
    # both workers kept to the common clock: arrivals at the server are 20 ms apart over the whole run
    assert server.arrived[-1] - server.arrived[0] >= 0.4


def test_tiers_travel_as_headers_and_are_judged_apart(tmp_path: Path) -> None:
    rows = [
        {"arrival_s": 0.02 * k, "prompt_tokens": 20, "output_tokens": 2, "tier": "interactive" if k % 2 else "batch"}
        for k in range(10)
    ]
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in rows))
    with running(Behaviour(ttft=0.05, tpot=0.001)) as (url, server):
        report = run(url, tmp_path / "out", TraceOptions(path), slo=("interactive:ttft=0.001",)).report
    assert report["attainment_by_tier"] == {"batch": 1.0, "interactive": 0.0}
    assert [h["x-weighbridge-tier"] for h in server.headers] == ["batch", "interactive"] * 5


def test_warmup_is_reported_apart(tmp_path: Path) -> None:
    with running(Behaviour(ttft=0.01, tpot=0.001)) as (url, _):
        report = run(url, tmp_path, warmup_s=0.5).report
    assert (report["warmup"]["offered"], report["offered"]) == (10, 10)


def test_a_server_that_refuses_ignore_eos_is_served_without(tmp_path: Path) -> None:
    with running(Behaviour(ttft=0.01, tpot=0.001, refuse_ignore_eos=True)) as (url, server):
        report = run(url, tmp_path).report
    assert report["by_status"] == {"ok": 20}
    assert "ignore_eos" not in server.bodies[0]
    assert any("ignore_eos" in text for text in report["notes"])


def test_an_unreachable_server_is_one_clear_line(tmp_path: Path) -> None:
    with pytest.raises(UpstreamError, match=r"http://127\.0\.0\.1:9: cannot connect.*is --url right"):
        run("http://127.0.0.1:9", tmp_path)
    with pytest.raises(ConfigError, match="--url"):
        run("ftp://x", tmp_path)


def test_tls_against_a_plain_server_is_one_clear_line(tmp_path: Path) -> None:
    with running(Behaviour()) as (url, _), pytest.raises(UpstreamError, match="cannot connect"):
        run(url.replace("http:", "https:"), tmp_path)


def test_a_full_disk_loses_no_figures(tmp_path: Path) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("needs /dev/full")
    (tmp_path / "requests.jsonl").symlink_to("/dev/full")
    (tmp_path / "report.json").symlink_to("/dev/full")
    with running(Behaviour(ttft=0.01, tpot=0.001)) as (url, _):
        report = run(url, tmp_path).report
    assert report["by_status"] == {"ok": 20}
    assert any("No space left" in text for text in report["generator"]["warnings"])
    assert any("cannot write" in text for text in report["notes"])


def test_a_certificate_that_nobody_vouches_for_is_refused_unless_told_otherwise(tmp_path: Path) -> None:
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("needs openssl")
    key, certificate = tmp_path / "key.pem", tmp_path / "cert.pem"
    command = [openssl, "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    command += ["-keyout", str(key), "-out", str(certificate), "-subj", "/CN=localhost", "-days", "1"]
    subprocess.run(command, check=True, capture_output=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    with running(Behaviour(ttft=0.01, tpot=0.001), context) as (url, _):
        with pytest.raises(UpstreamError, match="certificate"):
            run(url, tmp_path)
        assert run(url, tmp_path, insecure=True).report["by_status"] == {"ok": 20}


def test_a_clock_set_back_during_a_run_moves_no_latency(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, begin = time.time, time.monotonic()
    monkeypatch.setattr(time, "time", lambda: real() - (3600.0 if time.monotonic() > begin + 0.5 else 0.0))
    with running(Behaviour(ttft=0.01, tpot=0.001)) as (url, _):
        report = run(
            url, tmp_path, DrawOptions(rate=20.0, count=20, arrivals="constant", input="20", output="5")
        ).report
    assert report["by_status"] == {"ok": 20}
    assert max(report["ttft_s"]["max"], report["e2e_s"]["max"]) < 5.0
    assert any("wall clock jumped by -3600" in text for text in report["generator"]["warnings"])


def test_records_are_copied_to_parquet_at_the_end(tmp_path: Path) -> None:
    copy = tmp_path / "copy" / "r.parquet"
    with running(Behaviour(ttft=0.01, tpot=0.001)) as (url, _):
        run(url, tmp_path, records=copy)
    kept = sorted(read_records(tmp_path / "requests.jsonl"), key=lambda r: r.id)
    assert sorted(read_any(copy), key=lambda r: r.id) == kept
    assert len(kept) == 20


def test_a_gateway_that_explains_itself_gives_each_instance_its_share(tmp_path: Path) -> None:
    with running(Behaviour(ttft=0.01, tpot=0.001)) as (url, _):
        assert run(url, tmp_path / "a").report["share_by_instance"] == {}
        explained = run(url, tmp_path / "b", headers=("x-weighbridge-explain=1",))
    assert explained.report["share_by_instance"] == {"exact": 1.0}
    assert all(record.router == {} for record in explained.result.records)
