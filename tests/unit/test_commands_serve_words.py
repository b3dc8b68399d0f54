"""What `serve` prints once it listens."""

import io
from typing import Any

import pytest
from rich.console import Console

from weighbridge.commands.serve import _announce


class Started:
    """A gateway that has started, as far as its announcement goes."""

    dashboard_error = None

    def __init__(self, *rows: dict[str, Any]) -> None:
        self.rows = rows

    def ready(self) -> dict[str, Any]:
        rates = {"prefill_tokens_per_s": None, "decode_tokens_per_s": None}
        addresses = {"url": "http://127.0.0.1:1", "admin": "http://127.0.0.1:2", "dashboard": "http://127.0.0.1:3"}
        rows = [{"kind": "vllm", "url": "http://h:1", "reason": "", **rates, **row} for row in self.rows]
        return {**addresses, "instances": rows, "start_s": 1.0, "policy": "work", "data_dir": "d"}


def words(*rows: dict[str, Any]) -> str:
    out = io.StringIO()
    started: Any = Started(*rows)
    _announce(started, False, Console(file=out, width=100))
    return out.getvalue()


DOWN = {"name": "a", "model": "", "up": False, "reason": "cannot connect: Connection refused"}
UP = {"name": "b", "model": "m-1, alias", "up": True}


def test_an_engine_that_is_not_up_is_named_with_its_reason() -> None:
    text = words(DOWN, UP)
    assert "a is not up: cannot connect: Connection refused" in text
    assert "503" not in text
    assert '"model": "m-1",' in text, "one that answers, by one of its names"


@pytest.mark.parametrize("rows", [[DOWN], []])
def test_without_any_engine_it_says_so(rows: list[dict[str, Any]]) -> None:
    text = words(*rows)
    assert "answered 503 until an instance is up" in text
    assert '"model": "MODEL"' in text
