"""The suites as `select eval` runs them: train or take a checkpoint, decide the test rows, set beside baselines."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from weighbridge.selection import calibration, evaluate, ridge, train
from weighbridge.selection.decision import Mode, Provenance
from weighbridge.selection.evaluate import Paired, Result
from weighbridge.selection.features import Encoder, Features, HashedNgrams
from weighbridge.selection.rows import Rows
from weighbridge.selection.selector import Selector
from weighbridge.selection.suites import Cases, CodeRouterBench, gsm8k, mmlu
from weighbridge.selection.text import plain_text

Indices = NDArray[np.int64]
Progress = Callable[[str, int, int], None]
MMLU_LABELS = 1500
MMLU_SEEDS = (0, 1, 2)
SUBJECT_FOLDS = 5


class RoutedReport(msgspec.Struct, frozen=True, kw_only=True):
    """A suite with real costs. `gated` counts cases that went to the fallback as unknown families."""

    suite: str
    split: str
    rows: int
    mode: str
    avg_score: float
    cost_usd: float
    gated: int
    choices: dict[str, int]
    baselines: dict[str, Result]
    paired: dict[str, Paired]
    provenance: Provenance


class SeedRun(msgspec.Struct, frozen=True, kw_only=True):
    """One training draw: the share curve's two numbers on all unseen rows."""

    seed: int
    apgr: float
    cpt50: float
    penalty: float


class ShareReport(msgspec.Struct, frozen=True, kw_only=True):
    """The weak/strong suite; `apgr` and `cpt50` are means over seeds, `*_sd` their spread."""

    suite: str
    labels: int
    rows: int
    apgr: float
    cpt50: float
    apgr_sd: float
    cpt50_sd: float
    seeds: tuple[SeedRun, ...]
    unseen_subjects: tuple[SeedRun, ...]
    unseen_apgr: float
    unseen_cpt50: float
    gsm8k: tuple[SeedRun, ...]
    baselines: dict[str, dict[str, float]]
    encoder: str


def crb(directory: Path, selector: Selector, mode: Mode, split: str, progress: Progress) -> RoutedReport:
    """CodeRouterBench's prompted tasks of one split."""
    suite = CodeRouterBench(directory)
    cases = suite.cases(split)
    training = suite.dataset()
    output = np.array([m.output_usd_per_1m for m in suite.pool.models]) / 1e6
    given = np.array([m.input_usd_per_1m for m in suite.pool.models]) / 1e6
    costs = training.output_tokens * output + training.input_tokens * given
    label = evaluate.by_true_label(cases, training, selector.settings.worth_of(mode).success_usd, costs)
    best = cases.models[int(training.scores.mean(0).argmax())]
    others = {f"best_single ({best})": evaluate.single(cases, best), "true_label": label}
    if split == "test":
        others |= {f"published {name}": chosen for name, chosen in suite.published(cases).items()}
    return _routed("crb", split, selector, mode, cases, others, progress)


def ood176(directory: Path, selector: Selector, mode: Mode, progress: Progress) -> RoutedReport:
    """The 176 agentic tasks of unknown families. `best_single` is the best in hindsight, `fallback` ours."""
    suite = CodeRouterBench(directory)
    cases = suite.unknown_families()
    best = cases.models[int(cases.scores.mean(0).argmax())]
    ungated = Selector(
        selector.checkpoint, selector.pool, msgspec.structs.replace(selector.settings, gate=False), "checkpoint"
    )
    training = suite.dataset()
    first = cases.models[int(training.scores.mean(0).argmax())]
    others = {
        f"best_single ({best}, in hindsight)": evaluate.single(cases, best),
        f"best_single ({first}, by training)": evaluate.single(cases, first),
        "without the gate": evaluate.route(ungated, cases, mode).chosen,
    }
    return _routed("ood176", "test", selector, mode, cases, others, progress)


def _routed(
    suite: str,
    split: str,
    selector: Selector,
    mode: Mode,
    cases: Cases,
    others: dict[str, Indices],
    progress: Progress,
) -> RoutedReport:
    routed = evaluate.route(selector, cases, mode, progress=progress)
    ours = evaluate.result(cases, routed.chosen)
    others = {**others, "oracle": evaluate.oracle(cases)}
    counts = np.bincount(routed.chosen, minlength=len(cases.models))
    progress("bootstrap", 0, 1)
    return RoutedReport(
        suite=suite,
        split=split,
        rows=len(cases.texts),
        mode=mode.value,
        avg_score=ours.avg_score,
        cost_usd=ours.cost_usd,
        gated=int((~routed.known).sum()),
        choices={model: int(count) for model, count in zip(cases.models, counts, strict=True)},
        baselines={"random": evaluate.random_result(cases)}
        | {name: evaluate.result(cases, chosen) for name, chosen in others.items()},
        paired={name: evaluate.paired(cases, routed.chosen, chosen) for name, chosen in others.items()},
        provenance=selector.provenance,
    )


def weak_strong(
    directory: Path, progress: Progress, seeds: tuple[int, ...] = MMLU_SEEDS, encoder: Encoder | None = None
) -> ShareReport:
    """RouteLLM's MMLU table: train on MMLU_LABELS rows per seed, order all other rows by predicted gain.

    The penalty is chosen on the training rows alone. `unseen_subjects` holds out a fifth of the subjects; `gsm8k`
    orders another data set with the MMLU model (no labels of its own).
    """
    cases, other = mmlu(directory), gsm8k(directory)
    encoder = encoder or HashedNgrams()
    encoded = _encode(cases, encoder, progress)
    encoded_other = _encode(other, encoder, progress)
    runs: list[SeedRun] = []
    unseen: list[SeedRun] = []
    transfer: list[SeedRun] = []
    subjects = sorted(set(cases.families))
    names = np.array(cases.families)
    for step, seed in enumerate(seeds):
        progress("seeds", step, len(seeds))
        generator = np.random.default_rng(seed)
        order = generator.permutation(len(encoded))
        rows, rest = order[:MMLU_LABELS], order[MMLU_LABELS:]
        model = _Gain(encoded, cases, rows, encoder)
        runs.append(model.run(encoded, cases, rest, seed))
        transfer.append(model.run(encoded_other, other, np.arange(len(encoded_other)), seed))
        away = generator.permutation(len(subjects))[: len(subjects) // SUBJECT_FOLDS]
        held = np.isin(names, [subjects[i] for i in away])
        inside = generator.permutation(np.flatnonzero(~held))[:MMLU_LABELS]
        unseen.append(_Gain(encoded, cases, inside, encoder).run(encoded, cases, np.flatnonzero(held), seed))
    return ShareReport(
        suite="mmlu",
        labels=MMLU_LABELS,
        rows=len(encoded) - MMLU_LABELS,
        apgr=_mean(runs, "apgr"),
        cpt50=_mean(runs, "cpt50"),
        apgr_sd=round(float(np.std([run.apgr for run in runs], ddof=1)), 4),
        cpt50_sd=round(float(np.std([run.cpt50 for run in runs], ddof=1)), 2),
        seeds=tuple(runs),
        unseen_subjects=tuple(unseen),
        unseen_apgr=_mean(unseen, "apgr"),
        unseen_cpt50=_mean(unseen, "cpt50"),
        gsm8k=tuple(transfer),
        baselines=_share_baselines(cases),
        encoder=encoder.name,
    )


def share_curves(directory: Path, seed: int) -> dict[str, evaluate.ShareCurve]:
    """The curve behind one seed of `weak_strong`, and the one of the true subjects' means."""
    cases, encoder = mmlu(directory), HashedNgrams()
    encoded = _encode(cases, encoder, lambda stage, done, total: None)
    order = np.random.default_rng(seed).permutation(len(encoded))
    model = _Gain(encoded, cases, order[:MMLU_LABELS], encoder)
    return {
        "this selector": model.curve(encoded, cases, order[MMLU_LABELS:]),
        "true subject": _subject_curve(cases),
    }


def _encode(cases: Cases, encoder: Encoder, progress: Progress) -> list[Features]:
    out = []
    for i, text in enumerate(cases.texts):
        out.append(encoder.encode(plain_text(text).text))
        if i % 1000 == 0:
            progress("encode", i, len(cases.texts))
    return out


class _Gain:
    """Calibrated chance of strong minus weak, trained on some rows."""

    def __init__(self, encoded: list[Features], cases: Cases, rows: Indices, encoder: Encoder) -> None:
        packed = Rows.of([encoded[i] for i in rows], encoder.buckets)
        targets = cases.scores[rows]
        self._fit = ridge.fit_ridge(packed, packed.gram(packed), targets, errors=train.calibrated_errors)
        self._curves = calibration.fit_curves(self._fit.left_out, targets)

    def curve(self, encoded: list[Features], cases: Cases, rows: Indices) -> evaluate.ShareCurve:
        raw = np.stack([encoded[i].values @ self._fit.weights[encoded[i].buckets] for i in rows]) + self._fit.prior
        chances = calibration.apply_curves(self._curves, raw)
        scores = cases.scores[rows]
        return evaluate.share_curve(chances[:, 1] - chances[:, 0], scores[:, 0], scores[:, 1])

    def run(self, encoded: list[Features], cases: Cases, rows: Indices, seed: int) -> SeedRun:
        curve = self.curve(encoded, cases, rows)
        return SeedRun(seed=seed, apgr=round(curve.apgr, 4), cpt50=round(curve.cpt(0.5), 2), penalty=self._fit.penalty)


def _mean(runs: list[SeedRun], field: str) -> float:
    return round(float(np.mean([getattr(run, field) for run in runs])), 4)


def _subject_curve(cases: Cases) -> evaluate.ShareCurve:
    weak, strong = cases.scores[:, 0], cases.scores[:, 1]
    names = np.array(cases.families)
    by_subject = np.zeros(len(names))
    for name in set(cases.families):
        by_subject[names == name] = (strong - weak)[names == name].mean()
    return evaluate.share_curve(by_subject, weak, strong)


def _share_baselines(cases: Cases) -> dict[str, dict[str, float]]:
    """Random order, one model for all, the true subject's mean gain (labels of all rows), and the perfect order."""
    weak, strong = cases.scores[:, 0], cases.scores[:, 1]
    out = {
        "random": {"apgr": 0.5, "cpt50": 50.0},
        f"best_single ({cases.models[1]})": {"accuracy": round(float(strong.mean()), 4), "strong_share": 100.0},
        f"weak_single ({cases.models[0]})": {"accuracy": round(float(weak.mean()), 4), "strong_share": 0.0},
    }
    perfect = evaluate.share_curve(strong - weak, weak, strong)
    for label, curve in (("true_label (subject means of all rows)", _subject_curve(cases)), ("oracle", perfect)):
        out[label] = {"apgr": round(curve.apgr, 4), "cpt50": round(curve.cpt(0.5), 2)}
    return out
