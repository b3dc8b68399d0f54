"""What an event log says of the fleet: fed entry by entry, asked for a snapshot once a second.

It counts on its own, from the same events the router saw, and shares no state with it. Memory is bounded: windows are
cut by time and by number, decisions are sampled above `MOST_DECISIONS_PER_S`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import msgspec
from msgspec.structs import replace

from weighbridge.core.actions import Dispatch, Reject
from weighbridge.core.event_log import Entry, Header
from weighbridge.core.events import (
    FirstToken,
    InstanceDown,
    InstanceGone,
    InstanceReported,
    InstanceUp,
    ProfileUpdated,
    RequestAdopted,
    RequestArrived,
    RequestCancelled,
    RequestFailed,
    RequestFinished,
    TokensProgressed,
)
from weighbridge.core.metrics import RequestRecord
from weighbridge.core.request import DEFAULT_TIERS, Request, Tier
from weighbridge.dashboard.decided import decided, settled
from weighbridge.dashboard.observed import KEPT_ENDS, End, ObservedInstance, Queue, headline, instance_view, tier_views
from weighbridge.dashboard.snapshot import DecisionView, Pair, Series, Snapshot

RING = 100
KEPT_DECISIONS = 400
MOST_DECISIONS_PER_S = 20


class _Live:
    __slots__ = ("decision", "dispatched_s", "first_s", "instance", "output_tokens", "request")

    def __init__(self, request: Request) -> None:
        self.request = request
        self.instance = ""
        self.dispatched_s: float | None = None
        self.first_s: float | None = None
        self.output_tokens = 0
        self.decision: _Held | None = None


class _Held:
    """A decision that is kept; its view is replaced when the outcome comes."""

    __slots__ = ("view",)

    def __init__(self, view: DecisionView) -> None:
        self.view = view


class Observer:
    """The fleet as its events tell it. `window_s` None counts everything since the first entry."""

    def __init__(self, window_s: float | None = 60.0) -> None:
        self.window_s = window_s
        self.policy = ""
        self.tiers: dict[str, Tier] = {t.name: t for t in DEFAULT_TIERS}
        self.now_s = 0.0
        self.first_s: float | None = None
        self.skipped_decisions = 0
        self.instances: dict[str, ObservedInstance] = {}
        self._live: dict[str, _Live] = {}
        self._queue = Queue()
        self._decisions: deque[_Held] = deque(maxlen=KEPT_DECISIONS)
        self._kept = (0, 0)
        self._ends: deque[End] = deque(maxlen=KEPT_ENDS)
        self._rings: dict[str, deque[float]] = {k: deque(maxlen=RING) for k in Series.__struct_fields__}
        self._handlers: dict[type, Callable[[Any, float], None]] = {
            RequestArrived: self._arrived,
            RequestAdopted: self._adopted,
            FirstToken: self._first_token,
            TokensProgressed: self._progressed,
            RequestFinished: self._finished,
            RequestFailed: self._failed,
            RequestCancelled: self._cancelled,
            InstanceUp: self._up,
            InstanceDown: self._down,
            InstanceGone: self._gone,
            InstanceReported: self._reported,
            ProfileUpdated: self._profile,
        }

    def begin(self, header: Header) -> None:
        """A log begins: its policy and tiers."""
        self.policy = str(header.router.get("policy", self.policy))
        try:
            tiers = msgspec.convert(header.router.get("tiers", ()), tuple[Tier, ...])
        except msgspec.ValidationError:
            return
        if tiers:
            self.tiers = {t.name: t for t in tiers}

    def feed(self, entry: Entry) -> None:
        """One call of the router. A request it did not see arrive (it came in the middle) is ignored."""
        self.now_s = max(self.now_s, entry.t)
        if self.first_s is None:
            self.first_s = entry.t
        handler = self._handlers.get(type(entry.e))
        if handler is not None:
            handler(entry.e, entry.t)
        for action in entry.a:
            if isinstance(action, Dispatch):
                self._dispatch(action, entry.t)
            elif isinstance(action, Reject):
                self._reject(action, entry.t)

    # events

    def _arrived(self, event: RequestArrived, now: float) -> None:
        self._live[event.request.id] = _Live(event.request)
        self._queue.add(event.request)

    def _adopted(self, event: RequestAdopted, now: float) -> None:
        live = self._live[event.request.id] = _Live(event.request)
        if event.instance:
            instance = self._instance(event.instance)
            instance.join(event.request.id, event.request.prompt_tokens)
            live.instance, live.output_tokens = event.instance, event.output_tokens
            if event.output_tokens:
                live.first_s = now
                instance.first_token(event.request.id)
                instance.grow(event.output_tokens, event.request.id)

    def _dispatch(self, action: Dispatch, now: float) -> None:
        live = self._live.get(action.request_id)
        if live is None:
            return
        self._queue.remove(live.request, now)
        if live.instance and live.instance != action.instance:
            self._leave(live)
        instance = self._instance(action.instance)
        if live.instance != action.instance:
            instance.join(live.request.id, live.request.prompt_tokens)
            instance.dispatches.append((now, live.request.prompt_tokens))
        live.instance, live.dispatched_s = action.instance, now
        if action.decision is None:
            return
        if action.leg == "decode" and live.decision is not None:
            note = f"decode on {action.instance}"
            live.decision.view = replace(live.decision.view, note=note)
            return
        view = decided(action.decision, live.request, self._error_of)
        if live.decision is not None:
            live.decision.view = view  # another attempt
        else:
            live.decision = self._keep(view, now)

    def _keep(self, view: DecisionView, now: float) -> _Held | None:
        second, count = int(now), self._kept[1] + 1 if self._kept[0] == int(now) else 1
        self._kept = (second, count)
        if count > MOST_DECISIONS_PER_S:
            self.skipped_decisions += 1
            return None
        held = _Held(view)
        self._decisions.append(held)
        return held

    def _reject(self, action: Reject, now: float) -> None:
        live = self._live.get(action.request_id)
        if live is None:
            return
        request = live.request
        self._queue.refused(request, action.retry_after_s, now)
        if live.decision is None:
            view = DecisionView(
                id=request.id, at_s=now, tier=request.tier, tenant=request.tenant, model=request.model,
                policy=self.policy, prompt_tokens=request.prompt_tokens,
            )  # fmt: skip
            live.decision = self._keep(view, now)
        status = "failed" if action.status == 502 else "rejected"
        self._end(live, status, now, f"{action.status} {action.reason}")

    def _first_token(self, event: FirstToken, now: float) -> None:
        live = self._live.get(event.request_id)
        if live is None or live.first_s is not None:
            return
        live.first_s = now
        self._instance(live.instance).first_token(event.request_id)
        held = live.decision
        if held is not None and live.dispatched_s is not None:
            held.view = replace(held.view, ttft_s=now - live.dispatched_s)
            if held.view.forecast_ttft_s:
                error = (held.view.error_s or 0.0) * held.view.forecast_ttft_s / (held.view.forecast_s or 1.0)
                pair = Pair(held.view.forecast_ttft_s, now - live.dispatched_s, error)
                self._instance(live.instance).pairs.append(pair)

    def _progressed(self, event: TokensProgressed, now: float) -> None:
        live = self._live.get(event.request_id)
        if live is not None and event.output_tokens > live.output_tokens:
            self._instance(live.instance).grow(event.output_tokens - live.output_tokens, event.request_id)
            live.output_tokens = event.output_tokens

    def _finished(self, event: RequestFinished, now: float) -> None:
        live = self._live.get(event.request_id)
        if live is None:
            return
        live.output_tokens = event.output_tokens
        prompt = event.prompt_tokens or live.request.prompt_tokens
        self._instance(live.instance).lengths.append((max(1, prompt - (event.cached_tokens or 0)), event.output_tokens))
        self._end(live, "ok", now, prompt_tokens=prompt)

    def _failed(self, event: RequestFailed, now: float) -> None:
        live = self._live.get(event.request_id)
        if live is None:
            return
        if event.retriable:
            # the router's answer, in the same entry, is another dispatch or the end
            self._leave(live)
            live.instance, live.first_s = "", None
            self._queue.add(live.request)
        else:
            self._end(live, "failed", now, event.reason)

    def _cancelled(self, event: RequestCancelled, now: float) -> None:
        live = self._live.get(event.request_id)
        if live is not None:
            self._end(live, "cancelled", now, event.reason)

    def _end(self, live: _Live, status: Any, now: float, reason: str = "", prompt_tokens: int | None = None) -> None:
        request = live.request
        del self._live[request.id]
        self._queue.remove(request, now)
        self._leave(live)
        record = RequestRecord(
            id=request.id, scheduled_s=request.arrival_s, status=status, tier=request.tier, tenant=request.tenant,
            prompt_tokens=prompt_tokens or request.prompt_tokens, output_tokens=live.output_tokens,
            first_token_s=live.first_s if live.first_s is not None or status != "ok" else now, last_token_s=now,
            instance=live.instance,
        )  # fmt: skip
        self._ends.append(End(now, record, reason))
        held = live.decision
        if held is None:
            return
        view = replace(held.view, outcome=status, reason=reason, output_tokens=live.output_tokens)
        if status == "ok" and live.dispatched_s is not None:
            view = settled(view, live.output_tokens, now - live.dispatched_s)
            if view.deviation is not None:
                self._instance(live.instance).deviations.append(abs(view.deviation))
        held.view = view

    def _leave(self, live: _Live) -> None:
        if live.instance:
            self._instance(live.instance).leave(live.request.id)

    def _up(self, event: InstanceUp, now: float) -> None:
        instance = self._instance(event.spec.name)
        if event.generation > instance.generation:
            instance.restarted()
        instance.spec, instance.generation = event.spec, event.generation
        instance.state, instance.reason = "up", ""

    def _down(self, event: InstanceDown, now: float) -> None:
        instance = self._instance(event.instance)
        instance.state, instance.reason = ("draining" if event.drain else "down"), event.reason

    def _gone(self, event: InstanceGone, now: float) -> None:
        instance = self._instance(event.instance)
        instance.state, instance.reason = "down", "removed"
        if not instance.running:
            del self.instances[event.instance]

    def _reported(self, event: InstanceReported, now: float) -> None:
        instance = self._instance(event.instance)
        instance.report, instance.report_s = event.report, event.sampled_s

    def _profile(self, event: ProfileUpdated, now: float) -> None:
        instance = self._instance(event.instance)
        instance.spec = replace(instance.spec, rates=event.rates, step=event.step, error=event.error)

    def _instance(self, name: str) -> ObservedInstance:
        found = self.instances.get(name)
        if found is None:
            found = self.instances[name] = ObservedInstance(name)
        return found

    def _error_of(self, name: str) -> float | None:
        found = self.instances.get(name)
        return found.spec.error if found else None

    # asking

    def snapshot(self, source: str, now_s: float | None = None) -> Snapshot:
        """The fleet at `now_s` (default: the last entry's time); adds a point to the headline's history."""
        now = max(self.now_s, now_s or 0.0)
        window = self.window_s
        if window is not None:
            while self._ends and self._ends[0].at_s < now - window:
                self._ends.popleft()
        start = self.first_s if self.first_s is not None else now
        span = max(1e-9, min(window, max(now - start, 1.0)) if window is not None else now - start)
        tiers = tier_views(self._ends, self.tiers, self._queue)
        made = headline(self._ends, self.tiers, tiers, span, self.instances.values())
        snapshot = Snapshot(
            at_s=now,
            source=source,
            window_s=span,
            policy=self.policy,
            instances=tuple(instance_view(i, now, span) for i in self.instances.values()),
            decisions=tuple(held.view for held in reversed(self._decisions)),
            skipped_decisions=self.skipped_decisions,
            tiers=tiers,
            queued=len(self._queue),
            **made,
        )
        return self.with_history(snapshot)

    def records(self) -> list[RequestRecord]:
        """What ended inside the window, in order of its end."""
        return [end.record for end in self._ends]

    def with_history(self, snapshot: Snapshot) -> Snapshot:
        """Note the headline of `snapshot` and return it with the recent ones."""
        loads = [i.load for i in snapshot.instances if i.load is not None and i.state == "up"]
        point = {
            "attainment": snapshot.attainment,
            "goodput": snapshot.goodput_per_s,
            "shed": snapshot.shed,
            "ttft": snapshot.ttft_p99_s,
            "headroom": 1 - max(loads) if loads else None,
            "error": snapshot.forecast_error,
        }
        for name, value in point.items():
            if value is not None:
                self._rings[name].append(value)
        return replace(snapshot, series=Series(**{k: tuple(v) for k, v in self._rings.items()}))
