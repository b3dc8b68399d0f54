"""`weighbridge replay`: prove a recorded log, or ask another policy about it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.console import Console

    from weighbridge.routing.replay import ShadowSummary


def register(app: typer.Typer) -> None:
    """Add `replay`."""
    app.command("replay")(replay)


def replay(
    log: Annotated[
        list[Path],
        typer.Argument(help="Event log of the gateway or the simulator; several files: one rotated log, in order."),
    ],
    check: Annotated[bool, typer.Option("--check", help="Prove that a fresh router takes identical actions.")] = False,
    policy: Annotated[
        list[str] | None, typer.Option("--policy", help="Show what this policy would have chosen; may be repeated.")
    ] = None,
    summary: Annotated[
        bool, typer.Option("--summary", help="Show what the log's shadow policies would have chosen.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Re-run a recorded log through a fresh router.

    Exit status 0 when identical, 1 when actions differ, 2 when the log cannot be read.
    """
    import msgspec

    from weighbridge.core.errors import LogError
    from weighbridge.core.event_log import LogReader, RotatedLog
    from weighbridge.routing import replay as replaying

    def read() -> RotatedLog:
        readers = []
        for path in log:
            try:
                readers.append(LogReader(path.open("rb"), str(path)))
            except OSError as error:
                raise LogError(f"{path}: cannot be read: {error.strerror}") from None
        return RotatedLog(readers)

    result: dict[str, object] = {"log": [str(path) for path in log]}
    failed = False
    if check or not (policy or summary):
        reader = read()
        parity = replaying.check(reader.header, reader)
        failed = bool(parity.mismatches)
        result |= {"parity": parity, "identical": not failed, "truncated": reader.truncated}
    if policy:
        alternatives = []
        for name in policy:
            reader = read()
            alternatives.append(replaying.alternative(reader.header, reader, name, {}))
        result["alternatives"] = alternatives
    if summary:
        result["shadows"] = replaying.shadow_summary(read())
    if as_json:
        typer.echo(msgspec.json.encode(result).decode())
    else:
        _print(result)
    if failed:
        raise typer.Exit(1)


def _print(result: dict[str, object]) -> None:
    from rich.console import Console
    from rich.table import Table

    from weighbridge.routing.replay import Alternative, Parity

    console = Console(soft_wrap=True)
    parity = result.get("parity")
    if isinstance(parity, Parity):
        verdict = "identical" if not parity.mismatches else "DIFFERENT"
        console.print(
            f"{verdict}: {parity.entries} events, {parity.requests} requests, {parity.actions} actions replayed"
        )
        if result.get("truncated"):
            console.print("the last line was cut by a crash and left out")
        for m in parity.mismatches:
            console.print(f"  entry {m.entry} at {m.t:.3f} s, {m.event}:", markup=False)
            console.print(f"    recorded {_short(m.recorded)}", markup=False)
            console.print(f"    replayed {_short(m.replayed)}", markup=False)
    shadows = result.get("shadows")
    if isinstance(shadows, list):
        _print_shadows(console, shadows)
    alternatives = result.get("alternatives")
    if isinstance(alternatives, list):
        table = Table(title="Where each policy would have sent the recorded requests")
        names = sorted({n for a in alternatives for n in (*a.recorded_share, *a.alternative_share)})
        for column in ("policy", "agrees", *names):
            table.add_column(column, justify="left" if column == "policy" else "right")
        for index, a in enumerate(alternatives):
            assert isinstance(a, Alternative)
            placed = sum(a.recorded_share.values())
            if index == 0:
                table.add_row("as recorded", "", *(str(a.recorded_share.get(n, 0)) for n in names))
            share = f"{100 * a.agree / placed:.1f} %" if placed else "-"
            table.add_row(a.policy, share, *(str(a.alternative_share.get(n, 0)) for n in names))
        console.print(table)


def _print_shadows(console: Console, shadows: list[ShadowSummary]) -> None:
    from rich.table import Table

    if not shadows:
        console.print("no shadow policies in this log; set router.shadow, for example [least_tokens]")
        return
    table = Table(title="What shadow policies would have chosen")
    for column in ("policy", "placements", "agrees", "failed", "TTFT there", "TTFT where sent"):
        table.add_column(column, justify="left" if column == "policy" else "right")
    for row in shadows:
        pair = [f"{x / row.compared:.3f} s" if row.compared else "-" for x in (row.ttft_s, row.chosen_ttft_s)]
        table.add_row(row.policy, str(row.asked), f"{100 * row.agreed / row.asked:.1f} %", str(row.failed), *pair)
    console.print(table)
    console.print("forecast TTFT is the mean over the placements on which they disagree")


def _short(actions: object) -> str:
    import msgspec

    parts = []
    for action in msgspec.to_builtins(actions):
        action.pop("decision", None)
        parts.append(" ".join(str(v) for v in action.values()))
    return "; ".join(parts) or "nothing"
