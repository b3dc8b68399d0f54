"""A real LoRA adapter: of rank one, written here, for one tensor of the default model."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.support.engines import listening
from weighbridge.engine.instance import InstanceOptions
from weighbridge.engine.model import LlamaModel
from weighbridge.engine.runner import LlamaRunner, Rows, RunnerOptions

pytestmark = pytest.mark.engine
TENSOR, WIDTH, ROWS = "blk.10.ffn_down.weight", 1536, 576
PROMPT = list(range(700, 740))


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


def write_adapter(path: Path, tensors: dict[str, NDArray[np.float32]], alpha: float = 1.0) -> Path:
    """A LoRA file in GGUF: metadata, descriptions with the innermost size first, data aligned to 32."""
    pairs = [text(key) + struct.pack("<I", 8) + text(value) for key, value in (
        ("general.architecture", "llama"), ("general.type", "adapter"), ("adapter.type", "lora")
    )]  # fmt: skip
    pairs.append(text("adapter.lora.alpha") + struct.pack("<If", 6, alpha))
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(pairs)) + b"".join(pairs)
    data = b""
    for name, values in tensors.items():
        head += text(name) + struct.pack("<IQQIQ", 2, values.shape[1], values.shape[0], 0, len(data))
        data += values.tobytes() + bytes(-values.nbytes % 32)
    path.write_bytes(head + bytes(-len(head) % 32) + data)
    return path


def lora(scale: float) -> dict[str, NDArray[np.float32]]:
    rng = np.random.default_rng(4)
    first = rng.standard_normal((1, WIDTH)).astype(np.float32) * scale
    second = rng.standard_normal((ROWS, 1)).astype(np.float32) * scale
    return {f"{TENSOR}.lora_a": first, f"{TENSOR}.lora_b": second}


def logits(model: LlamaModel, adapters: tuple[tuple[str, float], ...] = ()) -> NDArray[np.float32]:
    runner = LlamaRunner(model, RunnerOptions(slots=1, context_tokens=256, threads=1, adapters=adapters))
    try:
        result: NDArray[np.float32] = runner.prefill([Rows(0, PROMPT, 0, True)])[0].copy()
        return result
    finally:
        runner.close()


def test_an_adapter_changes_logits_in_proportion_and_only_where_it_is_set(model: LlamaModel, tmp_path: Path) -> None:
    path = str(write_adapter(tmp_path / "one.gguf", lora(1.0)))
    nothing = str(write_adapter(tmp_path / "zero.gguf", lora(0.0)))
    plain = logits(model)
    full, tenth = logits(model, ((path, 1.0),)), logits(model, ((path, 0.1),))
    assert np.abs(full - plain).max() > 2 * plain.std(), "far beyond rounding, which is a fifth of the deviation"
    assert np.abs(tenth - plain).max() < 0.5 * np.abs(full - plain).max()
    np.testing.assert_array_equal(logits(model, ((nothing, 1.0),)), plain)
    np.testing.assert_array_equal(logits(model, ((path, 1.0),)), full)
    np.testing.assert_array_equal(logits(model), plain)


def test_an_instance_with_an_adapter_beside_one_without(tmp_path: Path) -> None:
    path = str(write_adapter(tmp_path / "strong.gguf", lora(2.0)))
    base = InstanceOptions(slots=1, context_tokens=256, threads=1, probe=False)
    body = {"prompt": PROMPT, "max_tokens": 12, "temperature": 0, "ignore_eos": True}
    with listening(base) as plain:
        _, before = plain.post("/v1/completions", body)
        adapted_options = InstanceOptions(
            slots=1, context_tokens=256, threads=1, probe=False, adapters={path: 1.0}, model_id="strong"
        )
        with listening(adapted_options) as adapted:
            _, changed = adapted.post("/v1/completions", body)
            _, after = plain.post("/v1/completions", {**body, "cache_salt": "again"})
            assert changed["model"] == "strong"
        assert changed["choices"][0]["text"] != before["choices"][0]["text"]
        assert after["choices"][0]["text"] == before["choices"][0]["text"]
