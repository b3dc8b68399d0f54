"""The dashboard beside a real `serve` with the embedded fleet: its numbers are the gateway's, its death is no event."""

from __future__ import annotations

import concurrent.futures
import json
import os
import signal
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.loop import run
from tests.support.served import Served, serve
from weighbridge.core.event_log import LogReader
from weighbridge.core.metrics import summarise
from weighbridge.dashboard.live import AdminSource
from weighbridge.dashboard.observer import Observer
from weighbridge.dashboard.snapshot import Snapshot

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serve(
        tmp_path_factory.mktemp("serve"), "--dashboard", "--dashboard-port", "0", "--policy", "calibrated"
    ) as it:
        yield it


def ask(served: Served, number: int, tokens: int = 6) -> int:
    """One completion; its output tokens."""
    body = {
        "model": "smollm2-135m-instruct",
        "prompt": f"Count on from {number}:",
        "max_tokens": tokens,
        "ignore_eos": True,
    }
    request = urllib.request.Request(
        f"{served.url}/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=100) as reply:
        return int(json.load(reply)["usage"]["completion_tokens"])


def dashboard_pid(served: Served) -> int:
    """The child of `serve` that is the dashboard."""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().split(b"\0")
            parent = int((path.parent / "stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
        if b"dashboard" in words and parent == served.process.pid:
            return int(path.parent.name)
    raise AssertionError("serve has no dashboard child")


def metric(served: Served, name: str) -> dict[str, float]:
    """Samples of one metric by their label text."""
    text = served.get("/metrics")
    lines = [line.rpartition(" ") for line in text.splitlines() if line.startswith(name)]
    return {labels.removeprefix(name): float(value) for labels, _, value in lines}


def test_the_numbers_are_those_of_the_metrics_and_the_event_log(served: Served) -> None:
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        outputs = list(pool.map(lambda k: ask(served, k), range(24)))
    served.wait_idle()
    time.sleep(1.0)  # the log's writer flushes a few times a second

    async def read() -> Snapshot:
        source = AdminSource(served.admin, window_s=None)
        try:
            await source.poll()
            return await source.poll()
        finally:
            await source.close()

    snapshot = run(read())
    counted = metric(served, "weighbridge_requests_total")
    assert sum(v for k, v in counted.items() if 'outcome="ok"' in k) == 24
    assert sum(t.offered for t in snapshot.tiers) == 24
    by_instance = {d.chosen: 0 for d in snapshot.decisions}
    for d in snapshot.decisions:
        by_instance[d.chosen] += 1
        assert d.outcome == "ok"
    for name, number in by_instance.items():
        assert sum(v for k, v in counted.items() if f'instance="{name}"' in k) == number
    assert sum(t.served_tokens for tier in snapshot.tiers for t in tier.tenants) >= sum(outputs)
    assert {i.name for i in snapshot.instances} == set(served.fleet())
    assert all(i.running == 0 and i.state == "up" for i in snapshot.instances)

    observer = Observer(window_s=None)
    for path in served.logs():
        with path.open("rb") as stream:
            reader = LogReader(stream)
            observer.begin(reader.header)
            for entry in reader:
                observer.feed(entry)
    summary = summarise(observer.records(), observer.tiers)
    assert summary.attainment == snapshot.attainment
    assert summary.offered == 24


def test_every_page_of_the_child_answers_with_the_live_fleet(served: Served) -> None:
    url = served.ready["dashboard"]
    for path in ("/", "/decisions", "/tiers", "/whatif", "/capacity?from=cpu-0", "/reports"):
        with urllib.request.urlopen(url + path, timeout=60) as reply:
            text = reply.read().decode()
        assert reply.status == 200
        if path in ("/", "/capacity?from=cpu-0"):
            assert "cpu-0" in text
        assert "does not answer" not in text


def test_a_killed_or_hanging_dashboard_is_no_event_for_requests(served: Served) -> None:
    pid = dashboard_pid(served)
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        jobs = [pool.submit(ask, served, k, 12) for k in range(8)]
        os.kill(pid, signal.SIGSTOP)
        assert [job.result() for job in jobs] == [12] * 8
        jobs = [pool.submit(ask, served, k, 12) for k in range(8)]
        os.kill(pid, signal.SIGKILL)
        assert [job.result() for job in jobs] == [12] * 8
    fleet = served.wait_idle()
    assert all(i["in_flight"] == 0 for i in fleet.values())
