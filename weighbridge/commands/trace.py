"""`weighbridge trace`: look at workload traces, and convert them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

File = Annotated[
    Path, typer.Argument(help="Azure, BurstGPT or Vidur CSV; Mooncake, Bailian or own JSONL; gzip or not.")
]
Format = Annotated[str | None, typer.Option(help="Trace format, where the columns do not tell.")]
SkipBad = Annotated[bool, typer.Option("--skip-bad", help="Count bad rows instead of stopping at the first.")]
RawTimes = Annotated[bool, typer.Option("--raw-times", help="Leave coarse time stamps on their grid.")]
Seed = Annotated[int, typer.Option(help="Seed that spreads coarse time stamps.")]


def register(app: typer.Typer) -> None:
    """Add `trace describe` and `trace convert`."""
    group = typer.Typer(help="Look at workload traces, and convert them.", no_args_is_help=True)
    group.command("describe")(describe)
    group.command("convert")(convert)
    app.add_typer(group, name="trace")


def describe(
    file: File,
    format: Format = None,
    skip_bad: SkipBad = False,
    raw_times: RawTimes = False,
    seed: Seed = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Rate, burstiness, lengths and prefix reuse of a trace."""
    import msgspec

    from weighbridge.workload.describe import describe as figures_of
    from weighbridge.workload.readers import read_trace

    trace = read_trace(file, format=format, skip_bad=skip_bad, raw_times=raw_times, seed=seed)
    figures = {
        "file": trace.path,
        "format": trace.format,
        "skipped": trace.skipped,
        "spread_from_s": trace.quantum_s,
        **figures_of(trace.requests),
    }
    if as_json:
        typer.echo(msgspec.json.encode(figures).decode())
    else:
        _print(figures)


def convert(
    file: File,
    out: Annotated[Path, typer.Argument(help="Own JSONL to write; compressed where the name ends in .gz.")],
    format: Format = None,
    rate: Annotated[float | None, typer.Option(help="Stretch time to this many requests per second.")] = None,
    limit: Annotated[int | None, typer.Option(help="Take only the first rows.")] = None,
    skip_bad: SkipBad = False,
    raw_times: RawTimes = False,
    seed: Seed = 0,
) -> None:
    """Write a trace in Weighbridge's own form."""
    from weighbridge.core.errors import ConfigError
    from weighbridge.workload.readers import read_trace
    from weighbridge.workload.trace import at_rate, write_trace

    if rate is not None and rate <= 0:
        raise ConfigError("must be above 0", source="--rate")
    trace = read_trace(file, format=format, skip_bad=skip_bad, raw_times=raw_times, seed=seed, limit=limit)
    requests = trace.requests if rate is None else at_rate(trace.requests, rate)
    count = write_trace(out, requests)
    typer.echo(f"{count} requests written to {out}" + (f", {trace.skipped} bad rows skipped" if trace.skipped else ""))


def _print(figures: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(soft_wrap=True)
    head = (
        f"{figures['file']} ({figures['format']}): {figures['requests']:,} requests in {figures['duration_s']:,.0f} s"
    )
    console.print(head, markup=False, highlight=False)
    if figures["failed"]:
        console.print(f"{figures['failed']:,} of them have no answer (failures)", highlight=False)
    if figures["skipped"]:
        console.print(f"{figures['skipped']:,} bad rows skipped", highlight=False)
    if figures["spread_from_s"]:
        console.print(
            f"time stamps lay on a grid of {figures['spread_from_s']:g} s and were spread over it "
            "(--raw-times leaves them)",
            highlight=False,
        )
    table = Table("", "mean", "min", "p50", "p90", "p95", "p99", "max")
    for column in table.columns[1:]:
        column.justify = "right"
    for name in ("prompt_tokens", "output_tokens"):
        row = figures[name]
        if row:
            keys = ("mean", "min", "p50", "p90", "p95", "p99", "max")
            table.add_row(name.replace("_", " "), *(f"{row[key]:,.0f}" for key in keys))
    console.print(table)
    dispersion = ", ".join(f"{k.replace('_', ' ')} {v:.1f}" for k, v in figures["dispersion"].items() if v is not None)
    spread = figures["heterogeneity"]
    lines = [
        f"rate {figures['rate']:.2f} requests/s, {figures['tokens_per_s']:,.0f} tokens/s",
        f"inter-arrival CV {figures['interarrival_cv']:.2f} (1 = Poisson); index of dispersion {dispersion or '-'}",
        f"heterogeneity (spread of log tokens): prompt {spread['prompt']:.2f}, output {spread['output']:.2f}",
    ]
    prefix = figures["prefix"]
    if prefix:
        by_size = ", ".join(f"{int(k):,} tokens {v:.1%}" for k, v in prefix["by_cache_tokens"].items())
        lines.append(f"prefix blocks reused: {prefix['unlimited']:.1%} without a limit; with a cache of {by_size}")
    if figures["sessions"]:
        lines.append(f"{figures['sessions']:,} sessions")
    for line in lines:
        console.print(line, markup=False, highlight=False)
