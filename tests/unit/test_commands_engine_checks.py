"""What `doctor` says of engines that are not what the configuration says, or tell too little."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.loop import run
from tests.support.upstream import Call, FakeUpstream
from weighbridge.commands._engine_checks import check_engine
from weighbridge.gateway.endpoint import Endpoint
from weighbridge.gateway.settings import InstanceSettings
from weighbridge.http import ClientLimits, HttpClient

ENGINES = Path(__file__).resolve().parents[1] / "data" / "engines"
VLLM = {
    "/health": (200, b""),
    "/v1/models": (200, json.dumps(json.loads((ENGINES / "vllm/models.json").read_text())["json"]).encode()),
    "/metrics": (200, (ENGINES / "vllm/metrics_busy.txt").read_bytes()),
    "/version": (200, b'{"version":"0.32.0"}'),
    "/kv_event_sources": (
        200,
        json.dumps(json.loads((ENGINES / "vllm/kv_event_sources.json").read_text())["json"]).encode(),
    ),
}


def page(name: str) -> tuple[int, bytes]:
    record = json.loads((ENGINES / f"{name}.json").read_text())
    return record["status"], json.dumps(record["json"]).encode() if "json" in record else record["text"].encode()


LLAMA = {
    "/health": page("llamacpp/health"),
    "/v1/models": page("llamacpp/models"),
    "/props": page("llamacpp/props"),
    "/slots": page("llamacpp/slots_idle"),
}
ODD = {"/health": page("transformers_serve/health"), "/v1/models": page("transformers_serve/models")}


def look(pages: dict[str, tuple[int, bytes]], key: str | None = None, **fields: Any) -> list[tuple[str, str, str]]:
    async def script(call: Call) -> None:
        status, body = pages.get(call.path, (404, b'{"detail":"Not Found"}'))
        await call.reply(status, body)

    async def main() -> list[tuple[str, str, str]]:
        async with FakeUpstream(script, health=0) as upstream:
            more = {"api_key_env": "KEY"} if key else {}
            settings = InstanceSettings(name="e", url=upstream.url, **fields, **more)
            endpoint = Endpoint(settings, ClientLimits(), {"KEY": key} if key else {})
            client = HttpClient(ClientLimits())
            try:
                return await check_engine(endpoint, client)
            finally:
                await client.close()

    return run(main())


@pytest.mark.parametrize(
    ("pages", "fields"),
    [
        (VLLM, {"kind": "vllm"}),
        (VLLM, {"kind": "vllm", "kv_events": "auto", "models": ("smol",)}),
        (VLLM, {"kind": "openai"}),
        (LLAMA, {"kind": "llamacpp"}),
        (ODD, {"kind": "transformers", "models": ("m",)}),
    ],
)
def test_what_is_well_is_one_line(pages: dict[str, tuple[int, bytes]], fields: dict[str, Any]) -> None:
    assert [level for level, _, _ in look(pages, **fields)] == ["ok"]


@pytest.mark.parametrize(
    ("pages", "kind", "found"),
    [
        (VLLM, "llamacpp", "vllm"),
        (VLLM, "tgi", "vllm"),
        (VLLM, "embedded", "vllm"),
        (LLAMA, "vllm", "llamacpp"),
        (LLAMA, "sglang", "llamacpp"),
    ],
)
def test_the_wrong_kind_is_named(pages: dict[str, tuple[int, bytes]], kind: str, found: str) -> None:
    rows = look(pages, kind=kind)
    assert ("fail", f"it is configured as {kind} and is something else", f"write `kind: {found}`") in rows


def test_engines_that_tell_no_load() -> None:
    rows = look({k: v for k, v in LLAMA.items() if k != "/slots"}, kind="llamacpp")
    (row,) = [row for row in rows if row[0] == "warn"]
    assert row[1] == "it tells no load (/slots 404, /metrics 404)"
    assert "--slots or --metrics" in row[2]
    (row,) = [row for row in look({**VLLM, "/metrics": (404, b"")}, kind="vllm") if row[0] == "warn"]
    assert "--disable-log-stats" in row[2]


def test_gated_pages() -> None:
    gated = {**VLLM, "/v1/models": (401, b'{"error":"Unauthorized"}'), "/metrics": (401, b"")}
    rows = look(gated, kind="vllm")
    assert ("fail", "/v1/models and /metrics: wants an API key", "set `api_key_env`") in rows
    rows = look(gated, kind="vllm", key="not-the-right-one")
    assert ("fail", "/v1/models and /metrics: refuses our API key", "put its key into KEY") in rows
    assert not any("not-the-right-one" in part for row in rows for part in row)


def test_models() -> None:
    rows = look(ODD, kind="transformers")
    assert any(level == "warn" and "/v1/models: 500" in message for level, message, _ in rows)
    rows = look(VLLM, kind="vllm", models=("gpt-4o", "mine"), aliases={"mine": "smol"})
    assert any(message == "it does not serve gpt-4o; it tells smol" for _, message, _ in rows)


def test_kv_events_that_cannot_come() -> None:
    off = {**VLLM, "/kv_event_sources": (200, b"{}")}
    assert any("publishes no KV events" in row[1] for row in look(off, kind="vllm", kv_events="auto"))
    old = {k: v for k, v in VLLM.items() if k != "/kv_event_sources"}
    assert any("answers 404" in row[1] for row in look(old, kind="vllm", kv_events="auto"))


def test_an_unhealthy_engine_and_nobody() -> None:
    rows = look({**VLLM, "/health": (503, b"")}, kind="vllm")
    assert rows == [("fail", "/health answers 503: it gets no requests", "see its log")]
    rows = look(LLAMA, kind="vllm")
    assert rows[0][2] == "write `kind: llamacpp`"

    async def main() -> list[tuple[str, str, str]]:
        settings = InstanceSettings(name="e", url="http://127.0.0.1:9", kind="vllm")
        client = HttpClient(ClientLimits())
        return await check_engine(Endpoint(settings, ClientLimits(), {}), client)

    ((level, message, remedy),) = run(main())
    assert (level, remedy) == ("fail", "start it, or mend `url`")
    assert "http://127.0.0.1:9" in message


def test_a_mooncake_bootstrap_server_that_is_silent() -> None:
    rows = look(VLLM, kind="vllm", role="prefill", transfer="mooncake", bootstrap_port=9)
    assert any("tells no engine id" in row[1] for row in rows)
