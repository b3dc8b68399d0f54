"""Block events, replayed into a set, always name exactly the blocks that some holder holds."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from weighbridge.engine.kv_events import BlockLedger

SIZE = 2


@settings(deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 3), st.lists(st.integers(0, 1), max_size=8), st.sampled_from(["", "t"])), max_size=30
    )
)
def test_events_add_up_to_what_is_held(changes: list[tuple[int, list[int], str]]) -> None:
    ledger = BlockLedger(SIZE)
    held: dict[int, tuple[list[int], str]] = {}
    known: dict[int, tuple[int, ...]] = {}  # hash -> all tokens up to the end of the block
    spaces: dict[int, str] = {}
    for holder, tokens, namespace in changes:
        held[holder] = (tokens, namespace)
        for event in ledger.change(holder, tokens, namespace):
            if event["type"] == "BlockRemoved":
                for value in event["block_hashes"]:
                    del known[value]
                continue
            parent = event["parent_block_hash"]
            before = () if parent is None else known[parent]
            assert len(event["token_ids"]) == SIZE * len(event["block_hashes"])
            for at, value in enumerate(event["block_hashes"]):
                assert value not in known
                before += tuple(event["token_ids"][at * SIZE : (at + 1) * SIZE])
                known[value] = before
                spaces[value] = namespace
        expected = {
            (space, tuple(content[:end]))
            for content, space in held.values()
            for end in range(SIZE, len(content) + 1, SIZE)
        }
        assert {(spaces[value], content) for value, content in known.items()} == expected
        assert len(ledger) == len(known)
