"""What `doctor` says to do can be done as it is said."""

import shlex
from pathlib import Path

import msgspec
import pytest
from typer.testing import CliRunner

from weighbridge.cli import app
from weighbridge.core.errors import WeighbridgeError

FLEET = """
instances:
  - name: left
    kind: vllm
    url: http://127.0.0.1:9
    {profile}
"""


def doctor(folder: Path, profile: str, *flags: str) -> str:
    """The output of `doctor` about an engine that is not there."""
    file = folder / "my fleet.yaml"
    file.write_text(FLEET.format(profile=profile))
    command = ["doctor", "--config", str(file), "--data-dir", str(folder / "data"), "--offline", *flags]
    return CliRunner().invoke(app, command, env={"COLUMNS": "60"}).output


@pytest.mark.parametrize(("profile", "level"), [("", "warn"), ("profile: gone.json", "fail")])
def test_the_command_that_measures_finds_the_engine(tmp_path: Path, profile: str, level: str) -> None:
    findings = msgspec.json.decode(doctor(tmp_path, profile, "--json"))["findings"]
    (found,) = [f for f in findings if f["subject"] == "left"]
    assert found["level"] == level
    command, _, rest = found["remedy"].partition(", then ")
    assert rest == ("" if profile else "`profile: left.json` in its entry there")
    program, *words = shlex.split(command)
    assert program == "weighbridge"
    result = CliRunner().invoke(app, words)
    assert isinstance(result.exception, WeighbridgeError)
    assert "127.0.0.1:9: cannot connect" in str(result.exception)


def test_a_command_stands_on_one_line(tmp_path: Path) -> None:
    (line,) = [n for n in doctor(tmp_path, "").splitlines() if "weighbridge calibrate" in n]
    assert line.startswith("      -> weighbridge calibrate left --config ")
    assert line.endswith(" in its entry there")


def test_the_name_of_an_instance_is_no_address() -> None:
    result = CliRunner().invoke(app, ["calibrate", "left"])
    assert "--config FILE" in str(result.exception)
