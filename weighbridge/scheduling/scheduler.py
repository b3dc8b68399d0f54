"""Continuous batching of one engine: which sequences run, and what the next step computes for them.

Pure: the driver (the embedded engine or the simulator) passes the time in, executes the batch and reports it done.
"""

from __future__ import annotations

import heapq
from bisect import insort
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from weighbridge.scheduling.batch import Batch, Completion, Preemption
from weighbridge.scheduling.block_manager import BlockManager
from weighbridge.scheduling.mixing import MIXERS, Mixing
from weighbridge.scheduling.order import Discipline, WaitingQueue
from weighbridge.scheduling.prefix_cache import PrefixCache
from weighbridge.scheduling.sequence import Sequence, Status


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Limits and strategies of one engine. The defaults are those of a GPU server of vLLM's kind.

    `prefill_rows` is the multiple in which prompts are cut (the last chunk of a prompt may be any size);
    `busy_prefill_tokens` caps prefill per step while anything decodes (None: the token budget is the cap); where `n`
    prompts are computed at the same time, the cap is `n` times that, up to half the token budget.
    `prefill_limit` is where `Scheduler.prefill_limit` starts.
    `preemption` is what happens to a sequence that loses its memory: `swap` keeps its KV in host memory, `auto` takes
    the cheaper by `swap_s_per_token` (out and in again) against `prefill_s_per_token`.
    With `preempt_priority`, a waiting sequence takes the place of a running one of strictly worse priority, but one
    sequence loses its place at most `max_preemptions` times that way.
    `reserve` admits only when prompt and whole output fit, `prompt` when the whole prompt does (newer vLLM; it takes
    the next piece only), `optimistic` when the next piece does.
    """

    token_budget: int = 2048
    max_sequences: int = 256
    block_tokens: int = 16
    blocks: int = 6000
    prefix_caching: bool = False
    mixing: Mixing = "mixed"
    discipline: Discipline = "fcfs"
    ageing_s: float | None = None
    admission: Literal["optimistic", "prompt", "reserve"] = "optimistic"
    preemption: Literal["recompute", "swap", "auto"] = "recompute"
    swap_s_per_token: float = 0.0
    prefill_s_per_token: float = 0.0
    preempt_priority: bool = False
    max_preemptions: int = 3
    prefill_rows: int = 1
    busy_prefill_tokens: int | None = None
    max_waiting: int | None = None
    prefill_limit: int | None = None

    def __post_init__(self) -> None:
        for name in ("token_budget", "max_sequences", "block_tokens", "blocks", "prefill_rows"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1")
        if self.mixing not in MIXERS:
            raise ValueError(f"mixing must be one of {', '.join(MIXERS)}, not {self.mixing!r}")
        if self.mixing in ("mixed", "prefill_first_mixed") and self.token_budget < self.prefill_rows:
            raise ValueError("token_budget must be at least prefill_rows, else no prompt can be cut")
        if self.busy_prefill_tokens is not None and self.busy_prefill_tokens < self.prefill_rows:
            raise ValueError("busy_prefill_tokens must be at least prefill_rows, else no prompt can be cut")


class AddRefused(Exception):
    """The scheduler cannot take a sequence: `reason` is `too_long` (never fits) or `queue_full` (not now)."""

    def __init__(self, reason: Literal["too_long", "queue_full"], message: str) -> None:
        super().__init__(message)
        self.reason = reason


class Scheduler:
    """Decides each step of one engine. Call `schedule`, execute the batch, then `complete` it; nothing overlaps.

    `running` is in order of admission (under `priority`, in order of priority), and memory is taken from its tail.
    """

    def __init__(self, config: SchedulerConfig, prefixes: PrefixCache | None = None) -> None:
        """`prefixes` is for engines whose sequences have real tokens and a KV stream per slot."""
        self.config = config
        self.prefixes = prefixes
        self.memory = BlockManager(config.blocks, config.block_tokens, prefix_caching=config.prefix_caching)
        self.waiting = WaitingQueue(config.discipline, config.ageing_s)
        self.running: list[Sequence] = []
        self.preemptions = 0
        self.prefill_limit = config.prefill_limit  # an engine that knows its speed may lower the prefill of a step
        self._sequences: dict[str | int, Sequence] = {}
        self._free_slots = list(range(config.max_sequences))
        self._in_flight: Batch | None = None
        self._cancelled: list[Sequence] = []

    @property
    def idle(self) -> bool:
        """Nothing runs and nothing waits."""
        return not self._sequences

    @property
    def kv_usage(self) -> float:
        """Share of the blocks that running sequences reference, 0 to 1."""
        return self.memory.used_blocks / self.memory.blocks

    @property
    def prefix_caching(self) -> bool:
        """Whether computed prompts are kept for later sequences."""
        return self.config.prefix_caching or self.prefixes is not None

    def find(self, seq_id: str | int) -> Sequence | None:
        """The live sequence of that id."""
        return self._sequences.get(seq_id)

    def add(self, seq: Sequence) -> None:
        """Queue a new sequence. Raises AddRefused when it can never fit or the queue is full."""
        need = -(-(seq.prompt_tokens + seq.max_output_tokens) // self.config.block_tokens)
        if need > self.config.blocks:
            raise AddRefused("too_long", f"the sequence needs {need} KV blocks and the engine has {self.config.blocks}")
        if self.config.max_waiting is not None and len(self.waiting) >= self.config.max_waiting:
            raise AddRefused("queue_full", f"{len(self.waiting)} sequences wait already")
        if seq.id in self._sequences:
            raise ValueError(f"a sequence with id {seq.id!r} is already here")
        self._sequences[seq.id] = seq
        self.waiting.push(seq)

    def cancel(self, seq_id: str | int, reason: str = "cancelled") -> Sequence | None:
        """End a sequence now; one that the step in flight computes ends with that step. None if it is not here."""
        seq = self._sequences.get(seq_id)
        if seq is None:
            return None
        seq.finish_reason = reason
        if seq.status is Status.WAITING:
            self.waiting.forget(seq)
            del self._sequences[seq_id]
        elif self._in_flight is None:
            self._finish(seq)
            self.running.remove(seq)
        else:
            self._cancelled.append(seq)
        return seq

    def schedule(self, now_s: float) -> Batch | None:
        """The next step, or None when there is nothing to compute."""
        assert self._in_flight is None, "the last batch was not completed"
        if self.prefixes is not None:
            self.prefixes.settled()
        batch = Batch([], [], [], [])
        if self.config.preempt_priority:
            self._preempt_for_priority(batch)
        MIXERS[self.config.mixing](self, batch, now_s)
        if not batch.decodes and not batch.prefills:
            assert not batch.preempted or not self.running, "preempted for nothing"
            return None
        self._in_flight = batch
        return batch

    def complete(self, batch: Batch, now_s: float) -> Completion:
        """Book a whole step as done. Sequences end by `finish_reason` if it is set, or at their output limit."""
        emitted: list[Sequence] = []
        finished: list[Sequence] = []
        self.complete_decodes(batch.decodes, now_s, emitted, finished)
        self.complete_prefills(batch, now_s, emitted, finished)
        return Completion(emitted, finished)

    def complete_decodes(
        self, decodes: Iterable[Sequence], now_s: float, emitted: list[Sequence], finished: list[Sequence]
    ) -> None:
        """Book the decode part alone, for an engine that decodes and prefills in separate calls."""
        for seq in decodes:
            seq.computed_tokens += 1
            seq.steps += 1
            if seq.finish_reason is None or seq.finish_reason == "stop":
                emitted.append(seq)
                seq.output_tokens += 1
                seq.total_tokens += 1
                if seq.output_tokens >= seq.max_output_tokens and seq.finish_reason is None:
                    seq.finish_reason = "length"
            if seq.finish_reason is not None:
                seq.finished_s = now_s
                finished.append(seq)

    def complete_prefills(self, batch: Batch, now_s: float, emitted: list[Sequence], finished: list[Sequence]) -> None:
        """Book the prefill part and close the step. `finished` must hold those that the decode part finished."""
        for seq, _, tokens in batch.prefills:
            seq.computed_tokens += tokens
            seq.steps += 1
            if seq.computed_tokens == seq.total_tokens and (seq.finish_reason is None or seq.finish_reason == "stop"):
                emitted.append(seq)
                seq.output_tokens += 1
                seq.total_tokens += 1
                if seq.first_token_s is None:
                    seq.first_token_s = now_s
                if seq.output_tokens >= seq.max_output_tokens and seq.finish_reason is None:
                    seq.finish_reason = "length"
            if seq.finish_reason is not None:
                seq.finished_s = now_s
                finished.append(seq)
        self._in_flight = None
        for seq in finished:
            self._finish(seq)
        for seq in self._cancelled:  # in flight, but perhaps without a piece of its own in the step
            if seq.status is Status.RUNNING:
                seq.finished_s = now_s
                finished.append(seq)
                self._finish(seq)
        self._cancelled = []
        if finished:
            self.running = [seq for seq in self.running if seq.status is Status.RUNNING]

    def drop(self, seqs: Iterable[Sequence], now_s: float, reason: str = "error") -> None:
        """End sequences of a step that failed, and forget the step; the others run on from where they were."""
        self._in_flight = None
        self._cancelled = []
        for seq in list(seqs):
            if seq.status is Status.RUNNING:
                seq.finish_reason = reason
                seq.finished_s = now_s
                self._finish(seq, keep=False)
        self.running = [seq for seq in self.running if seq.status is Status.RUNNING]

    # The rest is for the mixers.

    def grow(self, seq: Sequence, tokens: int, batch: Batch) -> bool:
        """Make room for the sequence's first `tokens` tokens, preempting from the tail of `running`.

        False when the sequence itself had to give way. Only sequences that `batch` does not hold may stand behind it.
        """
        while not self.memory.grow(seq, tokens):
            victim = self.running[-1]
            self.preempt(victim, batch)
            if victim is seq:
                return False
        return True

    def preempt(self, seq: Sequence, batch: Batch) -> None:
        """Put a running sequence back into the queue, its KV swapped out or dropped."""
        if seq is self.running[-1]:
            self.running.pop()
        else:
            self.running.remove(seq)
        tokens = seq.computed_tokens if self._swap_pays(seq) else 0
        batch.preempted.append(Preemption(seq, tokens, seq.slot))
        seq.swapped_tokens = tokens
        self._release(seq)
        seq.computed_tokens = 0
        seq.preemptions += 1
        seq.status = Status.WAITING
        self.preemptions += 1
        self.waiting.push(seq)

    def admit(self, limit: int, batch: Batch, now_s: float) -> int:
        """Start the head of the queue with at most `limit` tokens of room (all of it under `reserve`).

        Returns the tokens to compute first, cut to the limit; 0 when the head must wait.
        """
        seq = self.waiting.head()
        if seq is None or len(self.running) >= self.config.max_sequences:
            return 0
        if seq.swapped_tokens:
            seq.computed_tokens = seq.swapped_tokens
        if not self._take_room(seq, limit):
            seq.computed_tokens = 0
            return 0
        if self.prefixes is None:
            seq.slot = heapq.heappop(self._free_slots)
        elif not self._place(seq, self.prefixes, batch):
            self.memory.release(seq)
            return 0
        self.waiting.pop()
        seq.status = Status.RUNNING
        if seq.admitted_s is None:
            seq.admitted_s = now_s
            seq.cached_tokens = seq.computed_tokens
        if seq.swapped_tokens:
            seq.swapped_tokens = 0
            batch.restored.append(seq)
        if self.config.discipline == "priority":
            insort(self.running, seq, key=_order_key)
        else:
            self.running.append(seq)
        return min(limit, seq.total_tokens - seq.computed_tokens)

    def _place(self, seq: Sequence, prefixes: PrefixCache, batch: Batch) -> bool:
        """Give the sequence a slot and the prefix that is there for it; False when it should wait for one."""
        if seq.swapped_tokens:
            placement = prefixes.place_restored(seq, self._free_slots)
        else:
            found = prefixes.place(seq, self._free_slots)
            if found is None:
                return False
            placement = found
            seq.computed_tokens = placement.tokens
        seq.slot = placement.slot
        self._free_slots.remove(placement.slot)
        heapq.heapify(self._free_slots)
        batch.placements.append(placement)
        return True

    def _take_room(self, seq: Sequence, limit: int) -> bool:
        reserve = self.config.admission == "reserve"
        whole = seq.prompt_tokens + seq.max_output_tokens
        if seq.swapped_tokens:
            return self.memory.grow(seq, whole if reserve else min(seq.computed_tokens + limit, seq.total_tokens))
        if self.config.admission == "prompt" and not self.memory.has_room(seq, seq.total_tokens):
            return False
        if not self.memory.admit(seq, seq.total_tokens if reserve else limit):
            return False
        if reserve and not self.memory.grow(seq, whole):
            self.memory.release(seq)
            return False
        return True

    def _preempt_for_priority(self, batch: Batch) -> None:
        """Free a slot, or blocks, for waiting sequences of strictly better priority than a running one.

        A running sequence that by ageing stands before the waiting one keeps its place.
        """
        head = self.waiting.head()
        while head is not None:
            first = min(head.total_tokens, self.config.token_budget)
            fits = -(-first // self.config.block_tokens) <= self.memory.free_blocks
            if fits and len(self.running) < self.config.max_sequences:
                return
            victims = [
                seq
                for seq in self.running
                if seq.preemptions < self.config.max_preemptions
                and seq.priority > head.priority
                and seq.order_key > head.order_key
            ]
            if not victims:
                return
            self.preempt(max(victims, key=lambda seq: (seq.priority, seq.order_key)), batch)

    def _swap_pays(self, seq: Sequence) -> bool:
        if self.config.preemption != "auto":
            return self.config.preemption == "swap"
        return 2.0 * self.config.swap_s_per_token < self.config.prefill_s_per_token

    def _release(self, seq: Sequence, *, keep: bool = True) -> None:
        self.memory.release(seq)
        if seq.slot >= 0:
            if self.prefixes is not None:
                if keep:
                    self.prefixes.release(seq.slot, seq)
                else:
                    self.prefixes.discard(seq.slot)
            heapq.heappush(self._free_slots, seq.slot)
            seq.slot = -1

    def _finish(self, seq: Sequence, *, keep: bool = True) -> None:
        seq.status = Status.FINISHED
        self._release(seq, keep=keep)
        del self._sequences[seq.id]


def _order_key(seq: Sequence) -> tuple[float, float, int]:
    return seq.order_key
