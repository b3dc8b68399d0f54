"""One simulation as a value: fleet, workload, policy and seed in, figures out. Values are picklable, for sweeps."""

from __future__ import annotations

import gc
import resource
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, Literal, Protocol

import msgspec

from weighbridge.core.metrics import RequestRecord, Summary, summarise
from weighbridge.core.request import DEFAULT_TIERS, Tier
from weighbridge.routing.router import Router, RouterSettings
from weighbridge.sim.fixed import run_fixed
from weighbridge.sim.fleet import SimulatedFleet
from weighbridge.sim.live import SimulationSettings
from weighbridge.sim.simulation import Simulation
from weighbridge.workload.arrivals import replayed
from weighbridge.workload.readers import read_trace
from weighbridge.workload.streams import Streams
from weighbridge.workload.synthetic import Conversations, Synthetic
from weighbridge.workload.trace import TraceRequest, at_rate


class Workload(Protocol):
    """Requests by seed: the same seed gives the same requests, so that policies can be compared on equal traces."""

    def requests(self, seed: int) -> Iterable[TraceRequest]: ...


@dataclass(frozen=True, slots=True)
class Generated:
    """A synthetic workload cut to a count or a duration."""

    synthetic: Synthetic | Conversations
    count: int | None = None
    duration_s: float | None = None

    def requests(self, seed: int) -> Iterable[TraceRequest]:
        if isinstance(self.synthetic, Conversations):
            assert self.duration_s is not None, "conversations need a duration"
            return self.synthetic.generate(seed, duration_s=self.duration_s)
        return self.synthetic.generate(seed, count=self.count, duration_s=self.duration_s)


@dataclass(frozen=True, slots=True)
class Recorded:
    """A slice of a trace file: the whole, or `length` requests from a place that the seed chooses.

    `rate` stretches time to that many requests per second; `tier` is given to requests without one; lengths are
    clipped to `max_prompt` and `max_output` tokens. With `kind_bins` a request's kind is its prompt-length class.
    """

    path: str
    rate: float | None = None
    length: int | None = None
    tier: str = ""
    max_prompt: int = 8_000
    max_output: int = 3_000
    kind_bins: tuple[int, ...] = ()
    blocks: bool = True
    skip_bad: bool = False

    def requests(self, seed: int) -> Iterable[TraceRequest]:
        whole = _trace(self.path, self.skip_bad)
        part = whole
        if self.length is not None and self.length < len(whole):
            start = Streams(seed).get("slice").randrange(len(whole) - self.length + 1)
            part = whole[start : start + self.length]
        part = [self._clipped(r) for r in part if not r.failed]
        rate = self.rate if self.rate is not None else _rate_of(part)
        return at_rate(part, rate)

    def _clipped(self, r: TraceRequest) -> TraceRequest:
        prompt, output = min(r.prompt_tokens, self.max_prompt), min(r.output_tokens, self.max_output)
        kind = f"p{sum(prompt >= b for b in self.kind_bins)}" if self.kind_bins else r.kind
        blocks = r.blocks[: prompt // r.block_tokens] if self.blocks and r.blocks else ()
        return msgspec.structs.replace(
            r, prompt_tokens=prompt, output_tokens=output, kind=kind, tier=r.tier or self.tier, blocks=blocks
        )


@lru_cache(maxsize=4)
def _trace(path: str, skip_bad: bool = False) -> list[TraceRequest]:
    return read_trace(path, skip_bad=skip_bad).requests


def _rate_of(requests: list[TraceRequest]) -> float:
    span = requests[-1].arrival_s - requests[0].arrival_s
    return len(requests) / span if span > 0 else 1.0


def replayed_bursts(path: str, rate: float) -> Any:
    """An arrival process that repeats the recorded arrival times of a trace file at the rate given."""
    return replayed([r.arrival_s for r in _trace(path)], rate)


@dataclass(frozen=True, slots=True)
class Run:
    """Everything one simulation depends on. `skip` is the share of the arrival time left out as warm-up."""

    fleet: SimulatedFleet
    workload: Workload
    policy: str = "least_tokens"
    seed: int = 1
    tiers: tuple[Tier, ...] = DEFAULT_TIERS
    settings: SimulationSettings = field(default_factory=SimulationSettings)
    options: dict[str, Any] = field(default_factory=dict)
    assign: Literal["router", "fixed"] = "router"
    skip: float = 0.0
    label: str = ""
    router: dict[str, Any] = field(default_factory=dict)
    """Further `RouterSettings` fields."""


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """Figures of one run. `hits` says, request by request after the warm-up, who met its SLO: for paired statistics."""

    policy: str
    seed: int
    label: str
    requests: int
    summary: Summary
    preemptions: int
    steps: int
    simulated_s: float
    cpu_s: float
    requests_per_cpu_s: float
    peak_rss_mb: float
    hits: list[bool] = []


def run(one: Run, **hooks: Any) -> Result:
    """Simulate; hooks go to `Simulation`. CPU time covers generating the requests and simulating, not the summary."""
    result, _ = run_with_records(one, **hooks)
    return result


def run_with_records(one: Run, **hooks: Any) -> tuple[Result, list[RequestRecord]]:
    """As `run`, with the request records."""
    start = time.process_time()
    with few_collections():
        if one.assign == "fixed":
            records, instances = run_fixed(one.fleet, one.workload.requests(one.seed), one.settings.stepping)
        else:
            simulation = make_simulation(one, **hooks)
            records = simulation.run(one.workload.requests(one.seed))
            instances = list(simulation.instances)
    cpu_s = time.process_time() - start
    return figures(one, records, instances, cpu_s), records


@contextmanager
def few_collections() -> Iterator[None]:
    """Let the garbage collector run rarely: a simulation makes many objects and hardly any cycles."""
    thresholds = gc.get_threshold()
    gc.set_threshold(100_000, 20, 100)
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)


def make_simulation(one: Run, **hooks: Any) -> Simulation:
    """The simulation of a run, not started yet."""
    router = {"record_decisions": False, **one.router}
    settings = RouterSettings(policy=one.policy, policy_options=one.options, seed=one.seed, tiers=one.tiers, **router)
    return Simulation(Router(settings), one.fleet, replace(one.settings, seed=one.seed), **hooks)


def figures(one: Run, records: list[RequestRecord], instances: Iterable[Any], cpu_s: float) -> Result:
    """Summarise records, those of the warm-up left out."""
    counted = after_warm_up(records, one.skip)
    tiers = {tier.name: tier for tier in one.tiers}
    summary = summarise(counted, tiers)
    hits = [r.status == "ok" if r.tier not in tiers else r.meets(tiers[r.tier]) for r in counted]
    end = max((r.last_token_s or r.scheduled_s for r in records), default=0.0)
    parts = list(instances)
    return Result(
        policy=one.policy if one.assign == "router" else "fixed",
        seed=one.seed,
        label=one.label,
        requests=len(records),
        summary=summary,
        preemptions=sum(i.preemptions for i in parts),
        steps=sum(i.steps_run for i in parts),
        simulated_s=end,
        cpu_s=cpu_s,
        requests_per_cpu_s=len(records) / cpu_s if cpu_s > 0 else 0.0,
        peak_rss_mb=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024.0,
        hits=hits,
    )


def after_warm_up(records: list[RequestRecord], skip: float) -> list[RequestRecord]:
    """Records of requests that arrived after the first `skip` of the arrival time."""
    if not records or skip <= 0:
        return records
    start, end = records[0].scheduled_s, records[-1].scheduled_s
    return [r for r in records if r.scheduled_s >= start + skip * (end - start)]
