"""KV bytes: the published vectors, every kind of attention, and sharing, rounding, devices."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from weighbridge.core.errors import ConfigError
from weighbridge.plan.kv import KvDemand, KvFormat, kv_bytes_format, kv_fit, kv_format, kv_size
from weighbridge.plan.kv_report import KvQuestion, answer
from weighbridge.plan.shape import LayerGroup, ModelShape, uniform
from weighbridge.plan.sizes import format_bytes, parse_bytes

VECTORS = Path(__file__).resolve().parents[2].parent / "shared" / "vectors" / "seed_vectors.json"


def test_the_default_question_is_the_published_example() -> None:
    found = answer(KvQuestion()).to_json()
    assert found["total_bytes"] == 4_294_967_296
    assert found["bytes_per_token"] == 131_072
    assert found["bytes_per_sequence"] == 1_073_741_824
    assert found["expression"] == "2 x 32 x 8 x 128 x 2 x 8192 x 4 = 4,294,967,296 bytes = 4.00 GiB"
    assert format_bytes(found["bytes_per_token"]) == "128.00 KiB"
    assert format_bytes(found["bytes_per_sequence"]) == "1.00 GiB"


def test_qwen_half_billion_in_float32_has_341_pages_in_128_mib() -> None:
    found = answer(
        KvQuestion(layers=24, kv_heads=2, head_dim=64, stored=kv_format("f32"), memory="128MiB", tokens=16, sequences=1)
    )
    assert found.size.bytes_per_token == 24_576
    assert found.fit is not None
    assert found.fit.blocks == 341


@pytest.mark.skipif(not VECTORS.is_file(), reason="needs ../shared/vectors/seed_vectors.json")
def test_shared_vectors() -> None:
    for case in json.loads(VECTORS.read_text())["kv"]:
        stored = kv_bytes_format(case["b"])
        shape = uniform(case["L"], case["Hkv"], case["d"])
        size = kv_size(shape, stored, KvDemand(case.get("T", 16), case.get("n", 1)))
        assert size.bytes_per_token == case["per_token"]
        if "bytes" in case:
            assert (size.total_bytes, size.bytes_per_sequence) == (case["bytes"], case["per_seq"])


def test_blocks_round_up_per_sequence() -> None:
    size = kv_size(uniform(1, 1, 1), kv_bytes_format(1), KvDemand(tokens=17, sequences=3, block_tokens=16))
    assert size.total_bytes == 2 * 17 * 3
    assert size.physical_bytes == 2 * 32 * 3


def test_a_shared_prefix_is_held_once_and_only_in_whole_blocks() -> None:
    demand = KvDemand(tokens=64, sequences=5, shared_tokens=40, block_tokens=16)
    size = kv_size(uniform(1, 1, 1), kv_bytes_format(1), demand)
    assert size.total_bytes == 2 * (5 * 64 - 4 * 40)
    # 2 of the 4 blocks are whole within the prefix: held once, the other 2 by each of the five
    assert size.physical_bytes == 2 * 16 * (2 + 5 * 2)
    assert "(5 x 64 - 4 x 40)" in size.expression
    assert any("only whole blocks" in note for note in size.notes)


def test_heads_are_split_over_devices_and_replicated_beyond_their_number() -> None:
    shape, stored = uniform(2, 4, 8), kv_bytes_format(2)
    one = kv_size(shape, stored, KvDemand(16, 1)).physical_bytes_per_device
    two = kv_size(shape, stored, KvDemand(16, 1, tensor_parallel=2))
    eight = kv_size(shape, stored, KvDemand(16, 1, tensor_parallel=8))
    assert two.physical_bytes_per_device == one // 2
    assert two.copies == 1
    # eight devices hold one head each: a quarter of the cache on every one of them, twice the bytes in all
    assert eight.physical_bytes_per_device == one // 4
    assert eight.physical_bytes == 2 * one
    assert eight.copies == 2
    with pytest.raises(ConfigError, match="--tp: 4 KV heads can be neither split nor replicated over 3 devices"):
        kv_size(shape, stored, KvDemand(16, 1, tensor_parallel=3))


def test_sliding_layers_keep_their_window_only() -> None:
    shape = ModelShape("mixed", (LayerGroup("full", 1, 1, 4, 4), LayerGroup("sliding", 5, 1, 4, 4, window=100)))
    size = kv_size(shape, kv_bytes_format(1), KvDemand(tokens=1000, sequences=2, block_tokens=10))
    assert size.bytes_per_token == 6 * 8
    assert size.bytes_per_token_tail == 8
    assert size.bytes_per_sequence == 8 * 1000 + 5 * 8 * 100
    # a window that has moved may touch one block more than it fills
    assert size.physical_bytes == 2 * (8 * 1000 + 5 * 8 * 110)
    short = kv_size(shape, kv_bytes_format(1), KvDemand(tokens=50, sequences=1, block_tokens=10))
    assert short.total_bytes == 6 * 8 * 50


def test_a_prefix_that_left_the_window_is_shared_no_more() -> None:
    shape = ModelShape("window", (LayerGroup("sliding", 1, 1, 1, 1, window=64),))
    size = kv_size(shape, kv_bytes_format(1), KvDemand(tokens=256, sequences=3, shared_tokens=128))
    assert size.total_bytes == 2 * 3 * 64


def test_latent_attention_stores_one_vector_on_every_device() -> None:
    # 61 layers of 512 + 64 elements, two bytes each: 70,272 bytes per token whatever the number of heads
    shape = ModelShape("latent", (LayerGroup("latent", 61, 1, 576, 0),))
    assert shape.kind == "MLA"
    one = kv_size(shape, kv_format("bf16"), KvDemand(1024, 1))
    assert one.bytes_per_token == 70_272
    eight = kv_size(shape, kv_format("bf16"), KvDemand(1024, 1, tensor_parallel=8))
    assert eight.physical_bytes_per_device == one.physical_bytes_per_device
    assert eight.physical_bytes == 8 * one.physical_bytes


def test_quantised_rows_count_their_blocks_and_scales() -> None:
    assert kv_format("q8_0").row_bytes(128) == 4 * 34
    assert kv_format("q4_0").row_bytes(80) == 3 * 18
    assert KvFormat("int8", 1, 1, scale_bytes=4).row_bytes(128) == 132
    assert KvFormat("int8", 1, 1, scale_bytes=2, scale_elements=32).row_bytes(128) == 136
    with pytest.raises(ConfigError, match="unknown KV format 'q9'"):
        kv_format("q9")


def test_fit_takes_off_weights_reserve_and_the_shared_prefix() -> None:
    demand = KvDemand(tokens=32, sequences=1, shared_tokens=16, block_tokens=16)
    size = kv_size(uniform(1, 1, 1), kv_bytes_format(1), demand)
    # 1000 - 100 - 68 = 832 = 26 blocks of 32 bytes; one is the prefix, each sequence needs one more
    fit = kv_fit(size, demand, 1000, weight_bytes=100, reserve_bytes=68)
    assert (fit.kv_bytes, fit.blocks, fit.tokens, fit.sequences) == (832, 26, 416, 25)
    with pytest.raises(ConfigError, match="do not even hold the weights"):
        kv_fit(size, demand, 50, weight_bytes=100)


def test_refusals_name_the_flag() -> None:
    with pytest.raises(ConfigError, match="--tokens: must be at least 1"):
        kv_size(uniform(1, 1, 1), kv_bytes_format(1), KvDemand(0, 1))
    with pytest.raises(ConfigError, match="--shared-prefix"):
        kv_size(uniform(1, 1, 1), kv_bytes_format(1), KvDemand(8, 1, shared_tokens=9))
    with pytest.raises(ConfigError, match="--layers"):
        uniform(0, 1, 1)


def test_sizes_are_read_and_written_in_binary_units() -> None:
    assert parse_bytes("24GiB", "--memory") == 24 * 2**30
    assert parse_bytes("80 GB", "--memory") == 80 * 10**9
    assert parse_bytes("1.5 GiB", "--memory") == 3 * 2**29
    assert parse_bytes("12_000", "--memory") == 12_000
    assert format_bytes(1023) == "1023 B"
    with pytest.raises(ConfigError, match="--memory: 'lots' is not a size"):
        parse_bytes("lots", "--memory")
