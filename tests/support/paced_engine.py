"""An engine of vLLM's manners that answers at a fixed pace, and can be told to misbehave."""

from __future__ import annotations

import asyncio
import contextlib
import json
from typing import Any

from weighbridge.http import HttpServer, Request, Responder, Routes, ServerLimits


class PacedEngine:
    """Use as an async context manager. Settings are read with each request, so they may change while it serves."""

    def __init__(self, **settings: Any) -> None:
        self.models = ["m"]
        self.key: str | None = None
        self.stream = True
        self.usage = True
        self.status = 200
        self.others_running = 0
        self.started_s = 1000.0
        self.prefill_s = 2e-6
        self.token_s = 0.001
        self.fail_after: int | None = None
        self.restart_on_failure = False
        self.served = 0
        for name, value in settings.items():
            assert hasattr(self, name), name
            setattr(self, name, value)
        self._running = 0
        self._tasks: set[asyncio.Task[None]] = set()
        routes = Routes()
        routes.get("/health", lambda _, responder: responder.send(200))
        routes.get("/v1/models", self._models)
        routes.get("/metrics", self._metrics)
        routes.get("/version", lambda _, responder: responder.send_json(200, {"version": "9.9"}))
        routes.post("/v1/completions", self._complete)
        self._http = HttpServer(routes, ServerLimits())

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._http.port}"

    async def __aenter__(self) -> PacedEngine:
        await self._http.start("127.0.0.1", 0)
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in list(self._tasks):
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
        await self._http.stop()

    def _refused(self, request: Request, responder: Responder) -> bool:
        if self.key is None or request.header(b"authorization") == f"Bearer {self.key}".encode():
            return False
        responder.send_json(401, {"error": {"message": "wrong key", "type": "invalid_request_error"}})
        return True

    def _models(self, request: Request, responder: Responder) -> None:
        if not self._refused(request, responder):
            data = [{"id": name, "object": "model", "max_model_len": 512} for name in self.models]
            responder.send_json(200, {"object": "list", "data": data})

    def _metrics(self, _: Request, responder: Responder) -> None:
        page = (
            f"process_start_time_seconds {self.started_s}\n"
            f'vllm:num_requests_running{{engine="0"}} {self._running + self.others_running}\n'
            'vllm:num_requests_waiting{engine="0"} 0\n'
            'vllm:cache_config_info{block_size="32",num_gpu_blocks="500",enable_prefix_caching="True"} 1\n'
        )
        responder.send(200, page.encode(), content_type="text/plain; version=0.0.4")

    def _complete(self, request: Request, responder: Responder) -> None:
        self.served += 1
        if self._refused(request, responder):
            return
        if self.status != 200 or (self.fail_after is not None and self.served > self.fail_after):
            if self.restart_on_failure:
                self.started_s += 100.0
            status = self.status if self.status != 200 else 500
            responder.send_json(status, {"error": {"message": "it broke", "type": "server_error"}})
            return
        body = json.loads(request.body)
        usage = {"prompt_tokens": len(body["prompt"]), "completion_tokens": body["max_tokens"]}
        if not self.stream:
            responder.send_json(200, {"choices": [{"text": "x"}], "usage": usage})
            return
        task = asyncio.get_running_loop().create_task(self._stream(responder, usage))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _stream(self, responder: Responder, usage: dict[str, int]) -> None:
        self._running += 1
        try:
            await asyncio.sleep(self.prefill_s * usage["prompt_tokens"])
            responder.start_sse()
            for index in range(usage["completion_tokens"]):
                await asyncio.sleep(self.token_s)
                last = index + 1 == usage["completion_tokens"]
                choice = {"index": 0, "text": "x", "finish_reason": "length" if last else None}
                responder.write(b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n")
            if self.usage:
                responder.write(b"data: " + json.dumps({"choices": [], "usage": usage}).encode() + b"\n\n")
            responder.end(b"data: [DONE]\n\n")
        finally:
            self._running -= 1
