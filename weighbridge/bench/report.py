"""The report of a run as one JSON object: our figures, vLLM's names beside them, and how each was computed."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from weighbridge.bench.load import BEAT_S, LoadResult
from weighbridge.bench.record import BenchRecord
from weighbridge.bench.verdict import Verdict
from weighbridge.core.metrics import PERCENTILES, adjusted, distribution, percentile, summarise
from weighbridge.core.request import Tier

FORMAT = "weighbridge.bench"
VERSION = 1

FORMULAS = {
    "ttft_s": "first generated token of any kind - scheduled arrival",
    "first_content_s": "first visible content - scheduled arrival",
    "tpot_s": "(E2E - TTFT) / (output_tokens - 1), one value per request, ok requests of 2 tokens or more",
    "itl_s": "gap between consecutive tokens; tokens that came in one frame or read are 0 apart; TTFT is no gap",
    "frame_gap_s": "gap between consecutive frames that carry tokens; frames that came in one read are 0 apart",
    "e2e_s": "last token - scheduled arrival, ok requests",
    "attainment": "requests that meet every bound of their tier / all offered requests",
    "goodput_per_s": "requests that meet every bound / seconds of arrivals = attainment * offered rate",
    "adjusted": "percentiles over all offered requests; one that never got there counts as infinite (null)",
    "window_s": "first scheduled arrival of the window until its last token",
    "vllm": "mean_*_ms, median_*_ms, std_*_ms, p99_*_ms: from the moment of sending, ok requests only",
}


def build_report(
    result: LoadResult,
    verdict: Verdict,
    tiers: Mapping[str, Tier],
    provenance: Mapping[str, Any],
    *,
    rate: float | None = None,
    notes: Sequence[str] = (),
) -> dict[str, Any]:
    """Everything known of one run. The steady window is every request that is not marked as warm-up."""
    steady = [r for r in result.records if not r.warmup]
    warmup = [r for r in result.records if r.warmup]
    span = max((r.scheduled_s for r in steady), default=0.0) - min((r.scheduled_s for r in steady), default=0.0)
    summary = msgspec.to_builtins(summarise(steady, tiers))
    report: dict[str, Any] = {
        "format": FORMAT,
        "version": VERSION,
        "verdict": verdict.word,
        "generator": msgspec.to_builtins(verdict),
        "offered_rate": rate if rate is not None and math.isfinite(rate) else _rate(len(steady), span),
        "achieved_rate": summary["by_status"].get("ok", 0) / summary["window_s"] if summary["window_s"] else None,
        **summary,
        "adjusted": adjusted_percentiles(steady),
        "first_content_s": _dist(r.first_content_s - r.scheduled_s for r in steady if r.first_content_s is not None),
        "first_byte_s": _dist(r.first_byte_s - r.scheduled_s for r in steady if r.first_byte_s is not None),
        "frame_gap_s": _dist(result.gaps),
        "itl_s": _itl(result, steady),
        "longest_gap_s": max((r.longest_gap_s for r in steady), default=0.0),
        "boundaries": boundaries(steady),
        "tokens": _tokens(steady),
        "by_tier": {
            tier: msgspec.to_builtins(summarise([r for r in steady if r.tier == tier], tiers))
            for tier in sorted({r.tier for r in steady})
        },
        "warmup": msgspec.to_builtins(summarise(warmup, tiers)) if warmup else None,
        "littles_law": _littles_law(result),
        "errors": _errors(result.records),
        "slo": {name: _bounds(tier) for name, tier in tiers.items() if any(r.tier == name for r in steady)},
        "notes": list(notes),
        "formulas": FORMULAS,
        "provenance": dict(provenance),
        **vllm_keys(result, steady, summary, provenance, rate),
    }
    return report


def _rate(count: int, span: float) -> float | None:
    return (count - 1) / span if span > 0 and count > 1 else None


def _dist(values: Iterable[float]) -> dict[str, float]:
    out: dict[str, float] = msgspec.to_builtins(distribution(values))
    return out


def adjusted_percentiles(records: Sequence[BenchRecord]) -> dict[str, dict[str, float]]:
    return {metric: {f"p{q:g}": adjusted(records, metric, q) for q in PERCENTILES} for metric in ("ttft_s", "e2e_s")}


def _itl(result: LoadResult, records: Sequence[BenchRecord]) -> dict[str, float]:
    """Token gaps: frame gaps, and a zero for every token beyond the first of its frame (known from usage)."""
    hidden = sum(max(0, r.output_tokens - r.frames) for r in records if r.frames)
    gaps = result.gaps if not hidden else [*result.gaps, *([0.0] * hidden)]
    return _dist(gaps)


def boundaries(records: Sequence[BenchRecord]) -> dict[str, Any]:
    """The same requests seen from the client and from the router: where the router tells in its headers.

    `client` is from the scheduled arrival, `wire` from the moment of sending; `router` holds the router's own seconds
    by name; what the engine saw is in the engine's metrics.
    """
    ok = [r for r in records if r.status == "ok" and r.first_token_s is not None and r.sent_s is not None]
    names = sorted({name for r in ok for name, value in r.router.items() if isinstance(value, float)})
    return {
        "client": {"ttft_s": _dist(r.ttft_s for r in ok if r.ttft_s is not None)},
        "wire": {"ttft_s": _dist(r.first_token_s - r.sent_s for r in ok if r.first_token_s and r.sent_s is not None)},
        "router": {name: _dist(v for r in ok if isinstance(v := r.router.get(name), float)) for name in names},
    }


def _tokens(records: Sequence[BenchRecord]) -> dict[str, Any]:
    ok = [r for r in records if r.status == "ok"]
    wanted = sum(r.wanted_prompt_tokens for r in ok)
    return {
        "from_usage": sum(r.tokens_from == "usage" for r in ok),
        "from_frames": sum(r.tokens_from == "frames" for r in ok),
        "prompt": sum(r.prompt_tokens for r in ok),
        "output": sum(r.output_tokens for r in ok),
        "cached": sum(r.cached_tokens for r in ok),
        "frames": sum(r.frames for r in ok),
        "prompt_over_wanted": sum(r.prompt_tokens for r in ok) / wanted if wanted else None,
        "output_exact": sum(r.output_tokens == r.wanted_output_tokens for r in ok) / len(ok) if ok else None,
    }


def _littles_law(result: LoadResult) -> dict[str, float] | None:
    """L sampled every 10 ms against lambda * W from the records; they agree when every request was accounted for."""
    if not result.running or not result.records:
        return None
    horizon = len(result.running) * BEAT_S
    stay = math.fsum(min(r.ended_s or horizon, horizon) - r.scheduled_s for r in result.records)
    return {"sampled": sum(result.running) / len(result.running), "rate_times_stay": stay / horizon}


def _errors(records: Sequence[BenchRecord]) -> dict[str, int]:
    counts: dict[str, int] = {}
    for r in records:
        if r.status != "ok":
            text = f"{r.status}: {r.error}"
            counts[text] = counts.get(text, 0) + 1
    return dict(sorted(counts.items(), key=lambda item: -item[1])[:20])


def _bounds(tier: Tier) -> dict[str, float]:
    return {
        name: value
        for name, value in (("ttft_s", tier.ttft_s), ("tpot_s", tier.tpot_s), ("e2e_s", tier.e2e_s))
        if value is not None
    }


def vllm_keys(
    result: LoadResult,
    records: Sequence[BenchRecord],
    summary: Mapping[str, Any],
    provenance: Mapping[str, Any],
    rate: float | None,
) -> dict[str, Any]:
    """The keys of vLLM's serving benchmark, by vLLM's definitions: from the moment of sending, ok requests only."""
    settings = provenance.get("settings", {})
    ok = [r for r in records if r.status == "ok" and r.sent_s is not None]
    duration = max((r.ended_s or 0.0 for r in records), default=0.0) - min((r.sent_s or 0.0 for r in ok), default=0.0)
    prompt, output = sum(r.prompt_tokens for r in ok), sum(r.output_tokens for r in ok)
    span = duration or math.nan
    out: dict[str, Any] = {
        "date": provenance.get("created"),
        "endpoint_type": settings.get("endpoint"),
        "model_id": settings.get("model"),
        "num_prompts": len(records),
        "request_rate": rate if rate is not None and math.isfinite(rate) else "inf",
        "burstiness": settings.get("burstiness"),
        "max_concurrency": settings.get("max_concurrency"),
        "duration": duration,
        "completed": len(ok),
        "failed": len(records) - len(ok),
        "total_input_tokens": prompt,
        "total_output_tokens": output,
        "request_throughput": len(ok) / span,
        "request_goodput": summary["goodput_per_s"],
        "output_throughput": output / span,
        "total_token_throughput": (prompt + output) / span,
        "max_concurrent_requests": max(result.running, default=0),
    }
    _spread(out, "ttft", [1e3 * (r.first_token_s - r.sent_s) for r in ok if r.first_token_s and r.sent_s is not None])
    _spread(out, "tpot", [1e3 * v for r in ok if (v := r.tpot_s) is not None])
    _spread(out, "itl", [1e3 * g for g in result.gaps])
    _spread(out, "e2el", [1e3 * (r.last_token_s - r.sent_s) for r in ok if r.last_token_s and r.sent_s is not None])
    return out


def _spread(out: dict[str, Any], name: str, values: list[float]) -> None:
    values.sort()
    out[f"mean_{name}_ms"] = math.fsum(values) / len(values) if values else math.nan
    out[f"median_{name}_ms"] = percentile(values, 50.0)
    out[f"std_{name}_ms"] = statistics.pstdev(values) if values else math.nan
    for q in PERCENTILES[1:]:
        out[f"p{q:g}_{name}_ms"] = percentile(values, q)


def encode(report: Mapping[str, Any]) -> bytes:
    """Indented JSON with a newline at the end; NaN and infinity become null."""
    return msgspec.json.format(msgspec.json.encode(report), indent=2) + b"\n"
