"""A process of embedded instances: `python -m weighbridge.engine.child OPTIONS_JSON`, a list of one or more.

Speaks JSON lines on standard output (`progress`, `error`, and `ready` for each; then `alive` to every line that it is
sent) to whoever started it, drains on SIGTERM, and ends when its parent is gone: by the kernel's parent-death signal
where there is one, and by the end of standard input.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import sys
import time

import msgspec

from weighbridge.core.errors import WeighbridgeError
from weighbridge.engine.instance import InstanceOptions, Shared, start_instance

DRAIN_S = 30.0
_PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """Ask the kernel to kill this process when its parent dies (Linux; elsewhere the end of input does it)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() == 1:
            os._exit(1)


def _say(kind: str, value: object) -> None:
    sys.stdout.buffer.write(msgspec.json.encode({kind: value}) + b"\n")
    sys.stdout.buffer.flush()


class _Progress:
    """Says at most ten times a second how far loading is."""

    def __init__(self) -> None:
        self._said_s = 0.0

    def __call__(self, fraction: float) -> None:
        now_s = time.monotonic()
        if fraction >= 1.0 or now_s - self._said_s > 0.1:
            self._said_s = now_s
            _say("progress", round(fraction, 3))


async def _serve(group: list[InstanceOptions]) -> int:
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    loop.add_signal_handler(signal.SIGTERM, stop.set)
    loop.add_signal_handler(signal.SIGINT, lambda: None)  # a terminal's Ctrl-C is the parent's to handle
    orphaned = asyncio.Event()

    def on_input() -> None:
        if os.read(0, 4096):
            _say("alive", True)  # which is what every line asks
        else:
            orphaned.set()
            stop.set()

    loop.add_reader(0, on_input)
    shared = Shared()
    instances = []
    try:
        for options in group:
            instances.append(await start_instance(options, _Progress(), shared))
            _say("ready", instances[-1].info)
    except WeighbridgeError as error:
        _say("error", str(error))
        os._exit(3)  # whatever was started before holds nothing that outlives the process
    await stop.wait()
    loop.remove_reader(0)
    await asyncio.gather(*(instance.stop(0.0 if orphaned.is_set() else DRAIN_S) for instance in instances))
    shared.close()
    return 0


def main() -> None:
    """Entry point."""
    die_with_parent()
    options = msgspec.json.decode(sys.argv[1], type=list[InstanceOptions])
    import uvloop

    sys.exit(uvloop.run(_serve(options)))


if __name__ == "__main__":
    main()
