"""One llama.cpp context: forward passes over the slots' KV, and saving, restoring and trimming that KV.

Belongs to one thread. Row arrays are numpy's and are handed to the library without a copy.
"""

from __future__ import annotations

import time
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from weighbridge.core.errors import ModelError
from weighbridge.engine.host_buffers import HostBuffers
from weighbridge.engine.model import LlamaModel
from weighbridge.engine.sampling import Logits

KvType = Literal["f32", "f16", "bf16", "q8_0"]
_KV_TYPES: dict[KvType, tuple[int, float]] = {"f32": (0, 4.0), "f16": (1, 2.0), "bf16": (30, 2.0), "q8_0": (8, 1.0625)}
_FLASH = {"auto": -1, "off": 0, "on": 1}
CELLS = 256  # the library rounds a stream's cells up to a multiple of this


@dataclass(frozen=True, slots=True)
class Throttle:
    """Slows an instance down for tests of uneven fleets: sleeps so that work takes this many times as long."""

    prefill: float = 1.0
    decode: float = 1.0

    def __post_init__(self) -> None:
        if self.prefill < 1.0 or self.decode < 1.0:
            raise ValueError("throttle factors must be at least 1: an instance can only be slowed down")


@dataclass(frozen=True, slots=True)
class RunnerOptions:
    """One context. `context_tokens` is per slot; with `unified` all slots share slots * context_tokens cells.
    `adapters` are LoRA files (GGUF) with their scales; they apply to everything that the context computes."""

    slots: int = 4
    context_tokens: int = 2048
    threads: int = 2
    batch_rows: int = 512
    unified: bool = False
    kv_type: KvType = "f16"
    flash_attention: Literal["auto", "on", "off"] = "on"
    throttle: Throttle = Throttle()
    adapters: tuple[tuple[str, float], ...] = ()


class Rows(NamedTuple):
    """Consecutive tokens of one slot from position `start`; with `want` the last one yields logits."""

    slot: int
    tokens: Seq[int]
    start: int
    want: bool


class DecodeFailed(Exception):
    """A forward pass failed. The KV of the slots that took part is not to be trusted."""


def kv_value_bytes(kv_type: KvType) -> float:
    """Bytes of one K or V value."""
    return _KV_TYPES[kv_type][1]


class LlamaRunner:
    """Executes forward passes. `busy_s` counts seconds inside the library, `sleep_s` those slept by the throttle."""

    def __init__(self, model: LlamaModel, options: RunnerOptions) -> None:
        """Raises ModelError where the library cannot make the context (most often: not enough memory)."""
        self.model = model
        self.options = options
        self._ffi, self._lib = model.library.ffi, model.library.lib
        params = self._lib.llama_context_default_params()
        cells = -(-options.context_tokens // CELLS) * CELLS
        self.slot_tokens = cells
        params.n_ctx = cells * options.slots
        params.n_batch = params.n_ubatch = options.batch_rows
        params.n_seq_max = options.slots
        params.n_threads = params.n_threads_batch = options.threads
        params.kv_unified = options.unified
        params.flash_attn_type = _FLASH[options.flash_attention]
        params.type_k = params.type_v = _KV_TYPES[options.kv_type][0]
        params.no_perf = True
        model.library.take_log()
        self._context = self._lib.llama_init_from_model(model.handle, params)
        if self._context == self._ffi.NULL:
            log = model.library.take_log()
            raise ModelError(
                f"no context of {options.slots} slots x {cells} tokens: {log[-1] if log else 'the library refused'}; "
                "lower --slots or --context"
            )
        self._memory = self._lib.llama_get_memory(self._context)
        self.busy_s = 0.0
        self.sleep_s = 0.0
        self._adapters: list[Any] = []
        self._make_batch(options.batch_rows)
        self._set_adapters()

    def _set_adapters(self) -> None:
        scales = []
        for path, scale in self.options.adapters:
            self.model.library.take_log()
            adapter = self._lib.llama_adapter_lora_init(self.model.handle, path.encode())
            if adapter == self._ffi.NULL:
                log = self.model.library.take_log()
                self.close()
                raise ModelError(f"adapter {path} cannot be loaded: {log[-1] if log else 'no reason given'}")
            self._adapters.append(adapter)
            scales.append(scale)
        if self._adapters:
            pointers = self._ffi.new("struct llama_adapter_lora *[]", self._adapters)
            numbers = self._ffi.new("float[]", scales)
            if self._lib.llama_set_adapters_lora(self._context, pointers, len(scales), numbers) != 0:
                self.close()
                raise ModelError("the adapters do not fit the model")

    def _make_batch(self, rows: int) -> None:
        ffi = self._ffi
        self._tokens = np.zeros(rows, np.int32)
        self._positions = np.zeros(rows, np.int32)
        self._slots = np.zeros(rows, np.int32)
        self._counts = np.ones(rows, np.int32)
        self._want = np.zeros(rows, np.int8)
        first = ffi.cast("llama_seq_id *", self._slots.ctypes.data)
        self._slot_pointers = ffi.new("llama_seq_id *[]", [first + row for row in range(rows)])
        batch = ffi.new("llama_batch *")
        batch.token = ffi.cast("llama_token *", self._tokens.ctypes.data)
        batch.pos = ffi.cast("llama_pos *", self._positions.ctypes.data)
        batch.n_seq_id = ffi.cast("int32_t *", self._counts.ctypes.data)
        batch.seq_id = self._slot_pointers
        batch.logits = ffi.cast("int8_t *", self._want.ctypes.data)
        self._batch = batch

    def decode(self, slots: Seq[int], tokens: Seq[int], positions: Seq[int]) -> Logits:
        """One token for each slot; logits as (sequences, vocabulary), a view that the next pass overwrites.

        Give slots in ascending order: the library runs consecutive streams together.
        """
        count = len(slots)
        self._tokens[:count] = tokens
        self._positions[:count] = positions
        self._slots[:count] = slots
        self._want[:count] = 1
        return self._run(count, count, self.options.throttle.decode)

    def prefill(self, pieces: Seq[Rows]) -> Logits:
        """Chunks of prompts; logits as (pieces that want them, vocabulary), a view as above."""
        row = 0
        wanted = 0
        for slot, tokens, start, want in pieces:
            end = row + len(tokens)
            self._tokens[row:end] = tokens
            self._positions[row:end] = np.arange(start, start + len(tokens), dtype=np.int32)
            self._slots[row:end] = slot
            self._want[row:end] = 0
            if want:
                self._want[end - 1] = 1
                wanted += 1
            row = end
        return self._run(row, wanted, self.options.throttle.prefill)

    def score(self, slot: int, tokens: Seq[int], start: int) -> Logits:
        """Logits after each of a slot's consecutive tokens, as (tokens, vocabulary), a view as above."""
        count = len(tokens)
        self._tokens[:count] = tokens
        self._positions[:count] = np.arange(start, start + count, dtype=np.int32)
        self._slots[:count] = slot
        self._want[:count] = 1
        return self._run(count, count, self.options.throttle.prefill)

    def _run(self, rows: int, wanted: int, factor: float) -> Logits:
        self._batch.n_tokens = rows
        begun = time.perf_counter()
        code = self._lib.llama_decode(self._context, self._batch[0])
        if code == 0:
            self._lib.llama_synchronize(self._context)
        took = time.perf_counter() - begun
        self.busy_s += took
        if code != 0:
            log = self.model.library.take_log()
            raise DecodeFailed(f"the library could not compute a step (code {code}): {log[-1] if log else 'no reason'}")
        if factor > 1.0:
            pause = took * (factor - 1.0)
            self.sleep_s += pause
            time.sleep(pause)
        vocab = self.model.vocab_tokens
        if not wanted:
            return np.empty((0, vocab), np.float32)
        data = self._ffi.buffer(self._lib.llama_get_logits(self._context), wanted * vocab * 4)
        return np.frombuffer(data, np.float32).reshape(wanted, vocab)

    def trim(self, slot: int, tokens: int) -> None:
        """Keep only the first `tokens` tokens of a slot."""
        if not self._lib.llama_memory_seq_rm(self._memory, slot, tokens, -1):
            raise DecodeFailed(f"slot {slot} cannot be cut to {tokens} tokens")

    def length(self, slot: int) -> int:
        """Tokens that a slot holds."""
        return int(self._lib.llama_memory_seq_pos_max(self._memory, slot)) + 1

    def save(self, slot: int, buffers: HostBuffers | None = None) -> NDArray[np.uint8]:
        """All KV of a slot as bytes; exact, and readable by any context of the same model and options.

        With `buffers` the bytes lie in a lent one.
        """
        size = self._lib.llama_state_seq_get_size(self._context, slot)
        data = np.empty(size, np.uint8) if buffers is None else buffers.take(size)
        pointer = self._ffi.cast("uint8_t *", data.ctypes.data)
        got = self._lib.llama_state_seq_get_data(self._context, pointer, size, slot)
        if got == 0:
            if buffers is not None:
                buffers.give_back(data)
            raise DecodeFailed(f"the KV of slot {slot} could not be saved")
        return data[:got]

    def export(self, slot: int, tokens: int) -> NDArray[np.uint8]:
        """KV of a slot's first `tokens` tokens for a context of any number of slots; cuts the slot to them."""
        self.trim(slot, tokens)
        return for_streams(self.save(slot), 1)

    @property
    def streams(self) -> int:
        """KV streams of this context, which saved bytes must name."""
        return 1 if self.options.unified else self.options.slots

    def restore(self, slot: int, data: NDArray[np.uint8] | memoryview | bytes) -> None:
        """Replace a slot's KV by saved bytes; DecodeFailed where they do not fit this context."""
        view = for_streams(np.frombuffer(data, np.uint8), self.streams)
        self.trim(slot, 0)
        pointer = self._ffi.cast("uint8_t *", view.ctypes.data)
        if self._lib.llama_state_seq_set_data(self._context, pointer, len(view), slot) == 0:
            self.trim(slot, 0)
            raise DecodeFailed(f"saved KV of {len(view)} bytes does not fit slot {slot}")

    def copy(self, source: int, target: int, tokens: int) -> None:
        """Give `target` the first `tokens` tokens of `source`, which keeps its own."""
        self.restore(target, self.save(source))
        self.trim(target, tokens)

    def clear(self) -> None:
        """Empty all slots."""
        self._lib.llama_memory_clear(self._memory, True)

    def close(self) -> None:
        """Free the context."""
        if self._context != self._ffi.NULL:
            self._lib.llama_free(self._context)
            self._context = self._ffi.NULL

    @property
    def handle(self) -> Any:
        """The library's context, for adapters."""
        return self._context


_STATE_MAGIC = 0xAF143CD8


def for_streams(data: NDArray[np.uint8], streams: int) -> NDArray[np.uint8]:
    """Saved KV of one sequence, rewritten for a context of `streams` KV streams.

    The library writes: magic, a tag, the number of streams, then for each stream its cell count and, unless that is
    0, the cells. It reads the cells of one sequence from any stream but insists on the number of streams.
    """
    if len(data) < 16:
        raise DecodeFailed(f"saved KV of {len(data)} bytes is too short")
    words = np.frombuffer(data[: len(data) // 4 * 4], "<u4")
    magic, written = int(words[0]), int(words[2])
    if written == streams:
        return data
    if magic != _STATE_MAGIC or not 0 < written <= 65536:
        raise DecodeFailed("saved KV has a format that is not known; both sides must run the same library")
    counts = words[3 : 3 + written]
    filled = np.flatnonzero(counts)
    if not len(filled):
        raise DecodeFailed("saved KV holds no tokens")
    first = int(filled[0])
    cells = data[12 + 4 * first : len(data) - 4 * (written - 1 - first)]
    head = np.array([words[0], words[1], streams], "<u4").view(np.uint8)
    return np.concatenate([head, cells, np.zeros(4 * (streams - 1), np.uint8)])
