"""A gateway that follows a publisher of KV events: gaps, restarts, silence, and what the Router is told."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import zmq
import zmq.asyncio

from tests.support.gateway import Front, chat, front, instance, whole
from tests.support.kv_events import batch, stored
from tests.support.loop import run, until
from tests.support.upstream import Call, FakeUpstream


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
            for number, payload in list(self.kept):  # what is published meanwhile is not part of it
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
    from weighbridge.gateway.prefix_hashes import prefix_hashes

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
