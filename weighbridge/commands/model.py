"""`weighbridge model`: fetch and list the models of the embedded engine."""

from __future__ import annotations

import json as jsonlib
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from pathlib import Path

    from weighbridge.engine.model_store import CatalogueEntry


def register(app: typer.Typer) -> None:
    """Add the command group."""
    group = typer.Typer(help="Fetch and list models of the embedded engine.", no_args_is_help=True)
    group.command("fetch")(fetch)
    group.command("list")(list_models)
    app.add_typer(group, name="model")


def fetch(
    name: Annotated[str | None, typer.Argument(help="A name from `model list`; the default model without one.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Fetch a model into the cache; does nothing when it is there."""
    from weighbridge.core.errors import ModelError
    from weighbridge.engine import model_store

    entry = model_store.find_entry(name or model_store.DEFAULT_MODEL)
    if entry is None:
        known = ", ".join(entry.name for entry in model_store.CATALOGUE)
        raise ModelError(f"no model {name!r} in the catalogue; there are: {known}")
    path = _fetch_with_progress(entry, quiet=json)
    if json:
        typer.echo(jsonlib.dumps({"name": entry.name, "path": str(path), "bytes": entry.size_bytes}))
    else:
        typer.echo(f"{entry.name}: {path}")


def _fetch_with_progress(entry: CatalogueEntry, *, quiet: bool) -> Path:
    from rich.console import Console
    from rich.progress import Progress

    from weighbridge.engine import model_store

    console = Console(stderr=True)
    if quiet or model_store.is_cached(entry) or not console.is_terminal:
        return model_store.fetch_model(entry)
    with Progress(console=console, transient=True) as bar:
        task = bar.add_task(f"fetching {entry.about}", total=1.0)
        return model_store.fetch_model(entry, lambda done: bar.update(task, completed=done))


def list_models(json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> None:
    """Show the catalogue and what of it is here. Any path to a GGUF file works as a model as well."""
    from weighbridge.engine import model_store

    rows = [
        {
            "name": entry.name,
            "about": entry.about,
            "licence": entry.licence,
            "bytes": entry.size_bytes,
            "path": str(model_store.entry_path(entry)) if model_store.is_cached(entry) else None,
        }
        for entry in model_store.CATALOGUE
    ]
    if json:
        typer.echo(jsonlib.dumps(rows))
        return
    for row in rows:
        state = row["path"] or f"not fetched (`weighbridge model fetch {row['name']}`)"
        typer.echo(
            f"{row['name']}  {row['about']}, {row['licence']}, {int(str(row['bytes'])) // 1_000_000} MB  {state}"
        )
