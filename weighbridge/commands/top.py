"""`weighbridge top`: the fleet in a terminal, live."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from weighbridge.dashboard.hub import Source

WIDE, PLAIN_WIDTH = 110, 140


def register(app: typer.Typer) -> None:
    """Add `top`."""
    app.command("top")(top)


def top(
    admin: Annotated[str | None, typer.Option(help="Admin API of the gateway. Default: http://127.0.0.1:8081.")] = None,
    log: Annotated[Path | None, typer.Option(help="Show a finished event log instead.", exists=True)] = None,
    demo: Annotated[bool, typer.Option("--demo", help="Show a seeded fleet that does not exist.")] = False,
    interval: Annotated[float, typer.Option(min=0.2, help="Seconds between readings.")] = 1.0,
    once: Annotated[
        bool, typer.Option("--once", help="Print one reading and end; also when not at a terminal.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one reading as JSON.")] = False,
) -> None:
    """Watch the fleet: headline numbers, what needs attention, instances, last decisions. Ctrl-C ends.

    Exit status 0, or 1 when the gateway cannot be read.
    """
    import asyncio
    import os
    import sys

    from weighbridge.dashboard.parts import source_of

    logs = [log] if log else []
    url = admin or (None if log else "http://127.0.0.1:8081")
    source = source_of(url, os.environ.get("WEIGHBRIDGE_ADMIN_TOKEN", ""), logs, 7 if demo else None)
    live = not (once or as_json or log) and sys.stdout.isatty()
    try:
        asyncio.run(_watch(source, interval) if live else _once(source, as_json, steady=bool(log or demo)))
    except KeyboardInterrupt:
        raise typer.Exit(0) from None


async def _once(source: Source, as_json: bool, steady: bool) -> None:
    import asyncio

    import msgspec
    from rich.console import Console

    from weighbridge.dashboard.terminal import screen

    try:
        snapshot = await source.poll()
        if not steady:
            # rates need two readings
            await asyncio.sleep(1.0)
            snapshot = await source.poll()
    finally:
        await source.close()
    if as_json:
        typer.echo(msgspec.json.encode(snapshot).decode())
    else:
        console = Console(highlight=False)
        if not console.is_terminal:
            console.width = max(console.width, PLAIN_WIDTH)
        console.print(screen(snapshot, wide=console.width >= WIDE))


async def _watch(source: Source, interval_s: float) -> None:
    import asyncio

    from rich.console import Console
    from rich.live import Live

    from weighbridge.dashboard.hub import Hub
    from weighbridge.dashboard.terminal import screen

    hub, console = Hub(source, interval_s), Console(highlight=False)
    try:
        with Live(console=console, screen=True, auto_refresh=False) as live:
            while True:
                await hub.poll()
                live.update(screen(hub.snapshot, wide=console.width >= WIDE), refresh=True)
                await asyncio.sleep(interval_s)
    finally:
        await source.close()
