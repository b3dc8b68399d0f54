"""Constrained generation with llama.cpp's grammar sampler: check one token, mask the vocabulary only on rejection."""

from __future__ import annotations

from typing import Any

import numpy as np

from weighbridge.core.errors import RequestError
from weighbridge.engine.model import LlamaModel
from weighbridge.engine.sampling import Logits

_CANDIDATE = np.dtype([("id", np.int32), ("logit", np.float32), ("p", np.float32)])


class Grammar:
    """A grammar's state along one generation. Belongs to one thread; `close` frees the library's part."""

    def __init__(self, model: LlamaModel, source: str, root: str = "root") -> None:
        """Raises RequestError (400) where the grammar (GBNF) does not parse."""
        self._ffi, self._lib = model.library.ffi, model.library.lib
        model.library.take_log()
        self._sampler = self._lib.llama_sampler_init_grammar(model.vocab, source.encode(), root.encode())
        if self._sampler == self._ffi.NULL:
            reason = "; ".join(model.library.take_log()) or "it does not parse"
            raise RequestError(f"the grammar was refused: {reason[:300]}", code="invalid_grammar", param="grammar")
        self._one = np.zeros(1, _CANDIDATE)
        self._all = np.zeros(model.vocab_tokens, _CANDIDATE)

    def _apply(self, candidates: Any) -> None:
        array = self._ffi.new("llama_token_data_array *")
        array.data = self._ffi.cast("llama_token_data *", candidates.ctypes.data)
        array.size = len(candidates)
        array.selected = -1
        array.sorted = False
        self._lib.llama_sampler_apply(self._sampler, array)

    def allows(self, token: int) -> bool:
        """Whether the token may come next."""
        self._one["id"] = token
        self._one["logit"] = 0.0
        self._apply(self._one)
        return bool(np.isfinite(self._one["logit"][0]))

    def masked(self, logits: Logits) -> Logits:
        """The logits with every token that may not come next at minus infinity."""
        self._all["id"] = np.arange(len(self._all), dtype=np.int32)
        self._all["logit"] = logits
        self._apply(self._all)
        result = np.empty(len(self._all), np.float32)
        result[self._all["id"]] = self._all["logit"]
        return result

    def accept(self, token: int) -> None:
        """Move on past a token that is allowed."""
        self._lib.llama_sampler_accept(self._sampler, token)

    def close(self) -> None:
        """Free the library's state."""
        if self._sampler != self._ffi.NULL:
            self._lib.llama_sampler_free(self._sampler)
            self._sampler = self._ffi.NULL
