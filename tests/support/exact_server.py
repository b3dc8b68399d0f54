"""An OpenAI-compatible server whose delays are known exactly; the truth that the load generator is checked against.

Run it apart (`python -m tests.support.exact_server --ttft 0.2 --tpot 0.02`) or in a thread (`running`). A token is due
at an absolute time after the request came in, so delays do not add up. With `spin` its process never sleeps close to a
due time, which takes a whole processor and makes it exact to some 50 us; without, timers tick in whole milliseconds.
`stall` freezes the whole process once, as a garbage collection or a stuck engine step would.
"""

from __future__ import annotations

import argparse
import asyncio
import heapq
import itertools
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any

import msgspec
import uvloop

from weighbridge.http import HttpServer, Request, Responder, Routes, ServerLimits


@dataclass(frozen=True)
class Behaviour:
    """Seconds and counts. `fail_every`, `reject_every`, `cut_every`, `garble_every`: each n-th request (0 = none).

    `spread` 0.5 makes request n up to 1.5 times as slow, by a fixed sequence over n of period 100.
    """

    ttft: float = 0.05
    tpot: float = 0.01
    tokens_per_frame: int = 1
    usage: bool = True
    thinking_tokens: int = 0
    empty_first: bool = False
    stall_at: float = 0.0
    stall_for: float = 0.0
    fail_every: int = 0
    reject_every: int = 0
    cut_every: int = 0
    garble_every: int = 0
    error_frame_every: int = 0
    never_every: int = 0
    per_word: float = 1.0
    template_tokens: int = 7
    refuse_ignore_eos: bool = False
    done: bool = True
    spread: float = 0.0
    spin: bool = False

    def ttft_of(self, number: int) -> float:
        """Seconds to the first token of request `number` (from 1)."""
        return self.ttft * (1.0 + self.spread * ((37 * number) % 100) / 99)

    def tpot_of(self, number: int) -> float:
        """Seconds between its tokens."""
        return self.tpot * (1.0 + self.spread * ((61 * number) % 100) / 99)


def _frame(delta: dict[str, Any], finish: str | None = None) -> bytes:
    choice = {"index": 0, "delta": delta, "finish_reason": finish}
    return b"data: " + msgspec.json.encode({"object": "chat.completion.chunk", "choices": [choice]}) + b"\n\n"


class ExactServer:
    """One behaviour, counted requests."""

    def __init__(self, behaviour: Behaviour) -> None:
        self.behaviour = behaviour
        self.count = 0
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.arrived: list[float] = []
        self.started = time.monotonic()
        self.keep_bodies = False
        self.late: list[float] = []
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._entries = itertools.count()
        self._turning = False
        self._timer: asyncio.TimerHandle | None = None

    def at(self, moment: float, callback: Callable[[], None]) -> None:
        """Call back at a moment of the monotonic clock, never early."""
        heapq.heappush(self._due, (moment, next(self._entries), callback))
        if not self._turning:
            self._turning = True
            asyncio.get_running_loop().call_soon(self._turn)

    def _turn(self) -> None:
        """Carry out what is due; turn again at once when the next is near and `spin` is on, else sleep until then."""
        due, loop = self._due, asyncio.get_running_loop()
        while due and due[0][0] <= time.monotonic():
            heapq.heappop(due)[2]()
        if not due:
            self._turning = False
        elif self.behaviour.spin and due[0][0] - time.monotonic() < 0.002:
            loop.call_soon(self._turn)
        else:
            self._turning = False
            wait = due[0][0] - time.monotonic() - (0.0015 if self.behaviour.spin else 0.0)
            if self._timer is not None:
                self._timer.cancel()
            self._timer = loop.call_later(max(0.0005, wait), self._wake)

    def _wake(self) -> None:
        if not self._turning:
            self._turning = True
            self._turn()

    def routes(self) -> Routes:
        routes = Routes()
        routes.get("/v1/models", lambda request, responder: responder.send_json(200, {"data": [{"id": "exact"}]}))
        routes.post("/v1/chat/completions", self.complete)
        routes.get("/late", lambda request, responder: responder.send_json(200, self.late))
        return routes

    def complete(self, request: Request, responder: Responder) -> None:
        body = msgspec.json.decode(request.body)
        if self.behaviour.refuse_ignore_eos and "ignore_eos" in body:
            responder.send_error(400, "unknown parameter: ignore_eos")
            return
        words = len(body["messages"][0]["content"].split())
        prompt_tokens = round(words * self.behaviour.per_word) + self.behaviour.template_tokens
        tokens = body.get("max_tokens") or body["max_completion_tokens"]
        usage = {"prompt_tokens": prompt_tokens, "completion_tokens": tokens}
        usage["total_tokens"] = prompt_tokens + tokens
        if not body.get("stream"):
            reply = {"choices": [{"message": {"content": "x"}, "finish_reason": "length"}]}
            responder.send_json(200, {**reply, **({"usage": usage} if self.behaviour.usage else {})})
            return
        self.count += 1
        if self.keep_bodies:
            self.bodies.append(body)
            self.headers.append({name.decode(): value.decode() for name, value in request.headers})
        self.arrived.append(time.monotonic())
        if self._refused(responder):
            return
        _Stream(self, responder, tokens, usage, self.count)

    def _refused(self, responder: Responder) -> bool:
        b, n = self.behaviour, self.count
        if b.fail_every and n % b.fail_every == 0:
            responder.send_error(500, "the engine fell over")
        elif b.reject_every and n % b.reject_every == 0:
            responder.send_error(429, "too many requests")
        else:
            return False
        return True


class _Stream:
    """The reply to one request, sent by timers at absolute times."""

    def __init__(self, server: ExactServer, responder: Responder, tokens: int, usage: Any, number: int) -> None:
        self.behaviour, self.responder, self.tokens, self.usage = server.behaviour, responder, tokens, usage
        self.server, self.number = server, number
        self.sent = 0
        self.begin = time.monotonic()
        b = self.behaviour
        self.ttft, self.tpot = b.ttft_of(number), b.tpot_of(number)
        if b.empty_first:
            responder.start_sse()
            responder.write(
                b": waiting\n\n" + b'data: {"choices":[]}\n\n' + _frame({"role": "assistant", "content": ""})
            )
        if b.never_every and number % b.never_every == 0:
            return
        server.at(self.begin + self.ttft, self._send)

    def _send(self) -> None:
        responder, b = self.responder, self.behaviour
        if responder.disconnected:
            return
        if not self.sent:
            self.server.late.append(time.monotonic() - self.begin - self.ttft)
        if not self.sent and not b.empty_first:
            explained = responder.request.header(b"x-weighbridge-explain") == b"1"
            responder.start_sse([("x-weighbridge-decision", '{"chosen":"exact"}')] if explained else [])
        if b.cut_every and self.number % b.cut_every == 0 and self.sent:
            responder.abort()
            return
        if b.garble_every and self.number % b.garble_every == 0:
            responder.write(b"data: {not json\n\n")
        if b.error_frame_every and self.number % b.error_frame_every == 0:
            responder.end(b'data: {"error":{"message":"out of memory"}}\n\n')
            return
        step = min(b.tokens_per_frame, self.tokens - self.sent)
        kind = "reasoning_content" if self.sent < b.thinking_tokens else "content"
        self.sent += step
        data = _frame({kind: "x" * step}, "length" if self.sent == self.tokens else None)
        if self.sent < self.tokens:
            responder.write(data)
            self.server.at(self.begin + self.ttft + self.sent * self.tpot, self._send)
            return
        if b.usage:
            data += b"data: " + msgspec.json.encode({"choices": [], "usage": self.usage}) + b"\n\n"
        responder.end(data + (b"data: [DONE]\n\n" if b.done else b""))


async def serve(server: ExactServer, port: int = 0, tls: ssl.SSLContext | None = None) -> HttpServer:
    """Listen on loopback."""
    http = HttpServer(server.routes(), ServerLimits(max_connections=60_000))
    await http.start("127.0.0.1", port, ssl_context=tls)
    b = server.behaviour
    if b.stall_for:
        asyncio.get_running_loop().call_later(b.stall_at, time.sleep, b.stall_for)
    return http


@contextmanager
def running(behaviour: Behaviour, tls: ssl.SSLContext | None = None) -> Iterator[tuple[str, ExactServer]]:
    """The server in a thread of its own; yields its URL and itself."""
    server = ExactServer(behaviour)
    server.keep_bodies = True
    ready = threading.Event()
    stop: list[Any] = []

    async def main() -> None:
        http = await serve(server, tls=tls)
        finished = asyncio.Event()
        stop.extend([asyncio.get_running_loop(), finished, http.port])
        ready.set()
        await finished.wait()
        await http.stop()

    def run() -> None:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(main())

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    assert ready.wait(10.0)
    try:
        yield f"{'https' if tls else 'http'}://127.0.0.1:{stop[2]}", server
    finally:
        stop[0].call_soon_threadsafe(stop[1].set)
        thread.join(10.0)


def main() -> None:
    """Serve until killed; prints the port on the first line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, default=0)
    for field in fields(Behaviour):
        kind = type(field.default)
        if kind is bool:
            parser.add_argument(f"--{field.name.replace('_', '-')}", type=lambda v: v == "true", default=field.default)
        else:
            parser.add_argument(f"--{field.name.replace('_', '-')}", type=kind, default=field.default)
    arguments = vars(parser.parse_args())
    port = arguments.pop("port")

    async def forever() -> None:
        http = await serve(ExactServer(Behaviour(**arguments)), port)
        print(http.port, flush=True)
        await asyncio.Event().wait()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(forever())


if __name__ == "__main__":
    main()
