"""Named, seeded random streams: one per concern, so that a new draw in one of them moves no other."""

from __future__ import annotations

import random


class Streams:
    """Independent `random.Random` objects derived from one seed and a name.

    The derivation hashes the text `seed/name` (SHA-512, inside `random.Random`), hence it is equal in every process.
    """

    __slots__ = ("seed",)

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def get(self, name: str) -> random.Random:
        """A fresh generator at the start of the stream `name`."""
        return random.Random(f"{self.seed}/{name}")
