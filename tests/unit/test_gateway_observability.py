"""What an operator can see: the access log, traces, forecasts against outcomes, explanations on request."""

import asyncio
import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.gateway import MODEL, answer, chat, front, text_of
from tests.support.loop import run, until
from tests.support.upstream import Call, FakeUpstream
from weighbridge.core.decision import Candidate, Decision
from weighbridge.gateway import KeySettings
from weighbridge.gateway.forecasts import Forecasts
from weighbridge.gateway.outcome import Outcome
from weighbridge.gateway.records import DecisionRecord
from weighbridge.gateway.settings import TracingSettings
from weighbridge.gateway.tracing import Tracer

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
CANARY = "sk-canary-2b8e"


def rows(directory: Path) -> list[dict[str, Any]]:
    files = sorted(directory.glob("access-*.jsonl"))
    return [json.loads(line) for file in files for line in file.read_text().splitlines()]


def test_every_request_is_one_line_in_the_access_log_and_no_secret_is_in_it(tmp_path: Path) -> None:
    async def script(call: Call) -> None:
        if b"broken" in call.body:
            call.reset()
        elif b"wait" in call.body:
            await call.wait_closed()
        else:
            await answer(call)

    key = KeySettings(sha256=hashlib.sha256(CANARY.encode()).hexdigest(), tenant="team-a")
    bearer = f"Bearer {CANARY}"

    async def main() -> None:
        async with FakeUpstream(script) as upstream, front(upstream, access_log=str(tmp_path), keys=(key,)) as f:
            await f.post(chat(), authorization=bearer, x_request_id="one")
            await f.post(chat(False), authorization=bearer, x_request_id="two")
            await f.post(chat(user="broken"), authorization=bearer, x_request_id="three")
            await f.post(b"{" + CANARY.encode(), authorization=bearer, x_request_id="four")
            await f.post(chat(model="none\nsuch"), f"/v1/completions?key={CANARY}", authorization=bearer)
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.1):
                    await f.post(chat(user="wait"), authorization=bearer, x_request_id="six")
            await until(lambda: not f.gateway.driver.flights)
            assert (await f.post(chat(), authorization=bearer + "x")).status == 401
            metrics = (await f.get("/metrics", admin=True)).body.decode()
            assert "weighbridge_http_refused 1.0" in metrics
            assert 'outcome="refused_401"} 1.0' in metrics

    run(main())
    found = rows(tmp_path)
    stranger = found.pop()
    assert (stranger["status"], stranger["outcome"]) == (401, "refused")
    assert "tenant" not in stranger
    seen = [(r["request_id"], r["status"], r["outcome"], r["tenant"]) for r in found]
    assert seen[:4] == [
        ("one", 200, "ok", "team-a"),
        ("two", 200, "ok", "team-a"),
        ("three", 502, "rejected_attempts_exhausted", "team-a"),
        ("four", 400, "refused", "team-a"),
    ]
    assert seen[5] == ("six", 499, "cancelled", "team-a")
    one = found[0]
    assert (one["instance"], one["model"], one["stream"], one["attempts"]) == ("i0", MODEL, True, 1)
    assert (one["prompt_tokens"], one["output_tokens"]) == (9, 3)
    assert 0 <= one["queued_s"] <= one["ttft_s"] <= one["e2e_s"]
    assert one["bytes_sent"] > 100
    assert (one["peer"], one["path"]) == ("127.0.0.1", "/v1/chat/completions")
    assert found[2]["attempts"] == 3
    text = json.dumps(found)
    assert CANARY not in text
    assert '"hi"' not in text


def test_the_access_log_rotates(tmp_path: Path) -> None:
    async def main() -> None:
        fields = {"access_log": str(tmp_path), "log_bytes": 2000, "log_files": 2}
        async with FakeUpstream(answer) as upstream, front(upstream, **fields) as f:
            for number in range(30):
                await f.post(chat(), x_request_id=f"r{number}")
                assert f.gateway.surface.access is not None
                f.gateway.surface.access.flush()
                assert f.gateway.surface.access.writer.sync()

    run(main())
    files = sorted(tmp_path.iterdir())
    assert len(files) == 2
    assert sum(f.stat().st_size for f in files) < 5000
    assert rows(tmp_path)[-1]["request_id"] == "r29"


def test_traces_join_the_clients_and_go_on_to_the_engine() -> None:
    pytest.importorskip("opentelemetry.sdk")
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    kept = InMemorySpanExporter()
    fail = iter([True, False, False])

    async def script(call: Call) -> None:
        if next(fail, False):
            call.reset()
        else:
            await answer(call)

    async def main() -> list[dict[str, str]]:
        async with FakeUpstream(script) as one, front(one) as f:
            f.gateway.surface.tracer = Tracer(TracingSettings(), SimpleSpanProcessor(kept))
            reply = await f.post(chat(), traceparent=PARENT, tracestate="a=b", openai_beta="x")
            assert text_of(reply.body) == "abc"
            assert (await f.post(chat(model="nope"), traceparent=PARENT)).status == 404
            await f.post(chat(False))
            return [c.headers for c in one.calls]

    headers = run(main())
    spans = kept.get_finished_spans()
    assert [s.name for s in spans] == [f"chat {MODEL}", "POST /v1/chat/completions"] * 2, "refusals make none"
    client, server = spans[:2]
    assert format(server.context.trace_id, "032x") == PARENT.split("-")[1]
    assert format(server.parent.span_id, "016x") == PARENT.split("-")[2]
    assert client.parent.span_id == server.context.span_id
    own = f"00-{PARENT.split('-')[1]}-{client.context.span_id:016x}-01"
    assert {h["traceparent"] for h in headers[:2]} == {own}, "one client span over both tries"
    assert headers[1]["tracestate"] == "a=b"
    assert headers[1]["openai-beta"] == "x"
    assert [(e.name, e.attributes["weighbridge.instance"]) for e in client.events] == [("attempt failed", "i0")]
    attributes = dict(client.attributes)
    assert attributes["gen_ai.usage.output_tokens"] == 3
    assert attributes["weighbridge.policy"] == "least_requests"
    assert attributes["weighbridge.attempt"] == 2
    assert server.attributes["http.response.status_code"] == 200
    assert server.attributes["weighbridge.outcome"] == "ok"
    assert spans[3].context.trace_id != server.context.trace_id
    assert not any("hi" in str(value) for s in spans for value in s.attributes.values()), "no prompt"


def test_without_tracing_the_clients_trace_passes_through() -> None:
    async def main() -> None:
        async with FakeUpstream(answer) as upstream, front(upstream) as f:
            await f.post(chat(), traceparent=PARENT)
            assert upstream.calls[0].headers["traceparent"] == PARENT

    run(main())


def test_forecasts_are_compared_with_what_happened() -> None:
    forecasts = Forecasts()

    def record(outcome: str = "ok", **terms: float) -> DecisionRecord:
        candidates = (Candidate(instance="a", terms=terms), Candidate(instance="b", terms={"wait_s": 99.0}))
        decision = Decision(request_id="r", at_s=1.0, policy="p", chosen="a", candidates=candidates, queued_s=0.5)
        found = DecisionRecord(decision)
        found.outcome = Outcome(outcome=outcome, instance="a", e2e_s=2.5, ttft_s=1.5, output_tokens=11)
        return found

    forecasts.note(record(wait_s=0.3, prefill_s=0.2, tpot_s=0.1))
    forecasts.note(record(outcome="failed", wait_s=0.3, prefill_s=0.2))
    forecasts.note(record(prefill_s=3.0, decode_s=1.0))  # the time of all queued work, not of this request
    for _ in range(1000):
        forecasts.note(record(tpot_s=0.1))
    forecasts.digest()
    forecasts.digest()
    first = forecasts.ttft.histogram(("a",))
    assert (sum(first.counts), round(first.sum, 6)) == (1, 2.0), "1 s observed from dispatch, 0.5 s forecast"
    each = forecasts.tpot.histogram(("a",))
    assert sum(each.counts) == 198, "a bounded sample"
    assert round(each.sum / 198, 6) == 1.0


def test_the_decision_is_told_to_a_client_that_asks() -> None:
    async def main() -> None:
        async with FakeUpstream(answer) as upstream, front(upstream) as f:
            told = (await f.post(chat(), x_weighbridge_explain="1")).header(b"x-weighbridge-decision")
            assert json.loads(told)["chosen"] == "i0"
            assert (await f.post(chat())).header(b"x-weighbridge-decision") is None
            assert b"weighbridge_forecast_ttft_ratio" in (await f.get("/metrics", admin=True)).body

    run(main())
