"""`weighbridge calibrate`: measure an instance, or fit a recorded run, and write its profile."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from weighbridge.calibrate.build import Calibration
    from weighbridge.calibrate.endpoint import Kind
    from weighbridge.calibrate.from_run import RunReport
    from weighbridge.core.instance import Limits
    from weighbridge.cost.profile import Profile


def register(app: typer.Typer) -> None:
    """Add `calibrate`."""
    app.command("calibrate")(calibrate)


def calibrate(
    url: Annotated[str | None, typer.Argument(help="Address of the engine, such as http://127.0.0.1:8000.")] = None,
    model: Annotated[str | None, typer.Option("--model", help="Model to measure, where it serves several.")] = None,
    kind: Annotated[str | None, typer.Option("--kind", help="Engine kind; found out by default.")] = None,
    budget: Annotated[str, typer.Option("--budget", help="Time to spend, such as 90s or 5m.")] = "5m",
    out: Annotated[Path | None, typer.Option("--out", help="Write the profile here.")] = None,
    report: Annotated[Path | None, typer.Option("--report", help="Draw the fit into this picture file.")] = None,
    key_env: Annotated[str | None, typer.Option("--key-env", help="Variable that holds the engine's API key.")] = None,
    max_sequences: Annotated[int | None, typer.Option("--max-sequences", help="If the engine tells none.")] = None,
    token_budget: Annotated[int | None, typer.Option("--token-budget", help="If the engine tells none.")] = None,
    kv_blocks: Annotated[int | None, typer.Option("--kv-blocks", help="If the engine tells none.")] = None,
    under_load: Annotated[bool, typer.Option("--under-load", help="Measure although others use the engine.")] = False,
    recorded: Annotated[
        Path | None, typer.Option("--from", help="Fit a recorded run: requests, one JSON object a line.")
    ] = None,
    meta: Annotated[Path | None, typer.Option("--meta", help="The recorded engine's settings (JSON).")] = None,
    fit_first: Annotated[int, typer.Option("--fit-first", help="Requests to fit; the rest judge the fit.")] = 100,
    boundary: Annotated[
        str, typer.Option("--boundary", help="Where a recorded request starts to count: engine or client.")
    ] = "engine",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Measure an engine over HTTP, or fit a recorded run, and write its cost profile."""
    from weighbridge.core.errors import ConfigError
    from weighbridge.core.instance import Limits

    if (url is None) == (recorded is None):
        raise ConfigError("give either the URL of an engine, or --from with a recorded run")
    if recorded is not None:
        _from_run(recorded, meta, fit_first, boundary, out, as_json)
        return
    assert url is not None
    limits = Limits(max_sequences=max_sequences, token_budget=token_budget, kv_blocks=kv_blocks)
    _measure(url, model, kind, budget, out, report, key_env, limits, under_load, as_json)


def _measure(
    url: str,
    model: str | None,
    kind: str | None,
    budget: str,
    out: Path | None,
    report: Path | None,
    key_env: str | None,
    limits: Limits,
    under_load: bool,
    as_json: bool,
) -> None:
    import os

    from weighbridge.calibrate.endpoint import KINDS
    from weighbridge.calibrate.files import write_profile
    from weighbridge.calibrate.report import draw, require_matplotlib
    from weighbridge.core.errors import ConfigError
    from weighbridge.cost.profile import encode_profile

    if kind is not None and kind not in KINDS:
        raise ConfigError(f"--kind is {kind!r}, expected one of {', '.join(KINDS)}")
    key = None
    if key_env is not None and not (key := os.environ.get(key_env)):
        raise ConfigError(f"--key-env names {key_env}, but that variable is not set")
    if report is not None:
        require_matplotlib()
    calibration = _run_measurement(url, model, kind, key, limits, _seconds(budget), under_load)
    if out is not None:
        write_profile(out, calibration.profile)
    if report is not None:
        draw(calibration, report)
    if as_json:
        typer.echo(encode_profile(calibration.profile).decode().rstrip())
        return
    _print_profile(calibration.profile, calibration.warnings)
    for path, what in ((out, "profile"), (report, "picture")):
        if path is not None:
            typer.echo(f"{what} written to {path}")
    if out is None:
        typer.echo("nothing was written: name a file by --out to keep the profile")


def _run_measurement(
    url: str, model: str | None, kind: Kind | None, key: str | None, limits: Limits, budget_s: float, under_load: bool
) -> Calibration:
    """Ctrl-C ends the probing and keeps what was measured; a second one ends the program."""
    import asyncio
    import signal

    from weighbridge.calibrate.live import calibrate_url
    from weighbridge.calibrate.progress import progress_bar

    async def run() -> Calibration:
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()

        def interrupt() -> None:
            stop.set()
            loop.remove_signal_handler(signal.SIGINT)

        loop.add_signal_handler(signal.SIGINT, interrupt)
        with progress_bar("measuring") as progress:
            return await calibrate_url(
                url,
                model=model,
                kind=kind,
                key=key,
                limits=limits,
                budget_s=budget_s,
                under_load=under_load,
                stop=stop,
                progress=progress,
            )

    return asyncio.run(run())


def _seconds(text: str) -> float:
    """`90`, `90s`, `5m` or `1h` in seconds."""
    from weighbridge.core.errors import ConfigError

    units = {"s": 1.0, "m": 60.0, "h": 3600.0}
    number, unit = (text[:-1], text[-1]) if text[-1:] in units else (text, "s")
    try:
        seconds = float(number) * units[unit]
    except ValueError:
        seconds = 0.0
    if not 5.0 <= seconds <= 86_400.0:
        raise ConfigError(f"--budget is {text!r}, expected a time of at least 5s, such as 90s or 5m")
    return seconds


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

    from weighbridge.calibrate.show import formula

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
    console.print(formula(report.step), highlight=False)
    if report.identifiable:
        console.print(f"every term stands on its own (condition number {report.condition_number:.0f})")
    for warning in report.warnings:
        console.print(f"warning: {warning}", markup=False)


def _print_profile(profile: Profile, warnings: Sequence[str]) -> None:
    from rich.console import Console

    from weighbridge.calibrate.show import profile_tables

    console = Console()
    for table in profile_tables(profile):
        console.print(table)
    for warning in warnings:
        console.print(f"warning: {warning}", markup=False, highlight=False)
