"""What the `select` commands share: reading a request, progress, printing, pictures, one process per timing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from weighbridge.core.errors import InputError, ServiceError
from weighbridge.selection import calibration, evaluate, figures, suites, trial
from weighbridge.selection import feedback as store
from weighbridge.selection.checkpoint import Checkpoint
from weighbridge.selection.decision import Decision, LiveCost, Mode
from weighbridge.selection.selector import Selector
from weighbridge.selection.settings import SelectionSettings, Worth
from weighbridge.selection.timing import SizeTiming
from weighbridge.selection.train import Dataset

REPORT_WORTHS = (0.01, 0.02, 0.05, 0.1, 0.3, 1.0, 10.0)
TIMING_LIMIT_S = 120


@contextmanager
def progress_bar(quiet: bool) -> Iterator[Callable[[str, int, int], None]]:
    """A bar on standard error that names the stage; nothing where nobody looks."""
    console = Console(stderr=True)
    if quiet or not console.is_terminal:
        yield lambda stage, done, total: None
        return
    with Progress(console=console, transient=True) as bar:
        task = bar.add_task("starting", total=None)
        yield lambda stage, done, total: bar.update(task, description=stage, completed=done, total=total)


def show(value: object, as_json: bool) -> None:
    """One JSON object, or the same facts as lines of text."""
    if as_json:
        typer.echo(msgspec.json.encode(value).decode())
        return
    for line in _lines(msgspec.to_builtins(value), ""):
        typer.echo(line)


def _lines(value: Any, indent: str) -> Iterator[str]:
    if isinstance(value, Mapping):
        for name, inner in value.items():
            if (
                isinstance(inner, Mapping)
                and inner
                and all(not isinstance(v, Mapping | list | tuple) for v in inner.values())
            ):
                yield f"{indent}{name}: " + ", ".join(f"{k} {v}" for k, v in inner.items())
            elif isinstance(inner, Mapping | list | tuple) and inner:
                yield f"{indent}{name}:"
                yield from _lines(inner, indent + "  ")
            else:
                yield f"{indent}{name}: {inner}"
    elif isinstance(value, list | tuple):
        for inner in value:
            if isinstance(inner, Mapping):
                yield f"{indent}- " + ", ".join(f"{k} {v}" for k, v in inner.items())
            else:
                yield f"{indent}- {inner}"


def read_messages(text: str, path: Path | None) -> tuple[list[object], list[object]]:
    """Messages and tools of one request, from a text or a JSON file (`-`: standard input)."""
    if bool(text) == (path is not None):
        raise InputError("give exactly one of --text and --messages")
    if path is None:
        return [{"role": "user", "content": text}], []
    try:
        raw = sys.stdin.buffer.read() if str(path) == "-" else path.read_bytes()
        value = json.loads(raw)
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: cannot be read as JSON: {error}") from None
    if isinstance(value, dict):
        messages, tools = value.get("messages"), value.get("tools") or []
    else:
        messages, tools = value, []
    if not isinstance(messages, list) or not isinstance(tools, list):
        raise InputError(f"{path}: needs a list of messages, or an object with `messages` and perhaps `tools`")
    return messages, tools


def read_live(entries: Sequence[str] | None) -> dict[str, LiveCost] | None:
    """`MODEL=TTFT_S[:TPOT_S]` entries; None when there are none."""
    if not entries:
        return None
    out: dict[str, LiveCost] = {}
    for entry in entries:
        name, _, numbers = entry.rpartition("=")
        ttft, _, tpot = numbers.partition(":")
        try:
            out[name] = LiveCost(ttft_s=float(ttft), tpot_s=float(tpot or 0.0))
        except ValueError:
            raise InputError(f"--live: '{entry}' is not MODEL=TTFT_S or MODEL=TTFT_S:TPOT_S") from None
    return out


def learn(selector: Selector, path: Path) -> int:
    """Teach the selector a feedback log."""
    try:
        with path.open("rb") as stream:
            return store.replay(selector, store.read(stream, str(path)))
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from None


def time_apart(tokens: int, iterations: int, pool: Path | None, checkpoint: Path | None) -> SizeTiming:
    """One size in a process of its own that does its arithmetic on one core, so that its first decision is cold."""
    command = [sys.executable, "-m", "weighbridge.cli", "select", "bench", "--size", str(tokens)]
    command += ["--iterations", str(iterations)]
    for flag, path in (("--pool", pool), ("--checkpoint", checkpoint)):
        command += [flag, str(path)] if path else []
    one_core = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    try:
        done = subprocess.run(  # noqa: S603 - our own command
            command, env=os.environ | one_core, capture_output=True, timeout=TIMING_LIMIT_S, check=True
        )
    except subprocess.CalledProcessError as error:
        raise ServiceError(f"timing {tokens} tokens failed: {error.stderr.decode(errors='replace').strip()}") from None
    except subprocess.TimeoutExpired:
        raise ServiceError(f"timing {tokens} tokens took more than {TIMING_LIMIT_S} s") from None
    return msgspec.json.decode(done.stdout, type=SizeTiming)


def print_sizes(sizes: Sequence[SizeTiming], checkpoint: str) -> None:
    """The columns of the published router's table, CPU tail and load beside them."""
    table = Table(title=f"checkpoint {checkpoint}, one core, milliseconds")
    for column in ("tokens", "chars", "p50 warm", "p95 warm", "min-max", "CPU p99", "first call cold", "load s"):
        table.add_column(column, justify="right")
    for t in sizes:
        span = f"{t.min_ms:.2f}-{t.max_ms:.2f}"
        cells = (
            f"{t.p50_ms:.3f}",
            f"{t.p95_ms:.3f}",
            span,
            f"{t.cpu_p99_ms:.3f}",
            f"{t.cold_ms:.2f}",
            f"{t.load_s:.3f}",
        )
        table.add_row(f"{t.tokens:,}", f"{t.chars:,}", *cells)
    Console().print(table)


def print_decision(decision: Decision, words: Sequence[tuple[str, float]], runner_up: str) -> None:
    """The candidates as a table, best first, and why."""
    console = Console()
    table = Table(title=f"{decision.model}: {decision.reason}", title_justify="left")
    for column in ("model", "chance", "cost USD", "in", "out", "seconds", "utility USD", "excluded because"):
        table.add_column(column, justify="left" if column in ("model", "excluded because") else "right")
    for c in sorted(decision.candidates, key=lambda c: -(c.utility_usd if c.utility_usd is not None else -1e9)):
        table.add_row(
            c.model,
            f"{c.quality:.3f}",
            f"{c.cost_usd:.6f}",
            str(c.input_tokens),
            str(c.output_tokens),
            "" if c.latency_s is None else f"{c.latency_s:.2f}",
            "" if c.utility_usd is None else f"{c.utility_usd:.5f}",
            c.excluded or "",
        )
    console.print(table)
    family = "known" if decision.known else "unknown"
    console.print(f"task family {family}: familiarity {decision.familiarity:.3f}, threshold {decision.threshold:.3f}")
    if words:
        listed = ", ".join(f"{word} {score:+.4f}" for word, score in words)
        console.print(f"words for {decision.model} over {runner_up}: {listed}", markup=False)
    made = decision.provenance
    console.print(
        f"checkpoint {made.checkpoint}, encoder {made.encoder}, pool {made.pool} {made.pool_hash}", markup=False
    )


def train_report(path: Path, checkpoint: Checkpoint, dataset: Dataset) -> None:
    """Held-out numbers and the reliability of all training rows as the final weights see them."""
    manifest = checkpoint.manifest
    chances, labels = _chances(checkpoint, dataset)
    picture = figures.reliability(chances, labels, "chance against outcome, rows seen in training")
    write_page(path, f"Checkpoint {manifest.id}", msgspec.to_builtins(manifest), [("Reliability", picture)])


def _chances(checkpoint: Checkpoint, dataset: Dataset) -> tuple[figures.Matrix, figures.Matrix]:
    from weighbridge.selection.checkpoint import encoder_of
    from weighbridge.selection.text import plain_text

    encoder, count = encoder_of(checkpoint.manifest), len(checkpoint.models)
    encoded = [encoder.encode(plain_text(text).text) for text in dataset.texts]
    raw = np.stack([f.values @ checkpoint.weights[f.buckets, :count] for f in encoded]) + checkpoint.prior
    order = [dataset.models.index(model) for model in checkpoint.models]
    return calibration.apply_curves(checkpoint.curves.astype(float), raw.astype(float)), dataset.scores[:, order]


def routed_report(
    path: Path,
    data: Path,
    selector: Selector,
    result: trial.RoutedReport,
    split: str,
    progress: Callable[[str, int, int], None],
) -> None:
    """Score against cost over what a good answer is worth, and reliability on these rows."""
    suite = suites.CodeRouterBench(data)
    cases = suite.cases(split) if result.suite == "crb" else suite.unknown_families()
    points = []
    for step, worth in enumerate(REPORT_WORTHS):
        progress("frontier", step, len(REPORT_WORTHS))
        settings = SelectionSettings(worth={"balanced": Worth(success_usd=worth, second_usd=0.0)})
        routed = evaluate.route(Selector(selector.checkpoint, selector.pool, settings), cases, Mode.BALANCED)
        points.append((f"${worth:g}", evaluate.result(cases, routed.chosen)))
    chances, labels = _chances(selector.checkpoint, suites.as_dataset(cases))
    pictures = [
        (
            "Score against cost; the labels on our line say what a good answer is worth",
            figures.score_against_cost(points, result.baselines, f"{result.suite} {result.split}, {result.rows} tasks"),
        ),
        ("Predicted chance against outcome", figures.reliability(chances, labels, "reliability, all eight models")),
    ]
    facts = msgspec.to_builtins(result)
    write_page(path, f"{result.suite}: {result.avg_score:.2f} points at ${result.cost_usd:.2f}", facts, pictures)


def share_report(path: Path, data: Path, result: trial.ShareReport) -> None:
    """The share curve of the first seed beside the true label's."""
    curves = trial.share_curves(data, result.seeds[0].seed)
    picture = figures.share_curves(curves, f"MMLU, {result.labels} labels, seed {result.seeds[0].seed}")
    title = f"mmlu: APGR {result.apgr:.3f}, CPT50 {result.cpt50:.1f} %"
    write_page(path, title, msgspec.to_builtins(result), [("Lead recovered against strong calls", picture)])


def write_page(path: Path, title: str, facts: Mapping[str, object], pictures: Sequence[tuple[str, bytes]]) -> None:
    try:
        path.write_text(figures.page(title, facts, pictures), encoding="utf-8")
    except OSError as error:
        raise InputError(f"{path}: cannot be written: {error.strerror}") from None
