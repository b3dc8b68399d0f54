"""Whether anybody was sent past somebody more urgent, judged from a gateway's event log and from what engines saw.

The rule, of which every word can fail. When a request is sent to an engine, no more urgent request of a model that
this engine serves is waiting in the Router, but for what the documents allow:

- *ageing*: the one that is sent has waited longer than its tier's `max_wait_s`, and at least three others were sent to
  engines of its model since the last such;
- *the gate*: the policy was asked to place the more urgent one, in this very pass, and would rather wait. Only a policy
  with a gate can say so, and it is asked here, not guessed;
- *lateness*: those that cannot make their first-token deadline wait behind one another for leisure, and nobody waits
  for them. Of such a tier, model and tenant one is asked, as above, and speaks for all.

What else may let one pass another cannot occur in these histories, and is therefore no excuse: requests are of one
size, so that an engine has room for all or for none; no tier has a bound on its running tokens. Fairness between
tenants orders requests of one tier only. One that is tried again waits from then on like any other.

Who is refused because too much is held has nobody less urgent behind it that might have been refused instead. And the
log cannot lie: what reached an engine had been sent there, by the log, before, and once (twice where a connection had
gone stale).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

from weighbridge.core.actions import Dispatch, Hold, Reject
from weighbridge.core.event_log import Entry, Header, LogReader
from weighbridge.core.events import (
    InstanceUp,
    RequestArrived,
    RequestCancelled,
    RequestFailed,
    RequestFinished,
)
from weighbridge.core.request import Request, Tier
from weighbridge.gateway import Gateway
from weighbridge.gateway.log_writer import LogWriter
from weighbridge.routing.policy import Choice, Policy, View

JUDGED = ("contests", "aged", "gated", "shed")
"""What `check_priority` counts; `Judge` says what each is."""
AGED_EVERY = 4
LATE_S = 0.05
"""So much before its deadline a request may be given up: its prompt would take that long, by the profiles used here."""


@dataclass
class Sent:
    """One dispatch: when, on the clock of this process, and to which address."""

    at_s: float
    request_id: str
    url: str
    arrivals: int = 0


class Watched:
    """A policy whose refusals are noted: (time, request, how many it had placed before)."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.placed = 0
        self.declined: list[tuple[float, str, int]] = []

    def choose(self, view: View) -> Choice:
        choice = self.policy.choose(view)
        if choice.index is None:
            self.declined.append((view.now_s, view.request.id, self.placed))
        else:
            self.placed += 1
        return choice


class Record:
    """The event log of one gateway; to be made before it starts, and closed at the end."""

    def __init__(self, gateway: Gateway) -> None:
        driver = gateway.driver
        self._endpoints = driver.endpoints
        self._start_s = driver._start_s
        self._folder = TemporaryDirectory(prefix="history-")
        self._writer = driver.writer = LogWriter(Path(self._folder.name), Header(), max_bytes=1 << 30, max_files=2)
        self.tiers = driver.router.tiers
        self.policy = driver.router.policy = Watched(driver.router.policy)
        self.entries: list[Entry] = []
        self.sent: list[Sent] = []

    def read(self) -> None:
        """Read what was written so far."""
        assert self._writer.sync()
        assert self._writer.dropped == 0
        with self._writer.path.open("rb") as stream:
            self.entries = list(LogReader(stream))
        for entry in self.entries:
            for action in entry.a:
                if isinstance(action, Dispatch):
                    url = self._endpoints[action.instance].settings.url
                    self.sent.append(Sent(self._start_s + entry.t, action.request_id, url))

    def close(self) -> None:
        """Ends the writer's thread and removes the log."""
        self._writer.close()
        self._folder.cleanup()


@dataclass
class Waiting:
    """A request that waits in the Router, and since when."""

    request: Request
    tier: Tier
    since_s: float


@dataclass
class Judge:
    """Replays one record. `contests`: dispatches while somebody of another tier waited; `aged` and `gated`: those that
    passed somebody more urgent, with leave; `shed`: refusals because too much was held."""

    record: Record
    contests: int = 0
    aged: int = 0
    gated: int = 0
    shed: int = 0
    requests: dict[str, Request] = field(default_factory=dict)
    _waiting: dict[str, Waiting] = field(default_factory=dict)
    _serves: dict[str, tuple[str, ...]] = field(default_factory=dict)
    _since_aged: dict[str, int] = field(default_factory=dict)
    _dispatches: int = 0

    def run(self) -> Judge:
        """Raises AssertionError at the first breach."""
        for entry in self.record.entries:
            self._event(entry)
            for action in entry.a:
                if isinstance(action, Dispatch):
                    self._sent(action, entry.t)
                elif isinstance(action, Reject):
                    self._refused(action)
        return self

    def _event(self, entry: Entry) -> None:
        event = entry.e
        if isinstance(event, InstanceUp):
            self._serves[event.spec.name] = event.spec.models
        elif isinstance(event, RequestArrived):
            self.requests[event.request.id] = event.request
            self._wait(event.request, entry)
        elif isinstance(event, RequestFailed) and event.retriable and event.request_id in self.requests:
            self._wait(self.requests[event.request_id], entry)
        elif isinstance(event, RequestFailed | RequestCancelled | RequestFinished):
            self._waiting.pop(event.request_id, None)

    def _wait(self, request: Request, entry: Entry) -> None:
        acts = (action for action in entry.a if isinstance(action, Dispatch | Hold | Reject))
        told = any(action.request_id == request.id for action in acts)
        if told:  # else the Router knows it no more: its client has left
            self._waiting[request.id] = Waiting(request, self.record.tiers[request.tier], entry.t)

    def _sent(self, action: Dispatch, now_s: float) -> None:
        one = self._waiting.pop(action.request_id)
        most = one.tier.max_wait_s
        self.contests += any(other.tier.priority != one.tier.priority for other in self._waiting.values())
        models = self._serves[action.instance]
        passed = [
            other
            for other in self._waiting.values()
            if other.tier.priority < one.tier.priority and (not models or other.request.model in models)
        ]
        old = most is not None and now_s - one.since_s > most
        if passed:
            if old and self._since_aged.get(one.request.model, 0) >= AGED_EVERY - 1:
                self.aged += 1
            else:
                for other in passed:
                    self._excused(other, one, action.instance, now_s)
                self.gated += 1
        for model in {request.model for request in self.requests.values()}:
            if not models or model in models:
                self._since_aged[model] = 0 if old else self._since_aged.get(model, 0) + 1
        self._dispatches += 1

    def _excused(self, other: Waiting, one: Waiting, instance: str, now_s: float) -> None:
        alike = {
            each.request.id: each
            for each in self._waiting.values()
            if (each.request.model, each.request.tier, each.request.tenant)
            == (other.request.model, other.request.tier, other.request.tenant)
        }
        for at_s, request_id, placed in reversed(self.record.policy.declined):
            if at_s < now_s:
                break
            asked = alike.get(request_id)
            if asked is None or placed > self._dispatches:
                continue
            if asked is other or (_late(asked, now_s) and _late(other, now_s)):
                return
        who = f"{one.request.id} ({one.tier.name}, {one.request.model})"
        whom = f"{other.request.id} ({other.tier.name}, {other.request.model}), which waited since {other.since_s:.4f}"
        raise AssertionError(f"priority: {who} was sent to {instance} at {now_s:.4f} past {whom}")

    def _refused(self, action: Reject) -> None:
        one = self._waiting.pop(action.request_id, None)
        if one is None or action.reason != "queue_full":
            return
        self.shed += 1
        for other in self._waiting.values():
            rather = other.tier.sheddable and other.tier.priority > one.tier.priority
            assert not rather, (
                f"priority: {one.request.id} ({one.tier.name}) was refused for want of room in the queue and "
                f"{other.request.id} ({other.tier.name}) was not"
            )


def _late(one: Waiting, now_s: float) -> bool:
    return one.tier.ttft_s is not None and one.request.arrival_s + one.tier.ttft_s < now_s + LATE_S


def check_priority(
    records: Iterable[Record], arrivals: Iterable[tuple[str, float, str]], tiers: Mapping[str, str]
) -> dict[str, int]:
    """Judges the records of all gateways of one history; how often something was there to be judged.

    `arrivals`: (address, time, request id) of what engines saw; `tiers`: the tier that each client had, by request id.
    """
    sent: dict[tuple[str, str], list[Sent]] = {}
    known = set(tiers)
    totals = dict.fromkeys(JUDGED, 0)
    for record in records:
        record.read()
        judge = Judge(record).run()
        for name in totals:
            totals[name] += getattr(judge, name)
        known.update(judge.requests)
        for request in judge.requests.values():
            assert tiers.get(request.id, request.tier) == request.tier, f"{request.id} was taken for another tier"
        for each in record.sent:
            sent.setdefault((each.url, each.request_id), []).append(each)
    for url, at_s, request_id in arrivals:
        if request_id not in known:
            continue  # a stranger's: of many runs at once, another one's gateway had known this port before
        before = [s for s in sent.get((url, request_id), ()) if s.at_s <= at_s and s.arrivals < 2]
        assert before, f"{request_id} reached {url}, where by the log nobody had sent it"
        before[-1].arrivals += 1
    return totals
