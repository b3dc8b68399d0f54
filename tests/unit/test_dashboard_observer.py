"""The observer's numbers against the obvious way: the same log summarised record by record."""

from __future__ import annotations

import io
import math
from pathlib import Path

import pytest

from tests.support.loop import run
from weighbridge.core.actions import Dispatch, Hold, Reject
from weighbridge.core.decision import Candidate, Decision
from weighbridge.core.event_log import Entry, Header, LogReader
from weighbridge.core.events import (
    FirstToken,
    InstanceDown,
    InstanceUp,
    RequestArrived,
    RequestCancelled,
    RequestFailed,
    RequestFinished,
)
from weighbridge.core.instance import InstanceSpec, Limits, StepTerms
from weighbridge.core.metrics import RequestRecord, summarise
from weighbridge.core.request import Request
from weighbridge.dashboard import demo_log
from weighbridge.dashboard.live import LogSource
from weighbridge.dashboard.observer import Observer
from weighbridge.sim.runs import make_simulation

SPEC = InstanceSpec(name="a", limits=Limits(kv_blocks=100), step=StepTerms(base_s=0.01, prefill_s=0.0001), error=0.1)


@pytest.fixture(scope="module")
def simulated() -> tuple[bytes, list[RequestRecord]]:
    """A recorded simulation and what really happened in it."""
    one = demo_log.run(rate=10.0, requests=300)
    out = io.BytesIO()
    records = make_simulation(one, log=out).run(one.workload.requests(one.seed))
    return out.getvalue(), records


def observed(log: bytes, window_s: float | None = None) -> Observer:
    observer = Observer(window_s)
    reader = LogReader(io.BytesIO(log))
    observer.begin(reader.header)
    for entry in reader:
        observer.feed(entry)
    return observer


def test_attainment_latency_and_share_equal_the_simulators_own_records(
    simulated: tuple[bytes, list[RequestRecord]],
) -> None:
    log, records = simulated
    observer = observed(log)
    want, got = summarise(records, observer.tiers), summarise(observer.records(), observer.tiers)
    assert got.offered == want.offered == 300
    assert got.by_status == want.by_status
    assert got.attainment == want.attainment
    assert got.attainment_by_tier == want.attainment_by_tier
    assert got.share_by_instance == want.share_by_instance
    assert math.isclose(got.ttft_s.p99, want.ttft_s.p99, abs_tol=1e-9)
    assert math.isclose(got.e2e_s.mean, want.e2e_s.mean, abs_tol=1e-9)
    snapshot = observer.snapshot("test")
    assert snapshot.attainment == want.attainment
    assert sum(t.offered for t in snapshot.tiers) == 300
    assert all(i.running == 0 and i.waiting == 0 for i in snapshot.instances)
    assert snapshot.queued == 0


def test_forecasts_are_paired_with_what_was_observed(simulated: tuple[bytes, list[RequestRecord]]) -> None:
    snapshot = observed(simulated[0]).snapshot("test")
    assert sum(len(i.pairs) for i in snapshot.instances) > 100
    done = [d for d in snapshot.decisions if d.deviation is not None]
    assert len(done) > 100
    # the simulator runs the very cost model that the forecast uses, so most forecasts must be near
    assert sorted(abs(d.deviation or 0.0) for d in done)[len(done) // 2] < 0.25
    assert all(d.candidates and d.chosen in {c.instance for c in d.candidates} for d in done)


def test_a_log_file_gives_the_same_as_its_entries(simulated: tuple[bytes, list[RequestRecord]], tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_bytes(simulated[0])
    snapshot = run(LogSource(path).poll())
    assert snapshot.attainment == observed(simulated[0]).snapshot("x").attainment
    assert snapshot.log == str(path)


def request(name: str, at: float = 0.0, tier: str = "interactive") -> Request:
    return Request(id=name, arrival_s=at, prompt_tokens=100, max_tokens=50, tier=tier, tenant="t")


def sent(name: str, at: float, instance: str = "a", attempt: int = 1) -> Dispatch:
    candidate = Candidate(instance=instance, terms={"wait_s": 0.1, "prefill_s": 0.2, "tpot_s": 0.01}, score=-1.0)
    decision = Decision(
        request_id=name, at_s=at, policy="calibrated", chosen=instance, candidates=(candidate,), attempt=attempt,
        expected_output_tokens=50,
    )  # fmt: skip
    return Dispatch(request_id=name, instance=instance, attempt=attempt, decision=decision)


def observer() -> Observer:
    made = Observer()
    made.begin(Header(router={"policy": "calibrated"}))
    made.feed(Entry(0.0, InstanceUp(spec=SPEC, generation=0), ()))
    return made


def test_every_way_to_end_is_counted_once_and_leaves_nothing_behind() -> None:
    seen = observer()
    for k, name in enumerate(("ok", "failed", "cancelled", "rejected", "retried")):
        action: Reject | Dispatch = sent(name, k)
        if name == "rejected":
            action = Reject(request_id=name, status=429, reason="queue_full", retry_after_s=2.0)
        seen.feed(Entry(k, RequestArrived(request=request(name, k)), (action,)))
    assert seen.snapshot("x").instance("a").running == 4  # type: ignore[union-attr]
    seen.feed(Entry(5.0, FirstToken(request_id="ok"), ()))
    seen.feed(Entry(6.0, RequestFinished(request_id="ok", output_tokens=7), ()))
    seen.feed(Entry(6.0, RequestFailed(request_id="failed", instance="a", reason="reset"), ()))
    seen.feed(Entry(6.0, RequestCancelled(request_id="cancelled"), ()))
    retry = RequestFailed(request_id="retried", instance="a", reason="reset", retriable=True)
    seen.feed(Entry(6.0, retry, (sent("retried", 6.0, "b", attempt=2),)))
    seen.feed(Entry(7.0, RequestFinished(request_id="retried", output_tokens=3), ()))
    seen.feed(Entry(8.0, RequestFinished(request_id="unknown", output_tokens=3), ()))
    snapshot = seen.snapshot("x")
    tier = next(t for t in snapshot.tiers if t.name == "interactive")
    assert (tier.offered, tier.failed, tier.cancelled, tier.shed_429) == (5, 1, 1, 1)
    assert tier.reasons == (("queue_full", 1),)
    assert tier.retry_after_s == 2.0
    assert [i.running for i in snapshot.instances] == [0, 0]
    outcomes = {d.id: (d.outcome, d.chosen, d.attempt) for d in snapshot.decisions}
    assert outcomes["retried"] == ("ok", "b", 2)
    assert outcomes["rejected"][0] == "rejected"


def test_forecast_terms_become_seconds() -> None:
    seen = observer()
    seen.feed(Entry(0.0, RequestArrived(request=request("r")), (sent("r", 0.0),)))
    view = seen.snapshot("x").decisions[0]
    assert dict(view.candidates[0].terms) == pytest.approx({"wait": 0.1, "prefill": 0.2, "decode": 0.5})
    assert view.forecast_s == pytest.approx(0.8)
    assert view.forecast_ttft_s == pytest.approx(0.3)
    assert view.error_s == pytest.approx(0.08)
    seen.feed(Entry(0.3, FirstToken(request_id="r"), ()))
    seen.feed(Entry(1.3, RequestFinished(request_id="r", output_tokens=100), ()))
    view = seen.snapshot("x").decisions[0]
    assert view.forecast_at_length_s == pytest.approx(1.3)
    assert view.deviation == pytest.approx(0.0)
    assert not view.outside


def test_held_requests_are_the_queue() -> None:
    seen = observer()
    seen.feed(Entry(0.0, RequestArrived(request=request("r")), (Hold(request_id="r"),)))
    snapshot = seen.snapshot("x")
    assert snapshot.queued == 1
    assert next(t for t in snapshot.tiers if t.name == "interactive").queued_tokens == 100
    seen.feed(Entry(1.0, InstanceDown(instance="a", reason="gone"), (sent("r", 1.0, "b"),)))
    snapshot = seen.snapshot("x")
    assert snapshot.queued == 0
    assert snapshot.instance("a").state == "down"  # type: ignore[union-attr]


def test_what_is_older_than_the_window_is_forgotten() -> None:
    seen = observer()
    for k in range(100):
        seen.feed(Entry(float(k), RequestArrived(request=request(f"r{k}", k)), (sent(f"r{k}", k),)))
        seen.feed(Entry(k + 0.4, RequestFinished(request_id=f"r{k}", output_tokens=2), ()))
    tier = next(t for t in seen.snapshot("x").tiers if t.name == "interactive")
    assert 59 <= tier.offered <= 61


def test_decisions_above_twenty_a_second_are_counted_not_kept() -> None:
    seen = observer()
    for k in range(50):
        seen.feed(Entry(1.0 + k / 1000, RequestArrived(request=request(f"r{k}")), (sent(f"r{k}", 1.0),)))
    snapshot = seen.snapshot("x")
    assert len(snapshot.decisions) == 20
    assert snapshot.skipped_decisions == 30
