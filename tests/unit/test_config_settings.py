"""The configuration file's meaning: refusals with file, line and place, and the fleet without a file."""

from pathlib import Path

import pytest

from weighbridge.config.settings import data_directory, default_settings, load_settings, schema
from weighbridge.core.errors import ConfigError

GOOD = "instances:\n  - name: a\n    url: http://127.0.0.1:8001\n"


def load(tmp_path: Path, text: str) -> object:
    file = tmp_path / "fleet.yaml"
    file.write_text(text)
    return load_settings(file, {})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r"no instance: name at least one under `instances` or `engines`"),
        (GOOD.replace("http://127.0.0.1:8001", "127.0.0.1:8001"), r"yaml:3: \$.instances\[0\].url: .* is not a URL"),
        (GOOD.replace("8001", "80o1"), r"yaml:3: \$.instances\[0\].url: not a URL .*expected http://HOST:PORT"),
        (GOOD.replace("//", "//key@"), r"yaml:3: .*a key never stands in a URL; use `api_key_env`"),
        (GOOD + "  - name: a\n    url: http://127.0.0.1:8002\n", r"yaml:4: \$.instances\[1\].name: .* is taken"),
        (GOOD + "    kind: vlm\n", r"yaml:4: \$.instances\[0\].kind: unknown kind 'vlm'; known: .*vllm"),
        (GOOD + "router: {policy: nope}\n", r"yaml:4: \$.router.policy: unknown policy 'nope'; known: "),
        (GOOD + "default_tier: gold\n", r"yaml:4: \$.default_tier: tier 'gold' is not defined; defined: batch"),
        (GOOD + "prot: 8080\n", r"yaml:4: \$: unknown key `prot`"),
        (GOOD + "port: eighty\n", r"yaml:4: \$.port: expected `int`, got `str`"),
        (GOOD + "port: 65536\n", r"yaml:4: \$.port: expected `int` <= 65535"),
        (GOOD + "engines: [{name: b, slots: 0}]\n", r"slots: must be at least 1, not 0"),
    ],
)
def test_refusals(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(tmp_path, text)


def test_without_a_file_two_embedded_instances_share_the_cores() -> None:
    settings = default_settings()
    assert [e.name for e in settings.engines] == ["cpu-0", "cpu-1"]
    assert settings.host == settings.admin_host == "127.0.0.1"


def test_the_data_directory_is_flag_then_file_then_xdg() -> None:
    settings = default_settings()
    assert data_directory(settings, Path("/x"), {}) == Path("/x")
    assert data_directory(settings, None, {"XDG_DATA_HOME": "/y"}) == Path("/y/weighbridge")


def test_the_schema_describes_every_section() -> None:
    text = str(schema())
    for key in ("engines", "instances", "router", "keys", "health"):
        assert f"'{key}'" in text
