"""Embedded engines for tests: one in this process without HTTP, and one that listens, on a loop in a thread."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from typing import Any

from weighbridge.engine.engine import Engine
from weighbridge.engine.generation import GenerationRequest, Output, Sink
from weighbridge.engine.instance import Instance, InstanceOptions, start_instance
from weighbridge.engine.model import LlamaModel
from weighbridge.engine.options import EngineOptions
from weighbridge.engine.sampling import SamplingParams

GREEDY = SamplingParams(temperature=0.0)


class Run:
    """One generation and all it gave out."""

    def __init__(self, request_id: str) -> None:
        self.id = request_id
        self.outputs: list[Output] = []
        self.times_s: list[float] = []
        self.done = threading.Event()

    def __call__(self, output: Output) -> None:
        self.outputs.append(output)
        self.times_s.append(time.monotonic())
        if output.finish_reason is not None:
            self.done.set()

    def wait(self, timeout_s: float = 60.0) -> Run:
        assert self.done.wait(timeout_s), f"{self.id} did not end: {len(self.outputs)} outputs"
        return self

    @property
    def last(self) -> Output:
        return self.outputs[-1]

    @property
    def text(self) -> str:
        return "".join(output.text for output in self.outputs)

    @property
    def tokens(self) -> list[int]:
        return [token for output in self.outputs for token in output.tokens]


class LocalEngine:
    """An engine in this process."""

    def __init__(self, model: LlamaModel, options: EngineOptions) -> None:
        self.engine = Engine(model, options, _deliver)
        self._count = 0
        self.engine.start()

    def run(self, prompt: str | list[int], max_tokens: int = 16, **asked: Any) -> Run:
        """Submit; does not wait."""
        self._count += 1
        tokens = self.engine.model.tokenize(prompt) if isinstance(prompt, str) else prompt
        asked.setdefault("sampling", GREEDY)
        request = GenerationRequest(f"t{self._count}", tokens, max_tokens, time.monotonic(), **asked)
        run = Run(request.id)
        self.engine.submit(request, run)
        return run

    def inside(self, work: Callable[[], Any]) -> Any:
        """Run something between two steps and return its result."""
        done, box = threading.Event(), []

        def call() -> None:
            box.append(work())
            done.set()

        self.engine.call(call)
        assert done.wait(30)
        return box[0]


def _deliver(outputs: list[tuple[Sink, Output]]) -> None:
    for sink, output in outputs:
        sink(output)


@contextlib.contextmanager
def local_engine(model: LlamaModel, options: EngineOptions) -> Iterator[LocalEngine]:
    engine = LocalEngine(model, options)
    try:
        yield engine
    finally:
        engine.engine.stop()


class Listening:
    """A serving instance and what tests ask of it."""

    def __init__(self, instance: Instance, loop: asyncio.AbstractEventLoop) -> None:
        self.instance = instance
        self.engine = instance.server.engine
        self.url = f"http://127.0.0.1:{instance.info.port}"
        self._loop = loop

    def post(self, path: str, body: Any) -> tuple[int, Any]:
        """Status and JSON."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, {"content-type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=60) as reply:
                return reply.status, json.loads(reply.read())
        except urllib.error.HTTPError as error:
            return error.code, json.loads(error.read())

    def get(self, path: str) -> str:
        with urllib.request.urlopen(self.url + path, timeout=30) as reply:
            return reply.read().decode()

    def stream(self, path: str, body: dict[str, Any]) -> list[Any]:
        """All frames of a stream; `[DONE]` as that string."""
        request = urllib.request.Request(self.url + path, json.dumps({**body, "stream": True}).encode())
        frames: list[Any] = []
        with urllib.request.urlopen(request, timeout=60) as reply:
            for line in reply:
                if line.startswith(b"data: "):
                    data = line[6:].strip()
                    frames.append("[DONE]" if data == b"[DONE]" else json.loads(data))
        return frames

    def wait_idle(self, timeout_s: float = 10.0) -> None:
        """Wait until nothing runs, waits or is answered."""
        deadline = time.monotonic() + timeout_s
        while not (self.engine.idle and self.instance.server.running == 0):
            assert time.monotonic() < deadline, "the engine is not idle"
            time.sleep(0.01)


@contextlib.contextmanager
def listening(options: InstanceOptions) -> Iterator[Listening]:
    """Serve an instance from a thread of this process."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    try:
        instance = asyncio.run_coroutine_threadsafe(start_instance(options), loop).result(60)
        try:
            yield Listening(instance, loop)
        finally:
            asyncio.run_coroutine_threadsafe(instance.stop(), loop).result(60)
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
