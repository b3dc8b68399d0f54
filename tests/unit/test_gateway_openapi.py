"""Both listeners describe themselves, and what they answer is what they describe."""

import json
from typing import Any

import jsonschema
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.gateway import MODEL, answer, chat, front
from tests.support.loop import run
from tests.support.upstream import FakeUpstream
from weighbridge.core.errors import RequestError
from weighbridge.gateway.client_request import ClientRequest
from weighbridge.gateway.openapi import admin_document, client_document
from weighbridge.gateway.settings import RequestLimits
from weighbridge.gateway.surface import ENDPOINTS

LIMITS = RequestLimits()
DOCUMENT = client_document(tuple(ENDPOINTS.items()), LIMITS, keys=True, feedback=True)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 20) | st.floats(0.5, 20.0) | st.text(max_size=4) | st.just(2**31),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=6,
)
FIELDS = ("model", "stream", "stream_options", "max_tokens", "max_completion_tokens", "n", "best_of", "stop", "user")
BODIES = st.fixed_dictionaries(
    {}, optional=dict.fromkeys((*FIELDS, "messages", "prompt", "input", "service_tier", "bootstrap_host"), JSON)
)


def _schema(path: str) -> dict[str, Any]:
    found: dict[str, Any] = DOCUMENT["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
    return found


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(path=st.sampled_from(sorted(ENDPOINTS)), body=BODIES)
def test_a_body_is_accepted_exactly_when_the_document_says_so(path: str, body: dict[str, Any]) -> None:
    valid = jsonschema.Draft202012Validator(_schema(path)).is_valid(body)
    try:
        ClientRequest(ENDPOINTS[path], json.dumps(body).encode(), LIMITS)
        accepted = True
    except RequestError as error:
        assert error.status == 400
        accepted = False
    assert accepted == valid, "document and gateway disagree"


def test_the_documents_are_served_and_offer_what_the_fleet_offers() -> None:
    async def main() -> None:
        async with FakeUpstream(answer) as upstream, front(upstream, instance_fields={"kind": "llamacpp"}) as f:
            served = (await f.get("/openapi.json")).json()
            assert "/v1/chat/completions" in served["paths"]
            assert "/v1/score" not in served["paths"]
            assert "security" not in served
            for number, path in ((200, f"/v1/models/{MODEL}"), (404, "/v1/models/none"), (404, "/nope")):
                reply = await f.get(path)
                assert reply.status == number
                _conforms(reply, served, "/v1/models/{model}", "get")
            for number, body in ((200, chat(False)), (200, chat()), (404, chat(model="x")), (400, b"{")):
                reply = await f.post(body)
                assert reply.status == number
                _conforms(reply, served, "/v1/chat/completions", "post")
            admin = (await f.get("/openapi.json", admin=True)).json()
            for path in ("/fleet", "/decisions", "/policies", "/metrics", "/readyz"):
                reply = await f.get(path, admin=True)
                assert reply.status == 200
                _conforms(reply, admin, path, "get")
            for query in ("0", "", "2001", "x", "5&last=6", "%b2"):
                assert (await f.get(f"/decisions?last={query}", admin=True)).status == 400

    run(main())


def test_keys_and_tokens_are_declared() -> None:
    assert DOCUMENT["security"] == [{"key": []}]
    assert admin_document(token=True)["security"] == [{"key": []}]
    assert "security" not in admin_document(token=False)


def _conforms(reply: Any, document: dict[str, Any], path: str, method: str) -> None:
    response = document["paths"][path][method]["responses"][str(reply.status)]
    kind = reply.header(b"content-type").decode().partition(";")[0]
    content = response["content"][kind]
    if kind == "application/json":
        resolved = {**content["schema"], "components": document["components"]}
        jsonschema.Draft202012Validator(resolved).validate(reply.json())
