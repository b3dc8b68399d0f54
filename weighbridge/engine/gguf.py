"""What a GGUF file says about itself: enough to refuse a bad file before the library reads it, and to size its KV.

Reads the header only. Layout: magic, version, counts, typed key-value metadata, tensor descriptions, then aligned data.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from weighbridge.core.errors import ModelError

_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_STRING, _ARRAY = 8, 9
# Bytes of one block and the values in it, by tensor type; a type not listed is not checked for length.
_TENSOR_BYTES = {
    0: (4, 1),
    1: (2, 1),
    2: (18, 32),
    3: (20, 32),
    6: (22, 32),
    7: (24, 32),
    8: (34, 32),
    10: (84, 256),
    11: (110, 256),
    12: (144, 256),
    13: (176, 256),
    14: (210, 256),
    20: (18, 32),
    30: (2, 1),
}
_MAX_ITEMS = 1 << 24
_MAX_STRING = 1 << 26


@dataclass(frozen=True, slots=True)
class ModelFile:
    """A checked model file. Shapes are None where the architecture names them otherwise."""

    path: Path
    size_bytes: int
    architecture: str
    name: str
    context_tokens: int | None
    layers: int | None
    kv_heads: int | None
    head_values: int | None  # values per head in K (V is taken as equal)

    def kv_bytes(self, tokens: int, value_bytes: float = 2.0) -> int:
        """KV cache bytes of `tokens` tokens: 2 * layers * KV heads * values per head * bytes; 0 where unknown."""
        if self.layers is None or self.kv_heads is None or self.head_values is None:
            return 0
        return int(2 * self.layers * self.kv_heads * self.head_values * value_bytes * tokens)


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor: its shape (innermost first), type number, and offset from the start of the file's data."""

    name: bytes
    shape: tuple[int, ...]
    kind: int
    offset: int

    @property
    def values(self) -> int:
        """How many numbers it holds."""
        return math.prod(self.shape)

    def describe(self, kind: int, offset: int) -> bytes:
        """Its description in a file where it has another type and place."""
        shape = struct.pack(f"<I{len(self.shape)}Q", len(self.shape), *self.shape)
        return struct.pack("<Q", len(self.name)) + self.name + shape + struct.pack("<IQ", kind, offset)


@dataclass(frozen=True, slots=True)
class FileLayout:
    """Where things are in a model file: the first byte after the metadata, the four bytes of `general.file_type` (None
    if it has none), all tensors in the file's order, the first byte of their data and its alignment."""

    metadata_end: int
    file_type_at: int | None
    tensors: tuple[TensorInfo, ...]
    data_start: int
    alignment: int


def tensor_bytes(kind: int, values: int) -> int:
    """Bytes of so many values of a tensor type. Raises ModelError where the type is not known here."""
    if kind not in _TENSOR_BYTES:
        raise ModelError(f"tensor type {kind} is not known here")
    block_bytes, block_values = _TENSOR_BYTES[kind]
    return values // block_values * block_bytes


def read_layout(path: Path) -> FileLayout:
    """Where the tensors of a model file are. Raises ModelError as `read_model_file` does."""
    read_model_file(path)
    with path.open("rb") as file:
        file.seek(8)
        tensors, pairs = _scalar(file, "<Q"), _scalar(file, "<Q")
        alignment, file_type_at = 32, None
        for _ in range(pairs):
            key, kind = _string(file), _scalar(file, "<I")
            if key == "general.file_type" and kind == 4:
                file_type_at = file.tell()
            value = _value(file, kind)
            if key == "general.alignment":
                alignment = int(value)
        metadata_end = file.tell()
        found = []
        for _ in range(tensors):
            name = _string(file).encode()
            shape = tuple(_scalar(file, "<Q") for _ in range(_scalar(file, "<I")))
            found.append(TensorInfo(name, shape, _scalar(file, "<I"), _scalar(file, "<Q")))
        data_start = -(-file.tell() // alignment) * alignment
    return FileLayout(metadata_end, file_type_at, tuple(found), data_start, alignment)


def read_model_file(path: Path) -> ModelFile:
    """Check a model file's header and length.

    Raises:
        ModelError: missing, unreadable, not GGUF, an unknown version, corrupt, or shorter than its tensors need.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            return _read(path, size, file)
    except FileNotFoundError:
        raise ModelError(f"model {path}: no such file; `weighbridge model list` shows what is there") from None
    except OSError as error:
        raise ModelError(f"model {path} cannot be read: {error.strerror}") from None
    except (struct.error, UnicodeDecodeError, OverflowError, MemoryError):
        raise ModelError(f"model {path} is corrupt or truncated: its header ends early; fetch it again") from None


def _read(path: Path, size: int, file: BinaryIO) -> ModelFile:
    magic = file.read(4)
    if magic != b"GGUF":
        raise ModelError(f"model {path} is not a GGUF file (it begins with {magic!r}); convert it to GGUF first")
    version = _scalar(file, "<I")
    if version not in (2, 3):
        raise ModelError(f"model {path} has GGUF version {version}; versions 2 and 3 are supported")
    tensors, pairs = _scalar(file, "<Q"), _scalar(file, "<Q")
    if tensors > _MAX_ITEMS or pairs > _MAX_ITEMS:
        raise ModelError(f"model {path} is corrupt: it claims {tensors} tensors and {pairs} metadata entries")
    meta: dict[str, Any] = {}
    for _ in range(pairs):
        key = _string(file)
        meta[key] = _value(file, _scalar(file, "<I"))
    end = 0
    for _ in range(tensors):
        _string(file)
        shape = [_scalar(file, "<Q") for _ in range(_scalar(file, "<I"))]
        kind, offset = _scalar(file, "<I"), _scalar(file, "<Q")
        values = 1
        for length in shape:
            values *= length
        block_bytes, block_values = _TENSOR_BYTES.get(kind, (0, 1))
        end = max(end, offset + values // block_values * block_bytes)
    alignment = int(meta.get("general.alignment") or 32)
    needed = -(-file.tell() // alignment) * alignment + end
    if size < needed:
        raise ModelError(f"model {path} is truncated: {size} bytes where its tensors need {needed}; fetch it again")
    return _describe(path, size, meta)


def _describe(path: Path, size: int, meta: dict[str, Any]) -> ModelFile:
    architecture = str(meta.get("general.architecture") or "")
    if not architecture:
        raise ModelError(f"model {path} names no architecture (general.architecture); it is not a language model")

    def number(key: str) -> int | None:
        value = meta.get(f"{architecture}.{key}")
        return value if isinstance(value, int) else None

    heads = number("attention.head_count")
    width = number("embedding_length")
    head_values = number("attention.key_length")
    if head_values is None and heads and width:
        head_values = width // heads
    return ModelFile(
        path=path,
        size_bytes=size,
        architecture=architecture,
        name=str(meta.get("general.name") or path.stem),
        context_tokens=number("context_length"),
        layers=number("block_count"),
        kv_heads=number("attention.head_count_kv") or heads,
        head_values=head_values,
    )


def _scalar(file: BinaryIO, form: str) -> Any:
    return struct.unpack(form, file.read(struct.calcsize(form)))[0]


def _string(file: BinaryIO) -> str:
    length = _scalar(file, "<Q")
    if length > _MAX_STRING:
        raise OverflowError
    data = file.read(length)
    if len(data) < length:
        raise struct.error
    return data.decode("utf-8", errors="replace")


def _value(file: BinaryIO, kind: int) -> Any:
    """One metadata value; of an array only the length is kept, which is all that is needed of vocabularies."""
    if kind == _STRING:
        return _string(file)
    if kind == _ARRAY:
        item, count = _scalar(file, "<I"), _scalar(file, "<Q")
        if item == _STRING:
            for _ in range(count):
                file.seek(_scalar(file, "<Q"), 1)
        elif item in _SCALARS:
            file.seek(struct.calcsize(_SCALARS[item]) * count, 1)
        else:
            raise struct.error
        return [count]
    if kind not in _SCALARS:
        raise struct.error
    return _scalar(file, _SCALARS[kind])


def available_memory_bytes() -> int | None:
    """Memory this process may still take: the machine's available memory or the control group's rest, if known."""
    free = None
    try:
        for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                free = int(line.split()[1]) * 1024
        limit = Path("/sys/fs/cgroup/memory.max").read_text(encoding="ascii").strip()
        if limit != "max":
            used = int(Path("/sys/fs/cgroup/memory.current").read_text(encoding="ascii"))
            cached = 0
            for line in Path("/sys/fs/cgroup/memory.stat").read_text(encoding="ascii").splitlines():
                if line.startswith("inactive_file "):
                    cached = int(line.split()[1])
            rest = int(limit) - used + cached
            free = rest if free is None else min(free, rest)
    except (OSError, ValueError):
        return free
    return free
