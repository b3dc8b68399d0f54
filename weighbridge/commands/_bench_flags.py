"""The flags of `weighbridge bench`, in the groups that its commands share; names are those of `vllm bench serve`."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer

_WORKLOAD, _SERVER, _RUN, _OUTPUT = "Workload", "Server", "Run", "Output"


def _option(panel: str, help: str = "", *names: str) -> Any:
    return typer.Option(*names, help=help, rich_help_panel=panel)


@dataclass(frozen=True, slots=True)
class ServerFlags:
    """Whom to ask, and what every request carries."""

    url: Annotated[str, _option(_SERVER, "The server, http(s)://host:port.", "--url", "--base-url")] = ""
    model: Annotated[str, _option(_SERVER, "Default: the first the server names.")] = ""
    endpoint: Annotated[str, _option(_SERVER, "Path of the endpoint.")] = "/v1/chat/completions"
    stream: Annotated[bool, _option(_SERVER, "Ask for a stream.")] = True
    ignore_eos: Annotated[bool, _option(_SERVER, "Ask for exact output lengths.")] = True
    header: Annotated[list[str], _option(_SERVER, "Extra header NAME=VALUE; may be repeated.")] = field(
        default_factory=list
    )
    extra_body: Annotated[str, _option(_SERVER, "JSON object merged into every request.")] = ""
    api_key_env: Annotated[str, _option(_SERVER, "Environment variable that holds the API key.")] = "OPENAI_API_KEY"
    insecure: Annotated[bool, _option(_SERVER, "Do not verify TLS.")] = False


@dataclass(frozen=True, slots=True)
class RateFlags:
    """The mean rate of a run whose rate is not searched for."""

    rate: Annotated[
        float | None, _option(_WORKLOAD, "Mean requests per second; inf = at once.", "--rate", "--request-rate")
    ] = None


@dataclass(frozen=True, slots=True)
class WorkloadFlags:
    """Drawn traffic: how long or how many, and how large."""

    duration: Annotated[float | None, _option(_WORKLOAD, "Seconds of arrivals.")] = None
    num_prompts: Annotated[int | None, _option(_WORKLOAD, "Number of requests.")] = None
    input_lengths: Annotated[
        str,
        _option(
            _WORKLOAD,
            "Prompt tokens: 500, exp:200, lognormal:300:1.2, uniform:10:50.",
            "--input",
            "--random-input-len",
        ),
    ] = "500"
    output_lengths: Annotated[
        str, _option(_WORKLOAD, "Output tokens, likewise.", "--output", "--random-output-len")
    ] = "150"
    mix: Annotated[str, _option(_WORKLOAD, "A named mix: chat, document, reasoning, mixed, ...")] = ""
    prefix: Annotated[str, _option(_WORKLOAD, "Shared prefixes, FANOUTxTOKENS[,...].")] = ""
    burstiness: Annotated[float, _option(_WORKLOAD, "Shape of gamma gaps; 1 = Poisson.")] = 1.0
    arrivals: Annotated[str, _option(_WORKLOAD, "constant, gamma:CV, mmpp:FACTOR:ON_S:OFF_S. Default: Poisson.")] = ""


@dataclass(frozen=True, slots=True)
class RampFlags:
    """A rate that changes over the run."""

    ramp_up_strategy: Annotated[str, _option(_WORKLOAD, "linear or exponential.")] = ""
    ramp_up_start_rps: Annotated[float, _option(_WORKLOAD)] = 0.0
    ramp_up_end_rps: Annotated[float, _option(_WORKLOAD)] = 0.0


@dataclass(frozen=True, slots=True)
class TraceFlags:
    """Recorded traffic instead of drawn."""

    trace: Annotated[Path | None, _option(_WORKLOAD, "Replay a trace file instead.")] = None
    trace_from: Annotated[float, _option(_WORKLOAD, "Start within the trace, seconds.")] = 0.0
    trace_for: Annotated[float | None, _option(_WORKLOAD, "Seconds of the trace to use.")] = None
    time_scale: Annotated[float, _option(_WORKLOAD, "Multiply the trace's times (2 = half the rate).")] = 1.0
    length_scale: Annotated[float, _option(_WORKLOAD, "Multiply the trace's token counts.")] = 1.0
    max_input: Annotated[int | None, _option(_WORKLOAD, "Cap on prompt tokens of a trace.")] = None
    max_output: Annotated[int | None, _option(_WORKLOAD, "Cap on output tokens of a trace.")] = None


@dataclass(frozen=True, slots=True)
class MeasureFlags:
    """What counts, and when it ends: the same for one run and for many."""

    slo: Annotated[list[str], _option(_RUN, "[TIER:]ttft=0.5,tpot=0.05,e2e=10 in seconds; may be repeated.")] = field(
        default_factory=list
    )
    warmup: Annotated[float, _option(_RUN, "Leading seconds that are reported apart.")] = 0.0
    drain: Annotated[float, _option(_RUN, "Seconds to wait for replies after the last arrival.")] = 60.0
    seed: Annotated[int, _option(_RUN)] = 0


@dataclass(frozen=True, slots=True)
class RunFlags:
    """What only a single run may be told."""

    tier: Annotated[str, _option(_WORKLOAD, "Tier of every request that has none.")] = ""
    tier_header: Annotated[str, _option(_WORKLOAD, "Header that carries the tier; empty = none.")] = (
        "x-weighbridge-tier"
    )
    goodput: Annotated[list[str], _option(_RUN, "As in vLLM, in milliseconds: ttft:500.")] = field(default_factory=list)
    max_concurrency: Annotated[
        int | None, _option(_RUN, "At most so many in flight; with --rate inf a closed loop.")
    ] = None
    timeout: Annotated[float, _option(_RUN, "Seconds until a request counts as timed out.")] = 600.0
    patience: Annotated[float | None, _option(_RUN, "Clients leave after so many seconds without a token.")] = None
    max_lag: Annotated[float | None, _option(_RUN, "Largest send lag p99 of a valid run, seconds.")] = None
    processes: Annotated[int, _option(_RUN, "Generator processes.")] = 1
    metrics: Annotated[
        list[str], _option(_OUTPUT, "Prometheus page whose queue and KV gauges to draw; may be repeated.")
    ] = field(default_factory=list)
    records: Annotated[
        Path | None,
        _option(_OUTPUT, "Copy the per-request records to this .parquet or .jsonl file at the end."),
    ] = None


@dataclass(frozen=True, slots=True)
class OutputFlags:
    """Where results go."""

    out: Annotated[
        Path | None, _option(_OUTPUT, "Directory for records and reports. Default: a new temporary one.")
    ] = None
    json: Annotated[bool, _option(_OUTPUT, "Print one JSON object.", "--json")] = False


@dataclass(frozen=True, slots=True)
class CompareFlags:
    """The arms of a comparison."""

    policy: Annotated[str, typer.Option(help="Policies, separated by commas: a gateway is started for each.")] = ""
    config: Annotated[
        Path | None, typer.Option(help="Configuration of these gateways. Default: the embedded fleet.")
    ] = None
    target: Annotated[list[str], typer.Option(help="[NAME=]URL of a running server; give two or more.")] = field(
        default_factory=list
    )
    repeats: Annotated[int, typer.Option(help="Runs of each arm.")] = 3
    model: Annotated[str, typer.Option(help="Default: the first the server names.")] = ""


@dataclass(frozen=True, slots=True)
class SweepFlags:
    """How the rate is searched for."""

    url: Annotated[str, typer.Option("--url", "--base-url", help="The server.")] = ""
    rates: Annotated[str, typer.Option(help="Exactly these rates, separated by commas.")] = ""
    start: Annotated[float, typer.Option("--from", help="First rate of the search for the knee.")] = 1.0
    attainment: Annotated[float, typer.Option(help="Share of all requests that must meet the SLO.")] = 0.9
    model: Annotated[str, typer.Option(help="Default: the first the server names.")] = ""


@dataclass(frozen=True, slots=True)
class DecideFlags:
    """What `bench decide` times."""

    sizes: Annotated[str, typer.Option(help="Prompt sizes in tokens.")] = "15,256,1024,8192"
    iterations: Annotated[int, typer.Option(min=20, help="Timed calls of each layer.")] = 200
    policy: Annotated[str, typer.Option(help="Policy of the instance layer.")] = "calibrated"
    pool: Annotated[Path | None, typer.Option(help="Pool file. Default: the built-in one.")] = None
    checkpoint: Annotated[Path | None, typer.Option(help="Checkpoint folder. Default: the built-in one.")] = None
    url: Annotated[str, typer.Option("--url", "--base-url", help="Also time first token and full answer here.")] = ""
    model: Annotated[str, typer.Option(help="Default: the first the server names.")] = ""
    out: Annotated[Path | None, typer.Option(help="Archive the report in this file.")] = None
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False
