"""How a step is filled: which of decodes, running prefills and waiting sequences go in, and in which order.

Each mixer is a function of the scheduler that fills one batch. `mixed` is what today's servers do; `split` is the
embedded engine's; the others exist to show by experiment what they cost.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Literal

from weighbridge.scheduling.batch import Batch
from weighbridge.scheduling.sequence import Sequence

if TYPE_CHECKING:
    from weighbridge.scheduling.scheduler import Scheduler, SchedulerConfig

_MOST_ASIDE = 32  # sequences that may let others by in one step
Mixing = Literal["mixed", "split", "whole", "prefill_first", "prefill_first_mixed", "decode_first", "request_level"]


def mixed(scheduler: Scheduler, batch: Batch, now_s: float) -> None:
    """One token budget: running sequences in order, then waiting ones; prompts are cut (vLLM, Sarathi-Serve).

    After a preemption nothing is admitted in the same step.
    """
    running = scheduler.running
    block_tokens = scheduler.config.block_tokens
    budget = scheduler.config.token_budget
    preempted = len(batch.preempted)
    index = 0
    while index < len(running) and budget > 0:
        seq = running[index]
        computed = seq.computed_tokens
        rest = count = seq.total_tokens - computed
        if count > budget:
            count = budget
        if (computed + count > seq.blocks * block_tokens or seq.block_hashes is not None) and not scheduler.grow(
            seq, computed + count, batch
        ):
            break
        if rest == 1 and computed >= seq.prompt_tokens:
            batch.decodes.append(seq)
            batch.kv_tokens += computed
            batch.context_tokens += computed
        else:
            batch.add_prefill(seq, count)
        budget -= count
        index += 1
    if len(batch.preempted) == preempted:
        _admit_chunks(scheduler, batch, budget, now_s)


def split(scheduler: Scheduler, batch: Batch, now_s: float) -> None:
    """Decodes, then prefill with a budget of its own, cut in multiples of `prefill_rows`.

    Every waiting sequence that finds a slot and room for its whole prompt starts at once, so that the discipline
    orders prefill among all of them: a short prompt need not wait for a long one to finish.
    """
    config = scheduler.config
    preempted = len(batch.preempted)
    _add_decodes(scheduler, batch, config.max_sequences)
    if len(batch.preempted) == preempted or not batch.decodes:
        _admit_all(scheduler, batch, now_s)
    prefills = [seq for seq in scheduler.running if not seq.decoding]
    for seq in prefills:
        seq.together = seq.together or len(prefills)
    if config.discipline == "spf":
        prefills.sort(key=_remaining)
    restored = [seq for seq in batch.restored if seq.decoding]
    for seq in restored:
        if scheduler.memory.grow(seq, seq.computed_tokens + 1):
            batch.add_decode(seq)
    budget = min(config.token_budget, scheduler.prefill_limit or config.token_budget)
    if batch.decodes and config.busy_prefill_tokens is not None:
        budget = min(budget, _busy_budget(config, max((seq.together for seq in prefills), default=1)))
    # In a burst a prompt's last few tokens go along: alone they would cost a step of everybody's time.
    burst = any(seq.together > 1 for seq in prefills)
    over = min(config.prefill_rows // 4, config.token_budget - budget) if burst else 0
    for seq in prefills:
        if budget <= 0:
            break
        count = _cut(seq, budget, config.prefill_rows, over)
        if count and scheduler.memory.grow(seq, seq.computed_tokens + count):
            batch.add_prefill(seq, count)
            budget -= count
    if not batch.decodes and not batch.prefills and scheduler.running:
        _break_deadlock(scheduler, batch)


def _busy_budget(config: SchedulerConfig, together: int) -> int:
    """Prefill beside decodes: its base for each prompt of a burst, up to half of the token budget.

    Every step with prefill also has a decode pass, which all prompts that wait pay for, and which is the dearer per
    token the fewer sequences decode yet. The last prompt of a burst is computed in the burst's pieces too.
    """
    assert config.busy_prefill_tokens is not None
    base = config.busy_prefill_tokens
    return min(base * together, max(base, config.token_budget // 2))


def whole(scheduler: Scheduler, batch: Batch, now_s: float) -> None:
    """Decodes and whole prompts in one step; a prompt longer than the budget goes alone with the decodes (Orca)."""
    preempted = len(batch.preempted)
    _add_decodes(scheduler, batch, scheduler.config.max_sequences)
    if len(batch.preempted) == preempted:
        _admit_whole(scheduler, batch, scheduler.config.token_budget - len(batch.decodes), now_s)


def prefill_first(scheduler: Scheduler, batch: Batch, now_s: float) -> None:
    """Whole prompts alone while any can start, else decodes alone (vLLM before chunked prefill): decodes may starve."""
    _admit_whole(scheduler, batch, scheduler.config.token_budget, now_s)
    if not batch.prefills:
        _add_decodes(scheduler, batch, scheduler.config.max_sequences)


def prefill_first_mixed(scheduler: Scheduler, batch: Batch, now_s: float) -> None:
    """One budget like `mixed`, but prefill takes from it first and decodes get what is left."""
    budget = scheduler.config.token_budget
    for seq in [seq for seq in scheduler.running if not seq.decoding]:
        count = _cut(seq, budget, scheduler.config.prefill_rows)
        if count and scheduler.memory.grow(seq, seq.computed_tokens + count):
            batch.add_prefill(seq, count)
            budget -= count
    budget = _admit_chunks(scheduler, batch, budget, now_s)
    if budget > 0:
        _add_decodes(scheduler, batch, budget)
    if not batch.decodes and not batch.prefills and scheduler.running:
        _break_deadlock(scheduler, batch)


def decode_first(scheduler: Scheduler, batch: Batch, now_s: float) -> None:
    """Decodes alone while any sequence decodes; prefill only when none does."""
    _add_decodes(scheduler, batch, scheduler.config.max_sequences)
    if not batch.decodes:
        _admit_whole(scheduler, batch, scheduler.config.token_budget, now_s)


def request_level(scheduler: Scheduler, batch: Batch, now_s: float) -> None:
    """A batch of requests runs to its end before the next one starts (FasterTransformer)."""
    if not scheduler.running:
        _admit_whole(scheduler, batch, scheduler.config.token_budget, now_s)
    else:
        _add_decodes(scheduler, batch, scheduler.config.max_sequences)
        if not batch.decodes and not scheduler.running:
            _admit_whole(scheduler, batch, scheduler.config.token_budget, now_s)


MIXERS: Mapping[Mixing, Callable[[Scheduler, Batch, float], None]] = {
    "mixed": mixed,
    "split": split,
    "whole": whole,
    "prefill_first": prefill_first,
    "prefill_first_mixed": prefill_first_mixed,
    "decode_first": decode_first,
    "request_level": request_level,
}


def _add_decodes(scheduler: Scheduler, batch: Batch, limit: int) -> None:
    """Put decoding sequences in, in running order; memory comes from the tail, which is never in the batch yet."""
    planned = {id(piece.seq) for piece in batch.prefills} | {id(seq) for seq in batch.decodes}
    running = scheduler.running
    index = 0
    while index < len(running) and len(batch.decodes) < limit:
        seq = running[index]
        if seq.decoding and id(seq) not in planned:
            need = seq.computed_tokens + 1
            fits = scheduler.memory.grow(seq, need) if planned else scheduler.grow(seq, need, batch)
            if fits:
                batch.add_decode(seq)
            elif not planned:
                return
        index += 1


def _admit_chunks(scheduler: Scheduler, batch: Batch, budget: int, now_s: float) -> int:
    """Start waiting sequences with what the budget leaves; returns what is left of it."""
    rows = scheduler.config.prefill_rows
    while budget > 0 and (head := scheduler.waiting.head()) is not None:
        limit = budget if budget >= head.total_tokens else budget // rows * rows
        count = scheduler.admit(limit, batch, now_s) if limit else 0
        if not count:
            break
        _add_piece(batch, head, count)
        budget -= count
    return budget


def _admit_all(scheduler: Scheduler, batch: Batch, now_s: float) -> None:
    """Start every waiting sequence that finds a slot; those that wait for a prefix of a running one let others by."""
    aside: list[Sequence] = []
    while (head := scheduler.waiting.head()) is not None and len(aside) < _MOST_ASIDE:
        if scheduler.admit(head.total_tokens, batch, now_s):
            continue
        if scheduler.prefixes is None or len(scheduler.running) >= scheduler.config.max_sequences:
            break
        aside.append(scheduler.waiting.pop())
    for seq in aside:
        scheduler.waiting.push(seq)


def _admit_whole(scheduler: Scheduler, batch: Batch, budget: int, now_s: float) -> None:
    """Start waiting sequences whose whole prompt fits the budget; a longer one may start if it is the first."""
    while (head := scheduler.waiting.head()) is not None:
        need = head.total_tokens - head.swapped_tokens
        if need > budget and batch.prefills:
            break
        count = scheduler.admit(head.total_tokens, batch, now_s)
        if not count:
            break
        _add_piece(batch, head, count)
        budget -= count


def _add_piece(batch: Batch, seq: Sequence, count: int) -> None:
    if seq.decoding:
        batch.add_decode(seq)
    else:
        batch.add_prefill(seq, count)


def _cut(seq: Sequence, budget: int, rows: int, over: int = 0) -> int:
    """Prefill tokens of the sequence that fit the budget: the rest of its prompt, or a multiple of `rows`.

    The rest may take `over` tokens more than the budget.
    """
    rest = seq.total_tokens - seq.computed_tokens
    return rest if rest <= budget + over else budget // rows * rows


def _break_deadlock(scheduler: Scheduler, batch: Batch) -> None:
    """All memory is held and nobody can grow: the head of `running` takes from the tail."""
    seq = scheduler.running[0]
    rest = min(seq.total_tokens - seq.computed_tokens, scheduler.config.token_budget)
    if scheduler.grow(seq, seq.computed_tokens + rest, batch):
        _add_piece(batch, seq, rest)


def _remaining(seq: Sequence) -> int:
    return seq.total_tokens - seq.computed_tokens
