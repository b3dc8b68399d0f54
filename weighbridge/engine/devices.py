"""Which of a library's compute devices a model goes to: pure, from their names and kinds alone.

A device is asked for as `cpu`, `gpu` (the first one), a backend (`cuda`, `vulkan`, `metal`, `rocm`, `sycl`), a backend
and a number from 0 (`cuda:1`), or the library's own name (`CUDA1`, `Vulkan0`, `MTL0`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from weighbridge.core.errors import ModelError

_BACKENDS = {
    "cuda": ("cuda",),
    "vulkan": ("vulkan",),
    "metal": ("mtl", "metal"),
    "rocm": ("rocm", "hip"),
    "sycl": ("sycl",),
}


class Device(NamedTuple):
    """A device as the library tells it; `kind` is `cpu`, `gpu`, `igpu`, `accel` or `other`."""

    name: str
    kind: str
    description: str


def choose_device(asked: str, devices: Sequence[Device]) -> int | None:
    """The index of the device that is asked for, or None for the CPU.

    Raises:
        ModelError: the library has no such device; the message lists what it has.
    """
    wanted = asked.strip().lower()
    if wanted == "cpu":
        return None
    graphics = [index for index, device in enumerate(devices) if device.kind in ("gpu", "igpu")]
    backend, _, number = wanted.partition(":")
    if backend == "gpu":
        found = sorted(graphics, key=lambda index: devices[index].kind)  # a card of its own before one on the CPU's die
    elif backend in _BACKENDS:
        found = [index for index in graphics if devices[index].name.lower().startswith(_BACKENDS[backend])]
    else:
        found = [index for index in graphics if devices[index].name.lower() == wanted]
        number = ""
    place = int(number) if number.isdecimal() else 0 if not number else -1
    if 0 <= place < len(found):
        return found[place]
    here = ", ".join(f"{device.name} ({device.description})" for device in devices if device.kind in ("gpu", "igpu"))
    raise ModelError(
        f"device {asked!r} is not there: this library has {here or 'no GPU'}; a library with CUDA, Vulkan or Metal is "
        "given with `library` (docs/engine.md), and `cpu` always works"
    )
