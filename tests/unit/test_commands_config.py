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


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("{from: dns, host: h, port: 1, instance: {knd: vllm}}", "knd"),
        ("{from: dns, host: h, port: 1, instance: {kind: vlm}}", "unknown kind 'vlm'"),
        ("{from: consul, host: h}", "consul"),
        ("{host: h, port: 1}", "missing key `from`"),
    ],
)
def test_a_wrong_source_of_discovery_is_found_before_anything_runs(tmp_path: Path, source: str, words: str) -> None:
    file = tmp_path / "fleet.yaml"
    file.write_text(f"discovery:\n  - {source}\n")
    result = CliRunner().invoke(app, ["config", "check", str(file), "--json"])
    assert result.exit_code == 2
    assert words in result.output
    assert ":2: $.discovery[0]" in result.output


def test_discovery_alone_is_a_fleet(tmp_path: Path) -> None:
    file = tmp_path / "fleet.yaml"
    file.write_text("discovery: [{from: dns, host: h, port: 1, instance: {kind: vllm}}]\n")
    result = CliRunner().invoke(app, ["config", "check", str(file)])
    assert result.output.startswith("ok: what 1 source of discovery will find, policy")
