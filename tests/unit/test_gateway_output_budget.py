"""A clipped budget on its way to the engine: per choice, in the field the endpoint reads, and never a larger one."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weighbridge.core.instance import Limits
from weighbridge.gateway.client_request import ClientRequest
from weighbridge.gateway.endpoint import Endpoint
from weighbridge.gateway.output_budget import LIMITS, budget_field
from weighbridge.gateway.pairs import prefill_body
from weighbridge.gateway.settings import InstanceSettings, RequestLimits
from weighbridge.http import ClientLimits

PROMPT: dict[str, dict[str, Any]] = {
    "chat": {"messages": [{"role": "user", "content": "hi"}]},
    "messages": {"messages": [{"role": "user", "content": "hi"}]},
    "responses": {"input": "hi"},
    "completions": {"prompt": "hi"},
}
ENDPOINT = Endpoint(
    InstanceSettings(name="i0", kind="vllm", url="http://127.0.0.1:1", limits=Limits(max_context=4096)),
    ClientLimits(),
    {},
)


def asked(endpoint: str, **fields: Any) -> ClientRequest:
    body = json.dumps({"model": "m", **PROMPT.get(endpoint, {"input": "hi"}), **fields}).encode()
    return ClientRequest(endpoint, body, RequestLimits())


def sent(request: ClientRequest, clip: int) -> dict[str, Any]:
    """The limits in the body that goes to the engine."""
    body, _ = ENDPOINT.edit(request, clip=clip)
    written: dict[str, Any] = json.loads(body)
    assert {k: v for k, v in written.items() if k not in LIMITS} == {
        k: v for k, v in json.loads(request.body).items() if k not in LIMITS
    }
    return {name: written[name] for name in LIMITS if name in written}


@pytest.mark.parametrize(
    ("endpoint", "fields", "clip", "expected"),
    [
        ("chat", {"max_tokens": 100}, 60, {"max_tokens": 60}),
        ("chat", {"max_tokens": 100, "n": 4}, 292, {"max_tokens": 73}),
        ("chat", {"max_tokens": 100, "n": 4}, 3, {"max_tokens": 1}),
        ("chat", {"max_completion_tokens": 100}, 60, {"max_completion_tokens": 60}),
        ("chat", {"max_tokens": 50, "max_completion_tokens": 100}, 80, {"max_tokens": 50, "max_completion_tokens": 80}),
        (
            "chat",
            {"max_tokens": 100, "max_completion_tokens": None},
            60,
            {"max_tokens": 60, "max_completion_tokens": 60},
        ),
        ("chat", {}, 60, {"max_tokens": 60}),
        ("chat", {"max_tokens": None}, 60, {"max_tokens": 60}),
        ("completions", {"max_tokens": 100, "n": 2, "prompt": ["a", "b", "c"]}, 240, {"max_tokens": 40}),
        ("responses", {"max_output_tokens": 100}, 60, {"max_output_tokens": 60}),
        ("responses", {}, 60, {"max_output_tokens": 60}),
        ("responses", {"max_tokens": 100}, 60, {"max_tokens": 60, "max_output_tokens": 60}),
        ("messages", {"max_tokens": 100}, 60, {"max_tokens": 60}),
        ("embeddings", {}, 1, {}),
        ("rerank", {}, 0, {}),
    ],
)
def test_where_a_clipped_budget_stands(
    endpoint: str, fields: dict[str, Any], clip: int, expected: dict[str, int]
) -> None:
    assert sent(asked(endpoint, **fields), clip) == expected


@given(
    st.sampled_from(sorted(PROMPT)),
    st.dictionaries(st.sampled_from(LIMITS), st.one_of(st.none(), st.integers(1, 500)), max_size=3),
    st.integers(1, 8),
    st.integers(0, 5000),
)
def test_no_clip_gives_more_than_was_asked_for(endpoint: str, limits: dict[str, int | None], n: int, clip: int) -> None:
    request = asked(endpoint, n=n, **limits)
    result = sent(request, clip)
    for name, value in limits.items():
        assert value is None or result[name] <= value
    field = budget_field(request)
    assert field is not None
    assert 1 <= result[field] <= request.max_tokens
    assert n * result[field] <= max(n, clip), "all choices together"


@pytest.mark.parametrize("endpoint", sorted(PROMPT))
def test_a_prefill_leg_asks_for_one_token_in_the_endpoints_own_field(endpoint: str) -> None:
    request = asked(endpoint, max_tokens=100, max_output_tokens=90)
    field = budget_field(request)
    assert field is not None
    body = json.loads(prefill_body(request.body, request))
    assert body[field] == 1
    assert all(body.get(name, 1) == 1 for name in LIMITS)
