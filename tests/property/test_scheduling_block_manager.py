"""Block counts and sharing against a slow oracle that keeps every block as an object."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from weighbridge.scheduling.block_manager import BlockManager
from weighbridge.scheduling.sequence import Sequence

BLOCKS, SIZE = 12, 4


class Blocks(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.manager = BlockManager(BLOCKS, SIZE, prefix_caching=True)
        self.live: list[Sequence] = []
        self.count = 0

    @rule(prompt=st.integers(1, 30), family=st.integers(0, 1), first=st.integers(1, 30))
    def admit(self, prompt: int, family: int, first: int) -> None:
        self.count += 1
        seq = Sequence(self.count, prompt, 10, block_hashes=[family * 100 + i for i in range(prompt // SIZE)])
        free = self.manager.free_blocks
        if self.manager.admit(seq, first):
            assert seq.computed_tokens % SIZE == 0
            assert seq.computed_tokens < prompt
            assert seq.blocks * SIZE >= min(prompt, seq.computed_tokens + first)
            self.live.append(seq)
            seq.computed_tokens = min(prompt, seq.computed_tokens + first)
        else:
            assert self.manager.free_blocks == free
            assert seq.blocks == 0
            assert not seq.held_hashes

    @rule(pick=st.integers(0, 100), more=st.integers(1, 8))
    def grow(self, pick: int, more: int) -> None:
        if self.live:
            seq = self.live[pick % len(self.live)]
            before = seq.blocks
            if self.manager.grow(seq, seq.computed_tokens + more):
                seq.computed_tokens += more
            else:
                assert seq.blocks == before

    @rule(pick=st.integers(0, 100))
    def release(self, pick: int) -> None:
        if self.live:
            self.manager.release(self.live.pop(pick % len(self.live)))

    @invariant()
    def counts_agree(self) -> None:
        shared = {value for seq in self.live for value in seq.held_hashes}
        private = sum(seq.blocks - len(seq.held_hashes) for seq in self.live)
        assert self.manager.used_blocks == len(shared) + private
        assert self.manager._refs == {v: sum(v in s.held_hashes for s in self.live) for v in shared}
        assert not shared & set(self.manager._idle)
        assert len(self.manager._idle) <= self.manager.free_blocks
        assert 0 <= self.manager.free_blocks <= BLOCKS


Blocks.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestBlocks = Blocks.TestCase
