"""`weighbridge dashboard`: the web UI as its own process."""

from __future__ import annotations

from typing import Annotated

import typer


def register(app: typer.Typer) -> None:
    """Add `dashboard`."""
    app.command("dashboard")(dashboard)


def dashboard(
    demo: Annotated[bool, typer.Option("--demo", help="Show a seeded fleet that does not exist.")] = False,
    host: Annotated[str, typer.Option(help="Address to listen on; other than loopback needs a token.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0 takes a free one.")] = 8082,
    seed: Annotated[int, typer.Option(help="Seed of the demo fleet.")] = 7,
    with_parent: Annotated[bool, typer.Option("--with-parent", hidden=True, help="End when stdin closes.")] = False,
) -> None:
    """Serve the dashboard. It reads the gateway's admin API and event logs, and writes nothing.

    Viewers must sign in when WEIGHBRIDGE_DASHBOARD_TOKEN is set.
    """
    import os

    import uvloop

    from weighbridge.dashboard.app import Dashboard
    from weighbridge.dashboard.demo import DemoSource
    from weighbridge.dashboard.guard import Guard
    from weighbridge.dashboard.hub import Hub

    guard = Guard(host, os.environ.get("WEIGHBRIDGE_DASHBOARD_TOKEN", ""))

    async def run() -> None:
        dash = Dashboard(Hub(DemoSource(seed)), guard)
        await _serve(dash, host, port, with_parent)

    uvloop.run(run())


async def _serve(dash: object, host: str, port: int, with_parent: bool) -> None:
    import asyncio
    import signal
    import sys

    from weighbridge.core.errors import ServiceError
    from weighbridge.dashboard.app import Dashboard

    assert isinstance(dash, Dashboard)
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
