"""KV events from the wire to the Router's index: forms, order, content, translation."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
import zmq.asyncio
from hypothesis import given
from hypothesis import strategies as st

from tests.support.gateway import Front, chat, front, instance, whole
from tests.support.loop import run, until
from tests.support.upstream import Call, FakeUpstream
from weighbridge.core.errors import ConfigError
from weighbridge.gateway import Gateway, GatewaySettings, InstanceSettings
from weighbridge.gateway.kv.blocks import Blocks, chain_keys
from weighbridge.gateway.kv.discovery import told_sources
from weighbridge.gateway.kv.names import Layout, Names
from weighbridge.gateway.kv.stream import Sequence
from weighbridge.gateway.kv.wire import Cleared, Removed, Stored, read_batch

ENGINES = Path(__file__).resolve().parents[1] / "data" / "engines"
RECORDED = json.loads((ENGINES / "vllm" / "kv_events.json").read_text())


def frames(entry: dict[str, Any]) -> list[bytes]:
    return [bytes.fromhex(text) for text in entry["frames_hex"]]


def stored(hashes: list[Any], tokens: Any, parent: Any = None, size: Any = 4, **extra: Any) -> dict[str, Any]:
    fields = {"block_hashes": hashes, "parent_block_hash": parent, "token_ids": tokens, "block_size": size}
    return {"type": "BlockStored", **fields, "medium": "GPU", **extra}


def batch(*events: Any) -> bytes:
    return msgspec.msgpack.encode([0.5, list(events), 0])


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


# a publisher and the gateway


class Publisher:
    """Publishes and replays as vLLM does, and can be made to lose batches."""

    def __init__(self, context: zmq.asyncio.Context, port: int = 0, replay_port: int = 0) -> None:
        self.pub, self.router = context.socket(zmq.PUB), context.socket(zmq.ROUTER)
        for socket in (self.pub, self.router):
            socket.setsockopt(zmq.LINGER, 0)
        self.port = self._bind(self.pub, port)
        self.replay_port = self._bind(self.router, replay_port)
        self.kept: list[tuple[int, bytes]] = []
        self.next = 0
        self.replays = 0
        self._task = asyncio.get_running_loop().create_task(self._serve())

    @staticmethod
    def _bind(socket: Any, port: int) -> int:
        socket.bind(f"tcp://127.0.0.1:{port or '*'}")
        return int(socket.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2])

    async def publish(self, *events: Any, lose: bool = False) -> None:
        payload = batch(*events)
        self.kept.append((self.next, payload))
        if not lose:
            await self.pub.send_multipart([b"kv@x", self.next.to_bytes(8, "big"), payload])
        self.next += 1

    async def _serve(self) -> None:
        while True:
            client, empty, start = await self.router.recv_multipart()
            self.replays += 1
            for number, payload in self.kept:
                if number >= int.from_bytes(start, "big"):
                    await self.router.send_multipart([client, empty, b"kv@x", number.to_bytes(8, "big"), payload])
            await self.router.send_multipart([client, empty, b"", b"\xff" * 8, b""])

    async def close(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        self.pub.close()
        self.router.close()


TEXT = "one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen. " * 8


def tokens_of(body: dict[str, Any]) -> list[int]:
    """A tokenizer for tests: one token for 4 characters."""
    text = json.dumps(body["messages"])
    return [sum(text[n : n + 4].encode()) + 1000 * len(text[n : n + 4]) for n in range(0, len(text), 4)]


def script(call_log: list[str]) -> Any:
    async def answer(call: Call) -> None:
        body = json.loads(call.body)
        call_log.append(call.path)
        tokens = tokens_of(body)
        if call.path == "/tokenize":
            await call.reply(200, json.dumps({"count": len(tokens), "tokens": tokens}).encode())
        else:
            await call.reply(200, whole(prompt=len(tokens)))

    return answer


@asynccontextmanager
async def followed(**fields: Any) -> AsyncIterator[tuple[Front, Publisher, FakeUpstream, list[str]]]:
    context = zmq.asyncio.Context()
    publisher = Publisher(context)
    calls: list[str] = []
    try:
        async with FakeUpstream(script(calls)) as upstream:
            settings = {
                "kind": "vllm",
                "kv_events": f"tcp://127.0.0.1:{publisher.port}",
                "kv_events_replay": f"tcp://127.0.0.1:{publisher.replay_port}",
                **fields,
            }
            async with front(instances=(instance(upstream, "i0", **settings),)) as f:
                await until(lambda: bool(f.gateway.kv.watches["i0"].subscribers))
                sequence = f.gateway.kv.watches["i0"].subscribers[0]._sequence
                while not sequence._live:  # until the subscription is connected: what it misses before, it replays
                    await publisher.publish()
                    await asyncio.sleep(0.01)
                await until(lambda: sequence.next == publisher.next)
                f.gateway.kv.watches["i0"].counts.__init__()  # type: ignore[misc]
                yield f, publisher, upstream, calls
    finally:
        await publisher.close()
        context.destroy(linger=0)


def ask(text: str = TEXT, **fields: Any) -> bytes:
    return chat(stream=False, messages=[{"role": "user", "content": text}], **fields)


def events_for(text: str = TEXT, size: int = 16, first: int = 100) -> dict[str, Any]:
    tokens = tokens_of({"messages": [{"role": "user", "content": text}]})
    count = len(tokens) // size
    return stored(list(range(first, first + count)), tokens[: count * size], size=size)


def matched(f: Front, text: str = TEXT) -> int:
    """Leading byte blocks that the Router believes i0 to hold."""
    from weighbridge.gateway.estimate import prefix_hashes

    seed = b"default\0m"
    body = json.dumps([{"role": "user", "content": text}]).encode()
    hashes = prefix_hashes(seed, body, 64, 1024)
    return f.gateway.driver.router.fleet.instances["i0"].prefix.match(hashes)


def in_array(event: dict[str, Any]) -> list[Any]:
    """As SGLang and older vLLM write it."""
    names = ("type", "block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium")
    return [event.get(name) for name in names]


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_what_the_engine_says_is_what_the_router_believes(kind: str) -> None:
    async def main() -> None:
        async with followed(kind=kind) as (f, publisher, _, calls):
            await publisher.publish(events_for() if kind == "vllm" else in_array(events_for()))
            assert (await f.post(ask())).status == 200
            watch = f.gateway.kv.watches["i0"]
            await until(lambda: calls.count("/tokenize") == 1 and len(watch.names) > 0)
            prefix = f.gateway.driver.router.fleet.instances["i0"].prefix
            await until(lambda: prefix.precise)
            all_blocks = len(json.dumps([{"role": "user", "content": TEXT}])) // 64
            assert matched(f) >= all_blocks - 1
            # known text is not asked for again
            assert (await f.post(ask())).status == 200
            assert (await f.post(ask(TEXT + " And now? " * 30))).status == 200
            await until(lambda: calls.count("/tokenize") == 2)
            assert matched(f, TEXT + " And now? " * 30) >= all_blocks - 2, "the beginning is held"
            # the engine evicts the tail, as it does under pressure
            count = len(watch.blocks)
            await publisher.publish({"type": "BlockRemoved", "block_hashes": [100 + count - 1, 100 + count - 2]})
            await until(lambda: len(watch.blocks) == count - 2)
            assert matched(f) == pytest.approx(all_blocks * (count - 2) / count, abs=1.5)
            await publisher.publish({"type": "AllBlocksCleared"})
            await until(lambda: matched(f) == 0)
            assert watch.state == "live"
            f.assert_idle()

    run(main())


def test_a_late_subscriber_replays_and_a_gap_is_filled() -> None:
    async def main() -> None:
        async with followed() as (f, publisher, _, _):
            await f.post(ask())
            watch = f.gateway.kv.watches["i0"]
            await publisher.publish(events_for(), lose=True)
            await publisher.publish(events_for("other " * 60, first=500))
            await until(lambda: watch.counts.gaps == 1 and matched(f) > 5)
            assert watch.counts.lost == 0
            replays = publisher.replays
            for n in range(3):
                await publisher.publish({"type": "BlockRemoved", "block_hashes": [500 + n]}, lose=n < 2)
            await until(lambda: watch.counts.gaps == 2)
            count = len(events_for("other " * 60)["block_hashes"]) + len(events_for()["block_hashes"])
            await until(lambda: len(watch.blocks) == count - 3)
            assert publisher.replays == replays + 1
            metrics = (await f.get("/metrics", admin=True)).body.decode()
            assert 'weighbridge_kv_events_replayed_total{instance="i0"}' in metrics
            row = (await f.get("/fleet", admin=True)).json()["instances"][0]["kv_events"]
            assert (row["state"], row["lost"]) == ("live", 0)

    run(main())


def test_what_no_replay_has_any_more_is_read_anew() -> None:
    async def main() -> None:
        async with followed() as (f, publisher, _, _):
            watch = f.gateway.kv.watches["i0"]
            await publisher.publish(events_for(first=100))
            await until(lambda: len(watch.blocks) > 0)
            await publisher.publish({"type": "BlockRemoved", "block_hashes": [100]}, lose=True)
            publisher.kept.clear()  # its buffer is short
            await publisher.publish(stored([1], [1, 2, 3, 4]), lose=True)
            await publisher.publish(stored([2], [5, 6, 7, 8]))
            await until(lambda: watch.counts.lost == 1)
            await until(lambda: len(watch.blocks) == 2)
            assert watch.counts.gaps == 1

    run(main())


def test_without_replay_a_gap_is_counted_and_the_rest_is_kept() -> None:
    async def main() -> None:
        async with followed() as (f, publisher, _, _):
            watch = f.gateway.kv.watches["i0"]
            await publisher.publish(stored([1], [1, 2, 3, 4]))
            await until(lambda: len(watch.blocks) == 1)
            watch.subscribers[0].source = type(watch.sources[0])(watch.sources[0].endpoint, None)
            await publisher.publish(stored([2], [5, 6, 7, 8]), lose=True)
            await publisher.publish(stored([3], [9, 10, 11, 12]))
            await until(lambda: len(watch.blocks) == 2)
            assert (watch.counts.gaps, watch.counts.lost) == (1, 1)

    run(main())


def test_a_restarted_engine_starts_empty() -> None:
    async def main() -> None:
        async with followed() as (f, publisher, _, _):
            watch = f.gateway.kv.watches["i0"]
            for n in range(3):
                await publisher.publish(events_for(f"{n} {TEXT}", first=100 * n))
            await f.post(ask(f"0 {TEXT}"))
            await until(lambda: matched(f, f"0 {TEXT}") > 5)
            # the publisher begins anew, as another process on the same port would
            publisher.kept.clear()
            publisher.next = 0
            await publisher.publish(events_for("new " * 60, first=900))
            await until(lambda: watch.counts.restarts == 1)
            await until(lambda: matched(f, f"0 {TEXT}") == 0)
            await until(lambda: len(watch.blocks) == len(events_for("new " * 60)["block_hashes"]))
            # health tells of the same restart a little later: what the new process said stays
            endpoint = f.gateway.driver.endpoints["i0"]
            held = len(watch.blocks)
            endpoint.generation += 1
            await publisher.publish()
            await until(lambda: watch._generation == endpoint.generation)
            assert len(watch.blocks) == held
            # and where only health notices, for the numbers go on
            publisher.kept.clear()
            endpoint.generation += 1
            await until(lambda: len(watch.blocks) == 0)

    run(main())


def test_an_engine_that_says_nothing_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weighbridge.gateway.kv.watch.UNHEARD_S", 0.05)

    async def main() -> None:
        async with followed() as (f, publisher, _, _):
            watch = f.gateway.kv.watches["i0"]
            assert watch.state == "waiting"
            for n in range(9):
                assert (await f.post(ask(f"{n} {TEXT}"))).status == 200
            await until(lambda: watch.state == "silent")
            text = (await f.get("/metrics", admin=True)).body.decode()
            assert 'weighbridge_kv_events_silent{instance="i0"} 1.0' in text
            assert (await f.get("/fleet", admin=True)).json()["instances"][0]["kv_events"]["state"] == "silent"
            assert matched(f, f"3 {TEXT}") > 5, "guessed from what was dispatched, as without events"
            await publisher.publish(events_for(f"8 {TEXT}"))
            await until(lambda: watch.state == "live")

    run(main())


def test_events_of_other_tokens_are_shown_as_unmatched() -> None:
    async def main() -> None:
        async with followed() as (f, publisher, _, _):
            watch = f.gateway.kv.watches["i0"]
            await publisher.publish(stored([1, 2], [7] * 32, size=16))
            await until(lambda: len(watch.blocks) == 2)
            for n in range(8):
                await f.post(ask(f"{n} {TEXT}"))
            await until(lambda: watch.state == "unmatched")

    run(main())


def test_an_engine_that_cannot_tokenize_keeps_its_guessed_index() -> None:
    async def main() -> None:
        async def deaf(call: Call) -> None:
            if call.path == "/tokenize":
                await call.reply(404, b'{"detail":"Not Found"}')
            else:
                await call.reply(200, whole(prompt=200))

        async with followed() as (f, publisher, upstream, _):
            upstream.script = deaf
            await publisher.publish(events_for())
            await f.post(ask())
            watch = f.gateway.kv.watches["i0"]
            await until(lambda: watch.state == "untranslated")
            assert "/tokenize answers 404" in watch.describe()["problem"]
            await f.post(ask())
            assert len([c for c in upstream.calls if c.path == "/tokenize"]) == 1, "not asked again at once"
            prefix = f.gateway.driver.router.fleet.instances["i0"].prefix
            assert not prefix.precise
            assert matched(f) > 5

    run(main())


def test_salts_stand_nowhere_an_operator_or_client_looks(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(0)

    async def main() -> None:
        async with followed() as (f, publisher, _, _):
            event = events_for()
            await publisher.publish(
                {**event, "extra_keys": [["canary-salt"], *[None] * (len(event["block_hashes"]) - 1)]}
            )
            await publisher.publish(
                {"type": "BlockStored", "extra_keys": [["canary-salt"]], "token_ids": "canary-salt"}
            )
            await f.post(ask(cache_salt="canary-salt"))
            await until(lambda: matched(f) > 5)
            for path in ("/metrics", "/fleet", "/decisions?last=5"):
                assert b"canary-salt" not in (await f.get(path, admin=True)).body
            assert "canary-salt" not in caplog.text

    run(main())


def test_sources_are_asked_of_the_engine() -> None:
    async def main() -> None:
        context = zmq.asyncio.Context()
        publisher = Publisher(context)
        told = {
            "0": {
                "enable_kv_cache_events": True,
                "publisher": "zmq",
                "endpoint": f"tcp://*:{publisher.port}",
                "replay_endpoint": f"tcp://*:{publisher.replay_port}",
                "topic": "kv@x",
            }
        }
        await publisher.publish(events_for())

        async def answer(call: Call) -> None:
            if call.request_line.startswith("GET /kv_event_sources"):
                await call.reply(200, json.dumps(told).encode())
            else:
                await call.reply(200 if "/health" in call.path else 404, b"")

        async with FakeUpstream(answer, health=0) as upstream:
            settings = instance(upstream, "i0", kind="vllm", kv_events="auto")
            async with front(instances=(settings,)) as f:
                watch = f.gateway.kv.watches["i0"]
                await until(lambda: len(watch.blocks) > 0)
                assert watch.describe()["sources"] == [f"tcp://127.0.0.1:{publisher.port}"]
                await f.gateway.remove_instance("i0")
                assert f.gateway.kv.watches == {}
        await publisher.close()
        context.destroy(linger=0)

    run(main())
