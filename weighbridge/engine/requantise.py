"""A copy of a model with its weights in a format that llama.cpp has faster CPU kernels for.

The library multiplies Q8_0 in tiles and repacks Q4_0 and IQ4_NL for its widest kernels while it loads them; Q4_1, Q5_0
and Q5_1 it computes row by row. Rewriting loses precision, almost none as Q8_0, so it is done only when asked for, and
`model_comparison.py` measures what was lost. Numbers are converted by the library's own routines.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import numpy as np

from weighbridge.core.errors import ModelError
from weighbridge.engine.gguf import FileLayout, TensorInfo, read_layout, tensor_bytes
from weighbridge.engine.libllama import Library

Kind = Literal["q8_0", "iq4_nl", "q4_0"]
# tensor type, value of general.file_type
KINDS: dict[Kind, tuple[int, int]] = {"q8_0": (8, 7), "iq4_nl": (20, 25), "q4_0": (2, 2)}
_SLOW = {3: "q4_1", 6: "q5_0", 7: "q5_1"}  # tensor types that have no repacked kernel, and the library's name
_BLOCK = 32
_VALUES_AT_ONCE = 1 << 22  # values converted at a time, which bounds memory
_CDEF = """
size_t ggml_quantize_chunk(int type, const float *src, void *dst, int64_t start, int64_t nrows, int64_t n_per_row,
                           const float *imatrix);
void dequantize_row_q4_1(const void *x, float *y, int64_t k);
void dequantize_row_q5_0(const void *x, float *y, int64_t k);
void dequantize_row_q5_1(const void *x, float *y, int64_t k);
"""


def requantise(
    library: Library, source: Path, target: Path, kind: Kind = "q8_0", progress: Callable[[float], None] | None = None
) -> int:
    """Write `source` with every slow tensor as `kind` to `target`, in one rename; returns how many were rewritten.

    Raises:
        ModelError: `source` is bad or gains nothing, or the library lacks the conversion.
    """
    layout = read_layout(source)
    wanted = [tensor for tensor in layout.tensors if _gains(tensor)]
    if not wanted:
        raise ModelError(f"model {source} has no tensors in {', '.join(_SLOW.values())}: rewriting would gain nothing")
    part = target.with_name(f"{target.name}.{os.getpid()}.part")
    try:
        with source.open("rb") as old, part.open("wb") as new:
            _write(_Converter(library, kind), layout, old, new, progress)
            new.flush()
            os.fsync(new.fileno())
        part.replace(target)
    finally:
        part.unlink(missing_ok=True)
    return len(wanted)


def _gains(tensor: TensorInfo) -> bool:
    return tensor.kind in _SLOW and tensor.shape[0] % _BLOCK == 0


class _Converter:
    """Tensor data to another type by the library's routines."""

    def __init__(self, library: Library, kind: Kind) -> None:
        from cffi import FFI

        self.type, self.file_type = KINDS[kind]
        self._ffi: Any = FFI()
        self._ffi.cdef(_CDEF)
        try:
            self._lib = self._ffi.dlopen(str(library.path))
            self._quantise = self._lib.ggml_quantize_chunk
            self._dequantise = {kind: getattr(self._lib, f"dequantize_row_{name}") for kind, name in _SLOW.items()}
        except (OSError, AttributeError) as error:
            raise ModelError(f"library {library.path} cannot convert weights: {error}") from None

    def convert(self, tensor: TensorInfo, data: bytes) -> bytes:
        """The data of a slow tensor in the new type."""
        width = tensor.shape[0]
        rows = tensor.values // width
        at_once = max(1, _VALUES_AT_ONCE // width)
        row_bytes = len(data) // rows
        out = []
        for first in range(0, rows, at_once):
            count = min(at_once, rows - first)
            values = np.empty(count * width, np.float32)
            self._dequantise[tensor.kind](
                self._ffi.from_buffer(data[first * row_bytes : (first + count) * row_bytes]),
                self._ffi.cast("float *", values.ctypes.data),
                count * width,
            )
            packed = np.empty(tensor_bytes(self.type, count * width), np.uint8)
            pointer = self._ffi.cast("float *", values.ctypes.data)
            target = self._ffi.cast("void *", packed.ctypes.data)
            self._quantise(self.type, pointer, target, 0, count, width, self._ffi.NULL)
            out.append(packed.tobytes())
        return b"".join(out)


def _write(
    converter: _Converter, layout: FileLayout, old: Any, new: Any, progress: Callable[[float], None] | None
) -> None:
    """Metadata as it was but for the file's type, tensor descriptions with new types and offsets, then the data."""
    old.seek(0)
    head = bytearray(old.read(layout.metadata_end))
    if layout.file_type_at is not None:
        head[layout.file_type_at : layout.file_type_at + 4] = converter.file_type.to_bytes(4, "little")
    new.write(head)
    offset = 0
    for tensor in layout.tensors:
        kind = converter.type if _gains(tensor) else tensor.kind
        new.write(tensor.describe(kind, offset))
        offset += _aligned(tensor_bytes(kind, tensor.values), layout.alignment)
    new.write(bytes(-new.tell() % layout.alignment))
    for number, tensor in enumerate(layout.tensors):
        old.seek(layout.data_start + tensor.offset)
        data = old.read(tensor_bytes(tensor.kind, tensor.values))
        if _gains(tensor):
            data = converter.convert(tensor, data)
        new.write(data + bytes(-len(data) % layout.alignment))
        if progress is not None:
            progress((number + 1) / len(layout.tensors))


def _aligned(size: int, alignment: int) -> int:
    return -(-size // alignment) * alignment
