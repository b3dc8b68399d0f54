"""`weighbridge bench`: load an OpenAI-compatible server on a schedule and report what its clients would see."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

_WORKLOAD, _SERVER, _RUN, _OUTPUT = "Workload", "Server", "Run", "Output"


def register(app: typer.Typer) -> None:
    """Add the `bench` group; without a sub-command it runs one measurement."""
    bench = typer.Typer(
        help="Open-loop load generator and its reports.", invoke_without_command=True, rich_markup_mode=None
    )
    bench.callback()(_run)
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
        out=out,
    )
    run_and_report(options, as_json=json)
