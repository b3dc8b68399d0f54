"""Writes the folder that vLLM and `transformers serve` load from a llama-architecture GGUF: its weights, dequantized.

Run with the Python of the environment that holds the engines (torch, transformers, gguf, safetensors):
`python scripts/gguf_to_hf.py MODEL.gguf OUT_DIR`. An existing OUT_DIR/config.json is left alone.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path


def main(source: Path, target: Path) -> None:
    """Converts; transformers undoes the permutation of query and key rows that the GGUF format has."""
    if (target / "config.json").exists():
        return
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM, AutoTokenizer

    target.mkdir(parents=True, exist_ok=True)
    where = {"pretrained_model_name_or_path": str(source.parent), "gguf_file": source.name}
    tokenizer = AutoTokenizer.from_pretrained(**where)
    model = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32)
    config = model.config.to_dict()
    weights = {name: value.to(torch.bfloat16).contiguous() for name, value in model.state_dict().items()}
    if config.get("tie_word_embeddings"):
        weights.pop("lm_head.weight", None)
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    tokenizer.save_pretrained(target)
    config.pop("quantization_config", None)
    config |= {"architectures": [type(model).__name__], "dtype": "bfloat16"}
    (target / "config.json").write_text(json.dumps(config, indent=1, default=str))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
