"""Time decisions with clocks that are handed in: warm quantiles, CPU tail, the first decision of a process apart."""

from __future__ import annotations

import random
from collections.abc import Callable

import msgspec
import numpy as np

from weighbridge.selection.selector import Selector

Clock = Callable[[], float]
SIZES = (15, 60, 256, 1024, 4096)
CHARS_PER_TOKEN = 5.107  # 5,229 characters are 1,024 tokens in the published table of a router like this
TEXTS = 25
WARM_UP = 5
_PHRASE = (
    "write a function that returns the list of all pairs and test it against these cases value index result "
    "error import class def return for while if else try except the in of to is self none true false string number "
    "data key node graph path sort merge parse request response token cache stream buffer thread lock async await"
)


class SizeTiming(msgspec.Struct, frozen=True, kw_only=True):
    """Milliseconds for one prompt size; `cold_ms` is the first decision of its process, `load_s` reading the files."""

    tokens: int
    chars: int
    p50_ms: float
    p95_ms: float
    min_ms: float
    max_ms: float
    cpu_p99_ms: float
    cold_ms: float
    load_s: float
    iterations: int


def bench_text(tokens: int, seed: int) -> str:
    """Text like a prompt, about `tokens` long; another seed gives other text of the same length."""
    source, words = random.Random(seed), _PHRASE.split()
    target = max(1, round(tokens * CHARS_PER_TOKEN))
    parts: list[str] = []
    size = 0
    while size < target:
        word = source.choice(words) if source.random() < 0.85 else f"{source.choice(words)}_{source.randrange(1000)}"
        part = word + source.choice((" ", " ", " ", " ", "\n", ", ", " = ", "("))
        parts.append(part)
        size += len(part)
    return "".join(parts)[:target]


def time_decisions(
    selector: Selector, tokens: int, iterations: int, load_s: float, clock: Clock, cpu_clock: Clock
) -> SizeTiming:
    """Decide texts of one size. The first call is the cold one only if nothing was decided in this process before.

    `clock` and `cpu_clock` return seconds. Texts rotate, so no iteration repeats the one before it.
    """
    texts = [[{"role": "user", "content": bench_text(tokens, seed)}] for seed in range(TEXTS)]
    begun = clock()
    selector.decide(texts[0])
    cold = clock() - begun
    for warm in range(WARM_UP):
        selector.decide(texts[warm % TEXTS])
    wall, cpu = np.empty(iterations), np.empty(iterations)
    for i in range(iterations):
        messages = texts[i % TEXTS]
        cpu_begun, begun = cpu_clock(), clock()
        selector.decide(messages)
        wall[i], cpu[i] = clock() - begun, cpu_clock() - cpu_begun
    return SizeTiming(
        tokens=tokens,
        chars=len(texts[0][0]["content"]),
        p50_ms=_ms(float(np.quantile(wall, 0.5))),
        p95_ms=_ms(float(np.quantile(wall, 0.95))),
        min_ms=_ms(float(wall.min())),
        max_ms=_ms(float(wall.max())),
        cpu_p99_ms=_ms(float(np.quantile(cpu, 0.99))),
        cold_ms=_ms(cold),
        load_s=round(load_s, 4),
        iterations=iterations,
    )


def _ms(seconds: float) -> float:
    return round(1e3 * seconds, 3)
