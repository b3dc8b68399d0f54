"""`/capacity`: what fits, and what load can be sustained? Whole numbers, by the same code as `weighbridge plan`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec

from weighbridge.core.errors import WeighbridgeError
from weighbridge.dashboard.html import Child, Html, h, join
from weighbridge.dashboard.pages.stability import page_part as stability_part
from weighbridge.dashboard.query import Query
from weighbridge.dashboard.snapshot import InstanceView, Snapshot
from weighbridge.dashboard.view import View, command, panel
from weighbridge.dashboard.words import count, plural
from weighbridge.plan.hf_config import shape_of_config
from weighbridge.plan.kv import KvDemand, KvFit, KvFormat, KvSize, kv_fit, kv_format, kv_size
from weighbridge.plan.shape import ModelShape, uniform
from weighbridge.plan.sizes import format_bytes, parse_bytes

DTYPES = ("f16", "bf16", "f32", "fp8", "int8", "q8_0", "q5_1", "q4_0")
NUMBERS = (
    ("layers", "Layers", 32),
    ("kv_heads", "KV heads", 8),
    ("head_dim", "Head dim", 128),
    ("tokens", "Tokens per sequence", 8192),
    ("sequences", "Sequences", 4),
    ("block", "Block, tokens", 16),
    ("tp", "Tensor-parallel devices", 1),
    ("shared", "Shared prefix, tokens", 0),
)
_LABELS = {
    "--layers": "Layers", "--kv-heads": "KV heads", "--head-dim": "Head dim", "--tokens": "Tokens per sequence",
    "--sequences": "Sequences", "--block-size": "Block", "--tp": "Tensor-parallel devices",
    "--shared-prefix": "Shared prefix", "--kv-dtype": "KV dtype", "--memory": "Memory of a device",
    "--weights": "Weights", "--reserve": "Reserve", "--config": "config.json",
}  # fmt: skip
_LARGEST = 10**15


@dataclass(frozen=True, slots=True)
class Answer:
    """What the inputs give; `error` instead where they cannot be."""

    shape: ModelShape | None = None
    stored: KvFormat | None = None
    demand: KvDemand | None = None
    size: KvSize | None = None
    fit: KvFit | None = None
    error: str = ""


def page(snapshot: Snapshot, query: Query) -> View:
    """The workbench and the stability calculator; the URL carries every input."""
    live = snapshot.instance(query.get("from"))
    answer = _answer(query)
    body = join(
        h("h1.vh", "Capacity"),
        _first(answer),
        panel(
            "KV cache workbench", _form(query, snapshot, live), _result(answer, query), _instance(live, answer),
            anchor="kv",
        ),
        stability_part(query, live),
    )  # fmt: skip
    return View("Capacity", body)


def whole(query: Query, name: str, default: int) -> int:
    """A whole-number field; text that is none raises ValueError with the field's name."""
    text = query.get(name).replace(",", "").replace("_", "")
    if not text:
        return default
    if not text.lstrip("-").isdigit() or len(text) > 16 or abs(int(text)) > _LARGEST:
        label = next((label for key, label, _ in NUMBERS if key == name), name)
        raise ValueError(f"{label}: '{text[:20]}' is not a whole number this page can use.")
    return int(text)


def _answer(query: Query) -> Answer:
    try:
        number = {name: whole(query, name, default) for name, _, default in NUMBERS}
        config = query.get("config")
        if config:
            shape = shape_of_config(_decode(config), "config.json")
        else:
            shape = uniform(number["layers"], number["kv_heads"], number["head_dim"])
        stored = kv_format(query.get("dtype") or (shape.dtype if config and shape.dtype else DTYPES[0]))
        demand = KvDemand(number["tokens"], number["sequences"], number["shared"], number["block"], number["tp"])
        size = kv_size(shape, stored, demand)
        fit = kv_fit(
            size, demand, parse_bytes(query.get("memory", "24GiB"), "--memory"),
            parse_bytes(query.get("weights", "0"), "--weights"), parse_bytes(query.get("reserve", "0"), "--reserve"),
        )  # fmt: skip
    except ValueError as error:
        return Answer(error=str(error))
    except WeighbridgeError as error:
        text = str(error)
        for flag, label in _LABELS.items():
            text = text.replace(f"{flag}:", f"{label}:").replace(f"{flag} ", f"{label} ")
        return Answer(error=text)
    return Answer(shape, stored, demand, size, fit)


def _decode(text: str) -> dict[str, Any]:
    try:
        value = msgspec.json.decode(text.encode())
    except msgspec.DecodeError as error:
        raise ValueError(f"config.json: not JSON ({error}).") from None
    if not isinstance(value, dict):
        raise ValueError("config.json: expected a JSON object, the config.json of a model.")
    return value


def _first(a: Answer) -> Html:
    if a.size is None or a.demand is None or a.fit is None:
        return h("section.first#first", h("p.invalid", "✕ ", a.error, role="alert"))
    tiles = (
        (
            format_bytes(a.size.total_bytes),
            f"{plural(a.demand.sequences, 'sequence')} of {count(a.demand.tokens)} tokens",
        ),
        (format_bytes(a.size.bytes_per_token), "per token"),
        (format_bytes(a.size.bytes_per_sequence), "per sequence"),
        (
            count(a.fit.sequences),
            f"sequences of {count(a.demand.tokens)} tokens fit in {format_bytes(a.fit.memory_bytes)}",
        ),
    )
    return h("section.first#first", h("div.big", *(h("div", h("b", big), h("span", small)) for big, small in tiles)))


def field(name: str, label: str, value: Child, **attributes: str) -> Html:
    """One labelled text input."""
    return h(
        "label", label, h("input", name=name, value=str(value), autocomplete="off", spellcheck="false", **attributes)
    )


def _form(query: Query, snapshot: Snapshot, live: InstanceView | None) -> Html:
    numbers = [field(name, label, query.get(name) or default, inputmode="numeric") for name, label, default in NUMBERS]
    dtype = query.get("dtype")
    automatic = [h("option", "as in config.json", value="", selected=not dtype)] if query.get("config") else []
    options = [h("option", d, value=d, selected=d == (dtype or ("" if automatic else DTYPES[0]))) for d in DTYPES]
    names = [i.name for i in snapshot.instances]
    instances = [
        h("option", "none", value=""),
        *(h("option", n, value=n, selected=live is not None and live.name == n) for n in names),
    ]
    return h(
        "form",
        h(
            "div.fields", *numbers, h("label", "KV dtype", h("select", *automatic, *options, name="dtype")),
            field("memory", "Memory of a device", query.get("memory", "24GiB")),
            field("weights", "Weights, all devices", query.get("weights", "0")),
            field("reserve", "Reserve per device", query.get("reserve", "0")),
            h("label", "Live instance", h("select", *instances, name="from")),
        ),
        h(
            "details", h("summary", "Paste a model's config.json instead of layers and heads"),
            h("textarea", query.get("config"), name="config", rows="6", aria_label="config.json", spellcheck="false"),
            open=bool(query.get("config")),
        ),
        h("p.links", h("button.go", "Compute", type="submit"), h("a", "Defaults", href="/capacity")),
        method="get", action="/capacity",
    )  # fmt: skip


def _result(a: Answer, query: Query) -> Html | None:
    if a.size is None or a.demand is None or a.fit is None or a.shape is None or a.stored is None:
        return None
    size, demand, fit = a.size, a.demand, a.fit
    facts = [
        ("Attention", f"{a.shape.layers} layers, {a.shape.kind}, cache in {a.stored.name}"),
        (
            "Allocated",
            f"{format_bytes(size.physical_bytes_per_device)} on each of {plural(demand.tensor_parallel, 'device')}",
        ),
        ("Block", f"{format_bytes(size.block_bytes_per_device)} for {demand.block_tokens} tokens, per device"),
        ("Left for KV", f"{format_bytes(fit.kv_bytes)} per device"),
        ("Fits", f"{count(fit.blocks)} blocks, {count(fit.tokens)} tokens, {plural(fit.sequences, 'sequence')}"),
    ]
    if size.bytes_per_token_tail != size.bytes_per_token:
        facts.append(("Beyond the windows", f"{format_bytes(size.bytes_per_token_tail)} per token"))
    left_out = []
    if not fit.weight_bytes:
        left_out.append("weights")
    if demand.tensor_parallel == 1:
        left_out.append("shards on several devices")
    if not demand.shared_tokens:
        left_out.append("sharing of prefixes")
    notes = [*size.notes, f"leaves out: {', '.join(left_out)} (each has a field above)"] if left_out else [*size.notes]
    return join(
        h("p.expr", size.expression),
        h("dl.facts", *(h("div", h("dt", k), h("dd", v)) for k, v in facts)),
        h("ul.notes", *(h("li", note) for note in notes)) if notes else None,
        h("p.links", command(_command(query))) if not query.get("config") else None,
    )


def _command(query: Query) -> str:
    flags = {"block": "--block-size", "shared": "--shared-prefix", "kv_heads": "--kv-heads", "head_dim": "--head-dim"}
    parts = ["weighbridge plan kv"]
    for name, _, default in NUMBERS:
        value = whole(query, name, default)
        if value != default or name in ("tokens", "sequences"):
            parts.append(f"{flags.get(name, '--' + name)} {value}")
    parts.append(
        f"--kv-dtype {query.get('dtype') or DTYPES[0]} --memory {query.get('memory', '24GiB').replace(' ', '')}"
    )
    return " ".join(parts)


def _instance(i: InstanceView | None, a: Answer) -> Html | None:
    if i is None:
        return None
    capacity = i.limits.kv_tokens
    if capacity is None or a.demand is None:
        return h("p", f"{i.name} does not tell the size of its KV cache.")
    block = i.limits.block_size
    each = -(-a.demand.tokens // block) * block
    used = f", {100 * i.kv_used:.0f} % in use now" if i.kv_used is not None else ""
    return h(
        "p.verdict",
        h("b", i.name),
        f" holds {count(capacity)} tokens ({count(i.limits.kv_blocks)} blocks of {block}{used}): ",
        h("b", plural(capacity // each, "sequence")),
        f" of {count(a.demand.tokens)} tokens.",
    )
