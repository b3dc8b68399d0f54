"""What an adapter is: where an engine tells of itself, how to read it, and which request fields it takes."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from weighbridge.core.instance import Limits, LoadReport
from weighbridge.http.client import Reply

Replies = Mapping[str, Reply]
NO_LIMITS = Limits()


@dataclass(frozen=True, slots=True)
class Report:
    """One look at an engine's load. `started_s` is the process's start (Unix time): a change means a restart."""

    load: LoadReport
    started_s: float | None = None


@dataclass(frozen=True, slots=True)
class Facts:
    """What holds for an engine's whole life: the models it answers to and its limits.

    `device` is where it says that it runs; `scheduler` how it fills its steps, by the names of `SchedulerConfig`.
    """

    models: tuple[str, ...] = ()
    limits: Limits = NO_LIMITS
    version: str = ""
    device: str = ""
    quantisation: str = ""
    scheduler: Mapping[str, Any] = field(default_factory=dict)


def no_report(replies: Replies) -> Report | None:
    """For engines that tell nothing."""
    return None


def no_lease(params: Any) -> str | None:
    """For engines whose KV leases end by themselves only."""
    return None


def listed_models(replies: Replies) -> Facts:
    """`/v1/models` as OpenAI defines it, with vLLM's `max_model_len` where it stands."""
    entries = model_entries(replies)
    lengths = [e["max_model_len"] for e in entries if isinstance(e.get("max_model_len"), int)]
    return Facts(models=model_ids(entries), limits=Limits(max_context=min(lengths) if lengths else None))


@dataclass(frozen=True, slots=True)
class Adapter:
    """One kind of engine.

    `health_path` and the keys of `report` and `facts` are paths on the engine; `/v1/...` is taken below its API base.
    `usage_option`: takes `stream_options.include_usage`. `priority`: takes an integer `priority`, lower first.
    `cache_salt`: separates prefix caches by that field. `transfers`: the protocols of `pairs` by which it can hand a
    prompt's KV over, the usual one first; `kv_lease` tells the path to DELETE when its parameters will not be used.
    """

    kind: str
    health_path: str = "/health"
    alive_below: int = 400  # a health reply below this status means alive
    report_paths: tuple[str, ...] = ()
    report: Callable[[Replies], Report | None] = no_report
    facts_paths: tuple[str, ...] = ("/v1/models",)
    facts: Callable[[Replies], Facts] = listed_models
    usage_option: bool = True
    priority: bool = False
    cache_salt: bool = False
    transfers: tuple[str, ...] = ()
    streams_whole: bool = False
    """Whether it stops for a client that left only in a stream: then whole replies are streams put together here."""
    kv_lease: Callable[[Any], str | None] = no_lease
    endpoints: frozenset[str] = frozenset({"chat", "completions"})


def json_of(reply: Reply | None) -> Any:
    """The reply's JSON if it is a 200 with valid JSON, else None."""
    if reply is None or reply.status != 200:
        return None
    try:
        return msgspec.json.decode(reply.body)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None


def model_entries(replies: Replies) -> list[dict[str, Any]]:
    """The objects of `data` in the reply of `/v1/models`."""
    value = json_of(replies.get("/v1/models"))
    data = value.get("data") if isinstance(value, dict) else None
    return [e for e in data if isinstance(e, dict)] if isinstance(data, list) else []


def model_ids(entries: list[dict[str, Any]]) -> tuple[str, ...]:
    """Their ids."""
    return tuple(e["id"] for e in entries if isinstance(e.get("id"), str))


def samples(text: bytes, names: tuple[str, ...]) -> dict[str, list[tuple[dict[str, str], float]]]:
    """The samples of the named Prometheus metrics: labels and value; others are skipped at C speed."""
    found: dict[str, list[tuple[dict[str, str], float]]] = {}
    pattern = rb"^(" + b"|".join(re.escape(n.encode()) for n in names) + rb")(\{.*\})?[ \t]+(\S+)"
    for match in re.finditer(pattern, text, re.MULTILINE):
        try:
            value = float(match[3])
        except ValueError:
            continue
        labels = {k.decode(): v.decode("utf-8", "replace") for k, v in _LABEL.findall(match[2] or b"")}
        found.setdefault(match[1].decode(), []).append((labels, value))
    return found


_LABEL = re.compile(rb'([A-Za-z_][A-Za-z0-9_]*)="((?:[^"\\]|\\.)*)"')


def total(found: Mapping[str, list[tuple[dict[str, str], float]]], *names: str) -> float | None:
    """Sum over labels of the first name present (names are spellings of one metric), or None."""
    for name in names:
        if name in found:
            return sum(value for _, value in found[name])
    return None


def largest(found: Mapping[str, list[tuple[dict[str, str], float]]], *names: str) -> float | None:
    """Largest value over labels of the first name present, or None."""
    for name in names:
        if name in found:
            return max(value for _, value in found[name])
    return None


def count(value: float | None) -> int | None:
    """A gauge as an integer."""
    return None if value is None or value != value else round(value)
