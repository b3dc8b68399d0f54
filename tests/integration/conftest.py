"""What integration tests share: a gateway with two embedded instances, one listening instance, one loaded model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.engines import Listening, listening
from tests.support.served import Served, serve
from weighbridge.engine.instance import InstanceOptions
from weighbridge.engine.libllama import Library
from weighbridge.engine.model import LlamaModel, ModelOptions
from weighbridge.engine.model_store import DEFAULT_MODEL, resolve_model


@pytest.fixture(scope="session")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A shared fleet; a test leaves it idle."""
    data_dir: Path = tmp_path_factory.mktemp("served")
    with serve(data_dir) as running:
        yield running


@pytest.fixture(scope="session")
def listener() -> Iterator[Listening]:
    """One listening instance of 4 slots x 512 tokens; a test leaves it idle."""
    options = InstanceOptions(slots=4, context_tokens=512, threads=1, probe=False)
    with listening(options) as running:
        yield running


@pytest.fixture(scope="session")
def model() -> Iterator[LlamaModel]:
    """The default model, loaded once."""
    path, _ = resolve_model(DEFAULT_MODEL)
    loaded = LlamaModel(Library(), ModelOptions(path))
    yield loaded
    loaded.close()
