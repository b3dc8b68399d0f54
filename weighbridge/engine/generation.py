"""One request inside the engine: what was asked, how far it is, and what it gives out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from weighbridge.engine.sampling import Sampler, SamplingParams, TokenLogprob
from weighbridge.engine.text import TextStream
from weighbridge.scheduling.prefix_cache import Saved
from weighbridge.scheduling.sequence import Sequence


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """What is asked of the engine: token ids in, at most `max_tokens` tokens out.

    `arrival_s` is on `time.monotonic`. `namespace` keeps prefix caches apart; `priority` is vLLM's: lower is earlier.
    `kv` is KV bytes of the first `kv_tokens` prompt tokens, computed elsewhere; with `hold` the last Output carries
    the KV of the prompt (prefill/decode disaggregation).
    """

    id: str
    tokens: list[int]
    max_tokens: int
    arrival_s: float
    sampling: SamplingParams = field(default_factory=SamplingParams)
    stops: tuple[str, ...] = ()
    stop_tokens: frozenset[int] = frozenset()
    ignore_eos: bool = False
    include_stop: bool = False
    skip_special: bool = True
    priority: int = 0
    tenant: str = ""
    namespace: str = ""
    grammar: str | None = None
    kv: memoryview | None = None
    kv_tokens: int = 0
    kv_s: float = 0.0
    hold: bool = False


@dataclass(frozen=True, slots=True)
class FinalStats:
    """How a request went: seconds from arrival to first work, to first token, to the end, and what it took."""

    queue_s: float
    prefill_s: float
    decode_s: float
    steps: int
    preemptions: int
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    finish_reason: str
    transfer_bytes: int = 0
    transfer_s: float = 0.0

    @property
    def e2e_s(self) -> float:
        """Arrival to end."""
        return self.queue_s + self.prefill_s + self.decode_s


class Output(NamedTuple):
    """What one step gave a request. The last one has a `finish_reason`: stop, length, cancelled, overloaded
    (refused: the queue is full) or error."""

    text: str
    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    stats: FinalStats | None = None
    error: str | None = None
    kv: NDArray[np.uint8] | None = None


Sink = Callable[[Output], None]


@dataclass(slots=True)
class Generation:
    """A request at work; only the engine's own thread touches it."""

    request: GenerationRequest
    seq: Sequence
    sampler: Sampler
    text: TextStream
    sink: Sink
    logprobs: tuple[TokenLogprob, ...] = ()
    stop_reason: str | int | None = None
    first_token_s: float | None = None
    last_token_s: float = 0.0
    error: str | None = None
    imported: Saved | None = None

    def stats(self, now_s: float) -> FinalStats:
        """Final stats as of now."""
        seq = self.seq
        admitted = seq.admitted_s if seq.admitted_s is not None else now_s
        first = self.first_token_s if self.first_token_s is not None else now_s
        return FinalStats(
            queue_s=max(0.0, admitted - self.request.arrival_s),
            prefill_s=max(0.0, first - admitted),
            decode_s=max(0.0, now_s - first),
            steps=seq.steps,
            preemptions=seq.preemptions,
            prompt_tokens=seq.prompt_tokens,
            cached_tokens=seq.cached_tokens,
            output_tokens=seq.output_tokens,
            finish_reason=seq.finish_reason or "error",
            transfer_bytes=len(self.request.kv or b""),
            transfer_s=self.request.kv_s,
        )
