"""The table of reported hazards names tests that exist, one at least for each."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TABLE = ROOT / "docs" / "reference" / "hazards.md"


def test_each_hazard_has_a_test() -> None:
    lines = [line for line in TABLE.read_text(encoding="utf-8").splitlines() if line.startswith("| ")][1:]
    assert len(lines) >= 34
    files = {path.name: path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("test_*.py")}
    for line in lines:
        what, shown = (cell.strip() for cell in line.strip("|").split(" | "))
        cited = re.findall(r"`(test_\w+\.py)::(test_\w+)`", shown)
        assert cited, what
        for file, name in cited:
            assert f"\ndef {name}(" in files[file], f"{file}::{name}"
        for link in re.findall(r"\]\(([^)]+)\)", shown):
            assert (TABLE.parent / link).is_file(), link
