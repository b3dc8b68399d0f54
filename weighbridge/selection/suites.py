"""The public routing suites: CodeRouterBench (known families and OOD176) and RouteLLM's MMLU and GSM8K tables.

`docs/selection.md` lists the files and columns. Test rows are only ever handed out as `Cases`, never trained on.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from weighbridge.core.errors import InputError
from weighbridge.selection.checkpoint import DataSource
from weighbridge.selection.pool import Candidate, Pool
from weighbridge.selection.text import utf8_bytes
from weighbridge.selection.train import Dataset

Matrix = NDArray[np.float64]
Row = dict[str, Any]
CRB_POOL = "coderouterbench"
MMLU_POOL = "routellm"
MMLU_MODELS = ("mixtral-8x7b", "gpt-4-1106-preview")
_LICENCES = {
    "crb_prompts_reconstructed.parquet": "MIT, Apache-2.0, CC-BY-4.0 and C-UDA parts",
    "crb_scores.parquet": "MIT",
    "crb_tokens_latency.parquet": "MIT",
    "crb_cost_val_test.parquet": "MIT",
    "routellm_mmlu.parquet": "Apache-2.0, MMLU MIT",
    "routellm_gsm8k.parquet": "Apache-2.0, GSM8K MIT",
}


@dataclass(frozen=True, slots=True)
class Cases:
    """n labelled requests to be routed. `costs_usd` is what each of the M models really cost; NaN where unknown."""

    ids: tuple[str, ...]
    texts: tuple[str, ...]
    families: tuple[str, ...]
    models: tuple[str, ...]
    scores: Matrix
    costs_usd: Matrix

    def take(self, rows: NDArray[np.int64]) -> Cases:
        def pick(values: tuple[str, ...]) -> tuple[str, ...]:
            return tuple(values[i] for i in rows)

        return Cases(
            pick(self.ids), pick(self.texts), pick(self.families), self.models, self.scores[rows], self.costs_usd[rows]
        )


def read_table(path: Path) -> list[Row]:
    """All rows of a Parquet file.

    Raises:
        InputError: it is not there, not Parquet, or the reader is not installed.
    """
    try:
        import pyarrow as arrow
        import pyarrow.parquet as parquet
    except ImportError:
        raise InputError(f"{path}: reading Parquet needs the extra: pip install 'weighbridge[select]'") from None
    try:
        rows: list[Row] = parquet.read_table(path).to_pylist()
    except (OSError, arrow.ArrowException) as error:
        raise InputError(f"{path}: cannot be read as Parquet: {error}") from None
    return rows


def _source(directory: Path, name: str, rows: int) -> DataSource:
    digest = hashlib.sha256((directory / name).read_bytes()).hexdigest()
    return DataSource(name=name, rows=rows, sha256=digest, licence=_LICENCES[name])


class _Priced(msgspec.Struct):
    model: str
    input_per_1m: float
    output_per_1m: float


class _Prices(msgspec.Struct):
    models: list[_Priced]


def crb_pool(directory: Path) -> Pool:
    """The eight models of CodeRouterBench at its prices."""
    path = directory / "crb_models.json"
    try:
        prices = msgspec.json.decode(path.read_bytes(), type=_Prices)
    except (OSError, msgspec.DecodeError) as error:
        raise InputError(f"{path}: cannot be read: {error}") from None
    models = tuple(
        Candidate(name=m.model, input_usd_per_1m=m.input_per_1m, output_usd_per_1m=m.output_per_1m)
        for m in prices.models
    )
    return Pool(pool=CRB_POOL, models=models)


class CodeRouterBench:
    """The suite's tables, joined. Families are (dimension, source benchmark) pairs."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.pool = crb_pool(directory)
        self.models = self.pool.names
        self._prompts = read_table(directory / "crb_prompts_reconstructed.parquet")
        self._scores = {row["task_id"]: row for row in read_table(directory / "crb_scores.parquet")}
        self._priced: dict[tuple[str, str], Row] = {
            (row["task_id"], row["model"]): row for row in read_table(directory / "crb_cost_val_test.parquet")
        }

    def cases(self, split: str) -> Cases:
        """The prompted tasks of `val` or `test`."""
        rows = [row for row in self._prompts if row["split"] == split]
        ids = tuple(row["task_id"] for row in rows)
        return Cases(
            ids=ids,
            texts=tuple(row["prompt"] for row in rows),
            families=tuple(_family(row) for row in rows),
            models=self.models,
            scores=self._score_table(ids),
            costs_usd=self._priced_table(ids, "cost_usd"),
        )

    def dataset(self, splits: tuple[str, ...] = ("train",)) -> Dataset:
        """Rows to train on. Training rows only have total tokens: input tokens come from a line fitted on `val`."""
        if "test" in splits:
            raise InputError("the test split is never trained on")
        rows = [row for row in self._prompts if row["split"] in splits]
        ids = tuple(row["task_id"] for row in rows)
        texts = tuple(row["prompt"] for row in rows)
        totals = self._totals(ids)
        lines = self._input_lines()
        sizes = np.array([utf8_bytes(text) for text in texts], float)
        estimated = sizes[:, None] * lines[:, 1] + lines[:, 0]
        others = [row for key, row in self._scores.items() if row["split"] in splits and key not in set(ids)]
        return Dataset(
            texts=texts,
            models=self.models,
            scores=self._score_table(ids),
            output_tokens=np.maximum(totals - estimated, 1.0),
            input_tokens=estimated,
            families=tuple(_family(row) for row in rows),
            other_scores=np.array([[row[m] for m in self.models] for row in others], float),
            other_families=tuple(_family(row) for row in others),
            sources=tuple(
                _source(self.directory, name, count)
                for name, count in (
                    ("crb_prompts_reconstructed.parquet", len(rows)),
                    ("crb_scores.parquet", len(rows) + len(others)),
                    ("crb_tokens_latency.parquet", len(rows)),
                    ("crb_cost_val_test.parquet", len(self.cases("val").ids)),
                )
            ),
        )

    def published(self, cases: Cases) -> dict[str, NDArray[np.int64]]:
        """What each published router chose for every case: column indices, in the order of the cases."""
        place = {case: i for i, case in enumerate(cases.ids)}
        column = {model: i for i, model in enumerate(cases.models)}
        out: dict[str, NDArray[np.int64]] = {}
        for row in read_table(self.directory / "crb_published_decisions.parquet"):
            if row["task_id"] in place:
                chosen = out.setdefault(row["router"], np.full(len(place), -1, np.int64))
                chosen[place[row["task_id"]]] = column[row["chosen_model"]]
        return {name: chosen for name, chosen in sorted(out.items()) if (chosen >= 0).all()}

    def unknown_families(self) -> Cases:
        """OOD176: agentic tasks of families that the training data does not hold."""
        tasks = read_table(self.directory / "crb_ood176_tasks.parquet")
        results = {
            (row["task_id"], row["model"]): row for row in read_table(self.directory / "crb_ood176_results.parquet")
        }
        ids = tuple(row["task_id"] for row in tasks)

        def table(column: str) -> Matrix:
            return np.array([[_number(results.get((i, m)), column) for m in self.models] for i in ids])

        return Cases(
            ids=ids,
            texts=tuple(row["prompt"] for row in tasks),
            families=tuple(row["bench"] for row in tasks),
            models=self.models,
            scores=table("resolved"),
            costs_usd=table("cost_usd"),
        )

    def _score_table(self, ids: tuple[str, ...]) -> Matrix:
        return np.array([[self._scores[i][m] for m in self.models] for i in ids], float)

    def _priced_table(self, ids: tuple[str, ...], column: str) -> Matrix:
        return np.array([[_number(self._priced.get((i, m)), column) for m in self.models] for i in ids])

    def _totals(self, ids: tuple[str, ...]) -> Matrix:
        wanted = set(ids)
        totals = {
            (row["task_id"], row["model"]): float(row["total_tokens"])
            for row in read_table(self.directory / "crb_tokens_latency.parquet")
            if row["task_id"] in wanted
        }
        return np.array([[totals.get((i, m), np.nan) for m in self.models] for i in ids])

    def _input_lines(self) -> Matrix:
        """Per model (offset, tokens per byte) by least squares over the validation prompts."""
        cases = self.cases("val")
        sizes = np.array([utf8_bytes(text) for text in cases.texts], float)
        tokens = self._priced_table(cases.ids, "input_tokens")
        lines = []
        for column in range(len(self.models)):
            known = ~np.isnan(tokens[:, column])
            slope, offset = np.polyfit(sizes[known], tokens[known, column], 1)
            lines.append((offset, slope))
        return np.array(lines)


def _number(row: Row | None, column: str) -> float:
    value = row.get(column) if row else None
    return float("nan") if value is None else float(value)


def _family(row: Row) -> str:
    match = re.match(r"dim\d+_([A-Za-z]+)", row["task_id"])
    return f"{row['dimension']}/{match.group(1) if match else 'other'}"


def mmlu(directory: Path) -> Cases:
    """RouteLLM's MMLU answers: a weak and a strong model, right or wrong; families are the 57 subjects."""
    return _weak_strong(directory / "routellm_mmlu.parquet", "domain")


def gsm8k(directory: Path) -> Cases:
    """RouteLLM's GSM8K answers in the same form."""
    return _weak_strong(directory / "routellm_gsm8k.parquet", "")


def _weak_strong(path: Path, family: str) -> Cases:
    rows = read_table(path)
    return Cases(
        ids=tuple(str(i) for i in range(len(rows))),
        texts=tuple(row["prompt"] for row in rows),
        families=tuple(str(row[family]) if family else path.stem for row in rows),
        models=MMLU_MODELS,
        scores=np.array([[row["weak"], row["strong"]] for row in rows], float),
        costs_usd=np.tile([0.0, 1.0], (len(rows), 1)),
    )


def as_dataset(cases: Cases, sources: tuple[DataSource, ...] = ()) -> Dataset:
    """Cases as training rows: scores only, no token counts."""
    unknown = np.full(cases.scores.shape, np.nan)
    return Dataset(cases.texts, cases.models, cases.scores, unknown, unknown, cases.families, sources=sources)
