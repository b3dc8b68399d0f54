"""Print source lines per package; fail when a file grows beyond 400 lines without a reason."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent / "weighbridge"
FILE_LIMIT = 400
# A file may pass the limit when its first ten lines contain "Longer than 400 lines because".
REASON = "Longer than 400 lines because"


def main() -> int:
    totals: dict[str, int] = {}
    too_long: list[str] = []
    for path in sorted(ROOT.rglob("*.py")):
        lines = path.read_text(encoding="utf-8").splitlines()
        relative = path.relative_to(ROOT)
        package = relative.parts[0] if len(relative.parts) > 1 else "(top)"
        totals[package] = totals.get(package, 0) + len(lines)
        if len(lines) > FILE_LIMIT and not any(REASON in line for line in lines[:10]):
            too_long.append(f"{relative}: {len(lines)} lines")
    for package, count in sorted(totals.items()):
        print(f"{count:6d}  {package}")
    print(f"{sum(totals.values()):6d}  total")
    for entry in too_long:
        print(f"over {FILE_LIMIT} lines: {entry}", file=sys.stderr)
    return 1 if too_long else 0


if __name__ == "__main__":
    sys.exit(main())
