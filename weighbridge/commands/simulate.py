"""`weighbridge simulate`: try a policy on a workload in virtual time, and run the documents' experiments."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from weighbridge.sim.fleet import SimulatedFleet
    from weighbridge.sim.runs import Result, Run, Workload

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
Jobs = Annotated[int | None, typer.Option(help="Processes for several runs (default: all cores).")]
OnRay = Annotated[bool, typer.Option("--ray", help="Spread runs over a Ray cluster (RAY_ADDRESS) instead.")]


def register(app: typer.Typer) -> None:
    """Add `simulate` and `simulate experiment`."""
    group = typer.Typer(
        help="Simulate a fleet in virtual time with the real router.", invoke_without_command=True, no_args_is_help=True
    )
    group.callback()(simulate)
    group.command("experiment")(experiment)
    app.add_typer(group, name="simulate")


# longer than most because every option is a line of the signature: that is where the help text comes from
def simulate(
    context: typer.Context,
    instances: Annotated[int, typer.Option(help="Equal instances (a vLLM-like engine on an RTX PRO 6000).")] = 8,
    fleet: Annotated[Path | None, typer.Option(help="YAML file with the fleet instead of --instances.")] = None,
    trace: Annotated[Path | None, typer.Option(help="Trace file to replay instead of a generated workload.")] = None,
    mix: Annotated[str | None, typer.Option(help="chat, document, reasoning, mixed or reasoning-heavy.")] = None,
    input: Annotated[
        str, typer.Option(help="Prompt tokens: fixed:N, exp:MEAN, lognormal:MEAN:CV, uniform:A:B.")
    ] = "exp:500",
    output: Annotated[str, typer.Option(help="Output tokens, in the same forms.")] = "exp:150",
    rate: Annotated[float | None, typer.Option(help="Requests per second (default 20, or the trace's own).")] = None,
    arrivals: Annotated[
        str, typer.Option(help="poisson, gamma:CV, mmpp, mmpp:FACTOR:ON_S:OFF_S, constant.")
    ] = "poisson",
    requests: Annotated[
        int, typer.Option(help="How many requests; of a trace, a random slice of that length.")
    ] = 10_000,
    policy: Annotated[str, typer.Option(help="One policy, or several separated by commas.")] = "least_tokens",
    dispatch: Annotated[str, typer.Option(help="auto, hold or immediate.")] = "auto",
    assign: Annotated[str, typer.Option(help="router, or fixed: request k to instance k mod n, no router.")] = "router",
    seed: Annotated[int, typer.Option(help="First seed.")] = 1,
    seeds: Annotated[int, typer.Option(help="How many seeds in a row.")] = 1,
    poll: Annotated[
        float, typer.Option(help="Seconds between load reports of an engine, as in the gateway (0: none).")
    ] = 1.0,
    progress: Annotated[
        float, typer.Option(help="Seconds between token counts of a running request (the gateway's least is 0.25).")
    ] = 0.5,
    jobs: Jobs = None,
    on_ray: OnRay = False,
    stepwise: Annotated[bool, typer.Option("--stepwise", help="Step by step instead of closed-form jumps.")] = False,
    skip_bad: Annotated[
        bool, typer.Option("--skip-bad", help="Count bad rows of the trace instead of stopping.")
    ] = False,
    log: Annotated[Path | None, typer.Option(help="Write the event log here (one policy, one seed).")] = None,
    records: Annotated[Path | None, typer.Option(help="Write one JSON record per request here (one run).")] = None,
    chrome: Annotated[Path | None, typer.Option(help="Write a Chrome trace of the steps here (one run).")] = None,
    as_json: Json = False,
) -> None:
    """Simulate a fleet in virtual time with the real router."""
    if context.invoked_subcommand is not None:
        return
    from weighbridge.core.errors import ConfigError
    from weighbridge.sim.live import SimulationSettings
    from weighbridge.sim.runs import Run

    _check_words(assign, dispatch)
    _check_numbers({"--poll": poll, "--progress": progress}, least=0)
    _check_numbers({"--instances": instances, "--requests": requests, "--seeds": seeds}, least=1)
    if rate is not None and rate <= 0:
        raise ConfigError(f"must be above 0, not {rate:g}", source="--rate")
    workload, tiers, skipped = _workload(trace, mix, input, output, rate, arrivals, requests, skip_bad)
    settings = SimulationSettings(
        poll_s=poll or None, progress_s=progress or None, stepping="stepwise" if stepwise else "auto"
    )
    policies = [name.strip() for name in policy.split(",") if name.strip()]
    runs = [
        Run(
            fleet=_fleet(fleet, instances),
            workload=workload,
            policy=name,
            seed=one,
            tiers=tiers,
            settings=settings,
            assign="fixed" if assign == "fixed" else "router",
            router={"dispatch": dispatch},
        )
        for name in policies
        for one in range(seed, seed + seeds)
    ]
    _check_policies(policies)
    if len(runs) == 1:
        _one(runs[0], requests, log, records, chrome, as_json, skipped)
    elif log or records or chrome:
        raise ConfigError("--log, --records and --chrome need one policy and one seed")
    else:
        _many(runs, jobs, on_ray, as_json, skipped)


def _check_words(assign: str, dispatch: str) -> None:
    from weighbridge.core.errors import ConfigError

    if assign not in ("router", "fixed"):
        raise ConfigError(f"must be router or fixed, not '{assign}'", source="--assign")
    if dispatch not in ("auto", "hold", "immediate"):
        raise ConfigError(f"must be auto, hold or immediate, not '{dispatch}'", source="--dispatch")


def _check_numbers(values: Mapping[str, float], *, least: int) -> None:
    from weighbridge.core.errors import ConfigError

    for name, value in values.items():
        if value < least:
            wanted = "0 or more" if least == 0 else f"at least {least}"
            raise ConfigError(f"must be {wanted}, not {value:g}", source=name)


def experiment(
    name: Annotated[str, typer.Argument(help="Which one; `list` names them all.")],
    quick: Annotated[bool, typer.Option("--quick", help="The size of a test: seconds instead of minutes.")] = False,
    seeds: Annotated[int | None, typer.Option(help="How many seeds instead of the experiment's own number.")] = None,
    out: Annotated[Path | None, typer.Option(help="Folder for NAME.md, NAME.png and NAME.json.")] = None,
    jobs: Jobs = None,
    on_ray: OnRay = False,
    as_json: Json = False,
) -> None:
    """Run one of the documents' experiments."""
    from weighbridge.sim.experiments import registry
    from weighbridge.sim.experiments.base import Options, outcome_dict
    from weighbridge.sim.experiments.page import page
    from weighbridge.sim.experiments.pictures import draw
    from weighbridge.sim.progress import Bar
    from weighbridge.sim.report import print_outcome, to_json

    if name == "list":
        for known in registry.MODULES:
            question = " ".join(registry.experiment(known).question.split("\n\n")[0].split())
            typer.echo(f"{known}: {question}")
        return
    chosen = registry.experiment(name)
    try:
        with Bar("runs", 1) as bar:
            options = Options(quick=quick, seeds=seeds, jobs=jobs, ray=on_ray, progress=bar.on_done)
            outcome = chosen.run(options)
    except KeyboardInterrupt:
        typer.echo("interrupted: an experiment's figures need all of its runs, so there are none", err=True)
        raise typer.Exit(130) from None
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        (out / f"{name}.json").write_text(to_json(outcome_dict(outcome), indent=1) + "\n", encoding="utf-8")
        (out / f"{name}.md").write_text(page(chosen, outcome), encoding="utf-8")
        draw(outcome, out / f"{name}.png")
    if as_json:
        typer.echo(to_json(outcome_dict(outcome)))
    else:
        from rich.console import Console

        print_outcome(outcome, Console(soft_wrap=True))


def _check_policies(names: list[str]) -> None:
    from weighbridge.core.errors import ConfigError
    from weighbridge.routing.policies.registry import make_policy

    if not names:
        raise ConfigError("name at least one policy", source="--policy")
    for name in names:
        make_policy(name)


def _workload(
    trace: Path | None,
    mix: str | None,
    input: str,
    output: str,
    rate: float | None,
    arrivals: str,
    requests: int,
    skip_bad: bool,
) -> tuple[Workload, Any, int]:
    """The workload, its tiers and how many bad rows its trace had."""
    from weighbridge.core.errors import ConfigError
    from weighbridge.core.request import DEFAULT_TIERS
    from weighbridge.sim.lab import tiers_of
    from weighbridge.sim.runs import Generated, Recorded
    from weighbridge.workload import mixes
    from weighbridge.workload.arrivals import parse_arrivals
    from weighbridge.workload.lengths import parse_lengths
    from weighbridge.workload.readers import read_trace
    from weighbridge.workload.synthetic import RequestClass, Synthetic

    if trace is not None:
        read = read_trace(trace, skip_bad=skip_bad)
        workload = Recorded(str(trace), rate=rate, length=requests, skip_bad=skip_bad)
        return workload, DEFAULT_TIERS, read.skipped
    process = parse_arrivals(arrivals, rate or 20.0)
    if mix is not None:
        if mix not in mixes.MIXES:
            raise ConfigError(f"no mix '{mix}'; there are {', '.join(mixes.MIXES)}", source="--mix")
        return Generated(mixes.workload(mix, process), count=requests), tiers_of(mixes.classes(mix)), 0
    one = RequestClass("", 1.0, parse_lengths(input, "--input"), parse_lengths(output, "--output"))
    return Generated(Synthetic(process, (one,)), count=requests), DEFAULT_TIERS, 0


def _fleet(path: Path | None, instances: int) -> SimulatedFleet:
    import os

    from weighbridge.config.document import Document
    from weighbridge.core.errors import ConfigError, ProfileError
    from weighbridge.cost.profile import Profile, decode_profile
    from weighbridge.sim.fleet import mixed
    from weighbridge.sim.fleet_file import FleetFile, build_fleet

    if path is None:
        return mixed(instances)
    document = Document.read(path, os.environ)

    def read_profile(name: str) -> Profile:
        profile = path.parent / name
        try:
            return decode_profile(profile.read_bytes(), str(profile))
        except OSError as error:
            raise ProfileError(f"{profile}: cannot be read: {error.strerror}") from None

    try:
        return build_fleet(document.to(FleetFile), read_profile)
    except ConfigError as error:
        if error.source:
            raise
        raise document.error(str(error).removeprefix(f"{error.path}: "), error.path) from None


def _one(
    one: Run, expected: int, log: Path | None, records: Path | None, chrome: Path | None, as_json: bool, skipped: int
) -> None:
    """One run, here, with its files; Ctrl-C keeps what is done."""
    import time
    from contextlib import ExitStack

    import msgspec

    from weighbridge.sim.chrome_trace import ChromeTrace
    from weighbridge.sim.progress import Bar
    from weighbridge.sim.report import as_dict, print_result, to_json
    from weighbridge.sim.runs import few_collections, figures, make_simulation, run_with_records

    interrupted = False
    with ExitStack() as stack:
        spans = ChromeTrace() if chrome is not None else None
        if one.assign == "fixed":
            result, done = run_with_records(one)
        else:
            bar = stack.enter_context(Bar("requests", expected))
            out = stack.enter_context(log.open("wb")) if log is not None else None
            hooks: dict[str, Any] = {"log": out}
            if bar.shown:
                hooks["on_arrival"] = bar.on_arrival
            if spans is not None:
                hooks["on_step"] = spans.record
            simulation = make_simulation(one, **hooks)
            stack.enter_context(few_collections())
            start = time.process_time()
            try:
                simulation.run(one.workload.requests(one.seed))
            except KeyboardInterrupt:
                interrupted = True
            done = simulation.records
            result = figures(one, done, simulation.instances, time.process_time() - start)
    if records is not None:
        records.write_bytes(b"".join(msgspec.json.encode(record) + b"\n" for record in done))
    if chrome is not None and spans is not None:
        chrome.write_bytes(spans.encode())
    if as_json:
        extra = {"skipped": skipped, "interrupted": interrupted}
        typer.echo(to_json({**as_dict(result), **extra}))
    else:
        from rich.console import Console

        print_result(result, Console(soft_wrap=True))
        if skipped:
            typer.echo(f"{skipped} bad rows of the trace skipped")
        if interrupted:
            typer.echo("interrupted: these are the requests so far")
    if interrupted:
        raise typer.Exit(130)


def _many(runs: list[Run], jobs: int | None, on_ray: bool, as_json: bool, skipped: int) -> None:
    """Several runs side by side."""
    from weighbridge.sim.progress import Bar
    from weighbridge.sim.report import comparison, print_comparison, to_json
    from weighbridge.sim.sweep import run_all

    with Bar("runs", len(runs)) as bar:
        results: list[Result] = run_all(runs, jobs=jobs, ray=on_ray, progress=bar.on_done)
    interrupted = len(results) < len(runs)
    if as_json:
        typer.echo(to_json({**comparison(results), "skipped": skipped, "interrupted": interrupted}))
    else:
        from rich.console import Console

        print_comparison(results, Console(soft_wrap=True))
        if interrupted:
            typer.echo(f"interrupted: {len(results)} of {len(runs)} runs are done")
    if interrupted:
        raise typer.Exit(130)
