"""`weighbridge engine`: serve one model on one embedded instance, without the gateway."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from weighbridge.engine.instance import InstanceOptions, ReadyInfo


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("engine")(engine)


def engine(
    model: Annotated[str, typer.Option(help="Catalogue name or GGUF path.")] = "smollm2-135m-instruct",
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65_535, help="Port to listen on; 0 takes a free one.")] = 8000,
    slots: Annotated[int, typer.Option(help="Sequences computed at the same time.")] = 4,
    context: Annotated[int, typer.Option(help="Tokens per slot, prompt and output together.")] = 2048,
    threads: Annotated[int, typer.Option(help="CPU threads; 0 takes all cores.")] = 0,
    library: Annotated[str | None, typer.Option(help="Another libllama: `dispatch`, or a path.")] = None,
    device: Annotated[str, typer.Option(help="cpu, gpu, cuda:1, vulkan, metal, or the library's name for it.")] = "cpu",
    model_id: Annotated[str | None, typer.Option(help="Name to serve the model under.")] = None,
    throttle: Annotated[
        str, typer.Option(help="Slow down by this factor, or prefill and decode by their own (35:6), for tests.")
    ] = "1",
    json: Annotated[bool, typer.Option("--json", help="Print what became ready as one JSON line.")] = False,
) -> None:
    """Serve one embedded instance with an OpenAI API until Ctrl-C."""
    import uvloop

    from weighbridge.engine.instance import InstanceOptions

    throttle_prefill, throttle_decode = _factors(throttle)
    options = InstanceOptions(
        name="engine",
        host=host,
        port=port,
        model=model,
        model_id=model_id,
        slots=slots,
        context_tokens=context,
        threads=threads,
        device=device,
        library=library,
        throttle_prefill=throttle_prefill,
        throttle_decode=throttle_decode,
        probe=False,
    )
    uvloop.run(_serve(options, json))


def _factors(throttle: str) -> tuple[float, float]:
    """`--throttle` as factors of prefill and decode: one number for both, or `PREFILL:DECODE`."""
    prefill, _, decode = throttle.partition(":")
    try:
        return float(prefill), float(decode or prefill)
    except ValueError:
        message = f"{throttle!r} is neither a factor such as 2 nor two such as 35:6 (prefill:decode)"
        raise typer.BadParameter(message, param_hint="--throttle") from None


async def _serve(options: InstanceOptions, json: bool) -> None:
    import asyncio
    import signal

    from rich.console import Console
    from rich.progress import Progress

    from weighbridge.engine.instance import start_instance

    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=json or not console.is_terminal) as bar:
        task = bar.add_task(f"loading {options.model}", total=1.0)
        instance = await start_instance(options, lambda done: bar.update(task, completed=done))
    _announce(instance.info, json)
    await stop.wait()
    running = instance.server.running
    if running and not json:
        typer.echo(f"draining {running} request{'s' if running > 1 else ''}; Ctrl-C again ends them", err=True)
    stop.clear()
    draining = asyncio.create_task(instance.stop(30.0))
    again = asyncio.create_task(stop.wait())
    await asyncio.wait({draining, again}, return_when=asyncio.FIRST_COMPLETED)
    if not draining.done():
        draining.cancel()
        await asyncio.wait({draining})
        await instance.stop()
    again.cancel()


def _announce(info: ReadyInfo, json: bool) -> None:
    import msgspec

    if json:
        typer.echo(msgspec.json.encode(info).decode())
        return
    url = f"http://{info.host}:{info.port}"
    typer.echo(
        f"{info.model_id} is ready at {url} after {info.load_s:.1f} s: {info.model}, {info.slots} slots x "
        f"{info.context_tokens} tokens, {info.threads} threads on {info.device}"
    )
    typer.echo(
        f"  curl {url}/v1/chat/completions -H 'content-type: application/json' "
        f'-d \'{{"model": "{info.model_id}", "messages": [{{"role": "user", "content": "Hello"}}]}}\''
    )
