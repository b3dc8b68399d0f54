"""`config` takes its file as an argument or, as other commands do, with --config."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from weighbridge.cli import app

FLEET = "instances: [{name: one, url: 'http://127.0.0.1:9000'}]\n"


@pytest.mark.parametrize("command", ["check", "show"])
@pytest.mark.parametrize("flag", [[], ["--config"], ["-c"]])
def test_the_file_may_be_an_argument_or_an_option(tmp_path: Path, command: str, flag: list[str]) -> None:
    file = tmp_path / "fleet.yaml"
    file.write_text(FLEET)
    result = CliRunner().invoke(app, ["config", command, *flag, str(file)])
    assert result.exit_code == 0, result.output
    assert "one" in result.output


def test_two_different_files_are_refused(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["config", "show", str(tmp_path / "a"), "-c", str(tmp_path / "b")])
    assert result.exit_code == 2
    assert "once" in result.output
