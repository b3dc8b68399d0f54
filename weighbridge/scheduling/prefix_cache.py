"""Prefix reuse in an engine with one KV stream per slot: over running sequences, finished ones, and saved copies.

A slot keeps the tokens of its last sequence until another one needs it, and what is worth it is then saved outside,
least recently used first to go. A sequence takes the longest computed prefix there is: in place when it continues what
a free slot holds, else by copying. While a running sequence still computes a long prefix that another one shares, the
other waits for it instead of computing it again.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import NamedTuple

from weighbridge.scheduling.radix import RadixTree
from weighbridge.scheduling.sequence import Sequence


class Saved(NamedTuple):
    """Name of a copy of KV outside the slots."""

    key: int


Holder = int | Saved
OnChange = Callable[[Holder, Seq[int], str], None]


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a sequence goes and what is done first, in this order: copies dropped, the slot's content saved, the
    first `tokens` tokens taken from `source` (None: the slot starts empty; the slot itself: its tail is cut off)."""

    seq: Sequence
    slot: int
    source: Holder | None
    tokens: int
    save: Saved | None = None
    drop: tuple[Saved, ...] = ()


@dataclass(frozen=True, slots=True)
class PrefixCacheConfig:
    """`saved_tokens` bounds the copies outside the slots (0: none). A prefix is copied from `min_copy_tokens` on,
    waited for from `min_wait_tokens` on (if `min_copy_tokens` more than there is already can be had), and saved when
    the slot is needed from `min_save_tokens` on."""

    saved_tokens: int = 8192
    min_copy_tokens: int = 8
    min_wait_tokens: int = 64
    min_save_tokens: int = 64


class PrefixCache:
    """The content of all slots and copies. Slot numbers come from the scheduler."""

    def __init__(self, config: PrefixCacheConfig, timer: Callable[[], float] | None = None) -> None:
        """`timer`, if given, measures lookups: seconds, from any start."""
        self.config = config
        self._timer = timer
        self.on_change: OnChange | None = None  # hears what computed tokens a slot or copy holds, none when it is gone
        self.lookup_s = 0.0
        self._tree = RadixTree()
        self._running: dict[int, Sequence] = {}
        self._returning: set[int] = set()  # slots of running ones whose own KV comes back only after all placements
        self._resident: dict[int, int] = {}  # slot -> tick of last use
        self._saved: dict[Saved, int] = {}  # in order of last use -> tokens
        self._pinned: set[Saved] = set()
        self._tick = 0
        self._keys = 0
        self.lookups = 0
        self.evictions = 0

    @property
    def saved_tokens(self) -> int:
        """Tokens in copies outside the slots."""
        return sum(self._saved.values())

    @property
    def resident_tokens(self) -> int:
        """Tokens that free slots still hold."""
        return sum(self._tree.length(slot) for slot in self._resident)

    def settled(self) -> None:
        """The last step's placements and restores are done: what came back from outside is there for others."""
        self._returning.clear()

    def reusable(self, tokens: Seq[int], namespace: str) -> int:
        """Prompt tokens that are computed and could be taken over now."""
        shared = self._tree.match(tokens, namespace)
        return max((self._ready(holder, count) for holder, count in shared.items()), default=0)

    def place(self, seq: Sequence, free_slots: Seq[int]) -> Placement | None:
        """Choose slot and source for a sequence that starts; None when it should wait for a running one's prefix."""
        if self._timer is None:
            return self._place(seq, free_slots)
        begun_s = self._timer()
        placement = self._place(seq, free_slots)
        self.lookup_s += self._timer() - begun_s
        return placement

    def _place(self, seq: Sequence, free_slots: Seq[int]) -> Placement | None:
        assert seq.tokens is not None
        self.lookups += 1
        shared = self._tree.match(seq.tokens, seq.namespace)
        limit = seq.total_tokens - 1  # the last token must be computed, its logits are needed
        source: Holder | None = None
        best = 0
        for holder, common in shared.items():
            assert isinstance(holder, int | Saved)
            ready = min(self._ready(holder, common), limit)
            if ready > best or (ready == best and ready and holder in self._resident and source not in self._resident):
                source, best = holder, ready
        if self._should_wait(seq, shared, best, limit):
            return None
        slot = self._choose_slot(free_slots, source, best)
        if source != slot and best < self.config.min_copy_tokens:
            source, best = None, 0
        return self._take(seq, slot, source, best)

    def place_restored(self, seq: Sequence, free_slots: Seq[int]) -> Placement:
        """A slot for a sequence whose own KV comes back from outside, after all placements of its step."""
        placement = self._take(seq, self._choose_slot(free_slots, None, 0), None, 0)
        self._returning.add(placement.slot)
        return placement

    def release(self, slot: int, seq: Sequence) -> None:
        """A sequence leaves its slot; what it has computed stays there for others."""
        self._running.pop(slot, None)
        self._returning.discard(slot)
        tokens = seq.tokens
        if tokens is None or seq.computed_tokens == 0:
            self.discard(slot)
            return
        self._tree.insert(slot, tokens[: seq.computed_tokens], seq.namespace)
        self._say(slot, tokens[: seq.computed_tokens], seq.namespace)
        self._tick += 1
        self._resident[slot] = self._tick

    def add_saved(self, tokens: Seq[int], namespace: str) -> tuple[Saved, tuple[Saved, ...]]:
        """Take in a copy that was computed elsewhere; it stays until `remove_saved`. Returns what to drop for it."""
        drop = self._make_room(len(tokens), None)
        self._keys += 1
        saved = Saved(self._keys)
        self._saved[saved] = len(tokens)
        self._pinned.add(saved)
        self._tree.insert(saved, tokens, namespace)
        self._say(saved, tokens, namespace)
        return saved, drop

    def remove_saved(self, saved: Saved) -> None:
        """Forget a copy."""
        self._say(saved, (), "")
        self._pinned.discard(saved)
        self._saved.pop(saved, None)
        self._tree.remove(saved)

    def computed(self, seq: Sequence) -> None:
        """A running sequence's prompt is computed: from now on others may count on it."""
        if seq.tokens is not None:
            self._say(seq.slot, seq.tokens[: seq.computed_tokens], seq.namespace)

    def _say(self, holder: Holder, tokens: Seq[int], namespace: str) -> None:
        if self.on_change is not None:
            self.on_change(holder, tokens, namespace)

    def discard(self, slot: int) -> None:
        """A slot's content is worth nothing any more."""
        self._say(slot, (), "")
        self._running.pop(slot, None)
        self._returning.discard(slot)
        self._resident.pop(slot, None)
        self._tree.remove(slot)

    def clear(self) -> list[Saved]:
        """Forget everything but what runs; returns the copies to drop."""
        for slot in list(self._resident):
            self.discard(slot)
        dropped = list(self._saved)
        for saved in dropped:
            self.remove_saved(saved)
        return dropped

    def _ready(self, holder: object, common: int) -> int:
        """Computed tokens among those that a holder shares."""
        running = self._running.get(holder) if isinstance(holder, int) else None
        if running is None:
            return common
        return 0 if holder in self._returning else min(common, running.computed_tokens)

    def _should_wait(self, seq: Sequence, shared: dict[object, int], best: int, limit: int) -> bool:
        """Whether a running sequence of no lesser urgency is about to have a much longer prefix ready."""
        for holder, common in shared.items():
            leader = self._running.get(holder) if isinstance(holder, int) else None
            if leader is None or leader.priority > seq.priority:
                continue
            coming = min(common, limit)
            gain = coming - best
            if leader.computed_tokens < coming >= self.config.min_wait_tokens and gain >= self.config.min_copy_tokens:
                return True
        return False

    def _choose_slot(self, free_slots: Seq[int], source: Holder | None, tokens: int) -> int:
        """The source itself if the sequence continues it, else an empty slot, else the least recently used one."""
        if source in self._resident and isinstance(source, int):
            lost = self._tree.length(source) - tokens
            if lost <= max(16, tokens // 8):
                return source
        empty = [slot for slot in free_slots if slot not in self._resident]
        if empty:
            return min(empty)
        return min(free_slots, key=self._resident.__getitem__)

    def _take(self, seq: Sequence, slot: int, source: Holder | None, tokens: int) -> Placement:
        assert seq.tokens is not None
        save: Saved | None = None
        drop: tuple[Saved, ...] = ()
        if slot != source:
            save, drop = self._save(slot, keep=source)
        self.discard(slot)
        if isinstance(source, Saved):  # its turn to be dropped comes last
            self._saved[source] = self._saved.pop(source)
        elif source in self._resident:
            self._tick += 1
            self._resident[source] = self._tick
        self._running[slot] = seq
        self._tree.insert(slot, seq.tokens[: seq.total_tokens], seq.namespace)
        return Placement(seq, slot, source, tokens, save, drop)

    def _save(self, slot: int, keep: Holder | None) -> tuple[Saved | None, tuple[Saved, ...]]:
        """Make room outside for a slot's content, if it is worth it and held nowhere else."""
        size = self._tree.length(slot)
        if slot not in self._resident or not self.config.min_save_tokens <= size <= self.config.saved_tokens:
            return None, ()
        namespace, tokens = self._tree.content(slot)
        elsewhere = max(
            (self._ready(holder, n) for holder, n in self._tree.match(tokens, namespace).items() if holder != slot),
            default=0,
        )
        if size - elsewhere < self.config.min_save_tokens:
            return None, ()
        drop = self._make_room(size, keep)
        if self.saved_tokens + size > self.config.saved_tokens:
            return None, drop
        self._keys += 1
        saved = Saved(self._keys)
        self._saved[saved] = size
        self._tree.insert(saved, tokens, namespace)
        self._say(saved, tokens, namespace)
        return saved, drop

    def _make_room(self, size: int, keep: Holder | None) -> tuple[Saved, ...]:
        """Evict the copies used longest ago until `size` tokens fit, or until only pinned ones and `keep` are left."""
        drop: list[Saved] = []
        while self.saved_tokens + size > self.config.saved_tokens:
            oldest = next((saved for saved in self._saved if saved != keep and saved not in self._pinned), None)
            if oldest is None:
                break
            self.remove_saved(oldest)
            self.evictions += 1
            drop.append(oldest)
        return tuple(drop)
