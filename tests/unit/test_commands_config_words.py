"""Mistakes in a configuration file that its types alone do not show, and what `config check` says of them."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from weighbridge.cli import app

KEY = "instances: [{name: a, kind: vllm, url: 'http://h:1'}]\nkeys:\n  - {sha256: sk-1, tenant: t}\n"
PREFILL = "  - {name: p, kind: %s, url: 'http://h:1', role: prefill%s}\n"
DECODE = "  - {name: d, kind: %s, url: 'http://h:2', role: decode%s}\n"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (KEY, ":3: $.keys[0].sha256: expected 64 hexadecimal digits in small letters, as `printf"),
        (
            "instances:\n  - {name: a b, kind: vllm, url: 'http://h:1'}\n",
            ":2: $.instances[0].name: expected a name: at",
        ),
        ("instances:\n" + PREFILL % ("llamacpp", ""), ":2: $.instances[0].role: kind 'llamacpp' hands no KV over"),
        (
            "instances:\n" + PREFILL % ("sglang", ", transfer: mooncake"),
            ":2: $.instances[0].transfer: kind 'sglang' does not speak `mooncake`; it speaks bootstrap",
        ),
        (
            "instances:\n" + PREFILL % ("vllm", "") + DECODE % ("sglang", ""),
            ":3: $.instances[1].transfer: p (vllm) hands KV over by `two_step` and d (sglang) by `bootstrap`",
        ),
        (
            "router: {binding: late}\ninstances:\n" + PREFILL % ("sglang", "") + DECODE % ("sglang", ""),
            ":1: $.router.binding: p speaks `bootstrap`, whose legs start at once; use `binding: auto`",
        ),
    ],
)
def test_what_is_said(tmp_path: Path, text: str, words: str) -> None:
    file = tmp_path / "fleet.yaml"
    file.write_text(text)
    result = CliRunner().invoke(app, ["config", "check", str(file)])
    assert result.exit_code != 0
    assert f"{file}{words}" in str(result.exception)


def test_a_fleet_of_pairs_is_fine(tmp_path: Path) -> None:
    file = tmp_path / "fleet.yaml"
    file.write_text("instances:\n" + PREFILL % ("vllm", ", api_key_env: K, profile: x.json") + DECODE % ("vllm", ""))
    assert CliRunner().invoke(app, ["config", "check", str(file)]).output.startswith("ok: 2 instances (p, d)")
