"""`weighbridge serve`: the gateway, with the embedded fleet or the one a configuration file names."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

    from weighbridge.commands._reloading import Stamp
    from weighbridge.commands._serving import Serving
    from weighbridge.config.settings import Settings


def register(app: typer.Typer) -> None:
    """Add `serve`."""
    app.command("serve")(serve)


def serve(
    config: Annotated[
        Path | None, typer.Option("--config", "-c", help="YAML file; without one, the embedded fleet.")
    ] = None,
    port: Annotated[
        int | None, typer.Option(min=0, max=65535, help="OpenAI listener (8080; 0 takes a free one).")
    ] = None,
    admin_port: Annotated[int | None, typer.Option(min=0, max=65535, help="Admin listener (8081).")] = None,
    relays: Annotated[
        int | None, typer.Option(min=0, max=64, help="Relay processes that share one Router (0: one process for all).")
    ] = None,
    data_dir: Annotated[Path | None, typer.Option(help="Where event logs and profiles are kept.")] = None,
    policy: Annotated[str | None, typer.Option(help="Routing policy; an unknown one lists them all.")] = None,
    dashboard: Annotated[
        bool, typer.Option("--dashboard/--no-dashboard", help="Start the dashboard beside it.")
    ] = True,
    dashboard_port: Annotated[int, typer.Option(min=0, max=65535, help="Dashboard listener.")] = 8082,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object when ready, nothing else.")] = False,
) -> None:
    """Start the gateway and serve until Ctrl-C, which drains; a second Ctrl-C stops at once."""
    import asyncio
    import os

    import msgspec
    import uvloop

    from weighbridge.commands._relayed import RelayedServing
    from weighbridge.commands._reloading import stamp
    from weighbridge.commands._serving import Serving
    from weighbridge.config.settings import data_directory, load_settings
    from weighbridge.routing.policies.registry import make_policy

    if policy is not None:
        make_policy(policy)  # an unknown name should not cost the loading of models

    def load() -> Settings:
        settings = load_settings(config, os.environ)
        router = settings.router
        if policy is not None:
            router = msgspec.structs.replace(router, policy=policy, policy_options={})
        return msgspec.structs.replace(
            settings,
            router=router,
            port=settings.port if port is None else port,
            admin_port=settings.admin_port if admin_port is None else admin_port,
            relays=settings.relays if relays is None else relays,
        )

    known = None if config is None else stamp(config)  # before it is read: what changes afterwards is a change
    settings = load()
    directory = data_directory(settings, data_dir, os.environ)
    _offer_models(settings.engines, as_json)
    _raise_descriptors()
    kind = RelayedServing if settings.relays else Serving
    serving = kind(settings, directory, dashboard_port if dashboard else None, load if config else None)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_run(serving, as_json, config, known))


def _raise_descriptors() -> None:
    """Every connection is a file descriptor: take as many as the system lets us."""
    import contextlib
    import resource

    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def _offer_models(engines: tuple[object, ...], as_json: bool) -> None:
    """Fetch missing catalogue models if a person at a terminal agrees; elsewhere starting tells what to run."""
    import sys
    from functools import partial

    from weighbridge.commands._serving import missing_models
    from weighbridge.engine.model_store import fetch_model

    missing = missing_models(engines)
    if not missing or as_json or not (sys.stdin.isatty() and sys.stdout.isatty()):
        return
    from rich.progress import Progress

    for entry in missing:
        size = entry.download_bytes // 1_000_000
        if typer.confirm(f"Model {entry.name} is not here yet. Fetch it ({size} MB, {entry.licence})?", default=True):
            with Progress() as progress:
                task = progress.add_task(f"fetching {entry.name}", total=1.0)
                fetch_model(entry, partial(_advance, progress, task))


def _advance(progress: Progress, task: TaskID, fraction: float) -> None:
    progress.update(task, completed=fraction)


async def _run(serving: Serving, as_json: bool, config: Path | None, known: Stamp | None) -> None:
    import asyncio
    import signal

    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    from weighbridge.commands._reloading import Reloading

    console = Console(stderr=as_json, soft_wrap=True, highlight=False)
    stop = asyncio.Event()
    again = asyncio.Event()

    ordered: list[int] = []  # the signals received; an orchestrator's SIGTERM is announced to load balancers first

    def on_signal(number: int) -> None:
        ordered.append(number)
        (again if stop.is_set() else stop).set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, on_signal, number)
    reloading = Reloading(serving.reload, lambda line: console.print(line, markup=False))
    loop.add_signal_handler(signal.SIGHUP, reloading.request)
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    try:
        with Progress(*columns, console=console, transient=True, disable=as_json) as progress:
            tasks = {e.name: progress.add_task(f"loading {e.name}", total=1.0) for e in serving.settings.engines}
            starting = asyncio.ensure_future(
                serving.start(lambda name, fraction: progress.update(tasks[name], completed=fraction))
            )
            stopping = asyncio.ensure_future(stop.wait())
            await asyncio.wait({starting, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if not starting.done():
                starting.cancel()
                await asyncio.wait({starting})
                return
            stopping.cancel()
            starting.result()
        _announce(serving, as_json, console)
        if config is not None and serving.settings.watch_s is not None:
            reloading.watch(config, known, serving.settings.watch_s)
        await stop.wait()
        if serving.busy:
            console.print("draining; press Ctrl-C again to stop at once")
        draining = asyncio.ensure_future(serving.drain(announced=ordered[0] == signal.SIGTERM))
        impatient = asyncio.ensure_future(again.wait())
        await asyncio.wait({draining, impatient}, return_when=asyncio.FIRST_COMPLETED)
        for task in (draining, impatient):
            task.cancel()
        await asyncio.wait({draining, impatient})
    finally:
        reloading.stop()
        await serving.stop()


def _announce(serving: Serving, as_json: bool, console: object) -> None:
    import msgspec
    from rich.console import Console
    from rich.table import Table

    ready = serving.ready()
    if as_json:
        typer.echo(msgspec.json.encode(ready).decode())
        return
    assert isinstance(console, Console)
    table = Table(box=None, pad_edge=False)
    for column in ("instance", "kind", "address", "model", "prefill tok/s", "decode tok/s"):
        table.add_column(column, justify="right" if "tok/s" in column else "left", no_wrap=True)
    for row in ready["instances"]:
        rates = [
            f"{row[k]:,.0f}" if row[k] else "not measured" for k in ("prefill_tokens_per_s", "decode_tokens_per_s")
        ]
        table.add_row(row["name"], row["kind"], row["url"], row["model"], *rates)
    console.print(table, width=console.width if console.is_terminal else 160)
    for row in ready["instances"]:
        if not row["up"]:
            console.print(f"{row['name']} is not up: {row['reason']}", style="yellow", markup=False, soft_wrap=True)
    if not any(row["up"] for row in ready["instances"]):
        console.print("Requests are answered 503 until an instance is up; `weighbridge doctor` looks closer.")
    console.print(f"\nReady in {ready['start_s']:.1f} s. Policy: {ready['policy']}. Event log: {ready['data_dir']}")
    console.print(f"  OpenAI API  {ready['url']}/v1")
    console.print(f"  Admin       {ready['admin']}/fleet  /decisions?last=10  /metrics")
    if "relay_pids" in ready:
        pids = ", ".join(str(pid) for pid in ready["relay_pids"])
        console.print(f"  Processes   relays {pids}; Router {ready['router_pid']}")
    if ready["dashboard"]:
        console.print(f"  Dashboard   {ready['dashboard']}")
    elif serving.dashboard_error:
        console.print(f"  Dashboard   not started: {serving.dashboard_error}", style="yellow", markup=False)
    known = [model for row in ready["instances"] if row["up"] for model in row["model"].split(", ") if model]
    model = known[0] if known else "MODEL"
    console.print("\nTry it:")
    body = (
        f'{{"model": "{model}", "messages": [{{"role": "user", "content": "Name three colours."}}], "max_tokens": 32}}'
    )
    curl = f"  curl {ready['url']}/v1/chat/completions -H 'content-type: application/json' -d '{body}'"
    console.print(curl, markup=False, soft_wrap=True)  # to be copied
    console.print("\nCtrl-C stops.")
