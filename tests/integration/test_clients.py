"""The official Python client through `serve`: chat, tools, embeddings, errors, retries. Others: `make clients`."""

import asyncio
import sys
from pathlib import Path

import pytest

from tests.clients.run import main


@pytest.mark.engine
def test_the_official_client_runs_unmodified(capsys: pytest.CaptureFixture[str]) -> None:
    status = asyncio.run(main(sys.executable, Path(), ["openai_python.py"]))
    out = capsys.readouterr().out
    assert status == 0, out
    assert "models, chat, tools, completions, embeddings, responses, errors, retries" in out
