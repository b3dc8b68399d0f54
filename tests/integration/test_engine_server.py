"""The engine's OpenAI server: surface, limits, stop strings, cancellation, cross-talk."""

from __future__ import annotations

import json
import socket
import threading
import time

import openai
import pytest

from tests.support.engines import Listening

pytestmark = pytest.mark.engine
MODEL = "smollm2-135m-instruct"
CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "Name a colour."}], "temperature": 0}
COMPLETION = {"model": MODEL, "prompt": "One, two, three,", "temperature": 0}


def test_the_official_client_chats_streaming_and_not(listener: Listening) -> None:
    with openai.OpenAI(base_url=listener.url + "/v1", api_key="unused", max_retries=0) as client:
        whole = client.chat.completions.create(**CHAT, max_tokens=12)
        stream = client.chat.completions.create(**CHAT, max_tokens=12, stream=True)
        deltas = [choice.delta for chunk in stream for choice in chunk.choices]
    assert whole.choices[0].message.role == deltas[0].role == "assistant"
    assert whole.choices[0].message.content == "".join(delta.content or "" for delta in deltas)
    assert whole.usage is not None
    assert whole.usage.completion_tokens <= 12


def test_one_usage_frame_after_the_finish_and_before_the_end(listener: Listening) -> None:
    body = {**CHAT, "max_tokens": 5, "stream_options": {"include_usage": True}}
    frames = listener.stream("/v1/chat/completions", body)
    assert frames[-1] == "[DONE]"
    assert frames[-2]["choices"] == []
    assert frames[-2]["usage"]["completion_tokens"] == 5
    assert frames[-3]["choices"][0]["finish_reason"] == "length"
    assert all(frame.get("usage") is None for frame in frames[:-2])
    plain = listener.stream("/v1/chat/completions", {**CHAT, "max_tokens": 5})
    assert all(frame["choices"] for frame in plain[:-1])


def test_seed_fixes_a_sampled_text_and_choices_differ(listener: Listening) -> None:
    body = {**COMPLETION, "temperature": 1.0, "max_tokens": 12, "seed": 7, "ignore_eos": True}
    texts = [listener.post("/v1/completions", body)[1]["choices"][0]["text"] for _ in range(2)]
    assert texts[0] == texts[1]
    many = listener.post("/v1/completions", {**body, "n": 3})[1]["choices"]
    assert [choice["index"] for choice in many] == [0, 1, 2]
    assert len({choice["text"] for choice in many}) == 3


def test_interleaved_choices_keep_their_index_and_logprobs(listener: Listening) -> None:
    body = {**CHAT, "n": 2, "logprobs": True, "top_logprobs": 2, "max_tokens": 6, "seed": 3, "temperature": 1.0}
    frames = listener.stream("/v1/chat/completions", body)[:-1]
    ends = [c["index"] for f in frames for c in f["choices"] if c["finish_reason"]]
    assert sorted(ends) == [0, 1]
    for frame in frames:
        (choice,) = frame["choices"]
        (entry,) = choice["logprobs"]["content"]
        assert len(entry["top_logprobs"]) == 2
        if choice["delta"]["content"]:
            assert bytes(entry["bytes"]).decode() == choice["delta"]["content"]


@pytest.mark.parametrize(
    ("prompt", "choices"),
    [("a b", 1), (["a b", "c"], 2), ([504, 505], 1), ([[504], [505, 506]], 2)],
)
def test_every_form_of_prompt_gives_one_choice_each(listener: Listening, prompt: object, choices: int) -> None:
    status, reply = listener.post("/v1/completions", {**COMPLETION, "prompt": prompt, "max_tokens": 2})
    assert status == 200
    assert [choice["index"] for choice in reply["choices"]] == list(range(choices))


@pytest.mark.parametrize("prompt", [[], ["a", 5], [5, "a"], [[]], [[504], "a"], 5, None, {}, [-1], [10**9], [True]])
def test_bad_prompts_are_refused_by_name(listener: Listening, prompt: object) -> None:
    status, reply = listener.post("/v1/completions", {**COMPLETION, "prompt": prompt})
    assert (status, reply["error"]["param"]) == (400, "prompt")


@pytest.mark.parametrize("content", [None, "", [], [{"type": "text", "text": "Hi"}]])
def test_every_empty_content_is_empty(listener: Listening, content: object) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    messages = [CHAT["messages"][0], {"role": "assistant", "content": content, "tool_calls": [call]}, {"role": "user"}]
    status, _ = listener.post("/v1/chat/completions", {**CHAT, "messages": messages, "max_tokens": 1})
    assert status == 200


def test_an_image_is_refused_by_name(listener: Listening) -> None:
    messages = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,x"}}]}]
    status, reply = listener.post("/v1/chat/completions", {**CHAT, "messages": messages})
    assert (status, reply["error"]["param"]) == (400, "messages[0].content")


@pytest.mark.parametrize("value", [-1, 0, 1.5, "5", True])
@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_bad_limits_are_refused_by_name(listener: Listening, name: str, value: object) -> None:
    status, reply = listener.post("/v1/chat/completions", {**CHAT, name: value})
    assert (status, reply["error"]["param"]) == (400, name)


@pytest.mark.parametrize(
    ("limits", "tokens"),
    [
        ({"max_tokens": 1}, 1),
        ({"max_completion_tokens": 2}, 2),
        ({"max_tokens": 9, "max_completion_tokens": 3}, 3),
        ({"max_tokens": None, "max_completion_tokens": 2}, 2),
    ],
)
def test_limits_are_exact_and_the_newer_name_wins(listener: Listening, limits: dict, tokens: int) -> None:
    _, reply = listener.post("/v1/completions", {**COMPLETION, **limits, "ignore_eos": True})
    assert reply["usage"]["completion_tokens"] == tokens
    assert reply["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("huge", [2**31, 2**63, 10**30])
def test_a_huge_limit_is_cut_to_the_context(listener: Listening, huge: int) -> None:
    body = {**COMPLETION, "prompt": [504] * 500, "max_tokens": huge, "ignore_eos": True}
    status, reply = listener.post("/v1/completions", body)
    assert status == 200
    assert reply["usage"] == {
        "prompt_tokens": 500,
        "completion_tokens": 12,
        "total_tokens": 512,
        "prompt_tokens_details": {"cached_tokens": reply["usage"]["prompt_tokens_details"]["cached_tokens"]},
    }
    assert reply["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("stream", [False, True])
def test_the_context_overflows_with_both_numbers_before_a_stream(listener: Listening, stream: bool) -> None:
    for tokens, status in ((511, 200), (512, 400), (513, 400)):
        body = {**COMPLETION, "prompt": [504] * tokens, "max_tokens": 5, "stream": stream and status == 400}
        got, reply = listener.post("/v1/completions", body)
        assert got == status
        if status == 200:
            assert reply["usage"]["completion_tokens"] == 1
            assert reply["choices"][0]["finish_reason"] in ("length", "stop")
        else:
            assert reply["error"]["code"] == "context_length_exceeded"
            assert "512" in reply["error"]["message"]
            assert str(tokens) in reply["error"]["message"]


def test_stop_strings_over_tokens_streamed_as_whole(listener: Listening) -> None:
    body = {**COMPLETION, "prompt": "1 2 3 4 5 6 7 8 9", "max_tokens": 30, "ignore_eos": True}
    free = listener.post("/v1/completions", body)[1]["choices"][0]["text"]
    middle = free[5:9]
    for stops in ([middle], [middle, middle[:3] + "never"], ["never", middle + "never", middle, "x" * 50]):
        whole = listener.post("/v1/completions", {**body, "stop": stops})[1]["choices"][0]
        assert whole["text"] == free[: free.index(middle)]
        assert (whole["finish_reason"], whole["stop_reason"]) == ("stop", middle)
        frames = listener.stream("/v1/completions", {**body, "stop": stops})
        assert "".join(f["choices"][0]["text"] for f in frames[:-1]) == whole["text"]
    unmatched = listener.stream("/v1/completions", {**body, "stop": [free[-3:] + "never"]})
    assert "".join(f["choices"][0]["text"] for f in unmatched[:-1]) == free


def test_errors_use_the_envelope(listener: Listening) -> None:
    status, reply = listener.post("/v1/chat/completions", {**CHAT, "model": "other"})
    assert (status, reply["error"]["code"]) == (404, "model_not_found")
    for body in (b"{", b"[]", b"\xff"):
        status, reply = listener.post("/v1/chat/completions", body)
        assert (status, reply["error"]["type"]) == (400, "invalid_request_error")
    status, reply = listener.post("/v1/chat/completions", {**CHAT, "temperature": 9})
    assert (status, reply["error"]["param"]) == (400, "temperature")


def test_a_client_that_leaves_frees_the_slot_and_others_go_on(listener: Listening) -> None:
    alone = listener.post("/v1/completions", {**COMPLETION, "max_tokens": 20, "ignore_eos": True})[1]
    body = json.dumps({**COMPLETION, "stream": True, "max_tokens": 400, "ignore_eos": True}).encode()
    leaver = socket.create_connection(("127.0.0.1", listener.instance.info.port))
    leaver.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
    assert leaver.recv(4096).startswith(b"HTTP/1.1 200")
    box: list[object] = []
    asked = {**COMPLETION, "max_tokens": 20, "ignore_eos": True}
    other = threading.Thread(target=lambda: box.append(listener.post("/v1/completions", asked)))
    other.start()
    leaver.close()
    left_s = time.monotonic()
    while any(seq.max_output_tokens == 400 for seq in listener.engine.scheduler.running):
        assert time.monotonic() - left_s < 2.0
        time.sleep(0.01)
    other.join()
    status, reply = box[0]  # type: ignore[misc]
    assert status == 200
    assert reply["usage"] == alone["usage"]
    listener.wait_idle()
    assert listener.engine.scheduler.kv_usage == 0
    assert listener.post("/v1/completions", asked)[1]["choices"] == alone["choices"]


def test_requests_that_overlap_get_the_texts_they_get_alone(listener: Listening) -> None:
    """One after another joins while the first streams, one leaves; short prompts keep prefill shapes equal, and decodes
    of several sequences are computed row by row."""
    prompts = ["The capital of France is", "def add(a, b):", "Once upon a time", "My favourite colour is"]
    bodies = [
        {**COMPLETION, "prompt": prompt, "max_tokens": 24, "ignore_eos": True, "cache_salt": f"overlap-{round_}-{i}"}
        for round_ in ("alone", "together")
        for i, prompt in enumerate(prompts)
    ]
    alone = [listener.post("/v1/completions", body)[1]["choices"] for body in bodies[:4]]
    together: dict[int, object] = {}

    def ask(index: int) -> None:
        together[index] = listener.post("/v1/completions", bodies[4 + index])[1]["choices"]

    leaver = socket.create_connection(("127.0.0.1", listener.instance.info.port))
    body = json.dumps(
        {**COMPLETION, "prompt": "I leave", "stream": True, "max_tokens": 400, "ignore_eos": True}
    ).encode()
    leaver.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
    assert leaver.recv(4096).startswith(b"HTTP/1.1 200")
    threads = [threading.Thread(target=ask, args=(index,)) for index in range(4)]
    for index, thread in enumerate(threads):
        thread.start()
        time.sleep(0.05)
        if index == 2:
            leaver.close()
    for thread in threads:
        thread.join(60)
    assert [together[index] for index in range(4)] == alone
    listener.wait_idle()


def test_tokens_and_text_are_each_others_inverse(listener: Listening) -> None:
    text = "Grüße, 世界 🦊!\n"
    tokens = listener.post("/tokenize", {"prompt": text, "add_special_tokens": False})[1]
    assert tokens["count"] == len(tokens["tokens"])
    assert tokens["max_model_len"] == 512
    assert listener.post("/detokenize", {"tokens": tokens["tokens"]})[1]["prompt"] == text
    chat = listener.post("/tokenize", {"messages": CHAT["messages"]})[1]
    _, reply = listener.post("/v1/chat/completions", {**CHAT, "max_tokens": 1})
    assert chat["count"] == reply["usage"]["prompt_tokens"]


def test_metrics_use_the_names_of_vllm(listener: Listening) -> None:
    listener.post("/v1/completions", {**COMPLETION, "max_tokens": 2})
    listener.wait_idle()
    page = listener.get("/metrics")
    labels = '{engine="embedded-0",model_name="smollm2-135m-instruct"}'
    for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
        assert f"vllm:{name}{labels} 0.0" in page
    assert 'block_size="16"' in page
    assert 'num_gpu_blocks="128"' in page
    assert "vllm:time_to_first_token_seconds_bucket" in page
    assert json.loads(listener.get("/v1/models"))["data"][0]["max_model_len"] == 512


def test_embeddings_are_unit_vectors_that_mean_something(listener: Listening) -> None:
    texts = ["The cat sat on the mat.", "A kitten sat on a rug.", "Stock markets fell sharply today."]
    status, reply = listener.post("/v1/embeddings", {"model": MODEL, "input": texts})
    assert status == 200
    vectors = [entry["embedding"] for entry in reply["data"]]
    assert [entry["index"] for entry in reply["data"]] == [0, 1, 2]
    near, far = (sum(a * b for a, b in zip(vectors[0], other, strict=True)) for other in vectors[1:])
    assert near > far
    assert sum(value * value for value in vectors[0]) == pytest.approx(1.0, abs=1e-4)
    with openai.OpenAI(base_url=listener.url + "/v1", api_key="unused", max_retries=0) as client:
        again = client.embeddings.create(model=MODEL, input=texts[0])  # the client asks for base64
    assert again.data[0].embedding == pytest.approx(vectors[0], abs=1e-5)
    for bad in ({"input": []}, {"input": [504] * 513}, {"input": "x", "dimensions": 7}):
        assert listener.post("/v1/embeddings", {"model": MODEL, **bad})[0] == 400


def test_tokenize_counts_what_chat_counts_tools_included(listener: Listening) -> None:
    tool = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}
    base = {"messages": [{"role": "user", "content": "Is it raining?"}]}
    for body in (base, {**base, "tools": [tool]}, {**base, "chat_template_kwargs": {"x": 1}}):
        status, told = listener.post("/tokenize", body)
        chat_status, answered = listener.post("/v1/chat/completions", {**body, "max_tokens": 1})
        assert status == chat_status, "this model's template takes no tools, and both say so"
        if status == 200:
            assert told["count"] == answered["usage"]["prompt_tokens"]
