"""Finds reports of bench and simulation in folders and reads them, and event logs, into one form.

Only files below the folders given at the start are ever opened, of bounded size and number; a file that is no report
is left out, one that is broken is listed with the reason.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from weighbridge.bench.record import read_records
from weighbridge.core.errors import WeighbridgeError
from weighbridge.core.event_log import Header
from weighbridge.core.metrics import RequestRecord, summarise
from weighbridge.dashboard.log_tail import LogTail
from weighbridge.dashboard.observer import Observer

MOST_FILES = 400
MOST_BYTES = 16 << 20
MOST_LOG_BYTES = 128 << 20
MOST_RUNS = 60
METRICS = ("ttft_s", "tpot_s", "e2e_s")


@dataclass(frozen=True, slots=True)
class Report:
    """One run. `metrics` hold mean and percentiles by name; `samples` per-request values where they are known."""

    id: str
    name: str
    kind: str
    path: Path
    verdict: str = ""
    reasons: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    created: str = ""
    machine: str = ""
    commit: str = ""
    policy: str = ""
    model: str = ""
    offered: int = 0
    offered_rate: float | None = None
    attainment: float | None = None
    by_tier: Mapping[str, float] = field(default_factory=dict)
    goodput_per_s: float | None = None
    shed: float | None = None
    metrics: Mapping[str, Mapping[str, float | None]] = field(default_factory=dict)
    samples: Mapping[str, Sequence[float]] = field(default_factory=dict)
    tiers: Mapping[str, Sequence[float]] = field(default_factory=dict)
    """TTFT samples by tier."""
    pairs: Sequence[tuple[float, float, bool]] = ()
    """Forecast and observed seconds, and whether outside the error bar."""
    records: Path | None = None
    error: str = ""


def identity(path: Path, part: str = "") -> str:
    """A short name for a file, or for one run in it, that can stand in a URL."""
    return hashlib.sha256(f"{path}\0{part}".encode()).hexdigest()[:10]


class Library:
    """Reports below some folders, and event logs; read when asked, kept until the file changes."""

    def __init__(self, folders: Sequence[Path] = ()) -> None:
        self._folders = [folder.resolve() for folder in folders]
        self._known: dict[Path, tuple[tuple[int, int], list[Report]]] = {}
        self._full: dict[tuple[str, tuple[int, int]], Report] = {}

    def reports(self, logs: Sequence[Path]) -> list[Report]:
        """All of them without samples, newest first; event logs come last and unread."""
        found: list[tuple[float, Report]] = []
        for path in self._files():
            try:
                stat = path.stat()
                stamp = (stat.st_mtime_ns, stat.st_size)
            except OSError:
                continue
            if path not in self._known or self._known[path][0] != stamp:
                self._known[path] = (stamp, list(read_file(path, stat.st_size, self._name(path))))
            found += [(stat.st_mtime, report) for report in self._known[path][1]]
        found.sort(key=lambda item: -item[0])
        return [report for _, report in found] + [Report(identity(path), path.name, "event log", path) for path in logs]

    def _name(self, path: Path) -> str:
        folder = next(folder for folder in self._folders if path.is_relative_to(folder))
        return str(path.relative_to(folder))

    def _files(self) -> Iterator[Path]:
        count = 0
        for folder in self._folders:
            for root, directories, names in os.walk(folder):
                directories[:] = sorted(d for d in directories if not d.startswith("."))[:100]
                for name in sorted(names):
                    if name.endswith(".json"):
                        count += 1
                        if count > MOST_FILES:
                            return
                        yield Path(root) / name

    def full(self, report: Report) -> Report:
        """The report with its samples. Slow for large files: call it in a thread."""
        try:
            source = report.records if report.records is not None else report.path
            stat = source.stat()
            key = (report.id, (stat.st_mtime_ns, stat.st_size))
            if key not in self._full:
                if len(self._full) > 30:
                    self._full.clear()
                self._full[key] = _with_samples(report, stat.st_size)
            return self._full[key]
        except (OSError, WeighbridgeError) as error:
            return _replaced(report, error=str(error))


def _replaced(report: Report, **changes: Any) -> Report:
    return Report(**{name: getattr(report, name) for name in Report.__slots__} | changes)


def _with_samples(report: Report, size: int) -> Report:
    if report.kind == "event log":
        return read_log(report, size)
    if report.records is None:
        return report
    records = [r for r in read_records(report.records) if not r.warmup]
    return _replaced(report, samples=_samples(records), tiers=_by_tier(records))


def _samples(records: Sequence[RequestRecord]) -> dict[str, list[float]]:
    """Values over all offered requests: one that never got there counts as infinite. TPOT only where it is defined."""
    made = {m: [v if (v := getattr(r, m)) is not None else math.inf for r in records] for m in ("ttft_s", "e2e_s")}
    return made | {"tpot_s": [v for r in records if (v := r.tpot_s) is not None]}


def _by_tier(records: Sequence[RequestRecord]) -> dict[str, list[float]]:
    tiers: dict[str, list[float]] = {}
    for r in records:
        tiers.setdefault(r.tier, []).append(math.inf if r.ttft_s is None else r.ttft_s)
    return tiers


def read_log(report: Report, size: int) -> Report:
    """An event log as a report. Raises LogError, OSError."""
    if size > MOST_LOG_BYTES:
        return _replaced(report, error=f"larger than {MOST_LOG_BYTES >> 20} MiB; ask a what-if about a window of it")
    observer, tail = Observer(window_s=None), LogTail(keep_up=False)
    try:
        for item in tail.read_all(report.path):
            observer.begin(item) if isinstance(item, Header) else observer.feed(item)
    finally:
        tail.close()
    records = observer.records()
    summary = msgspec.to_builtins(summarise(records, observer.tiers))
    span = observer.now_s - (observer.first_s or 0.0)
    decisions = observer.snapshot("log").decisions
    pairs = [
        (d.judged_s, d.observed_s, d.outside) for d in decisions if d.judged_s is not None and d.observed_s is not None
    ]
    return _replaced(
        report, policy=observer.policy, offered=len(records), offered_rate=len(records) / span if span > 0 else None,
        attainment=_number(summary.get("attainment")), by_tier=summary["attainment_by_tier"],
        goodput_per_s=_number(summary.get("goodput_per_s")), shed=_number(summary.get("shed_rate")),
        metrics={m: summary[m] for m in METRICS}, samples=_samples(records), tiers=_by_tier(records), pairs=pairs,
    )  # fmt: skip


def read_file(path: Path, size: int, name: str) -> Iterator[Report]:
    """The runs that one JSON file holds; nothing for a file that is no report."""
    if size > MOST_BYTES:
        return
    try:
        data = msgspec.json.decode(path.read_bytes())
    except (OSError, msgspec.DecodeError) as error:
        yield Report(identity(path), name, "unreadable", path, error=str(error))
        return
    if not isinstance(data, dict):
        return
    try:
        if data.get("format") == "weighbridge.bench":
            yield _bench(path, data, name)
        elif isinstance(data.get("runs"), list) and isinstance(data.get("policies"), dict):
            for number, run in enumerate(data["runs"][:MOST_RUNS]):
                yield _simulated(path, run, name, f"{run.get('policy', '')}, seed {run.get('seed', '')}", number)
        elif "requests_per_cpu_s" in data and "ttft_s" in data:
            yield _simulated(path, data, name, "")
        elif isinstance(data.get("rows"), list) and "recorded_policy" in data:
            for row in data["rows"]:
                yield _whatif(path, row, name)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        yield Report(identity(path), name, "unreadable", path, error=f"field {error} is missing or odd")


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


def _metrics(data: Mapping[str, Any]) -> dict[str, dict[str, float | None]]:
    return {m: {k: _number(v) for k, v in data[m].items()} for m in METRICS if isinstance(data.get(m), dict)}


def _tiers(data: Mapping[str, Any]) -> dict[str, float]:
    return {str(k): float(v) for k, v in (data.get("attainment_by_tier") or {}).items() if _number(v) is not None}


def _bench(path: Path, data: Mapping[str, Any], name: str) -> Report:
    origin = data.get("provenance") or {}
    machine = origin.get("machine") or {}
    generator = data.get("generator") or {}
    settings = origin.get("settings") or {}
    records = path.with_name("requests.jsonl")
    return Report(
        identity(path), name, "bench", path, verdict=str(data.get("verdict", "")),
        reasons=tuple(str(r) for r in generator.get("reasons", ())),
        notes=tuple(str(n) for n in (*generator.get("warnings", ()), *data.get("notes", ()))),
        created=str(origin.get("created", "")), commit=str(origin.get("commit", "")),
        machine=", ".join(str(x) for x in (machine.get("cpu"), f"{machine.get('cores')} cores") if x),
        policy=str(settings.get("policy") or ""), model=str(data.get("model_id") or ""), offered=int(data["offered"]),
        offered_rate=_number(data.get("offered_rate")), attainment=_number(data.get("attainment")),
        by_tier=_tiers(data), goodput_per_s=_number(data.get("goodput_per_s")),
        shed=_number(data.get("shed_rate")), metrics=_metrics(data),
        records=records if records.is_file() else None,
    )  # fmt: skip


def _simulated(path: Path, data: Mapping[str, Any], name: str, part: str, number: int = 0) -> Report:
    span = _number(data.get("arrival_s"))
    offered = int(data["offered"])
    return Report(
        identity(path, f"{part} {number}"), " · ".join(x for x in (name, part) if x), "simulation", path,
        policy=str(data.get("policy", "")), offered=offered, offered_rate=offered / span if span else None,
        attainment=_number(data.get("attainment")), by_tier=_tiers(data), shed=_number(data.get("shed_rate")),
        goodput_per_s=_number(data.get("goodput_per_s")), metrics=_metrics(data),
    )  # fmt: skip


def _whatif(path: Path, row: Mapping[str, Any], name: str) -> Report:
    quantiles = [float(q) for q in row.get("ttft_quantiles", ())]
    label = str(row["label"])
    return Report(
        identity(path, label), f"{name} · {label}", "what-if", path, policy=str(row.get("policy", "")),
        attainment=_number(row.get("attainment")), goodput_per_s=_number(row.get("goodput_per_s")),
        shed=_number(row.get("shed")), samples={"ttft_s": quantiles} if quantiles else {},
        metrics={"ttft_s": {"p50": _number(row.get("ttft_p50_s")), "p99": _number(row.get("ttft_p99_s"))}},
        by_tier={str(k): float(v) for k, v in (row.get("by_tier") or {}).items()},
    )  # fmt: skip
