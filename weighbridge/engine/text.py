"""Text as it is generated: UTF-8 that completes over tokens, and stop strings held back until they are decided."""

from __future__ import annotations

import codecs
from collections.abc import Sequence


class StopMatcher:
    """Cuts a text at the first stop string; what might still become one is held back.

    No part of a matched stop string is ever given out (all of it with `include`); what is held back and did not
    become a stop string is given out by `flush`.
    """

    __slots__ = ("_held", "_include", "_stops", "matched")

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        self._stops = tuple(stop for stop in stops if stop)
        self._include = include
        self._held = ""
        self.matched: str | None = None

    def feed(self, text: str) -> str:
        """Add generated text; returns what may be given out. After a match (`matched`) feed no more."""
        if not self._stops:
            return text
        held = self._held + text
        found = [(at, -len(stop), stop) for stop in self._stops if (at := held.find(stop)) >= 0]
        if found:
            at, _, self.matched = min(found)
            self._held = ""
            return held[: at + len(self.matched)] if self._include else held[:at]
        keep = self._undecided(held)
        self._held = held[len(held) - keep :]
        return held[: len(held) - keep]

    def flush(self) -> str:
        """What was held back, now that no more text comes."""
        held, self._held = self._held, ""
        return held

    def _undecided(self, text: str) -> int:
        """Length of the longest end of the text with which some stop string begins."""
        longest = 0
        for stop in self._stops:
            for size in range(min(len(stop) - 1, len(text)), longest, -1):
                if text.endswith(stop[:size]):
                    longest = size
                    break
        return longest


class TextStream:
    """Pieces of tokens in, text out: never half a character, never part of a stop string."""

    __slots__ = ("_decoder", "stop")

    def __init__(self, stops: Sequence[str] = (), *, include_stop: bool = False) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self.stop = StopMatcher(stops, include=include_stop)

    def feed(self, piece: bytes) -> str:
        """Text that is ready after one more token."""
        text = self._decoder.decode(piece)
        return self.stop.feed(text) if text else ""

    def flush(self) -> str:
        """The rest at the end of the generation; bytes of an unfinished character become U+FFFD."""
        if self.stop.matched is not None:
            return ""
        return self.stop.feed(self._decoder.decode(b"", final=True)) + (
            "" if self.stop.matched is not None else self.stop.flush()
        )
