"""Reports are found, read into one form and compared; nothing outside the folders is opened."""

from __future__ import annotations

import io
import json
import math
from pathlib import Path

import msgspec
import pytest

from weighbridge.bench.record import BenchRecord
from weighbridge.dashboard import demo_log
from weighbridge.dashboard.pages import reports as page
from weighbridge.dashboard.query import Query
from weighbridge.dashboard.reports import Library
from weighbridge.sim.report import as_dict, comparison, to_json
from weighbridge.sim.runs import make_simulation
from weighbridge.sim.runs import run as simulate


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("reports")
    runs = [simulate(demo_log.run(policy, rate, 120)) for policy in ("random", "work") for rate in (5.0, 10.0)]
    (root / "one.json").write_text(to_json(as_dict(runs[0])))
    (root / "many.json").write_text(to_json(comparison(runs)))
    (root / "other.json").write_text('{"hello": 1}')
    (root / "broken.json").write_text("{")
    bench = root / "a"
    bench.mkdir()
    records = [
        BenchRecord(id=f"r{k}", scheduled_s=float(k), status="ok", first_token_s=k + 0.1 * (k + 1),
                    last_token_s=k + 2.0, output_tokens=11, tier="interactive" if k % 2 else "batch", warmup=k == 0)
        for k in range(10)
    ]  # fmt: skip
    (bench / "requests.jsonl").write_bytes(b"".join(msgspec.json.encode(r) + b"\n" for r in records))
    report = {
        "format": "weighbridge.bench", "version": 1, "verdict": "INVALID", "offered": 9, "offered_rate": 1.0,
        "attainment": 0.5, "attainment_by_tier": {"interactive": 0.5}, "goodput_per_s": 0.4, "shed_rate": 0.0,
        "ttft_s": {"p50": 0.5, "p99": 1.0}, "tpot_s": {"p50": None}, "e2e_s": {"p50": 2.0, "p99": 2.0},
        "generator": {"reasons": ["the generator was late"], "warnings": []}, "notes": ["<b>note</b>"], "model_id": "m",
        "provenance": {"created": "2026-01-01T00:00:00+00:00", "commit": "abc", "machine": {"cpu": "x", "cores": 2}},
    }  # fmt: skip
    (bench / "report.json").write_text(json.dumps(report))
    return root


def test_each_run_is_listed_once_with_its_kind(folder: Path) -> None:
    kinds = sorted(r.kind for r in Library([folder]).reports([]))
    assert kinds == ["bench", "simulation", "simulation", "simulation", "simulation", "simulation", "unreadable"]


def test_a_bench_report_has_its_verdict_and_its_requests_without_the_warm_up(folder: Path) -> None:
    library = Library([folder])
    listed = next(r for r in library.reports([]) if r.kind == "bench")
    assert (listed.name, listed.verdict, listed.commit) == ("a/report.json", "INVALID", "abc")
    full = library.full(listed)
    assert len(full.samples["ttft_s"]) == 9
    assert set(full.tiers) == {"interactive", "batch"}
    view = page.page(Query({"id": [full.id]}), library.reports([]), [full])
    assert "✕ INVALID" in view.body
    assert "the generator was late" in view.body
    assert "&lt;b&gt;note&lt;/b&gt;" in view.body
    assert "TTFT distribution per tier" in view.body


def test_an_event_log_is_a_report_with_a_forecast_scatter(folder: Path, tmp_path: Path) -> None:
    one = demo_log.run(requests=150)
    out = io.BytesIO()
    records = make_simulation(one, log=out).run(one.workload.requests(one.seed))
    path = tmp_path / "events.jsonl"
    path.write_bytes(out.getvalue())
    library = Library()
    full = library.full(library.reports([path])[0])
    assert full.offered == 150
    assert full.error == ""
    assert sorted(full.samples["ttft_s"]) == pytest.approx(sorted(r.ttft_s or math.inf for r in records))
    view = page.page(Query({"id": [full.id]}), [full], [full])
    assert "Forecast (across) against observed (up)" in view.body


def test_comparing_overlays_distributions_and_draws_goodput_against_rate(folder: Path) -> None:
    library = Library([folder])
    chosen = [library.full(r) for r in library.reports([]) if r.name.startswith("many.json")]
    assert len(chosen) == 4
    view = page.page(Query(), library.reports([]), chosen)
    assert view.body.count('class="chart"') >= 4
    assert "Goodput against offered rate" in view.body
    assert 'data-name="random"' in view.body and 'data-name="work"' in view.body


def test_a_vanished_file_is_said_so(folder: Path, tmp_path: Path) -> None:
    library = Library()
    path = tmp_path / "gone.jsonl"
    path.write_text("{}")
    listed = library.reports([path])[0]
    path.unlink()
    assert "No such file" in library.full(listed).error


def test_an_empty_library_says_how_to_fill_it() -> None:
    assert "weighbridge bench" in page.page(Query(), [], []).body
