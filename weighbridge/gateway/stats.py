"""Counters of the data plane, cheap to bump, and their Prometheus form, built when scraped.

Labels are bounded: model, instance, endpoint and status only; beyond `MAX_LABELS` values a model counts as `other`.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

MAX_LABELS = 1000
SECONDS = (
    *(0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.35, 0.5, 0.75),
    *(1.0, 1.5, 2.0, 3.0, 5.0, 7.5, 10.0, 15.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0),
)
TOKENS = (1.0, 4.0, 16.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 2048.0, 4096.0, 8192.0, 16384.0, 32768.0, 131072.0)
RATIOS = (0.1, 0.25, 0.5, 0.67, 0.8, 0.9, 1.0, 1.1, 1.25, 1.5, 2.0, 4.0, 10.0)


class Histogram:
    """Bucket counts and a sum."""

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        """Counts one value."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def observe_gap(self, seconds: float, tokens: int) -> None:
        """Counts the gap before `tokens` tokens that came together: one of `seconds`, the others 0."""
        self.counts[bisect_left(self.bounds, seconds)] += 1
        self.sum += seconds
        if tokens > 1:
            self.counts[0] += tokens - 1

    def buckets(self) -> list[tuple[str, float]]:
        """Cumulative counts by upper bound, as Prometheus wants them."""
        result = []
        running = 0
        for bound, number in zip((*self.bounds, float("inf")), self.counts, strict=True):
            running += number
            result.append(("+Inf" if bound == float("inf") else repr(bound), float(running)))
        return result


class Family:
    """Counters or histograms of one name, by label values."""

    __slots__ = ("bounds", "help", "labels", "name", "values")

    def __init__(self, name: str, help: str, labels: tuple[str, ...], bounds: tuple[float, ...] | None = None) -> None:
        self.name = name
        self.help = help
        self.labels = labels
        self.bounds = bounds
        self.values: dict[tuple[str, ...], float | Histogram] = {}

    def add(self, labels: tuple[str, ...], amount: float = 1.0) -> None:
        """Adds to a counter."""
        values = self.values
        value = values.get(labels)
        if value is None:
            labels = self._key(labels)
            value = values.get(labels, 0.0)
        values[labels] = value + amount  # type: ignore[operator]

    def observe(self, labels: tuple[str, ...], value: float) -> None:
        """Counts a value in a histogram."""
        self.histogram(labels).observe(value)

    def histogram(self, labels: tuple[str, ...]) -> Histogram:
        """The histogram of some label values; it may be kept."""
        histogram = self.values.get(labels)
        if histogram is None:
            assert self.bounds is not None
            histogram = self.values.setdefault(self._key(labels), Histogram(self.bounds))
        assert isinstance(histogram, Histogram)
        return histogram

    def get(self, labels: tuple[str, ...]) -> float:
        """A counter's value."""
        value = self.values.get(labels, 0.0)
        assert not isinstance(value, Histogram)
        return value

    def _key(self, labels: tuple[str, ...]) -> tuple[str, ...]:
        if labels in self.values or len(self.values) < MAX_LABELS:
            return labels
        return ("other",) * len(labels)

    def metric(self) -> Metric:
        """The Prometheus form."""
        if self.bounds is not None:
            family = HistogramMetricFamily(self.name, self.help, labels=self.labels)
            for labels, value in self.values.items():
                assert isinstance(value, Histogram)
                family.add_metric(labels, buckets=value.buckets(), sum_value=value.sum)
            return family
        counter = CounterMetricFamily(self.name, self.help, labels=self.labels)
        for labels, value in self.values.items():
            assert not isinstance(value, Histogram)
            counter.add_metric(labels, value)
        return counter


class Finished:
    """The histograms that a request of one model on one instance touches when it ends well."""

    __slots__ = ("duration", "input_tokens", "output_tokens", "ttft")

    def __init__(self, stats: Stats, model: str, instance: str) -> None:
        self.duration = stats.duration.histogram((model,))
        self.ttft = stats.ttft.histogram((model, instance, "true"))  # of whole replies it is seldom known
        self.input_tokens = stats.input_tokens.histogram((model,))
        self.output_tokens = stats.output_tokens.histogram((model,))


class Stats:
    """All counters of a gateway."""

    def __init__(self) -> None:
        by_model = ("model",)
        self._finished: dict[tuple[str, str], Finished] = {}
        self.requests = Family(
            "weighbridge_requests", "Requests by how they ended.", ("endpoint", "model", "instance", "outcome")
        )
        self.duration = Family("weighbridge_request_duration_seconds", "Arrival to the end.", by_model, SECONDS)
        self.ttft = Family(
            "weighbridge_request_ttft_seconds",
            "Arrival to first token; where `streaming` is false, to the engine's.",
            ("model", "instance", "streaming"),
            SECONDS,
        )
        self.gaps = Family(
            "weighbridge_request_streaming_itl_seconds",
            "Between output events of a stream, as they came from the engine; those of one read are 0 apart.",
            ("model", "instance"),
            SECONDS,
        )
        self.queued = Family(
            "weighbridge_queue_duration_seconds", "Arrival to dispatch, or to the end.", ("tier", "outcome"), SECONDS
        )
        self.input_tokens = Family("weighbridge_request_input_tokens", "Prompt tokens.", by_model, TOKENS)
        self.output_tokens = Family("weighbridge_request_output_tokens", "Output tokens.", by_model, TOKENS)
        self.cached_tokens = Family("weighbridge_cached_tokens", "Prompt tokens the engines had cached.", by_model)
        self.estimate = Family(
            "weighbridge_prompt_estimate_ratio", "Estimated over counted prompt tokens.", by_model, RATIOS
        )
        self.attempts = Family("weighbridge_attempts", "Requests sent to engines.", ("instance", "result"))
        self.reloads = Family("weighbridge_config_reloads", "Reloads of the configuration.", ("result",))
        self.reprobes = Family(
            "weighbridge_reprobes", "Instances measured again in idle time.", ("instance", "outcome")
        )
        self.families = (
            self.reloads,
            self.reprobes,
            self.requests,
            self.duration,
            self.ttft,
            self.gaps,
            self.queued,
            self.input_tokens,
            self.output_tokens,
            self.cached_tokens,
            self.estimate,
            self.attempts,
        )

    def finished(self, model: str, instance: str) -> Finished:
        """The kept histograms of a model and instance."""
        key = (model, instance)
        found = self._finished.get(key)
        if found is None:
            found = Finished(self, model, instance)
            if len(self._finished) < MAX_LABELS:
                self._finished[key] = found
        return found

    def collect(self) -> Iterator[Metric]:
        """All families in Prometheus form."""
        for family in self.families:
            yield family.metric()


def gauge(name: str, help: str, labels: tuple[str, ...], rows: Iterable[tuple[tuple[str, ...], float]]) -> Metric:
    """A gauge family from rows."""
    family = GaugeMetricFamily(name, help, labels=labels)
    for values, value in rows:
        family.add_metric(values, value)
    return family
