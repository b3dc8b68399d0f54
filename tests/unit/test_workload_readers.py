"""Trace readers: every format, every way a row can be bad, and the description of what was read."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from weighbridge.core.errors import TraceError
from weighbridge.workload.describe import describe
from weighbridge.workload.readers import read_trace
from weighbridge.workload.trace import TraceRequest, at_rate, write_trace

SHARED = Path(__file__).resolve().parents[2].parent / "shared" / "traces"
needs_traces = pytest.mark.skipif(not SHARED.exists(), reason="public traces are not beside the checkout")


def written(tmp_path: Path, name: str, text: str) -> Path:
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    return path


AZURE = (
    "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:04.0319600,3180,8\n2023-11-16 18:17:03.9799600,4808,10\n"
)


def test_azure_is_sorted_and_keeps_its_100_ns(tmp_path: Path) -> None:
    read = read_trace(written(tmp_path, "a.csv", AZURE))
    assert read.format == "azure"
    assert [(r.arrival_s, r.prompt_tokens, r.output_tokens) for r in read.requests] == [
        (0.0, 4808, 10),
        (pytest.approx(0.052, abs=1e-6), 3180, 8),
    ]


def test_gzip_is_recognised_by_content(tmp_path: Path) -> None:
    path = tmp_path / "plain-name"
    path.write_bytes(gzip.compress(AZURE.encode()))
    assert len(read_trace(path).requests) == 2


MOONCAKE = "".join(
    f'{{"timestamp": {1000 * t}, "input_length": 1030, "output_length": 5, "hash_ids": [0, {k}]}}\n'
    for k, t in enumerate([0, 0, 0, 3, 3, 9, 9], 1)
)


def test_mooncake_times_are_spread_over_their_grid(tmp_path: Path) -> None:
    path = written(tmp_path, "m.jsonl", MOONCAKE)
    read = read_trace(path, seed=1)
    times = [r.arrival_s for r in read.requests]
    assert read.quantum_s == 3.0
    assert times == sorted(times)
    assert len(set(times)) == 7
    assert [int(t // 3) for t in times] == [0, 0, 0, 1, 1, 3, 3]
    # The order of rows within one stamp is kept, and the seed alone decides.
    assert [r.blocks[1] for r in read.requests] == [1, 2, 3, 4, 5, 6, 7]
    assert read_trace(path, seed=1).requests == read.requests
    assert read_trace(path, seed=2).requests != read.requests
    raw = read_trace(path, raw_times=True)
    assert [r.arrival_s for r in raw.requests] == [0, 0, 0, 3, 3, 9, 9]
    assert raw.requests[0].block_tokens == 512


def test_bailian_turns_become_sessions(tmp_path: Path) -> None:
    rows = [(1, -1, 0.5), (2, -1, 0.7), (3, 1, 4.2), (4, 3, 9.0)]
    text = "".join(
        f'{{"chat_id": {c}, "parent_chat_id": {p}, "timestamp": {t}, "input_length": 20, "output_length": 3, '
        f'"type": "text", "turn": 1, "hash_ids": [{c}]}}\n'
        for c, p, t in rows
    )
    read = read_trace(written(tmp_path, "b.jsonl", text))
    assert read.format == "bailian"
    assert [r.session for r in read.requests] == ["1", "2", "1", "1"]
    assert read.requests[0].block_tokens == 16


def test_burstgpt_zero_response_is_a_failure(tmp_path: Path) -> None:
    text = (
        "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
        "5,a,1.2,ChatGPT,472,18,490,Conversation log\n"
        "45.5,b,0,GPT-4,1087,0,1087,API log\n"
    )
    read = read_trace(written(tmp_path, "burst.csv", text))
    assert [r.failed for r in read.requests] == [False, True]
    assert read.requests[1].kind == "API log"
    assert describe(read.requests)["failed"] == 1


def test_vidur(tmp_path: Path) -> None:
    text = "arrived_at,num_prefill_tokens,num_decode_tokens\n0.1,374,44\n0.4,396,109\n"
    read = read_trace(written(tmp_path, "v.csv", text))
    assert (read.format, read.requests[1].prompt_tokens) == ("vidur", 396)


def test_own_form_round_trips(tmp_path: Path) -> None:
    requests = [
        TraceRequest(0.0, 30, 4, kind="chat", tier="interactive", tenant="t", blocks=(5, 6), block_tokens=16),
        TraceRequest(1.25, 7, 1, session="s"),
    ]
    path = tmp_path / "own.jsonl.gz"
    assert write_trace(path, requests) == 2
    assert read_trace(path).requests == requests


OWN = '{"arrival_s": 0, "prompt_tokens": 1, "output_tokens": 1}\n'
BAD_ROWS = [
    ("a.csv", AZURE, "2023-11-16 18:17:05,many,8", "line 4, column ContextTokens"),
    ("a.csv", AZURE, "2023-11-16 18:17:05,0,8", "line 4, column ContextTokens"),
    ("a.csv", AZURE, "2023-11-16 18:17:05,4", "line 4, column GeneratedTokens: is missing"),
    ("a.csv", AZURE, "yesterday,4,8", "line 4, column TIMESTAMP"),
    ("a.csv", AZURE, "2023-11-16 18:17:05,4,8,9", "line 4, column row"),
    ("m.jsonl", MOONCAKE, "nonsense", "line 8, column row"),
    ("m.jsonl", MOONCAKE, "[1]", "line 8, column row"),
    (
        "m.jsonl",
        MOONCAKE,
        '{"timestamp": 9000, "input_length": 1, "output_length": 1, "hash_ids": "x"}',
        "column hash_ids",
    ),
    ("m.jsonl", MOONCAKE, '{"timestamp": 9000, "input_length": 1.5, "output_length": 1}', "column input_length"),
    ("o.jsonl", OWN, OWN.replace('"prompt_tokens": 1', '"prompt_tokens": "x"'), "line 2, column prompt_tokens"),
    ("o.jsonl", OWN, OWN.replace('"output_tokens": 1', '"output_tokens": 0'), "line 2, column output_tokens"),
    ("o.jsonl", OWN, OWN.replace('"output_tokens": 1', '"output_token": 1'), "line 2, column"),
]


@pytest.mark.parametrize(("name", "good", "row", "where"), BAD_ROWS)
def test_a_bad_row_is_named_and_can_be_skipped(tmp_path: Path, name: str, good: str, row: str, where: str) -> None:
    path = written(tmp_path, name, good + row.strip() + "\n")
    with pytest.raises(TraceError, match=where) as error:
        read_trace(path)
    assert str(path) in str(error.value)
    read = read_trace(path, skip_bad=True)
    assert read.skipped == 1
    assert len(read.requests) == len(good.splitlines()) - name.endswith("csv")


def test_a_file_of_no_known_format_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="no known trace format"):
        read_trace(written(tmp_path, "x.csv", "a,b\n1,2\n"))
    with pytest.raises(TraceError, match="no request"):
        read_trace(written(tmp_path, "y.csv", AZURE.splitlines()[0] + "\n"))
    with pytest.raises(TraceError, match="cannot read trace"):
        read_trace(tmp_path / "absent.csv")
    binary = tmp_path / "z.csv"
    binary.write_bytes(bytes(range(128, 256)))
    with pytest.raises(TraceError, match="not a text file"):
        read_trace(binary)


def test_at_rate_keeps_order_and_sets_the_rate() -> None:
    stretched = at_rate([TraceRequest(float(t), 1, 1) for t in (5, 6, 25)], rate=3.0)
    assert [r.arrival_s for r in stretched] == pytest.approx([0.0, 0.05, 1.0])


def test_prefix_reuse_counts_leading_blocks_only() -> None:
    requests = [
        TraceRequest(0.0, 48, 1, blocks=(1, 2, 3), block_tokens=16),
        TraceRequest(1.0, 48, 1, blocks=(1, 2, 9), block_tokens=16),
        TraceRequest(2.0, 48, 1, blocks=(8, 2, 3), block_tokens=16),
    ]
    reuse = describe(requests, cache_tokens=(16,))["prefix"]
    assert reuse["unlimited"] == pytest.approx(2 / 9)
    assert reuse["by_cache_tokens"] == {"16": 0.0}


@needs_traces
def test_the_public_traces_read_as_published() -> None:
    code = describe(read_trace(SHARED / "azure_code.2023.csv.gz").requests)
    assert code["requests"] == 8_819
    assert code["rate"] == pytest.approx(2.57, abs=0.01)
    assert code["interarrival_cv"] == pytest.approx(13.2, abs=0.1)
    assert code["prompt_tokens"]["mean"] == pytest.approx(2_048, abs=1)
    assert code["output_tokens"]["p50"] == 13
    mooncake = read_trace(SHARED / "mooncake_conversation.jsonl.gz")
    figures = describe(mooncake.requests, cache_tokens=(500_000,))
    assert mooncake.quantum_s == 3.0
    assert figures["requests"] == 12_031
    assert figures["prefix"]["unlimited"] == pytest.approx(0.366, abs=0.002)
    assert figures["prefix"]["by_cache_tokens"]["500000"] == pytest.approx(0.044, abs=0.004)
