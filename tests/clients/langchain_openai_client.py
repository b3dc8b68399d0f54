"""langchain-openai: `python langchain_openai_client.py BASE_URL MODEL FLAKY_MODEL SCRIPTED_MODEL`."""

import asyncio
import sys

from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI, OpenAIEmbeddings

base, model, flaky, scripted = sys.argv[1:5]
COMMON = {"base_url": base + "/v1", "api_key": "sk-clients-test"}
chat = ChatOpenAI(model=model, max_tokens=16, temperature=0, max_retries=0, **COMMON)


@tool
def get_weather(city: str) -> str:
    """The weather in a city."""
    return city


whole = chat.invoke("Name three colours.")
assert whole.content
assert whole.usage_metadata["output_tokens"] > 0
print("ok invoke")
parts = list(chat.stream("Name three colours."))
assert "".join(p.content for p in parts) == whole.content
print("ok stream")
with_usage = list(ChatOpenAI(model=model, max_tokens=16, stream_usage=True, **COMMON).stream("Name three colours."))
assert sum((p.usage_metadata or {}).get("output_tokens", 0) for p in with_usage) > 0
print("ok stream usage")


async def together() -> None:
    answers = await asyncio.gather(*(chat.ainvoke(f"Say {n}.") for n in range(4)))
    assert all(a.content for a in answers)


asyncio.run(together())
print("ok async batch")
bound = ChatOpenAI(model=model, max_tokens=60, temperature=0, **COMMON).bind_tools(
    [get_weather], tool_choice="get_weather"
)
call = bound.invoke("Weather in Oslo?").tool_calls[0]
assert (call["name"], type(call["args"]["city"])) == ("get_weather", str)
print("ok tools")
assert OpenAI(model=model, max_tokens=5, **COMMON).invoke("One, two,")
print("ok completions")
vectors = OpenAIEmbeddings(model=model, check_embedding_ctx_length=False, **COMMON).embed_documents(["a cat", "a dog"])
assert len(vectors) == 2
print("ok embeddings")
assert ChatOpenAI(model=flaky, max_retries=3, **COMMON).invoke("hi").content == "abc"
print("ok retries")
assert ChatOpenAI(model=scripted, use_responses_api=True, **COMMON).invoke("hi").text
print("ok responses")
