"""`weighbridge bench`: load an OpenAI-compatible server on a schedule and report what its clients would see.

Longer than 400 lines because every flag of five commands is declared here, and nothing else.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from weighbridge.bench.schedule import DrawOptions, TraceOptions

_WORKLOAD, _SERVER, _RUN, _OUTPUT = "Workload", "Server", "Run", "Output"


def register(app: typer.Typer) -> None:
    """Add the `bench` group; without a sub-command it runs one measurement."""
    bench = typer.Typer(
        help="Open-loop load generator and its reports.", invoke_without_command=True, rich_markup_mode=None
    )
    bench.callback()(_run)
    for name, command in (("compare", _compare), ("sweep", _sweep), ("diff", _diff), ("decide", _decide)):
        bench.command(name)(command)
    app.add_typer(bench, name="bench")


def _run(
    context: typer.Context,
    url: Annotated[
        str, typer.Option("--url", "--base-url", help="The server, http(s)://host:port.", rich_help_panel=_SERVER)
    ] = "",
    model: Annotated[str, typer.Option(help="Default: the first the server names.", rich_help_panel=_SERVER)] = "",
    endpoint: Annotated[
        str, typer.Option(help="Path of the endpoint.", rich_help_panel=_SERVER)
    ] = "/v1/chat/completions",
    stream: Annotated[bool, typer.Option(help="Ask for a stream.", rich_help_panel=_SERVER)] = True,
    ignore_eos: Annotated[bool, typer.Option(help="Ask for exact output lengths.", rich_help_panel=_SERVER)] = True,
    header: Annotated[
        list[str] | None, typer.Option(help="Extra header NAME=VALUE; may be repeated.", rich_help_panel=_SERVER)
    ] = None,
    extra_body: Annotated[
        str, typer.Option(help="JSON object merged into every request.", rich_help_panel=_SERVER)
    ] = "",
    api_key_env: Annotated[
        str, typer.Option(help="Environment variable that holds the API key.", rich_help_panel=_SERVER)
    ] = "OPENAI_API_KEY",
    insecure: Annotated[bool, typer.Option(help="Do not verify TLS.", rich_help_panel=_SERVER)] = False,
    rate: Annotated[
        float | None,
        typer.Option(
            "--rate", "--request-rate", help="Mean requests per second; inf = at once.", rich_help_panel=_WORKLOAD
        ),
    ] = None,
    duration: Annotated[float | None, typer.Option(help="Seconds of arrivals.", rich_help_panel=_WORKLOAD)] = None,
    num_prompts: Annotated[int | None, typer.Option(help="Number of requests.", rich_help_panel=_WORKLOAD)] = None,
    input_lengths: Annotated[
        str,
        typer.Option(
            "--input",
            "--random-input-len",
            help="Prompt tokens: 500, exp:200, lognormal:300:1.2, uniform:10:50.",
            rich_help_panel=_WORKLOAD,
        ),
    ] = "500",
    output_lengths: Annotated[
        str, typer.Option("--output", "--random-output-len", help="Output tokens, likewise.", rich_help_panel=_WORKLOAD)
    ] = "150",
    mix: Annotated[
        str, typer.Option(help="A named mix: chat, document, reasoning, mixed, ...", rich_help_panel=_WORKLOAD)
    ] = "",
    prefix: Annotated[str, typer.Option(help="Shared prefixes, FANOUTxTOKENS[,...].", rich_help_panel=_WORKLOAD)] = "",
    burstiness: Annotated[
        float, typer.Option(help="Shape of gamma gaps; 1 = Poisson.", rich_help_panel=_WORKLOAD)
    ] = 1.0,
    arrivals: Annotated[
        str, typer.Option(help="constant, gamma:CV, mmpp:FACTOR:ON_S:OFF_S.", rich_help_panel=_WORKLOAD)
    ] = "",
    ramp_up_strategy: Annotated[str, typer.Option(help="linear or exponential.", rich_help_panel=_WORKLOAD)] = "",
    ramp_up_start_rps: Annotated[float, typer.Option(rich_help_panel=_WORKLOAD)] = 0.0,
    ramp_up_end_rps: Annotated[float, typer.Option(rich_help_panel=_WORKLOAD)] = 0.0,
    trace: Annotated[Path | None, typer.Option(help="Replay a trace file instead.", rich_help_panel=_WORKLOAD)] = None,
    trace_from: Annotated[
        float, typer.Option(help="Start within the trace, seconds.", rich_help_panel=_WORKLOAD)
    ] = 0.0,
    trace_for: Annotated[
        float | None, typer.Option(help="Seconds of the trace to use.", rich_help_panel=_WORKLOAD)
    ] = None,
    time_scale: Annotated[
        float, typer.Option(help="Multiply the trace's times (2 = half the rate).", rich_help_panel=_WORKLOAD)
    ] = 1.0,
    length_scale: Annotated[
        float, typer.Option(help="Multiply the trace's token counts.", rich_help_panel=_WORKLOAD)
    ] = 1.0,
    max_input: Annotated[
        int | None, typer.Option(help="Cap on prompt tokens of a trace.", rich_help_panel=_WORKLOAD)
    ] = None,
    max_output: Annotated[
        int | None, typer.Option(help="Cap on output tokens of a trace.", rich_help_panel=_WORKLOAD)
    ] = None,
    tier: Annotated[str, typer.Option(help="Tier of every request that has none.", rich_help_panel=_WORKLOAD)] = "",
    tier_header: Annotated[
        str, typer.Option(help="Header that carries the tier; empty = none.", rich_help_panel=_WORKLOAD)
    ] = "x-weighbridge-tier",
    slo: Annotated[
        list[str] | None,
        typer.Option(help="[TIER:]ttft=0.5,tpot=0.05,e2e=10 in seconds; may be repeated.", rich_help_panel=_RUN),
    ] = None,
    goodput: Annotated[
        list[str] | None, typer.Option(help="As in vLLM, in milliseconds: ttft:500.", rich_help_panel=_RUN)
    ] = None,
    max_concurrency: Annotated[
        int | None, typer.Option(help="At most so many in flight; with --rate inf a closed loop.", rich_help_panel=_RUN)
    ] = None,
    warmup: Annotated[float, typer.Option(help="Leading seconds that are reported apart.", rich_help_panel=_RUN)] = 0.0,
    drain: Annotated[
        float, typer.Option(help="Seconds to wait for replies after the last arrival.", rich_help_panel=_RUN)
    ] = 60.0,
    timeout: Annotated[
        float, typer.Option(help="Seconds until a request counts as timed out.", rich_help_panel=_RUN)
    ] = 600.0,
    patience: Annotated[
        float | None, typer.Option(help="Clients leave after so many seconds without a token.", rich_help_panel=_RUN)
    ] = None,
    max_lag: Annotated[
        float | None, typer.Option(help="Largest send lag p99 of a valid run, seconds.", rich_help_panel=_RUN)
    ] = None,
    processes: Annotated[int, typer.Option(help="Generator processes.", rich_help_panel=_RUN)] = 1,
    seed: Annotated[int, typer.Option(rich_help_panel=_RUN)] = 0,
    metrics: Annotated[
        list[str] | None,
        typer.Option(
            help="Prometheus page whose queue and KV gauges to draw; may be repeated.", rich_help_panel=_OUTPUT
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Directory for records and reports. Default: a new temporary one.", rich_help_panel=_OUTPUT),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.", rich_help_panel=_OUTPUT)] = False,
) -> None:
    """Send requests on a fixed schedule and report latency, goodput and whether the measurement is valid."""
    if context.invoked_subcommand is not None:
        return
    import math

    from weighbridge.bench.run import RunOptions, run_and_report
    from weighbridge.bench.schedule import DrawOptions, TraceOptions

    plan: TraceOptions | DrawOptions
    if trace is not None:
        plan = TraceOptions(
            trace, trace_from, trace_for, time_scale, rate, length_scale, max_input, max_output, num_prompts
        )
    else:
        plan = DrawOptions(
            rate=math.inf if rate is None else rate,
            duration_s=duration,
            count=num_prompts,
            burstiness=burstiness,
            arrivals=arrivals,
            input=input_lengths,
            output=output_lengths,
            mix=mix,
            prefix=prefix,
            ramp=ramp_up_strategy,
            ramp_from=ramp_up_start_rps,
            ramp_to=ramp_up_end_rps,
        )
    options = RunOptions(
        url=url,
        model=model,
        endpoint=endpoint,
        stream=stream,
        ignore_eos=ignore_eos,
        headers=tuple(header or ()),
        extra_body=extra_body,
        api_key_env=api_key_env,
        insecure=insecure,
        plan=plan,
        tier=tier,
        tier_header=tier_header,
        slo=tuple(slo or ()),
        goodput=tuple(goodput or ()),
        max_concurrency=max_concurrency,
        warmup_s=warmup,
        drain_s=drain,
        timeout_s=timeout,
        patience_s=patience,
        max_lag_s=max_lag,
        processes=processes,
        seed=seed,
        metrics=tuple(metrics or ()),
        out=out,
    )
    run_and_report(options, as_json=json)


_Url = Annotated[str, typer.Option("--url", "--base-url", help="The server.")]
_Model = Annotated[str, typer.Option(help="Default: the first the server names.")]
_Rate = Annotated[float | None, typer.Option("--rate", "--request-rate", help="Mean requests per second.")]
_Duration = Annotated[float | None, typer.Option(help="Seconds of arrivals.")]
_Count = Annotated[int | None, typer.Option("--num-prompts", help="Number of requests.")]
_Input = Annotated[str, typer.Option("--input", help="Prompt tokens, such as exp:200.")]
_Output = Annotated[str, typer.Option("--output", help="Output tokens, likewise.")]
_Mix = Annotated[str, typer.Option(help="A named mix instead.")]
_Arrivals = Annotated[str, typer.Option(help="constant, gamma:CV, mmpp:FACTOR:ON_S:OFF_S. Default: Poisson.")]
_Trace = Annotated[Path | None, typer.Option(help="Replay a trace file instead.")]
_TraceFor = Annotated[float | None, typer.Option(help="Seconds of the trace to use.")]
_TimeScale = Annotated[float, typer.Option(help="Multiply the trace's times.")]
_LengthScale = Annotated[float, typer.Option(help="Multiply the trace's token counts.")]
_Slo = Annotated[list[str] | None, typer.Option(help="[TIER:]ttft=0.5,tpot=0.05; may be repeated.")]
_Warmup = Annotated[float, typer.Option(help="Leading seconds that do not count.")]
_Drain = Annotated[float, typer.Option(help="Seconds to wait after the last arrival.")]
_Seed = Annotated[int, typer.Option()]
_Out = Annotated[Path | None, typer.Option(help="Directory for everything. Default: a new temporary one.")]
_Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


def _compare(
    policy: Annotated[str, typer.Option(help="Policies, separated by commas: a gateway is started for each.")] = "",
    config: Annotated[
        Path | None, typer.Option(help="Configuration of these gateways. Default: the embedded fleet.")
    ] = None,
    target: Annotated[list[str] | None, typer.Option(help="[NAME=]URL of a running server; give two or more.")] = None,
    repeats: Annotated[int, typer.Option(help="Runs of each arm.")] = 3,
    model: _Model = "",
    rate: _Rate = None,
    duration: _Duration = None,
    num_prompts: _Count = None,
    input_lengths: _Input = "500",
    output_lengths: _Output = "150",
    mix: _Mix = "",
    arrivals: _Arrivals = "",
    trace: _Trace = None,
    trace_for: _TraceFor = None,
    time_scale: _TimeScale = 1.0,
    length_scale: _LengthScale = 1.0,
    slo: _Slo = None,
    warmup: _Warmup = 0.0,
    drain: _Drain = 60.0,
    seed: _Seed = 0,
    out: _Out = None,
    json: _Json = False,
) -> None:
    """Policies over one fleet, or several servers, on equal schedules: paired differences and their noise."""
    from weighbridge.bench.compare import compare, policy_arms, print_comparison, server_arms
    from weighbridge.bench.output import deliver, folder_of, saying
    from weighbridge.bench.run import RunOptions
    from weighbridge.core.errors import ConfigError

    if bool(policy) == bool(target):
        raise ConfigError("give either --policy a,b (gateways are started) or --target twice", source="bench compare")
    names = [name.strip() for name in policy.split(",") if name.strip()]
    arms = policy_arms(names, config) if policy else server_arms(target or [])
    plan = _plan(
        rate,
        duration,
        num_prompts,
        input_lengths,
        output_lengths,
        mix,
        arrivals,
        trace,
        trace_for,
        time_scale,
        length_scale,
    )
    options = RunOptions(
        url="", plan=plan, model=model, slo=tuple(slo or ()), warmup_s=warmup, drain_s=drain, seed=seed
    )
    folder = folder_of(out)
    with saying(quiet=json) as say:
        found = compare(arms, options, repeats, folder, say)
    deliver(found, folder / "comparison.json", print_comparison, as_json=json)


def _sweep(
    url: _Url = "",
    rates: Annotated[str, typer.Option(help="Exactly these rates, separated by commas.")] = "",
    start: Annotated[float, typer.Option("--from", help="First rate of the search for the knee.")] = 1.0,
    attainment: Annotated[float, typer.Option(help="Share of all requests that must meet the SLO.")] = 0.9,
    model: _Model = "",
    duration: _Duration = 30.0,
    input_lengths: _Input = "500",
    output_lengths: _Output = "150",
    mix: _Mix = "",
    arrivals: _Arrivals = "",
    slo: _Slo = None,
    warmup: _Warmup = 0.0,
    drain: _Drain = 60.0,
    seed: _Seed = 0,
    out: _Out = None,
    json: _Json = False,
) -> None:
    """Raise the rate until the server saturates and find the knee."""
    from weighbridge.bench.output import deliver, folder_of, saying, write
    from weighbridge.bench.run import RunOptions
    from weighbridge.bench.sweep import SweepOptions, picture, print_sweep, sweep

    plan = _plan(start, duration, None, input_lengths, output_lengths, mix, arrivals, None, None, 1.0, 1.0)
    options = RunOptions(
        url=url, plan=plan, model=model, slo=tuple(slo or ()), warmup_s=warmup, drain_s=drain, seed=seed
    )
    folder = folder_of(out)
    exact = _numbers(rates, "--rates") if rates else None
    with saying(quiet=json) as say:
        found = sweep(options, SweepOptions(start=start, attainment=attainment), folder, say, exact)
    write(folder / "sweep.svg", picture(found).encode())
    deliver(found, folder / "sweep.json", print_sweep, as_json=json)


def _diff(
    runs: Annotated[list[str], typer.Argument(help="[NAME=]PATH of two or more runs: folders or record files.")],
    slo: _Slo = None,
    html: Annotated[Path | None, typer.Option(help="Write one page with all of them.")] = None,
    json: _Json = False,
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


def _decide(
    sizes: Annotated[str, typer.Option(help="Prompt sizes in tokens.")] = "15,256,1024,8192",
    iterations: Annotated[int, typer.Option(min=20, help="Timed calls of each layer.")] = 200,
    policy: Annotated[str, typer.Option(help="Policy of the instance layer.")] = "calibrated",
    pool: Annotated[Path | None, typer.Option(help="Pool file. Default: the built-in one.")] = None,
    checkpoint: Annotated[Path | None, typer.Option(help="Checkpoint folder. Default: the built-in one.")] = None,
    url: _Url = "",
    model: _Model = "",
    out: Annotated[Path | None, typer.Option(help="Archive the report in this file.")] = None,
    json: _Json = False,
) -> None:
    """Latency layers apart: encode and scores, model choice, instance choice, first token, full answer."""
    from weighbridge.bench.decide import bench_decide, print_layers
    from weighbridge.bench.output import deliver, saying
    from weighbridge.bench.run import RunOptions
    from weighbridge.bench.schedule import DrawOptions
    from weighbridge.routing.policies.registry import make_policy

    make_policy(policy)
    target = RunOptions(url=url, model=model, plan=DrawOptions(rate=1.0)) if url else None
    with saying(quiet=json) as say:
        found = bench_decide(
            sizes=tuple(int(size) for size in _numbers(sizes, "--sizes")),
            iterations=iterations,
            pool=str(pool or ""),
            checkpoint=str(checkpoint or ""),
            policy=policy,
            target=target,
            say=say,
        )
    deliver(found, out, print_layers, as_json=json)


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
    rate: float | None,
    duration: float | None,
    count: int | None,
    input_lengths: str,
    output_lengths: str,
    mix: str,
    arrivals: str,
    trace: Path | None,
    trace_for: float | None,
    time_scale: float,
    length_scale: float,
) -> TraceOptions | DrawOptions:
    import math

    from weighbridge.bench.schedule import DrawOptions, TraceOptions

    if trace is not None:
        return TraceOptions(
            trace, for_s=trace_for, time_scale=time_scale, rate=rate, length_scale=length_scale, count=count
        )
    return DrawOptions(
        rate=math.inf if rate is None else rate,
        duration_s=duration,
        count=count,
        input=input_lengths,
        output=output_lengths,
        mix=mix,
        arrivals=arrivals,
    )
