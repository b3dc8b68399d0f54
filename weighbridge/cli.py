"""The `weighbridge` command: collects the sub-commands and turns our errors into one clear line.

Each module of `weighbridge.commands` exposes `register(app)`; there is nothing else to do to add one.
"""

from __future__ import annotations

import importlib
import os
import pkgutil
import sys
from typing import Annotated

import typer

import weighbridge
from weighbridge import commands
from weighbridge.core.errors import WeighbridgeError

app = typer.Typer(
    name="weighbridge",
    help="Calibrate, then route: an OpenAI-compatible gateway that forecasts what each request costs on each instance.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"weighbridge {weighbridge.__version__}")
        raise typer.Exit()


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Calibrate, then route."""


for _module in sorted(pkgutil.iter_modules(commands.__path__), key=lambda m: m.name):
    if _module.name.startswith("_"):
        continue
    importlib.import_module(f"weighbridge.commands.{_module.name}").register(app)


def main() -> None:
    """Run the command line; a Weighbridge error becomes one line on standard error and its exit code."""
    try:
        app()
    except WeighbridgeError as error:
        print(f"weighbridge: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except BrokenPipeError:
        # the reader went away (`| head`): that is no error, but Python would print one at shutdown
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)


if __name__ == "__main__":
    main()
