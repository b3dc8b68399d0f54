"""Everything the configuration file may say, and the fleet that runs without one."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated
from urllib.parse import urlsplit

import msgspec

from weighbridge.calibrate.settings import ReprobeSettings
from weighbridge.config.document import Document
from weighbridge.core.errors import ConfigError, PolicyError
from weighbridge.engine.instance import InstanceOptions, available_cores
from weighbridge.gateway.adapters import ADAPTERS
from weighbridge.gateway.auth import key_problem
from weighbridge.gateway.discovery import dns_instance
from weighbridge.gateway.endpoint import Endpoint
from weighbridge.gateway.pairs import check_pairs
from weighbridge.gateway.settings import DnsSource, GatewaySettings, InstanceSettings
from weighbridge.routing.policies.registry import make_policy
from weighbridge.routing.settings import RouterSettings, contradiction


class Settings(GatewaySettings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The gateway's own settings, and `engines`: embedded instances that `serve` starts and supervises itself."""

    engines: tuple[InstanceOptions, ...] = ()
    reprobe: ReprobeSettings | None = None
    """Measure instances that have left their profile again in idle time; without it `doctor` asks for it."""
    watch_s: Annotated[float, msgspec.Meta(gt=0)] | None = None
    """Look at the file this often, and reload it when it has changed; without it SIGHUP and `POST /reload` reload."""


def default_settings() -> Settings:
    """Two embedded instances of the default model that share this machine's cores, routed by measured work."""
    threads = max(1, available_cores() // 2)
    engines = tuple(InstanceOptions(name=f"cpu-{n}", threads=threads) for n in range(2))
    return Settings(engines=engines, router=RouterSettings(policy="work"))


def load_settings(path: Path | None, environment: Mapping[str, str]) -> Settings:
    """Read and check the configuration file; without one, the default fleet.

    Raises:
        ConfigError: with file, line and path of the first thing that is wrong.
    """
    if path is None:
        return default_settings()
    document = Document.read(path, environment)
    settings = document.to(Settings)
    _check(settings, document)
    return settings


def data_directory(settings: Settings, override: Path | None, environment: Mapping[str, str]) -> Path:
    """Where event logs and profiles are kept: flag, then file, then `$XDG_DATA_HOME/weighbridge`."""
    if override is not None:
        return override
    if settings.data_dir is not None:
        return Path(settings.data_dir).expanduser()
    base = environment.get("XDG_DATA_HOME") or str(Path.home() / ".local" / "share")
    return Path(base) / "weighbridge"


def schema() -> dict[str, object]:
    """JSON Schema of the configuration file."""
    return msgspec.json.schema(Settings)


def _check_roles(settings: Settings, document: Document) -> None:
    """Prefill and decode instances must be of kinds that hand KV over, and understand each other."""
    if all(instance.role == "mixed" for instance in settings.instances):
        return
    bare = [  # without what needs files, keys or a network
        InstanceSettings(name=i.name, url="http://engine", kind=i.kind, role=i.role, transfer=i.transfer, pool=i.pool)
        for i in settings.instances
    ]
    try:
        check_pairs([Endpoint(instance, settings.client, {}) for instance in bare], settings.router.binding)
    except ConfigError as error:
        places = {f"$.instances[{i.name}]": f"$.instances[{n}]" for n, i in enumerate(settings.instances)}
        place, _, field = error.path.rpartition(".")
        message = str(error).removeprefix(f"{error.path}: ")
        raise document.error(message, f"{places.get(place, place)}.{field}") from None


def _check(settings: Settings, document: Document) -> None:
    if not settings.instances and not settings.engines and not settings.discovery:
        raise document.error(
            "no instance: name at least one under `instances` or `engines`, or a source under `discovery`", "$"
        )
    names: set[str] = set()
    rows = [(f"$.instances[{n}].name", i.name) for n, i in enumerate(settings.instances)]
    rows += [(f"$.engines[{n}].name", e.name) for n, e in enumerate(settings.engines)]
    for place, name in rows:
        if name in names:
            raise document.error(f"the name {name!r} is taken already", place)
        names.add(name)
    for index, instance in enumerate(settings.instances):
        problem = _url_problem(instance.url)
        if problem:
            raise document.error(problem, f"$.instances[{index}].url")
        if instance.kind not in ADAPTERS:
            known = ", ".join(sorted(ADAPTERS))
            raise document.error(f"unknown kind {instance.kind!r}; known: {known}", f"$.instances[{index}].kind")
    _check_roles(settings, document)
    _check_discovery(settings, document)
    tiers = {tier.name for tier in settings.router.tiers}
    if settings.default_tier not in tiers:
        raise document.error(
            f"tier {settings.default_tier!r} is not defined; defined: {', '.join(sorted(tiers))}", "$.default_tier"
        )
    if settings.relays and settings.selection is not None:
        raise document.error("`selection` needs the Router in the process that reads requests: 0", "$.relays")
    wrong = key_problem(settings.keys, settings.router.tiers)
    if wrong is not None:
        raise document.error(wrong[1], wrong[0])
    _check_router(settings.router, document)


def _check_router(router: RouterSettings, document: Document) -> None:
    problem = contradiction(router)
    if problem is not None:
        raise document.error(problem[1], problem[0])
    try:
        make_policy(router.policy, router.policy_options)
    except PolicyError as error:
        place = {None: "policy", "*": "policy_options"}.get(error.option, f"policy_options.{error.option}")
        raise document.error(str(error), f"$.router.{place}") from None
    for index, name in enumerate(router.shadow):
        try:
            make_policy(name)
        except PolicyError as error:
            raise document.error(str(error), f"$.router.shadow[{index}]") from None


def _check_discovery(settings: Settings, document: Document) -> None:
    for index, source in enumerate(settings.discovery):
        if isinstance(source, DnsSource):
            try:
                kind = dns_instance(source, "192.0.2.1").kind
            except ConfigError as error:
                raise document.error(str(error), f"$.discovery[{index}].instance") from None
            if kind not in ADAPTERS:
                known = ", ".join(sorted(ADAPTERS))
                raise document.error(f"unknown kind {kind!r}; known: {known}", f"$.discovery[{index}].instance")


def _url_problem(url: str) -> str | None:
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        return f"not a URL ({error}); expected http://HOST:PORT or https://HOST"
    if parts.username or parts.password:
        return "a key never stands in a URL; use `api_key_env`"
    if parts.scheme not in ("http", "https") or not parts.hostname:
        return f"{url!r} is not a URL of an engine; expected http://HOST:PORT or https://HOST"
    if port == 0:
        return "port 0 is no address to send to"
    if parts.query or parts.fragment:
        return "a base URL has no query or fragment"
    return None
