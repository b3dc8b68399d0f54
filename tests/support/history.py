"""Seeded histories: clients with expected texts, scripted engines that misbehave, and a checker of what came out.

Each request carries a word that is its own; the engine answers with a text made of that word. Whatever happens on the
way, a client's text must be a prefix of its own expected text, and whole exactly when it ended in success.
"""

import asyncio
import json
import random
import time
from typing import Any

import msgspec

from tests.support.gateway import MODEL, Front, front, instance
from tests.support.history_tiers import Caller, Urgency
from tests.support.loop import until
from tests.support.priority import Record, check_priority
from tests.support.upstream import Call, FakeUpstream
from weighbridge.core.errors import ConfigError, ServiceError
from weighbridge.gateway import Gateway
from weighbridge.gateway.settings import HealthSettings
from weighbridge.http import ClientLimits, ExchangeFailed, SseParser
from weighbridge.routing.router import RouterSettings

POLICIES = ("least_tokens", "round_robin", "least_requests", "work", "power_of_two", "calibrated")
FATES = ("ok", "ok", "ok", "ok", "reset_before", "eof_before", "500", "503", "429", "400", "head_then_eof", "reset_mid")
MORE_FATES = ("eof_mid", "half_frame", "bad_chunk", "slow", "error_frame", "no_done", "wrong_length", "stall")
STOPS = ("half_close", "stops", "stops_for_good")


def expected(word: str, tokens: int) -> list[str]:
    return [f"{word}.{n} " for n in range(tokens)]


class Engine:
    """A scripted engine: what it does with each call is drawn from its seed."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.executions: dict[str, int] = {}
        self.arrived: list[tuple[float, str]] = []
        """(time, request id) of every request that came here."""
        self.failing = False

    async def __call__(self, call: Call) -> None:
        self.arrived.append((time.monotonic(), call.headers["x-request-id"]))
        body = json.loads(call.body)
        word = body["messages"][0]["content"]
        self.executions[word] = self.executions.get(word, 0) + 1
        fate = "503" if self.failing else self.rng.choice(FATES + MORE_FATES + STOPS)
        try:
            await self.answer(call, body, word, fate)
        except ConnectionError:
            call.keep_alive = False

    async def answer(self, call: Call, body: dict[str, Any], word: str, fate: str) -> None:
        tokens = expected(word, body["max_tokens"])
        await asyncio.sleep(self.rng.random() * 0.004)
        if fate == "reset_before":
            call.reset()
        elif fate == "eof_before":
            call.close()
        elif fate in ("500", "503", "429", "400"):
            await call.reply(int(fate), b'{"error":{"message":"no","type":"t","param":null,"code":null}}')
        elif fate == "stall":
            try:
                await call.wait_closed(0.2)
            except TimeoutError:
                call.reset()
        elif body["stream"]:
            await self.stream(call, tokens, fate, body)
        else:
            await self.whole(call, tokens, fate)

    async def stop(self, call: Call, fate: str) -> None:
        """Says nothing more: with a half-closed connection, or as a process that is stopped, until it is killed."""
        if fate == "half_close":
            await call.half_close()
            return
        try:
            await call.wait_closed(0.2)
        except TimeoutError:
            call.reset()

    async def whole(self, call: Call, tokens: list[str], fate: str) -> None:
        usage = {"prompt_tokens": 5, "completion_tokens": len(tokens), "total_tokens": 5 + len(tokens)}
        choice = {"index": 0, "message": {"role": "assistant", "content": "".join(tokens)}, "finish_reason": "stop"}
        data = json.dumps({"choices": [choice], "usage": usage}).encode()
        if fate in ("reset_mid", "eof_mid", "half_frame", "wrong_length", "head_then_eof", *STOPS):
            await call.write(
                b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(data)
            )
            if fate != "head_then_eof":
                await call.write(data[: len(data) // 2])
            if fate == "stops":
                await asyncio.sleep(0.05)
                await call.write(data[len(data) // 2 :])
            elif fate in STOPS:
                await self.stop(call, fate)
            else:
                call.reset() if fate == "reset_mid" else call.close()
        elif fate == "bad_chunk":
            await call.write(b'HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n5\r\n{"cho\r\nzz\r\n')
            call.close()
        else:
            await call.reply(200, data)

    async def stream(self, call: Call, tokens: list[str], fate: str, body: dict[str, Any]) -> None:
        await call.sse_head()
        if fate == "head_then_eof":
            call.close()
            return
        stop = self.rng.randrange(len(tokens) + 1) if fate not in ("ok", "slow", "no_done", "stops") else len(tokens)
        for token in tokens[:stop]:
            choice = {"index": 0, "delta": {"content": token}, "finish_reason": None}
            data = b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n"
            if fate == "slow":
                wire = b"%x\r\n%b\r\n" % (len(data), data)
                await call.pieces(wire, 40)
            else:
                await call.chunk(data)
            if self.rng.random() < 0.3:
                await asyncio.sleep(self.rng.random() * (0.05 if fate == "stops" else 0.002))
        if fate == "reset_mid":
            call.reset()
        elif fate in ("half_close", "stops_for_good"):
            await self.stop(call, fate)
        elif fate in ("eof_mid", "wrong_length"):
            call.close()
        elif fate == "half_frame":
            await call.chunk(b'data: {"choices":[{"delta":{"content":"NEVER')
            call.close()
        elif fate == "bad_chunk":
            await call.write(b"xyz\r\nFOREIGN\r\n")
            call.close()
        elif fate == "error_frame":
            await call.chunk(b'data: {"error":{"message":"boom","type":"server_error","param":null,"code":null}}\n\n')
            await call.last_chunk()
        else:
            finish = b'data: {"choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}\n\n'
            usage = b'data: {"choices":[],"usage":{"prompt_tokens":5,"completion_tokens":%d}}\n\n' % len(tokens)
            asked = (body.get("stream_options") or {}).get("include_usage")
            await call.chunk(finish + (usage if asked else b"") + (b"" if fate == "no_done" else b"data: [DONE]\n\n"))
            await call.last_chunk()


class Outcome:
    """What one client saw."""

    def __init__(self, word: str, tokens: int, stream: bool, caller: Caller | None = None) -> None:
        self.caller = caller or Caller("standard", MODEL, ())
        self.word = word
        self.tokens = tokens
        self.stream = stream
        self.text = ""
        self.limit_s = 30.0
        """How patient its client is."""
        self.end = "open"  # ok, error_frame, status_N, cut, cancelled
        self.ends = 0

    def finish(self, end: str) -> None:
        self.end = end
        self.ends += 1


async def client(f: Any, outcome: Outcome, limit_s: float, delay_s: float) -> None:
    """One request to whatever has a `url` and a `client`, perhaps given up midway."""
    await asyncio.sleep(delay_s)
    message = {"role": "user", "content": outcome.word}
    caller = outcome.caller
    body = {"model": caller.model, "messages": [message], "max_tokens": outcome.tokens, "stream": outcome.stream}
    try:
        async with asyncio.timeout(limit_s):
            url = f.url + "/v1/chat/completions"
            async with f.client.stream("POST", url, body=json.dumps(body).encode(), headers=caller.headers) as reply:
                await read(reply, outcome)
    except TimeoutError:
        outcome.finish("cancelled")
    except ExchangeFailed:
        outcome.finish("cut")


async def read(reply: Any, outcome: Outcome) -> None:
    if not any(name == b"x-request-id" for name, _ in reply.headers):
        # no gateway's answer: it restarts, and of many histories at once another one's server has been given its port
        outcome.finish("cut")
        return
    if reply.status != 200:
        value = json.loads(await reply.read())
        assert value["error"]["message"], outcome.word
        outcome.finish(f"status_{reply.status}")
        return
    if not outcome.stream:
        value = json.loads(await reply.read())
        outcome.text = value["choices"][0]["message"]["content"]
        outcome.finish("ok")
        return
    parser = SseParser()
    finished = failed = False
    async for data in reply:
        for event in parser.feed(data):
            assert not failed, f"{outcome.word}: bytes after the error frame"
            if event.data == "[DONE]":
                continue
            frame = json.loads(event.data)
            if "error" in frame:
                failed = True
                continue
            assert frame.get("usage") is None, "a usage frame that was not asked for"
            outcome.text += frame["choices"][0]["delta"].get("content") or ""
            finished = finished or frame["choices"][0].get("finish_reason") == "stop"
    assert finished != failed, f"{outcome.word}: a stream ends with success or with an error, and says which"
    outcome.finish("error_frame" if failed else "ok")


def check(outcomes: list[Outcome], engines: list[Engine], attempts: int) -> None:
    """Every rule that must hold whatever happened."""
    for outcome in outcomes:
        whole = "".join(expected(outcome.word, outcome.tokens))
        assert outcome.ends == 1, f"{outcome.word} ended {outcome.ends} times"
        assert outcome.end not in ("status_404", "status_500"), f"{outcome.word} got {outcome.end}"
        assert whole.startswith(outcome.text), f"{outcome.word} got foreign or repeated text: {outcome.text!r}"
        if outcome.end == "ok":
            assert outcome.text == whole, f"{outcome.word} succeeded with half a text"
        runs = sum(engine.executions.get(outcome.word, 0) for engine in engines)
        assert runs <= attempts, f"{outcome.word} ran {runs} times"


async def history(seed: int, requests: int = 14) -> dict[str, int]:
    """One seeded history, checked; how often each end was seen, and `contests` and the like of `check_priority`."""
    rng = random.Random(seed)
    engines = [Engine(random.Random(rng.random())) for _ in range(rng.choice((1, 2, 3)))]
    upstreams = [FakeUpstream(engine) for engine in engines]
    health = HealthSettings(interval_s=0.05, timeout_s=1.0, eject_s=0.05, eject_max_s=0.1)
    urgency = Urgency(seed, MODEL)
    router = urgency.router(
        RouterSettings(policy=rng.choice(POLICIES), seed=seed, dispatch=rng.choice(("auto", "hold", "immediate")))
    )
    records: list[Record] = []
    for upstream in upstreams:
        await upstream.__aenter__()
    try:
        instances = tuple(instance(u, f"i{n}", **urgency.instance_fields(n)) for n, u in enumerate(upstreams))
        settings = {"instances": instances, "health": health, "router": router, "keys": urgency.keys()}
        async with front(before_start=lambda gateway: records.append(Record(gateway)), **settings) as f:
            outcomes = [
                Outcome(word, rng.randrange(1, 12), rng.random() < 0.7, urgency.caller(word))
                for word in (f"w{seed}-{n}" for n in range(requests))
            ]
            jobs = []
            for outcome in outcomes:
                limit_s = rng.random() * 0.03 if rng.random() < 0.25 else 30.0
                jobs.append(asyncio.create_task(client(f, outcome, limit_s, rng.random() * 0.03)))
            troubles = rng.sample(TROUBLES, 2) if rng.random() < 0.5 else []
            jobs += [asyncio.create_task(TROUBLE[trouble](f, rng, upstreams)) for trouble in troubles]
            await asyncio.gather(*jobs)
            await until(lambda: not f.gateway.driver.flights, 30.0)
            f.assert_idle()
            # a stale connection may be replaced once per attempt, before one byte of reply
            # and a restarted gateway may be asked again by a client whose connection had gone stale
            lives = 1 + troubles.count("restart")
            check(outcomes, engines, 2 * router.max_attempts * lives)
            arrivals = [(u.url, *each) for u, e in zip(upstreams, engines, strict=True) for each in e.arrived]
            judged = check_priority(records, arrivals, {o.word: o.caller.tier for o in outcomes})
    finally:
        for record in records:
            record.close()
        for upstream in upstreams:
            await upstream.__aexit__()
    ends: dict[str, int] = judged
    for outcome in outcomes:
        ends[outcome.end] = ends.get(outcome.end, 0) + 1
    return ends


async def drain(f: Front, rng: random.Random, upstreams: list[FakeUpstream]) -> None:
    """Takes an engine out and back while requests run."""
    await asyncio.sleep(rng.random() * 0.03)
    endpoint = f.gateway.driver.endpoints.get(f"i{rng.randrange(len(upstreams))}")
    if endpoint is not None:
        f.gateway.health.drain(endpoint)
        await asyncio.sleep(rng.random() * 0.02)
        f.gateway.health.undrain(endpoint)


async def burst(f: Front, rng: random.Random, upstreams: list[FakeUpstream]) -> None:
    """Every engine answers 503 for a while."""
    await asyncio.sleep(rng.random() * 0.02)
    engines = [u.script for u in upstreams if isinstance(u.script, Engine)]
    for engine in engines:
        engine.failing = True
    await asyncio.sleep(rng.random() * 0.03)
    for engine in engines:
        engine.failing = False


async def kill(f: Front, rng: random.Random, upstreams: list[FakeUpstream]) -> None:
    """Kills an engine and brings it back, unless its port has been given away for good."""
    await asyncio.sleep(rng.random() * 0.03)
    upstream = upstreams[rng.randrange(len(upstreams))]
    await upstream.__aexit__()
    await asyncio.sleep(rng.random() * 0.05)
    for _ in range(500):
        try:
            await upstream.__aenter__()
            return
        except OSError:  # of many histories at once another has been given the port meanwhile, and ends soon
            await asyncio.sleep(0.02)


async def reload(f: Front, rng: random.Random, upstreams: list[FakeUpstream]) -> None:
    """Replaces an engine by itself with other limits, and adds one; a bad configuration in between changes nothing."""
    await asyncio.sleep(rng.random() * 0.03)
    gateway = f.gateway
    if gateway.draining:
        return
    old = gateway.settings
    number = rng.randrange(len(upstreams))
    limits = ClientLimits(idle_s=3.0 + rng.random())
    rows = [msgspec.structs.replace(i, client=limits) if i.name == f"i{number}" else i for i in old.instances]
    try:
        await gateway.reload(msgspec.structs.replace(old, instances=(*rows, rows[0])))
        raise AssertionError("two of one name were accepted")
    except ConfigError:
        assert gateway.settings is old
    rows.append(msgspec.structs.replace(rows[number], name="more"))
    await gateway.reload(msgspec.structs.replace(old, instances=tuple(rows)))


async def restart(f: Front, rng: random.Random, upstreams: list[FakeUpstream]) -> None:
    """Another gateway takes the place, and the port, of one that drains for a moment and then cuts what is left."""
    await asyncio.sleep(rng.random() * 0.03)
    old = f.gateway
    settings = msgspec.structs.replace(old.settings, port=old.port)
    await old.drain(rng.random() * 0.02)
    await old.stop()
    assert old.driver.flights == {}, "a stopped gateway has ended every request"
    assert old.driver.router.live_requests == 0
    assert not old.server.connections
    f.gateway = Gateway(settings)
    f.before_start(f.gateway)
    try:
        await f.gateway.start()
    except ServiceError:  # of many histories at once another may have been given the port in between
        f.gateway = Gateway(msgspec.structs.replace(settings, port=0))
        f.before_start(f.gateway)
        await f.gateway.start()


TROUBLE = {"burst": burst, "drain": drain, "kill": kill, "reload": reload, "restart": restart}
TROUBLES = tuple(TROUBLE)
