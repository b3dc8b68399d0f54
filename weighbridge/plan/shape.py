"""What of a model's architecture decides the size of its KV cache."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from weighbridge.core.errors import ConfigError

Attention = Literal["full", "sliding", "latent"]


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers that cache alike.

    `full` keeps every token, `sliding` at most `window` tokens. Per token and layer both keep `kv_heads` keys of
    `key_dim` and as many values of `value_dim` elements. `latent` (MLA) keeps one vector of `key_dim` elements for all
    heads (compressed KV and the rotary part), no values, and every tensor-parallel rank holds all of it.
    """

    attention: Attention
    layers: int
    kv_heads: int
    key_dim: int
    value_dim: int
    window: int | None = None

    def held_tokens(self, tokens: int) -> int:
        """Tokens of a sequence of `tokens` that these layers still keep."""
        return tokens if self.window is None else min(tokens, self.window)


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Groups of layers, and what was read beside them. `notes` say what was assumed or left out."""

    name: str
    groups: tuple[LayerGroup, ...]
    query_heads: int | None = None
    max_context: int | None = None
    dtype: str | None = None
    weight_bytes: int | None = None
    notes: tuple[str, ...] = ()

    @property
    def layers(self) -> int:
        """Layers that keep a KV cache."""
        return sum(group.layers for group in self.groups)

    @property
    def kind(self) -> str:
        """MHA, GQA, MQA or MLA, by the first group."""
        if not self.groups:
            return "none"
        first = self.groups[0]
        if first.attention == "latent":
            return "MLA"
        if first.kv_heads == 1:
            return "MQA"
        if self.query_heads is None:
            return "GQA or MHA"
        return "MHA" if first.kv_heads == self.query_heads else "GQA"


def uniform(layers: int, kv_heads: int, head_dim: int, window: int | None = None) -> ModelShape:
    """A shape from plain numbers, every layer alike."""
    for flag, value in (("--layers", layers), ("--kv-heads", kv_heads), ("--head-dim", head_dim)):
        if value < 1:
            raise ConfigError(f"must be at least 1, not {value}", source=flag)
    group = LayerGroup("full" if window is None else "sliding", layers, kv_heads, head_dim, head_dim, window)
    return ModelShape("flags", (group,))


def grouped(layers: list[LayerGroup]) -> tuple[LayerGroup, ...]:
    """Single layers joined into groups of equal ones, in order of first appearance."""
    counts: dict[LayerGroup, int] = {}
    for layer in layers:
        counts[layer] = counts.get(layer, 0) + layer.layers
    return tuple(
        LayerGroup(g.attention, count, g.kv_heads, g.key_dim, g.value_dim, g.window) for g, count in counts.items()
    )
