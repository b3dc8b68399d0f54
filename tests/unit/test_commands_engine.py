"""The engine command refuses what it cannot do before it loads anything."""

import pytest
from typer.testing import CliRunner

from weighbridge.cli import app
from weighbridge.commands.engine import _factors


@pytest.mark.parametrize("port", ["65536", "99999", "-1"])
def test_a_port_that_does_not_exist_is_refused(port: str) -> None:
    result = CliRunner().invoke(app, ["engine", "--model", "no-such-model", "--port", port])
    assert result.exit_code == 2
    assert "--port" in result.output


@pytest.mark.parametrize(("given", "factors"), [("1", (1.0, 1.0)), ("2.5", (2.5, 2.5)), ("35:6", (35.0, 6.0))])
def test_prefill_and_decode_can_be_slowed_down_apart(given: str, factors: tuple[float, float]) -> None:
    assert _factors(given) == factors


@pytest.mark.parametrize("given", ["fast", "1:2:3", ":2"])
def test_a_throttle_that_is_no_factor_is_refused(given: str) -> None:
    result = CliRunner().invoke(app, ["engine", "--model", "no-such-model", "--throttle", given])
    assert result.exit_code == 2
    assert "--throttle" in result.output


@pytest.mark.parametrize("given", ["0.5", "2:0", "nan", "inf:1"])
def test_a_throttle_cannot_speed_up(given: str) -> None:
    result = CliRunner().invoke(app, ["engine", "--model", "no-such-model", "--throttle", given])
    assert result.exit_code != 0
    assert "throttle" in str(result.exception)
