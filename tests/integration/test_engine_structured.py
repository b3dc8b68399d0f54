"""Grammars from schemas, as llama.cpp's own matcher reads them; forced JSON and tool calls from the real model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.engines import Listening, listening
from weighbridge.core.errors import RequestError
from weighbridge.engine.grammar import Grammar
from weighbridge.engine.instance import InstanceOptions
from weighbridge.engine.model import LlamaModel
from weighbridge.engine.schema import any_object, choice_grammar, schema_grammar

pytestmark = pytest.mark.engine
PERSON = {
    "type": "object",
    "properties": {
        "z": {"type": "string", "maxLength": 5},
        "a": {"type": "integer"},
        "m": {"type": "array", "items": {"enum": ["x", 2, None]}, "minItems": 1, "maxItems": 2},
    },
    "required": ["a"],
}
TREE = {
    "$ref": "#/$defs/node",
    "$defs": {
        "node": {"type": "object", "properties": {"next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]}}}
    },
}


def accepts(model: LlamaModel, source: str, text: str) -> bool:
    """Whether the whole text, and then the end, is allowed."""
    grammar = Grammar(model, source)
    try:
        for token in model.tokenize(text, add_special=False, parse_special=False):
            if not grammar.allows(token):
                return False
            grammar.accept(token)
        return grammar.allows(model.eos)
    finally:
        grammar.close()


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        (PERSON, ['{"a": 1}', '{"z": "hi", "a": -20, "m": ["x", null]}', '{"a":0,"m":[2]}'], ["{}", '{"z": "hi"}']),
        (PERSON, ['{"z":"12345","a":1}'], ['{"z":"123456","a":1}', '{"a":1,"z":"x"}', '{"a":1,"m":[]}', '{"a":1.5}']),
        (TREE, ["{}", '{"next": {"next": null}}'], ['{"next": 5}', '{"other": 1}']),
        ({"type": ["string", "null"]}, ['"ü\\n\\u00e9"', "null"], ["5", '"a\nb"', "nul"]),
        ({"const": {"k": "v"}}, ['{"k": "v"}'], ['{"k": "w"}']),
        ({"type": "number"}, ["-0.5e+10", "7"], ["01", "1.", "+1"]),
        (
            {"type": "array", "prefixItems": [{"type": "integer"}, {"type": "boolean"}]},
            ["[1, true]"],
            ["[1]", "[true, 1]"],
        ),
        (
            {"properties": {"x": {"type": "null"}, "y": {"type": "null"}}},
            ["{}", '{"y":null}', '{"x":null, "y":null}'],
            ['{"y":null,"x":null}'],
        ),
        ({}, ["[1, {}]", '"x"'], ["x"]),
        (
            {"type": "integer", "minimum": 8, "exclusiveMaximum": 121},
            ["8", "99", "120"],
            ["7", "121", "-8", "08", "8.0"],
        ),
        ({"type": "integer", "maximum": -3.5}, ["-4", "-123456"], ["-3", "4", "0"]),
        ({"type": "number", "minimum": 0}, ["0", "1.5", "2e-3"], ["-1"]),
        (
            {"type": "string", "pattern": '^[A-Z]{2}-\\d+"?$'},
            ['"AB-1"', '"XY-007\\""'],
            ['"AB-"', '"ab-1"', '"AB-1x"', '"AB-1""'],
        ),
        ({"type": "string", "pattern": "fox|é"}, ['"a fox, \\n"', '"é"'], ['"dog"']),
        (
            {"allOf": [PERSON, {"required": ["z"]}, {"properties": {"a": {"minimum": 5}}}]},
            ['{"z": "x", "a": 5}'],
            ['{"a": 5}', '{"z": "x", "a": 4}'],
        ),
        (
            {"$ref": "#/$defs/name", "maxLength": 3, "$defs": {"name": {"type": "string", "minLength": 2}}},
            ['"ab"', '"abc"'],
            ['"a"', '"abcd"'],
        ),
        (
            {
                "type": "object",
                "properties": {"a": {"type": "null"}, "b": {"type": "null"}},
                "anyOf": [{"required": ["a"]}, {"required": ["b"]}],
            },
            ['{"a":null}', '{"b":null}', '{"a":null,"b":null}'],
            ["{}"],
        ),
        ({"type": "string", "enum": ["a", 1, "b"]}, ['"a"', '"b"'], ["1"]),
        ({"type": ["integer", "null"], "minimum": 1}, ["null", "1"], ["0"]),
        (
            {"type": "object", "additionalProperties": {"type": "boolean"}},
            ["{}", '{"x": true, "y":false}'],
            ['{"x": 1}'],
        ),
        ({"minLength": 1, "maxLength": 2}, ['"a"', '"ab"'], ['""', '"abc"']),
    ],
)
def test_what_fits_a_schema_is_what_the_grammar_allows(
    model: LlamaModel, schema: Any, good: list[str], bad: list[str]
) -> None:
    source = schema_grammar(schema)
    for text in good:
        assert accepts(model, source, text), text
    for text in bad:
        assert not accepts(model, source, text), text


def test_any_object_and_choices(model: LlamaModel) -> None:
    assert accepts(model, any_object(), '{"a": [1, {"b": null}], "c": "d"}')
    assert not accepts(model, any_object(), "[1]")
    source = choice_grammar(["yes", 'n"o\n'])
    assert accepts(model, source, 'n"o\n')
    assert not accepts(model, source, "yesyes")


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "string", "pattern": "(?=a)"},
        {"type": "string", "pattern": "a+", "maxLength": 3},
        {"type": "number", "minimum": 0.5},
        {"type": "integer", "minimum": 2, "maximum": 1},
        {"type": "integer", "minimum": "2"},
        {"type": "integer", "multipleOf": 2},
        {"minimum": 2},
        {"not": {"type": "null"}},
        {"allOf": [{"type": "string"}, {"type": "integer"}]},
        {"allOf": [{"pattern": "a"}, {"pattern": "b"}]},
        {"allOf": [{"$ref": "#"}]},
        {"allOf": [False]},
        {"const": "a", "enum": ["b"]},
        {"type": "array", "prefixItems": [{}], "minItems": 2},
        {"type": "object", "required": ["a"]},
        {"type": "thing"},
        {"enum": []},
        {"$ref": "#/nowhere"},
        {"$ref": "http://x"},
        5,
        {"properties": {"a": {}}, "required": ["b"]},
        {"type": "array", "minItems": 3, "maxItems": 2},
    ],
)
def test_what_cannot_be_kept_to_is_refused(schema: Any) -> None:
    with pytest.raises(RequestError, match="schema "):
        schema_grammar(schema)


def test_response_format_is_kept_to(listener: Listening) -> None:
    body = {
        "messages": [{"role": "user", "content": "Describe a fox."}],
        "max_tokens": 80,
        "temperature": 0,
        "response_format": {"type": "json_schema", "json_schema": {"name": "p", "schema": PERSON}},
    }
    _, reply = listener.post("/v1/chat/completions", body)
    value = json.loads(reply["choices"][0]["message"]["content"])
    assert isinstance(value["a"], int)
    assert reply["choices"][0]["finish_reason"] == "stop"
    _, reply = listener.post(
        "/v1/completions", {"prompt": "Yes or no?", "structured_outputs": {"choice": ["oui", "non"]}}
    )
    assert reply["choices"][0]["text"] in ("oui", "non")
    for bad in ({"response_format": {"type": "xml"}}, {"response_format": {"type": "json_schema"}}):
        assert listener.post("/v1/chat/completions", {**body, **bad})[0] == 400
    status, reply = listener.post("/v1/completions", {"prompt": "x", "grammar": "root ::= ("})
    assert (status, reply["error"]["param"]) == (400, "grammar")


TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {"type": "object", "properties": {key: {"enum": ["Rome", "Oslo"]}}, "required": [key]},
        },
    }
    for name, key in (("weather", "city"), ("time", "place"))
]
TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}{% for m in messages %}{{ m.role }}: {{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


@pytest.fixture(scope="module")
def tooled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Listening]:
    path: Path = tmp_path_factory.mktemp("template") / "tools.jinja"
    path.write_text(TEMPLATE)
    options = InstanceOptions(slots=2, context_tokens=768, threads=1, probe=False, chat_template=str(path))
    with listening(options) as running:
        yield running


def test_a_forced_tool_call_streams_as_it_is(tooled: Listening, listener: Listening) -> None:
    ask = {
        "messages": [{"role": "user", "content": "What is the weather in Oslo?"}],
        "tools": TOOLS,
        "tool_choice": {"type": "function", "function": {"name": "weather"}},
        "max_tokens": 60,
        "temperature": 0,
    }
    status, reply = tooled.post("/v1/chat/completions", ask)
    assert status == 200
    (choice,) = reply["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] is None
    (call,) = choice["message"]["tool_calls"]
    assert (call["type"], call["function"]["name"]) == ("function", "weather")
    assert json.loads(call["function"]["arguments"])["city"] in ("Rome", "Oslo")
    assert tooled.post("/tokenize", ask)[1]["count"] == reply["usage"]["prompt_tokens"], "tools are counted"
    frames = tooled.stream("/v1/chat/completions", ask)[:-1]
    deltas = [entry for f in frames for c in f["choices"] for entry in c["delta"].get("tool_calls", [])]
    assert [(d["index"], d["function"]["name"]) for d in deltas] == [(0, "weather")]
    assert "".join(c["delta"]["content"] for f in frames for c in f["choices"]).strip() == ""
    history = [
        *ask["messages"],
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "5"},
    ]
    assert tooled.post("/v1/chat/completions", {**ask, "messages": history, "tool_choice": "none"})[0] == 200
    status, reply = listener.post("/v1/chat/completions", ask)
    assert (status, reply["error"]["code"]) == (400, "unsupported_parameter")
    assert tooled.post("/v1/chat/completions", {**ask, "tool_choice": "other"})[0] == 400
