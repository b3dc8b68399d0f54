"""Recorded requests of one instance, out of an event log of the gateway or the simulator."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from weighbridge.calibrate.replay import RecordedRequest
from weighbridge.core.actions import Dispatch
from weighbridge.core.errors import LogError
from weighbridge.core.event_log import Entry
from weighbridge.core.events import (
    FirstToken,
    InstanceUp,
    RequestArrived,
    RequestCancelled,
    RequestFailed,
    RequestFinished,
)
from weighbridge.core.instance import InstanceSpec


@dataclass(slots=True)
class _Open:
    sent_s: float
    prompt_tokens: int
    first_s: float | None = None


@dataclass(frozen=True, slots=True)
class InstanceRun:
    """What one instance did. `excluded` counts requests that failed, were cancelled, or went in two legs."""

    spec: InstanceSpec
    requests: list[RecordedRequest]
    excluded: int


def read_instance_run(entries: Iterable[Entry], name: str, instance: str | None = None) -> InstanceRun:
    """The requests that `instance` ended well, from dispatch to last token; the only instance by default.

    Raises:
        LogError: the log has several instances and none is named, or the named one ended no request.
    """
    specs: dict[str, InstanceSpec] = {}
    prompts: dict[str, int] = {}
    running: dict[str, tuple[str, _Open]] = {}
    ended: dict[str, list[RecordedRequest]] = {}
    excluded: dict[str, int] = {}
    for entry in entries:
        event = entry.e
        if isinstance(event, InstanceUp):
            specs[event.spec.name] = event.spec
        elif isinstance(event, RequestArrived):
            prompts[event.request.id] = event.request.prompt_tokens
        elif isinstance(event, FirstToken) and event.request_id in running:
            running[event.request_id][1].first_s = entry.t
        elif isinstance(event, RequestFinished) and event.request_id in running:
            where, opened = running.pop(event.request_id)
            record = _record(event, opened, entry.t)
            if record is not None:
                ended.setdefault(where, []).append(record)
            else:
                excluded[where] = excluded.get(where, 0) + 1
        elif isinstance(event, RequestFailed | RequestCancelled) and event.request_id in running:
            where, _ = running.pop(event.request_id)
            excluded[where] = excluded.get(where, 0) + 1
        for action in entry.a:
            if isinstance(action, Dispatch) and action.leg == "whole":
                opened = _Open(entry.t, prompts.get(action.request_id, 1))
                running[action.request_id] = (action.instance, opened)
    chosen = _choose(name, instance, sorted(specs))
    requests = ended.get(chosen, [])
    if not requests:
        raise LogError(f"{name}: instance {chosen!r} ended no request in this log")
    zero = min(r.arrival_s for r in requests)
    moved = [
        RecordedRequest(
            r.id, r.arrival_s - zero, r.first_token_s - zero, r.last_token_s - zero, r.prompt_tokens, r.output_tokens
        )
        for r in sorted(requests, key=lambda r: r.arrival_s)
    ]
    return InstanceRun(specs[chosen], moved, excluded.get(chosen, 0))


def _record(event: RequestFinished, opened: _Open, now_s: float) -> RecordedRequest | None:
    if opened.first_s is None or event.output_tokens < 1:
        return None
    prompt = (event.prompt_tokens or opened.prompt_tokens) - (event.cached_tokens or 0)
    return RecordedRequest(event.request_id, opened.sent_s, opened.first_s, now_s, max(1, prompt), event.output_tokens)


def _choose(name: str, instance: str | None, known: list[str]) -> str:
    if instance is None and len(known) == 1:
        return known[0]
    if instance is None or instance not in known:
        what = "name one by --instance" if instance is None else f"no instance {instance!r}"
        raise LogError(f"{name}: {what}; the log has {', '.join(known) or 'none'}")
    return instance
