"""The metadata at the head of a GGUF file, read without loading the model, and the shape it describes.

Layout (versions 2 and 3, little-endian): magic `GGUF`, u32 version, u64 tensors, u64 pairs, then the pairs: key
(u64 length + UTF-8), u32 type, value. Arrays are u32 element type, u64 count, elements.
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any, BinaryIO

from weighbridge.core.errors import ModelError
from weighbridge.plan.shape import LayerGroup, ModelShape, grouped

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
MAX_STRING_BYTES = 1 << 24
MAX_PAIRS = 1 << 20
KEPT_ELEMENTS = 4096


def read_metadata(path: Path) -> dict[str, Any]:
    """All pairs; of an array with more than 4,096 elements (a vocabulary) only the count is kept, as `{"count": n}`.

    Raises `ModelError` for a file that is cut short, of another kind or an unknown version.
    """
    try:
        with path.open("rb") as stream:
            return _pairs(stream, str(path))
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror or error}") from None
    except struct.error:
        raise ModelError(f"{path}: the GGUF header is cut short; fetch the file again") from None


def read_gguf(path: Path) -> ModelShape:
    """The shape of a GGUF model; the file's size stands for the weights."""
    return shape_of_metadata(read_metadata(path), str(path), path.stat().st_size)


def _pairs(stream: BinaryIO, name: str) -> dict[str, Any]:
    if stream.read(4) != b"GGUF":
        raise ModelError(f"{name} is not a GGUF file (it does not begin with GGUF)")
    (version,) = _unpack(stream, "I")
    if version not in (2, 3):
        raise ModelError(f"{name}: GGUF version {version} is unknown; versions 2 and 3 are read")
    _tensors, count = _unpack(stream, "QQ")
    if count > MAX_PAIRS:
        raise ModelError(f"{name}: the GGUF header claims {count} pairs; the file is damaged")
    out: dict[str, Any] = {}
    for _ in range(count):
        key = _text(stream, name)
        (kind,) = _unpack(stream, "I")
        out[key] = _value(stream, kind, name)
    return out


def _unpack(stream: BinaryIO, form: str) -> tuple[Any, ...]:
    return struct.unpack("<" + form, stream.read(struct.calcsize("<" + form)))


def _text(stream: BinaryIO, name: str) -> str:
    (length,) = _unpack(stream, "Q")
    if length > MAX_STRING_BYTES:
        raise ModelError(f"{name}: a text of {length} bytes in the GGUF header; the file is damaged")
    data = stream.read(length)
    if len(data) < length:
        raise struct.error
    return data.decode("utf-8", "replace")


def _value(stream: BinaryIO, kind: int, name: str) -> Any:
    if kind == _STRING:
        return _text(stream, name)
    if kind == _ARRAY:
        return _array(stream, name)
    if kind not in _SCALARS:
        raise ModelError(f"{name}: unknown GGUF value type {kind}; the file is damaged or of a newer format")
    return _unpack(stream, _SCALARS[kind])[0]


def _array(stream: BinaryIO, name: str) -> Any:
    kind, count = _unpack(stream, "IQ")
    if kind in _SCALARS:
        size = struct.calcsize("<" + _SCALARS[kind])
        if count <= KEPT_ELEMENTS:
            return list(_unpack(stream, f"{count}{_SCALARS[kind]}"))
        stream.seek(count * size - 1, 1)
        if not stream.read(1):
            raise struct.error
        return {"count": count}
    if kind not in (_STRING, _ARRAY):
        raise ModelError(f"{name}: unknown GGUF array type {kind}; the file is damaged or of a newer format")
    kept = []
    for _ in range(count):
        value = _value(stream, kind, name)
        if count <= KEPT_ELEMENTS:
            kept.append(value)
    return kept if count <= KEPT_ELEMENTS else {"count": count}


def shape_of_metadata(metadata: dict[str, Any], name: str, weight_bytes: int | None = None) -> ModelShape:
    """The shape out of a GGUF file's pairs. Raises `ModelError` naming a pair that is missing."""
    arch = metadata.get("general.architecture")
    if not isinstance(arch, str):
        raise ModelError(f"{name}: general.architecture is missing; this is not a language model")

    def field(key: str, default: Any = None) -> Any:
        value = metadata.get(f"{arch}.{key}", default)
        if value is None:
            raise ModelError(f"{name}: {arch}.{key} is missing")
        return value

    layers = int(field("block_count"))
    heads = _per_layer(field("attention.head_count"), layers)
    kv_heads = _per_layer(field("attention.head_count_kv", heads), layers)
    rank = int(field("attention.kv_lora_rank", 0))
    context = int(field("context_length", 0)) or None
    if rank:
        rope = int(field("rope.dimension_count"))
        groups: tuple[LayerGroup, ...] = (LayerGroup("latent", layers, 1, rank + rope, 0),)
    else:
        query = max(heads)
        dim = int(field("attention.key_length", 0)) or int(field("embedding_length")) // query
        value_dim = int(field("attention.value_length", 0)) or dim
        window = int(field("attention.sliding_window", 0))
        sliding = _sliding_layers(arch, field("attention.sliding_window_pattern", 0), window, layers)
        groups = grouped(
            [
                LayerGroup("sliding" if slides else "full", 1, kv, dim, value_dim, window if slides else None)
                for kv, slides in zip(kv_heads, sliding, strict=True)
                if kv
            ]
        )
    return ModelShape(
        name=str(metadata.get("general.name") or name),
        groups=groups,
        query_heads=max(heads),
        max_context=context,
        dtype="f16",
        weight_bytes=weight_bytes,
        notes=("llama.cpp keeps the KV cache in f16 unless told otherwise, whatever the weights are quantised to",),
    )


def _per_layer(value: Any, layers: int) -> list[int]:
    return [int(v) for v in value] if isinstance(value, list) else [int(value)] * layers


def _sliding_layers(arch: str, pattern: Any, window: int, layers: int) -> list[bool]:
    """Which layers have a window: by a list of flags, a period (each n-th layer is full), or the architecture."""
    if not window:
        return [False] * layers
    if isinstance(pattern, list) and len(pattern) == layers:
        return [bool(flag) for flag in pattern]
    # llama.cpp knows these periods by architecture where the file does not tell
    known = {"gemma2": 2, "gemma3": 6, "gemma3n": 5, "cohere2": 4, "gpt-oss": 2, "llama4": 4, "exaone4": 4}
    period = int(pattern) if isinstance(pattern, int) and pattern else known.get(arch, 0)
    return [(i + 1) % period != 0 for i in range(layers)] if period else [True] * layers
