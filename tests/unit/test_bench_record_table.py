"""Copies of per-request records: every field survives, bad names are refused before the run, a full disk is a note."""

from __future__ import annotations

from pathlib import Path

import pytest

from weighbridge.bench.record import BenchRecord
from weighbridge.bench.record_table import check_record_path, copy_records, read_any
from weighbridge.core.errors import ConfigError, InputError

RECORDS = [
    BenchRecord(id="a", scheduled_s=0.5, status="ok", prompt_tokens=7, output_tokens=3, first_token_s=0.7, warmup=True),
    BenchRecord(id="b", scheduled_s=1.0, status="failed", error="größer", router={"instance": "i", "cost-usd": 0.25}),
]


@pytest.mark.parametrize("name", ["records.parquet", "records.jsonl"])
def test_a_copy_holds_what_was_recorded(tmp_path: Path, name: str) -> None:
    notes: list[str] = []
    copy_records(RECORDS, tmp_path / "new" / name, notes)
    assert notes == []
    assert read_any(tmp_path / "new" / name) == RECORDS


def test_other_tools_find_typed_columns(tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    copy_records(RECORDS, tmp_path / "r.parquet", [])
    schema = parquet.read_schema(tmp_path / "r.parquet")
    kinds = {name: str(schema.field(name).type) for name in ("id", "first_token_s", "output_tokens", "warmup")}
    assert kinds == {"id": "string", "first_token_s": "double", "output_tokens": "int64", "warmup": "bool"}


def test_names_that_say_nothing_are_refused_and_failures_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"must end in \.parquet or \.jsonl"):
        check_record_path(tmp_path / "records.csv")
    check_record_path(tmp_path / "records.parquet")
    notes: list[str] = []
    (tmp_path / "file").write_text("")
    copy_records(RECORDS, tmp_path / "file" / "r.parquet", notes)
    assert "the per-request records are kept" in notes[0]
    (tmp_path / "bad.parquet").write_bytes(b"PAR1 but not really")
    with pytest.raises(InputError, match="cannot read"):
        read_any(tmp_path / "bad.parquet")
