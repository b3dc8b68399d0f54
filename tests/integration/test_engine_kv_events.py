"""KV events of a running engine over ZeroMQ, read as a router reads vLLM's."""

from __future__ import annotations

import dataclasses
from typing import Any

import msgspec
import pytest
import zmq

from tests.support.engines import local_engine
from weighbridge.engine.kv_events import KvEventSettings
from weighbridge.engine.model import LlamaModel
from weighbridge.engine.options import EngineOptions
from weighbridge.engine.runner import RunnerOptions

pytestmark = pytest.mark.engine


def read(socket: Any, frames: list[bytes]) -> list[dict[str, Any]]:
    """Events of one message."""
    _, events, rank = msgspec.msgpack.decode(frames[-1])
    assert rank is None
    return events


def test_blocks_are_announced_and_replayed(model: LlamaModel) -> None:
    settings = KvEventSettings("tcp://127.0.0.1:*", "tcp://127.0.0.1:*", "kv@test@smol")
    options = EngineOptions(
        runner=RunnerOptions(slots=1, context_tokens=256, threads=1), kv_events=settings, prefix_store_bytes=0
    )
    context: zmq.Context[Any] = zmq.Context()
    with local_engine(model, options) as engine:
        publisher = engine.engine.kv_events
        assert publisher is not None
        first, second = [600 + i for i in range(40)], [900 + i for i in range(33)]
        subscriber = context.socket(zmq.SUB)
        subscriber.subscribe("kv@")
        subscriber.connect(publisher.endpoint)
        engine.run(first, 2, ignore_eos=True).wait()
        engine.run(second, 2, ignore_eos=True).wait()
        engine.inside(lambda: None)
        request = context.socket(zmq.DEALER)
        request.connect(publisher.replay)
        request.send_multipart([b"", (0).to_bytes(8, "big")])
        stored: dict[int, list[int]] = {}
        numbers = []
        while True:
            assert request.poll(5000)
            frames = request.recv_multipart()
            number = int.from_bytes(frames[-2], "big", signed=True)
            if number == -1:
                assert frames[-1] == b""
                break
            numbers.append(number)
            for event in read(request, frames):
                if event["type"] == "BlockStored":
                    assert event["block_size"] == 16
                    for at, value in enumerate(event["block_hashes"]):
                        stored[value] = event["token_ids"][at * 16 : at * 16 + 16]
                else:
                    for value in event["block_hashes"]:
                        del stored[value]
        assert numbers == list(range(len(numbers)))
        assert list(stored.values()) == [second[:16], second[16:32]], "the one slot holds the second prompt only"
        engine.run(first, 2, ignore_eos=True).wait()
        assert subscriber.poll(5000)
        topic, number_bytes, payload = subscriber.recv_multipart()
        assert topic == b"kv@test@smol"
        assert len(number_bytes) == 8
        assert read(subscriber, [payload])
        request.close(0)
        subscriber.close(0)
    context.term()


def test_a_taken_endpoint_is_one_clear_error(model: LlamaModel) -> None:
    from weighbridge.core.errors import ServiceError
    from weighbridge.engine.kv_events import KvEventPublisher

    publisher = KvEventPublisher(KvEventSettings("tcp://127.0.0.1:*"))
    with pytest.raises(ServiceError, match="KV events cannot listen"):
        KvEventPublisher(dataclasses.replace(publisher.settings, endpoint=publisher.endpoint))
    publisher.close()
