"""The parts of a running `serve`, wired together: supervised engines, the gateway, their ends in the right order."""

from __future__ import annotations

import asyncio
import errno
import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import msgspec

from weighbridge.config.settings import Settings
from weighbridge.core.errors import ConfigError, ServiceError
from weighbridge.dashboard.process import DashboardProcess
from weighbridge.engine.instance import InstanceOptions, ReadyInfo
from weighbridge.engine.model_store import CatalogueEntry, find_entry, is_cached
from weighbridge.engine.supervisor import Supervisor
from weighbridge.gateway.gateway import Gateway
from weighbridge.gateway.process import tune_collector
from weighbridge.gateway.settings import GatewaySettings, InstanceSettings

READY_TIMEOUT_S = 10.0
ENGINE_DRAIN_S = 5.0


def missing_models(engines: Iterable[Any]) -> list[CatalogueEntry]:
    """Catalogue models that these engines name and that are not in the cache."""
    entries = {e.model: find_entry(e.model) for e in engines}
    return [entry for entry in entries.values() if entry is not None and not is_cached(entry)]


class Serving:
    """`start`, then `drain` and `stop`. Engines start before the gateway and end after it.

    `dashboard_port` None starts no dashboard; one that cannot start is no reason not to serve, see `dashboard_error`.
    """

    def __init__(
        self,
        settings: Settings,
        data_dir: Path,
        dashboard_port: int | None = None,
        load: Callable[[], Settings] | None = None,
    ) -> None:
        """`load` reads the settings anew for a reload; None where there is no file."""
        self.settings = settings
        self._load = load
        self.dashboard_error = ""
        self._dashboard_port = dashboard_port
        self._dashboard = DashboardProcess()
        self._dashboard_url: str | None = None
        self._dashboard_start: asyncio.Future[None] | None = None
        self._data_dir = data_dir
        self._supervisor: Supervisor | None = None
        self._gateway: Gateway | None = None
        self._engines: list[ReadyInfo] = []
        self._embedded: list[InstanceSettings] = []
        self._start_s = 0.0
        self._reprobing: asyncio.Future[None] | None = None

    @property
    def busy(self) -> bool:
        """Whether requests are running."""
        return self._gateway is not None and self._gateway.driver.router.live_requests > 0

    @property
    def admin_port(self) -> int:
        """The bound port of the admin listener."""
        assert self._gateway is not None
        return self._gateway.admin_port

    async def start(self, progress: Callable[[str, float], None]) -> None:
        """Start everything and wait until an instance can answer.

        Raises:
            ModelError, ServiceError, ConfigError: one clear line; nothing is left running after `stop`.
        """
        begun = time.monotonic()
        # both listeners are checked before a model is loaded: a taken port should not cost a load
        await _check_free(self.settings.host, self.settings.port, "--port")
        await _check_free(self.settings.admin_host, self.settings.admin_port, "--admin-port")
        if self._dashboard_port is not None and self.settings.admin_port:
            # it loads while the models do; until the gateway is there it says so
            self._dashboard_start = asyncio.ensure_future(self._start_dashboard(self.settings.admin_port))
        if self.settings.engines:
            options = [self._with_profile(engine) for engine in self.settings.engines]
            self._supervisor = Supervisor(options, on_progress=progress)
            self._engines = await self._supervisor.start()
            self._embedded = [_instance(info, option) for info, option in zip(self._engines, options, strict=True)]
        await self._open()
        tune_collector()
        self._start_s = time.monotonic() - begun
        if self._dashboard_start is None and self._dashboard_port is not None:
            self._dashboard_start = asyncio.ensure_future(self._start_dashboard(self.admin_port))
        if self._dashboard_start is not None:
            await self._dashboard_start

    async def _open(self) -> None:
        """Start the gateway and wait until an instance can answer, all embedded ones if there are any."""
        self._gateway = Gateway(self._gateway_settings(self.settings))
        self._gateway.on_reload = self.reload
        await self._gateway.start()
        await self._gateway.wait_ready(READY_TIMEOUT_S, [info.name for info in self._engines])
        if self.settings.reprobe is not None:
            from weighbridge.calibrate.reprobe import Reprober  # with numpy and the fit: only where it is wanted

            self._reprobing = asyncio.ensure_future(Reprober(self._gateway, self.settings.reprobe).run())

    async def _start_dashboard(self, admin_port: int) -> None:
        port = self._dashboard_port
        assert port is not None
        host = self.settings.admin_host
        name = self.settings.admin_token_env
        admin = _address("127.0.0.1" if host in ("0.0.0.0", "::") else host, admin_port)  # noqa: S104
        try:
            self._dashboard_url = await self._dashboard.start(admin, port, os.environ.get(name, "") if name else "")
        except (ServiceError, OSError) as error:
            self.dashboard_error = str(error)

    async def reload(self) -> list[str]:
        """Read the file again and swap what can be swapped; returns what changes. Raises ConfigError: nothing did."""
        gateway = self._gateway
        if gateway is None:
            raise ConfigError("it has not started yet")
        try:
            settings = self._read_again()
        except ConfigError:
            gateway.stats.reloads.add(("refused",))
            raise
        words = await gateway.reload(self._gateway_settings(settings))
        self.settings = settings
        return words

    def _read_again(self) -> Settings:
        if self._load is None:
            raise ConfigError("it was started without a configuration file: there is nothing to reload")
        settings = self._load()
        if settings.engines != self.settings.engines:
            raise ConfigError("engines cannot change while serving; restart", path="$.engines")
        return settings

    def _gateway_settings(self, settings: Settings) -> GatewaySettings:
        fields = {name: getattr(settings, name) for name in GatewaySettings.__struct_fields__}
        fields |= {
            "instances": (*settings.instances, *self._embedded),
            "data_dir": str(self._data_dir / "events"),
        }
        return GatewaySettings(**fields)

    async def drain(self, announced: bool = False) -> None:
        """Take nothing new and let what runs end, within the configured bound; `announced`: not before `unready_s`."""
        if self._gateway is not None:
            await self._gateway.drain(unready_s=self.settings.unready_s if announced else 0.0)

    async def stop(self) -> None:
        """End everything that was started."""
        if self._dashboard_start is not None:
            self._dashboard_start.cancel()
            await asyncio.wait({self._dashboard_start})
        await self._dashboard.stop()
        await self._close()
        if self._supervisor is not None:
            await self._supervisor.stop(ENGINE_DRAIN_S)

    async def _close(self) -> None:
        """End the gateway."""
        if self._reprobing is not None:
            self._reprobing.cancel()
            await asyncio.wait({self._reprobing})
        if self._gateway is not None:
            await self._gateway.stop()

    def ready(self) -> dict[str, Any]:
        """What a caller needs to use it: addresses, instances with process ids, policy."""
        if self._gateway is None:
            raise ServiceError("not started")
        return self._ready(self._gateway.port, self.admin_port, instance_rows(self._gateway))

    def _ready(self, port: int, admin_port: int, rows: list[dict[str, Any]]) -> dict[str, Any]:
        pids = self._supervisor.pids() if self._supervisor else {}
        return {
            "url": _address(self.settings.host, port),
            "admin": _address(self.settings.admin_host, admin_port),
            "dashboard": self._dashboard_url,
            "policy": self.settings.router.policy,
            "data_dir": str(self._data_dir),
            "start_s": self._start_s,
            "instances": [{**row, "pid": pids.get(row["name"])} for row in rows],
        }

    def _with_profile(self, engine: InstanceOptions) -> InstanceOptions:
        if engine.profile is not None:
            return engine
        return msgspec.structs.replace(engine, profile=str(self._data_dir / "profiles" / f"{engine.name}.json"))


def instance_rows(gateway: Gateway) -> list[dict[str, Any]]:
    """What is told of each instance when serving begins."""
    rows = []
    for endpoint in gateway.driver.endpoints.values():
        rates = endpoint.spec.rates
        rows.append(
            {
                "name": endpoint.name,
                "kind": endpoint.settings.kind,
                "url": endpoint.settings.url,
                "model": ", ".join(endpoint.models),
                "up": endpoint.up,
                "reason": "" if endpoint.up else endpoint.reason,
                "prefill_tokens_per_s": rates.prefill_tokens_per_s if rates else None,
                "decode_tokens_per_s": rates.decode_tokens_per_s if rates else None,
            }
        )
    return rows


def _instance(info: ReadyInfo, options: InstanceOptions) -> InstanceSettings:
    return InstanceSettings(
        name=info.name,
        kind="embedded",
        url=_address(info.host, info.port),
        role=options.role,
        profile=options.profile if options.probe or _exists(options.profile) else None,
        kv_events="auto" if info.kv_events is not None else None,
    )


def _exists(profile: str | None) -> bool:
    return profile is not None and Path(profile).exists()


def _address(host: str, port: int) -> str:
    name = f"[{host}]" if ":" in host else host
    return f"http://{name}:{port}"


async def _check_free(host: str, port: int, flag: str) -> None:
    if port == 0:
        return
    try:
        server = await asyncio.get_running_loop().create_server(asyncio.Protocol, host, port)
    except OSError as error:
        taken = error.errno == errno.EADDRINUSE
        why = "is taken by another program" if taken else f"cannot be listened on ({error.strerror})"
        raise ServiceError(f"{host}:{port} {why}; choose another with {flag}") from None
    server.close()
    await server.wait_closed()
