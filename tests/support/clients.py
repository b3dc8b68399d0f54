"""Seeded clients of a running gateway: whole answers, streams, and clients that go away at a random point."""

from __future__ import annotations

import asyncio
import random

import openai

from tests.support.served import Served

MODEL = "smollm2-135m-instruct"


async def ask(api: openai.AsyncOpenAI, number: int, *, tokens: int, cancel_after_s: float | None, stream: bool) -> str:
    """One request of exactly `tokens` output tokens; returns how it ended for the client."""

    async def whole() -> str:
        prompt = f"Story number {number}: once upon a time there was"
        extra = {"ignore_eos": True}
        if not stream:
            done = await api.completions.create(model=MODEL, prompt=prompt, max_tokens=tokens, extra_body=extra)
            assert done.usage is not None and done.usage.completion_tokens == tokens
            return "ok"
        reasons = []
        async for chunk in await api.completions.create(
            model=MODEL, prompt=prompt, max_tokens=tokens, stream=True, extra_body=extra
        ):
            reasons += [c.finish_reason for c in chunk.choices if c.finish_reason]
        assert reasons == ["length"]
        return "ok"

    try:
        return await asyncio.wait_for(whole(), cancel_after_s)
    except TimeoutError:
        return "cancelled"
    except openai.APIError as error:
        return f"error: {error.message}"


async def half_cancelled(served: Served, count: int, seed: int) -> list[str]:
    """`count` requests, about 20 a second, half of them streams; every second client leaves at a random point."""
    draw = random.Random(seed)
    async with openai.AsyncOpenAI(base_url=served.url + "/v1", api_key="x", max_retries=0, timeout=300) as api:
        jobs = []
        for number in range(count):
            cancel = draw.choice([0.001, 0.02, 0.1, 0.3, 0.8]) if number % 2 else None
            stream = draw.random() < 0.5
            jobs.append(asyncio.create_task(ask(api, number, tokens=12, cancel_after_s=cancel, stream=stream)))
            await asyncio.sleep(draw.expovariate(20))
        return await asyncio.gather(*jobs)
