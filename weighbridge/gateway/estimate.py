"""How many tokens a prompt probably has, from its bytes alone.

The estimate is bytes over bytes-per-token, and the ratio is learned per model from the engines' own usage figures.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from weighbridge.gateway.client_request import ClientRequest
    from weighbridge.gateway.tokenizer_file import TokenCounter

_INLINE_DATA = re.compile(rb'"data:[^;"]{0,100};base64,[^"]*"')
IMAGE_TOKENS = 600
PRIOR_BYTES_PER_TOKEN = 4.0
PRIOR_WEIGHT_TOKENS = 200.0
MEMORY_TOKENS = 100_000.0
MAX_MODELS = 1000


def inline_data(raw: bytes) -> tuple[int, int]:
    """(bytes, count) of the base64 data URLs in `raw`: they are media, not text."""
    if b";" not in raw or b";base64," not in raw:  # most prompts are settled by the search for one byte
        return 0, 0
    sizes = [len(m.group()) for m in _INLINE_DATA.finditer(raw)]
    return sum(sizes), len(sizes)


class TokenEstimator:
    """Bytes per token of each model, a decaying average weighted by tokens. Memory is bounded by `MAX_MODELS`.

    `counters` count the prompts of the models that have a tokenizer file.
    """

    def __init__(self, counters: Mapping[str, TokenCounter] | None = None) -> None:
        self.counters = dict(counters or {})
        self._sums: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def bytes_per_token(self, model: str) -> float:
        """The current ratio of a model."""
        sums = self._sums.get(model)
        return PRIOR_BYTES_PER_TOKEN if sums is None else sums[0] / sums[1]

    def count(self, request: ClientRequest) -> int:
        """A prompt's length: as token ids tell it, as a tokenizer file counts it, or the estimate."""
        exact = request.exact_tokens
        if exact is None and request.model in self.counters:
            exact = self.counters[request.model].tokens(request)
        return exact if exact is not None else self.tokens(request.model, request.text_bytes, request.media)

    def counted(self, request: ClientRequest, prompt_tokens: int) -> None:
        """An engine counted a prompt."""
        self.learn(request.model, request.text_bytes, prompt_tokens)
        if request.model in self.counters:
            self.counters[request.model].learn(request, prompt_tokens)

    def tokens(self, model: str, prompt_bytes: int, media: int = 0) -> int:
        """The estimate, at least 1."""
        return max(1, round(prompt_bytes / self.bytes_per_token(model)) + IMAGE_TOKENS * media)

    def learn(self, model: str, prompt_bytes: int, prompt_tokens: int) -> None:
        """An engine counted `prompt_tokens` in a prompt of `prompt_bytes` without media."""
        if prompt_bytes <= 0 or prompt_tokens <= 0:
            return
        sums = self._sums.get(model)
        if sums is None:
            sums = (PRIOR_BYTES_PER_TOKEN * PRIOR_WEIGHT_TOKENS, PRIOR_WEIGHT_TOKENS)
            if len(self._sums) >= MAX_MODELS:
                self._sums.popitem(last=False)
        total_bytes, total_tokens = sums[0] + prompt_bytes, sums[1] + prompt_tokens
        if total_tokens > MEMORY_TOKENS:
            shrink = MEMORY_TOKENS / total_tokens
            total_bytes, total_tokens = total_bytes * shrink, total_tokens * shrink
        self._sums[model] = (total_bytes, total_tokens)
