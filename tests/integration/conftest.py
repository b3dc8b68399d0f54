"""One gateway with two embedded instances for the tests that only use it, and a skip where there is no model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.served import Served, serve


@pytest.fixture(scope="session")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A shared fleet; a test leaves it idle."""
    data_dir: Path = tmp_path_factory.mktemp("served")
    with serve(data_dir) as running:
        yield running
