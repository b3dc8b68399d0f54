"""What engines tell before they are measured: recordings of real ones, and the documented shapes of two others."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.loop import run
from weighbridge.calibrate.endpoint import Endpoint, read_endpoint, read_load
from weighbridge.calibrate.engines import config_of, kept_of, scheduling_of
from weighbridge.core.errors import InputError, UpstreamError
from weighbridge.core.instance import Limits, LoadReport, Rates
from weighbridge.cost.profile import Profile, Provenance, decode_profile, encode_profile
from weighbridge.http import HttpServer, Request, Responder, Routes, ServerLimits
from weighbridge.http.client import HttpClient
from weighbridge.scheduling.scheduler import Scheduler

ENGINES = Path(__file__).resolve().parents[1] / "data" / "engines"
Page = tuple[int, dict[str, str], bytes]


def recorded(name: str) -> Page:
    value = json.loads((ENGINES / f"{name}.json").read_text())
    body = json.dumps(value["json"]).encode() if "json" in value else value.get("text", "").encode()
    kept = {k: v for k, v in value["headers"].items() if k == "process-start-time-unix"}
    return value["status"], kept, body


def shaped(value: Any) -> Page:
    return 200, {}, value.encode() if isinstance(value, str) else json.dumps(value).encode()


async def ask(pages: dict[str, Page], **asked: Any) -> tuple[Endpoint, LoadReport]:
    """Serve `pages`, 404 for any other, and read the engine from there."""
    routes = Routes()
    for path, (status, headers, body) in pages.items():

        def reply(_: Request, responder: Responder, page: Page = (status, headers, body)) -> None:
            responder.send(page[0], page[2], content_type="application/octet-stream", headers=list(page[1].items()))

        routes.get(path, reply)
    server, client = HttpServer(routes, ServerLimits()), HttpClient()
    await server.start("127.0.0.1", 0)
    try:
        endpoint = await read_endpoint(client, f"http://127.0.0.1:{server.port}/v1", **asked)
        return endpoint, (await read_load(client, endpoint))[0]
    finally:
        await client.close()
        await server.stop()


VLLM = {
    "/v1/models": recorded("vllm/models"),
    "/version": recorded("vllm/version"),
    "/metrics": (200, {}, (ENGINES / "vllm" / "metrics_busy.txt").read_bytes()),
}
LLAMACPP = {
    "/v1/models": recorded("llamacpp/models"),
    "/props": recorded("llamacpp/props"),
    "/metrics": recorded("llamacpp/metrics_busy"),
    "/slots": recorded("llamacpp/slots_busy"),
}
SGLANG = {
    "/v1/models": shaped({"data": [{"id": "m", "owned_by": "sglang", "max_model_len": 8192}]}),
    "/server_info": shaped(
        {
            "page_size": 16,
            "max_total_num_tokens": 64_000,
            "chunked_prefill_size": 4096,
            "max_running_requests": 48,
            "context_length": 8192,
            "quantization": "fp8",
            "version": "0.5.9",
        }
    ),
    "/metrics": shaped("sglang_num_running_reqs 3\n"),
    "/v1/loads": shaped({"loads": [{"num_running_reqs": 3, "num_waiting_reqs": 1, "token_usage": 0.5}]}),
}
TGI = {
    "/v1/models": (404, {}, b""),
    "/info": shaped(
        {
            "model_id": "m",
            "model_device_type": "cuda",
            "max_batch_total_tokens": 16_000,
            "max_batch_prefill_tokens": 4096,
            "max_concurrent_requests": 128,
            "max_total_tokens": 2048,
            "version": "3.3",
        }
    ),
    "/metrics": shaped("tgi_queue_size 2\ntgi_batch_current_size 7\n"),
}
FOUND = [
    (VLLM, ("vllm", "smol", "0.32.0"), (None, None, 1024), (8, 4)),
    (LLAMACPP, ("llamacpp", "smol", None), (2048, 2, 1024), (2, 2)),
    (SGLANG, ("sglang", "m", "0.5.9"), (4096, 48, 8192), (3, 1)),
    (TGI, ("tgi", "m", "3.3"), (4096, 128, 2048), (7, 2)),
]


@pytest.mark.parametrize(("pages", "who", "limits", "load"), FOUND, ids=["vllm", "llamacpp", "sglang", "tgi"])
def test_an_engine_is_known_by_its_pages(
    pages: dict[str, Page], who: tuple[str, str, str | None], limits: tuple[Any, ...], load: tuple[int, int]
) -> None:
    endpoint, seen = run(ask(pages))
    assert (endpoint.kind, endpoint.model) == who[:2]
    assert endpoint.version == who[2] or (who[2] is None and endpoint.version)
    told = endpoint.limits
    assert (told.token_budget, told.max_sequences, told.max_context) == limits
    assert told.kv_tokens
    assert (seen.running, seen.waiting) == load


def test_an_engine_that_cannot_list_its_models_is_measured_by_name() -> None:
    pages = {"/v1/models": recorded("transformers_serve/models")}
    with pytest.raises(UpstreamError, match="name the model by --model; its /v1/models answered HTTP 500"):
        run(ask(pages))
    endpoint, seen = run(ask(pages, model="smol", kind="transformers"))
    assert (endpoint.kind, endpoint.model, endpoint.token_prompts) == ("transformers", "smol", False)
    assert seen == LoadReport()


def test_a_profile_keeps_the_scheduler_that_it_was_fitted_with() -> None:
    limits = Limits(token_budget=512, max_sequences=4, kv_blocks=256)
    told = {"mixing": "split", "prefill_rows": 64, "busy_prefill_tokens": 64, "max_step_s": 1.0}
    config = replace(scheduling_of("embedded", limits, told), prefill_limit=128)
    rates = Rates(prefill_tokens_per_s=180.0, decode_tokens_per_s=80.0)
    provenance = Provenance(engine="embedded")
    profile = Profile(rates=rates, limits=limits, scheduling=kept_of(config), provenance=provenance)
    found = config_of(decode_profile(encode_profile(profile)))
    assert found == config
    assert Scheduler(found).prefill_limit == 128
    with pytest.raises(InputError, match="cannot be replayed"):
        scheduling_of("embedded", limits, {"mixing": "by magic"})
