"""`weighbridge calibrate`: measure an instance, or fit a recorded run, and write its profile."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from weighbridge.calibrate.from_run import RunReport


def register(app: typer.Typer) -> None:
    """Add `calibrate`."""
    app.command("calibrate")(calibrate)


def calibrate(
    recorded: Annotated[
        Path | None, typer.Option("--from", help="Fit a recorded run: requests, one JSON object a line.")
    ] = None,
    meta: Annotated[Path | None, typer.Option("--meta", help="The recorded engine's settings (JSON).")] = None,
    fit_first: Annotated[int, typer.Option("--fit-first", help="Requests to fit; the rest judge the fit.")] = 100,
    boundary: Annotated[
        str, typer.Option("--boundary", help="Where a recorded request starts to count: engine or client.")
    ] = "engine",
    out: Annotated[Path | None, typer.Option("--out", help="Write the profile here.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Measure an instance, or fit a recorded run, and write its cost profile."""
    from weighbridge.core.errors import ConfigError

    if recorded is None:
        raise ConfigError("nothing to calibrate: give a URL, or --from with a recorded run")
    _from_run(recorded, meta, fit_first, boundary, out, as_json)


def _from_run(
    recorded: Path, meta: Path | None, fit_first: int, boundary: str, out: Path | None, as_json: bool
) -> None:
    import msgspec

    from weighbridge.calibrate.files import read_bytes, write_profile
    from weighbridge.calibrate.from_run import calibrate_run
    from weighbridge.calibrate.progress import progress_bar
    from weighbridge.calibrate.recorded import read_limits, read_requests
    from weighbridge.core.errors import ConfigError

    if meta is None:
        raise ConfigError("--from needs --meta, the recorded engine's settings (token budget, sequences, KV blocks)")
    if boundary not in ("engine", "client"):
        raise ConfigError(f"--boundary is {boundary!r}, expected engine or client")
    limits, told = read_limits(read_bytes(meta), str(meta))
    lines = read_bytes(recorded).decode(errors="replace").splitlines()
    requests = read_requests(lines, str(recorded), "client" if boundary == "client" else "engine")
    with progress_bar("replaying and fitting") as progress:
        report, profile, _ = calibrate_run(
            requests, limits, told, source=recorded.name, fit_first=fit_first, progress=progress
        )
    if out is not None:
        write_profile(out, profile)
    if as_json:
        typer.echo(msgspec.json.encode(report).decode())
        return
    _print_run(report)
    if out is not None:
        typer.echo(f"profile written to {out}")


def _print_run(report: RunReport) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console()
    table = Table(title=f"{report.source}: forecast against observed, {report.evaluated} requests not fitted")
    for column in ("metric", "mean error", "median", "p90", "p99", "bias of mean", "bias of p99"):
        table.add_column(column, justify="left" if column == "metric" else "right")
    for metric, e in report.metrics.items():
        shares = (e.mape, e.median, e.p90, e.p99)
        table.add_row(
            metric.removesuffix("_s").upper(),
            *(f"{share:.1%}" for share in shares),
            f"{e.bias_mean:+.1%}",
            f"{e.bias_p99:+.1%}",
        )
    console.print(table)
    step = report.step
    console.print(
        f"step = {step.base_s * 1e3:.2f} ms + {step.prefill_s * 1e6:.1f} us x prefill tokens + "
        f"{step.attend_s * 1e9:.2f} ns x attended tokens + {step.sequence_s * 1e6:.1f} us x sequences + "
        f"{step.kv_s * 1e9:.1f} ns x KV tokens",
        highlight=False,
    )
    if report.identifiable:
        console.print(f"every term stands on its own (condition number {report.condition_number:.0f})")
    for warning in report.warnings:
        console.print(f"warning: {warning}", markup=False)
