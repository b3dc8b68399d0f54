"""One embedded instance from its options to a listening server, in this process; what the child process runs too."""

from __future__ import annotations

import asyncio
import math
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import msgspec

from weighbridge.core.errors import ConfigError
from weighbridge.core.instance import Role
from weighbridge.cost.profile import Profile
from weighbridge.engine.devices import Device, choose_device
from weighbridge.engine.kv_events import KvEventSettings
from weighbridge.engine.kv_service import TransferSettings
from weighbridge.engine.libllama import Library
from weighbridge.engine.library_store import resolve_library
from weighbridge.engine.model import LlamaModel, ModelOptions
from weighbridge.engine.model_store import DEFAULT_MODEL, resolve_model
from weighbridge.engine.options import EngineOptions
from weighbridge.engine.probe import describe, probe_profile, save_profile, saved_profile
from weighbridge.engine.runner import CELLS, KvType, RunnerOptions, Throttle, kv_value_bytes
from weighbridge.engine.server import EngineServer


class InstanceOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything that makes an embedded instance. `threads` 0 takes all cores; `cores` pins to these.

    `model` is a catalogue name or a GGUF path, `chat_template` a Jinja file instead of the model's own template,
    `adapters` LoRA files (GGUF) with their scales. `library` is another libllama than the wheel's: `dispatch` (see
    `weighbridge model library`) or a path. `device` names what the model runs on (`cpu`, `gpu`, `cuda:1`, `metal`,
    ...); `auto` is the CPU unless `gpu_layers`, how many layers go to a GPU (-1 all), says otherwise. `kv_hosts`
    are the hosts that KV may be pulled from, `kv_advertise` the host that others are told to pull from. `kv_events`
    is a ZeroMQ endpoint such as `tcp://127.0.0.1:5557` to publish KV cache events on, `kv_events_replay` one for
    replays. `profile` is a file for the measured step times; without one they are measured at each start.
    `throttle_prefill` and `throttle_decode` make that work take so many times as long, to test fleets of uneven
    instances.
    """

    name: str = "embedded-0"
    host: str = "127.0.0.1"
    port: int = 0
    model: str = DEFAULT_MODEL
    model_id: str | None = None
    role: Role = "mixed"
    chat_template: str | None = None
    adapters: dict[str, float] = {}
    slots: int = 4
    context_tokens: int = 2048
    threads: int = 0
    cores: tuple[int, ...] = ()
    device: str = "auto"
    gpu_layers: int = 0
    library: str | None = None
    unified: bool = False
    kv_type: KvType = "f16"
    flash_attention: Literal["auto", "on", "off"] = "on"
    busy_prefill_tokens: int = 64
    idle_prefill_tokens: int = 512
    max_waiting: int = 512
    throttle_prefill: float = 1.0
    throttle_decode: float = 1.0
    prefix_caching: bool = True
    prefix_store_bytes: int = 256 << 20
    kv_hosts: tuple[str, ...] = ("127.0.0.1", "::1", "localhost")
    kv_advertise: str | None = None
    kv_lease_s: float = 30.0
    kv_load_failure: Literal["recompute", "fail"] = "recompute"
    kv_events: str | None = None
    kv_events_replay: str | None = None
    probe: bool = True
    profile: str | None = None

    def __post_init__(self) -> None:
        for name in ("slots", "context_tokens", "max_waiting"):
            if getattr(self, name) < 1:
                raise ConfigError(f"must be at least 1, not {getattr(self, name)}", source="engine", path=name)
        for name in ("throttle_prefill", "throttle_decode"):
            if not 1.0 <= getattr(self, name) < math.inf:
                raise ConfigError("must be at least 1: it can only slow down", source="engine", path=name)
        for name in ("busy_prefill_tokens", "idle_prefill_tokens"):
            value = getattr(self, name)
            if value < 64 or value % 64 or value > 512:
                raise ConfigError(f"must be a multiple of 64 up to 512, not {value}", source="engine", path=name)
        if self.device.lower() == "cpu" and self.gpu_layers:
            raise ConfigError("must be 0 with device cpu", source="engine", path="gpu_layers")
        if self.threads < 0:
            raise ConfigError(f"must be 0 (all cores) or more, not {self.threads}", source="engine", path="threads")


class ReadyInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What an instance is once it serves. `device` is where the model really is."""

    name: str
    host: str
    port: int
    model_id: str
    context_tokens: int
    slots: int
    kv_blocks: int
    kv_events: str | None
    block_tokens: int
    threads: int
    device: str
    library: str
    model: str
    load_s: float
    profile: Profile | None


class Instance:
    """A running instance: its server, and what is to be freed after it."""

    def __init__(self, server: EngineServer, own: Shared | None, info: ReadyInfo) -> None:
        """`own` is what this instance alone uses and frees at its end."""
        self.server = server
        self.info = info
        self._own = own

    async def stop(self, drain_s: float = 0.0) -> None:
        """Drain, stop and free everything."""
        await self.server.stop(drain_s)
        if self._own is not None:
            self._own.close()


@dataclass(slots=True)
class Shared:
    """What instances of one process have in common: libraries and loaded models, by what they were loaded from."""

    libraries: dict[str | None, Library] = field(default_factory=dict)
    models: dict[tuple[str, str, int, str | None], LlamaModel] = field(default_factory=dict)

    def close(self) -> None:
        """Free the models; every instance must be stopped before."""
        for model in self.models.values():
            model.close()
        self.models.clear()


async def start_instance(
    options: InstanceOptions,
    progress: Callable[[float], None] | None = None,
    shared: Shared | None = None,
) -> Instance:
    """Load the model, measure if asked to, warm up and listen. `progress` is called from another thread.

    With `shared`, instances of one process use one copy of the weights, which its owner closes after them.

    Raises:
        ModelError: model or library cannot be used.
        ServiceError: the address is taken.
    """
    begun = time.monotonic()
    path, default_id = resolve_model(options.model)
    if options.cores:
        _pin(options.cores)
    common = shared or Shared()
    model = await asyncio.to_thread(_load, options, path, common, progress)
    model_id = options.model_id or default_id
    transfer = TransferSettings(
        hosts=frozenset(options.kv_hosts),
        advertise=options.kv_advertise,
        lease_s=options.kv_lease_s,
        on_failure=options.kv_load_failure,
    )
    server = EngineServer(model, _engine_options(options), model_id, options.name, transfer, _read_template(options))
    runner = server.engine.runner
    device = server.device = device_label(options, model.library.devices())
    profile = await asyncio.to_thread(_profile, options, server, path, device)
    await server.start(options.host, options.port)
    memory = server.engine.scheduler.memory
    info = ReadyInfo(
        name=options.name,
        host=options.host,
        port=server.port,
        model_id=model_id,
        context_tokens=server.engine.context_tokens,
        slots=options.slots,
        kv_blocks=memory.blocks,
        kv_events=server.engine.kv_events.endpoint if server.engine.kv_events is not None else None,
        block_tokens=memory.block_tokens,
        threads=runner.options.threads,
        device=device,
        library=str(model.library.path),
        model=model.describe(),
        load_s=time.monotonic() - begun,
        profile=profile,
    )
    return Instance(server, common if shared is None else None, info)


def _read_template(options: InstanceOptions) -> str | None:
    if options.chat_template is None:
        return None
    try:
        return Path(options.chat_template).read_text(encoding="utf-8")
    except OSError as error:
        message = f"{options.chat_template}: {error.strerror}"
        raise ConfigError(message, source="engine", path="chat_template") from None


def _load(options: InstanceOptions, path: Path, shared: Shared, progress: Callable[[float], None] | None) -> LlamaModel:
    key = (str(path), options.device, options.gpu_layers, options.library)
    if key in shared.models:
        return shared.models[key]
    if options.library not in shared.libraries:
        shared.libraries[options.library] = Library(resolve_library(options.library))
    library = shared.libraries[options.library]
    device, layers = placement(options, library.devices())
    cells = -(-options.context_tokens // CELLS) * CELLS * options.slots
    model = LlamaModel(library, ModelOptions(path, layers, cells, kv_value_bytes(options.kv_type), device), progress)
    shared.models[key] = model
    return model


def placement(options: InstanceOptions, devices: Sequence[Device]) -> tuple[int | None, int]:
    """The device's index (None: the CPU, or the library's choice) and how many layers go to it.

    Raises:
        ModelError: the device that is asked for is not there.
    """
    if options.device.lower() == "auto":
        return None, options.gpu_layers
    device = choose_device(options.device, devices)
    return device, 0 if device is None else options.gpu_layers or -1


def device_label(options: InstanceOptions, devices: Sequence[Device]) -> str:
    """What the model is on, for people and profiles: a GPU only if the library has one and layers were put there."""
    index, layers = placement(options, devices)
    kinds = ("gpu", "igpu") if layers else ("cpu",)
    found = [devices[index]] if index is not None else [device for device in devices if device.kind in kinds]
    found = found or [device for device in devices if device.kind == "cpu"]
    return f"{found[0].name} ({found[0].description})" if found else "cpu"


def _engine_options(options: InstanceOptions) -> EngineOptions:
    events = None
    if options.kv_events is not None:
        events = KvEventSettings(options.kv_events, options.kv_events_replay, f"kv@{options.name}@{options.model}")
    return EngineOptions(
        runner=RunnerOptions(
            slots=options.slots,
            context_tokens=options.context_tokens,
            threads=options.threads or len(options.cores) or available_cores(),
            batch_rows=max(512, options.slots),
            unified=options.unified,
            kv_type=options.kv_type,
            flash_attention=options.flash_attention,
            throttle=Throttle(options.throttle_prefill, options.throttle_decode),
            adapters=tuple(options.adapters.items()),
        ),
        busy_prefill_tokens=options.busy_prefill_tokens,
        idle_prefill_tokens=options.idle_prefill_tokens,
        prefix_caching=options.prefix_caching,
        prefix_store_bytes=options.prefix_store_bytes,
        kv_events=events,
        max_waiting=options.max_waiting,
    )


def _profile(options: InstanceOptions, server: EngineServer, path: Path, device: str) -> Profile | None:
    if not options.probe:
        return None
    import weighbridge

    runner = server.engine.runner
    stamp = f"{path.name}:{path.stat().st_size}"
    provenance = describe(runner, stamp, device, weighbridge.__version__)
    file = Path(options.profile) if options.profile else None
    if file is not None and (known := saved_profile(file, provenance)) is not None:
        return known
    server.engine.warm_up()
    profile = probe_profile(runner, provenance)
    if file is not None:
        save_profile(file, profile)
    return profile


def _pin(cores: tuple[int, ...]) -> None:
    if not hasattr(os, "sched_setaffinity"):
        raise ConfigError("this system cannot pin threads to cores", source="engine", path="cores")
    try:
        os.sched_setaffinity(0, cores)
    except OSError as error:
        raise ConfigError(f"{list(cores)}: {error.strerror}", source="engine", path="cores") from None


def available_cores() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
