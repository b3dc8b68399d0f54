"""One relay process: `python -m weighbridge.commands._relay_process`, its options a JSON line on standard input."""

from __future__ import annotations

import asyncio
import signal
import sys

import msgspec
import uvloop

from weighbridge.core.errors import WeighbridgeError
from weighbridge.gateway.process import tune_collector
from weighbridge.gateway.relays.options import RelayOptions
from weighbridge.gateway.relays.relay import Relay
from weighbridge.gateway.relays.worker import Heed, Order, Word


async def run(options: RelayOptions) -> int:
    """Serve until ordered to end, or until the supervisor is gone."""
    relay = Relay(options)
    over = asyncio.Event()
    draining: list[asyncio.Task[None]] = []

    async def drain(timeout_s: float) -> None:
        await relay.drain(timeout_s)
        over.set()

    def on_order(order: Order) -> None:
        if order.unready:
            relay.draining = True
        if order.drain_s is not None and not draining:
            draining.append(asyncio.get_running_loop().create_task(drain(order.drain_s)))
        if order.stop:
            over.set()

    heed = Heed(on_order)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # the supervisor's to act on
        loop.add_signal_handler(number, lambda: None)
    heed.on_orphaned = over.set
    heed.listen()
    try:
        await relay.start()
        tune_collector()
        heed.say(Word(ready=msgspec.Raw(b"{}")))
        await over.wait()
    except WeighbridgeError as error:
        heed.say(Word(error=str(error)))
        return 3
    finally:
        for task in draining:
            task.cancel()
        await relay.stop()
    return 0


def main() -> int:
    """Entry point."""
    options = msgspec.json.decode(Heed.first(), type=RelayOptions)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(run(options))


if __name__ == "__main__":
    sys.exit(main())
