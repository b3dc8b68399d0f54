"""Exact prompt lengths by a tokenizer file, and what templates add, learned from usage."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.gateway import chat, front, whole
from tests.support.loop import run
from tests.support.upstream import Call, FakeUpstream
from weighbridge.core.errors import ConfigError
from weighbridge.gateway import Gateway, GatewaySettings
from weighbridge.gateway.client_request import ClientRequest
from weighbridge.gateway.settings import RequestLimits
from weighbridge.gateway.tokenizer_file import TokenCounter


def words(text: str) -> int:
    return len(text.split())


def request(endpoint: str = "chat", **body: Any) -> ClientRequest:
    return ClientRequest(endpoint, json.dumps({"model": "m", **body}).encode(), RequestLimits())


def conversation(turns: int) -> ClientRequest:
    return request(messages=[{"role": "user", "content": "one two three"} for _ in range(turns)])


def test_what_the_template_adds_is_learned_per_number_of_messages() -> None:
    counter = TokenCounter(words)
    template = {1: 9, 2: 14, 5: 29}  # 4 more per message than its words, and 5 at the start
    for turns, added in template.items():
        counter.learn(conversation(turns), 4 * turns + added)
    for turns, added in template.items():
        assert counter.tokens(conversation(turns)) == 4 * turns + added
    assert counter.tokens(conversation(6)) == 4 * 6 + 29 + 4, "near what is known"
    assert TokenCounter(words).tokens(conversation(2)) == 4 * 2 + 8, "nothing known: a usual template"


@pytest.mark.parametrize(
    ("content", "count"),
    [
        ("a b", 2),
        (None, 0),
        ("", 0),
        ([], 0),
        ([{"type": "text", "text": "a b"}, {"type": "text", "text": "c"}], 3),
        ([{"type": "image_url", "image_url": {"url": "http://x"}}], 0),
        (5, 0),
    ],
)
def test_every_shape_of_content_is_counted(content: Any, count: int) -> None:
    counter = TokenCounter(words)
    one = request(messages=[{"role": "user", "content": content}])
    counter.learn(request(messages=[{"role": "user", "content": ""}]), 1)
    assert counter.tokens(one) == 1 + count


def test_prompts_tools_and_what_cannot_be_counted() -> None:
    counter = TokenCounter(words)
    counter.learn(request("completions", prompt=""), 1)
    assert counter.tokens(request("completions", prompt="a b c")) == 4
    counter.learn(request("completions", prompt=["", ""]), 2)
    assert counter.tokens(request("completions", prompt=["a b", "c"])) == 5
    assert counter.tokens(request("completions", prompt=[1, 2, 3])) is None
    assert counter.tokens(request("embeddings", input="a b")) is None
    plain, tooled = (request(messages=[{"role": "user", "content": "x"}], **t) for t in ({}, {"tools": [{"a": "b c"}]}))
    assert (counter.tokens(tooled) or 0) > (counter.tokens(plain) or 0)


def test_memory_is_bounded() -> None:
    counter = TokenCounter(words)
    for turns in range(1, 1200):
        counter._added[("chat", turns)] = 1.0
        if len(counter._added) == 1000:
            break
    counter.learn(conversation(1500), 9000)
    assert len(counter._added) == 1000


def test_the_router_gets_the_exact_length() -> None:
    async def script(call: Call) -> None:
        await call.reply(200, whole(prompt=7))

    async def main() -> None:
        async with FakeUpstream(script) as upstream, front(upstream) as f:
            f.gateway.surface.estimator.counters["m"] = TokenCounter(words)
            for _ in range(2):
                assert (await f.post(chat(stream=False, messages=[{"role": "user", "content": "a b"}]))).status == 200
            seen = [r.decision.candidates[0].prefill_tokens for r in f.gateway.driver.decisions]
            assert seen == [3 + 4, 7], "first a usual template, then the engine's own count"

    run(main())


def test_a_missing_package_or_file_is_one_clear_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"weighbridge\[tokenizer\]|is not a tokenizer.json"):
        Gateway(GatewaySettings(tokenizers={"m": str(tmp_path / "none.json")}), {})


def test_a_real_tokenizer_file(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers", reason="the tokenizer extra is not installed")
    from weighbridge.gateway.tokenizer_file import read_tokenizer

    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 1, "[U]": 2}, unk_token="[U]"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.save(str(tmp_path / "tokenizer.json"))
    counter = read_tokenizer(str(tmp_path / "tokenizer.json"))
    counter.learn(request("completions", prompt=""), 1)
    assert counter.tokens(request("completions", prompt="a b x a")) == 5
