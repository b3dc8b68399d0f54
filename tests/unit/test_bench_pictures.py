"""Pictures and pages are well-formed, self-contained and show what they are given."""

from __future__ import annotations

import math
import re
from xml.etree import ElementTree

from weighbridge.bench.charts import Series, bars, cdf_points, lines, ticks
from weighbridge.bench.html import View, page
from weighbridge.bench.load import LoadResult
from weighbridge.bench.record import BenchRecord
from weighbridge.bench.report import build_report
from weighbridge.bench.verdict import judge
from weighbridge.bench.watch import gauges


def test_ticks_are_round_and_inside() -> None:
    assert ticks(0.0, 1.0) == [0.0, 0.2, 0.4, 0.6000000000000001, 0.8, 1.0]
    assert ticks(3.0, 3.0) == [3.0]
    for low, high in ((0.0, 7.3), (0.05, 0.061), (1e3, 1e6)):
        found = ticks(low, high)
        assert 3 <= len(found) <= 8
        assert low - 1e-9 <= found[0] <= found[-1] <= high * (1 + 1e-9)


def test_a_cdf_counts_what_never_came() -> None:
    points = cdf_points([0.3, 0.1, math.inf, 0.2])
    assert points == [(0.1, 0.25), (0.2, 0.5), (0.3, 0.75)]
    assert len(cdf_points(list(range(10_000)))) <= 240


def test_pictures_are_xml_and_escape_names() -> None:
    series = [Series("a<b", [(0.1, 1.0), (10.0, 2.0)], dots=True), Series("", [(1.0, math.nan)])]
    for picture in (
        lines("x & y", "s", "n", series, log_x=True, marks=[(1.0, "<now>")], level=(1.5, "level")),
        lines("narrow", "s", "n", [Series("", [(0.1, 1.0), (0.11, 2.0)])], log_x=True),
        lines("nothing", "s", "n", []),
        bars("share", "share", [("i<0>", 0.25), ("i1", 0.75)], percent=True),
        bars("none", "share", []),
    ):
        ElementTree.fromstring(picture)


def records() -> list[BenchRecord]:
    out = [
        BenchRecord(
            id=f"r{k}", scheduled_s=0.1 * k, status="ok", output_tokens=5, sent_s=0.1 * k, first_token_s=0.1 * k + 0.05,
            last_token_s=0.1 * k + 0.25, ended_s=0.1 * k + 0.25, instance=f"i{k % 2}", frames=5,
        )
        for k in range(20)
    ]  # fmt: skip
    out.append(BenchRecord(id="bad", scheduled_s=2.0, status="failed", error="HTTP 500: <script>alert(1)</script>"))
    return out


def test_a_page_is_self_contained_and_escapes_what_servers_say() -> None:
    from array import array

    rows = records()
    result = LoadResult(rows, array("d", [0.05] * 80), array("d", [0.001] * 30), array("l", [2] * 220), 2.5, 0.1)
    report = build_report(result, judge(result, 21), {}, {"settings": {}})
    text = page("One run", [View("run", report, rows, result.running, {"kv_usage": [(0.0, 0.1), (1.0, 0.4)]})])
    assert "<script" not in text
    assert "&lt;script&gt;" in text
    assert not re.search(r"(src|href)=", text)
    assert "Share of requests by instance" in text
    assert "kv_usage" in text
    assert "never" in text  # p99 of all offered
    both = page("Two runs", [View("a", report, rows), View("b", report, rows)])
    assert "+0.0 %" in both


def test_gauges_of_a_prometheus_page() -> None:
    text = (
        "# TYPE vllm:num_requests_waiting gauge\n"
        'vllm:num_requests_waiting{model_name="m"} 3.0\n'
        "vllm:kv_cache_usage_perc 0.25 1700000000000\n"
        "vllm:prompt_tokens_total 7\n"
        "request_queue_seconds_bucket 1\n"
        "garbage line\n"
    )
    assert gauges(text) == {'vllm:num_requests_waiting{model_name="m"}': 3.0, "vllm:kv_cache_usage_perc": 0.25}
