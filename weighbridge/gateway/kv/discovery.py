"""Where an engine says that it publishes its KV events. Pure.

vLLM and our engine answer `GET /kv_event_sources` by data-parallel rank. SGLang tells its `--kv-events-config` among
its arguments; each further rank listens one port higher.
"""

from __future__ import annotations

from typing import Any
from urllib.parse import urlsplit

import msgspec

from weighbridge.gateway.kv.subscriber import Source
from weighbridge.gateway.kv_address import ANY_HOST

PATH = "/kv_event_sources"
PATHS = {"sglang": "/server_info"}
MAX_RANKS = 64


def path_for(kind: str) -> str:
    """Which of an engine's pages tells."""
    return PATHS.get(kind, PATH)


def sources_of(kind: str, reply: Any, host: str) -> tuple[list[Source], str]:
    """The sources in that page, one per data-parallel rank, on the engine's own `host`; if none, the reason."""
    return _sglang_sources(reply, host) if kind == "sglang" else told_sources(reply, host)


def _sglang_sources(reply: Any, host: str) -> tuple[list[Source], str]:
    info = reply if isinstance(reply, dict) else {}
    try:
        config = msgspec.json.decode(info.get("kv_events_config") or "{}")
    except (msgspec.DecodeError, TypeError):
        config = {}
    config = config if isinstance(config, dict) else {}
    ranks = info.get("dp_size")
    ranks = ranks if isinstance(ranks, int) and 1 <= ranks <= MAX_RANKS else 1
    told = {"enable_kv_cache_events": True, "publisher": "zmq", **config} if config.get("endpoint") else {}
    per_rank = {
        str(rank): {
            **told,
            "endpoint": _higher(told.get("endpoint"), rank),
            "replay_endpoint": _higher(told.get("replay_endpoint"), rank),
        }
        for rank in range(ranks)
    }
    return told_sources(per_rank, host)


def _higher(address: Any, by: int) -> Any:
    head, _, port = address.rpartition(":") if isinstance(address, str) else ("", "", "")
    return f"{head}:{int(port) + by}" if port.isdigit() else address


def told_sources(reply: Any, host: str) -> tuple[list[Source], str]:
    """The sources in an engine's reply to `GET /kv_event_sources`, one per data-parallel rank, on the engine's own
    `host`, and where there are none the reason."""
    sources: list[Source] = []
    reason = "it publishes no KV events"
    for rank, told in reply.items() if isinstance(reply, dict) else ():
        if not isinstance(told, dict) or not told.get("enable_kv_cache_events") or told.get("publisher") != "zmq":
            continue
        endpoint = _reachable(told.get("endpoint"), host)
        if endpoint is None:
            reason = f"it connects to {told.get('endpoint')} and does not listen; give it tcp://*:PORT"
            continue
        topic = told.get("topic")
        sources.append(
            Source(
                endpoint,
                _reachable(told.get("replay_endpoint"), host),
                topic if isinstance(topic, str) else "",
                str(rank),
            )
        )
    return sources, "" if sources else reason


def _reachable(address: Any, host: str) -> str | None:
    """The address to connect to for one that was bound; None for one that an engine would itself connect to."""
    if not isinstance(address, str):
        return None
    try:
        parts = urlsplit(address.replace("*", "0.0.0.0"))  # noqa: S104 - a placeholder while parsing
        bound, port = parts.hostname, parts.port
    except ValueError:
        return None
    if parts.scheme != "tcp" or port is None or bound not in ANY_HOST:
        return None
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"
