"""The official Python client: `python openai_python.py BASE_URL MODEL FLAKY_MODEL SCRIPTED_MODEL`."""

import json
import sys

import openai

base, model, flaky, scripted = sys.argv[1:5]
api = openai.OpenAI(base_url=base + "/v1", api_key="sk-clients-test", max_retries=0)
ASK = {
    "model": model,
    "messages": [{"role": "user", "content": "Name three colours."}],
    "max_tokens": 16,
    "temperature": 0,
}
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 20}}, "required": ["city"]}
TOOL = {"type": "function", "function": {"name": "get_weather", "parameters": PARAMETERS}}
FORCED = {"type": "function", "function": {"name": "get_weather"}}

assert model in [m.id for m in api.models.list()]
print("ok models")
whole = api.chat.completions.create(**ASK)
raw = api.chat.completions.with_raw_response.create(**ASK)
assert raw.headers["x-request-id"]
chunks = list(api.chat.completions.create(**ASK, stream=True, stream_options={"include_usage": True}))
assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == whole.choices[0].message.content
assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
print("ok chat")
request = {**ASK, "max_tokens": 60, "tools": [TOOL], "tool_choice": FORCED}
call = api.chat.completions.create(**request).choices[0].message.tool_calls[0]
assert isinstance(json.loads(call.function.arguments)["city"], str)
pieces = [c.choices[0].delta.tool_calls for c in api.chat.completions.create(**request, stream=True) if c.choices]
text = "".join(t.function.arguments or "" for calls in pieces for t in calls or ())
assert isinstance(json.loads(text)["city"], str)
print("ok tools")
assert api.completions.create(model=model, prompt="One, two,", max_tokens=5).usage.completion_tokens == 5
print("ok completions")
made = api.embeddings.create(model=model, input=["a cat", "a dog"])
assert len(made.data) == 2
assert len(made.data[0].embedding) > 10
print("ok embeddings")
assert api.responses.create(model=scripted, input="hi").output_text
print("ok responses")
for body, kind in (({**ASK, "model": "none"}, openai.NotFoundError), ({**ASK, "n": 99}, openai.BadRequestError)):
    try:
        api.chat.completions.create(**body)
        raise SystemExit("an error was expected")
    except kind as error:
        assert error.body["message"]
print("ok errors")
assert (
    api.with_options(max_retries=3).chat.completions.create(**{**ASK, "model": flaky}).choices[0].message.content
    == "abc"
)
print("ok retries")
