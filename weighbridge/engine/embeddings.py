"""`/v1/embeddings`: reads the call, computes one input between two steps of the engine after another, answers."""

from __future__ import annotations

import asyncio
import base64
from typing import Any

import numpy as np
from numpy.typing import NDArray

from weighbridge.core.errors import ModelError, RequestError
from weighbridge.engine import fields
from weighbridge.engine.embedder import Embedder
from weighbridge.engine.engine import Engine
from weighbridge.engine.requests import RequestReader
from weighbridge.engine.runner import DecodeFailed
from weighbridge.http import Request, Responder

Vector = NDArray[np.float32]
MAX_TOKENS = 512


class EmbeddingService:
    """Embeddings of one instance; its context is made with the first call. Lives on the event loop."""

    def __init__(self, engine: Engine, reader: RequestReader, model_id: str) -> None:
        self._engine = engine
        self._reader = reader
        self._model_id = model_id
        self._embedder: Embedder | None = None

    def handle(self, request: Request, responder: Responder) -> None:
        """Answer a call, or raise RequestError."""
        body = fields.decode_body(request.body)
        self._reader.check_model(body)
        form = fields.text(body, "encoding_format", "float")
        if form not in ("float", "base64"):
            raise RequestError("encoding_format must be float or base64", param="encoding_format")
        values = self._engine.model.embedding_values
        dimensions = fields.integer(body, "dimensions", values, 1)
        if dimensions != values:
            raise RequestError(f"dimensions must be {values}, which is what this model has", param="dimensions")
        inputs = self._reader.token_lists(body.get("input"), "input")
        limit = min(MAX_TOKENS, self._engine.context_tokens)
        for tokens in inputs:
            if len(tokens) > limit:
                message = f"an input has {len(tokens)} tokens and at most {limit} can be embedded"
                raise RequestError(message, code="context_length_exceeded", param="input")
        responder.run(self._answer(inputs, form == "base64", limit, responder))

    async def _answer(self, inputs: list[list[int]], as_base64: bool, limit: int, responder: Responder) -> None:
        data = []
        for index, tokens in enumerate(inputs):
            vector = await self._embed(tokens, limit)
            if isinstance(vector, str):
                responder.send_error(500, vector, kind="server_error", code="engine_error")
                return
            value: Any = vector.tolist()
            if as_base64:
                value = base64.b64encode(vector.astype("<f4").tobytes()).decode()
            data.append({"object": "embedding", "index": index, "embedding": value})
        count = sum(len(tokens) for tokens in inputs)
        usage = {"prompt_tokens": count, "total_tokens": count}
        responder.send_json(200, {"object": "list", "data": data, "model": self._model_id, "usage": usage})

    async def _embed(self, tokens: list[int], limit: int) -> Vector | str:
        loop = asyncio.get_running_loop()
        done: asyncio.Future[Vector | str] = loop.create_future()

        def settle(result: Vector | str) -> None:
            if not done.done():
                done.set_result(result)

        def work() -> None:
            try:
                if self._embedder is None:
                    threads = self._engine.runner.options.threads
                    self._embedder = Embedder(self._engine.model, limit, threads)
                result: Vector | str = self._embedder.embed(tokens)
            except (ModelError, DecodeFailed) as error:
                result = str(error)
            loop.call_soon_threadsafe(settle, result)

        self._engine.call(work)
        return await done

    def close(self) -> None:
        """Free the context; the engine's thread must have ended."""
        if self._embedder is not None:
            self._embedder.close()
