"""`weighbridge config check|show|schema`: the configuration file before anything runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

FileArgument = Annotated[Path | None, typer.Argument(help="YAML file; without one, the default fleet.")]
FileOption = Annotated[Path | None, typer.Option("--config", "-c", help="The same, as other commands take it.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


def register(app: typer.Typer) -> None:
    """Add the group `config`."""
    group = typer.Typer(help="Check, show and describe the configuration file.", no_args_is_help=True)
    group.command("check")(check)
    group.command("show")(show)
    group.command("schema")(schema)
    app.add_typer(group, name="config")


def check(file: FileArgument = None, config: FileOption = None, as_json: JsonOption = False) -> None:
    """Say whether the file can be used; exit status 2 and one line with file, line and place if not."""
    import os

    import msgspec

    from weighbridge.config.settings import load_settings
    from weighbridge.core.errors import ConfigError

    try:
        settings = load_settings(_one(file, config), os.environ)
    except ConfigError as error:
        if not as_json:
            raise
        typer.echo(msgspec.json.encode({"ok": False, "error": str(error)}).decode())
        raise typer.Exit(2) from None
    names = [i.name for i in settings.instances] + [e.name for e in settings.engines]
    if as_json:
        typer.echo(msgspec.json.encode({"ok": True, "instances": names, "policy": settings.router.policy}).decode())
    else:
        listed = f"{_count(len(names), 'instance')} ({', '.join(names)})" if names else ""
        found = f"what {_count(len(settings.discovery), 'source')} of discovery will find" if settings.discovery else ""
        what = " and ".join(part for part in (listed, found) if part)
        typer.echo(f"ok: {what}, policy {settings.router.policy}")


def show(file: FileArgument = None, config: FileOption = None, as_json: JsonOption = False) -> None:
    """Print the effective settings, defaults filled in. Keys are named by their environment variables, never shown."""
    import os

    import msgspec

    from weighbridge.config.settings import load_settings

    settings = load_settings(_one(file, config), os.environ)
    if as_json:
        typer.echo(msgspec.json.encode(settings).decode())
    else:
        typer.echo(msgspec.yaml.encode(settings).decode(), nl=False)


def schema() -> None:
    """Print the JSON Schema of the file, for editors."""
    import msgspec

    from weighbridge.config.settings import schema as make

    typer.echo(msgspec.json.format(msgspec.json.encode(make()), indent=2).decode())


def _count(number: int, noun: str) -> str:
    return f"1 {noun}" if number == 1 else f"{number} {noun}s"


def _one(argument: Path | None, option: Path | None) -> Path | None:
    if argument is not None and option is not None and argument != option:
        raise typer.BadParameter("name the file once, as an argument or with --config")
    return argument or option
