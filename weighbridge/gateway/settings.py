"""What a gateway can be told: listeners, instances, keys, deadlines. Decoded from the configuration file by msgspec."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from weighbridge.core.instance import Limits, Role
from weighbridge.http.limits import ClientLimits, ServerLimits
from weighbridge.routing.router import RouterSettings
from weighbridge.selection.settings import SelectionSettings

Positive = Annotated[float, msgspec.Meta(gt=0)]
Count = Annotated[int, msgspec.Meta(ge=1)]
Name = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]


class InstanceSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One engine. `models` empty: asked from the engine. `aliases`: the name clients use -> the name the engine knows.

    `api_key_env` names the environment variable that holds the engine's key; the key itself never stands in a file.
    `profile` is the path of a profile file, `transfer_profile` that of what `calibrate --transfer-to` wrote for
    a decode instance. Values in `limits` override what the engine tells.
    `kv_events`: the ZeroMQ address of the engine's KV cache events, such as tcp://HOST:5557, or `auto` to ask the
    engine; `kv_events_replay` that of its replays.
    """

    name: Name
    url: str
    kind: str = "openai"
    models: tuple[str, ...] = ()
    aliases: dict[str, str] = {}
    role: Role = "mixed"
    pool: str = "default"
    api_key_env: str | None = None
    profile: str | None = None
    transfer_profile: str | None = None
    limits: Limits | None = None
    client: ClientLimits | None = None
    ca_file: str | None = None
    takes_priority: bool | None = None
    transfer: Literal["two_step", "bootstrap", "mooncake"] | None = None  # None: as its kind usually does
    bootstrap_port: int | None = None  # of a prefill instance of SGLang, or of vLLM with Mooncake
    bootstrap_host: str | None = None  # where decode engines find it, if not at the host of `url`
    kv_events: str | None = None
    kv_events_replay: str | None = None
    kv_events_topic: str = ""  # what the topic begins with; empty: any


class DnsSource(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="from", tag="dns"):
    """One engine per address of `host`, named PREFIX-ADDRESS (without `prefix`: by the first label of `host`).

    `instance` is what they have in common, as under `instances` without `name` and `url`.
    """

    host: str
    port: Annotated[int, msgspec.Meta(ge=1, le=65535)]
    prefix: str = ""
    every_s: Positive = 10.0
    instance: dict[str, Any] = {}


class FileSource(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="from", tag="file"):
    """A YAML or JSON list of instances, written by something else."""

    path: str
    every_s: Positive = 2.0


Source = DnsSource | FileSource


class KeySettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One API key, by its SHA-256 (`printf %s "$KEY" | sha256sum` prints it). `models` empty: all of them."""

    sha256: Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{64}$")]
    tenant: Name
    tier: str | None = None
    models: tuple[str, ...] = ()
    tokens_per_minute: Count | None = None
    disabled: bool = False


class HealthSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Active probes and passive signals."""

    interval_s: Positive = 1.0
    timeout_s: Positive = 5.0
    fall: Count = 3  # failed probes in a row that take an instance out
    rise: Count = 2  # good probes in a row that bring it back
    dead_s: Positive = 30.0  # out for this long: what still runs there is given up
    connect_failures: Count = 2  # refused connections in a row that take an instance out at once
    eject_failures: Count = 5  # faults of real requests in a row that eject it
    eject_s: Positive = 5.0  # times the number of ejections in a row, up to `eject_max_s`
    eject_max_s: Positive = 60.0
    eject_share: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.5  # of the instances of a model, at most
    slow_start_s: Annotated[float, msgspec.Meta(ge=0)] = 5.0  # a new or returned instance is given 1, 2, 4 ... at once


class RequestLimits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Caps on what one request may ask for; beyond them it is refused with 400 and the field's name."""

    max_tokens: Count = 1_000_000
    default_max_tokens: Count = 512  # assumed, not sent, where a request names none
    max_n: Count = 16
    max_prompts: Count = 256
    max_stop: Count = 16
    max_stop_chars: Count = 1024  # of one stop string
    max_depth: Count = 128  # lists and objects in one another


class TracingSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """OpenTelemetry traces over OTLP/HTTP. Without `endpoint` the standard `OTEL_EXPORTER_OTLP_*` variables hold."""

    endpoint: str | None = None
    service_name: str = "weighbridge"
    sample: Annotated[float, msgspec.Meta(ge=0, le=1)] = 1.0  # of traces that a client has not begun itself


class GatewaySettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A whole gateway."""

    host: str = "127.0.0.1"
    port: Annotated[int, msgspec.Meta(ge=0, le=65535)] = 8080
    admin_host: str = "127.0.0.1"
    admin_port: Annotated[int, msgspec.Meta(ge=0, le=65535)] = 8081
    admin_token_env: str | None = None
    hosts: tuple[str, ...] = ()  # Host headers the admin listener accepts besides its own address
    instances: tuple[InstanceSettings, ...] = ()
    discovery: tuple[Source, ...] = ()
    router: RouterSettings = RouterSettings()
    keys: tuple[KeySettings, ...] = ()
    default_tenant: Name = "default"
    default_tier: str = "standard"
    data_dir: str | None = None
    log_bytes: Count = 256 * 1024 * 1024  # an event log is rotated at this size
    log_files: Count = 8
    access_log: str | None = None  # directory of JSON lines, one per request; rotated like the event log
    tracing: TracingSettings | None = None  # needs the extra `otel`
    drain_s: Positive = 300.0
    unready_s: Annotated[float, msgspec.Meta(ge=0)] = 0.0  # after SIGTERM: not ready, yet still serving, for this long
    prefix_block_bytes: Count = 64
    max_prefix_blocks: Count = 1024
    tokenizers: dict[str, str] = {}  # model -> its tokenizer.json, to count prompts exactly instead of estimating
    server: ServerLimits = ServerLimits()
    client: ClientLimits = ClientLimits()
    health: HealthSettings = HealthSettings()
    limits: RequestLimits = RequestLimits()
    selection: SelectionSettings | None = None  # how `model: auto` is answered; None: it is an unknown model
    max_loop_lag_s: Positive = 0.25  # while the event loop is later than this, new requests are answered 503
    retry_share: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.2  # retries, as a share of requests; at least a few
    isolate_tenants: bool = True  # with API keys: engines that can keep tenants' prefix caches apart are told to
    salt_env: str | None = None  # secret for that, so that salts stay the same over restarts
    tls_cert: str | None = None
    tls_key: str | None = None
    relays: Annotated[int, msgspec.Meta(ge=0, le=64)] = 0  # processes that share the load; 0: this one does all
    router_wait_s: Annotated[float, msgspec.Meta(ge=2)] = 5.0  # how long requests wait for a Router that died
