"""llama.cpp's server: slots from `/props`, load from `/slots` and, where it is switched on, `/metrics`.

It has no KV gauge and ignores fields that it does not know. A whole (not streamed) reply is generated to its end after
its client has left, a stream ends at once: so it is always asked for a stream.
"""

from __future__ import annotations

from weighbridge.core.instance import Limits, LoadReport
from weighbridge.gateway.adapters.adapter import (
    Adapter,
    Facts,
    Replies,
    Report,
    count,
    json_of,
    model_entries,
    model_ids,
    samples,
    total,
)

PROCESSING = "llamacpp:requests_processing"
DEFERRED = "llamacpp:requests_deferred"
BATCH_ROWS = 2048
"""Its default `--batch-size`, which it does not tell."""


def report(replies: Replies) -> Report | None:
    """Running and waiting requests; KV usage from the slots' tokens where the server shows its slots."""
    slots = json_of(replies.get("/slots"))
    metrics = replies.get("/metrics")
    running = waiting = None
    started_s = None
    if metrics is not None and metrics.status == 200:
        found = samples(metrics.body, (PROCESSING, DEFERRED))
        running, waiting = count(total(found, PROCESSING)), count(total(found, DEFERRED))
        start = metrics.header(b"process-start-time-unix")
        started_s = float(start) if start and start.isdigit() else None
    usage = None
    if isinstance(slots, list):
        rows = [s for s in slots if isinstance(s, dict)]
        if running is None:
            running = sum(1 for s in rows if s.get("is_processing"))
        capacity = sum(s.get("n_ctx") or 0 for s in rows)
        used = sum(_used(s) for s in rows if s.get("is_processing"))
        usage = min(used / capacity, 1.0) if capacity else None
    if running is None and waiting is None:
        return None
    return Report(LoadReport(running=running, waiting=waiting, kv_usage=usage), started_s)


def _used(slot: dict[str, object]) -> int:
    prompt = slot.get("n_prompt_tokens")
    after = slot.get("next_token")
    decoded = 0
    if isinstance(after, list):
        decoded = sum(t.get("n_decoded") or 0 for t in after if isinstance(t, dict))
    return (prompt if isinstance(prompt, int) else 0) + decoded


def facts(replies: Replies) -> Facts:
    """Model names with their aliases; the context is that of one slot."""
    entries = model_entries(replies)
    names: list[str] = []
    for name in (*model_ids(entries), *(a for e in entries for a in e.get("aliases") or () if isinstance(a, str))):
        if name not in names:
            names.append(name)
    props = json_of(replies.get("/props"))
    slots = context = None
    if isinstance(props, dict):
        slots = props.get("total_slots")
        settings = props.get("default_generation_settings")
        context = settings.get("n_ctx") if isinstance(settings, dict) else None
    slots = slots if isinstance(slots, int) and slots > 0 else None
    context = context if isinstance(context, int) and context > 0 else None
    blocks = slots * context // 16 if slots and context else None
    limits = Limits(token_budget=BATCH_ROWS, max_sequences=slots, max_context=context, kv_blocks=blocks)
    version = str(props.get("build_info") or "") if isinstance(props, dict) else ""
    metas = [meta for e in entries if isinstance(meta := e.get("meta"), dict)]
    quantisation = next((str(meta["ftype"]) for meta in metas if meta.get("ftype")), "")
    return Facts(tuple(names), limits, version, quantisation=quantisation)


ADAPTER = Adapter(
    kind="llamacpp",
    report_paths=("/slots", "/metrics"),
    report=report,
    facts_paths=("/v1/models", "/props"),
    facts=facts,
    streams_whole=True,
    endpoints=frozenset({"chat", "completions", "embeddings", "rerank", "tokenize", "detokenize"}),
)
