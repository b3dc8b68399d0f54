"""How a prompt's KV goes from the engine that computed it to the one that decodes: three protocols, as edits. Pure.

- `two_step` (vLLM's NIXL connector, and our engine): first the prompt as a whole, non-streamed request for one token;
  its reply's `kv_transfer_params` go verbatim into the decode leg, while the prefill engine's lease lasts.
- `bootstrap` (SGLang): both legs at once with the prefill engine's bootstrap address and a room number of their own.
- `mooncake` (vLLM's Mooncake connector): both legs at once with one transfer id; the decode leg names the prefill
  engine's id and bootstrap address, which the bootstrap server tells.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from weighbridge.core.errors import ConfigError
from weighbridge.gateway.output_budget import LIMITS
from weighbridge.gateway.splice import add_value, remove_value, replace_value

if TYPE_CHECKING:
    from weighbridge.gateway.client_request import ClientRequest
    from weighbridge.gateway.endpoint import Endpoint

Protocol = Literal["two_step", "bootstrap", "mooncake"]
CONCURRENT = frozenset({"bootstrap", "mooncake"})
DEFAULT_BOOTSTRAP_PORT = 8998
PARAMS = "kv_transfer_params"
ASK = (
    b'{"do_remote_decode":true,"do_remote_prefill":false,"remote_engine_id":null,"remote_block_ids":null,'
    b'"remote_host":null,"remote_port":null}'
)


class _Prompt(msgspec.Struct):
    prompt: Any = None


@dataclass(frozen=True, slots=True)
class Legs:
    """Both bodies of a pair that starts at once, and header lines for the prefill leg."""

    prefill: bytes
    decode: bytes
    headers: bytes = b""


def prefill_body(body: bytes, request: ClientRequest, ask: bytes = ASK) -> bytes:
    """The body of a prefill leg that is a whole request: one token, not streamed, KV to be kept for another engine."""
    for name in ("stream_options", "min_tokens", *LIMITS):
        body = remove_value(body, name)
    if request.stream:
        body = replace_value(body, "stream", b"false")
    body = add_value(body, "max_tokens", b"1")
    if request.uses_completion_limit:
        body = add_value(body, "max_completion_tokens", b"1")
    if request.endpoint == "responses":
        body = add_value(body, "max_output_tokens", b"1")
    return add_value(body, PARAMS, ask)


def decode_body(body: bytes, params: bytes) -> bytes:
    """The body of the decode leg: the prefill reply's parameters verbatim, whatever they hold."""
    return add_value(body, PARAMS, params)


def concurrent_legs(body: bytes, request: ClientRequest, prefill: Endpoint, number: int) -> Legs | None:
    """The legs of a pair that starts at once; `number` (63 random bits) tells it from every other.

    None: what the prefill engine must be known by is not known yet.
    """
    if prefill.transfer == "bootstrap":
        both = _bootstrap_body(body, request, prefill, number)
        return Legs(both, both)
    if not prefill.ranks:
        return None
    rank, engine_id = prefill.ranks[number % len(prefill.ranks)]
    transfer_id = msgspec.json.encode(f"xfer-{number:016x}")
    ask = b'{"do_remote_decode":true,"do_remote_prefill":false,"transfer_id":%b}' % transfer_id
    take = (
        b'{"do_remote_decode":false,"do_remote_prefill":true,"transfer_id":%b,"remote_engine_id":%b,'
        b'"remote_bootstrap_addr":%b}'
    ) % (transfer_id, msgspec.json.encode(engine_id), msgspec.json.encode(bootstrap_url(prefill)))
    headers = b"" if len(prefill.ranks) == 1 else b"x-data-parallel-rank: %b\r\n" % rank.encode()
    return Legs(prefill_body(body, request, ask), decode_body(body, take), headers)


def _bootstrap_body(body: bytes, request: ClientRequest, prefill: Endpoint, number: int) -> bytes:
    """The same for either leg; a batch of prompts needs as many rooms, and lists of the rest."""
    host, port = bootstrap_host(prefill), prefill.settings.bootstrap_port
    count = _prompts(body) if request.endpoint == "completions" else 0
    values: dict[str, Any] = {"bootstrap_room": number, "bootstrap_port": port, "bootstrap_host": host}
    if count:
        rooms = [(number + n) & (1 << 63) - 1 for n in range(count)]
        values = {"bootstrap_room": rooms, "bootstrap_port": [port] * count, "bootstrap_host": [host] * count}
    for name, value in values.items():
        body = add_value(body, name, msgspec.json.encode(value))
    return body


def _prompts(body: bytes) -> int:
    """How many prompts a completions request holds as a list; 0 for a single one."""
    prompt = msgspec.json.decode(body, type=_Prompt).prompt
    batch = isinstance(prompt, list) and bool(prompt) and not isinstance(prompt[0], int)
    return len(prompt) if batch else 0


def bootstrap_host(prefill: Endpoint) -> str:
    """Where decode engines find the prefill engine's bootstrap server."""
    return prefill.settings.bootstrap_host or prefill.origin.host


def bootstrap_url(prefill: Endpoint) -> str:
    """The same as Mooncake wants it."""
    host = bootstrap_host(prefill)
    port = prefill.settings.bootstrap_port or DEFAULT_BOOTSTRAP_PORT
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def told_ranks(value: Any) -> tuple[tuple[str, str], ...]:
    """(rank, engine id) out of a Mooncake bootstrap server's reply to `GET /query`."""
    entries = value.items() if isinstance(value, dict) else ()
    return tuple(
        (str(rank), entry["engine_id"])
        for rank, entry in entries
        if str(rank).isdigit() and isinstance(entry, dict) and isinstance(entry.get("engine_id"), str)
    )


def transfer_of(endpoint: Endpoint, where: str) -> str:
    """The protocol of an instance, "" for one that computes whole requests. Raises ConfigError."""
    settings, adapter = endpoint.settings, endpoint.adapter
    if settings.role == "mixed":
        return ""
    if not adapter.transfers:
        raise ConfigError(
            f"kind {settings.kind!r} hands no KV over, so its role must be `mixed`, not `{settings.role}`",
            path=f"{where}.role",
        )
    chosen = settings.transfer or adapter.transfers[0]
    if chosen not in adapter.transfers:
        raise ConfigError(
            f"kind {settings.kind!r} does not speak `{chosen}`; it speaks {', '.join(adapter.transfers)}",
            path=f"{where}.transfer",
        )
    return chosen


def check_pairs(endpoints: Iterable[Endpoint], binding: str) -> None:
    """Refuses a fleet whose prefill and decode instances cannot understand each other. Raises ConfigError."""
    known: dict[str, Endpoint] = {}
    for endpoint in endpoints:
        if not endpoint.transfer:
            continue
        other = known.setdefault(endpoint.settings.pool, endpoint)
        kinds = other.settings.kind, endpoint.settings.kind
        if other.transfer != endpoint.transfer or kinds[0] != kinds[1]:
            raise ConfigError(
                f"{other.name} ({kinds[0]}) hands KV over by `{other.transfer}` and {endpoint.name} ({kinds[1]}) by "
                f"`{endpoint.transfer}`: prefill and decode instances of one pool must understand each other",
                path=f"$.instances[{endpoint.name}].transfer",
            )
        if endpoint.transfer in CONCURRENT and binding == "late":
            raise ConfigError(
                f"{endpoint.name} speaks `{endpoint.transfer}`, whose legs start at once; use `binding: auto`",
                path="$.router.binding",
            )
