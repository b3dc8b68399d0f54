"""What to expect of a model on a device before anything was measured: the roofline of its data sheet.

    prefill_s  = 2 * parameters / (FLOP/s * EFFICIENCY)         two floating-point operations per weight and token
    base_s     = weight bytes / (bytes/s * EFFICIENCY) + LAUNCH_S    every weight is read once per step
    kv_s       = KV bytes per token / (bytes/s * EFFICIENCY)
    attend_s   = 4 * layers * attention width / (FLOP/s * EFFICIENCY)   scores and weighted sum, per pair of tokens

A prior is marked `prior`, claims an error of PRIOR_ERROR, and is replaced by the first measurement.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from weighbridge.core.errors import InputError
from weighbridge.core.instance import Limits, StepTerms
from weighbridge.cost.profile import Profile, Provenance, Quantiles
from weighbridge.cost.step import rates_of

EFFICIENCY_FLOPS = 0.45
EFFICIENCY_BYTES = 0.7
LAUNCH_S = 0.002
PRIOR_ERROR = 0.5


@dataclass(frozen=True, slots=True)
class Device:
    """Data-sheet rates of one device: dense 16-bit FLOP/s, bytes/s of its memory, and how many bytes that has."""

    flops: float
    bytes_per_s: float
    memory_bytes: float


# Vendors' data sheets; dense, without sparsity. A device matches when its name holds all words, most words first.
DEVICES: dict[str, Device] = {
    "A10G": Device(70e12, 600e9, 24e9),
    "A10": Device(125e12, 600e9, 24e9),
    "A100 80GB": Device(312e12, 2039e9, 80e9),
    "A100": Device(312e12, 1555e9, 40e9),
    "A6000": Device(155e12, 768e9, 48e9),
    "B200": Device(2250e12, 8000e9, 180e9),
    "GH200": Device(989e12, 4000e9, 96e9),
    "H100 NVL": Device(835e12, 3900e9, 94e9),
    "H100 PCIe": Device(756e12, 2000e9, 80e9),
    "H100": Device(989e12, 3350e9, 80e9),
    "H20": Device(148e12, 4000e9, 96e9),
    "H200": Device(989e12, 4800e9, 141e9),
    "L4": Device(121e12, 300e9, 24e9),
    "L40S": Device(362e12, 864e9, 48e9),
    "L40": Device(181e12, 864e9, 48e9),
    "MI250X": Device(383e12, 3277e9, 128e9),
    "MI300X": Device(1307e12, 5300e9, 192e9),
    "MI325X": Device(1307e12, 6000e9, 256e9),
    "RTX 3090": Device(71e12, 936e9, 24e9),
    "RTX 4090": Device(165e12, 1008e9, 24e9),
    "RTX 5090": Device(210e12, 1792e9, 32e9),
    "RTX PRO 6000": Device(252e12, 1792e9, 96e9),
    "T4": Device(65e12, 320e9, 16e9),
    "V100": Device(125e12, 900e9, 32e9),
}


@dataclass(frozen=True, slots=True)
class ModelSize:
    """What a model's configuration tells. `active_parameters` counts those that a token uses (experts)."""

    parameters: float
    layers: int
    kv_heads: int
    head_size: int
    attention_width: int
    weight_bytes: float
    active_parameters: float | None = None
    kv_value_bytes: float = 2.0

    @property
    def kv_bytes_per_token(self) -> float:
        """Keys and values of all layers."""
        return 2.0 * self.layers * self.kv_heads * self.head_size * self.kv_value_bytes


def model_size(config: Mapping[str, Any], *, bits: float = 16.0) -> ModelSize:
    """From a decoder's `config.json` (Hugging Face names): gated feed-forward, experts where it has them.

    Raises:
        InputError: a field that is needed is missing; the message names it.
    """

    def need(*names: str) -> int:
        for name in names:
            if isinstance(config.get(name), int):
                return int(config[name])
        raise InputError(f"the model's configuration lacks {' or '.join(names)}")

    hidden, layers, heads = need("hidden_size"), need("num_hidden_layers"), need("num_attention_heads")
    kv_heads = config.get("num_key_value_heads") or heads
    head = config.get("head_dim") or hidden // heads
    experts, used = config.get("num_local_experts") or config.get("num_experts"), config.get("num_experts_per_tok")
    inner = need("moe_intermediate_size", "intermediate_size") if experts else need("intermediate_size")
    attention = hidden * head * (2 * heads + 2 * kv_heads)
    embedding = need("vocab_size") * hidden * (1 if config.get("tie_word_embeddings") else 2)
    every = layers * (attention + 3 * hidden * inner * (experts or 1)) + embedding
    active = layers * (attention + 3 * hidden * inner * (used or 1)) + embedding if experts else every
    return ModelSize(
        parameters=float(every),
        layers=layers,
        kv_heads=kv_heads,
        head_size=head,
        attention_width=heads * head,
        weight_bytes=every * bits / 8.0,
        active_parameters=float(active),
    )


def find_device(name: str) -> Device:
    """By name as a driver tells it. Raises InputError naming those that are known."""
    words = set(name.lower().replace("-", " ").split())
    for known in sorted(DEVICES, key=lambda key: (len(key.split()), len(key)), reverse=True):
        if words.issuperset(known.lower().split()):
            return DEVICES[known]
    raise InputError(f"no data sheet of {name!r}; known are {', '.join(sorted(DEVICES))}. Calibrate instead")


def prior_profile(model: ModelSize, device_name: str, *, name: str = "", devices: int = 1) -> Profile:
    """The roofline profile of a model spread over `devices` equal devices.

    Raises:
        InputError: an unknown device, or weights that do not fit into its memory.
    """
    device = find_device(device_name)
    if model.weight_bytes > 0.95 * device.memory_bytes * devices:
        raise InputError(
            f"{model.weight_bytes / 1e9:.1f} GB of weights do not fit into {devices} x {device_name} "
            f"({device.memory_bytes / 1e9:.0f} GB each)"
        )
    flops = device.flops * EFFICIENCY_FLOPS * devices
    bandwidth = device.bytes_per_s * EFFICIENCY_BYTES * devices
    active = model.active_parameters or model.parameters
    step = StepTerms(
        base_s=model.weight_bytes * (active / model.parameters) / bandwidth + LAUNCH_S,
        prefill_s=2.0 * active / flops,
        attend_s=4.0 * model.layers * model.attention_width / flops,
        sequence_s=2.0 * active / flops,
        kv_s=model.kv_bytes_per_token / bandwidth,
    )
    free = 0.9 * device.memory_bytes * devices - model.weight_bytes
    blocks = int(max(0.0, free) // (16 * model.kv_bytes_per_token))
    unknown = Quantiles(p05=-PRIOR_ERROR, p95=PRIOR_ERROR, mape=PRIOR_ERROR, median=PRIOR_ERROR, count=1)
    return Profile(
        rates=rates_of(step, token_budget=2048),
        step=step,
        identifiable=False,
        unidentified=("base_s", "prefill_s", "attend_s", "sequence_s", "kv_s"),
        limits=Limits(kv_blocks=blocks or None),
        residuals={"ttft_s": unknown, "tpot_s": unknown, "e2e_s": unknown},
        source="prior",
        provenance=Provenance(model=name, device=device_name, method="roofline of the device's data sheet"),
    )
