"""Copies of per-request records for other tools: Parquet with one column per field, or JSON lines.

The records of a run are flushed as JSON lines while it lasts, because a Parquet file without its footer is lost; a
table is made from them at the end.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from weighbridge.bench.record import BenchRecord, read_records
from weighbridge.core.errors import ConfigError, InputError

EXTRA = "needs the extra: pip install 'weighbridge[select]'"


def check_record_path(path: Path) -> None:
    """Refuse, before anything is sent, a name or an installation with which no copy can be written."""
    if path.suffix not in (".parquet", ".jsonl"):
        raise ConfigError(f"'{path}' must end in .parquet or .jsonl", source="--records")
    if path.suffix == ".parquet":
        try:
            import pyarrow.parquet  # noqa: F401
        except ImportError:
            raise ConfigError(f"writing Parquet {EXTRA}", source="--records") from None


def copy_records(records: list[BenchRecord], path: Path, notes: list[str]) -> None:
    """Write the copy; a failure becomes a note, for the records of the run are kept as JSON lines in any case."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".jsonl":
            path.write_bytes(b"".join(msgspec.json.encode(record) + b"\n" for record in records))
        else:
            _write_parquet(records, path)
    except OSError as error:
        notes.append(f"cannot write {path}: {error.strerror or error}; the per-request records are kept")


def _write_parquet(records: list[BenchRecord], path: Path) -> None:
    import pyarrow as arrow
    import pyarrow.parquet as parquet

    names = BenchRecord.__struct_fields__
    columns: dict[str, list[Any]] = {name: [getattr(record, name) for record in records] for name in names}
    columns["router"] = [msgspec.json.encode(value).decode() for value in columns["router"]]
    kinds = {float: arrow.float64(), int: arrow.int64(), bool: arrow.bool_(), str: arrow.string()}
    schema = arrow.schema([(name, kinds[_kind(name)]) for name in names])
    parquet.write_table(arrow.table(columns, schema=schema), path, compression="zstd")


def _kind(name: str) -> type:
    """The column type of a field; times that may be missing are floats, `router` travels as JSON text."""
    if name.endswith("_s"):
        return float
    default = getattr(BenchRecord(id="", scheduled_s=0.0, status="ok"), name)
    return str if isinstance(default, dict) else type(default)


def read_any(path: Path) -> list[BenchRecord]:
    """Records of a JSON-lines file or of a Parquet copy. Raises `InputError`."""
    if path.suffix != ".parquet":
        return read_records(path)
    try:
        import pyarrow as arrow
        import pyarrow.parquet as parquet
    except ImportError:
        raise InputError(f"{path}: reading Parquet {EXTRA}") from None
    try:
        rows = parquet.read_table(path).to_pylist()
        for row in rows:
            row["router"] = msgspec.json.decode(row.get("router") or "{}")
        return msgspec.convert(rows, list[BenchRecord])
    except (OSError, arrow.ArrowException, msgspec.MsgspecError) as error:
        raise InputError(f"cannot read {path}: {error}") from None
