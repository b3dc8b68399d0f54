"""What a rewritten model loses and gains against its source: perplexity, agreement of the next token, and speed.

Both models read the same text with the same batch shapes, so that every difference is the weights'. Perplexity is
exp(mean negative log-likelihood) over the second half of each window, where the context is at least half a window.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from weighbridge.engine.model import LlamaModel
from weighbridge.engine.runner import LlamaRunner, Rows, RunnerOptions
from weighbridge.engine.sampling import Logits

WINDOW = 512
_ROWS = 64  # rows scored at a time: their logits are as many vocabularies of float64
_SLOTS = 8


@dataclass(frozen=True, slots=True)
class Agreement:
    """`kl` is the mean KL divergence of the rewritten from the source's next-token distribution, in nats; `same_top`
    the share of positions with the same most likely token; both over `tokens` positions."""

    source_perplexity: float
    perplexity: float
    kl: float
    same_top: float
    tokens: int


@dataclass(frozen=True, slots=True)
class Speed:
    """Tokens per second: prefill of one prompt, and decode with eight sequences in one batch."""

    prefill: float
    decode: float


def compare(
    source: LlamaModel,
    rewritten: LlamaModel,
    text: str,
    windows: int = 4,
    window_tokens: int = WINDOW,
    threads: int = 1,
    progress: Callable[[float], None] | None = None,
) -> Agreement:
    """Read the first `windows` windows of a text with both models; they must share a vocabulary.

    `window_tokens` must be a multiple of 128, and the text at least one window long.
    """
    tokens = source.tokenize(text)[: windows * window_tokens]
    options = RunnerOptions(slots=1, context_tokens=window_tokens, threads=threads)
    runners = [LlamaRunner(source, options), LlamaRunner(rewritten, options)]
    losses: list[list[float]] = [[], []]
    divergences: list[float] = []
    same: list[bool] = []
    try:
        for begin in range(0, len(tokens) - window_tokens + 1, window_tokens):
            window = tokens[begin : begin + window_tokens]
            for start in range(0, window_tokens, _ROWS):
                piece = window[start : start + _ROWS]
                ours, theirs = (_log_softmax(runner.score(0, piece, start)) for runner in runners)
                following = window[start + 1 : start + 1 + _ROWS]
                rows = np.arange(len(following))
                if start >= window_tokens // 2:
                    for kept, scores in zip(losses, (ours, theirs), strict=True):
                        kept.extend((-scores[rows, following]).tolist())
                    divergences.extend((np.exp(ours) * (ours - theirs)).sum(axis=1).tolist())
                    same.extend((ours.argmax(axis=1) == theirs.argmax(axis=1)).tolist())
                if progress is not None:
                    progress((begin + start + _ROWS) / len(tokens))
            for runner in runners:
                runner.trim(0, 0)
    finally:
        for runner in runners:
            runner.close()
    return Agreement(
        source_perplexity=float(np.exp(np.mean(losses[0]))),
        perplexity=float(np.exp(np.mean(losses[1]))),
        kl=float(np.mean(divergences)),
        same_top=float(np.mean(same)),
        tokens=len(same),
    )


def measure_speed(model: LlamaModel, threads: int = 1, steps: int = 8) -> Speed:
    """Time a prefill of 256 tokens and some steps of eight decodes at that context; the best of two and of `steps`."""
    runner = LlamaRunner(model, RunnerOptions(slots=_SLOTS, context_tokens=WINDOW, threads=threads))
    prompt = [model.bos if model.bos >= 0 else 0] * 256
    prefills, decodes = [], []
    try:
        for _ in range(2):
            runner.trim(0, 0)
            begun = time.perf_counter()
            runner.prefill([Rows(0, prompt, 0, True)])
            prefills.append(time.perf_counter() - begun)
        for slot in range(1, _SLOTS):
            runner.copy(0, slot, len(prompt))
        for step in range(steps):
            begun = time.perf_counter()
            runner.decode(range(_SLOTS), prompt[:_SLOTS], [len(prompt) + step] * _SLOTS)
            decodes.append(time.perf_counter() - begun)
    finally:
        runner.close()
    return Speed(len(prompt) / min(prefills), _SLOTS / min(decodes))


def reading_text() -> str:
    """Some English prose and code that every Python has: its own reference manual."""
    from pydoc_data.topics import topics

    return "\n".join(topics[name] for name in sorted(topics))


def _log_softmax(logits: Logits) -> NDArray[np.float64]:
    shifted = logits.astype(np.float64)
    shifted -= shifted.max(axis=1, keepdims=True)
    shifted -= np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    return shifted
