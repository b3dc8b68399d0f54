"""SGLang: `/v1/loads` (older releases: `/get_load`), limits from `/server_info`, priority where it is switched on.

Written from its documentation and peers' sources; not exercised against a running server here.
"""

from __future__ import annotations

from typing import Any

from weighbridge.core.instance import Limits, LoadReport
from weighbridge.gateway.adapters.adapter import Adapter, Facts, Replies, Report, json_of, listed_models

LOADS = "/v1/loads?include=core"


def report(replies: Replies) -> Report | None:
    """Sums over data-parallel ranks; KV usage of the fullest."""
    value = json_of(replies.get(LOADS))
    rows = value.get("loads") if isinstance(value, dict) else None
    if isinstance(rows, list) and rows:
        ranks = [r for r in rows if isinstance(r, dict)]
        usages = [r["token_usage"] for r in ranks if isinstance(r.get("token_usage"), int | float)]
        rates = [r["gen_throughput"] for r in ranks if isinstance(r.get("gen_throughput"), int | float)]
        return Report(
            LoadReport(
                running=_sum(ranks, "num_running_reqs"),
                waiting=_sum(ranks, "num_waiting_reqs"),
                waiting_tokens=_sum(ranks, "num_waiting_uncached_tokens"),
                kv_usage=max(usages) if usages else None,
                generation_tokens_per_s=sum(rates) if rates else None,
            )
        )
    old = json_of(replies.get("/get_load"))
    if isinstance(old, list) and old:
        ranks = [r for r in old if isinstance(r, dict)]
        requests, waiting = _sum(ranks, "num_reqs"), _sum(ranks, "num_waiting_reqs")
        running = None if requests is None else max(0, requests - (waiting or 0))
        return Report(LoadReport(running=running, waiting=waiting))
    return None


def _sum(rows: list[dict[str, Any]], name: str) -> int | None:
    values = [r[name] for r in rows if isinstance(r.get(name), int)]
    return sum(values) if values else None


def facts(replies: Replies) -> Facts:
    """Models, context, KV tokens and the largest batch."""
    known = listed_models(replies)
    info = json_of(replies.get("/server_info")) or json_of(replies.get("/get_server_info"))
    if not isinstance(info, dict):
        return known
    page = info.get("page_size")
    page = page if isinstance(page, int) and page > 0 else 1
    tokens = info.get("max_total_num_tokens")
    context = info.get("context_length") or known.limits.max_context
    sequences = info.get("max_running_requests")
    budget = info.get("chunked_prefill_size")
    limits = Limits(
        token_budget=budget if isinstance(budget, int) and budget > 0 else None,
        block_size=page,
        kv_blocks=tokens // page if isinstance(tokens, int) else None,
        max_context=context if isinstance(context, int) else None,
        max_sequences=sequences if isinstance(sequences, int) and sequences > 0 else None,
        prefix_caching=not info.get("disable_radix_cache"),
    )
    quantisation = str(info.get("quantization") or "")
    return Facts(known.models, limits, str(info.get("version") or ""), quantisation=quantisation)


ADAPTER = Adapter(
    kind="sglang",
    report_paths=(LOADS, "/get_load"),
    report=report,
    facts_paths=("/v1/models", "/server_info", "/get_server_info"),
    facts=facts,
    transfers=("bootstrap",),
    endpoints=frozenset({"chat", "completions", "embeddings", "rerank", "score", "responses"}),
)
