"""The flags of `weighbridge plan`, one group for each command."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import typer

_Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


@dataclass(frozen=True, slots=True)
class KvFlags:
    """A model, a cache format, and how many sequences of what length."""

    layers: Annotated[int, typer.Option(help="Layers that keep a KV cache.")] = 32
    kv_heads: Annotated[int, typer.Option(help="KV heads per layer (not query heads).")] = 8
    head_dim: Annotated[int, typer.Option(help="Elements per head.")] = 128
    window: Annotated[int | None, typer.Option(help="Sliding window in tokens, all layers.")] = None
    config: Annotated[Path | None, typer.Option(help="A Hugging Face config.json instead of the numbers.")] = None
    gguf: Annotated[Path | None, typer.Option(help="A GGUF file instead of the numbers.")] = None
    dtype_bytes: Annotated[int | None, typer.Option(help="Bytes per cached number.")] = None
    kv_dtype: Annotated[str | None, typer.Option(help="f32, f16, bf16, fp8, int8 or a ggml type such as q8_0.")] = None
    scale_bytes: Annotated[int, typer.Option(help="Bytes of scales per head and token of a quantised cache.")] = 0
    tokens: Annotated[int | None, typer.Option(help="Tokens per sequence. Default: 8192, or the model's context.")] = (
        None
    )
    sequences: Annotated[int | None, typer.Option(help="Sequences alive at once.")] = None
    shared_prefix: Annotated[int, typer.Option(help="Leading tokens that all sequences share.")] = 0
    block_size: Annotated[int, typer.Option(help="Tokens per block.")] = 16
    tp: Annotated[int, typer.Option(help="Tensor-parallel devices.")] = 1
    memory: Annotated[str | None, typer.Option(help="Memory of one device, e.g. 24GiB: how many sequences fit?")] = None
    weights: Annotated[str | None, typer.Option(help="Bytes of all weights. Default: read from the model's files.")] = (
        None
    )
    reserve: Annotated[str, typer.Option(help="Memory kept for activations and the framework, per device.")] = "0"
    json: _Json = False


@dataclass(frozen=True, slots=True)
class StabilityFlags:
    """A load, and what serves it."""

    rate: Annotated[float, typer.Option(help="Requests per second over the whole fleet.")]
    prompt: Annotated[str, typer.Option("--input", help="Prompt tokens: a mean, or a form such as exp:500.")] = "500"
    output: Annotated[str, typer.Option(help="Output tokens, likewise.")] = "150"
    trace: Annotated[Path | None, typer.Option(help="Take the lengths of this trace instead.")] = None
    profile: Annotated[Path | None, typer.Option(help="Profile with step terms and limits.")] = None
    step_time: Annotated[float | None, typer.Option(help="Constant seconds per step, without a profile.")] = None
    budget: Annotated[int | None, typer.Option(help="Token budget per step. Default: the profile's, or 2048.")] = None
    kv_tokens: Annotated[int | None, typer.Option(help="KV capacity in tokens. Default: the profile's.")] = None
    max_sequences: Annotated[int | None, typer.Option(help="Largest batch. Default: the profile's.")] = None
    instances: Annotated[int, typer.Option(help="Equal instances that share the load.")] = 1
    json: _Json = False


@dataclass(frozen=True, slots=True)
class FleetSearchFlags:
    """The traffic, the instances that could serve it, the promise, and how hard to search."""

    trace: Annotated[Path, typer.Option(help="The traffic to serve: a trace file.")]
    profile: Annotated[
        list[str], typer.Option(help="Profile file of a kind of instance, or a preset; may be repeated.")
    ]
    slo: Annotated[str, typer.Option(help="ttft=1.0,tpot=0.05,e2e=10 in seconds.")]
    attainment: Annotated[float, typer.Option(help="Share of all requests that must meet the SLO.")] = 0.95
    policy: Annotated[str, typer.Option(help="Policies to size for, separated by commas.")] = "calibrated,round_robin"
    price: Annotated[list[float], typer.Option(help="Price per hour, one for each --profile.")] = field(
        default_factory=list
    )
    rate: Annotated[float | None, typer.Option(help="Requests per second. Default: the trace's own.")] = None
    growth: Annotated[str, typer.Option(help="What-if factors on the rate, e.g. 1,1.5,2.")] = "1"
    split: Annotated[bool, typer.Option("--split", help="Prefill and decode on instances of their own.")] = False
    requests: Annotated[int, typer.Option(help="Requests of one simulation.")] = 5000
    seeds: Annotated[int, typer.Option(help="Seeds of the search, and as many fresh ones for the check.")] = 3
    kv_blocks: Annotated[int | None, typer.Option(help="KV blocks of an instance. Default: the profile's.")] = None
    max_instances: Annotated[int, typer.Option(help="Largest fleet to consider.")] = 256
    seconds: Annotated[float, typer.Option(help="Time for the whole answer.")] = 110.0
    jobs: Annotated[int | None, typer.Option(help="Processes. Default: all cores.")] = None
    picture: Annotated[Path | None, typer.Option(help="Write attainment by size as SVG.")] = None
    json: _Json = False
