"""Anthropic's Python client: `python anthropic_python.py BASE_URL MODEL FLAKY_MODEL SCRIPTED_MODEL`."""

import sys

import anthropic

base, _, _, scripted = sys.argv[1:5]
api = anthropic.Anthropic(base_url=base, api_key="sk-clients-test", max_retries=0)
ASK = {"model": scripted, "max_tokens": 9, "messages": [{"role": "user", "content": "hi"}]}

whole = api.messages.create(**ASK)
assert whole.content[0].text
assert whole.usage.output_tokens > 0
print("ok message")
with api.messages.stream(**ASK) as stream:
    text = "".join(stream.text_stream)
    final = stream.get_final_message()
assert text == final.content[0].text
assert final.stop_reason
print("ok stream")
try:
    api.messages.create(**{**ASK, "model": "none"})
    raise SystemExit("an error was expected")
except anthropic.NotFoundError as error:
    assert error.status_code == 404
print("ok errors")
patient = anthropic.Anthropic(base_url=base, api_key="sk-clients-test", max_retries=3)
assert patient.messages.create(**{**ASK, "model": "flaky-messages"}).content[0].text
print("ok retries")
