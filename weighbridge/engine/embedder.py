"""Embeddings with a generating model: mean over the last hidden states, in a context of its own beside the KV slots."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from weighbridge.core.errors import ModelError
from weighbridge.engine.model import LlamaModel
from weighbridge.engine.runner import DecodeFailed

_MEAN = 1


class Embedder:
    """One input at a time, at most `context_tokens` long. Belongs to the engine's thread."""

    def __init__(self, model: LlamaModel, context_tokens: int, threads: int) -> None:
        """Raises ModelError where the library cannot make the context."""
        self._ffi, self._lib = model.library.ffi, model.library.lib
        self._values = model.embedding_values
        self.context_tokens = context_tokens
        params = self._lib.llama_context_default_params()
        params.n_ctx = params.n_batch = params.n_ubatch = context_tokens
        params.n_threads = params.n_threads_batch = threads
        params.embeddings = True
        params.pooling_type = _MEAN
        params.no_perf = True
        self._context = self._lib.llama_init_from_model(model.handle, params)
        if self._context == self._ffi.NULL:
            raise ModelError("no context for embeddings; the model may not support them")
        self._memory = self._lib.llama_get_memory(self._context)

    def embed(self, tokens: list[int]) -> NDArray[np.float32]:
        """The unit vector of a text given as token ids."""
        count = len(tokens)
        ids = np.array(tokens, np.int32)
        positions = np.arange(count, dtype=np.int32)
        counts = np.ones(count, np.int32)
        zero = self._ffi.new("llama_seq_id[1]", [0])
        slots = self._ffi.new("llama_seq_id *[]", [zero] * count)
        wanted = np.ones(count, np.int8)
        batch: Any = self._ffi.new("llama_batch *")
        batch.n_tokens = count
        batch.token = self._ffi.cast("llama_token *", ids.ctypes.data)
        batch.pos = self._ffi.cast("llama_pos *", positions.ctypes.data)
        batch.n_seq_id = self._ffi.cast("int32_t *", counts.ctypes.data)
        batch.seq_id = slots
        batch.logits = self._ffi.cast("int8_t *", wanted.ctypes.data)
        self._lib.llama_memory_clear(self._memory, False)
        code = self._lib.llama_decode(self._context, batch[0])
        if code != 0:
            raise DecodeFailed(f"the library could not compute an embedding (code {code})")
        pointer = self._lib.llama_get_embeddings_seq(self._context, 0)
        vector = np.frombuffer(self._ffi.buffer(pointer, 4 * self._values), np.float32).copy()
        norm = float(np.linalg.norm(vector))
        return vector / norm if norm > 0 else vector

    def close(self) -> None:
        """Free the context."""
        if self._context != self._ffi.NULL:
            self._lib.llama_free(self._context)
            self._context = self._ffi.NULL
