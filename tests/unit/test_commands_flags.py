"""Groups of flags become one command: defaults, repeats, required ones, names, help."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

import typer
from typer.testing import CliRunner

from weighbridge.commands._flags import takes


@dataclass(frozen=True)
class Who:
    name: Annotated[str, typer.Option(help="Whom to greet.")]
    titles: Annotated[list[str], typer.Option("--title")] = field(default_factory=list)


@dataclass(frozen=True)
class How:
    loud: Annotated[bool, typer.Option("--loud")] = False
    times: int = 1


def test_groups_become_flags_and_come_back_as_groups() -> None:
    seen: list[tuple[Who, How, str]] = []

    @takes(Who, How)
    def greet(context: typer.Context, who: Who, how: How) -> None:
        """Say hello."""
        seen.append((who, how, str(context.info_name)))

    app = typer.Typer()
    app.command("greet")(greet)
    runner = CliRunner()
    assert runner.invoke(app, ["--name", "Ada", "--title", "Dr", "--title", "Lady", "--times", "2"]).exit_code == 0
    assert seen == [(Who("Ada", ["Dr", "Lady"]), How(False, 2), "greet")]
    assert runner.invoke(app, ["--name", "Ada", "--loud"]).exit_code == 0
    assert seen[1][:2] == (Who("Ada", []), How(True, 1))
    assert runner.invoke(app, []).exit_code == 2
    text = runner.invoke(app, ["--help"]).output
    assert "Say hello." in text and "Whom to greet." in text
