"""Text Generation Inference: limits from `/info`, queue and batch from `/metrics`. It refuses fields it does not know.

Written from its documentation; not exercised against a running server here.
"""

from __future__ import annotations

from weighbridge.core.instance import Limits, LoadReport
from weighbridge.gateway.adapters.adapter import Adapter, Facts, Replies, Report, count, json_of, samples, total

QUEUE = "tgi_queue_size"
BATCH = "tgi_batch_current_size"


def report(replies: Replies) -> Report | None:
    """Queue and current batch."""
    metrics = replies.get("/metrics")
    if metrics is None or metrics.status != 200:
        return None
    found = samples(metrics.body, (QUEUE, BATCH))
    return Report(LoadReport(running=count(total(found, BATCH)), waiting=count(total(found, QUEUE))))


def facts(replies: Replies) -> Facts:
    """The one model it serves and its token limits."""
    info = json_of(replies.get("/info"))
    if not isinstance(info, dict):
        return Facts()
    model = info.get("model_id")
    tokens = info.get("max_batch_total_tokens")
    context = info.get("max_total_tokens")
    sequences = info.get("max_concurrent_requests")
    budget = info.get("max_batch_prefill_tokens")
    limits = Limits(
        token_budget=budget if isinstance(budget, int) and budget > 0 else None,
        kv_blocks=tokens // 16 if isinstance(tokens, int) else None,
        max_context=context if isinstance(context, int) else None,
        max_sequences=sequences if isinstance(sequences, int) else None,
    )
    return Facts(
        (model,) if isinstance(model, str) else (),
        limits,
        str(info.get("version") or ""),
        device=str(info.get("model_device_type") or ""),
    )


ADAPTER = Adapter(
    kind="tgi",
    report_paths=("/metrics",),
    report=report,
    facts_paths=("/info",),
    facts=facts,
    endpoints=frozenset({"chat", "completions"}),
)
