"""Labelled requests from CSV, JSON Lines or Parquet: one row per (prompt, model), gathered into one row per prompt.

Columns: `prompt` (or `messages`, JSON Lines and Parquet only), `model`, `score` 0..1; optional `family`,
`input_tokens`, `output_tokens`. Rows of the same prompt belong together. A bad row is named with file and line.
"""

from __future__ import annotations

import csv
import hashlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from weighbridge.core.errors import InputError
from weighbridge.selection.checkpoint import DataSource
from weighbridge.selection.suites import read_table
from weighbridge.selection.text import routing_text
from weighbridge.selection.train import Dataset

MAX_NAMED = 10
REQUIRED = ("model", "score")
Raw = Mapping[str, object]


@dataclass(frozen=True, slots=True)
class Label:
    """One scored answer. Token counts are NaN where unknown."""

    prompt: str
    model: str
    score: float
    family: str
    input_tokens: float
    output_tokens: float


@dataclass(frozen=True, slots=True)
class Loaded:
    """The data set, and the complaint about every bad row that was passed over."""

    dataset: Dataset
    bad: tuple[str, ...]


def read_dataset(path: Path, *, skip_bad: bool = False, licence: str = "") -> Loaded:
    """Read one file; its form is told by the suffix (.csv, .jsonl, .parquet).

    Raises:
        InputError: unknown suffix, unreadable, no usable row, or a bad row while `skip_bad` is false; up to
            MAX_NAMED bad rows are named.
    """
    labels: list[Label] = []
    bad: list[str] = []
    for where, raw in _rows(path):
        try:
            labels.append(_label(raw))
        except ValueError as error:
            bad.append(f"{where}: {error}")
    if bad and not skip_bad:
        more = f"\n  and {len(bad) - MAX_NAMED} more" if len(bad) > MAX_NAMED else ""
        lines = "".join(f"\n  {complaint}" for complaint in bad[:MAX_NAMED])
        raise InputError(f"{path}: {len(bad)} bad rows (--skip-bad goes on without them):{lines}{more}")
    if not labels:
        raise InputError(f"{path}: holds no usable row; the columns are prompt, model, score")
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    return Loaded(_gather(labels, path.name, digest, licence), tuple(bad))


def _rows(path: Path) -> Iterator[tuple[str, Raw]]:
    kind = path.suffix.lower()
    if kind == ".parquet":
        return ((f"row {i + 1}", row) for i, row in enumerate(read_table(path)))
    if kind not in (".csv", ".jsonl", ".ndjson"):
        raise InputError(f"{path}: the suffix must be .csv, .jsonl or .parquet")
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: cannot be read: {error}") from None
    return _csv_rows(path, text) if kind == ".csv" else _json_rows(text)


def _csv_rows(path: Path, text: str) -> Iterator[tuple[str, Raw]]:
    reader = csv.DictReader(text.splitlines(keepends=True), restkey="(extra)", strict=True)
    header = reader.fieldnames or []
    missing = [name for name in ("prompt", *REQUIRED) if name not in header]
    if missing:
        raise InputError(f"{path}: has no column {', '.join(missing)}; found {', '.join(header) or 'nothing'}")
    try:
        for row in reader:
            yield f"line {reader.line_num}", row
    except csv.Error as error:
        raise InputError(f"{path}: line {reader.line_num}: {error}") from None


def _json_rows(text: str) -> Iterator[tuple[str, Raw]]:
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            value = msgspec.json.decode(line)
        except msgspec.DecodeError as error:
            value = {"(bad)": f"not JSON: {error}"}
        yield f"line {number}", value if isinstance(value, dict) else {"(bad)": "not a JSON object"}


def _label(raw: Raw) -> Label:
    if "(bad)" in raw:
        raise ValueError(str(raw["(bad)"]))
    prompt = raw.get("prompt")
    messages = raw.get("messages")
    if prompt is None and isinstance(messages, list):
        prompt = routing_text(messages).text
    if not isinstance(prompt, str) or not prompt.strip():
        raise ValueError("prompt: is empty or no text")
    model = raw.get("model")
    if not isinstance(model, str) or not model:
        raise ValueError("model: is empty or no text")
    score = _number(raw, "score")
    if not 0.0 <= score <= 1.0:
        raise ValueError(f"score: must lie between 0 and 1, is {raw.get('score')!r}")
    tokens = [_count(raw, name) for name in ("input_tokens", "output_tokens")]
    return Label(prompt, model, score, str(raw.get("family") or ""), tokens[0], tokens[1])


def _number(raw: Raw, name: str) -> float:
    value: Any = raw.get(name)
    try:
        return float(value)
    except (TypeError, ValueError):
        raise ValueError(f"{name}: is no number: {value!r}") from None


def _count(raw: Raw, name: str) -> float:
    if raw.get(name) in (None, ""):
        return float("nan")
    value = _number(raw, name)
    if not 0 <= value < 1e9:
        raise ValueError(f"{name}: must be a count of zero or more, is {raw.get(name)!r}")
    return value


def _gather(labels: Iterable[Label], name: str, digest: str, licence: str) -> Dataset:
    labels = list(labels)
    prompts = {label.prompt: None for label in labels}
    place = {prompt: i for i, prompt in enumerate(prompts)}
    models = tuple(sorted({label.model for label in labels}))
    column = {model: i for i, model in enumerate(models)}
    tables = [np.full((len(place), len(models)), np.nan) for _ in range(3)]
    families = [""] * len(place)
    for label in labels:
        at = place[label.prompt], column[label.model]
        for table, value in zip(tables, (label.score, label.input_tokens, label.output_tokens), strict=True):
            table[at] = value
        families[at[0]] = families[at[0]] or label.family
    return Dataset(
        texts=tuple(prompts),
        models=models,
        scores=tables[0],
        output_tokens=tables[2],
        input_tokens=tables[1],
        families=tuple(families),
        sources=(DataSource(name=name, rows=len(place), sha256=digest, licence=licence),),
    )
