"""`weighbridge top`: plain once, JSON, and the same judgements as the pages."""

from __future__ import annotations

import json

from typer.testing import CliRunner

from weighbridge.cli import app


def test_once_prints_headline_attention_instances_and_decisions() -> None:
    result = CliRunner().invoke(app, ["top", "--demo", "--once"])
    assert result.exit_code == 0
    assert "attainment 9" in result.output
    assert "✕ h100-2" in result.output
    assert "$ weighbridge calibrate l4-2" in result.output
    lines = [line for line in result.output.splitlines() if line.startswith(("h100", "a100", "l4-", "cpu-"))]
    assert len(lines) == 16
    assert "\x1b" not in result.output


def test_json_is_the_snapshot() -> None:
    result = CliRunner().invoke(app, ["top", "--demo", "--json"])
    snapshot = json.loads(result.output)
    assert len(snapshot["instances"]) == 16
    assert snapshot["source"] == "demo"


def test_a_gateway_that_is_not_there_is_one_line() -> None:
    result = CliRunner().invoke(app, ["top", "--once", "--admin", "http://127.0.0.1:9"])
    assert result.exit_code == 1
    assert "http://127.0.0.1:9 does not answer" in str(result.exception)
