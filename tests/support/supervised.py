"""A process under supervision: `python -m tests.support.supervised` is ready at once and does what it is told."""

import asyncio

import msgspec

from weighbridge.gateway.relays.worker import Heed, Order, Word


async def main() -> None:
    over = asyncio.Event()

    def on_order(order: Order) -> None:
        if order.stop:
            over.set()
        if order.settings:
            heed.say(Word(reloaded=[str(len(order.settings))]))

    heed = Heed(on_order)
    heed.on_orphaned = over.set
    heed.listen()
    heed.say(Word(ready=msgspec.Raw(b"{}")))
    await over.wait()


if __name__ == "__main__":
    Heed.first()
    asyncio.run(main())
