"""What one step computes, and the counts from which a cost model predicts its seconds."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from weighbridge.scheduling.prefix_cache import Placement
from weighbridge.scheduling.sequence import Sequence


class Piece(NamedTuple):
    """`tokens` tokens of one sequence from position `start`: a prefill chunk, or what a recompute repeats."""

    seq: Sequence
    start: int
    tokens: int


class Preemption(NamedTuple):
    """A running sequence put back into the queue. By swap its `tokens` KV tokens stay in host memory, else 0."""

    seq: Sequence
    tokens: int
    slot: int


@dataclass(slots=True)
class Batch:
    """One step. `decodes` compute one token each at position `computed_tokens`; `prefills` are chunks.

    Order of work for an engine: save `preempted` swaps, carry out `placements` (only with a prefix cache over slots),
    swap `restored` back in, then the forward pass.
    `attended_tokens` (A of the cost model) sums over prefill tokens the context that each attends to, itself
    included; `kv_tokens` (K) sums the computed tokens of decoding sequences; `context_tokens` sums the computed
    tokens of all sequences of the step, prefilling ones included.
    """

    decodes: list[Sequence]
    prefills: list[Piece]
    preempted: list[Preemption]
    restored: list[Sequence]
    placements: list[Placement] = field(default_factory=list)
    prefill_tokens: int = 0
    attended_tokens: int = 0
    kv_tokens: int = 0
    context_tokens: int = 0

    @property
    def decode_sequences(self) -> int:
        """S of the cost model."""
        return len(self.decodes)

    @property
    def sequences(self) -> int:
        """All sequences that the step computes for."""
        return len(self.decodes) + len(self.prefills)

    @property
    def tokens(self) -> int:
        """Tokens computed by the step."""
        return len(self.decodes) + self.prefill_tokens

    def add_decode(self, seq: Sequence) -> None:
        """Count one decode token of the sequence in."""
        self.decodes.append(seq)
        self.kv_tokens += seq.computed_tokens
        self.context_tokens += seq.computed_tokens

    def add_prefill(self, seq: Sequence, count: int) -> None:
        """Count a chunk of the sequence in, from its first token that is not computed."""
        start = seq.computed_tokens
        self.prefills.append(Piece(seq, start, count))
        self.prefill_tokens += count
        self.attended_tokens += count * start + count * (count + 1) // 2
        self.context_tokens += start


class Completion(NamedTuple):
    """What a finished step brought: sequences that gained one output token, and those that ended with it."""

    emitted: list[Sequence]
    finished: list[Sequence]
