"""What a trace is like: rate, burstiness, lengths, spread, and the prefix hits that a cache of some size would see."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import numpy as np

from weighbridge.workload.trace import TraceRequest

WINDOWS_S = (1.0, 10.0, 60.0)
CACHE_TOKENS = (100_000, 500_000, 2_000_000, 10_000_000)
_QUANTILES = (0.5, 0.9, 0.95, 0.99)


def describe(requests: Sequence[TraceRequest], cache_tokens: Sequence[int] = CACHE_TOKENS) -> dict[str, Any]:
    """Figures of a trace in arrival order, ready for JSON.

    `interarrival_cv` is the coefficient of variation of the gaps; `dispersion` the index of dispersion of counts
    (variance / mean) by window, 1 for Poisson; `heterogeneity` the standard deviation of the logarithm of lengths.
    """
    times = np.array([r.arrival_s for r in requests])
    gaps = np.diff(times)
    span = float(times[-1] - times[0]) if len(times) > 1 else 0.0
    answered = [r for r in requests if not r.failed]
    prompts = np.array([r.prompt_tokens for r in requests], dtype=float)
    outputs = np.array([r.output_tokens for r in answered], dtype=float)
    mean_gap = float(gaps.mean()) if len(gaps) else 0.0
    return {
        "requests": len(requests),
        "failed": len(requests) - len(answered),
        "duration_s": span,
        "rate": len(gaps) / span if span > 0 else 0.0,
        "interarrival_cv": float(gaps.std() / mean_gap) if mean_gap > 0 else 0.0,
        "dispersion": {f"{window:g}_s": _dispersion(times, window) for window in WINDOWS_S},
        "prompt_tokens": _lengths(prompts),
        "output_tokens": _lengths(outputs),
        "heterogeneity": {"prompt": _log_spread(prompts), "output": _log_spread(outputs)},
        "tokens_per_s": float((prompts.sum() + outputs.sum()) / span) if span > 0 else 0.0,
        "kinds": _shares(r.kind for r in requests),
        "tiers": _shares(r.tier for r in requests),
        "tenants": len({r.tenant for r in requests}),
        "sessions": len({r.session for r in requests if r.session}),
        "prefix": prefix_reuse(requests, cache_tokens),
    }


def _lengths(values: np.ndarray) -> dict[str, float]:
    if not len(values):
        return {}
    out = {"mean": float(values.mean()), "min": float(values.min()), "max": float(values.max())}
    out.update({f"p{100 * q:g}": float(np.quantile(values, q)) for q in _QUANTILES})
    return out


def _log_spread(values: np.ndarray) -> float:
    positive = values[values > 0]
    return float(np.log(positive).std()) if len(positive) else 0.0


def _dispersion(times: np.ndarray, window_s: float) -> float | None:
    """Variance / mean of the counts in whole windows; None with fewer than 10 of them."""
    windows = int((times[-1] - times[0]) // window_s) if len(times) else 0
    if windows < 10:
        return None
    edges = times[0] + window_s * np.arange(windows + 1)
    counts, _ = np.histogram(times, edges)
    mean = counts.mean()
    return float(counts.var() / mean) if mean > 0 else None


def _shares(names: Any) -> dict[str, float]:
    counts: dict[str, int] = {}
    total = 0
    for name in names:
        counts[name] = counts.get(name, 0) + 1
        total += 1
    return {name: count / total for name, count in sorted(counts.items()) if name}


def prefix_reuse(requests: Sequence[TraceRequest], cache_tokens: Sequence[int]) -> dict[str, Any]:
    """Share of prefix blocks found in one least-recently-used cache, without bound and by its size in tokens."""
    with_blocks = [r for r in requests if r.blocks]
    if not with_blocks:
        return {}
    size = with_blocks[0].block_tokens
    total = sum(len(r.blocks) for r in with_blocks)
    return {
        "block_tokens": size,
        "blocks": total,
        "unlimited": _hits(with_blocks, None) / total,
        "by_cache_tokens": {str(tokens): _hits(with_blocks, tokens // size) / total for tokens in cache_tokens},
    }


def _hits(requests: Sequence[TraceRequest], capacity: int | None) -> int:
    """Leading blocks found present, in an LRU cache of `capacity` blocks (None = no bound)."""
    cache: OrderedDict[int, None] = OrderedDict()
    hits = 0
    for request in requests:
        leading = True
        for block in request.blocks:
            if block in cache:
                hits += leading
                cache.move_to_end(block)
            else:
                leading = False
                cache[block] = None
        if capacity is not None:
            while len(cache) > capacity:
                cache.popitem(last=False)
    return hits
