"""One probe: a streaming completion of known size whose prompt no cache can hold, timed at the client."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass, field
from typing import Any

import msgspec

from weighbridge.calibrate.endpoint import Endpoint
from weighbridge.calibrate.replay import RecordedRequest
from weighbridge.core.errors import UpstreamError
from weighbridge.http.client import HttpClient
from weighbridge.http.errors import ExchangeFailed
from weighbridge.http.sse_parser import SseParser

# The smallest vocabularies in use have 32,000 entries; the first thousand hold control and single-byte tokens.
FIRST_TOKEN, LAST_TOKEN = 1000, 30_000
WORDS = tuple(
    word
    for line in (
        "about after again answer around before between bridge building carry change city clear close country course",
        "cover cross develop early earth enough every family field figure final follow force garden ground happen",
        "island large learn letter light listen machine measure minute morning mountain music nature never north",
        "object order other paper people picture plain plant point power present problem question reason record river",
        "round science second simple sound south stand state story street strong study surface table teach thing",
    )
    for word in line.split()
)


@dataclass(frozen=True, slots=True)
class Probe:
    """What to send: sizes in tokens, and when, in seconds after its stage began. Equal `seed` means equal prompt."""

    prompt_tokens: int
    output_tokens: int
    after_s: float = 0.0
    seed: int | None = None


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """One probe that ended well; seconds on the client's monotonic clock, counts from the engine's usage."""

    stage: str
    probe: Probe
    sent_s: float
    first_token_s: float
    last_token_s: float
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int
    pieces_s: tuple[float, ...] = field(default=(), repr=False)

    @property
    def ttft_s(self) -> float:
        return self.first_token_s - self.sent_s

    @property
    def tpot_s(self) -> float | None:
        """None for a single token."""
        if self.output_tokens < 2:
            return None
        return (self.last_token_s - self.first_token_s) / (self.output_tokens - 1)

    def record(self, index: int, zero_s: float) -> RecordedRequest:
        """As a request of a recorded run whose time 0 is `zero_s`; only the uncached part of the prompt counts."""
        return RecordedRequest(
            id=f"{self.stage}-{index}",
            arrival_s=self.sent_s - zero_s,
            first_token_s=self.first_token_s - zero_s,
            last_token_s=self.last_token_s - zero_s,
            prompt_tokens=max(1, self.prompt_tokens - self.cached_tokens),
            output_tokens=self.output_tokens,
        )


class Prober:
    """Sends probes to one endpoint. `words_per_token` is learned where prompts must be text."""

    def __init__(self, client: HttpClient, endpoint: Endpoint, rng: random.Random, *, timeout_s: float = 300.0) -> None:
        self._client = client
        self._endpoint = endpoint
        self._rng = rng
        self._timeout_s = timeout_s
        self.words_per_token = 0.75

    async def send(self, stage: str, probe: Probe) -> ProbeResult:
        """Send one and read it to its end.

        Raises:
            UpstreamError: it failed, did not stream, or its token counts are unknown.
        """
        where = f"{self._endpoint.url}: probe of {probe.prompt_tokens} + {probe.output_tokens} tokens"
        body = msgspec.json.encode(self._body(probe))
        headers = [("content-type", "application/json"), ("accept", "text/event-stream"), *self._endpoint.headers]
        sent = time.monotonic()
        try:
            async with self._client.stream(
                "POST", f"{self._endpoint.url}/v1/completions", body=body, headers=headers
            ) as reply:
                if reply.status != 200:
                    raise UpstreamError(f"{where}: {error_text(reply.status, await reply.read())}")
                if "event-stream" not in (reply.header(b"content-type") or b"").decode("latin-1"):
                    raise UpstreamError(f"{where}: the engine does not stream, so no first token can be timed")
                parser, reading = SseParser(), _Reading()
                async for data in reply:
                    now = time.monotonic()
                    for event in parser.feed(data):
                        reading.take(event.data, now, where)
        except ExchangeFailed as error:
            raise UpstreamError(f"{where}: {error}") from None
        return self._result(stage, probe, sent, reading, where)

    def _result(self, stage: str, probe: Probe, sent: float, reading: _Reading, where: str) -> ProbeResult:
        if not reading.pieces:
            raise UpstreamError(f"{where}: the stream ended without a token")
        prompt, output = reading.usage.get("prompt_tokens"), reading.usage.get("completion_tokens")
        if not isinstance(prompt, int) or not isinstance(output, int) or prompt < 1 or output < 1:
            raise UpstreamError(f"{where}: the engine sent no usage with its stream, so tokens cannot be counted")
        if not self._endpoint.token_prompts:
            self.words_per_token *= min(2.0, max(0.5, probe.prompt_tokens / prompt))
        details = reading.usage.get("prompt_tokens_details")
        cached = details.get("cached_tokens") if isinstance(details, dict) else None
        return ProbeResult(
            stage=stage,
            probe=probe,
            sent_s=sent,
            first_token_s=reading.pieces[0],
            last_token_s=reading.pieces[-1],
            prompt_tokens=prompt,
            output_tokens=output,
            cached_tokens=cached if isinstance(cached, int) else 0,
            pieces_s=tuple(reading.pieces),
        )

    def _body(self, probe: Probe) -> dict[str, Any]:
        rng = self._rng if probe.seed is None else random.Random(probe.seed)
        prompt: Any
        if self._endpoint.token_prompts:
            prompt = [rng.randrange(FIRST_TOKEN, LAST_TOKEN) for _ in range(probe.prompt_tokens)]
        else:
            count = max(1, round(probe.prompt_tokens * self.words_per_token))
            prompt = " ".join(rng.choice(WORDS) for _ in range(count))
        body: dict[str, Any] = {
            "model": self._endpoint.model,
            "prompt": prompt,
            "max_tokens": probe.output_tokens,
            "temperature": 0.0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self._endpoint.token_prompts:
            body["ignore_eos"] = True
        return body


class _Reading:
    """What has come of one stream."""

    def __init__(self) -> None:
        self.pieces: list[float] = []
        self.usage: dict[str, Any] = {}

    def take(self, data: str, now: float, where: str) -> None:
        """One event. Any choice counts: text is empty while the bytes of a character are incomplete."""
        if data.strip() == "[DONE]":
            return
        try:
            frame = msgspec.json.decode(data)
        except msgspec.DecodeError:
            raise UpstreamError(f"{where}: the stream holds an event that is not JSON") from None
        if not isinstance(frame, dict):
            return
        if frame.get("error"):
            error = frame["error"]
            told = error.get("message") if isinstance(error, dict) else error
            raise UpstreamError(f"{where}: the stream ended with an error: {told}")
        if isinstance(frame.get("usage"), dict):
            self.usage = frame["usage"]
        if frame.get("choices"):
            self.pieces.append(now)


def error_text(status: int, body: bytes) -> str:
    """What an error reply says, in one line."""
    told = ""
    try:
        error = msgspec.json.decode(body).get("error")
        told = str(error.get("message") if isinstance(error, dict) else error)
    except (msgspec.DecodeError, AttributeError):
        told = body[:120].decode(errors="replace")
    hint = {401: "; name a variable that holds a key by --key-env", 404: "; is --model right?"}.get(status, "")
    return f"HTTP {status}: {' '.join(told.split())[:200]}{hint}"
