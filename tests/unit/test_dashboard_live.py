"""A gateway's admin API as a source, with and without its event log; the dashboard as a child of `serve`."""

from __future__ import annotations

import asyncio
import io
import json
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.support.loop import run, until
from weighbridge.core.errors import ConfigError, ServiceError, UpstreamError
from weighbridge.dashboard import demo_log
from weighbridge.dashboard import process as process_module
from weighbridge.dashboard.hub import Hub
from weighbridge.dashboard.live import NO_LOG, AdminSource
from weighbridge.dashboard.parts import source_of
from weighbridge.dashboard.process import DashboardProcess
from weighbridge.http import HttpClient, HttpServer, Request, Responder, Routes
from weighbridge.sim.runs import make_simulation

DECISION = {
    "request_id": "r1", "at_s": 10.0, "policy": "calibrated", "chosen": "h100-0", "queued_s": 0.5,
    "candidates": [
        {"instance": "h100-0", "terms": {"wait_s": 0.1, "prefill_s": 0.2, "tpot_s": 0.01}, "score": -1.0},
        {"instance": "gone", "excluded": "down"},
    ],
    "expected_output_tokens": 50,
    "outcome": {"outcome": "ok", "instance": "h100-0", "e2e_s": 1.5, "ttft_s": 0.9, "output_tokens": 60},
}  # fmt: skip


def fleet(log: str | None = None, **changes: Any) -> dict[str, Any]:
    row = {
        "name": "h100-0", "kind": "vllm", "version": "0.19", "health": "up", "calibrated": True, "in_flight": 3,
        "kv_tokens": 800, "decode_tokens": 400, "limits": {"kv_blocks": 100, "max_sequences": 8},
        "report": {"running": 3}, "report_age_s": 0.25, "an_unknown_field": 1,
        "cost": {"level": "online", "error": 0.2, "rates": {"prefill_tokens_per_s": 100.0, "decode_tokens_per_s": 9.0}},
    }  # fmt: skip
    return {
        "now_s": 300.0, "policy": "calibrated", "held_requests": 4, "event_log": log,
        "instances": [row | changes, {"name": "gone", "health": "ejected", "reason": "5 faults in a row"}],
    }  # fmt: skip


@asynccontextmanager
async def admin(answers: dict[str, Any]) -> AsyncIterator[str]:
    """A listener that gives these answers; the Authorization it last saw is left in `answers`."""

    def reply(request: Request, responder: Responder) -> None:
        answers["seen"] = request.header(b"authorization")
        status, value = answers.get(request.path, (404, {}))
        responder.send(status, value if isinstance(value, bytes) else json.dumps(value).encode())

    routes = Routes()
    routes.get("/*", reply)
    server = HttpServer(routes)
    await server.start("127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.port}"
    finally:
        await server.stop()


def test_instances_come_from_the_api_and_requests_from_the_log(tmp_path: Path) -> None:
    one = demo_log.run(requests=200)
    out = io.BytesIO()
    records = make_simulation(one, log=out).run(one.workload.requests(one.seed))
    path = tmp_path / "events-000001.jsonl"
    path.write_bytes(out.getvalue())

    async def work() -> None:
        async with admin({"/fleet": (200, fleet(str(path)) | {"now_s": 0.0})}) as url:
            source = AdminSource(url)
            snapshot = await source.poll()
            await source.close()
        assert [i.name for i in snapshot.instances] == ["h100-0", "gone"]
        first, second = snapshot.instances
        assert (first.running, first.kv_used, first.kv_peak, first.level) == (3, 0.5, 0.75, "online")
        assert (first.error_bar, first.age_s, first.engine) == (0.2, 0.25, "vllm 0.19")
        assert len(first.pairs) > 5, "the log's requests belong to the instance of that name"
        assert (second.state, second.reason) == ("down", "5 faults in a row")
        assert snapshot.queued == 4
        assert snapshot.log == str(path)
        assert 0 < sum(t.offered for t in snapshot.tiers) <= len(records)

    run(work())


def test_without_the_log_the_last_decisions_are_shown_and_the_rest_is_not_invented() -> None:
    async def work() -> None:
        answers = {"/fleet": (200, fleet("/nowhere/events.jsonl")), "/decisions": (200, {"decisions": [DECISION]})}
        async with admin(answers) as url:
            source = AdminSource(url, token="a-secret-token")
            snapshot = await source.poll()
            await source.close()
        assert answers["seen"] == b"Bearer a-secret-token"
        assert snapshot.note == NO_LOG
        assert snapshot.attainment is None and snapshot.goodput_per_s is None and snapshot.tiers == ()
        decision = snapshot.decisions[0]
        assert decision.observed_s == pytest.approx(1.0)
        assert decision.ttft_s == pytest.approx(0.4)
        assert decision.forecast_at_length_s == pytest.approx(0.3 + 60 * 0.01)
        assert decision.error_s == pytest.approx(0.8 * 0.2)
        assert decision.candidates[1].excluded == "down"

    run(work())


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ((401, {}), "wants a token; set WEIGHBRIDGE_ADMIN_TOKEN"),
        ((500, {}), "answers with status 500"),
        ((200, b"not json"), "is not an answer of this version"),
        ((200, {"now_s": "text"}), "is not an answer of this version"),
    ],
)
def test_a_wrong_answer_is_one_clear_sentence(answer: tuple[int, Any], words: str) -> None:
    async def work() -> None:
        async with admin({"/fleet": answer}) as url:
            source = AdminSource(url)
            with pytest.raises(UpstreamError, match=words):
                await source.poll()
            await source.close()

    run(work())


def test_a_gateway_that_went_away_leaves_its_last_state_with_its_age() -> None:
    async def work() -> None:
        answers = {"/fleet": (200, fleet()), "/decisions": (200, {"decisions": []})}
        async with admin(answers) as url:
            hub = Hub(AdminSource(url))
            await hub.poll()
            assert hub.snapshot.error == ""
        await hub.poll()
        assert "does not answer" in hub.snapshot.error
        assert len(hub.snapshot.instances) == 2
        assert hub.snapshot.age_s > 0
        await hub.source.close()

    run(work())


def test_a_bad_address_is_refused() -> None:
    with pytest.raises(ConfigError, match="write http://HOST:PORT"):
        source_of("127.0.0.1:8081", "", [], None)


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine may take long to start a Python process; how long is not what these tests are about."""
    monkeypatch.setattr(process_module, "START_S", 90.0)


@pytest.mark.usefixtures("patient")
def test_the_child_starts_shows_what_is_wrong_and_ends() -> None:
    async def work() -> None:
        child = DashboardProcess()
        url = await child.start("http://127.0.0.1:9", 0)
        client = HttpClient()
        page = await client.request("GET", url + "/")
        assert page.status == 200
        assert b"http://127.0.0.1:9 does not answer" in page.body
        await client.close()
        second = DashboardProcess()
        with pytest.raises(ServiceError, match="cannot be listened on"):
            await second.start("http://127.0.0.1:9", int(url.rpartition(":")[2]))
        pid = child.pid
        await child.stop()
        assert pid is not None
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)

    run(work(), timeout_s=100.0)


@pytest.mark.usefixtures("patient")
def test_a_child_that_hangs_is_killed() -> None:
    async def work() -> None:
        child = DashboardProcess()
        await child.start("http://127.0.0.1:9", 0)
        assert child.pid is not None
        os.kill(child.pid, signal.SIGSTOP)
        await asyncio.wait_for(child.stop(), 60)
        with pytest.raises(ProcessLookupError):
            os.kill(child.pid, 0)

    run(work(), timeout_s=100.0)


@pytest.mark.usefixtures("patient")
def test_a_child_whose_parent_is_gone_ends_by_itself() -> None:
    async def work() -> None:
        child = DashboardProcess()
        await child.start("http://127.0.0.1:9", 0)
        process = child._process
        assert process is not None and process.stdin is not None
        process.stdin.close()  # what the kernel does when the parent is killed
        await until(lambda: process.returncode == 0, 30.0)

    run(work(), timeout_s=100.0)
