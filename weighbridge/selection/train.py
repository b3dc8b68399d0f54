"""From labelled texts to a checkpoint: ridge heads, calibrated curves, token heads and the gate's anchors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import msgspec
import numpy as np
from numpy.typing import NDArray

from weighbridge.core.errors import InputError
from weighbridge.selection import calibration, ridge
from weighbridge.selection.checkpoint import FORMAT, Checkpoint, DataSource, Manifest, encoder_of
from weighbridge.selection.encoders import Kind, make_encoder
from weighbridge.selection.features import Encoder, Features
from weighbridge.selection.neighbours import familiarity, left_out_familiarity
from weighbridge.selection.pool import pool_hash
from weighbridge.selection.rows import Rows
from weighbridge.selection.text import TextLimits, plain_text, utf8_bytes

Matrix = NDArray[np.float64]
MIN_ROWS = 20
DEFAULT_INPUT_FIT = (8.0, 0.25)
Progress = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True)
class Dataset:
    """n texts and M models. Tables are n x M with NaN where unknown; scores lie in 0..1, tokens are counts.

    `families` names each text's kind (empty: unknown). `other_scores` and `other_families` are scored tasks whose
    text is not there; they only inform the prior for families never seen.
    """

    texts: tuple[str, ...]
    models: tuple[str, ...]
    scores: Matrix
    output_tokens: Matrix
    input_tokens: Matrix
    families: tuple[str, ...]
    other_scores: Matrix = field(default_factory=lambda: np.zeros((0, 0)))
    other_families: tuple[str, ...] = ()
    sources: tuple[DataSource, ...] = ()


@dataclass(frozen=True, slots=True)
class TrainSettings:
    """`max_rows` bounds the memory (rows squared); more rows are sampled with `seed`. See docs for each default."""

    buckets: int = 1 << 15
    encoder: Kind = "hashed"
    penalties: tuple[float, ...] = ridge.PENALTIES
    anchors: int = 2048
    gate_quantile: float = 0.01
    max_rows: int = 6000
    left_out_rows: int = 2000
    seed: int = 0
    limits: TextLimits = field(default_factory=TextLimits)


def recalibrate(checkpoint: Checkpoint, data: Dataset, *, gate: bool = False) -> Checkpoint:
    """The same weights with curves, held-out gains and, if `gate`, the threshold fitted to other rows.

    `data` must not hold rows that were trained on. With `gate` these rows count as known traffic: the share
    `gate_quantile` of them with the least familiarity falls below the new threshold.

    Raises:
        InputError: fewer than MIN_ROWS texts, or another set of models.
    """
    manifest = checkpoint.manifest
    if set(data.models) != set(manifest.models):
        raise InputError(f"the data scores {', '.join(data.models)}, the checkpoint knows {', '.join(manifest.models)}")
    if len(data.texts) < MIN_ROWS:
        raise InputError(f"calibration needs at least {MIN_ROWS} scored prompts, the data has {len(data.texts)}")
    encoder = encoder_of(manifest)
    features = [encoder.encode(plain_text(text).text) for text in data.texts]
    count = len(manifest.models)
    scores = data.scores[:, [data.models.index(model) for model in manifest.models]]
    raw = np.stack([f.values @ checkpoint.weights[f.buckets, :count] for f in features]) + checkpoint.prior
    curves = calibration.fit_curves(raw.astype(np.float64), scores)
    chances = calibration.apply_curves(curves, raw.astype(np.float64))
    threshold = manifest.threshold
    if gate:
        near = [familiarity(checkpoint.anchors, f.sketch()) for f in features]
        threshold = float(np.quantile(near, manifest.gate_quantile))
    held_out = manifest.held_out | {
        "recalibrated_rows": float(len(data.texts)),
        "recalibrated_error": round(calibration.calibration_error(chances, scores), 4),
    }
    return replace(
        checkpoint,
        curves=curves.astype(np.float32),
        left_out=chances.astype(np.float32),
        manifest=msgspec.structs.replace(
            manifest, threshold=threshold, held_out=held_out, data=(*manifest.data, *data.sources)
        ),
    )


def _silent(stage: str, done: int, total: int) -> None:
    """The default progress: none."""


def train(
    data: Dataset, settings: TrainSettings, *, pool: str, created: str, progress: Progress = _silent
) -> Checkpoint:
    """Fit everything a checkpoint holds. Deterministic for equal input and settings.

    Raises:
        InputError: too few labelled texts, or a model without any label.
    """
    generator = np.random.default_rng(settings.seed)
    kept = _usable_rows(data, settings, generator)
    encoder = make_encoder(settings.encoder, settings.buckets)
    features = _encode(data, kept, encoder, settings.limits, progress)
    rows = Rows.of(features, encoder.buckets)
    progress("products", 0, 3)
    gram = rows.gram(rows)
    progress("quality", 1, 3)
    scores = data.scores[kept]
    quality = ridge.fit_ridge(rows, gram, scores, settings.penalties, calibrated_errors)
    curves = calibration.fit_curves(quality.left_out, scores)
    progress("tokens", 2, 3)
    output, scale = _fit_tokens(rows, gram, data.output_tokens[kept], settings)
    chances = calibration.apply_curves(curves, quality.left_out)
    anchors = _anchors(features, settings.anchors, generator)
    manifest = Manifest(
        format=FORMAT,
        created=created,
        encoder=encoder.name,
        text=settings.limits.version,
        pool=pool,
        pool_hash=pool_hash(data.models),
        models=data.models,
        data=data.sources,
        rows=len(kept),
        penalty=quality.penalty,
        output_penalty=output.penalty,
        threshold=float(np.quantile(left_out_familiarity(anchors), settings.gate_quantile)),
        gate_quantile=settings.gate_quantile,
        versions={"numpy": np.__version__},
        held_out=_held_out(quality, chances, scores),
    )
    progress("done", 3, 3)
    return Checkpoint(
        manifest=manifest,
        weights=np.concatenate([quality.weights, output.weights], 1).astype(np.float32),
        prior=quality.prior.astype(np.float32),
        unknown_prior=unknown_prior(data).astype(np.float32),
        curves=curves.astype(np.float32),
        output_prior=output.prior.astype(np.float32),
        output_scale=scale.astype(np.float32),
        input_fit=_fit_input(data).astype(np.float32),
        anchors=anchors,
        left_out=_sample(np.where(np.isnan(chances), quality.prior, chances), settings.left_out_rows, generator),
    )


def calibrated_errors(left_out: Matrix, targets: Matrix) -> Matrix:
    """Squared errors after the curves: shrinkage that a slope undoes is no reason for a small penalty."""
    curves = calibration.fit_curves(left_out, targets)
    return ridge.squared_errors(calibration.apply_curves(curves, left_out), targets)


def _usable_rows(data: Dataset, settings: TrainSettings, generator: np.random.Generator) -> NDArray[np.int64]:
    kept = np.flatnonzero(~np.isnan(data.scores).all(1))
    if kept.size < MIN_ROWS:
        raise InputError(f"training needs at least {MIN_ROWS} scored prompts, the data has {kept.size}")
    labels = (~np.isnan(data.scores)).sum(0).tolist()
    unlabelled = [model for model, count in zip(data.models, labels, strict=True) if not count]
    if unlabelled:
        raise InputError(f"no score for {', '.join(unlabelled)}; add some rows or leave the model out")
    if kept.size > settings.max_rows:
        kept = np.sort(generator.choice(kept, settings.max_rows, replace=False))
    return kept


def _encode(
    data: Dataset, kept: NDArray[np.int64], encoder: Encoder, limits: TextLimits, progress: Progress
) -> list[Features]:
    out: list[Features] = []
    for done, index in enumerate(kept):
        out.append(encoder.encode(plain_text(data.texts[index], limits).text))
        if done % 500 == 0:
            progress("encode", done, len(kept))
    return out


def _fit_tokens(rows: Rows, gram: Matrix, tokens: Matrix, settings: TrainSettings) -> tuple[ridge.Ridge, Matrix]:
    """Ridge on log(1 + tokens) and, per model, the factor that turns the exponent back into the mean."""
    targets = np.log1p(np.maximum(tokens, 0.0))
    if np.isnan(targets).all():
        targets = np.full_like(targets, np.nan)
        targets[0] = np.log1p(256.0)  # nothing known: one moderate answer for every model
    fitted = ridge.fit_ridge(rows, gram, targets, settings.penalties)
    guess = np.expm1(np.where(np.isnan(fitted.left_out), np.nan, np.clip(fitted.left_out, 0.0, 14.0)))
    known = ~(np.isnan(guess) | np.isnan(tokens))
    actual_sum = np.where(known, tokens, 0.0).sum(0)
    guess_sum = np.where(known, guess, 0.0).sum(0)
    scale = np.divide(actual_sum, guess_sum, out=np.ones_like(actual_sum), where=guess_sum > 0)
    return fitted, np.clip(scale, 0.5, 10.0)


def _fit_input(data: Dataset) -> Matrix:
    """Tokens = a + b * bytes per model by least squares, or the default where fewer than ten counts are known."""
    sizes = np.array([utf8_bytes(text) for text in data.texts], float)
    out = np.tile(np.array(DEFAULT_INPUT_FIT), (len(data.models), 1))
    for column in range(len(data.models)):
        known = ~np.isnan(data.input_tokens[:, column])
        if known.sum() >= 10 and np.ptp(sizes[known]) > 0:
            slope, offset = np.polyfit(sizes[known], data.input_tokens[known, column], 1)
            if 0.02 <= slope <= 2.0:
                out[column] = max(0.0, offset), slope
    return out


def unknown_prior(data: Dataset) -> Matrix:
    """Mean over families of each family's mean score, so that a large family does not speak for unknown ones."""
    scores = data.scores
    families: Sequence[str] = data.families
    if len(data.other_scores):
        scores, families = np.concatenate([scores, data.other_scores]), [*families, *data.other_families]
    names = np.array(families)
    table = np.stack([ridge.shrunk_means(scores[names == name]) for name in sorted(set(families))])
    mean: Matrix = table.mean(0)
    return mean


def _anchors(features: list[Features], count: int, generator: np.random.Generator) -> NDArray[np.float32]:
    picked = np.sort(generator.choice(len(features), min(count, len(features)), replace=False))
    return np.stack([features[i].sketch() for i in picked])


def _sample(table: Matrix, count: int, generator: np.random.Generator) -> NDArray[np.float32]:
    picked = np.sort(generator.choice(len(table), min(count, len(table)), replace=False))
    return table[picked].astype(np.float32)


def _held_out(quality: ridge.Ridge, chances: Matrix, scores: Matrix) -> dict[str, float]:
    best = np.nan_to_num(np.where(np.isnan(scores), -1.0, chances), nan=-1.0).argmax(1)
    return {
        "squared_error": round(float(np.nanmean((chances - scores) ** 2)), 4),
        "prior_squared_error": round(float(np.nanmean((quality.prior - scores) ** 2)), 4),
        "calibration_error": round(calibration.calibration_error(chances, scores), 4),
        "best_predicted_score": round(float(np.mean(scores[np.arange(len(scores)), best])), 4),
        "best_single_score": round(float(np.nanmean(scores, 0).max()), 4),
    }
