"""KV events as vLLM and SGLang publish them, decoded from msgpack. Pure.

A batch is an array `[timestamp, [event, ...], rank]` or a map; an event is an array whose first element is its name
or a map with `type`. Releases differ in both, so every form is read, unknown keys and events are skipped, and missing
tails are allowed. A hash is an integer (signed or unsigned 64 bits) or bytes.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import msgspec

STORED_FIELDS = (
    *("block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name", "extra_keys"),
    *("group_idx", "kv_cache_spec_kind"),
)
REMOVED_FIELDS = ("block_hashes", "medium", "group_idx", "kv_cache_spec_kind")
WHOLE = frozenset({None, "", "full_attention"})
"""Kinds of layers whose blocks say how long a prefix is; sliding windows forget their beginnings."""


@dataclass(frozen=True, slots=True)
class Stored:
    """Consecutive blocks that the engine holds now. `tokens` is empty where it only names known hashes (offloading).

    `extras` are per block what besides its tokens distinguishes it (cache salt, media), or None.
    """

    hashes: tuple[Hashable, ...]
    parent: Hashable
    tokens: tuple[int, ...]
    block_tokens: int
    medium: str
    lora: str
    extras: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Removed:
    """Blocks that the engine holds no more; `medium` empty: on none."""

    hashes: tuple[Hashable, ...]
    medium: str


@dataclass(frozen=True, slots=True)
class Cleared:
    """The engine holds nothing any more."""


KvEvent = Stored | Removed | Cleared


def read_batch(payload: bytes) -> tuple[list[KvEvent], int]:
    """The events of one batch in order, and how many entries could not be understood (1 if the batch could not)."""
    try:
        batch = msgspec.msgpack.decode(payload)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, TypeError):
        return [], 1
    if isinstance(batch, dict):
        entries = batch.get("events")
    else:
        entries = batch[1] if isinstance(batch, list) and len(batch) > 1 else None
    if not isinstance(entries, list):
        return [], 1
    events: list[KvEvent] = []
    bad = 0
    for entry in entries:
        try:
            event = _event(entry)
        except (KeyError, TypeError, ValueError, IndexError):
            bad += 1
            continue
        if event is not None:
            events.append(event)
    return events, bad


def _event(entry: Any) -> KvEvent | None:
    """None: of a kind that says nothing about prefixes. Raises on a shape that is not understood."""
    if isinstance(entry, dict):
        kind, fields = entry["type"], entry
    else:
        kind, values = entry[0], entry[1:]
        names = STORED_FIELDS if kind == "BlockStored" else REMOVED_FIELDS
        fields = dict(zip(names, values, strict=False))
    if kind == "AllBlocksCleared":
        return Cleared()
    if kind not in ("BlockStored", "BlockRemoved") or fields.get("kv_cache_spec_kind") not in WHOLE:
        return None
    hashes = tuple(fields["block_hashes"])
    for value in hashes:
        _check_hash(value)
    medium = str(fields.get("medium") or "")
    if kind == "BlockRemoved":
        return Removed(hashes, medium)
    return _stored(fields, hashes, medium)


def _stored(fields: dict[str, Any], hashes: tuple[Hashable, ...], medium: str) -> Stored:
    parent = fields.get("parent_block_hash")
    if parent is not None:
        _check_hash(parent)
    tokens = tuple(fields.get("token_ids") or ())
    if not all(type(token) is int and 0 <= token < 1 << 32 for token in tokens):
        raise ValueError("token ids")
    size = fields.get("block_size") or 0
    if type(size) is not int or size < 0 or (tokens and len(tokens) != size * len(hashes)):
        raise ValueError("token count")
    lora = fields.get("lora_name") or fields.get("lora_id")
    extras = fields.get("extra_keys")
    # releases put other things at this place of an array; only one entry per block is what is meant
    extras = tuple(extras) if isinstance(extras, list) and len(extras) == len(hashes) else ()
    return Stored(hashes, parent, tokens, size, medium, "" if lora is None else str(lora), extras)


def _check_hash(value: Any) -> None:
    if type(value) not in (int, bytes, str):
        raise ValueError("hash")
