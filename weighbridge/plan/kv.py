"""KV-cache bytes of a model, in whole numbers: logical (the formula) and physical (blocks, devices, sharing).

    B_KV = 2 * L * H_kv * d_head * b * sum(T_i)          with KV heads, not query heads

Every division is explicit and rounds the way an engine allocates. The expression that was computed is part of the
result, so that a person can check it by hand.
"""

from __future__ import annotations

from dataclasses import dataclass

from weighbridge.core.errors import ConfigError
from weighbridge.plan.shape import LayerGroup, ModelShape
from weighbridge.plan.sizes import format_bytes


@dataclass(frozen=True, slots=True)
class KvFormat:
    """How one number of the cache is stored: `block_bytes` for each `block_elements` of a row, plus scales.

    `scale_bytes` are kept for every `scale_elements` of a row (0 = one scale per row). A row is one head's key or
    value of one token. The width of the weights has nothing to do with it.
    """

    name: str
    block_bytes: int
    block_elements: int = 1
    scale_bytes: int = 0
    scale_elements: int = 0

    def row_bytes(self, dim: int) -> int:
        """Bytes of a row of `dim` elements; 0 for an absent row."""
        if dim == 0:
            return 0
        scales = -(-dim // self.scale_elements) if self.scale_elements else 1
        return -(-dim // self.block_elements) * self.block_bytes + scales * self.scale_bytes

    def expression(self, dims: str) -> str:
        """`dims` elements in bytes, as a person would write it."""
        text = f"{dims} x {self.block_bytes}" + (f"/{self.block_elements}" if self.block_elements > 1 else "")
        if not self.scale_bytes:
            return text
        each = f"{self.scale_elements} elements" if self.scale_elements else "row"
        return f"({text} + {self.scale_bytes} per {each})"


_PLAIN = {"f32": 4, "f16": 2, "bf16": 2, "fp8": 1, "int8": 1}
_GGML = {"q8_0": (34, 32), "q5_1": (24, 32), "q5_0": (22, 32), "q4_1": (20, 32), "q4_0": (18, 32), "iq4_nl": (18, 32)}
_ALIASES = {
    "float32": "f32", "fp32": "f32", "float": "f32", "float16": "f16", "fp16": "f16", "half": "f16",
    "bfloat16": "bf16", "fp8_e4m3": "fp8", "fp8_e5m2": "fp8", "float8_e4m3fn": "fp8",
}  # fmt: skip


def kv_format(name: str, scale_bytes: int = 0, scale_elements: int = 0) -> KvFormat:
    """A format by name: f32, f16, bf16, fp8, int8 or a ggml type (q8_0, q5_1, q5_0, q4_1, q4_0, iq4_nl)."""
    key = _ALIASES.get(name.lower().removeprefix("torch."), name.lower())
    if key in _PLAIN:
        return KvFormat(key, _PLAIN[key], 1, scale_bytes, scale_elements)
    if key in _GGML:
        return KvFormat(key, *_GGML[key], scale_bytes, scale_elements)
    known = ", ".join([*_PLAIN, *_GGML])
    raise ConfigError(f"unknown KV format '{name}'; use one of {known}", source="--kv-dtype")


def kv_bytes_format(dtype_bytes: int, scale_bytes: int = 0, scale_elements: int = 0) -> KvFormat:
    """A format of whole bytes per number."""
    if dtype_bytes < 1:
        raise ConfigError(
            f"must be at least 1, not {dtype_bytes}; for 4-bit use --kv-dtype q4_0", source="--dtype-bytes"
        )
    return KvFormat(f"{dtype_bytes} bytes", dtype_bytes, 1, scale_bytes, scale_elements)


@dataclass(frozen=True, slots=True)
class KvDemand:
    """What the cache has to hold: `sequences` of `tokens` each that share their first `shared_tokens`."""

    tokens: int
    sequences: int
    shared_tokens: int = 0
    block_tokens: int = 16
    tensor_parallel: int = 1

    def check(self) -> None:
        """Raises `ConfigError` naming the flag that cannot be."""
        for flag, value in (
            ("--tokens", self.tokens), ("--sequences", self.sequences),
            ("--block-size", self.block_tokens), ("--tp", self.tensor_parallel),
        ):  # fmt: skip
            if value < 1:
                raise ConfigError(f"must be at least 1, not {value}", source=flag)
        if not 0 <= self.shared_tokens <= self.tokens:
            raise ConfigError(f"must lie between 0 and --tokens ({self.tokens})", source="--shared-prefix")


@dataclass(frozen=True, slots=True)
class KvSize:
    """The cache in bytes. Logical is the formula; physical adds block rounding and copies on several devices.

    `bytes_per_token` counts every caching layer (a token inside all windows); `bytes_per_token_tail` only those
    without a window, which is what one more token costs a long sequence. `block_bytes_per_device` is one block of all
    layers on one device.
    """

    total_bytes: int
    bytes_per_token: int
    bytes_per_token_tail: int
    bytes_per_sequence: int
    expression: str
    block_bytes_per_device: int
    sequence_bytes_per_device: int
    shared_bytes_per_device: int
    physical_bytes_per_device: int
    physical_bytes: int
    copies: int
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class KvFit:
    """What a device's memory holds: blocks of all layers, and whole sequences of the demanded size."""

    memory_bytes: int
    weight_bytes: int
    reserve_bytes: int
    kv_bytes: int
    blocks: int
    tokens: int
    sequences: int


def token_bytes(group: LayerGroup, stored: KvFormat, kv_heads: int | None = None) -> int:
    """Bytes of one token in one layer; `kv_heads` overrides the group's count (heads of one device)."""
    heads = group.kv_heads if kv_heads is None else kv_heads
    return heads * (stored.row_bytes(group.key_dim) + stored.row_bytes(group.value_dim))


def heads_per_device(group: LayerGroup, devices: int) -> int:
    """KV heads on each of `devices` tensor-parallel ranks: split where they divide, replicated where they are fewer.

    Raises `ConfigError` where neither works.
    """
    if group.attention == "latent":
        return group.kv_heads
    if group.kv_heads % devices == 0:
        return group.kv_heads // devices
    if devices % group.kv_heads == 0:
        return 1
    raise ConfigError(
        f"{group.kv_heads} KV heads can be neither split nor replicated over {devices} devices; "
        f"choose a divisor or a multiple of {group.kv_heads}",
        source="--tp",
    )


def kv_size(shape: ModelShape, stored: KvFormat, demand: KvDemand) -> KvSize:
    """Compute the cache of `demand`; raises `ConfigError` for a demand that no engine could serve."""
    demand.check()
    if not shape.groups:
        raise ConfigError(f"{shape.name}: no layer keeps a KV cache", source="--config")
    n, tokens, block = demand.sequences, demand.tokens, demand.block_tokens
    total = per_token = tail = per_sequence = block_bytes = own = shared = 0
    for group in shape.groups:
        each = group.layers * token_bytes(group, stored)
        held = group.held_tokens(tokens)
        common = max(0, demand.shared_tokens - (tokens - held))
        total += each * (n * held - (n - 1) * common)
        per_token += each
        per_sequence += each * held
        if group.window is None:
            tail += each
        device = group.layers * token_bytes(group, stored, heads_per_device(group, demand.tensor_parallel)) * block
        blocks = _blocks(held, tokens, block)
        common_blocks = common // block
        block_bytes += device
        own += device * (blocks - common_blocks)
        shared += device * common_blocks
    physical = own * n + shared
    copies = max(
        demand.tensor_parallel * heads_per_device(g, demand.tensor_parallel) // g.kv_heads for g in shape.groups
    )
    return KvSize(
        total_bytes=total,
        bytes_per_token=per_token,
        bytes_per_token_tail=tail,
        bytes_per_sequence=per_sequence,
        expression=_expression(shape, stored, demand, total),
        block_bytes_per_device=block_bytes,
        sequence_bytes_per_device=own,
        shared_bytes_per_device=shared,
        physical_bytes_per_device=physical,
        physical_bytes=physical * demand.tensor_parallel,
        copies=copies,
        notes=_notes(shape, demand, total, physical * demand.tensor_parallel, copies),
    )


def kv_fit(size: KvSize, demand: KvDemand, memory_bytes: int, weight_bytes: int = 0, reserve_bytes: int = 0) -> KvFit:
    """How many of the demanded sequences fit one device's `memory_bytes` beside its share of weights and a reserve."""
    share = -(-weight_bytes // demand.tensor_parallel)
    room = memory_bytes - share - reserve_bytes
    if room < 0:
        raise ConfigError(
            f"{format_bytes(memory_bytes)} do not even hold the weights ({format_bytes(share)} per device) and the "
            f"reserve ({format_bytes(reserve_bytes)}); use a larger --memory or --tp",
            source="--memory",
        )
    blocks = room // size.block_bytes_per_device
    free = room - size.shared_bytes_per_device
    sequences = max(0, free // size.sequence_bytes_per_device) if size.sequence_bytes_per_device else 0
    return KvFit(memory_bytes, share, reserve_bytes, room, blocks, blocks * demand.block_tokens, sequences)


def _blocks(held: int, tokens: int, block: int) -> int:
    """Blocks that hold the last `held` of `tokens`; a window that has moved may straddle one block more."""
    if held == tokens:
        return -(-held // block)
    return -(-(held - 1) // block) + 1


def _expression(shape: ModelShape, stored: KvFormat, demand: KvDemand, total: int) -> str:
    terms = []
    for group in shape.groups:
        held = group.held_tokens(demand.tokens)
        common = max(0, demand.shared_tokens - (demand.tokens - held))
        if group.attention == "latent":
            width = f"{group.layers} x {stored.expression(str(group.key_dim))}"
        elif group.key_dim == group.value_dim:
            width = f"2 x {group.layers} x {group.kv_heads} x {stored.expression(str(group.key_dim))}"
        else:
            dims = f"({group.key_dim} + {group.value_dim})"
            width = f"{group.layers} x {group.kv_heads} x {stored.expression(dims)}"
        if common and demand.sequences > 1:
            count = f"({demand.sequences} x {held} - {demand.sequences - 1} x {common})"
        else:
            count = f"{held} x {demand.sequences}"
        terms.append(f"{width} x {count}")
    return f"{' + '.join(terms)} = {total:,} bytes = {format_bytes(total)}"


def _notes(shape: ModelShape, demand: KvDemand, logical: int, physical: int, copies: int) -> tuple[str, ...]:
    notes = list(shape.notes)
    windows = [group for group in shape.groups if group.window is not None]
    if windows:
        kept = ", ".join(f"{g.layers} layers keep at most {g.window} tokens" for g in windows)
        notes.append(f"sliding window: {kept}; an engine that ignores windows needs more")
    if demand.tensor_parallel > 1:
        if any(group.attention == "latent" for group in shape.groups):
            notes.append(f"the latent cache is held whole by each of the {demand.tensor_parallel} devices")
        elif copies > 1:
            notes.append(f"fewer KV heads than devices: every head is held {copies} times")
    if physical > logical and demand.tensor_parallel == 1:
        notes.append(f"rounding to blocks of {demand.block_tokens} tokens adds {format_bytes(physical - logical)}")
    if demand.shared_tokens % demand.block_tokens and demand.sequences > 1:
        notes.append("of a shared prefix only whole blocks are shared; the rest is held by every sequence")
    return tuple(notes)
