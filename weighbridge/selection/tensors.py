"""The safetensors file format, as far as a checkpoint needs it: named arrays, no code, nothing executed.

Layout: eight bytes little-endian header length, a JSON header {name: {dtype, shape, data_offsets}}, the raw data.
Reading checks every length and offset before it touches the data.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
MAX_HEADER_BYTES = 1 << 20
_DTYPES = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "I64": "<i8", "I32": "<i4", "U8": "|u1", "I8": "|i1"}
_NAMES = {np.dtype(code): name for name, code in _DTYPES.items()}


class TensorError(ValueError):
    """The bytes are not a whole safetensors file."""


class _Entry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


def pack(arrays: Mapping[str, Array], metadata: Mapping[str, str] | None = None) -> bytes:
    """Serialise arrays in the order of their names; equal input gives equal bytes."""
    header: dict[str, object] = {"__metadata__": dict(sorted(metadata.items()))} if metadata else {}
    chunks: list[bytes] = []
    offset = 0
    for name in sorted(arrays):
        array = np.ascontiguousarray(arrays[name])
        data = array.astype(array.dtype.newbyteorder("<"), copy=False).tobytes()
        dtype = _NAMES[array.dtype.newbyteorder("<")]
        header[name] = {"dtype": dtype, "shape": array.shape, "data_offsets": (offset, offset + len(data))}
        chunks.append(data)
        offset += len(data)
    text = msgspec.json.encode(header)
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + b"".join(chunks)


def unpack(data: bytes) -> dict[str, Array]:
    """Read-only views into `data`, by name.

    Raises:
        TensorError: truncated, overlapping or inconsistent.
    """
    if len(data) < 8:
        raise TensorError("is shorter than a header")
    (length,) = struct.unpack_from("<Q", data)
    if length > min(MAX_HEADER_BYTES, len(data) - 8):
        raise TensorError(f"announces a header of {length} bytes, which the file does not hold")
    try:
        raw = msgspec.json.decode(data[8 : 8 + length], type=dict[str, msgspec.Raw])
        raw.pop("__metadata__", None)
        entries = {name: msgspec.json.decode(value, type=_Entry) for name, value in raw.items()}
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise TensorError(f"has a bad header: {error}") from None
    body, end = memoryview(data)[8 + length :], 0
    out: dict[str, Array] = {}
    for name, entry in sorted(entries.items(), key=lambda item: item[1].data_offsets):
        first, last = entry.data_offsets
        dtype = _DTYPES.get(entry.dtype)
        if dtype is None:
            raise TensorError(f"tensor '{name}' has the unknown type '{entry.dtype}'")
        if min(entry.shape, default=0) < 0 or first != end or not first <= last <= len(body):
            raise TensorError(f"tensor '{name}' does not lie where its header says")
        count = int(np.prod(entry.shape, dtype=np.int64))
        if count * np.dtype(dtype).itemsize != last - first:
            raise TensorError(f"tensor '{name}' has {last - first} bytes, its shape needs another number")
        flat = np.frombuffer(body, dtype, count, first) if count else np.zeros(0, dtype)
        out[name] = flat.reshape(entry.shape)
        end = last
    if end != len(body):
        raise TensorError(f"has {len(body) - end} bytes after its last tensor")
    return out
