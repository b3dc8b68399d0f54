"""The pool and checkpoint that come with the package: CodeRouterBench's eight models."""

from __future__ import annotations

from pathlib import Path

DIRECTORY = Path(__file__).parent
POOL = DIRECTORY / "pool.yaml"
