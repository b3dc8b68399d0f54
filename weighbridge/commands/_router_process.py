"""The Router's process: `python -m weighbridge.commands._router_process`, its options a JSON line on standard input.

A gateway without an OpenAI listener: Router, ledger, health, event log, admin listener, and the socket where relays
come in.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
from pathlib import Path

import msgspec
import uvloop

from weighbridge.calibrate.settings import ReprobeSettings
from weighbridge.commands._private_folder import LOCK
from weighbridge.commands._serving import instance_rows
from weighbridge.core.errors import ConfigError, WeighbridgeError
from weighbridge.gateway.gateway import Gateway
from weighbridge.gateway.process import tune_collector
from weighbridge.gateway.relays.options import RouterOptions
from weighbridge.gateway.relays.worker import Heed, Order, Word
from weighbridge.gateway.settings import GatewaySettings

FLEET_S = 1.0
"""How long relays are kept waiting for the first look at every engine: what already runs there is to be charged."""


class _Options(RouterOptions, frozen=True, kw_only=True):
    reprobe: ReprobeSettings | None = None


class _Process:
    def __init__(self, options: _Options) -> None:
        self.options = options
        self.gateway = Gateway(options.settings, start_s=options.start_s)
        self.over = asyncio.Event()
        self.heed = Heed(self._on_order)
        self.heed.on_orphaned = self._on_orphaned
        self._orphaned = False
        self._tasks: set[asyncio.Task[None]] = set()
        self._asking: list[asyncio.Future[list[str]]] = []
        self.gateway.on_reload = self._ask_reload

    async def run(self) -> None:
        gateway, hub = self.gateway, self.gateway.hub
        assert hub is not None
        await gateway.start()
        # a free port was asked for once: the supervisor knows it now, and so do the settings that it sends to reload
        gateway.settings = msgspec.structs.replace(gateway.settings, admin_port=gateway.admin_port)
        await gateway.wait_ready(FLEET_S, [i.name for i in gateway.settings.instances])
        await hub.listen(Path(self.options.socket))
        self.heed.say(Word(ready=msgspec.Raw(msgspec.json.encode({"admin_port": gateway.admin_port}))))
        self._keep(self._tell_fleet())
        if self.options.reprobe is not None:
            from weighbridge.calibrate.reprobe import Reprober  # with numpy and the fit: only where it is wanted

            self._keep(Reprober(gateway, self.options.reprobe).run())
        tune_collector()
        await self.over.wait()

    async def stop(self) -> None:
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.gateway.stop()
        if self._orphaned:
            self._tidy()

    def _tidy(self) -> None:
        """What the supervisor cannot do any more."""
        socket = Path(self.options.socket)
        with contextlib.suppress(OSError):
            socket.unlink(missing_ok=True)
            (socket.parent / LOCK).unlink(missing_ok=True)
            socket.parent.rmdir()

    def _on_orphaned(self) -> None:
        self._orphaned = True
        self.over.set()

    def _keep(self, work: object) -> None:
        task = asyncio.ensure_future(work)  # type: ignore[call-overload]
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _tell_fleet(self) -> None:
        await self.gateway.wait_ready(self.options.ready_s, self.options.wait_for)
        self.heed.say(Word(fleet=msgspec.Raw(msgspec.json.encode(instance_rows(self.gateway)))))

    def _on_order(self, order: Order) -> None:
        if order.unready:
            self.gateway.draining = True
        if order.refused is not None:
            self.gateway.stats.reloads.add(("refused",))
            self._answer(ConfigError(order.refused))
        if order.settings:
            self._keep(self._reload(msgspec.json.decode(order.settings, type=GatewaySettings)))
        if order.stop:
            self.over.set()

    async def _reload(self, settings: GatewaySettings) -> None:
        try:
            words = await self.gateway.reload(settings)
        except WeighbridgeError as error:
            self.heed.say(Word(refused=str(error)))
            self._answer(error)
        else:
            self.heed.say(Word(reloaded=words))
            self._answer(words)

    async def _ask_reload(self) -> list[str]:
        """`POST /reload`: the supervisor reads the file."""
        answer: asyncio.Future[list[str]] = asyncio.get_running_loop().create_future()
        self._asking.append(answer)
        self.heed.say(Word(reload=True))
        return await answer

    def _answer(self, outcome: list[str] | WeighbridgeError) -> None:
        asking, self._asking = self._asking, []
        for answer in asking:
            if answer.done():
                continue
            if isinstance(outcome, list):
                answer.set_result(outcome)
            else:
                answer.set_exception(outcome)


async def run(options: _Options) -> int:
    """Serve until ordered to end, or until the supervisor is gone."""
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # the supervisor's to act on
        loop.add_signal_handler(number, lambda: None)
    try:
        process = _Process(options)
    except WeighbridgeError as error:
        Heed.say(Word(error=str(error)))
        return 3
    process.heed.listen()
    try:
        await process.run()
    except WeighbridgeError as error:
        Heed.say(Word(error=str(error)))
        return 3
    finally:
        await process.stop()
    return 0


def main() -> int:
    """Entry point."""
    options = msgspec.json.decode(Heed.first(), type=_Options)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(run(options))


if __name__ == "__main__":
    sys.exit(main())
