"""config.json of many families: what is cached where."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from weighbridge.core.errors import InputError
from weighbridge.plan.hf_config import read_config, shape_of_config
from weighbridge.plan.kv import KvDemand, kv_format, kv_size
from weighbridge.plan.kv_report import KvQuestion, answer

LLAMA = {
    "model_type": "llama", "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
    "hidden_size": 4096, "max_position_embeddings": 131072, "torch_dtype": "bfloat16",
}  # fmt: skip


def groups(config: dict[str, Any]) -> list[tuple[str, int, int, int, int | None]]:
    shape = shape_of_config(config)
    return [(g.attention, g.layers, g.kv_heads, g.key_dim, g.window) for g in shape.groups]


def test_grouped_query_heads_come_from_the_file() -> None:
    shape = shape_of_config(LLAMA)
    assert groups(LLAMA) == [("full", 32, 8, 128, None)]
    assert (shape.kind, shape.dtype, shape.max_context) == ("GQA", "bfloat16", 131072)


def test_without_kv_heads_it_is_multi_head_and_says_so() -> None:
    shape = shape_of_config({"model_type": "gpt2", "n_layer": 12, "n_head": 12, "n_embd": 768})
    assert [(g.layers, g.kv_heads, g.key_dim) for g in shape.groups] == [(12, 12, 64)]
    assert shape.kind == "MHA"
    assert any("multi-head" in note for note in shape.notes)


def test_explicit_head_dim_wins_over_hidden_size() -> None:
    assert groups({**LLAMA, "head_dim": 64}) == [("full", 32, 8, 64, None)]


def test_multi_query_families() -> None:
    falcon = {"model_type": "falcon", "num_hidden_layers": 32, "num_attention_heads": 71, "hidden_size": 4544}
    assert groups({**falcon, "multi_query": True, "new_decoder_architecture": False}) == [("full", 32, 1, 64, None)]
    newer = {**falcon, "num_attention_heads": 128, "hidden_size": 8192, "num_kv_heads": 8, "multi_query": True}
    assert groups({**newer, "new_decoder_architecture": True}) == [("full", 32, 8, 64, None)]


def test_latent_attention_ignores_head_counts() -> None:
    config = {
        "model_type": "deepseek_v3", "num_hidden_layers": 61, "num_attention_heads": 128, "num_key_value_heads": 128,
        "hidden_size": 7168, "kv_lora_rank": 512, "qk_rope_head_dim": 64,
    }  # fmt: skip
    shape = shape_of_config(config)
    assert shape.kind == "MLA"
    assert kv_size(shape, kv_format("bf16"), KvDemand(1, 1)).bytes_per_token == 70_272


def test_layer_types_are_followed_layer_by_layer() -> None:
    types = ["sliding_attention"] * 5 + ["full_attention"]
    config = {**LLAMA, "num_hidden_layers": 12, "layer_types": types * 2, "sliding_window": 512}
    assert groups(config) == [("sliding", 10, 8, 128, 512), ("full", 2, 8, 128, None)]


def test_window_patterns_of_files_without_layer_types() -> None:
    gemma3 = {**LLAMA, "model_type": "gemma3_text", "num_hidden_layers": 26, "sliding_window": 512}
    assert groups({**gemma3, "sliding_window_pattern": 6}) == [("sliding", 22, 8, 128, 512), ("full", 4, 8, 128, None)]
    gemma2 = {**LLAMA, "model_type": "gemma2", "num_hidden_layers": 26, "sliding_window": 4096}
    assert groups(gemma2) == [("sliding", 13, 8, 128, 4096), ("full", 13, 8, 128, None)]


def test_qwen_windows_apply_only_when_switched_on() -> None:
    qwen = {**LLAMA, "sliding_window": 32768, "max_window_layers": 28}
    assert groups({**qwen, "use_sliding_window": False}) == [("full", 32, 8, 128, None)]
    assert groups({**qwen, "use_sliding_window": True}) == [("full", 28, 8, 128, None), ("sliding", 4, 8, 128, 32768)]


def test_mistral_window_covers_all_layers() -> None:
    assert groups({**LLAMA, "sliding_window": 4096}) == [("sliding", 32, 8, 128, 4096)]
    assert groups({**LLAMA, "sliding_window": None}) == [("full", 32, 8, 128, None)]


def test_linear_attention_layers_are_left_out_and_named() -> None:
    shape = shape_of_config(
        {**LLAMA, "model_type": "qwen3_next", "num_hidden_layers": 48, "full_attention_interval": 4}
    )
    assert [(g.attention, g.layers) for g in shape.groups] == [("full", 12)]
    assert any("36 of 48 layers" in note for note in shape.notes)


def test_a_nested_text_config_is_used() -> None:
    nested = {
        "model_type": "vision",
        "torch_dtype": "bfloat16",
        "text_config": LLAMA,
        "vision_config": {"num_hidden_layers": 3},
    }
    assert groups(nested) == [("full", 32, 8, 128, None)]


def test_weight_quantisation_is_not_kv_width() -> None:
    shape = shape_of_config({**LLAMA, "quantization_config": {"quant_method": "awq", "bits": 4}})
    assert any("does not change the width of the KV cache" in note for note in shape.notes)
    assert shape.dtype == "bfloat16"


def test_missing_fields_are_named() -> None:
    with pytest.raises(InputError, match="num_attention_heads or n_head is missing"):
        shape_of_config({"num_hidden_layers": 2})
    with pytest.raises(InputError, match="sliding_window is missing"):
        shape_of_config({**LLAMA, "layer_types": ["sliding_attention"] * 32})
    with pytest.raises(InputError, match="encoder-decoder"):
        shape_of_config({**LLAMA, "is_encoder_decoder": True})


def test_a_file_answers_how_many_sequences_fit(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA))
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {"total_size": 16 * 2**30}}))
    found = answer(KvQuestion(config=path, memory="24GiB", tokens=8192)).to_json()
    assert found["bytes_per_token"] == 131_072
    assert found["memory"]["weight_bytes_per_device"] == 16 * 2**30
    assert found["sequences_fit"] == 8
    assert read_config(path).weight_bytes == 16 * 2**30


def test_unreadable_files_say_what_is_wrong(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot read"):
        read_config(tmp_path / "none.json")
    bad = tmp_path / "config.json"
    bad.write_text("{")
    with pytest.raises(InputError, match="not JSON"):
        read_config(bad)
