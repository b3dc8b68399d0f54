"""Counters of the data plane: bounded labels, gaps between tokens, how long requests waited and for what."""

import asyncio

from tests.support.gateway import DONE, ROLE, chat, frame, front
from tests.support.loop import run, until
from tests.support.upstream import Call, FakeUpstream
from weighbridge.core.instance import Limits
from weighbridge.gateway.stats import MAX_LABELS, Histogram, Stats
from weighbridge.routing.router import RouterSettings


def test_no_number_of_models_makes_more_than_so_many_series() -> None:
    stats, many = Stats(), MAX_LABELS + 500
    for n in range(many):
        for _ in range(2):
            stats.requests.add(("chat", f"m{n}", "i", "ok"))
            kept = stats.finished(f"m{n}", "i")
            kept.duration.observe(1.0)
            kept.ttft.observe(0.1)
    assert len(stats.requests.values) == MAX_LABELS + 1
    assert stats.requests.get(("other",) * 4) == 2 * 500
    assert len(stats.duration.values) == len(stats.ttft.values) == MAX_LABELS + 1
    other = stats.duration.values[("other",)]
    assert isinstance(other, Histogram)
    assert sum(other.counts) == 2 * 500, "none is lost"
    assert len(stats._finished) <= MAX_LABELS
    for metric in stats.collect():
        assert len({tuple(sorted(s.labels.items())) for s in metric.samples if "le" not in s.labels}) <= MAX_LABELS + 1


def test_tokens_of_one_read_are_no_time_apart() -> None:
    gaps = Histogram((0.001, 0.1, 1.0))
    gaps.observe_gap(0.05, 1)
    gaps.observe_gap(0.5, 4)
    assert gaps.counts == [3, 1, 1, 0]
    assert gaps.sum == 0.55


def series(text: str, name: str) -> dict[str, float]:
    lines = (line.rpartition(" ") for line in text.splitlines() if line.startswith(name + "{"))
    return {labels.removeprefix(name): float(value) for labels, _, value in lines}


def test_gaps_between_tokens_are_those_of_the_engine() -> None:
    async def script(call: Call) -> None:
        await call.sse_head()
        for data in (ROLE, frame("a")):
            await call.chunk(data)
        for text in "bc":
            await asyncio.sleep(0.06)
            await call.chunk(frame(text))
        await asyncio.sleep(0.06)
        await call.chunk(frame("d") + frame("e") + frame(finish="stop") + DONE)
        await call.last_chunk()

    async def main() -> str:
        async with FakeUpstream(script) as one, front(one) as f:
            await f.post(chat())
            return str((await f.get("/metrics", admin=True)).body.decode())

    text = run(main())
    name, labels = "weighbridge_request_streaming_itl_seconds", '{instance="i0",model="m"}'
    assert series(text, name + "_count") == {labels: 5.0}
    buckets = series(text, name + "_bucket")
    assert buckets['{instance="i0",le="0.05",model="m"}'] == 2.0
    assert buckets['{instance="i0",le="1.0",model="m"}'] == 5.0
    assert 0.17 < series(text, name + "_sum")[labels] < 1.0


def test_waiting_is_counted_by_tier_and_by_what_it_ended_in() -> None:
    async def main() -> str:
        gate = asyncio.Event()

        async def script(call: Call) -> None:
            await gate.wait()
            await call.reply(200, b"{}")

        async with FakeUpstream(script) as one:
            fields = {"limits": Limits(max_context=4096, max_sequences=1)}
            router = RouterSettings(policy="least_tokens", dispatch="hold", max_held_s=1.0)
            async with front(one, instance_fields=fields, router=router) as f:
                jobs = [
                    asyncio.create_task(f.post(chat(False), x_weighbridge_tier=tier))
                    for tier in ("standard", "batch", "interactive", "batch")
                ]
                await until(lambda: f.gateway.driver.router.held_requests == 3)
                jobs.pop().cancel()
                await until(lambda: f.gateway.driver.router.held_requests == 2)
                await until(lambda: jobs[1].done() and jobs[2].done(), 10.0)
                gate.set()
                assert [reply.status for reply in await asyncio.gather(*jobs)] == [200, 429, 429]
                return str((await f.get("/metrics", admin=True)).body.decode())

    counts = series(run(main()), "weighbridge_queue_duration_seconds_count")
    assert counts == {
        '{outcome="dispatched",tier="standard"}': 1.0,
        '{outcome="cancelled",tier="batch"}': 1.0,
        '{outcome="rejected",tier="batch"}': 1.0,
        '{outcome="rejected",tier="interactive"}': 1.0,
    }
