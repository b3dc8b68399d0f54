"""Adapters against recordings of real engines: vLLM 0.32, llama.cpp's server, `transformers serve`."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.gateway import chat, data_of, front
from tests.support.loop import run
from tests.support.upstream import Call, FakeUpstream
from weighbridge.gateway.adapters import ADAPTERS
from weighbridge.gateway.adapters.adapter import json_of
from weighbridge.http import SseParser
from weighbridge.http.client import Reply

ENGINES = Path(__file__).resolve().parents[1] / "data" / "engines"


def recorded(name: str) -> dict[str, Any]:
    value: dict[str, Any] = json.loads((ENGINES / f"{name}.json").read_text())
    return value


def reply(name: str) -> Reply:
    record = recorded(name)
    body = json.dumps(record["json"]).encode() if "json" in record else record.get("text", "").encode()
    return Reply(record["status"], [(k.encode(), v.encode()) for k, v in record["headers"].items()], body)


def test_vllm() -> None:
    adapter = ADAPTERS["vllm"]
    metrics = Reply(200, [], (ENGINES / "vllm" / "metrics_busy.txt").read_bytes())
    report = adapter.report({"/metrics": metrics})
    assert report is not None
    assert (report.load.running, report.load.waiting) == (8, 4)
    assert report.load.kv_usage == pytest.approx(0.0055, abs=1e-4)
    facts = adapter.facts({"/v1/models": reply("vllm/models"), "/version": reply("vllm/version")})
    assert facts.models == ("smol",)
    assert facts.limits.max_context == 1024
    assert facts.version == "0.32.0"
    assert adapter.report({"/metrics": reply("vllm/notfound")}) is None


def test_llamacpp() -> None:
    adapter = ADAPTERS["llamacpp"]
    busy = adapter.report({"/slots": reply("llamacpp/slots_busy"), "/metrics": reply("llamacpp/metrics_busy")})
    assert busy is not None
    assert (busy.load.running, busy.load.waiting) == (2, 2)
    assert busy.load.kv_usage is not None
    assert 0 < busy.load.kv_usage < 1
    assert busy.started_s is not None
    idle = adapter.report({"/slots": reply("llamacpp/slots_idle")})
    assert idle is not None
    assert (idle.load.running, idle.load.kv_usage) == (0, 0.0)
    facts = adapter.facts({"/v1/models": reply("llamacpp/models"), "/props": reply("llamacpp/props")})
    assert facts.models == ("smol",)
    assert (facts.limits.max_sequences, facts.limits.max_context) == (2, 1024)
    assert facts.limits.kv_tokens == 2048
    assert adapter.facts({}).models == ()


def test_transformers_has_no_model_list_and_no_report() -> None:
    adapter = ADAPTERS["transformers"]
    assert reply("transformers_serve/models").status == 500
    assert json_of(reply("transformers_serve/models")) is None
    assert adapter.facts({"/v1/models": reply("transformers_serve/models")}).models == ()
    assert adapter.report({}) is None


def test_sglang_load_in_both_forms() -> None:
    adapter = ADAPTERS["sglang"]
    new = {"loads": [{"num_running_reqs": 3, "num_waiting_reqs": 1, "token_usage": 0.5, "gen_throughput": 10.0}] * 2}
    path = adapter.report_paths[0]
    report = adapter.report({path: Reply(200, [], json.dumps(new).encode())})
    assert report is not None
    assert (report.load.running, report.load.waiting, report.load.kv_usage) == (6, 2, 0.5)
    assert report.load.generation_tokens_per_s == 20.0
    old = [{"dp_rank": 0, "num_reqs": 5, "num_waiting_reqs": 2, "num_tokens": 100}]
    report = adapter.report({"/get_load": Reply(200, [], json.dumps(old).encode()), path: Reply(404, [], b"")})
    assert report is not None
    assert (report.load.running, report.load.waiting) == (3, 2)
    info = {"max_total_num_tokens": 1000, "page_size": 10, "context_length": 512, "max_running_requests": 7}
    facts = adapter.facts({"/server_info": Reply(200, [], json.dumps(info).encode())})
    assert (facts.limits.kv_tokens, facts.limits.max_context, facts.limits.max_sequences) == (1000, 512, 7)


def test_tgi() -> None:
    adapter = ADAPTERS["tgi"]
    metrics = b"# TYPE tgi_queue_size gauge\ntgi_queue_size 4\ntgi_batch_current_size 9\n"
    report = adapter.report({"/metrics": Reply(200, [], metrics)})
    assert report is not None
    assert (report.load.running, report.load.waiting) == (9, 4)
    info = {"model_id": "org/m", "max_total_tokens": 2048, "max_batch_total_tokens": 16000, "version": "3"}
    facts = adapter.facts({"/info": Reply(200, [], json.dumps(info).encode())})
    assert facts.models == ("org/m",)
    assert facts.limits.max_context == 2048


@pytest.mark.parametrize("kind", sorted(ADAPTERS))
@pytest.mark.parametrize("body", [b"", b"[]", b"{}", b'{"data":5,"loads":"x"}', b"null", b"\xff\xfe", b"[1,null]"])
def test_nonsense_from_an_engine_is_no_report_and_no_crash(kind: str, body: bytes) -> None:
    adapter = ADAPTERS[kind]
    paths = {*adapter.report_paths, *adapter.facts_paths}
    replies = {path: Reply(200, [], body) for path in paths}
    adapter.report(replies)
    assert adapter.facts(replies).models == ()
    missing = {path: Reply(404, [], body) for path in paths}
    assert adapter.report(missing) is None


STREAMS = sorted(
    p.relative_to(ENGINES).as_posix().removesuffix(".sse")
    for p in ENGINES.rglob("*.sse")
    if not p.name.startswith(("err_", "stream_comp_native", "prefill_streamed", "stream_messages"))
)


@pytest.mark.parametrize("name", STREAMS)
def test_recorded_streams_pass_unchanged_and_count_as_success(name: str) -> None:
    body = (ENGINES / f"{name}.sse").read_bytes()
    sizes = [n for _, n in recorded(name).get("arrivals", [])] or [len(body)]
    kind = "transformers" if name.startswith("transformers") else "vllm"

    async def script(call: Call) -> None:
        await call.sse_head()
        position = 0
        for size in (*sizes, len(body)):
            piece = body[position : position + size]
            position += size
            if piece:
                await call.chunk(piece)
        await call.last_chunk()

    async def main() -> None:
        async with FakeUpstream(script) as upstream, front(upstream, instance_fields={"kind": kind}) as f:
            got = await f.post(chat(stream_options={"include_usage": True}))
            assert got.body == body
            outcome = f.gateway.driver.decisions[-1].outcome
            assert outcome is not None
            assert outcome.outcome == "ok"
            assert outcome.output_tokens > 0
            assert outcome.ttft_s is not None
            stripped = await f.post(chat())
            frames = [json.loads(d) for d in data_of(stripped.body) if d != "[DONE]"]
            if kind == "vllm":
                assert not any(frame.get("choices") == [] and frame.get("usage") for frame in frames)
            else:
                assert stripped.body == body, "an engine that was not asked for usage is relayed as it is"
            f.assert_idle()

    run(main())


ERRORS = sorted(
    p.relative_to(ENGINES).as_posix().removesuffix(".json")
    for p in ENGINES.rglob("err_*.json")
    if recorded(p.relative_to(ENGINES).as_posix().removesuffix(".json"))["status"] >= 400
)


@pytest.mark.parametrize("name", ERRORS)
def test_recorded_errors_reach_the_client_in_the_envelope(name: str) -> None:
    record = reply(name)

    async def script(call: Call) -> None:
        await call.reply(record.status, record.body, (record.header(b"content-type") or b"text/plain").decode())

    async def main() -> None:
        async with FakeUpstream(script) as upstream, front(upstream) as f:
            got = await f.post(chat(stream=False))
            error = got.json()["error"]
            assert isinstance(error["message"], str)
            assert error["message"]
            if record.status < 500:
                assert got.status == record.status
                assert len(upstream.calls) == 1
            else:
                assert got.status == 502
            f.assert_idle()

    run(main())


def test_nothing_private_goes_to_an_engine_that_refuses_unknown_fields() -> None:
    async def script(call: Call) -> None:
        await call.reply(200, b'{"choices":[]}')

    async def main() -> None:
        fields = {"kind": "transformers"}
        async with FakeUpstream(script) as upstream, front(upstream, instance_fields=fields) as f:
            for body in (chat(stream=True), chat(stream=False)):
                await f.post(body)
                assert upstream.calls[-1].body == body

    run(main())


def test_anthropic_messages_and_responses_pass_through() -> None:
    body = (ENGINES / "vllm" / "stream_messages_anthropic.sse").read_bytes()
    whole = json.dumps(recorded("vllm/responses")["json"]).encode()

    async def script(call: Call) -> None:
        if call.path == "/v1/messages":
            await call.sse_head()
            for start in range(0, len(body), 100):
                await call.chunk(body[start : start + 100])
            await call.last_chunk()
        elif call.path == "/v1/responses":
            await call.reply(200, whole)
        else:
            await call.reply(200, b'{"object":"list","data":[],"usage":{"prompt_tokens":4,"total_tokens":4}}')

    async def main() -> None:
        async with FakeUpstream(script) as upstream, front(upstream, instance_fields={"kind": "vllm"}) as f:
            ask = json.dumps({"model": "m", "max_tokens": 9, "messages": [{"role": "user"}], "stream": True}).encode()
            got = await f.post(ask, "/v1/messages", anthropic_version="2023-06-01", x_api_key="client-key")
            assert got.body == body
            assert upstream.calls[-1].body == ask
            assert upstream.calls[-1].headers["anthropic-version"] == "2023-06-01"
            assert "x-api-key" not in upstream.calls[-1].headers
            outcome = f.gateway.driver.decisions[-1].outcome
            assert outcome is not None
            assert outcome.outcome == "ok"
            assert outcome.output_tokens > 0
            ask = json.dumps({"model": "m", "input": "hi"}).encode()
            assert (await f.post(ask, "/v1/responses")).body == whole
            got = await f.post(ask, "/v1/embeddings")
            assert got.status == 200
            for path in ("/v1/rerank", "/v1/score", "/tokenize", "/detokenize"):
                assert (await f.post(ask, path)).status == 200
                assert upstream.calls[-1].path == path
            for path in ("/invocations", "/pause", "/update_weights", "/v1/load_lora_adapter", "/metrics"):
                assert (await f.post(ask, path)).status == 404
            f.assert_idle()

    run(main())


def test_parser_reads_every_recording() -> None:
    for path in ENGINES.rglob("*.sse"):
        for event in SseParser().feed(path.read_bytes()):
            assert event.data == "[DONE]" or json.loads(event.data)
