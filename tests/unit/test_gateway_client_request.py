"""What the gateway reads in a body: prompt shapes, budgets, caps and the errors that name the field."""

import json
import time
from typing import Any

import pytest

from weighbridge.core.errors import RequestError
from weighbridge.gateway.client_request import ClientRequest
from weighbridge.gateway.estimate import TokenEstimator
from weighbridge.gateway.prefix_hashes import prefix_hashes
from weighbridge.gateway.settings import RequestLimits

LIMITS = RequestLimits()


def chat(**fields: Any) -> ClientRequest:
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], **fields}
    return ClientRequest("chat", json.dumps(body).encode(), LIMITS)


def complete(prompt: Any, **fields: Any) -> ClientRequest:
    return ClientRequest("completions", json.dumps({"model": "m", "prompt": prompt, **fields}).encode(), LIMITS)


@pytest.mark.parametrize(
    "content",
    [None, "", [], "text", [{"type": "text", "text": "a"}], [{"type": "input_audio", "input_audio": {"data": "AA"}}]],
)
def test_every_shape_of_content_is_measured(content: Any) -> None:
    call = [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}]
    parsed = chat(messages=[{"role": "assistant", "content": content, "tool_calls": call}, {"role": "user"}])
    assert parsed.text_bytes > 0
    assert parsed.media == 0


def test_inline_media_counts_as_media_not_as_text() -> None:
    url = "data:image/png;base64," + "A" * 100_000
    parsed = chat(messages=[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}])
    assert parsed.media == 1
    assert parsed.text_bytes < 200
    assert 100 < TokenEstimator().tokens("m", parsed.text_bytes, parsed.media) < 2000


def test_completion_prompts() -> None:
    assert complete("hello").text == b"hello"
    assert complete(["a", "b"]).n == 2
    ids = complete([1, 2, 3])
    assert (ids.exact_tokens, ids.n) == (3, 1)
    batch = complete([[1, 2], [3, 4, 5]], n=2)
    assert (batch.exact_tokens, batch.n) == (5, 4)
    for bad in ([], [1, "a"], ["a", 1], [[1], "a"], [[]], [True], {"a": 1}, 5, None, [1.5], [-1]):
        with pytest.raises(RequestError) as caught:
            complete(bad)
        assert (caught.value.status, caught.value.param) == (400, "prompt")
    assert complete([1, 2.0]).exact_tokens == 2
    for literal in ("1" * 6000, "1e999", "-1e999", "[" * 300):
        with pytest.raises(RequestError) as caught:
            ClientRequest("completions", f'{{"model":"m","prompt":[{literal}]}}'.encode(), LIMITS)
        assert caught.value.status == 400
    for big in ([10**22], [[1], [2**31]]):
        with pytest.raises(RequestError, match="no vocabulary"):
            complete(big)


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_output_budgets(name: str) -> None:
    assert chat(**{name: 1}).max_tokens == 1
    assert chat(**{name: 2}).max_tokens == 2
    assert chat(**{name: None}).max_tokens == LIMITS.default_max_tokens
    assert chat(**{name: 7.0}).max_tokens == 7
    assert chat(**{name: LIMITS.max_tokens}).max_tokens == LIMITS.max_tokens
    for bad in (-1, 0, 1.5, "5", True, [1], LIMITS.max_tokens + 1, 2**63, 10**30):
        with pytest.raises(RequestError) as caught:
            chat(**{name: bad})
        assert (caught.value.status, caught.value.param) == (400, name)


def test_the_newer_budget_name_wins() -> None:
    assert chat(max_tokens=5, max_completion_tokens=7).max_tokens == 7


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (b"", "invalid_json"),
        (b"{", "invalid_json"),
        (b'{"model":"m","messages":[]} x', "invalid_json"),
        (b"[]", "invalid_type"),
        (b'"x"', "invalid_type"),
        (b'{"model":5,"messages":[]}', "invalid_type"),
        (b'{"model":"m","messages":"hi"}', "invalid_type"),
        (b'{"model":"m"}', "missing_required_parameter"),
        (b'{"model":"m","messages":[],"stream":"yes"}', "invalid_type"),
        (b'{"model":"m","model":"other","messages":[]}', "duplicate_key"),
        (b'{"model":"m","mod\\u0065l":"other","messages":[]}', "duplicate_key"),
        (b'{"model":"m","messages":[],"n":1,"max_tokens":1,"max_tokens":900}', "duplicate_key"),
        (b'{"model":"m","messages":[],"x":' + b"[" * 50_000 + b"]" * 50_000 + b"}", "nesting_too_deep"),
        (b'{"model":"m\xff","messages":[]}', "invalid_json"),
        (b'{"model":"m","m\\u006f\xae":1,"messages":[1]}', "invalid_json"),
        (b'{"model":"m","user":"\xed\xa0\x80","messages":[1]}', "invalid_json"),
        (b'{"model":"m","messages":[]}', "empty_array"),
        (b'{"model":"m","messages":[ \n ]}', "empty_array"),
    ],
)
def test_bad_bodies(body: bytes, code: str) -> None:
    with pytest.raises(RequestError) as caught:
        ClientRequest("chat", body, LIMITS)
    assert (caught.value.status, caught.value.code) == (400, code)


@pytest.mark.parametrize("text", ["\\ud800", "\\uD83dx", "a\\udc00", "\\ude00\\ud83d"])
def test_half_a_surrogate_pair_is_named(text: str) -> None:
    for body in (f'{{"model":"m","messages":[{{"content":"{text}"}}]}}', f'{{"model":"{text}","messages":[1]}}'):
        with pytest.raises(RequestError) as caught:
            ClientRequest("chat", body.encode(), LIMITS)
        assert "half of a surrogate pair" in caught.value.message
    whole = '{"model":"m","messages":[{"content":"\\ud83d\\ude00"}]}'
    ClientRequest("chat", whole.encode(), LIMITS)


def test_a_large_body_may_not_repeat_any_key_and_costs_little() -> None:
    many = b"[" + b",".join([b'{"role":"user","content":"x"}'] * 30_000) + b"]"
    body = b'{"model":"m","user":"a","user":"b","messages":' + many + b"}"
    with pytest.raises(RequestError, match="`user` stands twice"):
        ClientRequest("chat", body, LIMITS)
    begun = time.process_time()
    parsed = ClientRequest("chat", body.replace(b'"user":"b",', b""), LIMITS)
    parsed.set_model("other")
    assert time.process_time() - begun < 0.1, "a megabyte of tokens must not hold up the loop"


def test_repeated_words_in_values_are_no_repeated_keys() -> None:
    assert chat(messages=[{"role": "user", "content": '"model" "model"', "n": 1}], n=1, tools=[{"n": 1}]).n == 1


def test_caps() -> None:
    for fields in ({"n": 0}, {"n": 99}, {"stop": ["x"] * 17}):
        with pytest.raises(RequestError) as caught:
            chat(**fields)
        assert caught.value.param == next(iter(fields))
    with pytest.raises(RequestError):
        complete(["x"] * 257)


def test_estimate_learns_the_ratio_of_each_model() -> None:
    estimator = TokenEstimator()
    assert estimator.tokens("m", 4000) == 1000
    for _ in range(200):
        estimator.learn("m", 3000, 1000)
    assert estimator.tokens("m", 3000) == pytest.approx(1000, rel=0.01)
    assert estimator.tokens("other", 4000) == 1000


def test_prefix_hashes_chain_and_separate_tenants() -> None:
    text = bytes(range(256)) * 4
    all_blocks = prefix_hashes(b"tenant", text, 64, 1000)
    assert len(all_blocks) == 16
    assert prefix_hashes(b"tenant", text[:300], 64, 1000) == all_blocks[:4]
    assert prefix_hashes(b"tenant", text, 64, 3) == all_blocks[:3]
    changed = bytes([1]) + text[1:]
    assert set(prefix_hashes(b"tenant", changed, 64, 1000)).isdisjoint(all_blocks)
    assert set(prefix_hashes(b"other", text, 64, 1000)).isdisjoint(all_blocks)


def test_a_longer_conversation_shares_the_earlier_ones_prefix() -> None:
    turns = [{"role": "user", "content": f"turn {n} " + "x" * 200} for n in range(6)]
    tools = [{"type": "function", "function": {"name": "f"}}]
    short, long = chat(messages=turns[:3], tools=tools), chat(messages=turns, tools=tools)
    a, b = (prefix_hashes(b"t", r.text, 64, 1000) for r in (short, long))
    assert len(a) > 5
    assert b[: len(a)] == a


@pytest.mark.parametrize("field", ["stop", "stop_sequences"])
def test_stop_strings_are_few_and_short(field: str) -> None:
    most = LIMITS.max_stop_chars
    for good in ([], ["x" * most], ["é" * most] * LIMITS.max_stop, None):
        chat(**{field: good})
    for bad in (["x"] * (LIMITS.max_stop + 1), ["ok", "x" * (most + 1)], ["x" * 3_000_000]):
        with pytest.raises(RequestError, match=f"`{field}`.*at most") as caught:
            chat(**{field: bad})
        assert (caught.value.status, caught.value.param) == (400, field)
    chat(stop="x" * most)
    with pytest.raises(RequestError, match=f"at most {most} characters"):
        chat(stop="x" * (most + 1))
    with pytest.raises(RequestError) as caught:
        chat(**{field: 5})
    assert caught.value.param == field


def nested(levels: int, field: str = "tools") -> bytes:
    """A body whose `field` has so many levels below the object's own."""
    value = b"[" * levels + b"]" * levels
    return b'{"model":"m","messages":[{"role":"user","content":"]]}"}],"%b":%b,"z":"[{\\""}' % (field.encode(), value)


def test_bodies_are_nested_as_deep_as_allowed_and_no_deeper() -> None:
    most = LIMITS.max_depth
    ClientRequest("chat", nested(most - 1), LIMITS)
    for levels in (most, most + 1, 5 * most, 20_000):
        for field in ("tools", "made_up"):
            with pytest.raises(RequestError, match=f"`{field}` is nested deeper than the {most} levels") as caught:
                ClientRequest("chat", nested(levels, field), LIMITS)
            assert (caught.value.status, caught.value.param) == (400, field)
    with pytest.raises(RequestError, match="nested deeper"):  # where to look would take too long
        ClientRequest("chat", nested(200_000), LIMITS)
    with pytest.raises(RequestError, match="more than 100000 lists and objects"):
        ClientRequest("chat", b'{"model":"m","messages":[%b]}' % b",".join([b"{}"] * 100_001), LIMITS)
    wide = ClientRequest("chat", b'{"model":"m","messages":[%b]}' % b",".join([b'{"a":["[[["]}'] * 9_000), LIMITS)
    assert wide.text_bytes > 9_000


def test_a_lower_cap_holds_for_plain_messages_too() -> None:
    with pytest.raises(RequestError, match="`messages` is nested deeper than the 2 levels"):
        ClientRequest("chat", b'{"model":"m","messages":[{"role":"user"}]}', RequestLimits(max_depth=2))
