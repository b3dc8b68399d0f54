"""The smallest fleet that holds an SLO on a workload, found by simulating candidates over seeds.

Candidates run the real router and policies in virtual time. Each seed puts the trace's five-minute pieces into another
order, at the trace's own mean rate, so that fleets are compared on the same traffic in different sequences. A size
holds when its mean attainment over the seeds reaches the target; the answer is checked on fresh seeds, and so is one
instance fewer.
"""

from __future__ import annotations

import math
import multiprocessing
import os
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from functools import lru_cache

import msgspec

from weighbridge.core.errors import ConfigError
from weighbridge.core.instance import Role, StepTerms
from weighbridge.core.request import Tier
from weighbridge.cost.step import attended_tokens, step_seconds
from weighbridge.plan.stability import demand_of, stability
from weighbridge.scheduling.scheduler import SchedulerConfig
from weighbridge.sim.fleet import SimulatedFleet, SimulatedInstance
from weighbridge.sim.runs import Result, Run, run
from weighbridge.sim.sweep import Spread, spread
from weighbridge.workload.readers import read_trace
from weighbridge.workload.streams import Streams
from weighbridge.workload.trace import TraceRequest, at_rate

PIECE_S = 300.0
CHECK_SEED = 1000
WARM_SHARE = 0.05


@dataclass(frozen=True, slots=True)
class Device:
    """One kind of instance: its costs, limits, and price per hour (any currency; 0 = not known)."""

    name: str
    terms: StepTerms
    scheduler: SchedulerConfig
    price_per_hour: float = 0.0


@dataclass(frozen=True, slots=True)
class Slot:
    """A place in a fleet's composition: so many of `device` in `role`."""

    device: Device
    role: Role = "mixed"

    @property
    def label(self) -> str:
        """How reports name it."""
        return self.device.name if self.role == "mixed" else f"{self.device.name}/{self.role}"


Composition = tuple[int, ...]
"""Counts, one for each slot of the question."""


@dataclass(frozen=True, slots=True)
class Reordered:
    """A trace with its pieces in an order that the seed chooses, stretched to `rate`; `count` requests at most."""

    path: str
    rate: float
    count: int
    tier: str = "standard"

    def requests(self, seed: int) -> Iterable[TraceRequest]:
        """The requests of this seed, in arrival order from time 0."""
        pieces = list(_pieces(self.path))
        Streams(seed).get("pieces").shuffle(pieces)
        out: list[TraceRequest] = []
        offset = 0.0
        for piece in pieces:
            start = piece[0].arrival_s
            out += [msgspec.structs.replace(r, arrival_s=offset + r.arrival_s - start, tier=self.tier) for r in piece]
            offset += PIECE_S if len(piece) > 1 else 0.0
            if len(out) >= self.count:
                break
        return at_rate(out[: self.count], self.rate)


@lru_cache(maxsize=4)
def _pieces(path: str) -> tuple[tuple[TraceRequest, ...], ...]:
    """The trace cut into pieces of five minutes, without a last one of less than half that length."""
    pieces: dict[int, list[TraceRequest]] = {}
    requests = usable(path)
    for r in requests:
        pieces.setdefault(int(r.arrival_s // PIECE_S), []).append(r)
    last = max(pieces)
    if len(pieces) > 1 and requests[-1].arrival_s - last * PIECE_S < PIECE_S / 2:
        del pieces[last]
    return tuple(tuple(piece) for _, piece in sorted(pieces.items()))


@lru_cache(maxsize=4)
def usable(path: str) -> tuple[TraceRequest, ...]:
    """The answered requests of a trace."""
    return tuple(r for r in read_trace(path).requests if not r.failed)


@dataclass(frozen=True, slots=True)
class Question:
    """What is asked: hold `tier`'s bounds for a share `attainment` of `workload`, with instances of `slots`."""

    workload: Reordered
    slots: tuple[Slot, ...]
    tier: Tier
    attainment: float = 0.95
    policies: tuple[str, ...] = ("calibrated", "round_robin")
    seeds: int = 3
    max_instances: int = 256
    seconds: float = 110.0
    jobs: int | None = None

    @property
    def disaggregated(self) -> bool:
        """Prefill and decode on instances of their own."""
        return any(slot.role != "mixed" for slot in self.slots)


@dataclass(frozen=True, slots=True)
class Trial:
    """One composition under one policy, over seeds."""

    policy: str
    composition: Composition
    attainment: Spread
    ttft_p99_s: float
    tpot_p99_s: float
    shed_rate: float
    output_tokens_per_s: float

    @property
    def size(self) -> int:
        """Instances in all."""
        return sum(self.composition)


@dataclass(slots=True)
class Answer:
    """What was found for one policy. `best` is None when nothing up to the largest size holds (see `note`)."""

    policy: str
    best: Trial | None = None
    check: Trial | None = None
    one_fewer: Trial | None = None
    tried: list[Trial] = field(default_factory=list)
    note: str = ""


class OutOfTime(Exception):
    """The time that was granted is over."""


class Bench:
    """Simulates candidates, keeps every result, and watches the time."""

    def __init__(self, question: Question, progress: Callable[[str], None] | None = None) -> None:
        self.question = question
        self.results: dict[tuple[str, Composition, int], Result] = {}
        self._progress = progress
        self._pool: ProcessPoolExecutor | None = None
        self._deadline = time.monotonic() + question.seconds

    def trial(self, policy: str, composition: Composition, seeds: Sequence[int] | None = None) -> Trial:
        """One candidate; results of earlier calls are used again."""
        return self.trials([(policy, composition)], seeds)[0]

    def trials(self, wanted: Sequence[tuple[str, Composition]], seeds: Sequence[int] | None = None) -> list[Trial]:
        """Several candidates at once, on all processors. Raises `OutOfTime` before a run that would begin too late."""
        seeds = list(seeds) if seeds is not None else list(range(1, self.question.seeds + 1))
        missing = [(p, c, s) for p, c in wanted for s in seeds if (p, c, s) not in self.results]
        if missing:
            if time.monotonic() > self._deadline:
                raise OutOfTime
            if self._progress is not None:
                self._progress("simulating " + ", ".join(f"{p} x {'+'.join(map(str, c))}" for p, c in wanted))
            runs = [self._run(policy, composition, seed) for policy, composition, seed in missing]
            for key, result in zip(missing, self._all(runs), strict=True):
                self.results[key] = result
        return [_trial(p, c, [self.results[p, c, s] for s in seeds]) for p, c in wanted]

    def holds(self, trial: Trial) -> bool:
        """Whether the mean reaches the target."""
        return trial.attainment.mean >= self.question.attainment

    def close(self) -> None:
        """End the worker processes."""
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
            self._pool = None

    def _all(self, runs: list[Run]) -> Iterable[Result]:
        """Results in order; the worker processes live as long as the bench, for starting one costs a second."""
        jobs = self.question.jobs or os.cpu_count() or 1
        if jobs == 1:
            return map(run, runs)
        if self._pool is None:
            self._pool = ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn"))
        return self._pool.map(run, runs)

    def _run(self, policy: str, composition: Composition, seed: int) -> Run:
        question = self.question
        return Run(
            fleet=make_fleet(question.slots, composition),
            workload=question.workload,
            policy=policy,
            seed=seed,
            tiers=(question.tier,),
            skip=WARM_SHARE,
        )


def make_fleet(slots: Sequence[Slot], composition: Composition) -> SimulatedFleet:
    """The simulated fleet of a composition."""
    instances = []
    for slot, count in zip(slots, composition, strict=True):
        pool = "default" if slot.role == "mixed" else slot.role
        instances += [
            SimulatedInstance(
                f"{slot.label.replace('/', '-')}{k}", slot.device.terms, slot.device.scheduler, slot.role, pool=pool
            )
            for k in range(count)
        ]
    return SimulatedFleet(tuple(instances))


def _trial(policy: str, composition: Composition, results: Sequence[Result]) -> Trial:
    def mean(pick: Callable[[Result], float]) -> float:
        return math.fsum(pick(r) for r in results) / len(results)

    return Trial(
        policy=policy,
        composition=composition,
        attainment=spread(r.summary.attainment for r in results),
        ttft_p99_s=mean(lambda r: r.summary.ttft_s.p99),
        tpot_p99_s=mean(lambda r: r.summary.tpot_s.p99),
        shed_rate=mean(lambda r: r.summary.shed_rate),
        output_tokens_per_s=mean(lambda r: r.summary.output_tokens_per_s),
    )


def best_case(question: Question) -> float:
    """Share of requests that would meet the SLO alone on an idle instance of the fastest kind: no fleet does better.

    Without a prefix cache; with one and a trace that has blocks, this is only a lower estimate, so 1 is returned.
    """
    tier = question.tier
    requests = usable(question.workload.path)
    if any(s.device.scheduler.prefix_caching for s in question.slots) and any(r.blocks for r in requests[:100]):
        return 1.0
    share = 0.0
    for slot in question.slots:
        terms, budget = slot.device.terms, slot.device.scheduler.token_budget
        met = sum(_alone(r, terms, budget, tier) for r in requests)
        share = max(share, met / len(requests))
    return share


def _alone(r: TraceRequest, terms: StepTerms, budget: int, tier: Tier) -> bool:
    steps = -(-r.prompt_tokens // budget)
    ttft = (steps - 1) * terms.base_s + step_seconds(
        terms, prefill_tokens=r.prompt_tokens, attended_tokens=attended_tokens(0, r.prompt_tokens)
    )
    if tier.ttft_s is not None and ttft > tier.ttft_s:
        return False
    each = step_seconds(terms, sequences=1, kv_tokens=r.prompt_tokens + r.output_tokens // 2)
    if tier.tpot_s is not None and r.output_tokens > 1 and each > tier.tpot_s:
        return False
    return tier.e2e_s is None or ttft + each * (r.output_tokens - 1) <= tier.e2e_s


def stable_size(question: Question, slot: Slot) -> int:
    """Instances of one kind below which the queue would grow for ever (prefix hits not counted)."""
    config = slot.device.scheduler
    requests = usable(question.workload.path)
    demand = demand_of(((r.prompt_tokens, r.output_tokens) for r in requests), config.token_budget)
    found = stability(
        question.workload.rate,
        demand,
        slot.device.terms,
        token_budget=config.token_budget,
        kv_tokens=config.blocks * config.block_tokens if config.blocks else None,
        max_sequences=config.max_sequences,
    )
    return max(1, math.ceil(question.workload.rate / found.max_rate))


def search(question: Question, progress: Callable[[str], None] | None = None) -> tuple[list[Answer], Bench]:
    """The answer for every policy, and the bench with all results. Raises `ConfigError` for an impossible question."""
    if not 0.0 < question.attainment <= 1.0:
        raise ConfigError(f"must lie above 0 and up to 1, not {question.attainment:g}", source="--attainment")
    bench = Bench(question, progress)
    answers = [Answer(policy) for policy in question.policies]
    ceiling = best_case(question)
    if ceiling < question.attainment:
        for answer in answers:
            answer.note = (
                f"no fleet of these instances can hold it: alone on an idle one, only {100 * ceiling:.1f} % of the "
                "requests meet the SLO; relax it, or use faster instances"
            )
        return answers, bench
    try:
        for answer in answers:
            _find_in_time(bench, answer)
    finally:
        bench.close()
    return answers, bench


def _find_in_time(bench: Bench, answer: Answer) -> None:
    from weighbridge.plan.search import find

    try:
        find(bench, answer)
    except OutOfTime:
        holding = [trial for trial in answer.tried if bench.holds(trial)]
        if answer.best is None and holding:
            answer.best = min(holding, key=lambda trial: trial.size)
        answer.note = (
            f"stopped after {bench.question.seconds:.0f} s; the answer is the best found so far (see --seconds)"
        )


def with_growth(question: Question, factor: float) -> Question:
    """The same question at `factor` times the rate."""
    return replace(question, workload=replace(question.workload, rate=question.workload.rate * factor))
