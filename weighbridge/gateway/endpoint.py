"""One configured engine at run time: its address, its connections, and the bytes of a request to it."""

from __future__ import annotations

import ssl
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from weighbridge.core.errors import ConfigError, InputError
from weighbridge.core.instance import InstanceSpec, Limits, LoadReport, Transfer
from weighbridge.cost.profile import Profile, decode_profile
from weighbridge.cost.transfer import TransferTerms
from weighbridge.gateway.adapters import Adapter, Facts, adapter_for
from weighbridge.gateway.client_request import ClientRequest
from weighbridge.gateway.kv_address import AUTO, check_address
from weighbridge.gateway.origin import parse_origin
from weighbridge.gateway.output_budget import clip_budget
from weighbridge.gateway.pairs import CONCURRENT, transfer_of
from weighbridge.gateway.settings import InstanceSettings
from weighbridge.gateway.splice import add_value, remove_value, replace_value
from weighbridge.http import ClientLimits, Pool

if TYPE_CHECKING:
    from weighbridge.gateway.records import Answers

USAGE_OPTION = b'{"include_usage":true}'


class Endpoint:
    """An engine and everything the gateway holds for it. `up` follows what the Router was told."""

    def __init__(self, settings: InstanceSettings, client: ClientLimits, environment: Mapping[str, str]) -> None:
        """Raises ConfigError: bad URL, unknown kind, missing key variable, unreadable profile."""
        self.settings = settings
        self.name = settings.name
        where = f"$.instances[{settings.name}]"
        self.origin = parse_origin(settings.url, path=f"{where}.url")
        self.adapter: Adapter = adapter_for(settings.kind, path=f"{where}.kind")
        self.limits = settings.client or client
        self.key = _key(settings, environment, where)
        self.profile = read_profile(settings.profile) if settings.profile else None
        path = settings.transfer_profile
        self.transfer_terms = read_transfer(path, f"{where}.transfer_profile") if path else None
        self.ssl_context = self._ssl()
        self.pool: Pool | None = None
        self.up = False
        self.draining = False
        self.leaving = False  # draining for good
        self.generation = 0
        self.running = 0
        self.warm_limit: int | None = None
        self.report: LoadReport | None = None
        self.report_s: float | None = None
        self.started_s: float | None = None
        self.reason = "not probed yet"
        self.kv: Answers | None = None
        if settings.kv_events not in (None, AUTO):
            check_address(settings.kv_events, f"{where}.kv_events")
        if settings.kv_events_replay is not None:
            check_address(settings.kv_events_replay, f"{where}.kv_events_replay")
        self.takes_priority = self.adapter.priority if settings.takes_priority is None else settings.takes_priority
        self.transfer = transfer_of(self, where)
        self.ranks: tuple[tuple[str, str], ...] = ()
        """(rank, engine id) of a Mooncake prefill engine, once its bootstrap server has told."""
        self._heads: dict[str, bytes] = {}
        self._facts: Facts | None = None
        self.models = self._models()

    @property
    def facts(self) -> Facts | None:
        """What the engine told of itself."""
        return self._facts

    @facts.setter
    def facts(self, facts: Facts | None) -> None:
        self._facts = facts
        self.models = self._models()

    def _ssl(self) -> ssl.SSLContext | None:
        if self.origin.scheme != "https":
            return None
        try:
            return ssl.create_default_context(cafile=self.settings.ca_file)
        except (OSError, ssl.SSLError) as error:
            path = f"$.instances[{self.name}].ca_file"
            raise ConfigError(f"ca_file {self.settings.ca_file} cannot be read: {error}", path=path) from None

    def open(self) -> Pool:
        """The connection pool; made within the running loop."""
        if self.pool is None:
            self.pool = Pool(self.origin.host, self.origin.port, self.limits, self.ssl_context)
        return self.pool

    @property
    def spec(self) -> InstanceSpec:
        """What the Router is told."""
        profile = self.profile
        return InstanceSpec(
            name=self.name,
            models=self.models,
            pool=self.settings.pool,
            kind=self.settings.kind,
            role=self.settings.role,
            limits=self._limits(),
            rates=profile.rates if profile else None,
            step=profile.step if profile else None,
            error=profile.error if profile else None,
            takes_priority=self.takes_priority,
            transfer=self.transfer_terms,
            pairs_early=self.transfer in CONCURRENT,
            warm_limit=self.warm_limit,
        )

    def _models(self) -> tuple[str, ...]:
        """The ids clients may use: configured, aliased, or what the engine told."""
        known = self.settings.models or (self.facts.models if self.facts else ())
        return (*known, *(alias for alias in self.settings.aliases if alias not in known))

    def _limits(self) -> Limits:
        told = self.facts.limits if self.facts else Limits()
        fixed = self.settings.limits
        if self.profile is not None:
            told = _over(told, self.profile.limits)
        return told if fixed is None else _over(told, fixed)

    def request_bytes(self, path: str, body: bytes, request_id: str, headers: bytes) -> bytes:
        """Head and body; the head is rebuilt from our own parts only."""
        head = self._heads.get(path) or self._head(path)
        tail = f"x-request-id: {request_id}\r\ncontent-length: {len(body)}\r\n\r\n".encode()
        return b"".join((head, headers, tail, body))

    def plain_request(self, method: str, path: str) -> bytes:
        """A request without a body to one of the engine's own paths."""
        key = f"authorization: Bearer {self.key}\r\n" if self.key else ""
        head = f"{method} {self.origin.root}{path} HTTP/1.1\r\nhost: {self.origin.authority}\r\n{key}\r\n"
        return head.encode("latin-1")

    def edit(
        self, request: ClientRequest, priority: int | None = None, clip: int | None = None, salt: bytes | None = None
    ) -> tuple[bytes, bool]:
        """The body with the named edits spliced in, and whether a usage frame was asked for on our own account.

        `clip`: output tokens of all choices together.
        """
        body = request.body
        ours = False
        if (
            request.stream
            and not request.wants_usage
            and self.adapter.usage_option
            and request.endpoint in ("chat", "completions")
        ):
            ours = True
            splice = replace_value if request.has_usage_option else add_value
            body = splice(body, "stream_options", USAGE_OPTION)
        upstream_model = self.settings.aliases.get(request.model)
        if upstream_model is not None:
            body = replace_value(body, "model", msgspec.json.encode(upstream_model))
        if clip is not None:
            body = clip_budget(body, request, clip)
        if priority is not None and self.takes_priority:
            body = replace_value(body, "priority", b"%d" % priority)
        elif "priority" in request.private and self.takes_priority:  # a client must not jump the queue by itself
            body = remove_value(body, "priority")
        if salt is not None and self.adapter.cache_salt:
            splice = replace_value if "cache_salt" in request.private else add_value
            body = splice(body, "cache_salt", salt)
        return body, ours

    def _head(self, path: str) -> bytes:
        key = f"authorization: Bearer {self.key}\r\n" if self.key else ""
        head = (
            f"POST {self.origin.path(path)} HTTP/1.1\r\nhost: {self.origin.authority}\r\n"
            f"content-type: application/json\r\naccept-encoding: identity\r\n{key}"
        ).encode("latin-1")
        if len(self._heads) < 64:
            self._heads[path] = head
        return head

    def probe_headers(self) -> list[tuple[str, str]]:
        """Headers of a probe: the engine's key, if it has one."""
        return [("authorization", f"Bearer {self.key}")] if self.key else []


def _over(base: Limits, top: Limits) -> Limits:
    """`base` with what `top` states."""
    changes = {}
    for name in Limits.__struct_fields__:
        value = getattr(top, name)
        if value is not None and value != getattr(Limits(), name):
            changes[name] = value
    return msgspec.structs.replace(base, **changes)


def _key(settings: InstanceSettings, environment: Mapping[str, str], where: str) -> str | None:
    if settings.api_key_env is None:
        return None
    key = environment.get(settings.api_key_env)
    if not key:
        raise ConfigError(f"environment variable {settings.api_key_env} is not set", path=f"{where}.api_key_env")
    if not key.isascii() or any(c <= " " or c == "\x7f" for c in key):
        raise ConfigError(f"the key in {settings.api_key_env} holds a blank or control character", path=where)
    return key


def read_transfer(path: str, where: str) -> Transfer:
    """Reads measured transfer terms. Raises ConfigError."""
    try:
        return msgspec.json.decode(Path(path).read_bytes(), type=TransferTerms).per_token
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}", path=where) from None
    except (msgspec.MsgspecError, InputError) as error:
        raise ConfigError(f"{path}: {error}", path=where) from None


def read_profile(path: str) -> Profile:
    """Reads a profile file. Raises ConfigError or ProfileError."""
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(f"profile {path} cannot be read: {error.strerror}") from None
    return decode_profile(data, path)
