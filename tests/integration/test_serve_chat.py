"""The official client against `weighbridge serve`: chats, streams, errors, and texts equal to the engine's own."""

from __future__ import annotations

import openai
import pytest

from tests.support.served import Served

MODEL = "smollm2-135m-instruct"
MESSAGES = [{"role": "user", "content": "Name three colours of the rainbow."}]

pytestmark = pytest.mark.engine


def client(base: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=base + "/v1", api_key="unused", max_retries=0, timeout=60)


def test_models_lists_the_embedded_model_once(served: Served) -> None:
    with client(served.url) as api:
        assert [m.id for m in api.models.list()] == [MODEL]


def test_chat_equals_the_engines_own_answer_streamed_and_not(served: Served) -> None:
    asked = {"model": MODEL, "messages": MESSAGES, "max_tokens": 24, "temperature": 0, "seed": 1}
    with client(served.url) as gateway, client(served.instances[0]["url"]) as engine:
        own = engine.chat.completions.create(**asked)
        through = gateway.chat.completions.create(**asked)
        assert through.choices[0].message.content
        assert through.choices[0].message.content == own.choices[0].message.content
        assert through.choices[0].finish_reason == own.choices[0].finish_reason
        assert through.usage is not None and own.usage is not None
        assert through.usage.completion_tokens == own.usage.completion_tokens
        parts, reasons, usages = [], [], []
        stream = gateway.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True})
        for chunk in stream:
            usages += [chunk.usage] if chunk.usage else []
            for choice in chunk.choices:
                parts.append(choice.delta.content or "")
                reasons += [choice.finish_reason] if choice.finish_reason else []
        assert "".join(parts) == own.choices[0].message.content
        assert reasons == [own.choices[0].finish_reason]
        assert [u.completion_tokens for u in usages] == [own.usage.completion_tokens]


def test_a_stream_without_include_usage_carries_none(served: Served) -> None:
    with client(served.url) as api:
        stream = api.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=4, stream=True)
        assert all(chunk.usage is None and chunk.choices for chunk in stream)


def test_completions_with_exact_length_and_stop(served: Served) -> None:
    with client(served.url) as api:
        exact = api.completions.create(
            model=MODEL, prompt="One, two,", max_tokens=17, temperature=0, extra_body={"ignore_eos": True}
        )
        assert exact.usage is not None and exact.usage.completion_tokens == 17
        assert exact.choices[0].finish_reason == "length"
        text = exact.choices[0].text
        stop = text[len(text) // 2 :][:3]
        stopped = api.completions.create(
            model=MODEL, prompt="One, two,", max_tokens=17, temperature=0, stop=[stop], extra_body={"ignore_eos": True}
        )
        assert stopped.choices[0].text == text[: text.index(stop)]
        assert stopped.choices[0].finish_reason == "stop"


def test_context_overflow_is_a_400_with_both_numbers_even_when_streaming(served: Served) -> None:
    with client(served.url) as api:
        for stream in (False, True):
            with pytest.raises(openai.BadRequestError) as caught:
                api.completions.create(model=MODEL, prompt="word " * 20000, max_tokens=5, stream=stream)
            assert caught.value.code == "context_length_exceeded"
            numbers = [int(w) for w in caught.value.message.replace(",", " ").replace(".", " ").split() if w.isdigit()]
            assert len(numbers) >= 2


def test_errors_keep_the_openai_envelope(served: Served) -> None:
    with client(served.url) as api:
        with pytest.raises(openai.NotFoundError) as missing:
            api.chat.completions.create(model="no-such-model", messages=MESSAGES)
        assert missing.value.code == "model_not_found"
        with pytest.raises(openai.BadRequestError) as bad:
            api.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=0)
        assert bad.value.param == "max_tokens"
        assert isinstance(bad.value.body, dict) and bad.value.body["type"] == "invalid_request_error"


def test_every_decision_is_recorded_with_its_terms(served: Served) -> None:
    with client(served.url) as api:
        api.completions.create(model=MODEL, prompt="Count to ten:", max_tokens=3)
    decision = served.get("/decisions?last=1")["decisions"][0]
    assert {c["instance"] for c in decision["candidates"]} == {i["name"] for i in served.instances}
    for candidate in decision["candidates"]:
        assert candidate["score"] == pytest.approx(sum(candidate["terms"].values()))
        assert set(candidate["terms"]) == {"prefill_s", "decode_s"}
        assert candidate["prefill_tokens"] > 0
    assert decision["chosen"] == min(decision["candidates"], key=lambda c: c["score"])["instance"]
