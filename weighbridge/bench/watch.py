"""Watches queue and KV gauges of servers while a run lasts: their Prometheus pages, once or twice a second."""

from __future__ import annotations

import re
import threading
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from weighbridge.core.errors import ConfigError

PERIOD_S = 0.5
TIMEOUT_S = 2.0
MAX_GAUGES = 24
_WANTED = re.compile(
    r"(num_requests_waiting|num_requests_running|num_queue_reqs|num_running_reqs|kv_cache_usage|kv_usage|token_usage"
    r"|requests_processing|requests_deferred|queue_depth|queued|held|in_flight)"
)
_SAMPLE = re.compile(r"^([A-Za-z_:][\w:]*)(\{[^}]*\})?\s+([-+0-9.eE]+|NaN)(?:\s+\d+)?$")
_SKIPPED = ("_bucket", "_count", "_sum", "_total", "_created")


class Watch:
    """Samples by gauge name (labels included), at wall-clock times; `notes` tell of pages that did not answer."""

    def __init__(self, urls: Sequence[str]) -> None:
        for url in urls:
            if not url.startswith(("http://", "https://")):
                raise ConfigError(f"'{url}' is not an http or https address", source="--metrics")
        self.urls = tuple(urls)
        self.samples: dict[str, list[tuple[float, float]]] = {}
        self.failures: dict[str, str] = {}

    @property
    def notes(self) -> list[str]:
        """One line for each page that never answered."""
        return [f"no metrics from {url}: {why}" for url, why in self.failures.items()]

    def since(self, start: float) -> dict[str, list[tuple[float, float]]]:
        """Samples with times relative to the wall-clock time `start`."""
        return {name: [(at - start, value) for at, value in points] for name, points in self.samples.items()}

    def sample(self) -> None:
        """Read every page once."""
        for number, url in enumerate(self.urls):
            prefix = f"{number}: " if len(self.urls) > 1 else ""
            try:
                # the scheme was checked above: http or https only
                with urllib.request.urlopen(url, timeout=TIMEOUT_S) as reply:  # noqa: S310 - see above
                    text = reply.read(4 << 20).decode("utf-8", "replace")
            except (OSError, ValueError) as error:
                if not any(name.startswith(prefix) for name in self.samples):
                    self.failures[url] = str(getattr(error, "reason", error))
                continue
            self.failures.pop(url, None)
            now = time.time()
            for name, value in gauges(text).items():
                if prefix + name in self.samples or len(self.samples) < MAX_GAUGES:
                    self.samples.setdefault(prefix + name, []).append((now, value))


def gauges(text: str) -> dict[str, float]:
    """Queue and KV gauges of a Prometheus page."""
    out = {}
    for line in text.splitlines():
        match = _SAMPLE.match(line)
        if match is None or match[1].endswith(_SKIPPED) or not _WANTED.search(match[1]):
            continue
        out[match[1] + (match[2] or "")] = float(match[3])
    return out


@contextmanager
def watching(urls: Sequence[str]) -> Iterator[Watch]:
    """Samples in a thread for the length of the block."""
    watch = Watch(urls)
    stop = threading.Event()

    def work() -> None:
        while not stop.is_set():
            watch.sample()
            stop.wait(PERIOD_S)

    thread = threading.Thread(target=work, name="metrics watch", daemon=True)
    if urls:
        thread.start()
    try:
        yield watch
    finally:
        stop.set()
        if urls:
            thread.join(2 * TIMEOUT_S)
