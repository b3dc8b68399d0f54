"""vLLM: Prometheus gauges, `/v1/models` with its context length, KV capacity from `cache_config_info`."""

from __future__ import annotations

from weighbridge.core.instance import Limits, LoadReport
from weighbridge.gateway.adapters.adapter import (
    Adapter,
    Facts,
    Replies,
    Report,
    count,
    json_of,
    largest,
    listed_models,
    samples,
    total,
)

RUNNING = "vllm:num_requests_running"
WAITING = "vllm:num_requests_waiting"
KV_NAMES = ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc")
CONFIG = "vllm:cache_config_info"
START = "process_start_time_seconds"


def report(replies: Replies) -> Report | None:
    """The gauges, summed over data-parallel engines; KV usage is the fullest engine's."""
    reply = replies.get("/metrics")
    if reply is None or reply.status != 200:
        return None
    found = samples(reply.body, (RUNNING, WAITING, *KV_NAMES, START))
    load = LoadReport(
        running=count(total(found, RUNNING)), waiting=count(total(found, WAITING)), kv_usage=largest(found, *KV_NAMES)
    )
    return Report(load, started_s=total(found, START))


def facts(replies: Replies) -> Facts:
    """Models, context and KV capacity."""
    known = listed_models(replies)
    block_size, kv_blocks, prefix_caching = 16, None, True
    metrics = replies.get("/metrics")
    if metrics is not None and metrics.status == 200:
        for labels, _ in samples(metrics.body, (CONFIG,)).get(CONFIG, []):
            block_size = _integer(labels.get("block_size")) or block_size
            kv_blocks = (kv_blocks or 0) + (_integer(labels.get("num_gpu_blocks")) or 0) or None
            prefix_caching = labels.get("enable_prefix_caching", "True") == "True"
    version = json_of(replies.get("/version"))
    limits = Limits(
        block_size=block_size,
        kv_blocks=kv_blocks,
        max_context=known.limits.max_context,
        prefix_caching=prefix_caching,
    )
    return Facts(known.models, limits, str(version.get("version", "")) if isinstance(version, dict) else "")


def _integer(text: str | None) -> int | None:
    return int(text) if text and text.isdigit() else None


ADAPTER = Adapter(
    kind="vllm",
    report_paths=("/metrics",),
    report=report,
    facts_paths=("/v1/models", "/metrics", "/version"),
    facts=facts,
    cache_salt=True,
    transfers=("two_step", "mooncake"),
    endpoints=frozenset(
        {"chat", "completions", "embeddings", "responses", "messages", "rerank", "score", "tokenize", "detokenize"}
    ),
)
