"""The engine's metrics page, under vLLM's names, so that whatever reads a vLLM server reads this one too."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from weighbridge.engine.counters import Histogram
from weighbridge.engine.engine import Engine

_LABELS = ("model_name", "engine")


class EngineCollector(Collector):
    """Reads one engine's gauges, counters and histograms when the page is asked for."""

    def __init__(self, engine: Engine, model_id: str, name: str = "0") -> None:
        self._engine = engine
        self._labels = (model_id, name)

    def collect(self) -> Iterable[Metric]:
        """All metrics as of now."""
        yield from self._gauges()
        yield from self._counters()
        yield from self._histograms()

    def _gauges(self) -> Iterable[Metric]:
        engine = self._engine
        scheduler = engine.scheduler
        values = {
            "vllm:num_requests_running": ("Requests in execution batches.", len(scheduler.running)),
            "vllm:num_requests_waiting": ("Requests waiting to be processed.", len(scheduler.waiting)),
            "vllm:kv_cache_usage_perc": ("KV-cache usage, 1 means 100 percent.", scheduler.kv_usage),
        }
        for name, (text, value) in values.items():
            gauge = GaugeMetricFamily(name, text, labels=_LABELS)
            gauge.add_metric(self._labels, value)
            yield gauge
        memory = scheduler.memory
        info = GaugeMetricFamily(
            "vllm:cache_config_info",
            "Information of the KV cache.",
            labels=(*_LABELS, "block_size", "num_gpu_blocks", "enable_prefix_caching"),
        )
        caching = str(scheduler.prefix_caching)
        info.add_metric((*self._labels, str(memory.block_tokens), str(memory.blocks), caching), 1)
        yield info

    def _counters(self) -> Iterable[Metric]:
        counters = self._engine.counters
        prefixes = self._engine.scheduler.prefixes
        lookup_s = 0.0 if prefixes is None else prefixes.lookup_s
        values = {
            "vllm:prompt_tokens": ("Prompt tokens of answered requests.", counters.prompt_tokens),
            "vllm:generation_tokens": ("Generated tokens.", counters.generation_tokens),
            "vllm:num_preemptions": ("Preemptions.", self._engine.scheduler.preemptions),
            "vllm:prefix_cache_queries": ("Prompt tokens looked up in the prefix cache.", counters.prefix_queries),
            "vllm:prefix_cache_hits": ("Prompt tokens found in the prefix cache.", counters.prefix_hits),
            "weighbridge_engine_prefill_tokens": ("Prompt tokens computed.", counters.prefill_tokens),
            "weighbridge_engine_prefill_seconds": ("Seconds of prefill passes.", counters.prefill_s),
            "weighbridge_engine_decode_tokens": ("Tokens computed by decode passes.", counters.decode_tokens),
            "weighbridge_engine_decode_seconds": ("Seconds of decode passes.", counters.decode_s),
            "weighbridge_engine_steps": ("Steps.", counters.steps),
            "weighbridge_engine_step_seconds": ("Seconds of whole steps.", counters.steps_s),
            "weighbridge_engine_prefix_lookup_seconds": ("Seconds of prefix lookups.", lookup_s),
            "weighbridge_engine_prefix_place_seconds": ("Seconds of copying prefixes in place.", counters.place_s),
            "weighbridge_engine_swapped_bytes": ("KV bytes swapped to host memory.", counters.swap_bytes),
            "weighbridge_engine_swap_seconds": ("Seconds of swapping.", counters.swap_s),
            "weighbridge_engine_transferred_bytes": ("KV bytes taken over from others.", counters.transfer_bytes),
            "weighbridge_engine_transfer_seconds": ("Seconds of taking KV over.", counters.transfer_s),
            "weighbridge_engine_step_failures": ("Forward passes that failed.", counters.failures),
        }
        for name, (text, value) in values.items():
            counter = CounterMetricFamily(name, text, labels=_LABELS)
            counter.add_metric(self._labels, value)
            yield counter
        finished = CounterMetricFamily(
            "vllm:request_success", "Requests by how they ended.", labels=(*_LABELS, "finished_reason")
        )
        for reason, count in dict(counters.finished).items():
            finished.add_metric((*self._labels, "abort" if reason == "cancelled" else reason), count)
        yield finished

    def _histograms(self) -> Iterable[Metric]:
        counters = self._engine.counters
        histograms = {
            "vllm:time_to_first_token_seconds": counters.ttft_s,
            "vllm:inter_token_latency_seconds": counters.itl_s,
            "vllm:e2e_request_latency_seconds": counters.e2e_s,
            "vllm:request_queue_time_seconds": counters.queue_s,
            "vllm:request_prefill_time_seconds": counters.request_prefill_s,
            "vllm:request_decode_time_seconds": counters.request_decode_s,
            "vllm:request_prompt_tokens": counters.request_prompt_tokens,
            "vllm:request_generation_tokens": counters.output_tokens,
            "vllm:iteration_tokens_total": counters.step_tokens,
        }
        for name, histogram in histograms.items():
            family = HistogramMetricFamily(name, name.removeprefix("vllm:").replace("_", " "), labels=_LABELS)
            family.add_metric(self._labels, buckets=_buckets(histogram), sum_value=histogram.total)
            yield family


def metrics_page(collectors: Iterable[Collector]) -> bytes:
    """The page in Prometheus' text format."""
    registry = CollectorRegistry(auto_describe=False)
    for collector in collectors:
        registry.register(collector)
    return generate_latest(registry)


def _buckets(histogram: Histogram) -> list[tuple[str, float]]:
    total = 0
    buckets = []
    for bound, count in zip((*map(str, histogram.bounds), "+Inf"), list(histogram.counts), strict=True):
        total += count
        buckets.append((bound, float(total)))
    return buckets
