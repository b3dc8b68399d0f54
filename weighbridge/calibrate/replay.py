"""Run recorded requests through a simulated instance and keep, for each of them, the work its waiting was spent on.

For a given schedule TTFT and E2E are linear in the coefficients of the cost model: they are sums over the steps (and
the part of the step that was running on arrival) between two moments. That work is what `weighbridge.cost.fit` needs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

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


class Work:
    """Running sums of what steps held; mutable, for one replay."""

    __slots__ = ("attended", "kv", "prefill", "scanned", "sequences")

    def __init__(self, sequences: dict[int, float] | None = None) -> None:
        self.sequences: dict[int, float] = {} if sequences is None else sequences
        self.prefill = self.attended = self.kv = self.scanned = 0.0

    def add(self, batch: Batch, share: float = 1.0) -> None:
        """Count a batch in, or the `share` of it."""
        count = len(batch.decodes)
        self.sequences[count] = self.sequences.get(count, 0.0) + share
        self.prefill += share * batch.prefill_tokens
        self.attended += share * batch.attended_tokens
        self.kv += share * batch.kv_tokens
        self.scanned += share * batch.tokens * batch.context_tokens

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
    scheduler = Scheduler(config)
    done = [Replayed(request, Work()) for request in requests]
    order = sorted(range(len(requests)), key=lambda index: (requests[index].arrival_s, index))
    work = Work()
    now = 0.0
    upcoming = 0
    while upcoming < len(order) or not scheduler.idle:
        if scheduler.idle:
            now = max(now, requests[order[upcoming]].arrival_s + overhead_s)
        while upcoming < len(order) and requests[order[upcoming]].arrival_s + overhead_s <= now:
            _add(scheduler, done[order[upcoming]], order[upcoming], work)
            upcoming += 1
        batch = scheduler.schedule(now)
        if batch is None:
            raise RuntimeError("the scheduler holds sequences that it cannot run: the KV cache is too small")
        end = now + step_seconds(
            terms,
            prefill_tokens=batch.prefill_tokens,
            attended_tokens=batch.attended_tokens,
            sequences=len(batch.decodes),
            kv_tokens=batch.kv_tokens,
            used_cells=batch.context_tokens,
        )
        while upcoming < len(order) and (at := requests[order[upcoming]].arrival_s + overhead_s) < end:
            begun = work.copy()
            begun.add(batch, (at - now) / (end - now))
            _add(scheduler, done[order[upcoming]], order[upcoming], begun)
            upcoming += 1
        work.add(batch)
        now = end
        _book(scheduler, batch, now, work, done)
    return done


def _add(scheduler: Scheduler, replayed: Replayed, index: int, work: Work) -> None:
    replayed.arrived = work.copy()
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


def _book(scheduler: Scheduler, batch: Batch, now: float, work: Work, done: list[Replayed]) -> None:
    completion = scheduler.complete(batch, now)
    for seq in completion.emitted:
        if seq.output_tokens == 1:
            entry = done[int(seq.id)]
            entry.first, entry.first_token_s = work.copy(), now
    for seq in completion.finished:
        entry = done[int(seq.id)]
        entry.last, entry.last_token_s, entry.preemptions = work.copy(), now, seq.preemptions
