"""GGUF headers written by hand: shapes, big arrays, damage."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import pytest

from weighbridge.core.errors import ModelError
from weighbridge.plan.gguf import read_gguf, read_metadata
from weighbridge.plan.kv import KvDemand, kv_format, kv_size


def _text(value: str) -> bytes:
    data = value.encode()
    return struct.pack("<Q", len(data)) + data


def _value(value: Any) -> bytes:
    if isinstance(value, bool):
        return struct.pack("<I?", 7, value)
    if isinstance(value, int):
        return struct.pack("<II", 4, value)
    if isinstance(value, str):
        return struct.pack("<I", 8) + _text(value)
    if isinstance(value, list) and value and isinstance(value[0], str):
        return struct.pack("<IIQ", 9, 8, len(value)) + b"".join(_text(v) for v in value)
    if isinstance(value, list) and value and isinstance(value[0], bool):
        return struct.pack("<IIQ", 9, 7, len(value)) + bytes(value)
    assert isinstance(value, list)
    return struct.pack(f"<IIQ{len(value)}i", 9, 5, len(value), *value)


def write_gguf(path: Path, pairs: dict[str, Any], version: int = 3) -> Path:
    body = b"".join(_text(key) + _value(value) for key, value in pairs.items())
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", version, 0, len(pairs)) + body)
    return path


LLAMA = {
    "general.architecture": "llama", "general.name": "small", "llama.block_count": 30, "llama.embedding_length": 576,
    "llama.attention.head_count": 9, "llama.attention.head_count_kv": 3, "llama.context_length": 8192,
    "tokenizer.ggml.tokens": ["a"] * 5000, "tokenizer.ggml.scores": [0] * 5000,
}  # fmt: skip


def test_a_small_llama(tmp_path: Path) -> None:
    shape = read_gguf(write_gguf(tmp_path / "m.gguf", LLAMA))
    assert (shape.name, shape.max_context, shape.kind) == ("small", 8192, "GQA")
    # 2 * 30 layers * 3 heads * 64 * 2 bytes
    assert kv_size(shape, kv_format("f16"), KvDemand(1, 1)).bytes_per_token == 23_040
    assert shape.weight_bytes == (tmp_path / "m.gguf").stat().st_size


def test_big_arrays_are_counted_not_kept(tmp_path: Path) -> None:
    metadata = read_metadata(write_gguf(tmp_path / "m.gguf", {**LLAMA, "last": 7}))
    assert metadata["tokenizer.ggml.tokens"] == {"count": 5000}
    assert metadata["tokenizer.ggml.scores"] == {"count": 5000}
    assert metadata["last"] == 7


def test_windows_and_heads_per_layer(tmp_path: Path) -> None:
    pairs = {
        "general.architecture": "gemma3", "gemma3.block_count": 12, "gemma3.embedding_length": 640,
        "gemma3.attention.head_count": 4, "gemma3.attention.head_count_kv": 1, "gemma3.attention.key_length": 256,
        "gemma3.attention.value_length": 256, "gemma3.attention.sliding_window": 512,
    }  # fmt: skip
    shape = read_gguf(write_gguf(tmp_path / "m.gguf", pairs))
    assert [(g.attention, g.layers, g.window) for g in shape.groups] == [("sliding", 10, 512), ("full", 2, None)]
    flags = {**pairs, "gemma3.attention.sliding_window_pattern": [True, False] * 6}
    shape = read_gguf(write_gguf(tmp_path / "f.gguf", flags))
    assert [(g.attention, g.layers) for g in shape.groups] == [("sliding", 6), ("full", 6)]
    mixed = {**LLAMA, "llama.block_count": 3, "llama.attention.head_count_kv": [3, 0, 1]}
    shape = read_gguf(write_gguf(tmp_path / "h.gguf", mixed))
    assert [(g.layers, g.kv_heads) for g in shape.groups] == [(1, 3), (1, 1)]


def test_damage_is_told(tmp_path: Path) -> None:
    whole = write_gguf(tmp_path / "m.gguf", LLAMA).read_bytes()
    cut = tmp_path / "cut.gguf"
    for end in (5, 20, 60, len(whole) - 1):
        cut.write_bytes(whole[:end])
        with pytest.raises(ModelError):
            read_gguf(cut)
    cut.write_bytes(b"PK\x03\x04")
    with pytest.raises(ModelError, match="not a GGUF file"):
        read_gguf(cut)
    with pytest.raises(ModelError, match="version 9 is unknown"):
        read_gguf(write_gguf(cut, LLAMA, version=9))
    with pytest.raises(ModelError, match=r"llama\.block_count is missing"):
        read_gguf(write_gguf(cut, {"general.architecture": "llama"}))
