"""KV events from the wire to the index: forms, order, content, translation."""

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.kv_events import ENGINES, RECORDED, batch, frames, stored
from weighbridge.core.errors import ConfigError
from weighbridge.gateway import Gateway, GatewaySettings, InstanceSettings
from weighbridge.gateway.kv.blocks import Blocks, chain_keys
from weighbridge.gateway.kv.discovery import told_sources
from weighbridge.gateway.kv.names import Layout, Names
from weighbridge.gateway.kv.stream import Sequence
from weighbridge.gateway.kv.wire import Cleared, Removed, Stored, read_batch


def test_the_recorded_batches_of_vllm() -> None:
    blocks = Blocks()
    seen = []
    for entry in RECORDED["sub"]:
        events, bad = read_batch(frames(entry)[-1])
        assert bad == 0
        for event in events:
            assert isinstance(event, Stored)
            seen.append(event)
            blocks.apply(event)
    assert blocks.block_tokens == 32
    assert any(isinstance(hash_, int) and hash_ > 1 << 63 for event in seen for hash_ in event.hashes), (
        "unsigned 64 bits"
    )
    cold, extended, salted = seen[:3]
    assert extended.parent == cold.hashes[-1]
    plain = chain_keys([*cold.tokens, *extended.tokens], 32)
    assert len(plain) == 4
    assert all(key in blocks for key in plain)
    assert salted.tokens == cold.tokens
    assert salted.hashes != cold.hashes
    tenant = chain_keys(salted.tokens, 32, salt="tenantA")
    assert all(key in blocks for key in tenant)
    assert not set(tenant) & set(plain), "tenants never share"
    assert chain_keys(salted.tokens, 32, salt="tenantB")[0] not in blocks


MAP = stored([1, 2], [5, 6, 7, 8, 9, 10, 11, 12], extra_keys=[["salt"], None], group_idx=0)
ARRAY = ["BlockStored", [1, 2], None, [5, 6, 7, 8, 9, 10, 11, 12], 4, None, "GPU", None, [["salt"], None], 0]


@pytest.mark.parametrize(
    "payload",
    [
        msgspec.msgpack.encode([0.5, [MAP], 0]),
        msgspec.msgpack.encode([0.5, [ARRAY], 0]),
        msgspec.msgpack.encode([0.5, [ARRAY]]),
        msgspec.msgpack.encode({"ts": 0.5, "events": [MAP], "data_parallel_rank": None, "new": 1}),
        msgspec.msgpack.encode([0.5, [{**MAP, "later": {"x": 1}}], None, "tail"]),
    ],
)
def test_every_form_of_a_batch_means_the_same(payload: bytes) -> None:
    events, bad = read_batch(payload)
    assert bad == 0
    assert events == [Stored((1, 2), None, tuple(range(5, 13)), 4, "GPU", "", (["salt"], None))]


def test_short_tails_bytes_hashes_and_other_events() -> None:
    events, bad = read_batch(
        batch(
            ["BlockStored", [b"\x01" * 32], None, [1, 2], 2],  # as older releases, without a tail
            ["BlockRemoved", [b"\x01" * 32]],
            {"type": "BlockRemoved", "block_hashes": [7], "medium": "CPU"},
            ["AllBlocksCleared"],
            {"type": "SomethingNew", "x": 1},
            stored([3], [1, 2, 3, 4], kv_cache_spec_kind="sliding_window"),
        )
    )
    assert bad == 0
    assert events == [
        Stored((b"\x01" * 32,), None, (1, 2), 2, "", "", ()),
        Removed((b"\x01" * 32,), ""),
        Removed((7,), "CPU"),
        Cleared(),
    ]


@pytest.mark.parametrize(
    "event",
    [
        stored([1], [1, 2, 3]),
        stored([1], [1, 2, 3, -4]),
        stored([1], [[1, 2], [3, 4], [5, 6], [7, 8]]),
        stored([[1]], [1, 2, 3, 4]),
        {"type": "BlockStored"},
        {"block_hashes": []},
        ["BlockStored"],
        [],
        5,
        None,
        stored([1], [1, 2, 3, 4], size="4"),
    ],
)
def test_an_event_of_an_unknown_shape_is_counted_and_the_others_are_read(event: Any) -> None:
    events, bad = read_batch(batch(event, stored([9], [1, 2, 3, 4])))
    assert bad == 1
    assert len(events) == 1


@given(st.binary(max_size=200))
def test_nonsense_is_unreadable_and_no_more(payload: bytes) -> None:
    events, _ = read_batch(payload)
    for event in events:
        Blocks().apply(event)


def test_media_ranks_and_adapters_are_kept_apart() -> None:
    blocks = Blocks()
    gpu = Stored((1,), None, (1, 2), 2, "GPU", "", ())
    offloaded = Stored((1,), None, (), 0, "CPU", "", ())
    assert len(blocks.apply(gpu, "0")[0]) == 1
    assert blocks.apply(offloaded, "0") == ([], [])
    assert blocks.apply(gpu, "1") == ([], [])
    assert blocks.apply(Removed((1,), "GPU"), "0") == ([], []), "offloaded: still a hit"
    assert blocks.apply(Removed((1,), "CPU"), "0") == ([], []), "another rank holds it"
    (key,) = chain_keys([1, 2], 2)
    assert key in blocks
    assert blocks.apply(Cleared(), "1") == ([], [key])
    assert len(blocks) == 0
    adapted = Stored((4, 5), None, (1, 2, 3, 4), 2, "GPU", "lora-a", (["lora-a", "s"], ["lora-a"]))
    new, _ = blocks.apply(adapted)
    assert new == chain_keys([1, 2, 3, 4], 2, lora="lora-a", salt="s")
    assert blocks.loras == {"lora-a"}
    assert blocks.apply(Stored((9,), 777, (1, 2), 2, "GPU", "", ())) == ([], [])
    assert blocks.orphans == 1


def test_content_is_bounded() -> None:
    blocks = Blocks(limit=10)
    held: set[bytes] = set()
    for n in range(40):
        new, gone = blocks.apply(Stored((n,), None, (n, n), 2, "GPU", "", ()))
        held = (held | set(new)) - set(gone)
    assert len(blocks) == len(held) == 10
    assert blocks.apply(Removed((0, 1, 2), "")) == ([], []), "what was forgotten is not removed twice"
    names = Names(limit=50)
    for n in range(40):
        names.learn(range(n * 10, n * 10 + 10), [bytes([n])], [0] * 10, lambda key: False)
    assert len(names) == 50
    assert names.of([bytes([0])]) == []
    assert len(names.of([bytes([39])])) == 10


@given(st.lists(st.tuples(st.sampled_from("sr"), st.integers(0, 8), st.sampled_from(["GPU", "CPU"])), max_size=60))
def test_blocks_follow_a_plain_model(steps: list[tuple[str, int, str]]) -> None:
    blocks, model = Blocks(), set[tuple[int, str]]()
    held: set[bytes] = set()
    for kind, n, medium in steps:
        if kind == "s":
            new, gone = blocks.apply(Stored((n,), None, (n,), 1, medium, "", ()))
            model.add((n, medium))
        else:
            new, gone = blocks.apply(Removed((n,), medium))
            model.discard((n, medium))
        held = (held | set(new)) - set(gone)
        expected = {chain_keys([value], 1)[0] for value, _ in model}
        assert held == expected
        assert all(key in blocks for key in expected)
        assert len(blocks) == len(expected)


def test_byte_blocks_end_in_token_blocks() -> None:
    assert Layout(4, 64, 256, 64, 16).places() == [0, 1, 2, 3]
    assert Layout(4, 64, 256, 65, 16).places() == [0, 1, 2, 4]
    assert Layout(4, 64, 256, 65, 16).whole() == 3
    assert Layout(2, 64, 1000, 3, 16).places() == [0, 0]
    assert Layout(2, 64, 1000, 3, 16).whole() == 0
    names = Names()
    keys = [b"a", b"b"]
    names.learn([10, 11, 12], keys, [0, 1, 2], lambda key: False)
    assert (names.key(10), names.key(11), names.key(12)) == (b"a", b"b", None)
    names.learn([11], [b"x"], [0], lambda key: key == b"b")
    assert names.key(11) == b"b", "kept while some engine holds it"
    names.learn([11], [b"x"], [0], lambda key: False)
    assert names.key(11) == b"x"
    assert names.of([b"b"]) == []


@given(st.integers(0, 40), st.integers(1, 4000), st.integers(0, 900), st.sampled_from([1, 16, 32]))
def test_whole_blocks_are_those_placed_before_the_last(count: int, text: int, tokens: int, size: int) -> None:
    layout = Layout(count, 64, text, tokens, size)
    assert layout.whole() == sum(place < tokens // size for place in layout.places())


# the order of batches


def test_order_duplicates_gaps_and_restarts() -> None:
    sequence = Sequence()
    assert sequence.live(3, b"3") == "gap", "nothing is known of what came before"
    assert [sequence.replayed(n, b"%d" % n) for n in (0, 1, 2, 3, 4)] == [True] * 5
    assert sequence.live(3, b"3") == sequence.live(4, b"4") == "duplicate"
    assert sequence.live(5, b"5") == "apply"
    assert sequence.live(8, b"8") == "gap"
    assert [sequence.replayed(n, b"%d" % n) for n in (5, 6, 7)] == [False, True, True]
    assert sequence.live(8, b"8") == "apply"
    assert sequence.live(0, b"0") == "restart", "a subscription never goes backwards"
    assert sequence.live(0, b"0") == "gap"
    assert sequence.skip_to(0) == 0
    assert sequence.live(0, b"0") == "apply"
    assert sequence.live(4, b"4") == "gap"
    assert sequence.skip_to(4) == 3
    only_replayed = Sequence()
    assert only_replayed.replayed(0, b"old")
    assert only_replayed.replayed(1, b"old")
    assert only_replayed.live(0, b"new") == "restart", "the same number, but another batch"


@given(st.lists(st.booleans(), min_size=1, max_size=40))
def test_with_replay_every_batch_is_applied_once_and_in_order(heard: list[bool]) -> None:
    sequence, applied = Sequence(), []
    for number, got in enumerate(heard):
        if not got:
            continue
        verdict = sequence.live(number, b"%d" % number)
        if verdict == "gap":
            applied += [n for n in range(number + 1) if sequence.replayed(n, b"%d" % n)]
            verdict = sequence.live(number, b"%d" % number)
        if verdict == "apply":
            applied.append(number)
    last = max((n for n, got in enumerate(heard) if got), default=-1)
    assert applied == list(range(last + 1))


# where it is published


def test_sources_as_the_recorded_engine_tells_them() -> None:
    told = json.loads((ENGINES / "vllm" / "kv_event_sources.json").read_text())["json"]
    sources, problem = told_sources(told, "10.0.0.7")
    assert problem == ""
    assert [(s.endpoint, s.replay, s.topic) for s in sources] == [
        ("tcp://10.0.0.7:15657", "tcp://10.0.0.7:15658", "kv@pod1@smol")
    ]
    connects = {"0": {**told["0"], "endpoint": "tcp://127.0.0.1:15657"}}
    assert told_sources(connects, "h")[0] == []
    assert "does not listen" in told_sources(connects, "h")[1]
    nothings: list[Any] = [{}, [], None, {"0": {"enable_kv_cache_events": False}}, {"0": 5}]
    for nothing in nothings:
        sources, problem = told_sources(nothing, "h")
        assert (sources, problem) == ([], "it publishes no KV events")
    assert told_sources(told, "::1")[0][0].endpoint == "tcp://[::1]:15657"


@pytest.mark.parametrize(
    "address", ["tcp://*:5557", "tcp://0.0.0.0:5557", "5557", "tcp://h", "http://h:1", "tcp://h:x"]
)
def test_bad_addresses_are_refused_before_anything_starts(address: str) -> None:
    settings = InstanceSettings(name="a", url="http://127.0.0.1:1", kind="vllm", kv_events=address)
    with pytest.raises(ConfigError, match="kv_events"):
        Gateway(GatewaySettings(instances=(settings,)), {})
