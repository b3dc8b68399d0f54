"""The virtual-time driver: feeds the real `Router` the events a gateway would, and carries out its actions.

One heap of `(time, priority, sequence, ...)`; at equal times the priority decides, steps ending last. The router sees
its own events and late reports, nothing else: the true output length stays in the `Job`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from heapq import heappop, heappush
from typing import IO, Any

import msgspec

from weighbridge.core.actions import Abort, Action, Dispatch, Preempt, Reject
from weighbridge.core.event_log import Header, encode_entry, encode_header
from weighbridge.core.events import (
    Event,
    FirstToken,
    InstanceUp,
    PrefillFinished,
    RequestArrived,
    RequestCancelled,
    RequestDispatched,
    RequestFailed,
    RequestFinished,
)
from weighbridge.core.metrics import RequestRecord
from weighbridge.routing.router import Router
from weighbridge.sim.cost_runner import CostRunner
from weighbridge.sim.faults import Faults
from weighbridge.sim.feed import ARRIVAL, CANCEL, FAULT, STEP, TRANSFER, Feed
from weighbridge.sim.fleet import SimulatedFleet
from weighbridge.sim.instance import SimInstance, make_instance
from weighbridge.sim.job import FIRST_TOKEN, Job, StepSpan
from weighbridge.sim.live import Live, SimulationSettings, Stages, arrived
from weighbridge.sim.stepwise import StepwiseInstance
from weighbridge.workload.streams import Streams
from weighbridge.workload.trace import TraceRequest


class Simulation:
    """One run. Give it a router, a fleet and requests in arrival order; `run` returns one record per request."""

    def __init__(
        self,
        router: Router,
        fleet: SimulatedFleet,
        settings: SimulationSettings | None = None,
        *,
        log: IO[bytes] | None = None,
        on_step: Callable[[SimInstance, StepSpan], None] | None = None,
        on_arrival: Callable[[int, float], None] | None = None,
        keep_stages: bool = False,
        warm: tuple[int, ...] = (),
    ) -> None:
        self.router = router
        self.fleet = fleet
        self.settings = settings or SimulationSettings()
        self.records: list[RequestRecord] = []
        self.stages: dict[str, Stages] = {}
        self._log = log
        self._on_arrival = on_arrival
        self._keep_stages = keep_stages
        self._warm = warm
        streams = Streams(self.settings.seed)
        self._oracle_rng = streams.get("oracle")
        self.instances: list[SimInstance] = [
            make_instance(
                one.name,
                one.scheduler,
                CostRunner(
                    one.terms,
                    disturbance=one.disturbance,
                    token_budget=one.scheduler.token_budget,
                    rng=streams.get(f"steps/{one.name}"),
                ),
                self.settings.stepping,
                preemptible=bool(one.preemption),
            )
            for one in fleet.instances
        ]
        for instance in self.instances:
            instance.on_step = on_step
        self.specs = [one.spec() for one in fleet.instances]
        self.index = {one.name: k for k, one in enumerate(fleet.instances)}
        self.up = [one.name not in fleet.absent for one in fleet.instances]
        self.generation = [0] * len(self.instances)
        self._pushed = [0] * len(self.instances)
        self._link_free = [0.0] * len(self.instances)
        self._heap: list[tuple[Any, ...]] = []
        self._count = itertools.count()
        self.live: dict[str, Live] = {}
        self._arrivals: Iterator[TraceRequest] = iter(())
        self._more = True
        self._in_transfer = 0
        self._last_move_s = 0.0
        self._faults = Faults(self)
        self._feed = Feed(self, streams.get("reports"))

    # -- the loop --

    def run(self, requests: Iterable[TraceRequest]) -> list[RequestRecord]:
        """Simulate until every request has ended; may be called once. Requests marked failed are left out.

        `records` fills up as requests arrive, so after an interrupt it holds what was done so far.
        """
        if self._log is not None:
            self._log.write(encode_header(Header(source="simulator", router=msgspec.to_builtins(self.router.settings))))
        for k, spec in enumerate(self.specs):
            if self.up[k]:
                self.tell(InstanceUp(spec=spec, generation=0), 0.0)
                if self._warm:
                    self._warm_up(k)
        self._arrivals = (r for r in requests if not r.failed)
        self._next_arrival()
        for fault in self.fleet.faults:
            self.push(fault.at_s, FAULT, fault)
        self._feed.start()
        handlers = (
            self._arrive,
            self._faults.happen,
            self._transferred,
            self._leave,
            self._feed.report,
            self._feed.progress,
            self._feed.tick,
        )
        heap, instances = self._heap, self.instances
        while heap:
            now, priority, _, what = heappop(heap)
            if priority == STEP:
                index, version = what
                if instances[index].version == version:
                    self._step(index, now)
                continue
            handlers[priority](what, now)
            if not self._more and not self.live:
                break
            if now - self._last_move_s > self.settings.stall_s:
                break
        return self.records

    def _warm_up(self, index: int) -> None:
        """Let the instance have served the warm prefix before time 0, by way of this router."""
        instance = self.instances[index]
        tokens = len(self._warm) * instance.config.block_tokens + 1
        instance.add(Job("warm", tokens, 1, hashes=self._warm), -1e6)
        while instance.wake_s != math.inf:
            instance.advance(instance.wake_s)
        self.router.fleet.instances[instance.name].prefix.insert(self._warm)

    def push(self, at_s: float, priority: int, what: Any) -> None:
        heappush(self._heap, (at_s, priority, next(self._count), what))

    def sync(self, index: int) -> None:
        """Put the instance's next wake-up on the heap when it has changed."""
        instance = self.instances[index]
        version = instance.version
        if version != self._pushed[index]:
            self._pushed[index] = version
            wake = instance.wake_s
            if wake != math.inf:
                heappush(self._heap, (wake, STEP, next(self._count), (index, version)))

    def tell(self, event: Event, now: float) -> None:
        """One call of the router, logged, and its actions carried out."""
        actions = self.router.handle(event, now)
        if self._log is not None:
            self._log.write(encode_entry(now, event, actions))
        for action in actions:
            self._act(action, now)

    def tell_all(self, events: Sequence[Event], now: float) -> None:
        """Several events at once, in order."""
        if self._log is not None:
            for event in events:
                self.tell(event, now)
            return
        handle = self.router.handle
        for event in events:
            for action in handle(event, now):
                self._act(action, now)

    def _act(self, action: Action, now: float) -> None:
        if type(action) is Dispatch:
            self._dispatch(action, now)
        elif type(action) is Reject:
            live = self.live.pop(action.request_id, None)
            if live is not None:
                live.record.status = "rejected" if action.status != 502 else "failed"
                live.record.error = action.reason
                self._last_move_s = now
        elif type(action) is Abort:
            self._abort(action, now)
        elif type(action) is Preempt:
            live = self.live.get(action.request_id)
            instance = self.instances[index := self.index[action.instance]]
            if live is not None and live.job is not None and isinstance(instance, StepwiseInstance):
                instance.preempt(live.job, action.mode, now)
                self.sync(index)

    # -- requests --

    def _next_arrival(self) -> None:
        request = next(self._arrivals, None)
        if request is None:
            self._more = False
        else:
            heappush(self._heap, (request.arrival_s, ARRIVAL, next(self._count), request))

    def _arrive(self, trace: TraceRequest, now: float) -> None:
        number = len(self.records)
        live = arrived(trace, f"r{number}", self.settings, self._oracle_rng)
        name = live.request.id
        if self._keep_stages:
            live.stages = self.stages[name] = Stages(now)
        self.records.append(live.record)
        self.live[name] = live
        self._last_move_s = now
        if self._on_arrival is not None:
            self._on_arrival(number, now)
        if self.settings.patience_s is not None:
            self.push(now + self.settings.patience_s, CANCEL, name)
        self._next_arrival()
        self.tell(RequestArrived(request=live.request), now)

    def _dispatch(self, action: Dispatch, now: float) -> None:
        live = self.live.get(action.request_id)
        if live is None:
            return
        self._last_move_s = now
        index = self.index[action.instance]
        live.record.attempts = action.attempt
        if action.leg == "decode":
            live.decode = index
            self.tell(RequestDispatched(request_id=action.request_id), now)
            if live.state == "handoff":
                self._transfer(live, now)
        elif action.leg == "whole":
            live.state = "running"
            self._start_job(live, index, live.output_tokens, action, now)
        else:
            live.prefill, live.decode = index, -1
            if action.leg == "both":
                assert action.prefill_instance is not None, "leg both names a prefill instance"
                live.prefill, live.decode = self.index[action.prefill_instance], index
            live.state = "prefill"
            self._start_job(live, live.prefill, 1, action, now)

    def _start_job(self, live: Live, index: int, output: int, action: Dispatch | None, now: float) -> None:
        request, record = live.request, live.record
        if action is not None and action.max_tokens is not None and live.state == "running":
            output = min(output, action.max_tokens)
        transferred = live.state == "transfer"
        job = Job(
            request.id,
            request.prompt_tokens,
            output,
            live,
            ready_tokens=request.prompt_tokens - 1 if transferred else 0,
            keeps_blocks=live.state == "prefill",
            priority=action.priority or 0 if action is not None else 0,
            tenant=request.tenant,
            hashes=request.prefix_hashes,
        )
        if transferred:
            live.state = "running"
        live.job, live.index = job, index
        record.instance = self.instances[index].name
        stages = live.stages
        if stages is not None:
            if live.state == "prefill" or not transferred:
                stages.dispatched = now
            if transferred:
                stages.decode_added = now
        if not self.up[index]:
            self.fail(live, index, "connection refused", now)
            return
        instance = self.instances[index]
        if not instance.add(job, now):
            self.fail(live, index, "the request does not fit the engine", now, retriable=False)
            return
        self.sync(index)
        if not transferred:
            self.tell(RequestDispatched(request_id=request.id), now)

    def fail(self, live: Live, index: int, reason: str, now: float, *, retriable: bool = True) -> None:
        live.job, live.state = None, "held"
        live.prefill = live.decode = -1
        retriable = retriable and live.record.first_token_s is None
        if not retriable:
            live.record.status = "failed"
            live.record.error = reason
            del self.live[live.request.id]
        self._last_move_s = now
        self.tell(
            RequestFailed(
                request_id=live.request.id, instance=self.instances[index].name, reason=reason, retriable=retriable
            ),
            now,
        )

    def _abort(self, action: Abort, now: float) -> None:
        live = self.live.get(action.request_id)
        if live is None or live.job is None:
            return
        index, job = live.index, live.job
        self.instances[index].cancel(job, now)
        self.sync(index)
        self._release_kv(live, now)
        self.fail(live, index, action.reason, now)

    def _leave(self, name: str, now: float) -> None:
        """The client's patience is over."""
        live = self.live.get(name)
        if live is None or live.record.first_token_s is not None:
            return
        if live.job is not None:
            self.instances[live.index].cancel(live.job, now)
            self.sync(live.index)
        self._release_kv(live, now)
        live.record.status = "cancelled"
        del self.live[name]
        self.tell(RequestCancelled(request_id=name), now)

    # -- instances --

    def _step(self, index: int, now: float) -> None:
        outcomes = self.instances[index].advance(now)
        self.sync(index)
        for kind, job in outcomes:
            live: Live = job.owner
            if live.job is not job:
                continue  # it was aborted meanwhile
            if live.state == "prefill":
                if kind is not FIRST_TOKEN:
                    self._prefilled(live, job, now)
            elif kind is FIRST_TOKEN:
                live.record.first_token_s = now
                if live.stages is not None:
                    live.stages.first_token = now
                self.tell(FirstToken(request_id=job.id), now)
            else:
                record = live.record
                record.status = "ok"
                record.last_token_s = now
                record.output_tokens = job.output_tokens
                record.cached_tokens += job.cached_tokens
                record.preemptions += job.preemptions
                del self.live[job.id]
                live.job = None  # no cycle is left for the garbage collector
                self._last_move_s = now
                self.tell(
                    RequestFinished(
                        request_id=job.id,
                        output_tokens=job.output_tokens,
                        prompt_tokens=job.prompt_tokens,
                        cached_tokens=record.cached_tokens,
                    ),
                    now,
                )

    def _prefilled(self, live: Live, job: Job, now: float) -> None:
        """The prompt is computed; its KV stays on the prefill instance until it has been transferred."""
        live.state = "handoff"
        live.record.cached_tokens += job.cached_tokens
        live.record.preemptions += job.preemptions
        if live.stages is not None:
            live.stages.prefilled = now
        self.tell(PrefillFinished(request_id=job.id, cached_tokens=job.cached_tokens), now)
        if live.state == "handoff" and live.decode >= 0 and live.request.id in self.live:
            self._transfer(live, now)

    def _transfer(self, live: Live, now: float) -> None:
        live.state = "transfer"
        link = self.fleet.instances[live.decode].link or self.fleet.link
        start = max(now, self._link_free[live.decode])
        self._link_free[live.decode] = start + link.seconds(live.request.prompt_tokens)
        if live.stages is not None:
            live.stages.transfer_started = start
        self.push(self._link_free[live.decode] + link.latency_s, TRANSFER, (live, live.job, live.decode))

    def _transferred(self, what: tuple[Live, Job, int], now: float) -> None:
        live, job, target = what
        if live.job is not job or live.state != "transfer":
            return
        self._release_kv(live, now)
        self._start_job(live, target, live.output_tokens, None, now)

    def _release_kv(self, live: Live, now: float) -> None:
        """Give up the KV that a prefill instance holds for a request, if it still does."""
        job = live.job
        if live.prefill >= 0 and job is not None and job.keeps_blocks and live.state in ("handoff", "transfer"):
            self.instances[live.prefill].end_lease(job.blocks, now)
            self.sync(live.prefill)
            job.keeps_blocks = False
