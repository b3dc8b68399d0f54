"""No key that the gateway reads may stand twice, however a body is spelled; other keys are no concern of it."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weighbridge.core.errors import RequestError
from weighbridge.gateway.client_request import ClientRequest
from weighbridge.gateway.settings import RequestLimits

PROMPT = '[{"role":"user","content":"%s"}]'
TEXTS = ["hi", '\\"model\\":', '\\"messages\\":[{', "\\\\", "\\u0041"]
KEYS = st.sampled_from(["model", "messages", "n", "x", "mod\\u0065l", "\\u006e", "y\\\\"])
NESTED = ['{"model":"b","model":"c"}', '{"messages":%s}', '"\\"messages\\":"', "[]", '{"n":1,"n":2}', "1"]


@st.composite
def bodies(draw: st.DrawFn) -> str:
    """JSON objects whose keys and values like to look like each other's."""
    prompt = PROMPT % draw(st.sampled_from(TEXTS))
    pairs = []
    for key in draw(st.lists(KEYS, min_size=1, max_size=5)):
        name = json.loads(f'"{key}"')
        value = draw(st.sampled_from(NESTED)).replace("%s", prompt)
        pairs.append((key, {"model": '"m"', "messages": prompt, "n": "1"}.get(name, value)))
    if "messages" not in [key for key, _ in pairs]:
        pairs.insert(draw(st.integers(0, len(pairs))), ("messages", prompt))
    colon = draw(st.sampled_from([":", ": ", " :", ":  "]))
    return "{" + draw(st.sampled_from([",", " , "])).join(f'"{key}"{colon}{value}' for key, value in pairs) + "}"


@given(bodies())
def test_a_repeated_key_is_found_and_nothing_else(body: str) -> None:
    names: list[str] = []
    json.loads(body, object_pairs_hook=lambda pairs: names.__setitem__(slice(None), [name for name, _ in pairs]))
    repeated = [name for name in ("model", "messages", "n") if names.count(name) > 1]
    if repeated:
        with pytest.raises(RequestError) as caught:
            ClientRequest("chat", body.encode(), RequestLimits())
        assert caught.value.code == "duplicate_key"
        assert caught.value.param in repeated
    else:
        request = ClientRequest("chat", body.encode(), RequestLimits())
        assert request.text.startswith(b'[{"role"')
