"""Every defence that SECURITY.md claims names the tests that show it, and they are there."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def rows() -> list[list[str]]:
    text = (ROOT / "SECURITY.md").read_text(encoding="utf-8")
    table = text.split("## What is defended against what")[1].split("\n## ")[0]
    lines = [line for line in table.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines[1:]]


def test_each_line_cites_tests_that_exist() -> None:
    assert len(rows()) > 12
    tests = {path.name for path in (ROOT / "tests").rglob("test_*.py")}
    for cells in rows():
        assert len(cells) == 4, cells
        cited = re.findall(r"`([^`]+)`", cells[3])
        files = [name for name in cited if name.endswith(".py")]
        assert files, f"no test shows: {cells[1]}"
        assert set(files) <= tests, f"missing: {set(files) - tests}"
        assert all((ROOT / name.split()[0]).is_dir() for name in cited if name not in files), cited
        for link in re.findall(r"\]\(([^)]+)\)", cells[3]):
            assert (ROOT / link).is_file(), link
