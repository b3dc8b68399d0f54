"""`weighbridge model`: fetch and list the models of the embedded engine, and make them faster."""

from __future__ import annotations

import json as jsonlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from pathlib import Path

    from weighbridge.engine.libllama import Library
    from weighbridge.engine.model_comparison import Agreement, Speed
    from weighbridge.engine.model_store import CatalogueEntry


def register(app: typer.Typer) -> None:
    """Add the command group."""
    group = typer.Typer(help="Models of the embedded engine: fetch, list, make faster.", no_args_is_help=True)
    group.command("fetch")(fetch)
    group.command("list")(list_models)
    group.command("optimise")(optimise)
    group.command("library")(library)
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
    from weighbridge.engine import model_store

    with _bar(f"fetching {entry.about}", quiet=quiet or model_store.is_cached(entry)) as told:
        return model_store.fetch_model(entry, told)


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


def optimise(
    name: Annotated[str | None, typer.Argument(help="Catalogue name or GGUF path; the default model without.")] = None,
    kind: Annotated[str, typer.Option(help="q8_0: almost no loss; iq4_nl, q4_0: faster, with a loss.")] = "q8_0",
    library: Annotated[str | None, typer.Option(help="Another libllama: `dispatch`, or a path.")] = None,
    threads: Annotated[int, typer.Option(min=0, help="CPU threads to measure with; 0 takes all cores.")] = 0,
    measure: Annotated[bool, typer.Option(help="Compare quality and speed with the source.")] = True,
    json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Write a copy of a model in a format with faster CPU kernels, and show what it gains and loses.

    The copy is used only where it is asked for by name, MODEL-KIND.
    """
    import dataclasses
    import time

    from weighbridge.core.errors import ModelError
    from weighbridge.engine import model_store
    from weighbridge.engine.instance import available_cores
    from weighbridge.engine.libllama import Library
    from weighbridge.engine.library_store import resolve_library
    from weighbridge.engine.requantise import KINDS, requantise

    if kind not in KINDS:
        raise ModelError(f"--kind must be one of {', '.join(KINDS)}, not {kind!r}")
    source, model_id = model_store.resolve_model(name or model_store.DEFAULT_MODEL)
    loaded = Library(resolve_library(library))
    target = model_store.rewritten_path(model_id, kind)
    target.parent.mkdir(parents=True, exist_ok=True)
    begun = time.monotonic()
    with _bar(f"rewriting {model_id} as {kind}", quiet=json) as told:
        tensors = requantise(loaded, source, target, kind, told)
    result: dict[str, Any] = {
        "name": target.stem,
        "path": str(target),
        "bytes": target.stat().st_size,
        "tensors": tensors,
        "seconds": time.monotonic() - begun,
    }
    compared = None
    if measure:
        with _bar("comparing with the source", quiet=json) as told:
            compared = _compare(loaded, source, target, threads or available_cores(), told)
        agreement, before, after = compared
        result["agreement"] = dataclasses.asdict(agreement)
        result["source_speed"], result["speed"] = dataclasses.asdict(before), dataclasses.asdict(after)
    if json:
        typer.echo(jsonlib.dumps(result))
        return
    typer.echo(
        f"{target.stem}: {target} ({target.stat().st_size // 1_000_000} MB, {tensors} tensors in "
        f"{result['seconds']:.0f} s)"
    )
    if compared is not None:
        _show(*compared)
    typer.echo(f"Use it with: weighbridge engine --model {target.stem}")


@contextmanager
def _bar(text: str, *, quiet: bool) -> Iterator[Callable[[float], None] | None]:
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    if quiet or not console.is_terminal:
        yield None
        return
    with Progress(console=console, transient=True) as bar:
        task = bar.add_task(text, total=1.0)
        yield lambda done: bar.update(task, completed=done)


def _compare(
    library: Library, source: Path, target: Path, threads: int, progress: Callable[[float], None] | None
) -> tuple[Agreement, Speed, Speed]:
    from weighbridge.engine.model import LlamaModel, ModelOptions
    from weighbridge.engine.model_comparison import compare, measure_speed, reading_text

    first = LlamaModel(library, ModelOptions(source))
    second = LlamaModel(library, ModelOptions(target))
    try:
        before, after = measure_speed(first, threads), measure_speed(second, threads)
        return compare(first, second, reading_text(), threads=threads, progress=progress), before, after
    finally:
        first.close()
        second.close()


def _show(agreement: Agreement, before: Speed, after: Speed) -> None:
    rows = (
        ("prefill tokens/s", f"{before.prefill:.0f}", f"{after.prefill:.0f}", after.prefill / before.prefill),
        ("decode tokens/s, 8 at once", f"{before.decode:.0f}", f"{after.decode:.0f}", after.decode / before.decode),
        (
            "perplexity",
            f"{agreement.source_perplexity:.2f}",
            f"{agreement.perplexity:.2f}",
            agreement.perplexity / agreement.source_perplexity,
        ),
    )
    typer.echo(f"  {'':28}{'source':>10}{'copy':>10}{'ratio':>8}")
    for label, source, copy, ratio in rows:
        typer.echo(f"  {label:28}{source:>10}{copy:>10}{ratio:>8.2f}")
    typer.echo(
        f"  same most likely token at {agreement.same_top:.1%} of {agreement.tokens} positions, "
        f"mean KL divergence {agreement.kl:.4f} nats"
    )


def library(json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False) -> None:
    """Fetch the libllama that picks its CPU kernels at run time (AVX-512, VNNI, AMX), with npm."""
    from weighbridge.engine.library_store import DISPATCH, fetch_library

    path = fetch_library()
    if json:
        typer.echo(jsonlib.dumps({"name": DISPATCH, "path": str(path)}))
    else:
        typer.echo(f"{path}\nUse it with: weighbridge engine --library {DISPATCH}")
