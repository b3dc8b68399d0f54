"""Every example of the README runs: against a real gateway where it needs one."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from tests.support.served import ROOT, Served
from weighbridge.config.settings import load_settings
from weighbridge.core.decision import Decision
from weighbridge.core.errors import ConfigError

TEXT = (ROOT / "README.md").read_text(encoding="utf-8")


def example(name: str) -> str:
    found = re.search(rf"<!-- example: {name} -->\n```\w+\n(.*?)```", TEXT, re.DOTALL)
    assert found, f"README has no example {name!r}"
    return found.group(1)


@pytest.mark.engine
def test_curl(served: Served) -> None:
    command = example("curl").replace("http://127.0.0.1:8080", served.url)
    assert served.url in command
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, timeout=60)
    answer = json.loads(done.stdout)
    assert answer["choices"][0]["message"]["content"]
    assert 0 < answer["usage"]["completion_tokens"] <= 32


@pytest.mark.engine
def test_openai_client(served: Served) -> None:
    program = example("openai").replace("http://127.0.0.1:8080", served.url)
    assert served.url in program
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


def test_config(tmp_path: Path) -> None:
    file = tmp_path / "fleet.yaml"
    file.write_text(example("config"))
    settings = load_settings(file, {})
    assert [(i.name, i.kind) for i in settings.instances] == [("left", "vllm"), ("right", "vllm")]
    file.write_text(example("config").replace("kind", "knid", 1))
    with pytest.raises(ConfigError, match=r"fleet.yaml:6: \$.instances\[0\]: unknown key `knid`"):
        load_settings(file, {})


def test_the_decision_record_is_one() -> None:
    record = json.loads(example("decision"))
    decision = msgspec.convert(record, Decision)
    scored = [c for c in decision.candidates if c.excluded is None]
    for candidate in scored:
        assert candidate.score == pytest.approx(sum(candidate.terms.values()), abs=2e-3)
    assert decision.chosen == min(scored, key=lambda c: c.score or 0.0).instance
    assert set(record) <= set(Decision.__struct_fields__)


@pytest.mark.parametrize("command", sorted(set(re.findall(r"^\| `weighbridge ([a-z ]+)", TEXT, re.MULTILINE))))
def test_every_command_of_the_table_exists(command: str) -> None:
    words = command.split()[:1]
    done = subprocess.run(
        [sys.executable, "-m", "weighbridge.cli", *words, "--help"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
