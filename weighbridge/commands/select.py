"""`weighbridge select`: train, measure and question the part that chooses which model answers."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, get_args

import typer

if TYPE_CHECKING:
    from weighbridge.selection.decision import Mode
    from weighbridge.selection.selector import Selector
    from weighbridge.selection.train import Dataset

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
PoolFile = Annotated[Path | None, typer.Option("--pool", help="Pool file (YAML); the packaged one by default.")]
Folder = Annotated[Path | None, typer.Option("--checkpoint", help="Checkpoint folder; the packaged one by default.")]
ModeName = Annotated[
    str, typer.Option("--mode", help="quality, balanced, cheap, fixed, max_cost_usd, min_quality, strong_share.")
]
Report = Annotated[Path | None, typer.Option("--report", help="Also write an HTML page with pictures.")]


def register(app: typer.Typer) -> None:
    """Add `select` and its sub-commands."""
    select = typer.Typer(help="Choose which model answers: train, evaluate, decide, explain.", no_args_is_help=True)
    for command in (train, evaluate, calibrate, decide, explain, bench, feedback):
        select.command({"evaluate": "eval"}.get(command.__name__, command.__name__))(command)
    app.add_typer(select, name="select")


def train(
    data: Annotated[Path, typer.Option("--data", help="CSV, JSON Lines or Parquet file; with --suite crb its folder.")],
    out: Annotated[Path, typer.Option("--out", help="Folder for the checkpoint.")],
    pool: Annotated[str, typer.Option("--pool-name", help="Name of the pool, kept in the manifest.")] = "",
    suite: Annotated[str, typer.Option("--suite", help="'crb': train on CodeRouterBench's training rows.")] = "",
    skip_bad: Annotated[bool, typer.Option("--skip-bad", help="Pass over bad rows instead of refusing.")] = False,
    encoder: Annotated[
        str,
        typer.Option("--encoder", help="hashed; or vectors, sentences beside it (extras of those names; see docs)."),
    ] = "hashed",
    seed: Annotated[int, typer.Option("--seed", help="Seed of every sample that is drawn.")] = 0,
    report: Report = None,
    as_json: Json = False,
) -> None:
    """Train a checkpoint. Columns of the data: prompt (or messages), model, score 0..1, and optionally family,
    input_tokens, output_tokens."""
    from weighbridge.commands import _selecting
    from weighbridge.core.errors import InputError
    from weighbridge.selection import checkpoint, suites
    from weighbridge.selection.data import read_dataset
    from weighbridge.selection.encoders import Kind
    from weighbridge.selection.train import TrainSettings
    from weighbridge.selection.train import train as fit

    kind: Kind | None = next((name for name in get_args(Kind) if name == encoder), None)
    if kind is None:
        raise InputError(f"--encoder: '{encoder}' is unknown; use {', '.join(get_args(Kind))}")
    bad: tuple[str, ...] = ()
    if suite == "crb":
        dataset: Dataset = suites.CodeRouterBench(data).dataset()
        pool = pool or suites.CRB_POOL
    elif suite:
        raise InputError(f"--suite: '{suite}' cannot be trained on; use crb, or leave it out and name a file")
    else:
        loaded = read_dataset(data, skip_bad=skip_bad)
        dataset, bad = loaded.dataset, loaded.bad
    with _selecting.progress_bar(as_json) as progress:
        made = fit(
            dataset,
            TrainSettings(seed=seed, encoder=kind),
            pool=pool or data.stem,
            created=datetime.now(UTC).date().isoformat(),
            progress=progress,
        )
    manifest = checkpoint.save(made, out)
    if report:
        _selecting.train_report(report, checkpoint.load(out), dataset)
    _selecting.show({"checkpoint": str(out), "id": manifest.id, "bad_rows": len(bad), "manifest": manifest}, as_json)


def evaluate(
    data: Annotated[Path, typer.Option("--data", help="Folder of the routing suites.")],
    suite: Annotated[str, typer.Option("--suite", help="crb, ood176 or mmlu.")] = "crb",
    mode: ModeName = "balanced",
    split: Annotated[
        str, typer.Option("--split", help="Of crb: val while choosing settings, test at the end.")
    ] = "test",
    pool: PoolFile = None,
    checkpoint: Folder = None,
    report: Report = None,
    as_json: Json = False,
) -> None:
    """Decide a suite's rows and compare with baselines (paired bootstrap, 2,000 resamples)."""
    from weighbridge.commands import _selecting
    from weighbridge.core.errors import InputError
    from weighbridge.selection import trial

    if suite not in ("crb", "ood176", "mmlu"):
        raise InputError(f"--suite: '{suite}' is unknown; use crb, ood176 or mmlu")
    with _selecting.progress_bar(as_json) as progress:
        if suite == "mmlu":
            shares = trial.weak_strong(data, progress)
            if report:
                _selecting.share_report(report, data, shares)
            _selecting.show(shares, as_json)
            return
        selector = _open(pool, checkpoint)
        if suite == "crb":
            result = trial.crb(data, selector, _mode(mode), split, progress)
        else:
            result = trial.ood176(data, selector, _mode(mode), progress)
        if report:
            _selecting.routed_report(report, data, selector, result, split, progress)
    _selecting.show(result, as_json)


def calibrate(
    data: Annotated[
        Path, typer.Option("--data", help="Scored rows that were not trained on (CSV, JSON Lines, Parquet).")
    ],
    out: Annotated[Path, typer.Option("--out", help="Folder for the recalibrated checkpoint.")],
    checkpoint: Folder = None,
    gate: Annotated[
        bool, typer.Option("--gate", help="Also set the unknown-family threshold from these rows.")
    ] = False,
    skip_bad: Annotated[bool, typer.Option("--skip-bad", help="Pass over bad rows instead of refusing.")] = False,
    as_json: Json = False,
) -> None:
    """Fit chances, and the thresholds of strong_share, to your own traffic; the weights stay."""
    from weighbridge.commands import _selecting
    from weighbridge.selection import builtin
    from weighbridge.selection import checkpoint as store
    from weighbridge.selection.data import read_dataset
    from weighbridge.selection.train import recalibrate

    loaded = read_dataset(data, skip_bad=skip_bad)
    made = recalibrate(store.load(checkpoint or builtin.DIRECTORY), loaded.dataset, gate=gate)
    manifest = store.save(made, out)
    _selecting.show(
        {"checkpoint": str(out), "id": manifest.id, "bad_rows": len(loaded.bad), "manifest": manifest}, as_json
    )


Text = Annotated[str, typer.Option("--text", help="The user's text.")]
Messages = Annotated[Path | None, typer.Option("--messages", help="JSON file: a messages list, or a chat request.")]
Live = Annotated[
    list[str] | None,
    typer.Option("--live", help="MODEL=TTFT_S[:TPOT_S]: what its pool would cost now; others count as down. Repeat."),
]


def decide(
    text: Text = "",
    messages: Messages = None,
    mode: ModeName = "",
    model: Annotated[str, typer.Option("--model", help="For mode fixed.")] = "",
    max_cost_usd: Annotated[float | None, typer.Option("--max-cost-usd", help="Refuse dearer answers.")] = None,
    min_quality: Annotated[
        float | None, typer.Option("--min-quality", help="Least chance, for mode min_quality.")
    ] = None,
    strong_share: Annotated[float | None, typer.Option("--strong-share", help="Share for mode strong_share.")] = None,
    live: Live = None,
    pool: PoolFile = None,
    checkpoint: Folder = None,
    feedback_log: Annotated[Path | None, typer.Option("--feedback", help="Feedback log to learn from first.")] = None,
    explained: Annotated[
        bool, typer.Option("--explain", help="Show every candidate and the words that count.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Decide one request and say why."""
    from weighbridge.commands import _selecting
    from weighbridge.selection import explain as explaining
    from weighbridge.selection.decision import Constraints
    from weighbridge.selection.settings import SelectionSettings

    said, tools = _selecting.read_messages(text, messages)
    selector = _open(pool, checkpoint)
    if feedback_log:
        _selecting.learn(selector, feedback_log)
    constraints = Constraints(
        model=model, max_cost_usd=max_cost_usd, min_quality=min_quality, strong_share=strong_share
    )
    chosen = _mode(mode) if mode else SelectionSettings().mode
    decision = selector.decide(said, tools, chosen, constraints, _selecting.read_live(live))
    if not explained:
        _selecting.show(decision, as_json) if as_json else typer.echo(f"{decision.model}  ({decision.reason})")
        return
    explanation = explaining.explain(selector, decision, said, tools)
    if as_json:
        _selecting.show(explanation, True)
    else:
        _selecting.print_decision(decision, [(w.word, w.score) for w in explanation.words], explanation.runner_up)


def explain(pool: PoolFile = None, checkpoint: Folder = None, as_json: Json = False) -> None:
    """Say what a checkpoint is: data, models, priors, held-out numbers, gate. A decision: `decide --explain`."""
    from weighbridge.commands import _selecting

    selector = _open(pool, checkpoint)
    made = selector.checkpoint
    models = [
        {
            "model": candidate.name,
            "learned_as": candidate.learned_as,
            "prior": round(float(made.prior[made.models.index(candidate.learned_as)]), 4),
            "unknown_family_prior": round(float(made.unknown_prior[made.models.index(candidate.learned_as)]), 4),
            "usd_per_1m": [candidate.input_usd_per_1m, candidate.output_usd_per_1m],
        }
        for candidate in selector.pool.models
    ]
    facts = {"provenance": selector.provenance, "fallback": selector.fallback, "models": models}
    _selecting.show(facts | {"manifest": made.manifest}, as_json)


def bench(
    iterations: Annotated[int, typer.Option("--iterations", min=20, help="Timed decisions per size.")] = 300,
    pool: PoolFile = None,
    checkpoint: Folder = None,
    size: Annotated[
        int | None, typer.Option("--size", help="One size in this process, not one process per size.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Time decisions: one process on one core per prompt size, the first decision of each reported apart."""
    import platform
    import time

    import msgspec

    from weighbridge.commands import _selecting
    from weighbridge.selection import timing

    if size is not None:
        begun = time.perf_counter()
        selector = _open(pool, checkpoint, gate=False)  # the dearer path: known families use the weights as well
        load_s = time.perf_counter() - begun
        timed = timing.time_decisions(selector, size, iterations, load_s, time.perf_counter, time.process_time)
        typer.echo(msgspec.json.encode(timed).decode())
        return
    with _selecting.progress_bar(as_json) as progress:
        sizes = []
        for done, tokens in enumerate(timing.SIZES):
            progress("sizes", done, len(timing.SIZES))
            sizes.append(_selecting.time_apart(tokens, iterations, pool, checkpoint))
    provenance = _open(pool, checkpoint).provenance
    facts = {"candidates": 8, "iterations": iterations, "warm_up": timing.WARM_UP, "device": "cpu, one core"}
    machine = f"{platform.machine()} {platform.system()}, Python {platform.python_version()}"
    if as_json:
        _selecting.show(facts | {"machine": machine, "provenance": provenance, "sizes": sizes}, True)
    else:
        _selecting.print_sizes(sizes, provenance.checkpoint)


def feedback(
    log: Annotated[Path, typer.Option("--log", help="Append-only feedback log (JSON Lines).")],
    model: Annotated[str, typer.Option("--model", help="The model that answered.")],
    score: Annotated[float, typer.Option("--score", help="0 (useless) to 1 (good).")],
    text: Text = "",
    messages: Messages = None,
    pool: PoolFile = None,
    checkpoint: Folder = None,
    as_json: Json = False,
) -> None:
    """Append one judgement. The text itself is not kept, only its sketch."""
    import time

    from weighbridge.commands import _selecting
    from weighbridge.selection import feedback as store

    said, tools = _selecting.read_messages(text, messages)
    selector = _open(pool, checkpoint)
    decision, sketch = selector.decide_with_sketch(said, tools)
    forecast = next((c.untaught for c in decision.candidates if c.model == model), 0.0)
    record = store.make_feedback(selector, sketch, model, score, forecast, time.time())
    with log.open("ab") as stream:
        stream.write(store.encode(record))
    facts = {"log": str(log), "model": model, "score": score, "forecast": forecast}
    _selecting.show(facts, as_json)


def _open(pool: Path | None, checkpoint: Path | None, *, gate: bool = True) -> Selector:
    from weighbridge.selection.opening import open_selector
    from weighbridge.selection.settings import SelectionSettings

    return open_selector(SelectionSettings(pool=str(pool or ""), checkpoint=str(checkpoint or ""), gate=gate))


def _mode(name: str) -> Mode:
    from weighbridge.core.errors import InputError
    from weighbridge.selection.decision import Mode

    try:
        return Mode(name)
    except ValueError:
        raise InputError(f"--mode: '{name}' is unknown; use {', '.join(Mode)}") from None
