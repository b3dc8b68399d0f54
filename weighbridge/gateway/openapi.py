"""The OpenAPI documents of both listeners: what the gateway itself checks and answers, and nothing it only passes on.

Request schemas name the fields that the gateway reads. Every other field of OpenAI's API (and any unknown one) goes to
the engine as it came, so the schemas leave them open.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import msgspec

import weighbridge
from weighbridge.core.decision import Decision
from weighbridge.gateway.settings import InstanceSettings, RequestLimits

Json = dict[str, Any]
PROMPTS = {
    "chat": ("messages",),
    "completions": ("prompt",),
    "embeddings": ("input",),
    "responses": ("input",),
    "messages": ("messages",),
}
SUMMARIES = {
    "chat": "Chat completion",
    "completions": "Text completion",
    "embeddings": "Embeddings",
    "responses": "OpenAI responses, passed through",
    "messages": "Anthropic messages, passed through",
    "rerank": "Order documents by a query, passed through",
    "score": "Score pairs of texts, passed through",
    "tokenize": "Token ids of a text, passed through",
    "detokenize": "Text of token ids, passed through",
}
ERRORS = {
    400: "The request is wrong; `param` names the field.",
    401: "The API key is missing or not valid.",
    404: "No such path or model, or not for this key.",
    405: "Another method is needed.",
    408: "The request did not arrive in time.",
    411: "A body needs a length.",
    413: "The body is too large.",
    414: "The address is too long.",
    415: "The body's encoding is not understood.",
    417: "The expectation is not understood.",
    422: "The engine refused the request.",
    429: "Contended, or the key's tokens are spent; see `retry-after`.",
    431: "The head is too large.",
    500: "The gateway failed.",
    502: "Every allowed try failed.",
    503: "No capacity; see `retry-after`.",
}
_ERROR_SCHEMA: Json = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "integer", "null"]},
            },
        }
    },
}
_MODEL_SCHEMA: Json = {
    "type": "object",
    "required": ["id", "object", "created", "owned_by"],
    "properties": {
        "id": {"type": "string"},
        "object": {"const": "model"},
        "created": {"type": "integer"},
        "owned_by": {"type": "string"},
        "max_model_len": {"type": ["integer", "null"]},
    },
}
_ANYTHING: Json = {"type": "object"}


def client_document(paths: Collection[tuple[str, str]], limits: RequestLimits, *, keys: bool, feedback: bool) -> Json:
    """Of the OpenAI listener. `paths`: path and endpoint of what the fleet offers; `keys`: whether keys are needed."""
    found: Json = {path: {"post": _generation(endpoint, limits)} for path, endpoint in paths}
    if feedback:
        properties = {"request_id": _text(), "score": {"type": "number", "minimum": 0, "maximum": 1}}
        schema = {"type": "object", "required": list(properties), "properties": properties}
        found["/v1/feedback"] = {"post": _operation("How good an answer of `model: auto` was", _ANYTHING, body=schema)}
    listing = {
        "type": "object",
        "required": ["object", "data"],
        "properties": {"object": {"const": "list"}, "data": {"type": "array", "items": _ref("Model")}},
    }
    found["/v1/models"] = {"get": _operation("Models of healthy engines", listing)}
    found["/v1/models/{model}"] = {"get": _operation("One model", _ref("Model"), path=("model",))}
    found["/readyz"] = {"get": _operation("Whether requests are taken", None, guarded=False, errors_as_text=(503,))}
    for path in ("/healthz", "/health"):
        found[path] = {"get": _operation("Whether the process lives", None, guarded=False)}
    found["/openapi.json"] = {"get": _operation("This document", _ANYTHING, guarded=False)}
    document = _document("Weighbridge", found, {"Error": _ERROR_SCHEMA, "Model": _MODEL_SCHEMA})
    if keys:
        document["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        document["security"] = [{"key": []}]
    return document


def admin_document(*, token: bool) -> Json:
    """Of the admin listener."""
    (instance, decision), shared = msgspec.json.schema_components(
        (InstanceSettings, Decision), ref_template="#/components/schemas/{name}"
    )
    last = ("last", {"type": "integer", "minimum": 1, "maximum": 2000}, False)
    name = ("name", _text(), True)
    rows = {"type": "array", "items": decision}
    found: Json = {
        "/healthz": {"get": _operation("Whether the process lives", None, guarded=False)},
        "/readyz": {"get": _operation("Whether requests are taken", None, guarded=False, errors_as_text=(503,))},
        "/metrics": {"get": _operation("Prometheus metrics", None)},
        "/fleet": {"get": _operation("Every instance as the router sees it", _ANYTHING)},
        "/decisions": {
            "get": _operation(
                "The last decisions", {"type": "object", "properties": {"decisions": rows}}, query=(last,)
            )
        },
        "/selections": {"get": _operation("Which model answered `model: auto`", _ANYTHING, query=(last,))},
        "/policies": {"get": _operation("The active policy and the known ones", _ANYTHING)},
        "/instances": {"post": _operation("Add an engine", _ANYTHING, body=instance, status=201)},
        "/instances/drain": {"post": _operation("Send nothing new there", _ANYTHING, query=(name,))},
        "/instances/undrain": {"post": _operation("Take it back", _ANYTHING, query=(name,))},
        "/instances/remove": {"post": _operation("Drain and forget it", _ANYTHING, query=(name,))},
        "/reload": {"post": _operation("Read the configuration file again", _ANYTHING, extra={409: "No file."})},
        "/openapi.json": {"get": _operation("This document", _ANYTHING)},
    }
    document = _document("Weighbridge admin", found, {"Error": _ERROR_SCHEMA, **shared})
    if token:
        document["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        document["security"] = [{"key": []}]
    return document


def _document(title: str, paths: Json, schemas: Json) -> Json:
    return {
        "openapi": "3.1.0",
        "info": {"title": title, "version": weighbridge.__version__, "license": {"name": "Apache-2.0"}},
        "paths": paths,
        "components": {"schemas": schemas},
    }


def _generation(endpoint: str, limits: RequestLimits) -> Json:
    reply = _operation(SUMMARIES[endpoint], _ANYTHING, body=_body(endpoint, limits))
    reply["responses"]["200"]["content"]["text/event-stream"] = {}
    return reply


def _body(endpoint: str, limits: RequestLimits) -> Json:
    budget = _integer(1, limits.max_tokens)
    word = {"type": "string", "maxLength": limits.max_stop_chars}
    words = {"type": "array", "items": word, "maxItems": limits.max_stop}
    properties: Json = {
        "model": {"type": ["string", "null"]},
        "stream": {"type": ["boolean", "null"]},
        "stream_options": {"type": ["object", "null"], "properties": {"include_usage": {}}},
        **dict.fromkeys(("max_tokens", "max_completion_tokens", "max_output_tokens"), budget),
        "n": _integer(1, limits.max_n),
        "best_of": _integer(1, limits.max_n),
        "stop": {"anyOf": [word, words, {"type": "null"}]},
        "stop_sequences": {"anyOf": [words, {"type": "null"}]},
        "service_tier": {"type": ["string", "null"]},
    }
    # addresses of engines are the gateway's own to write
    properties |= dict.fromkeys(("kv_transfer_params", "bootstrap_host", "bootstrap_port", "bootstrap_room"), False)
    required = PROMPTS.get(endpoint, ())
    for name in required:
        properties[name] = {}
    if endpoint in ("chat", "messages"):
        properties["messages"] = {"type": "array", "minItems": 1}
    elif endpoint == "embeddings":
        properties["input"] = {"anyOf": [{"not": {"type": "array"}}, {"type": "array", "minItems": 1}]}
    elif endpoint == "completions":
        ids = {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 2**31 - 1}, "minItems": 1}
        most = {"minItems": 1, "maxItems": limits.max_prompts}
        texts = {"type": "array", "items": _text(), **most}
        properties["prompt"] = {"anyOf": [_text(), texts, ids, {"type": "array", "items": ids, **most}]}
    return {"type": "object", "properties": properties, "required": list(required), "additionalProperties": True}


def _operation(
    summary: str, reply: Json | None, *, body: Json | None = None, status: int = 200, guarded: bool = True,
    query: tuple[tuple[str, Json, bool], ...] = (), path: tuple[str, ...] = (),
    errors_as_text: tuple[int, ...] = (), extra: dict[int, str] | None = None,
) -> Json:  # fmt: skip
    """One operation; `reply` None is plain text."""
    kind = "text/plain" if reply is None else "application/json"
    content = {kind: {"schema": {"type": "string"} if reply is None else reply}}
    failure = {"application/json": {"schema": _ref("Error")}}
    responses: Json = {str(status): {"description": "Done.", "content": content}}
    for number, text in {**ERRORS, **(extra or {})}.items():
        shown = {"text/plain": {"schema": {"type": "string"}}} if number in errors_as_text else failure
        responses[str(number)] = {"description": text, "content": shown}
    parameters = [{"name": n, "in": "query", "required": must, "schema": s} for n, s, must in query]
    parameters += [{"name": n, "in": "path", "required": True, "schema": _text(1)} for n in path]
    operation: Json = {"summary": summary, "parameters": parameters, "responses": responses}
    if body is not None:
        operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": body}}}
    if not guarded:
        operation["security"] = []
    return operation


def _ref(name: str) -> Json:
    return {"$ref": f"#/components/schemas/{name}"}


def _text(least: int = 0) -> Json:
    return {"type": "string", "minLength": least} if least else {"type": "string"}


def _integer(low: int, high: int) -> Json:
    return {"type": ["integer", "null"], "minimum": low, "maximum": high}
