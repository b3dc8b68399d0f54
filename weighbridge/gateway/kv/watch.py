"""What is known of one engine's KV cache, and what the Router is told of it."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from weighbridge.core.events import BlocksRemoved, BlocksStored, Event
from weighbridge.gateway.endpoint import Endpoint
from weighbridge.gateway.kv.blocks import MAX_BLOCKS, Blocks, Key, chain_keys
from weighbridge.gateway.kv.names import Layout, Names
from weighbridge.gateway.kv.prompt import Prompt, prompt_of
from weighbridge.gateway.kv.subscriber import Counts, Source, Subscriber
from weighbridge.gateway.kv.wire import KvEvent

if TYPE_CHECKING:
    from weighbridge.gateway.flight import Flight
    from weighbridge.gateway.usage_fields import Usage

UNKNOWN_CAPACITY_BLOCKS = 65_536
WAITING_PROMPTS = 64
UNHEARD_PROMPTS = 8
UNHEARD_S = 5.0
JUDGED_PROMPTS = 8
HASHES_AT_ONCE = 1024


class Watch:
    """One engine's blocks in the Router's terms. Lives on the event loop; bounded by the engine's own capacity.

    The Router's index of the instance turns precise with the first block that both sides know, and not before: an
    engine that says nothing, or things that cannot be translated, keeps its guessed index.
    """

    def __init__(self, endpoint: Endpoint, names: Names, block_bytes: int, feed: Callable[[Event], None]) -> None:
        self.endpoint = endpoint
        self.names = names
        self.counts = Counts()
        self.sources: list[Source] = []
        self.subscribers: list[Subscriber] = []
        self.prompts: deque[Prompt] = deque(maxlen=WAITING_PROMPTS)
        self.problem = ""
        """Why no events can come, or why they cannot be translated."""
        self.dropped = 0
        """Prompts that were not tokenized because too many waited."""
        self.wanted = asyncio.Event()
        """Prompts wait to be translated."""
        self.tokenize_after_s = 0.0
        """The engine could not tokenize: it is not asked again before (monotonic)."""
        self._block_bytes = block_bytes
        self._feed = feed
        self.blocks = Blocks(_limit(endpoint))
        self._generation = 0
        self._restarts = 0
        self._precise = False
        """The Router's index of this generation goes by events."""
        self._unheard = 0
        self._unheard_since_s = 0.0
        self._silent = False
        self._matches: deque[bool] = deque(maxlen=JUDGED_PROMPTS)

    @property
    def block_tokens(self) -> int:
        """As its events say, else as the engine told."""
        return self.blocks.block_tokens or self.endpoint.spec.limits.block_size

    @property
    def state(self) -> str:
        """`off` (no source), `waiting` (nothing heard yet), `live`, `silent`, `unmatched` or `untranslated`."""
        if not self.sources:
            return "off"
        if self._silent:
            return "silent"
        if self.problem:
            return "untranslated"
        if not self.counts.batches:
            return "waiting"
        return "unmatched" if len(self._matches) == JUDGED_PROMPTS and not any(self._matches) else "live"

    # from the subscription

    def kv_events(self, rank: str, events: list[KvEvent]) -> None:
        """Events of one batch."""
        self._unheard = 0
        if self._silent:
            self._silent = False
            self._matches.clear()
        self._check_generation()
        for event in events:
            new, gone = self.blocks.apply(event, rank)
            if gone:
                self._removed(self.names.of(gone))
            if new:
                self._stored(self.names.of(new))

    def kv_cleared(self, rank: str) -> None:
        """What this rank told is void."""
        self._check_generation()
        names = self.names.of(self.blocks.clear(rank))
        if len(self.sources) > 1:
            self._removed(names)
        else:  # also what is only thought to be there
            self._feed(BlocksRemoved(instance=self.endpoint.name, generation=self._generation, all=True))

    def kv_idle(self) -> None:
        """Now and then."""
        self._check_generation()
        if self._unheard >= UNHEARD_PROMPTS and time.monotonic() - self._unheard_since_s > UNHEARD_S:
            if not self._silent and len(self.blocks):
                # what it held is not to be believed any more; the Router guesses from what is dispatched
                self.blocks.clear()
                self._feed(BlocksRemoved(instance=self.endpoint.name, generation=self._generation, all=True))
            self._silent = True

    def _check_generation(self) -> None:
        """A new generation is a restarted engine: the Router has forgotten it, and so must we."""
        generation = self.endpoint.generation
        if generation == self._generation:
            return
        first, self._generation = self._generation == 0, generation
        self._precise = False
        self.blocks.limit = _limit(self.endpoint)
        noticed, self._restarts = self.counts.restarts != self._restarts, self.counts.restarts
        if first or noticed:  # what we hold is the new process's
            self._stored(self.names.held(self.blocks.__contains__))
            return
        self.blocks.clear()
        for subscriber in self.subscribers:
            subscriber.read_again()

    # from finished requests

    def answered(self, flight: Flight, usage: Usage) -> None:
        """A request ended well here: its prompt's tokens are worth knowing."""
        prompt = prompt_of(flight, usage.prompt_tokens, usage.cached_tokens)
        if prompt is not None:
            self.queue(prompt)

    def queue(self, prompt: Prompt) -> None:
        """Has a prompt translated soon; the oldest that waits is dropped where too many do."""
        if len(self.prompts) == WAITING_PROMPTS:
            self.dropped += 1
        self.prompts.append(prompt)
        self.wanted.set()

    def expects_events(self, prompt: Prompt) -> None:
        """Notes a prompt of which the engine must have computed, and hence announced, whole blocks."""
        if prompt.cached_tokens is None and self.knows(prompt):
            return
        if prompt.tokens - (prompt.cached_tokens or 0) >= 2 * self.block_tokens:
            if not self._unheard:
                self._unheard_since_s = time.monotonic()
            self._unheard += 1

    def layout(self, prompt: Prompt) -> Layout:
        """Where its byte blocks lie among its token blocks."""
        return Layout(len(prompt.names), self._block_bytes, prompt.text_bytes, prompt.tokens, self.block_tokens)

    def knows(self, prompt: Prompt) -> bool:
        """Whether there is nothing to learn from it: all byte blocks before its last, partial token block are known."""
        whole = self.layout(prompt).whole()
        return not whole or self.names.knows(prompt.names[whole - 1])

    def learn(self, prompt: Prompt, tokens: Sequence[int], model: str, salt: str, others: Iterable[Watch]) -> None:
        """The tokens of a prompt that was answered here: from now on its byte blocks follow their token blocks."""
        lora = model if model in self.blocks.loras else ""
        keys = chain_keys(tokens, self.block_tokens, lora=lora, salt=salt)
        if not keys:
            return
        watches = [self, *(other for other in others if other is not self)]
        places = self.layout(prompt).places()
        self.names.learn(prompt.names, keys, places, lambda key: any(key in watch.blocks for watch in watches))
        if self.counts.batches and not self._silent:
            self._matches.append(keys[0] in self.blocks)
        for watch in watches:
            held = [name for name in prompt.names if watch.holds(name)]
            watch._stored(held)
        self.confirm(prompt)

    def confirm(self, prompt: Prompt) -> None:
        """What was expected here at dispatch and is not held after all, because it was evicted since, is forgotten.

        Blocks come and go from the tail: where the last whole one is held, all are. The partial one behind it may stay
        expected: engines reuse whole blocks, and the Router counts no others.
        """
        if not self._precise or self._silent:
            return
        whole = self.layout(prompt).whole()
        if whole and not self.holds(prompt.names[whole - 1]):
            self._removed([name for name in prompt.names if not self.holds(name)])

    def holds(self, name: int) -> bool:
        """Whether the engine holds the token block in which a byte block ends."""
        key: Key | None = self.names.key(name)
        return key is not None and key in self.blocks

    # to the Router

    def _stored(self, names: list[int]) -> None:
        self._precise = self._precise or bool(names)
        for start in range(0, len(names), HASHES_AT_ONCE):
            part = tuple(names[start : start + HASHES_AT_ONCE])
            self._feed(BlocksStored(instance=self.endpoint.name, generation=self._generation, hashes=part))

    def _removed(self, names: list[int]) -> None:
        for start in range(0, len(names), HASHES_AT_ONCE):
            part = tuple(names[start : start + HASHES_AT_ONCE])
            self._feed(BlocksRemoved(instance=self.endpoint.name, generation=self._generation, hashes=part))

    def describe(self) -> dict[str, Any]:
        """For operators."""
        counts = self.counts
        return {
            "state": self.state,
            "problem": self.problem,
            "sources": [source.endpoint for source in self.sources],
            "blocks": len(self.blocks),
            "block_tokens": self.blocks.block_tokens,
            "byte_blocks": len(self.names),
            "batches": counts.batches,
            "gaps": counts.gaps,
            "replayed": counts.replayed,
            "lost": counts.lost,
            "restarts": counts.restarts,
            "unreadable": counts.unreadable,
            "orphans": self.blocks.orphans,
            "untokenized": self.dropped,
        }


def _limit(endpoint: Endpoint) -> int:
    capacity = endpoint.spec.limits.kv_blocks or UNKNOWN_CAPACITY_BLOCKS
    return min(capacity + capacity // 4, MAX_BLOCKS)
