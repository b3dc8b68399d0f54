"""Batches of KV cache events: recorded ones, and made ones in vLLM's newer form."""

import json
from pathlib import Path
from typing import Any

import msgspec

ENGINES = Path(__file__).resolve().parents[1] / "data" / "engines"
RECORDED = json.loads((ENGINES / "vllm" / "kv_events.json").read_text())


def frames(entry: dict[str, Any]) -> list[bytes]:
    return [bytes.fromhex(text) for text in entry["frames_hex"]]


def stored(hashes: list[Any], tokens: Any, parent: Any = None, size: Any = 4, **extra: Any) -> dict[str, Any]:
    fields = {"block_hashes": hashes, "parent_block_hash": parent, "token_ids": tokens, "block_size": size}
    return {"type": "BlockStored", **fields, "medium": "GPU", **extra}


def batch(*events: Any) -> bytes:
    return msgspec.msgpack.encode([0.5, list(events), 0])
