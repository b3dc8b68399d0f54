"""Prompt text of a wanted length in tokens, for any tokenizer.

Texts are runs of common English words, which nearly every tokenizer encodes as one token each. A calibration (two
tiny requests, their `usage`) gives the tokens per word and the constant part (chat template); without usage, one
token per word is assumed and said so.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import lru_cache

from weighbridge.bench.schedule import Planned

_TEXT = (
    "time year people way day man thing woman life child world school state family student group country problem hand "
    "part place case week company system program question work government number night point home water room mother "
    "area money story fact month lot right study book eye job word business issue side kind head house service friend "
    "father power hour game line end member law car city name president team minute idea body information back parent "
    "face others level office door health person art war history party result change morning reason research girl guy "
    "moment air teacher force education"
)
_WORDS = tuple(_TEXT.split(" "))
BANK_WORDS = 8192
HEAD_WORDS = 8


@dataclass(frozen=True, slots=True)
class Calibration:
    """tokens = `fixed` + `per_word` * words. `measured` is False where the server told no usage."""

    fixed: float = 0.0
    per_word: float = 1.0
    measured: bool = False

    def words(self, tokens: int) -> int:
        """Words for a prompt of `tokens` tokens in all; at least one."""
        return max(1, round((tokens - self.fixed) / self.per_word))


def calibration_of(short: tuple[int, int], long: tuple[int, int]) -> Calibration:
    """From two (words, prompt tokens) observations."""
    per_word = (long[1] - short[1]) / (long[0] - short[0])
    if per_word <= 0:
        return Calibration()
    return Calibration(short[1] - per_word * short[0], per_word, measured=True)


def words_of(seed: str, count: int) -> list[str]:
    """`count` words, equal for an equal seed."""
    return random.Random(seed).choices(_WORDS, k=count)


class _Bank:
    """A long text to cut from: slicing it is many times cheaper than drawing every word."""

    def __init__(self) -> None:
        words = words_of("bank", 2 * BANK_WORDS)
        self.text = " ".join(words)
        self.starts = [0]
        for word in words:
            self.starts.append(self.starts[-1] + len(word) + 1)

    def cut(self, start: int, count: int) -> str:
        """`count` words from word `start` (below BANK_WORDS) on; wraps around for very long prompts."""
        pieces = []
        while count > 0:
            step = min(count, BANK_WORDS)
            pieces.append(self.text[self.starts[start] : self.starts[start + step] - 1])
            count -= step
        return " ".join(pieces)


@lru_cache(maxsize=1)
def _bank() -> _Bank:
    return _Bank()


@lru_cache(maxsize=4096)
def _block(content: int, words: int) -> str:
    return " ".join(words_of(f"block/{content}", words))


def prompt_text(planned: Planned, calibration: Calibration, salt: str) -> str:
    """The prompt of one request: shared blocks first, then words that no other request of the run has.

    `salt` makes the texts of one run differ from those of another, so that caches start cold; shared blocks take part
    in it as well.
    """
    total = calibration.words(planned.prompt_tokens)
    pieces: list[str] = []
    left = total
    if planned.blocks:
        each = max(1, round(planned.block_tokens / calibration.per_word))
        start = hash_text(salt)
        for content in planned.blocks:
            if left < each:
                break
            pieces.append(_block(content ^ start, each))
            left -= each
    if left > 0:
        pieces.append(_own_text(f"{salt}/{planned.id}", left))
    return " ".join(pieces)


def _own_text(seed: str, words: int) -> str:
    """A head of words that no other request has, then a piece of the bank: no two texts share a leading block."""
    rng = random.Random(seed)
    head = rng.choices(_WORDS, k=min(words, HEAD_WORDS))
    if words > HEAD_WORDS:
        head.append(_bank().cut(rng.randrange(BANK_WORDS), words - HEAD_WORDS))
    return " ".join(head)


def hash_text(text: str) -> int:
    """A 32-bit number of a text, equal in every process."""
    return random.Random(text).getrandbits(32)
