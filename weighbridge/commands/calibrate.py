"""`weighbridge calibrate`: measure an instance, fit a recorded run, or look at profiles."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from weighbridge.calibrate.build import Calibration
    from weighbridge.calibrate.check import CheckReport
    from weighbridge.calibrate.endpoint import Kind
    from weighbridge.calibrate.from_run import RunReport
    from weighbridge.core.instance import Limits
    from weighbridge.cost.profile import Profile
    from weighbridge.gateway.settings import InstanceSettings


def register(app: typer.Typer) -> None:
    """Add `calibrate`."""
    app.command("calibrate")(calibrate)


def calibrate(
    target: Annotated[str | None, typer.Argument(help="Address of the engine, or an instance of --config.")] = None,
    config: Annotated[Path | None, typer.Option("--config", "-c", help="YAML file that names the instance.")] = None,
    model: Annotated[str | None, typer.Option("--model", help="Model to measure, where it serves several.")] = None,
    kind: Annotated[str | None, typer.Option("--kind", help="Engine kind; found out by default.")] = None,
    budget: Annotated[str, typer.Option("--budget", help="Time to spend, such as 90s or 5m.")] = "5m",
    out: Annotated[Path | None, typer.Option("--out", help="Write the profile here.")] = None,
    report: Annotated[Path | None, typer.Option("--report", help="Draw the fit into this picture file.")] = None,
    key_env: Annotated[str | None, typer.Option("--key-env", help="Variable that holds the engine's API key.")] = None,
    limit: Annotated[
        list[str] | None, typer.Option("--limit", help="A limit that the engine does not tell: NAME=NUMBER.")
    ] = None,
    under_load: Annotated[bool, typer.Option("--under-load", help="Measure although others use the engine.")] = False,
    check: Annotated[Path | None, typer.Option("--check", help="Judge this profile on other traffic.")] = None,
    load: Annotated[float, typer.Option("--load", help="For --check: share of the forecast capacity.")] = 0.5,
    transfer_to: Annotated[
        str | None, typer.Option("--transfer-to", help="Measure moving KV from the target to this instance.")
    ] = None,
    recorded: Annotated[
        Path | None, typer.Option("--from", help="Fit a recorded run: request timings, or an event log.")
    ] = None,
    meta: Annotated[Path | None, typer.Option("--meta", help="The recorded engine's settings (JSON).")] = None,
    fit_first: Annotated[int, typer.Option("--fit-first", help="Requests to fit; the rest judge the fit.")] = 100,
    instance: Annotated[str | None, typer.Option("--instance", help="Which instance of an event log.")] = None,
    show: Annotated[Path | None, typer.Option("--show", help="Print a profile.")] = None,
    diff: Annotated[tuple[Path, Path] | None, typer.Option("--diff", help="Compare two profiles.")] = None,
    prior: Annotated[Path | None, typer.Option("--prior", help="Estimate from a model's config.json.")] = None,
    device: Annotated[str, typer.Option("--device", help="For --prior: the device's name.")] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Measure an engine over HTTP, or fit a recorded run, and write its cost profile.

    One of TARGET, --from, --show, --diff or --prior says what to do. With a target and --check nothing is fitted:
    traffic is sent and compared with what the profile forecasts.
    """
    from weighbridge.core.errors import ConfigError

    if sum(choice is not None for choice in (target, recorded, show, diff, prior)) != 1:
        raise ConfigError("give one of: the URL of an engine, --from, --show, --diff, --prior")
    if show is not None:
        _show(show, as_json)
    elif diff is not None:
        _diff(diff, as_json)
    elif prior is not None:
        _prior(prior, device, out, as_json)
    elif recorded is not None:
        _from_run(recorded, meta, fit_first, instance, out, as_json)
    elif target is not None:
        chosen = _Target(target, config, model, kind, key_env, limit or [], _seconds(budget))
        if check is not None:
            _check(chosen, check, load, as_json)
        elif transfer_to is not None:
            _transfer(chosen, transfer_to, out, as_json)
        else:
            _measure(chosen, out or chosen.profile, report, under_load, as_json)


class _Target:
    """The engine that was named on the command line, its flags checked."""

    def __init__(
        self,
        target: str,
        config: Path | None,
        model: str | None,
        kind: str | None,
        key_env: str | None,
        limits: list[str],
        budget_s: float,
    ) -> None:
        import os

        from weighbridge.calibrate.endpoint import KINDS
        from weighbridge.core.errors import ConfigError

        if config is None and target != "localhost" and not any(mark in target for mark in ".:/"):
            hint = "to name an instance, add the file that holds it: --config FILE"
            raise ConfigError(f"{target!r} is no address such as http://127.0.0.1:8000; {hint}")
        self.url, self.model, self.budget_s = target, model, budget_s
        self.profile: Path | None = None
        if config is not None:
            found = _configured(config, target)
            self.url, kind, key_env = found.url, kind or found.kind, key_env or found.api_key_env
            self.profile = None if found.profile is None else Path(found.profile)
        self.kind: Kind | None = next((k for k in KINDS if k == kind), None)
        if kind is not None and self.kind is None:
            raise ConfigError(f"--kind is {kind!r}, expected one of {', '.join(KINDS)}")
        self.key = os.environ.get(key_env) if key_env is not None else None
        if key_env is not None and not self.key:
            raise ConfigError(f"--key-env names {key_env}, but that variable is not set")
        self.limits = _limits(limits)


def _configured(config: Path, name: str) -> InstanceSettings:
    import os

    from weighbridge.config.settings import load_settings
    from weighbridge.core.errors import ConfigError

    settings = load_settings(config, os.environ)
    for instance in settings.instances:
        if instance.name == name:
            return instance
    if any(engine.name == name for engine in settings.engines):
        raise ConfigError(
            f"{name!r} is an embedded engine: start `weighbridge serve`, then give its address", source=str(config)
        )
    known = ", ".join(i.name for i in settings.instances) or "none"
    raise ConfigError(f"no instance is named {name!r}; named are {known}", source=str(config))


def _measure(target: _Target, out: Path | None, report: Path | None, under_load: bool, as_json: bool) -> None:
    from weighbridge.calibrate.files import write_profile
    from weighbridge.calibrate.report import draw, require_matplotlib
    from weighbridge.cost.profile import encode_profile

    if report is not None:
        require_matplotlib()
    calibration = _run_measurement(target, under_load)
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
        typer.echo("the profile was not kept: name a file by --out")


def _run_measurement(target: _Target, under_load: bool) -> Calibration:
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
                target.url,
                model=target.model,
                kind=target.kind,
                key=target.key,
                limits=target.limits,
                budget_s=target.budget_s,
                under_load=under_load,
                stop=stop,
                progress=progress,
            )

    return asyncio.run(run())


def _check(target: _Target, path: Path, load: float, as_json: bool) -> None:
    import asyncio

    import msgspec

    from weighbridge.calibrate.check import check_url
    from weighbridge.calibrate.files import read_profile
    from weighbridge.calibrate.progress import progress_bar
    from weighbridge.core.errors import ConfigError

    if not 0.05 <= load <= 2.0:
        raise ConfigError(f"--load is {load}, expected a share of the capacity from 0.05 to 2")
    profile = read_profile(path)
    with progress_bar("sending traffic") as progress:
        work = check_url(
            target.url,
            profile,
            name=str(path),
            model=target.model,
            kind=target.kind,
            key=target.key,
            load=load,
            seconds=target.budget_s,
            progress=progress,
        )
        found = asyncio.run(work)
    if as_json:
        typer.echo(msgspec.json.encode(found).decode())
    else:
        _print_check(found)


def _transfer(target: _Target, other: str, out: Path | None, as_json: bool) -> None:
    import asyncio

    import msgspec

    from weighbridge.calibrate.files import write_bytes
    from weighbridge.calibrate.progress import progress_bar
    from weighbridge.calibrate.transfer import measure_transfer

    with progress_bar("moving KV") as progress:
        found = asyncio.run(measure_transfer(target.url, other, model=target.model, key=target.key, progress=progress))
    data = msgspec.json.encode(found)
    if out is not None:
        write_bytes(out, msgspec.json.format(data, indent=2) + b"\n")
    if as_json:
        typer.echo(data.decode())
    else:
        bandwidth = f"{found.bytes_per_s / 1e6:,.0f} MB/s" if found.seconds_per_byte else "no limit seen"
        typer.echo(
            f"latency {found.latency_s * 1e3:.2f} ms, bandwidth {bandwidth}, median error {found.error:.1%} "
            f"of {found.count} transfers"
        )


def _from_run(
    recorded: Path, meta: Path | None, fit_first: int, instance: str | None, out: Path | None, as_json: bool
) -> None:
    import msgspec

    from weighbridge.calibrate.files import write_profile
    from weighbridge.calibrate.from_run import calibrate_run
    from weighbridge.calibrate.progress import progress_bar
    from weighbridge.calibrate.recorded import read_run

    requests, limits, told = read_run(recorded, meta, instance)
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


def _show(path: Path, as_json: bool) -> None:
    from weighbridge.calibrate.files import read_profile
    from weighbridge.cost.profile import encode_profile

    profile = read_profile(path)
    if as_json:
        typer.echo(encode_profile(profile).decode().rstrip())
    else:
        _print_profile(profile, ())


def _diff(paths: tuple[Path, Path], as_json: bool) -> None:
    import msgspec
    from rich.console import Console

    from weighbridge.calibrate.files import read_profile
    from weighbridge.calibrate.show import difference_table, differences

    a, b = read_profile(paths[0]), read_profile(paths[1])
    if as_json:
        typer.echo(msgspec.json.encode(differences(a, b)).decode())
    else:
        Console().print(difference_table(a, b, (paths[0].name, paths[1].name)))


def _prior(config: Path, device: str, out: Path | None, as_json: bool) -> None:
    import msgspec

    from weighbridge.calibrate.files import read_bytes, write_profile
    from weighbridge.core.errors import ConfigError, InputError
    from weighbridge.cost.prior import model_size, prior_profile
    from weighbridge.cost.profile import encode_profile

    if not device:
        raise ConfigError("--prior needs --device, the name of the device that the model will run on")
    try:
        fields: Any = msgspec.json.decode(read_bytes(config))
    except msgspec.DecodeError as error:
        raise InputError(f"{config}: not JSON ({error})") from None
    if not isinstance(fields, dict):
        raise InputError(f"{config}: expected a model's config.json")
    profile = prior_profile(model_size(fields), device, name=str(fields.get("_name_or_path") or config.parent.name))
    if out is not None:
        write_profile(out, profile)
    if as_json:
        typer.echo(encode_profile(profile).decode().rstrip())
    else:
        _print_profile(profile, ("a prior from data sheets, not a measurement: calibrate the engine once it runs",))


def _limits(texts: list[str]) -> Limits:
    from weighbridge.core.errors import ConfigError
    from weighbridge.core.instance import Limits

    names = ("token_budget", "max_sequences", "kv_blocks", "max_context", "block_size")
    found: dict[str, int] = {}
    for text in texts:
        name, _, number = text.partition("=")
        if name not in names or not number.isdigit() or int(number) < 1:
            raise ConfigError(f"--limit is {text!r}, expected NAME=NUMBER with NAME one of {', '.join(names)}")
        found[name] = int(number)
    return Limits(
        token_budget=found.get("token_budget"),
        max_sequences=found.get("max_sequences"),
        kv_blocks=found.get("kv_blocks"),
        max_context=found.get("max_context"),
        block_size=found.get("block_size", 16),
    )


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


def _print_run(report: RunReport) -> None:
    from rich.console import Console

    from weighbridge.calibrate.show import error_table, formula

    console = Console()
    title = f"{report.source}: forecast against observed, {report.evaluated} requests not fitted"
    console.print(error_table(title, report.metrics))
    console.print(formula(report.step), highlight=False)
    if report.identifiable:
        console.print(f"every term stands on its own (condition number {report.condition_number:.0f})")
    for warning in report.warnings:
        console.print(f"warning: {warning}", markup=False, highlight=False)


def _print_check(report: CheckReport) -> None:
    from rich.console import Console

    from weighbridge.calibrate.show import error_table

    console = Console()
    title = (
        f"forecast against observed: {report.requests} requests, {report.rate_per_s:.2f} a second, "
        f"{report.load:.0%} of the forecast capacity"
    )
    console.print(error_table(title, report.metrics))
    inside = ", ".join(f"{metric.removesuffix('_s').upper()} {share:.0%}" for metric, share in report.inside.items())
    console.print(f"inside the 90 % band: {inside}", highlight=False)
    if report.failed:
        console.print(f"warning: {report.failed} requests failed and are not counted")


def _print_profile(profile: Profile, warnings: Sequence[str]) -> None:
    from rich.console import Console

    from weighbridge.calibrate.show import profile_tables

    console = Console()
    for table in profile_tables(profile):
        console.print(table)
    for warning in warnings:
        console.print(f"warning: {warning}", markup=False, highlight=False)
