"""Replay: parity of a recorded log, mismatches that are named, and another policy's choices."""

import io

import msgspec

from weighbridge.core.event_log import Entry, Header, LogReader, encode_entry, encode_header
from weighbridge.core.events import Event, FirstToken, InstanceUp, RequestArrived, RequestFinished
from weighbridge.core.instance import InstanceSpec
from weighbridge.core.request import Request
from weighbridge.routing.replay import alternative, check
from weighbridge.routing.router import Router, RouterSettings


def record(policy: str) -> LogReader:
    settings = RouterSettings(policy=policy, seed=5)
    router = Router(settings)
    lines = [encode_header(Header(router=msgspec.to_builtins(settings)))]
    events: list[Event] = [InstanceUp(spec=InstanceSpec(name=n), generation=1) for n in "ab"]
    for n in range(20):
        request = Request(id=f"r{n}", arrival_s=float(n), prompt_tokens=10 if n % 2 else 1000, max_tokens=5)
        events += [RequestArrived(request=request), FirstToken(request_id=f"r{n}")]
        if n > 3:
            events.append(RequestFinished(request_id=f"r{n - 3}", output_tokens=5))
    for t, event in enumerate(events):
        lines.append(encode_entry(t / 3, event, router.handle(event, t / 3)))
    return LogReader(io.BytesIO(b"".join(lines)))


def test_a_recorded_log_is_identical() -> None:
    reader = record("least_requests")
    parity = check(reader.header, reader)
    assert (parity.requests, parity.mismatches) == (20, ())
    assert parity.entries == 58


def test_a_changed_log_is_caught_and_the_entry_named() -> None:
    reader = record("least_requests")
    entries = list(reader)
    index = next(i for i, e in enumerate(entries) if e.a)
    entries[index] = Entry(entries[index].t, entries[index].e, ())
    parity = check(reader.header, entries)
    assert [m.entry for m in parity.mismatches] == [index + 1]
    assert parity.mismatches[0].event == "RequestArrived"


def test_another_policy_is_asked_on_the_recorded_ledger() -> None:
    reader = record("round_robin")
    same = alternative(reader.header, record("round_robin"), "round_robin", {})
    assert (same.requests, same.agree) == (20, 20)
    other = alternative(reader.header, record("round_robin"), "least_tokens", {})
    assert other.recorded_share == {"a": 10, "b": 10}
    assert sum(other.alternative_share.values()) == 20
    assert other.agree < 20
