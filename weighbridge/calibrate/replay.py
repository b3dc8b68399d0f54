"""Run recorded requests through a simulated instance and keep, for each of them, the work its waiting was spent on.

For a given schedule TTFT and E2E are linear in the coefficients of the cost model: they are sums over the steps (and
the part of the step that was running on arrival) between two moments. That work is what `weighbridge.cost.fit` needs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from weighbridge.core.instance import StepTerms
from weighbridge.cost.fit import Observation
from weighbridge.cost.step import step_seconds
from weighbridge.scheduling.batch import Batch
from weighbridge.scheduling.scheduler import Scheduler, SchedulerConfig
from weighbridge.scheduling.sequence import Sequence as EngineSequence


@dataclass(frozen=True, slots=True)
class RecordedRequest:
    """One request of a recorded run; seconds on one clock. `output_tokens` counts the first token too."""

    id: str
    arrival_s: float
    first_token_s: float
    last_token_s: float
    prompt_tokens: int
    output_tokens: int

    @property
    def ttft_s(self) -> float:
        return self.first_token_s - self.arrival_s

    @property
    def e2e_s(self) -> float:
        return self.last_token_s - self.arrival_s

    @property
    def tpot_s(self) -> float | None:
        """None for a single token."""
        if self.output_tokens < 2:
            return None
        return (self.last_token_s - self.first_token_s) / (self.output_tokens - 1)


class Pass(NamedTuple):
    """What one forward pass holds. A step is one pass, or two in an engine that decodes and prefills apart."""

    sequences: int
    prefill_tokens: int
    attended_tokens: int
    kv_tokens: int
    used_cells: int

    @property
    def scanned_tokens(self) -> int:
        """T*C of the cost model."""
        return (self.sequences + self.prefill_tokens) * self.used_cells

    def seconds(self, terms: StepTerms) -> float:
        return step_seconds(
            terms,
            prefill_tokens=self.prefill_tokens,
            attended_tokens=self.attended_tokens,
            sequences=self.sequences,
            kv_tokens=self.kv_tokens,
            used_cells=self.used_cells,
        )


class Work:
    """Running sums of what steps held; mutable, for one replay."""

    __slots__ = ("attended", "kv", "prefill", "scanned", "sequences")

    def __init__(self, sequences: dict[int, float] | None = None) -> None:
        self.sequences: dict[int, float] = {} if sequences is None else sequences
        self.prefill = self.attended = self.kv = self.scanned = 0.0

    def add(self, held: Pass, share: float = 1.0) -> None:
        """Count a forward pass in, or the `share` of it."""
        self.sequences[held.sequences] = self.sequences.get(held.sequences, 0.0) + share
        self.prefill += share * held.prefill_tokens
        self.attended += share * held.attended_tokens
        self.kv += share * held.kv_tokens
        self.scanned += share * held.scanned_tokens

    def copy(self) -> Work:
        twin = Work(dict(self.sequences))
        twin.prefill, twin.attended, twin.kv, twin.scanned = self.prefill, self.attended, self.kv, self.scanned
        return twin

    def since(self, start: Work, seconds: float, metric: str, requests: float = 0.0) -> Observation:
        """The work between two moments as an observation of `seconds`."""
        sequences = {
            count: steps - start.sequences.get(count, 0.0)
            for count, steps in self.sequences.items()
            if steps - start.sequences.get(count, 0.0) > 1e-9
        }
        return Observation(
            seconds=seconds,
            sequences=sequences or {0: 0.0},
            prefill_tokens=max(0.0, self.prefill - start.prefill),
            attended_tokens=max(0.0, self.attended - start.attended),
            kv_tokens=max(0.0, self.kv - start.kv),
            scanned_tokens=max(0.0, self.scanned - start.scanned),
            requests=requests,
            metric=metric,
        )


@dataclass(slots=True)
class Replayed:
    """One request after a replay: simulated moments in seconds, and the work up to each."""

    request: RecordedRequest
    arrived: Work
    first: Work | None = None
    last: Work | None = None
    first_token_s: float = 0.0
    last_token_s: float = 0.0
    preemptions: int = 0

    @property
    def ttft_s(self) -> float:
        return self.first_token_s - self.request.arrival_s

    @property
    def e2e_s(self) -> float:
        return self.last_token_s - self.request.arrival_s

    @property
    def tpot_s(self) -> float | None:
        """None for a single token."""
        if self.request.output_tokens < 2:
            return None
        return (self.last_token_s - self.first_token_s) / (self.request.output_tokens - 1)

    def observations(self, *, overhead: bool) -> list[Observation]:
        """What was observed of this request, on the work that the replay gave it."""
        assert self.first is not None and self.last is not None
        found = []
        fixed = 1.0 if overhead else 0.0
        if self.request.ttft_s > 0:
            found.append(self.first.since(self.arrived, self.request.ttft_s, "ttft_s", fixed))
        if self.request.output_tokens > 1 and self.request.last_token_s > self.request.first_token_s:
            decode_s = self.request.last_token_s - self.request.first_token_s
            found.append(self.last.since(self.first, decode_s, "tpot_s"))
            found.append(self.last.since(self.arrived, self.request.e2e_s, "e2e_s", fixed))
        return found


def replay(
    requests: Sequence[RecordedRequest], terms: StepTerms, config: SchedulerConfig, *, overhead_s: float = 0.0
) -> list[Replayed]:
    """Replay in order of arrival; the result has the order of `requests`.

    `overhead_s` is spent before a request reaches the scheduler (HTTP, tokenisation).
    """
    return _Replay(requests, terms, config, overhead_s).run()


class _Replay:
    def __init__(
        self, requests: Sequence[RecordedRequest], terms: StepTerms, config: SchedulerConfig, overhead_s: float
    ) -> None:
        self.scheduler = Scheduler(config)
        self.terms = terms
        self.done = [Replayed(request, Work()) for request in requests]
        order = sorted(range(len(requests)), key=lambda index: (requests[index].arrival_s, index))
        self.arrivals = [(requests[index].arrival_s + overhead_s, index) for index in order]
        self.upcoming = 0
        self.work = Work()
        self.now = 0.0

    def run(self) -> list[Replayed]:
        while self.upcoming < len(self.arrivals) or not self.scheduler.idle:
            if self.scheduler.idle:
                self.now = max(self.now, self.arrivals[self.upcoming][0])
            self._admit_until(self.now, None)
            batch = self.scheduler.schedule(self.now)
            if batch is None:
                raise RuntimeError("the scheduler holds sequences that it cannot run: the KV cache is too small")
            emitted: list[EngineSequence] = []
            finished: list[EngineSequence] = []
            if self.scheduler.config.mixing == "split":
                self._split_step(batch, emitted, finished)
            else:
                self._pass(_whole(batch))
                completion = self.scheduler.complete(batch, self.now)
                self._book(completion.emitted, completion.finished)
        return self.done

    def _split_step(self, batch: Batch, emitted: list[EngineSequence], finished: list[EngineSequence]) -> None:
        """Decodes are computed and given out before the prefill pass begins."""
        if batch.decodes:
            self._pass(Pass(len(batch.decodes), 0, 0, batch.kv_tokens, batch.kv_tokens))
            self.scheduler.complete_decodes(batch.decodes, self.now, emitted, finished)
            self._book(emitted, finished)
        decoded, ended = len(emitted), len(finished)
        if batch.prefills:
            cells = batch.context_tokens - batch.kv_tokens
            self._pass(Pass(0, batch.prefill_tokens, batch.attended_tokens, 0, cells))
        self.scheduler.complete_prefills(batch, self.now, emitted, finished)
        self._book(emitted[decoded:], finished[ended:])

    def _pass(self, held: Pass) -> None:
        """Let one forward pass take its time; requests that come meanwhile queue."""
        end = self.now + held.seconds(self.terms)
        self._admit_until(end, held)
        self.work.add(held)
        self.now = end

    def _admit_until(self, end: float, held: Pass | None) -> None:
        """Queue what arrives before `end`, or until now when nothing is being computed."""
        while self.upcoming < len(self.arrivals):
            at, index = self.arrivals[self.upcoming]
            if at >= end if held is not None else at > end:
                return
            begun = self.work.copy()
            if held is not None and end > self.now:
                begun.add(held, max(0.0, at - self.now) / (end - self.now))
            _add(self.scheduler, self.done[index], index, begun)
            self.upcoming += 1

    def _book(self, emitted: Sequence[EngineSequence], finished: Sequence[EngineSequence]) -> None:
        for seq in emitted:
            if seq.output_tokens == 1:
                entry = self.done[int(seq.id)]
                entry.first, entry.first_token_s = self.work.copy(), self.now
        for seq in finished:
            entry = self.done[int(seq.id)]
            entry.last, entry.last_token_s, entry.preemptions = self.work.copy(), self.now, seq.preemptions


def _whole(batch: Batch) -> Pass:
    return Pass(len(batch.decodes), batch.prefill_tokens, batch.attended_tokens, batch.kv_tokens, batch.context_tokens)


def _add(scheduler: Scheduler, replayed: Replayed, index: int, work: Work) -> None:
    replayed.arrived = work
    request = replayed.request
    scheduler.add(
        EngineSequence(
            index,
            request.prompt_tokens,
            request.output_tokens,
            request.arrival_s,
            block_hashes=_own_blocks(scheduler.config, request, index),
        )
    )


def _own_blocks(config: SchedulerConfig, request: RecordedRequest, index: int) -> range | None:
    """Hashes that only this request has: with a prefix cache, it finds its own blocks again after a preemption."""
    if not config.prefix_caching:
        return None
    blocks = (request.prompt_tokens + request.output_tokens) // config.block_tokens
    return range(index << 20, (index << 20) + blocks)
