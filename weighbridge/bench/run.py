"""One measurement from options to report: schedule, preflight, load, verdict, files."""

from __future__ import annotations

import asyncio
import math
import os
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec

from weighbridge.bench.html import View, page
from weighbridge.bench.load import LoadOptions, LoadResult
from weighbridge.bench.provenance import provenance
from weighbridge.bench.record_table import check_record_path, copy_records
from weighbridge.bench.report import build_report, encode
from weighbridge.bench.schedule import DrawOptions, Planned, TraceOptions, drawn, from_trace, with_warmup
from weighbridge.bench.slo import tiers_of
from weighbridge.bench.target import CHAT, Target, preflight
from weighbridge.bench.verdict import judge
from weighbridge.bench.watch import watching
from weighbridge.bench.workers import Progress, run_load
from weighbridge.core.errors import ConfigError

RECORDS, REPORT, PAGE = "requests.jsonl", "report.json", "report.html"


@dataclass(frozen=True, slots=True)
class RunOptions:
    """Everything that defines a measurement."""

    url: str
    plan: TraceOptions | DrawOptions
    model: str = ""
    endpoint: str = CHAT
    stream: bool = True
    ignore_eos: bool = True
    headers: tuple[str, ...] = ()
    extra_body: str = ""
    api_key_env: str = "OPENAI_API_KEY"
    insecure: bool = False
    tier: str = ""
    tier_header: str = "x-weighbridge-tier"
    slo: tuple[str, ...] = ()
    goodput: tuple[str, ...] = ()
    max_concurrency: int | None = None
    warmup_s: float = 0.0
    drain_s: float = 60.0
    timeout_s: float = 600.0
    patience_s: float | None = None
    max_lag_s: float | None = None
    processes: int = 1
    seed: int = 0
    metrics: tuple[str, ...] = ()
    out: Path | None = None
    records: Path | None = None


@dataclass(slots=True)
class Measurement:
    """A finished run: the raw result, its report, and where the files are (empty where writing failed)."""

    result: LoadResult
    report: dict[str, Any]
    folder: Path
    gauges: dict[str, list[tuple[float, float]]] = field(default_factory=dict)


def make_plan(options: RunOptions) -> list[Planned]:
    """The schedule of these options."""
    plan = options.plan
    found = from_trace(plan, options.seed) if isinstance(plan, TraceOptions) else drawn(plan, options.seed)
    if options.tier:
        found = [p if p.tier else replace(p, tier=options.tier) for p in found]
    return with_warmup(found, options.warmup_s) if options.warmup_s else found


def make_target(options: RunOptions, salt: str) -> Target:
    """The server and what every request carries. Raises `ConfigError`."""
    if not options.url:
        raise ConfigError("name the server, for example --url http://127.0.0.1:8000", source="--url")
    headers = []
    key = os.environ.get(options.api_key_env, "")
    if key:
        headers.append(("authorization", f"Bearer {key}"))
    for text in options.headers:
        name, sign, value = text.partition("=") if "=" in text else text.partition(":")
        if not sign:
            raise ConfigError(f"'{text}' is not NAME=VALUE", source="--header")
        headers.append((name.strip().lower(), value.strip()))
    body: Any = {}
    if options.extra_body:
        try:
            body = msgspec.json.decode(options.extra_body)
        except msgspec.DecodeError as error:
            raise ConfigError(f"not JSON ({error})", source="--extra-body") from None
        if not isinstance(body, dict):
            raise ConfigError("must be a JSON object", source="--extra-body")
    target = Target(
        url=options.url,
        model=options.model,
        endpoint=options.endpoint,
        stream=options.stream,
        ignore_eos=options.ignore_eos,
        headers=tuple(headers),
        body=body,
        tier_header=options.tier_header,
        insecure=options.insecure,
        salt=salt,
    )
    _ = target.origin
    return target


def measure(options: RunOptions, on_progress: Progress | None = None, plan: list[Planned] | None = None) -> Measurement:
    """Run one measurement and write its files. Raises `ConfigError`, `TraceError`, `UpstreamError`."""
    if options.records is not None:
        check_record_path(options.records)
    tiers = tiers_of(options.slo, getattr(options.plan, "mix", ""), options.goodput)
    plan = make_plan(options) if plan is None else plan
    target = make_target(options, f"wb{options.seed}-{time.time_ns() // 1_000_000:x}")
    target, notes = asyncio.run(preflight(target))
    folder = options.out or Path(tempfile.mkdtemp(prefix="weighbridge-bench-"))
    rate = options.plan.rate
    closed = (
        options.max_concurrency is not None and isinstance(options.plan, DrawOptions) and math.isinf(options.plan.rate)
    )
    load = LoadOptions(
        timeout_s=options.timeout_s,
        drain_s=options.drain_s,
        max_concurrency=options.max_concurrency,
        closed=closed,
        patience_s=options.patience_s,
    )
    if closed:
        notes.append("closed loop: a request was due when its slot became free, so no queue of an offered load is seen")
    records = folder / RECORDS
    with watching(options.metrics) as watch:
        result = run_load(plan, target, load, processes=options.processes, records=records, on_progress=on_progress)
    notes += watch.notes
    verdict = judge(result, len(plan), processes=options.processes, max_lag_s=options.max_lag_s)
    settings = _settings(options, target)
    report = build_report(result, verdict, tiers, provenance(**settings), rate=rate, notes=notes)
    report["records"] = str(records)
    if options.records is not None:
        copy_records(result.records, options.records, report["notes"])
    gauges = watch.since(result.started_at)
    view = View(options.url, report, [r for r in result.records if not r.warmup], result.running, gauges)
    _write(folder / PAGE, page(f"Load test of {target.model} at {options.url}", [view]).encode(), report)
    _write(folder / REPORT, encode(report), report)
    return Measurement(result, report, folder, gauges)


def _write(path: Path, data: bytes, report: dict[str, Any]) -> None:
    """Write a file; a failure becomes a note, because the figures must still reach the person."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    except OSError as error:
        report["notes"].append(f"cannot write {path}: {error.strerror or error}; the per-request records are kept")


def _settings(options: RunOptions, target: Target) -> dict[str, Any]:
    """The options as the report shows them: no header values, for one may be a key."""
    settings = asdict(options)
    settings["headers"] = sorted(name for name, _ in target.headers)
    plan = {k: str(v) if isinstance(v, Path) else v for k, v in asdict(options.plan).items()}
    settings.update(plan=plan, model=target.model, ignore_eos=target.ignore_eos, out=str(options.out or ""))
    settings["records"] = str(options.records or "")
    settings["burstiness"] = plan.get("burstiness")
    settings["calibration"] = asdict(target.calibration)
    return settings


def run_and_report(options: RunOptions, *, as_json: bool) -> None:
    """Measure, then print; exits 3 when the verdict is INVALID."""
    from rich.console import Console

    from weighbridge.bench.progress import progress
    from weighbridge.bench.table import print_report

    plan = make_plan(options)
    with progress(len(plan), plan[-1].at_s, quiet=as_json) as show:
        measured = measure(options, show, plan)
    if as_json:
        sys.stdout.write(encode(measured.report).decode())
    else:
        console = Console(highlight=False)
        print_report(measured.report, console)
        console.print(f"files    {measured.folder}", soft_wrap=True)
    if measured.report["verdict"] != "VALID":
        raise SystemExit(3)
