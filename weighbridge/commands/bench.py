"""`weighbridge bench`: load an OpenAI-compatible server on a schedule and report what its clients would see."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from weighbridge.commands._bench_flags import (
    CompareFlags,
    DecideFlags,
    MeasureFlags,
    OutputFlags,
    RampFlags,
    RateFlags,
    RunFlags,
    ServerFlags,
    SweepFlags,
    TraceFlags,
    WorkloadFlags,
)
from weighbridge.commands._flags import takes

if TYPE_CHECKING:
    from weighbridge.bench.schedule import DrawOptions, TraceOptions


def register(app: typer.Typer) -> None:
    """Add the `bench` group; without a sub-command it runs one measurement."""
    bench = typer.Typer(
        help="Open-loop load generator and its reports.", invoke_without_command=True, rich_markup_mode=None
    )
    bench.callback()(_run)
    for name, command in (("compare", _compare), ("sweep", _sweep), ("diff", _diff), ("decide", _decide)):
        bench.command(name)(command)
    app.add_typer(bench, name="bench")


@takes(ServerFlags, RateFlags, WorkloadFlags, RampFlags, TraceFlags, MeasureFlags, RunFlags, OutputFlags)
def _run(
    context: typer.Context,
    server: ServerFlags,
    rate: RateFlags,
    workload: WorkloadFlags,
    ramp: RampFlags,
    trace: TraceFlags,
    measure: MeasureFlags,
    run: RunFlags,
    output: OutputFlags,
) -> None:
    """Send requests on a fixed schedule and report latency, goodput and whether the measurement is valid."""
    if context.invoked_subcommand is not None:
        return
    from weighbridge.bench.run import RunOptions, run_and_report

    options = RunOptions(
        url=server.url,
        model=server.model,
        endpoint=server.endpoint,
        stream=server.stream,
        ignore_eos=server.ignore_eos,
        headers=tuple(server.header),
        extra_body=server.extra_body,
        api_key_env=server.api_key_env,
        insecure=server.insecure,
        plan=_plan(rate.rate, workload, trace, ramp),
        tier=run.tier,
        tier_header=run.tier_header,
        slo=tuple(measure.slo),
        goodput=tuple(run.goodput),
        max_concurrency=run.max_concurrency,
        warmup_s=measure.warmup,
        drain_s=measure.drain,
        timeout_s=run.timeout,
        patience_s=run.patience,
        max_lag_s=run.max_lag,
        processes=run.processes,
        seed=measure.seed,
        metrics=tuple(run.metrics),
        out=output.out,
        records=run.records,
    )
    run_and_report(options, as_json=output.json)


@takes(CompareFlags, RateFlags, WorkloadFlags, TraceFlags, MeasureFlags, OutputFlags)
def _compare(
    arms: CompareFlags,
    rate: RateFlags,
    workload: WorkloadFlags,
    trace: TraceFlags,
    measure: MeasureFlags,
    output: OutputFlags,
) -> None:
    """Policies over one fleet, or several servers, on equal schedules: paired differences and their noise."""
    from weighbridge.bench.compare import compare, policy_arms, print_comparison, server_arms
    from weighbridge.bench.output import deliver, folder_of, saying
    from weighbridge.bench.run import RunOptions
    from weighbridge.core.errors import ConfigError

    if bool(arms.policy) == bool(arms.target):
        raise ConfigError("give either --policy a,b (gateways are started) or --target twice", source="bench compare")
    names = [name.strip() for name in arms.policy.split(",") if name.strip()]
    opened = policy_arms(names, arms.config) if names else server_arms(arms.target)
    options = RunOptions(
        url="",
        plan=_plan(rate.rate, workload, trace),
        model=arms.model,
        slo=tuple(measure.slo),
        warmup_s=measure.warmup,
        drain_s=measure.drain,
        seed=measure.seed,
    )
    folder = folder_of(output.out)
    with saying(quiet=output.json) as say:
        found = compare(opened, options, arms.repeats, folder, say)
    deliver(found, folder / "comparison.json", print_comparison, as_json=output.json)


@takes(SweepFlags, WorkloadFlags, MeasureFlags, OutputFlags)
def _sweep(search: SweepFlags, workload: WorkloadFlags, measure: MeasureFlags, output: OutputFlags) -> None:
    """Raise the rate until the server saturates and find the knee."""
    from dataclasses import replace

    from weighbridge.bench.output import deliver, folder_of, saying, write
    from weighbridge.bench.run import RunOptions
    from weighbridge.bench.sweep import SweepOptions, picture, print_sweep, sweep

    if workload.duration is None and workload.num_prompts is None:
        workload = replace(workload, duration=30.0)
    options = RunOptions(
        url=search.url,
        plan=_plan(search.start, workload),
        model=search.model,
        slo=tuple(measure.slo),
        warmup_s=measure.warmup,
        drain_s=measure.drain,
        seed=measure.seed,
    )
    folder = folder_of(output.out)
    exact = _numbers(search.rates, "--rates") if search.rates else None
    with saying(quiet=output.json) as say:
        found = sweep(options, SweepOptions(start=search.start, attainment=search.attainment), folder, say, exact)
    write(folder / "sweep.svg", picture(found).encode())
    deliver(found, folder / "sweep.json", print_sweep, as_json=output.json)


def _diff(
    runs: Annotated[list[str], typer.Argument(help="[NAME=]PATH of two or more runs: folders or record files.")],
    slo: Annotated[list[str] | None, typer.Option(help="[TIER:]ttft=0.5,tpot=0.05; may be repeated.")] = None,
    html: Annotated[Path | None, typer.Option(help="Write one page with all of them.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Recorded runs side by side, live or simulated."""
    from weighbridge.bench.diff import differences, print_differences, read_run
    from weighbridge.bench.html import page
    from weighbridge.bench.output import deliver, write
    from weighbridge.bench.slo import tiers_of

    tiers = tiers_of(slo or ())
    views = [read_run(text, tiers) for text in runs]
    if html is not None:
        write(html, page(" against ".join(view.name for view in views), views).encode())
    deliver(differences(views), None, print_differences, as_json=json)


@takes(DecideFlags)
def _decide(flags: DecideFlags) -> None:
    """Latency layers apart: encode and scores, model choice, instance choice, first token, full answer."""
    from weighbridge.bench.decide import bench_decide, print_layers
    from weighbridge.bench.output import deliver, saying
    from weighbridge.bench.run import RunOptions
    from weighbridge.bench.schedule import DrawOptions
    from weighbridge.routing.policies.registry import make_policy

    make_policy(flags.policy)
    target = RunOptions(url=flags.url, model=flags.model, plan=DrawOptions(rate=1.0)) if flags.url else None
    with saying(quiet=flags.json) as say:
        found = bench_decide(
            sizes=tuple(int(size) for size in _numbers(flags.sizes, "--sizes")),
            iterations=flags.iterations,
            pool=str(flags.pool or ""),
            checkpoint=str(flags.checkpoint or ""),
            policy=flags.policy,
            target=target,
            say=say,
        )
    deliver(found, flags.out, print_layers, as_json=flags.json)


def _numbers(text: str, flag: str) -> list[float]:
    from weighbridge.core.errors import ConfigError

    try:
        values = [float(part) for part in text.split(",")]
    except ValueError:
        values = []
    if not values or min(values) <= 0:
        raise ConfigError(f"'{text}' is not a list of numbers above 0, such as 1,2,4", source=flag)
    return values


def _plan(
    rate: float | None, workload: WorkloadFlags, trace: TraceFlags | None = None, ramp: RampFlags | None = None
) -> TraceOptions | DrawOptions:
    """The schedule's options: those of the trace where one is given, else of the drawn workload."""
    from weighbridge.bench.schedule import DrawOptions, TraceOptions

    if trace is not None and trace.trace is not None:
        return TraceOptions(
            trace.trace,
            trace.trace_from,
            trace.trace_for,
            trace.time_scale,
            rate,
            trace.length_scale,
            trace.max_input,
            trace.max_output,
            workload.num_prompts,
        )
    ramp = ramp or RampFlags()
    return DrawOptions(
        rate=math.inf if rate is None else rate,
        duration_s=workload.duration,
        count=workload.num_prompts,
        burstiness=workload.burstiness,
        arrivals=workload.arrivals,
        input=workload.input_lengths,
        output=workload.output_lengths,
        mix=workload.mix,
        prefix=workload.prefix,
        ramp=ramp.ramp_up_strategy,
        ramp_from=ramp.ramp_up_start_rps,
        ramp_to=ramp.ramp_up_end_rps,
    )
