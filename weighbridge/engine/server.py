"""The OpenAI server of one embedded instance, on our own HTTP server."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable
from typing import Any

from weighbridge.core.errors import RequestError, ServiceError
from weighbridge.engine import fields
from weighbridge.engine.answer import Answer
from weighbridge.engine.chat import ChatTemplate
from weighbridge.engine.embeddings import EmbeddingService
from weighbridge.engine.engine import Engine
from weighbridge.engine.fields import Body
from weighbridge.engine.generation import Output, Sink
from weighbridge.engine.kv_service import KvService, TransferSettings
from weighbridge.engine.metrics import EngineCollector, metrics_page
from weighbridge.engine.model import LlamaModel
from weighbridge.engine.options import EngineOptions, describe_scheduler
from weighbridge.engine.requests import Call, RequestReader
from weighbridge.engine.tools import read_tools
from weighbridge.engine.transfer import KV_PATH
from weighbridge.http import HttpServer, Request, Responder, Routes, ServerLimits


class EngineServer:
    """Serves one engine over HTTP. Make and use it on one running event loop."""

    def __init__(
        self,
        model: LlamaModel,
        options: EngineOptions,
        model_id: str,
        name: str = "0",
        transfer: TransferSettings | None = None,
        chat_template: str | None = None,
    ) -> None:
        """Allocates the engine's context, which blocks for a moment. Raises ModelError where that fails."""
        self._loop = asyncio.get_running_loop()
        self.engine = Engine(model, options, self._deliver)
        self.model_id = model_id
        self.device = ""
        """Where the model really is, as `/v1/models` tells it; set by whoever loaded the model."""
        self._template = ChatTemplate(
            chat_template or model.chat_template(),
            bos=model.piece(model.bos).decode(errors="replace") if model.bos >= 0 else "",
            eos=model.piece(model.eos).decode(errors="replace") if model.eos >= 0 else "",
        )
        self._kv = KvService(self.engine, name, transfer or TransferSettings())
        self._reader = RequestReader(
            model, self._template, model_id, self.engine.context_tokens, self._kv.settings.hosts
        )
        self._embeddings = EmbeddingService(self.engine, self._reader, model_id)
        self._collector = EngineCollector(self.engine, model_id, name)
        self._calls = itertools.count(1)
        self._running = 0
        self._draining = False
        self._created = int(time.time())
        self._http = HttpServer(self._routes(), ServerLimits())

    @property
    def port(self) -> int:
        """The port that is listened on."""
        return self._http.port

    @property
    def running(self) -> int:
        """API calls that are being answered."""
        return self._running

    async def start(self, host: str, port: int) -> None:
        """Warm up, begin to compute, then listen. Raises ServiceError where the address is taken."""
        self.engine.warm_up()
        self.engine.start()
        try:
            await self._http.start(host, port)
            self._kv.listening(host, self._http.port)
        except OSError as error:
            self.engine.stop()
            raise ServiceError(f"cannot listen on {host}:{port}: {error.strerror or error}") from None

    async def stop(self, drain_s: float = 0.0) -> None:
        """Take no more calls, let running ones end for `drain_s`, then end everything."""
        self._draining = True
        if drain_s > 0:
            await self._http.drain(drain_s)
        await self._http.stop()
        await asyncio.to_thread(self.engine.stop)
        self._embeddings.close()
        await self._kv.close()

    def _deliver(self, outputs: list[tuple[Sink, Output]]) -> None:
        """Called in the engine's thread: hand the outputs of half a step to the event loop in one go."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(_dispatch, outputs)

    def _routes(self) -> Routes:
        routes = Routes()
        for path in ("/health", "/ping"):
            routes.get(path, self._health)
        routes.get("/version", self._version)
        routes.get("/load", lambda _, responder: responder.send_json(200, {"server_load": self._running}))
        routes.get("/v1/models", self._models)
        routes.get("/metrics", self._metrics)
        routes.get("/kv_event_sources", self._kv_event_sources)
        routes.post("/v1/chat/completions", self._answering(self._reader.chat, "chatcmpl"))
        routes.post("/v1/completions", self._answering(self._reader.completion, "cmpl"))
        routes.add("GET", KV_PATH + "*", self._kv.get)
        routes.add("DELETE", KV_PATH + "*", self._kv.delete)
        routes.post("/v1/embeddings", _checked(self._embeddings.handle))
        routes.post("/tokenize", _checked(self._tokenize))
        routes.post("/detokenize", _checked(self._detokenize))
        return routes

    def _answering(self, read: Callable[[Body], Call], prefix: str) -> Callable[[Request, Responder], None]:
        def handle(request: Request, responder: Responder) -> None:
            if self._draining:
                raise RequestError("the server is shutting down", status=503, type="server_error", code="shutting_down")
            body = fields.decode_body(request.body)
            self._reader.check_model(body)
            call = read(body)
            self._running += 1
            answer = Answer(self.engine, call, responder, self.model_id, self._ended, self._kv.lease)
            call_id, arrival_s = f"{prefix}-{next(self._calls)}-{self._created:x}", time.monotonic()
            if call.transfer.remote is None:
                answer.begin(call_id, arrival_s)
            else:
                self._kv.begin_with(call.transfer.remote, answer, responder, call_id, arrival_s)

        return _checked(handle)

    def _ended(self) -> None:
        self._running -= 1

    def _health(self, _: Request, responder: Responder) -> None:
        if self._draining or not self.engine.healthy:
            responder.send_error(503, "shutting down" if self._draining else "the engine fails in every step")
        else:
            responder.send(200)

    def _version(self, _: Request, responder: Responder) -> None:
        import weighbridge

        responder.send_json(200, {"version": weighbridge.__version__, "engine": "weighbridge"})

    def _models(self, _: Request, responder: Responder) -> None:
        entry = {
            "id": self.model_id,
            "object": "model",
            "created": self._created,
            "owned_by": "weighbridge",
            "max_model_len": self.engine.context_tokens,
            "max_num_seqs": self.engine.options.runner.slots,
            "description": self.engine.model.describe(),
            "device": self.device,
            "scheduler": describe_scheduler(self.engine.options),
        }
        responder.send_json(200, {"object": "list", "data": [entry]})

    def _metrics(self, _: Request, responder: Responder) -> None:
        page = metrics_page([self._collector, self._kv])
        responder.send(200, page, content_type="text/plain; version=0.0.4; charset=utf-8")

    def _kv_event_sources(self, _: Request, responder: Responder) -> None:
        """Where KV events are published, as vLLM tells it: by data-parallel rank, of which there is one."""
        publisher = self.engine.kv_events
        if publisher is None:
            responder.send_json(200, {})
            return
        told = {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": _everywhere(publisher.endpoint),
            "replay_endpoint": publisher.replay and _everywhere(publisher.replay),
            "topic": publisher.settings.topic,
        }
        responder.send_json(200, {"0": told})

    def _tokenize(self, request: Request, responder: Responder) -> None:
        body = fields.decode_body(request.body)
        self._reader.check_model(body)
        model = self.engine.model
        if "messages" in body:
            tools = read_tools(body, self._template.takes_tools)
            add = fields.flag(body, "add_special_tokens", False)
            tokens = self._reader.chat_tokens(body, tools, add_special=add)
        else:
            add = fields.flag(body, "add_special_tokens", True)
            tokens = model.tokenize(fields.text(body, "prompt"), add_special=add)
        reply: dict[str, Any] = {"count": len(tokens), "max_model_len": self.engine.context_tokens, "tokens": tokens}
        responder.send_json(200, reply)

    def _detokenize(self, request: Request, responder: Responder) -> None:
        body = fields.decode_body(request.body)
        tokens = body.get("tokens")
        top = self.engine.model.vocab_tokens
        if not isinstance(tokens, list) or not all(isinstance(item, int) and 0 <= item < top for item in tokens):
            raise RequestError(f"tokens must be a list of token ids below {top}", param="tokens")
        responder.send_json(200, {"prompt": self.engine.model.detokenize(tokens)})


def _everywhere(endpoint: str) -> str:
    """A bound address with the wildcard in place of its host: readers put the host by which they reach us."""
    scheme, _, rest = endpoint.partition("://")
    return f"tcp://*:{rest.rpartition(':')[2]}" if scheme == "tcp" else endpoint


def _dispatch(outputs: list[tuple[Sink, Output]]) -> None:
    for sink, output in outputs:
        sink(output)


def _checked(handle: Callable[[Request, Responder], None]) -> Callable[[Request, Responder], None]:
    """Turn a RequestError into its answer."""

    def checked(request: Request, responder: Responder) -> None:
        try:
            handle(request, responder)
        except RequestError as error:
            headers = (("retry-after", "1"),) if error.status in (429, 503) else ()
            responder.send_error(
                error.status, error.message, kind=error.type, param=error.param, code=error.code, headers=headers
            )

    return checked
