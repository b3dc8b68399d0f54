"""The question of `plan kv` as flags put it, its answer, and how it is printed."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from weighbridge.core.errors import ConfigError
from weighbridge.plan.gguf import read_gguf
from weighbridge.plan.hf_config import read_config
from weighbridge.plan.kv import KvDemand, KvFit, KvFormat, KvSize, kv_bytes_format, kv_fit, kv_format, kv_size
from weighbridge.plan.shape import ModelShape, uniform
from weighbridge.plan.sizes import format_bytes, parse_bytes

DEFAULT_TOKENS = 8192
DEFAULT_SEQUENCES = 4


@dataclass(frozen=True, slots=True)
class KvQuestion:
    """Flags of `plan kv`; None where the model's file or a default answers."""

    layers: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    window: int | None = None
    config: Path | None = None
    gguf: Path | None = None
    stored: KvFormat | None = None
    tokens: int | None = None
    sequences: int | None = None
    shared_tokens: int = 0
    block_tokens: int = 16
    tensor_parallel: int = 1
    memory: str | None = None
    weights: str | None = None
    reserve: str = "0"


@dataclass(frozen=True, slots=True)
class KvAnswer:
    """Everything that was asked, assumed and computed."""

    shape: ModelShape
    stored: KvFormat
    demand: KvDemand
    size: KvSize
    fit: KvFit | None

    def to_json(self) -> dict[str, Any]:
        """The keys that scripts rely on, at the top level."""
        size, demand = self.size, self.demand
        out: dict[str, Any] = {
            "total_bytes": size.total_bytes,
            "total": format_bytes(size.total_bytes),
            "bytes_per_token": size.bytes_per_token,
            "bytes_per_token_beyond_windows": size.bytes_per_token_tail,
            "bytes_per_sequence": size.bytes_per_sequence,
            "expression": size.expression,
            "tokens": demand.tokens,
            "sequences": demand.sequences,
            "shared_prefix_tokens": demand.shared_tokens,
            "block_tokens": demand.block_tokens,
            "block_bytes_per_device": size.block_bytes_per_device,
            "tensor_parallel": demand.tensor_parallel,
            "physical_bytes_per_device": size.physical_bytes_per_device,
            "physical_bytes": size.physical_bytes,
            "copies": size.copies,
            "kv_format": self.stored.name,
            "model": self.shape.name,
            "attention": self.shape.kind,
            "max_context": self.shape.max_context,
            "layers": [msgspec.to_builtins(group) for group in self.shape.groups],
            "notes": list(size.notes),
        }
        if self.fit is not None:
            fit = self.fit
            out["memory"] = {
                "device_bytes": fit.memory_bytes,
                "weight_bytes_per_device": fit.weight_bytes,
                "reserve_bytes": fit.reserve_bytes,
                "kv_bytes": fit.kv_bytes,
            }
            out.update(blocks_fit=fit.blocks, tokens_fit=fit.tokens, sequences_fit=fit.sequences)
        return out


def answer(question: KvQuestion) -> KvAnswer:
    """Read the model, choose defaults, compute. Raises `ConfigError`, `InputError` or `ModelError`."""
    if question.config is not None and question.gguf is not None:
        raise ConfigError("give a config.json or a GGUF file, not both", source="--gguf")
    from_file = True
    if question.config is not None:
        shape = read_config(question.config)
    elif question.gguf is not None:
        shape = read_gguf(question.gguf)
    else:
        from_file = False
        shape = uniform(question.layers, question.kv_heads, question.head_dim, question.window)
    stored = question.stored or (kv_format(shape.dtype) if shape.dtype else kv_bytes_format(2))
    tokens = question.tokens or (shape.max_context if from_file and shape.max_context else DEFAULT_TOKENS)
    sequences = question.sequences if question.sequences is not None else (1 if from_file else DEFAULT_SEQUENCES)
    demand = KvDemand(tokens, sequences, question.shared_tokens, question.block_tokens, question.tensor_parallel)
    size = kv_size(shape, stored, demand)
    return KvAnswer(shape, stored, demand, size, _fit(question, shape, size, demand))


def _fit(question: KvQuestion, shape: ModelShape, size: KvSize, demand: KvDemand) -> KvFit | None:
    if question.memory is None:
        return None
    weights = parse_bytes(question.weights, "--weights") if question.weights is not None else shape.weight_bytes or 0
    memory, reserve = parse_bytes(question.memory, "--memory"), parse_bytes(question.reserve, "--reserve")
    return kv_fit(size, demand, memory, weights, reserve)


def print_answer(result: KvAnswer, *, as_json: bool) -> None:
    """JSON for programs; a table for people."""
    if as_json:
        sys.stdout.write(msgspec.json.format(msgspec.json.encode(result.to_json()), indent=2).decode() + "\n")
        return
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False)
    size, demand, shape = result.size, result.demand, result.shape
    console.print(size.expression, soft_wrap=True)
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="dim")
    table.add_column(justify="right")
    table.add_column(style="dim")
    attention = f"{shape.layers} layers, {shape.kind}, {result.stored.name}"
    table.add_row("per token, all layers", format_bytes(size.bytes_per_token), attention)
    if size.bytes_per_token_tail != size.bytes_per_token:
        table.add_row("per token beyond the windows", format_bytes(size.bytes_per_token_tail), "")
    table.add_row("per sequence", format_bytes(size.bytes_per_sequence), f"{demand.tokens:,} tokens")
    sharing = f", the first {demand.shared_tokens:,} tokens shared" if demand.shared_tokens else ""
    table.add_row("all sequences", format_bytes(size.total_bytes), f"{demand.sequences:,} sequences{sharing}")
    devices = f"on each of {demand.tensor_parallel} devices" if demand.tensor_parallel > 1 else "on the device"
    table.add_row(
        "allocated", format_bytes(size.physical_bytes_per_device), f"{devices}, blocks of {demand.block_tokens} tokens"
    )
    if result.fit is not None:
        fit = result.fit
        table.add_row("memory of a device", format_bytes(fit.memory_bytes), "")
        table.add_row(
            "  less weights", format_bytes(fit.weight_bytes), "" if fit.weight_bytes else "not known; see --weights"
        )
        table.add_row("  less reserve", format_bytes(fit.reserve_bytes), "" if fit.reserve_bytes else "see --reserve")
        table.add_row("  left for KV", format_bytes(fit.kv_bytes), f"{fit.blocks:,} blocks, {fit.tokens:,} tokens")
        table.add_row("sequences that fit", f"{fit.sequences:,}", f"of {demand.tokens:,} tokens each")
    console.print(table)
    for note in size.notes:
        console.print(f"note: {note}", style="dim", soft_wrap=True)
