"""The engine command refuses what it cannot do before it loads anything."""

import pytest
from typer.testing import CliRunner

from weighbridge.cli import app


@pytest.mark.parametrize("port", ["65536", "99999", "-1"])
def test_a_port_that_does_not_exist_is_refused(port: str) -> None:
    result = CliRunner().invoke(app, ["engine", "--model", "no-such-model", "--port", port])
    assert result.exit_code == 2
    assert "--port" in result.output
