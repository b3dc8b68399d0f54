"""A Hugging Face `config.json` as a `ModelShape`: head counts, per-layer attention kinds, windows, latent caches.

Only what the file says is used. Head counts come from the checkpoint; a field that is needed and missing is an error
that names it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from weighbridge.core.errors import InputError
from weighbridge.plan.shape import LayerGroup, ModelShape, grouped

_SLIDING = ("sliding_attention", "chunked_attention", "local", "local_attention", "swa")
_FULL = ("full_attention", "attention", "global", "global_attention", "full")


def read_config(path: Path) -> ModelShape:
    """Read a config file; beside it, `model.safetensors.index.json` tells the bytes of the weights where it exists.

    Raises `InputError` naming the file and what is wrong.
    """
    try:
        config = msgspec.json.decode(path.read_bytes())
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror or error}") from None
    except msgspec.DecodeError as error:
        raise InputError(f"{path}: not JSON ({error})") from None
    if not isinstance(config, dict):
        raise InputError(f"{path}: expected a JSON object, the config.json of a model")
    return shape_of_config(config, str(path), weight_bytes=_weight_bytes(path.parent))


def shape_of_config(config: dict[str, Any], name: str = "config", weight_bytes: int | None = None) -> ModelShape:
    """The shape that a decoded config describes. Raises `InputError`."""
    reader = _Reader(config, name)
    text = reader.text
    if text.get("is_encoder_decoder"):
        raise InputError(f"{name}: an encoder-decoder model keeps a cross-attention cache, which is not computed here")
    heads = reader.integer("num_attention_heads", "n_head", "n_heads", "num_heads")
    layers = reader.integer("num_hidden_layers", "n_layer", "n_layers", "num_layers")
    per_layer = _layers(reader, heads, layers)
    dtype = text.get("dtype", text.get("torch_dtype", config.get("dtype", config.get("torch_dtype"))))
    return ModelShape(
        name=str(config.get("_name_or_path") or config.get("model_type") or name),
        groups=grouped(per_layer),
        query_heads=heads,
        max_context=reader.optional("max_position_embeddings", "n_positions", "max_seq_len", "seq_length"),
        dtype=dtype if isinstance(dtype, str) else None,
        weight_bytes=weight_bytes,
        notes=tuple(reader.notes),
    )


class _Reader:
    """Field access with errors that name the field; gathers notes."""

    def __init__(self, config: dict[str, Any], name: str) -> None:
        self.config, self.name = config, name
        nested = config.get("text_config") or config.get("llm_config") or config.get("language_config")
        self.text: dict[str, Any] = {**config, **nested} if isinstance(nested, dict) else config
        self.notes: list[str] = []
        quantised = config.get("quantization_config")
        if isinstance(quantised, dict):
            method = quantised.get("quant_method", "unknown")
            self.notes.append(f"the weights are quantised ({method}); that does not change the width of the KV cache")
            if quantised.get("kv_cache_scheme"):
                self.notes.append("the checkpoint carries scales for a quantised KV cache; use --kv-dtype fp8 for it")

    def optional(self, *names: str) -> int | None:
        for field in names:
            value = self.text.get(field)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise InputError(f"{self.name}: {field} is {value!r}, expected a whole number")
            return value
        return None

    def integer(self, *names: str) -> int:
        value = self.optional(*names)
        if not value:
            raise InputError(
                f"{self.name}: {' or '.join(names[:2])} is missing; is this the config.json of a decoder model?"
            )
        return value

    def head_dim(self, heads: int) -> int:
        explicit = self.optional("head_dim", "kv_channels", "d_kv", "attention_head_dim")
        if explicit:
            return explicit
        hidden = self.integer("hidden_size", "n_embd", "d_model")
        if hidden % heads:
            raise InputError(
                f"{self.name}: head_dim is missing and hidden_size {hidden} is no multiple of {heads} heads"
            )
        return hidden // heads

    def kv_heads(self, heads: int, layers: int) -> list[int]:
        """KV heads of each layer."""
        raw = self.text.get("num_key_value_heads", self.text.get("num_kv_heads"))
        if isinstance(raw, list):
            if len(raw) != layers or not all(isinstance(v, int) and v >= 0 for v in raw):
                raise InputError(
                    f"{self.name}: num_key_value_heads must list one whole number for each of {layers} layers"
                )
            return list(raw)
        nested = self.text.get("attn_config")
        if isinstance(nested, dict) and isinstance(nested.get("kv_n_heads"), int):
            return [nested["kv_n_heads"]] * layers
        if self.text.get("multi_query") is True and not self.text.get("new_decoder_architecture"):
            return [1] * layers
        if self.text.get("multi_query_attention"):
            return [self.integer("multi_query_group_num")] * layers
        value = self.optional("num_key_value_heads", "num_kv_heads", "n_head_kv")
        if value is None:
            self.notes.append(f"no count of KV heads in the file: taken as multi-head attention ({heads} KV heads)")
            value = heads
        return [value] * layers


def _layers(reader: _Reader, heads: int, layers: int) -> list[LayerGroup]:
    """One group for every layer that caches."""
    rank = reader.optional("kv_lora_rank")
    if rank:
        rope = reader.integer("qk_rope_head_dim")
        return [LayerGroup("latent", layers, 1, rank + rope, 0)]
    dim, kv_heads = reader.head_dim(heads), reader.kv_heads(heads, layers)
    value_dim = reader.optional("v_head_dim") or dim
    shared = reader.optional("num_kv_shared_layers") or 0
    if shared:
        reader.notes.append(f"the last {shared} layers reuse the cache of earlier ones and keep none")
    global_dim = reader.optional("global_head_dim") or dim
    global_heads = reader.optional("num_global_key_value_heads")
    out: list[LayerGroup] = []
    stateful = 0
    for index, window in enumerate(_windows(reader, layers)[: layers - shared]):
        if window is None:
            stateful += 1
        elif kv_heads[index] == 0:
            continue
        elif window == 0:
            full_heads = global_heads or kv_heads[index]
            full_value = value_dim if global_dim == dim else global_dim
            out.append(LayerGroup("full", 1, full_heads, global_dim, full_value))
        else:
            out.append(LayerGroup("sliding", 1, kv_heads[index], dim, value_dim, window))
    if stateful:
        reader.notes.append(
            f"{stateful} of {layers} layers keep a state of fixed size per sequence instead of a KV cache; "
            "that state is not counted"
        )
    return out


def _windows(reader: _Reader, layers: int) -> list[int | None]:
    """Of each layer: 0 = full attention, a number = sliding window, None = no KV cache."""
    text = reader.text
    window = reader.optional("sliding_window", "sliding_window_size", "attention_chunk_size", "window_size") or 0
    kinds = (
        text.get("layer_types")
        or text.get("layers_block_type")
        or text.get("block_types")
        or text.get("attention_layers")
    )
    if isinstance(kinds, list) and kinds:
        if len(kinds) < layers:
            kinds = [kinds[i % len(kinds)] for i in range(layers)]
        return [_window_of(str(kind), window, reader) for kind in kinds[:layers]]
    interval = reader.optional("full_attention_interval")
    if interval:
        return [0 if (i + 1) % interval == 0 else None for i in range(layers)]
    period = reader.optional("attn_layer_period")
    if period:
        offset = reader.optional("attn_layer_offset") or 0
        return [0 if i % period == offset % period else None for i in range(layers)]
    no_rope = text.get("no_rope_layers")
    if isinstance(no_rope, list) and no_rope and "attention_chunk_size" in text:
        return [window if flag else 0 for flag in no_rope[:layers]]
    if not window or text.get("use_sliding_window") is False:
        return [0] * layers
    pattern = reader.optional("sliding_window_pattern", "_sliding_window_pattern")
    if not pattern and text.get("model_type") in ("gemma2", "gemma3_text", "gemma3", "cohere2"):
        # these families alternate by a fixed pattern which older files leave out
        pattern = {"gemma2": 2, "cohere2": 4}.get(str(text["model_type"]), 6)
    if pattern:
        return [0 if (i + 1) % pattern == 0 else window for i in range(layers)]
    if "use_sliding_window" in text:
        first = reader.optional("max_window_layers") or 0
        return [window if i >= first else 0 for i in range(layers)]
    return [window] * layers


def _window_of(kind: str, window: int, reader: _Reader) -> int | None:
    if kind in _SLIDING:
        if not window:
            raise InputError(f"{reader.name}: layer_types names '{kind}' but sliding_window is missing")
        return window
    return 0 if kind in _FULL else None


def _weight_bytes(folder: Path) -> int | None:
    """Total size of a sharded checkpoint beside the config, or of its one weights file."""
    index = folder / "model.safetensors.index.json"
    try:
        size = msgspec.json.decode(index.read_bytes())["metadata"]["total_size"]
        return int(size)
    except (OSError, msgspec.DecodeError, KeyError, TypeError, ValueError):
        single = folder / "model.safetensors"
        return single.stat().st_size if single.is_file() else None
