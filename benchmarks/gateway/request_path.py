"""CPU time of one request through the whole gateway without sockets, and where it goes.

    python benchmarks/gateway/request_path.py [--policy least_tokens] [--chunks] [--profile]

64 clients send the rig's request (about 900 bytes) into real server connections whose transports only collect bytes;
eight engines answer on real client connections the same way. Authentication, cache salts, ledger, metrics, decision
records and the event log on disk are on. Sockets and the event loop's own work are left out, so the figure repeats to
a few per cent on a quiet core: it is there to compare two versions of this code. It counts the CPU of the whole
process, the event log's thread included.
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import hashlib
import json
import pstats
import statistics
import tempfile
import time
from collections import deque
from pathlib import Path
from typing import Any

from weighbridge.core.events import InstanceUp, ProfileUpdated, Tick
from weighbridge.core.instance import Limits, Rates
from weighbridge.gateway import Gateway, GatewaySettings, InstanceSettings, KeySettings
from weighbridge.gateway.process import tune_collector
from weighbridge.http.client_connection import ClientConnection
from weighbridge.http.connection import ServerConnection
from weighbridge.http.loop_pass import pass_of
from weighbridge.routing.router import RouterSettings

CLIENTS = 64
ENGINES = 8
BURST = 16
KEY = "sk-test"
END = (b"}}", b"0\r\n\r\n")
USAGE = {"prompt_tokens": 200, "completion_tokens": 64, "total_tokens": 264}


class Wire:
    """A transport that keeps what is written to it and puts its connection among those that were written to."""

    def __init__(self, connection: ServerConnection | ClientConnection, written: deque[Any]) -> None:
        self.sent: list[bytes] = []
        self.connection = connection
        self._written = written

    def write(self, data: bytes) -> None:
        if not self.sent:
            self._written.append(self)
        self.sent.append(data)

    def get_extra_info(self, name: str) -> tuple[str, int] | None:
        return ("127.0.0.1", 1) if name == "peername" else None

    def is_closing(self) -> bool:
        return False

    def get_write_buffer_size(self) -> int:
        return 0

    def _nothing(self, *args: Any, **named: Any) -> None:
        pass

    set_write_buffer_limits = pause_reading = resume_reading = close = abort = _nothing


def request_bytes(stream: bool) -> bytes:
    """The rig's request."""
    body = {
        "model": "mock",
        "messages": [
            {"role": "system", "content": "You are helpful."},
            {"role": "user", "content": "yyyyy " * 133},
        ],
        "max_tokens": 64,
        "seed": 0,
        "stream": stream,
    }
    text = json.dumps(body, separators=(",", ":")).encode()
    head = (
        "POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1:19100\r\ncontent-type: application/json\r\n"
        f"authorization: Bearer {KEY}\r\nContent-Length: {len(text)}\r\n\r\n"
    )
    return head.encode() + text


def reply_bytes(frames: int) -> list[bytes]:
    """The reads of an engine's reply: a whole one, or a stream of that many frames."""
    if not frames:
        message = {"role": "assistant", "content": "x" * 330}
        choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": "stop"}
        body = json.dumps({"id": "c", "object": "chat.completion", "choices": [choice], "usage": USAGE}).encode()
        head = (
            f"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\nserver: mock\r\n\r\n"
        )
        return [head.encode() + body]
    head = "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nserver: mock\r\ntransfer-encoding: chunked\r\n\r\n"
    reads = [head.encode()]
    for number in range(frames):
        last = b"null" if number < frames - 1 else b'"stop"'
        text = b"%x" % (number * 7919)  # texts of a few bytes that differ, as tokens do
        delta = b'{"content":"%b"}' % text
        frame = b'data: {"id":"c","choices":[{"index":0,"delta":%b,"finish_reason":%b}]}\n\n' % (delta, last)
        reads.append(b"%x\r\n%b\r\n" % (len(frame), frame))
    reads.append(b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n")
    return reads


def make_gateway(policy: str, data_dir: str | None) -> Gateway:
    """A gateway with eight engines that are up; no listener is opened."""
    limits = Limits(max_context=8192, kv_blocks=4096)
    settings = GatewaySettings(
        data_dir=data_dir,
        router=RouterSettings(policy=policy),
        keys=(KeySettings(sha256=hashlib.sha256(KEY.encode()).hexdigest(), tenant="t"),),
        instances=tuple(
            InstanceSettings(
                name=f"i{n}", url=f"http://127.0.0.1:{19101 + n}", kind="vllm", models=("mock",), limits=limits
            )
            for n in range(ENGINES)
        ),
    )
    return Gateway(settings)


class Bench:
    """The gateway, its clients and its engines, in a closed loop: an answered client asks again."""

    def __init__(self, gateway: Gateway, frames: int) -> None:
        self.driver = gateway.driver
        self.loop_pass = pass_of(asyncio.get_running_loop())
        gateway.server.loop_pass = gateway.driver.loop_pass = self.loop_pass
        self.request = request_bytes(frames > 0)
        self.reply = reply_bytes(frames)
        self.answered: deque[Wire] = deque()
        self.asked: deque[Wire] = deque()
        for endpoint in gateway.driver.endpoints.values():
            endpoint.up = True
            gateway.driver.feed(InstanceUp(spec=endpoint.spec, generation=1))
            rates = Rates(prefill_tokens_per_s=50_000.0, decode_tokens_per_s=2_000.0)
            gateway.driver.feed(ProfileUpdated(instance=endpoint.name, rates=rates))
            pool = endpoint.open()
            for _ in range(CLIENTS):
                engine = ClientConnection(pool)
                engine.connection_made(Wire(engine, self.asked))
                pool.give_back(engine)
        for _ in range(CLIENTS):
            client = ServerConnection(gateway.server)
            client.connection_made(Wire(client, self.answered))
            client.data_received(self.request)

    def run(self, requests: int) -> None:
        """Answers `requests` requests, BURST at a time, as one look at ready sockets would find them."""
        answered, asked, request, reply = self.answered, self.asked, self.request, self.reply
        for _ in range(requests // BURST):
            self.loop_pass.end()
            while len(answered) < BURST:
                if not asked:  # all is held by the router: only time helps
                    time.sleep(0.001)
                    self.driver.feed(Tick())
                    self.loop_pass.end()
                    continue
                for _ in range(min(len(asked), BURST)):
                    wire = asked.popleft()
                    wire.sent.clear()
                    for read in reply:
                        wire.connection.data_received(read)
                self.loop_pass.end()
            for _ in range(BURST):
                wire = answered.popleft()
                text = b"".join(wire.sent)
                if not text.startswith(b"HTTP/1.1 200") or text.count(b"HTTP/1.1") != 1 or not text.endswith(END):
                    raise SystemExit(f"a client got {text[:200]!r}")
                wire.sent.clear()
                wire.connection.data_received(request)


async def measure(policy: str, frames: int, requests: int, profile: bool) -> list[float]:
    """Microseconds per request, one value per block."""
    with tempfile.TemporaryDirectory(prefix="wb-path-") as data_dir:
        gateway = make_gateway(policy, data_dir)
        gateway.writer = gateway.driver.writer = gateway._open_log(Path(data_dir))
        bench = Bench(gateway, frames)
        bench.run(2_000)
        tune_collector()
        values = []
        profiler = cProfile.Profile() if profile else None
        for _ in range(10):
            if profiler:
                profiler.enable()
            start = time.process_time_ns()
            bench.run(requests)
            gateway.writer.sync()
            values.append((time.process_time_ns() - start) / 1e3 / requests)
            if profiler:
                profiler.disable()
            await asyncio.sleep(0)
        if len(gateway.driver.flights) != gateway.driver.router.live_requests:
            raise SystemExit("requests were lost")
        if profiler:
            pstats.Stats(profiler).sort_stats("tottime").print_stats(60)
    return values


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policy", action="append")
    parser.add_argument("--chunks", action="store_true", help="streams: microseconds per chunk of one frame")
    parser.add_argument("--requests", type=int, default=1600, help="requests per value")
    parser.add_argument("--profile", action="store_true")
    given = parser.parse_args()
    for policy in given.policy or ["round_robin", "least_tokens", "calibrated"]:
        if given.chunks:
            few, many = (asyncio.run(measure(policy, n, given.requests // 8, given.profile)) for n in (4, 68))
            each = (statistics.median(many) - statistics.median(few)) / 64
            print(f"{policy}: {statistics.median(few):.1f} us a stream of 4 chunks, {each:.2f} us for each further one")
            continue
        values = asyncio.run(measure(policy, 0, given.requests, given.profile))
        median = statistics.median(values)
        print(f"{policy}: {median:.1f} us a request (least {min(values):.1f}, most {max(values):.1f})")


if __name__ == "__main__":
    main()
