"""`weighbridge dashboard`: the web UI as its own process."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from weighbridge.dashboard.app import Dashboard

DEFAULT_ADMIN = "http://127.0.0.1:8081"


def register(app: typer.Typer) -> None:
    """Add `dashboard`."""
    app.command("dashboard")(dashboard)


def dashboard(
    admin: Annotated[str | None, typer.Option(help=f"Admin API of the gateway. Default: {DEFAULT_ADMIN}.")] = None,
    log: Annotated[
        list[Path] | None, typer.Option(help="Event log to show or to ask about; may be repeated.", exists=True)
    ] = None,
    reports: Annotated[
        list[Path] | None, typer.Option(help="Folder of bench and simulation reports; may be repeated.", exists=True)
    ] = None,
    demo: Annotated[bool, typer.Option("--demo", help="Show a seeded fleet that does not exist.")] = False,
    seed: Annotated[int, typer.Option(help="Seed of the demo fleet.")] = 7,
    host: Annotated[str, typer.Option(help="Address to listen on; other than loopback needs a token.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0 takes a free one.")] = 8082,
    with_parent: Annotated[bool, typer.Option("--with-parent", hidden=True, help="End when stdin closes.")] = False,
) -> None:
    """Serve the dashboard. It reads the gateway's admin API and event logs, and writes nothing.

    With --log and without --admin it shows a finished log. Viewers must sign in when WEIGHBRIDGE_DASHBOARD_TOKEN is
    set; WEIGHBRIDGE_ADMIN_TOKEN is sent to the admin API.
    """
    import os

    import uvloop

    from weighbridge.dashboard.guard import Guard
    from weighbridge.dashboard.parts import build

    guard = Guard(host, os.environ.get("WEIGHBRIDGE_DASHBOARD_TOKEN", ""))
    with build(
        admin=admin or (None if log else DEFAULT_ADMIN),
        token=os.environ.get("WEIGHBRIDGE_ADMIN_TOKEN", ""),
        logs=log or [],
        reports=reports or [],
        demo_seed=seed if demo else None,
    ) as parts:
        uvloop.run(_serve(parts.dashboard(guard), host, port, with_parent))


async def _serve(dash: Dashboard, host: str, port: int, with_parent: bool) -> None:
    import asyncio
    import signal
    import sys

    from weighbridge.core.errors import ServiceError

    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    if with_parent:
        # the parent holds the other end of stdin: when it ends, however it ends, so does this process
        loop.add_reader(sys.stdin.fileno(), stop.set)
    try:
        try:
            await dash.start(host, port)
        except OSError as error:
            why = error.strerror or str(error)
            raise ServiceError(f"{host}:{port} cannot be listened on ({why}); choose another with --port") from None
        name = f"[{host}]" if ":" in host else host
        typer.echo(f"Dashboard  http://{name}:{dash.server.port}")
        await stop.wait()
    finally:
        await dash.stop()
