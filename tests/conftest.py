"""Tests marked `engine` need the embedded engine's default model: it is fetched once, else they are skipped by name."""

from __future__ import annotations

import pytest

from weighbridge.core.errors import ModelError
from weighbridge.engine import model_store

_WHY_NOT = pytest.StashKey[str]()


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("engine") is None:
        return
    stash = item.config.stash
    if _WHY_NOT not in stash:
        stash[_WHY_NOT] = ""
        pytest.importorskip("cffi", reason="the engine extra is not installed")
        entry = model_store.find_entry(model_store.DEFAULT_MODEL)
        assert entry is not None
        try:
            model_store.fetch_model(entry)
        except ModelError as error:
            stash[_WHY_NOT] = f"no {entry.name}: {error}"
    if stash[_WHY_NOT]:
        pytest.skip(stash[_WHY_NOT])
