"""Configuration files: every refusal names file, line, path and what was expected."""

from pathlib import Path

import msgspec
import pytest

from weighbridge.config.document import Document
from weighbridge.core.errors import ConfigError


class Part(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    name: str
    port: int = 0


class Whole(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    parts: list[Part] = []
    label: str = ""


def read(text: str, **environment: str) -> Whole:
    return Document(text, "fleet.yaml", environment).to(Whole)


def test_reads_and_substitutes() -> None:
    whole = read(
        "label: ${A}-${B:-b}-$${C}\nparts:\n  - name: x\n    port: 80\n",
        A="1",
    )
    assert whole == Whole(parts=[Part(name="x", port=80)], label="1-b-${C}")


def test_an_empty_file_is_all_defaults() -> None:
    assert read("# nothing\n") == Whole()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "parts:\n  - name: x\n    prot: 1\n",
            r"fleet.yaml:3: \$.parts\[0\]: unknown key `prot`; did you mean `port`\?",
        ),
        ("colour: red\n", r"fleet.yaml:1: \$: unknown key `colour`; known: label, parts"),
        ("parts:\n  - port: 1\n", r"fleet.yaml:2: \$.parts\[0\]: missing key `name`"),
        ("parts:\n  - name: x\n    port: many\n", r"fleet.yaml:3: \$.parts\[0\].port: expected `int`, got `str`"),
        ("parts: 3\n", r"fleet.yaml:1: \$.parts: expected `array`, got `int`"),
        ("label: a\nlabel: b\n", r"fleet.yaml:2: \$: key 'label' stands twice"),
        ("label: ${NO_SUCH}\n", r"fleet.yaml:1: \$.label: environment variable NO_SUCH is not set"),
        ("label: [\n", r"fleet.yaml:2:1: not valid YAML"),
        ("- 1\n", r"fleet.yaml:1: \$: expected `object`, got `array`"),
    ],
)
def test_refusals(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read(text)


def test_a_missing_file_is_one_clear_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nope.yaml: cannot be read: No such file"):
        Document.read(tmp_path / "nope.yaml", {})


def test_values_of_the_environment_never_become_yaml() -> None:
    assert read("label: ${A}\n", A="x\nparts: [1]").label == "x\nparts: [1]"
