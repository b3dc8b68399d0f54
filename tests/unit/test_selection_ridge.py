"""Rows, ridge, calibration and neighbours against their slow obvious forms."""

from __future__ import annotations

import numpy as np
import pytest

from weighbridge.selection.calibration import apply_curves, calibration_error, fit_curves
from weighbridge.selection.features import HashedNgrams
from weighbridge.selection.neighbours import Neighbours, familiarity, left_out_familiarity
from weighbridge.selection.ridge import fit_ridge, shrunk_means, squared_errors
from weighbridge.selection.rows import Rows

ENCODER = HashedNgrams(1024)
TEXTS = [f"{kind} task number {i} about {kind}" for i in range(12) for kind in ("algebra", "poetry", "sorting")]


def dense(rows: Rows) -> np.ndarray:
    out = np.zeros((len(rows), rows.width))
    for i in range(len(rows)):
        buckets, values = rows.row(i)
        out[i, buckets] = values
    return out


def rows_of(texts: list[str]) -> Rows:
    return Rows.of([ENCODER.encode(text) for text in texts], ENCODER.buckets)


def test_products_equal_the_dense_ones_also_with_an_empty_row() -> None:
    rows, others = rows_of(TEXTS[:7]), rows_of([*TEXTS[7:12], ""])
    assert rows.gram(others) == pytest.approx(dense(rows) @ dense(others).T, abs=1e-6)
    weights = np.arange(14.0).reshape(7, 2)
    assert rows.weighted_sum(weights) == pytest.approx(dense(rows).T @ weights, abs=1e-6)


def test_left_out_predictions_equal_refitting_without_the_row() -> None:
    rows = rows_of(TEXTS)
    generator = np.random.default_rng(0)
    targets = generator.random((len(TEXTS), 2))
    targets[::5, 1] = np.nan
    fitted = fit_ridge(rows, rows.gram(rows), targets, (1.0,))
    x = dense(rows)
    for column in range(2):
        known = np.flatnonzero(~np.isnan(targets[:, column]))
        for left in known[:6]:
            kept = known[known != left]
            gram = x[kept] @ x[kept].T + np.eye(kept.size)
            dual = np.linalg.solve(gram, targets[kept, column] - fitted.prior[column])
            slow = x[left] @ x[kept].T @ dual + fitted.prior[column]
            assert fitted.left_out[left, column] == pytest.approx(slow, abs=1e-6)


def test_a_text_without_shared_words_gets_the_prior() -> None:
    rows = rows_of(TEXTS)
    fitted = fit_ridge(rows, rows.gram(rows), np.full((len(TEXTS), 1), 0.25))
    assert fitted.weights == pytest.approx(0.0, abs=1e-9)
    assert fitted.prior == pytest.approx(0.25)


def test_prior_of_a_model_with_few_labels_is_drawn_to_the_others() -> None:
    targets = np.full((100, 2), np.nan)
    targets[:, 0] = 0.8
    targets[0, 1] = 0.0
    means = shrunk_means(targets)
    assert means[0] == pytest.approx(0.8, abs=0.01)
    assert 0.6 < means[1] < 0.8


def test_penalty_is_the_largest_within_one_standard_error() -> None:
    rows = rows_of(TEXTS)
    noise = np.random.default_rng(1).random((len(TEXTS), 1))
    assert fit_ridge(rows, rows.gram(rows), noise, (0.1, 1.0, 100.0)).penalty == 100.0
    labels = np.array([[float("algebra" in text)] for text in TEXTS])
    assert fit_ridge(rows, rows.gram(rows), labels, (0.01, 0.1, 1000.0)).penalty < 1000.0


def test_row_errors_skip_unlabelled_models() -> None:
    errors = squared_errors(np.array([[1.0, 9.0], [0.0, 0.0]]), np.array([[0.0, np.nan], [np.nan, np.nan]]))
    assert errors.tolist() == [1.0]


def test_curves_undo_a_known_distortion() -> None:
    generator = np.random.default_rng(0)
    scores = generator.random((4000, 2))
    chance = 1 / (1 + np.exp(-(6 * scores - 3)))
    labels = (generator.random(scores.shape) < chance).astype(float)
    curves = fit_curves(scores, labels)
    assert curves == pytest.approx(np.array([[6.0, -3.0], [6.0, -3.0]]), abs=0.6)
    assert calibration_error(apply_curves(curves, scores), labels) < 0.03
    assert calibration_error(np.clip(scores, 0, 1), labels) > calibration_error(apply_curves(curves, scores), labels)


def test_a_model_with_no_labels_gets_the_common_curve() -> None:
    scores = np.random.default_rng(0).random((200, 2))
    labels = (scores > 0.5).astype(float)
    labels[:, 1] = np.nan
    curves = fit_curves(scores, labels)
    assert np.isfinite(curves).all()
    assert curves[1, 0] > 0


def test_familiarity_is_the_mean_of_the_nearest_cosines() -> None:
    anchors = np.eye(256, dtype=np.float32)[:6]
    assert familiarity(anchors, anchors[0]) == pytest.approx(1 / 5)
    assert familiarity(anchors[:0], anchors[0]) == -1.0
    assert left_out_familiarity(anchors) == pytest.approx(np.zeros(6))


def test_feedback_moves_only_what_is_near_and_only_that_model() -> None:
    near, far = ENCODER.encode("sort a list of numbers").sketch(), ENCODER.encode("ode to a nightingale").sketch()
    store = Neighbours(models=3, capacity=8)
    assert not store.corrections(near).any()
    for _ in range(6):
        store.add(near, 1, -1.0)
    moved = store.corrections(near)
    assert moved[1] == pytest.approx(-6 / 9, abs=1e-3)
    assert moved[0] == moved[2] == 0.0
    assert abs(store.corrections(far)[1]) < 0.05


def test_the_store_is_bounded_and_forgets_the_oldest() -> None:
    store = Neighbours(models=1, capacity=4)
    first, second = ENCODER.encode("first thing").sketch(), ENCODER.encode("zebra quartz").sketch()
    store.add(first, 0, 1.0)
    for _ in range(4):
        store.add(second, 0, 1.0)
    assert len(store) == 4
    assert store.corrections(first)[0] < 0.05
    with pytest.raises(ValueError, match="outside"):
        store.add(first, 1, 0.0)
