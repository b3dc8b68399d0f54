"""A bad model file is refused before the library sees it, with one clear line."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

from weighbridge.core.errors import ModelError
from weighbridge.engine.gguf import read_model_file
from weighbridge.engine.model import ModelOptions, check_memory


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


def gguf(tensor_values: int = 64, architecture: str = "llama", version: int = 3) -> bytes:
    pairs = [
        text("general.architecture") + struct.pack("<I", 8) + text(architecture),
        text("general.name") + struct.pack("<I", 8) + text("Tiny"),
        text("llama.block_count") + struct.pack("<II", 4, 2),
        text("llama.context_length") + struct.pack("<II", 4, 128),
        text("llama.embedding_length") + struct.pack("<II", 4, 64),
        text("llama.attention.head_count") + struct.pack("<II", 4, 4),
        text("llama.attention.head_count_kv") + struct.pack("<II", 4, 1),
        text("tokenizer.tokens") + struct.pack("<IIQ", 9, 8, 2) + text("a") + text("b"),
    ]
    head = b"GGUF" + struct.pack("<IQQ", version, 1, len(pairs)) + b"".join(pairs)
    head += text("t") + struct.pack("<IQIQ", 1, tensor_values, 0, 0)
    head += b"\0" * (-len(head) % 32)
    return head + b"\0" * 256


def write(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


def test_a_good_file_is_described(tmp_path: Path) -> None:
    file = read_model_file(write(tmp_path / "m.gguf", gguf()))
    assert (file.architecture, file.name, file.context_tokens) == ("llama", "Tiny", 128)
    assert file.kv_bytes(10) == 2 * 2 * 1 * 16 * 2 * 10


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"<html>no</html>", "not a GGUF file"),
        (b"", "not a GGUF file"),
        (gguf(version=9), "version 9"),
        (gguf(tensor_values=65), "truncated: .* bytes where its tensors need"),
        (gguf()[:150], "corrupt or truncated"),
        (gguf(architecture=""), "names no architecture"),
    ],
)
def test_bad_files_are_refused(tmp_path: Path, data: bytes, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        read_model_file(write(tmp_path / "m.gguf", data))


@pytest.mark.parametrize("cut", range(4, 380, 13))
def test_every_cut_in_the_header_is_one_clear_error(tmp_path: Path, cut: int) -> None:
    with pytest.raises(ModelError, match="truncated"):
        read_model_file(write(tmp_path / "m.gguf", gguf()[:cut]))


def test_a_missing_file_says_so(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no such file"):
        read_model_file(tmp_path / "m.gguf")


def test_too_big_for_memory_names_what_to_lower(tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", gguf())
    with pytest.raises(ModelError, match="lower --context or --slots"):
        check_memory(read_model_file(path), ModelOptions(path, context_tokens=10**12))
