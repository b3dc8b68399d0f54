"""The dashboard's numbers beside a real gateway: equal to its `/metrics`, its `/decisions` and its event log."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

from tests.support.gateway import answer, chat, front
from tests.support.loop import run
from tests.support.upstream import Call, FakeUpstream
from weighbridge.core.event_log import LogReader
from weighbridge.core.metrics import summarise
from weighbridge.dashboard.live import AdminSource
from weighbridge.dashboard.observer import Observer

REQUESTS = 14


def counted(metrics: str, name: str, **labels: str) -> float:
    """Sum of a metric's samples that carry these labels."""
    total = 0.0
    for line in metrics.splitlines():
        match = re.fullmatch(rf"{name}(?:\{{(.*)\}})? (\S+)", line)
        if match and all(f'{k}="{v}"' in (match.group(1) or "") for k, v in labels.items()):
            total += float(match.group(2))
    return total


def test_the_numbers_are_those_of_the_metrics_and_the_log(tmp_path: Path) -> None:
    async def refuse(call: Call) -> None:
        await call.reply(400, b'{"error":{"message":"no","type":"invalid_request_error"}}')

    async def work() -> None:
        async with (
            FakeUpstream(answer) as first,
            FakeUpstream(answer) as second,
            front(first, second, data_dir=str(tmp_path / "events")) as gateway,
        ):
            bodies = [chat(stream=bool(k % 2)) for k in range(REQUESTS)]
            replies = await asyncio.gather(*(gateway.post(body) for body in bodies))
            assert [r.status for r in replies] == [200] * REQUESTS
            first.script = second.script = refuse
            refused = await gateway.post(chat())
            assert refused.status == 400
            writer = gateway.gateway.writer
            assert writer is not None and writer.sync()
            source = AdminSource(f"http://127.0.0.1:{gateway.gateway.admin_port}", window_s=None)
            snapshot = await source.poll()
            await source.close()
            metrics = (await gateway.get("/metrics", admin=True)).body.decode()
            rows = (await gateway.get("/decisions?last=100", admin=True)).json()["decisions"]
            log = writer.path
        total = "weighbridge_requests_total"
        assert snapshot.error == "" and snapshot.note == ""
        assert sum(t.offered for t in snapshot.tiers) == counted(metrics, total) == REQUESTS + 1
        assert sum(t.failed for t in snapshot.tiers) == REQUESTS + 1 - counted(metrics, total, outcome="ok") == 1
        placed = {d.id: d.chosen for d in snapshot.decisions}
        assert placed == {row["request_id"]: row["chosen"] for row in rows}
        for name in ("i0", "i1"):
            here = sum(chosen == name for chosen in placed.values())
            assert here == counted(metrics, total, instance=name) > 0
            view = snapshot.instance(name)
            assert view is not None
            assert view.running + view.waiting == counted(metrics, "weighbridge_instance_in_flight", instance=name) == 0
        served = sum(t.served_tokens for tier in snapshot.tiers for t in tier.tenants)
        tokens = counted(metrics, "weighbridge_request_output_tokens_sum")
        assert served >= tokens == 3 * REQUESTS
        observer = Observer(window_s=None)
        with log.open("rb") as stream:
            reader = LogReader(stream)
            observer.begin(reader.header)
            for entry in reader:
                observer.feed(entry)
        assert summarise(observer.records(), observer.tiers).attainment == snapshot.attainment

    run(work())
