"""Which grammar a request asks for: OpenAI's `response_format`, vLLM's `structured_outputs`, or GBNF in `grammar`."""

from __future__ import annotations

from typing import Any

from weighbridge.core.errors import RequestError
from weighbridge.engine import fields
from weighbridge.engine.fields import Body
from weighbridge.engine.schema import any_object, choice_grammar, schema_grammar


def read_grammar(body: Body) -> str | None:
    """The grammar to keep to, or None. Raises RequestError for more than one, and for one that is bad."""
    found = [
        grammar
        for grammar in (fields.text(body, "grammar") or None, _response_format(body), _structured(body))
        if grammar is not None
    ]
    if len(found) > 1:
        raise RequestError("give one of response_format, structured_outputs and grammar", param="response_format")
    return found[0] if found else None


def _response_format(body: Body) -> str | None:
    asked = fields.mapping(body, "response_format")
    kind = asked.get("type", "text")
    if kind == "text":
        return None
    if kind == "json_object":
        return any_object()
    if kind == "json_schema":
        schema = fields.mapping(asked, "json_schema").get("schema")
        if schema is None:
            raise RequestError("response_format.json_schema needs a schema", param="response_format")
        return schema_grammar(schema, "response_format.json_schema")
    raise RequestError("response_format.type must be text, json_object or json_schema", param="response_format")


def _structured(body: Body) -> str | None:
    asked = fields.mapping(body, "structured_outputs")
    for key, value in asked.items():
        if value is None:
            continue
        if key == "json":
            return schema_grammar(value, "structured_outputs.json")
        if key == "grammar" and isinstance(value, str):
            return value
        if key == "choice":
            return choice_grammar(_choices(value))
        raise RequestError(f"structured_outputs.{key} is not supported", param=f"structured_outputs.{key}")
    return None


def _choices(value: Any) -> list[str]:
    if not isinstance(value, list) or not value or not all(isinstance(item, str) and item for item in value):
        raise RequestError("structured_outputs.choice must be a list of texts", param="structured_outputs.choice")
    return value
