"""A checkpoint is read as written, and refused with the reason when anything does not fit."""

from __future__ import annotations

import dataclasses
import struct
from pathlib import Path

import msgspec
import numpy as np
import pytest

from weighbridge.core.errors import CheckpointError, ConfigError, InputError
from weighbridge.selection import builtin, checkpoint, tensors
from weighbridge.selection.opening import open_selector, read_pool
from weighbridge.selection.pool import Pool, decode_pool, pool_hash
from weighbridge.selection.settings import SelectionSettings
from weighbridge.selection.text import TextLimits
from weighbridge.selection.train import Dataset, TrainSettings, recalibrate, train

MODELS = ("big", "small")
KINDS = ("prove the algebra theorem", "write a cheerful poem", "sort these numbers")
POOL = Pool(
    pool="two", models=decode_pool("{pool: t, models: [{name: big, output_usd_per_1m: 20}, {name: small}]}").models
)


def dataset(rows: int = 90, seed: int = 0) -> Dataset:
    """The big model is always good, the small one only at poems."""
    generator = np.random.default_rng(seed)
    kinds = [KINDS[i % 3] for i in range(rows)]
    texts = tuple(f"{kind} number {generator.integers(1000)} please {i}" for i, kind in enumerate(kinds))
    scores = np.array([[1.0, float("poem" in kind)] for kind in kinds])
    tokens = np.array([[300.0, 30.0] for _ in kinds])
    return Dataset(texts, MODELS, scores, tokens, np.full((rows, 2), np.nan), tuple(kinds))


@pytest.fixture(scope="module")
def made() -> checkpoint.Checkpoint:
    return train(dataset(), TrainSettings(buckets=1024), pool="two", created="2026-01-01")


def test_training_is_deterministic_and_the_files_read_back(made: checkpoint.Checkpoint, tmp_path: Path) -> None:
    again = train(dataset(), TrainSettings(buckets=1024), pool="two", created="2026-01-01")
    assert checkpoint.pack(made) == checkpoint.pack(again)
    manifest = checkpoint.save(made, tmp_path / "ck")
    loaded = checkpoint.load(tmp_path / "ck")
    assert loaded.manifest == manifest
    assert loaded.manifest.id == manifest.tensors_sha256[:12]
    assert np.abs(loaded.weights - made.weights).max() < 1e-3
    assert not list((tmp_path / "ck").glob(".*"))


def test_the_public_library_reads_our_tensors(made: checkpoint.Checkpoint) -> None:
    library = pytest.importorskip("safetensors.numpy")
    _, data = checkpoint.pack(made)
    theirs, ours = library.load(data), tensors.unpack(data)
    assert sorted(theirs) == sorted(ours)
    assert all(np.array_equal(theirs[name], ours[name]) for name in ours)
    assert sorted(tensors.unpack(library.save({"b": np.eye(3, dtype=np.float32), "a": np.zeros(2, np.int64)}))) == [
        "a",
        "b",
    ]


def test_a_changed_byte_is_refused(made: checkpoint.Checkpoint) -> None:
    manifest, data = checkpoint.pack(made)
    broken = bytearray(data)
    broken[-1] ^= 1
    with pytest.raises(CheckpointError, match=r"SHA-256.*copy the directory again"):
        checkpoint.unpack(manifest, bytes(broken))
    with pytest.raises(CheckpointError, match="SHA-256"):
        checkpoint.unpack(manifest, data[:-8])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": 99}, "has format 99"),
        ({"encoder": "minilm/1:384"}, "encoder 'minilm/1:384'"),
        ({"encoder": "hashed-ngrams/1:1000"}, "1000 buckets is not usable"),
        ({"models": ["big", "other"]}, "pool_hash does not belong"),
        ({"models": 3}, "models"),
    ],
)
def test_a_manifest_that_does_not_fit_is_refused(
    made: checkpoint.Checkpoint, change: dict[str, object], message: str
) -> None:
    manifest, data = checkpoint.pack(made)
    with pytest.raises(CheckpointError, match=message):
        checkpoint.unpack(msgspec.json.encode(msgspec.json.decode(manifest) | change), data)


def test_tensors_of_another_shape_or_not_finite_are_refused(made: checkpoint.Checkpoint) -> None:
    for field, value, message in (
        ("weights", np.zeros((512, 4), np.float32), "shape"),
        ("prior", np.array([np.nan, 0], np.float32), "not finite"),
    ):
        parts = checkpoint.pack(dataclasses.replace(made, **{field: value}))
        with pytest.raises(CheckpointError, match=message):
            checkpoint.unpack(*parts)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "shorter"),
        (struct.pack("<Q", 1 << 60) + b"{}", "announces"),
        (struct.pack("<Q", 2) + b"[]", "bad header"),
        (struct.pack("<Q", 51) + b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,4]}}'[:51], "bad header"),
        (struct.pack("<Q", 54) + b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,4]}}' + b"1234", "another number"),
        (struct.pack("<Q", 54) + b'{"a":{"dtype":"X32","shape":[1],"data_offsets":[0,4]}}' + b"1234", "unknown type"),
        (struct.pack("<Q", 54) + b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[2,6]}}' + b"123456", "does not lie"),
        (struct.pack("<Q", 2) + b"{}" + b"rest", "after its last"),
    ],
)
def test_damaged_tensor_files_are_named(data: bytes, message: str) -> None:
    with pytest.raises(tensors.TensorError, match=message):
        tensors.unpack(data)


def test_missing_files_and_pickles_are_refused(tmp_path: Path, made: checkpoint.Checkpoint) -> None:
    with pytest.raises(CheckpointError, match=r"manifest\.json: cannot be read"):
        checkpoint.load(tmp_path)
    checkpoint.save(made, tmp_path)
    (tmp_path / "tensors.safetensors").write_bytes(b"\x80\x04\x95pickle")
    with pytest.raises(CheckpointError, match="SHA-256"):
        checkpoint.load(tmp_path)


def test_pool_mismatch_names_the_models_and_the_remedy(made: checkpoint.Checkpoint) -> None:
    limits = TextLimits()
    checkpoint.check_fit(made, POOL, limits)
    stranger = decode_pool("{pool: p, models: [{name: big}, {name: tiny}]}")
    with pytest.raises(CheckpointError, match=r"knows nothing about tiny .*like:"):
        checkpoint.check_fit(made, stranger, limits)
    checkpoint.check_fit(made, decode_pool("{pool: p, models: [{name: big}, {name: tiny, like: small}]}"), limits)
    fewer = "pool: p\nmodels: [{name: big}]\n"
    with pytest.raises(CheckpointError, match=r"also knows small.*subset: true"):
        checkpoint.check_fit(made, decode_pool(fewer), limits)
    checkpoint.check_fit(made, decode_pool(fewer + "subset: true"), limits)
    with pytest.raises(CheckpointError, match="routing text"):
        checkpoint.check_fit(made, POOL, TextLimits(head=9))


def test_prices_and_order_are_no_part_of_the_pool_hash() -> None:
    assert pool_hash(["a", "b"]) == pool_hash(["b", "a"])
    cheap = decode_pool("{pool: p, models: [{name: a, input_usd_per_1m: 1}]}")
    dear = decode_pool("{pool: q, models: [{name: a, input_usd_per_1m: 9}]}")
    assert cheap.hash == dear.hash != pool_hash(["b"])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("pool: [", "not valid YAML"),
        ("{pool: p, models: [{name: a, prize: 3}]}", "prize"),
        ("{pool: p, models: []}", "lists no models"),
        ("{pool: p, models: [{name: a}, {name: a}]}", r"models\[1\]\.name: 'a' is listed twice"),
        ("{pool: p, models: [{name: a, output_usd_per_1m: -1}]}", r"output_usd_per_1m: must be a price"),
        ("{pool: p, models: [{name: a, context_tokens: 0}]}", "must be above zero"),
        ("{pool: p, models: [{name: ''}]}", "needs a name"),
    ],
)
def test_bad_pool_files_name_the_place(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        decode_pool(text)


def test_too_little_data_is_refused() -> None:
    with pytest.raises(InputError, match="at least 20"):
        train(dataset(6), TrainSettings(buckets=1024), pool="p", created="")
    unlabelled = dataset()
    unlabelled.scores[:, 1] = np.nan
    with pytest.raises(InputError, match="no score for small"):
        train(unlabelled, TrainSettings(buckets=1024), pool="p", created="")


def test_more_rows_than_allowed_are_sampled() -> None:
    made = train(dataset(90), TrainSettings(buckets=1024, max_rows=40, anchors=16), pool="p", created="")
    assert made.manifest.rows == 40
    assert len(made.anchors) == 16


def test_recalibration_keeps_the_weights(made: checkpoint.Checkpoint) -> None:
    other = recalibrate(made, dataset(60, seed=5), gate=True)
    assert np.array_equal(other.weights, made.weights)
    assert other.manifest.held_out["recalibrated_rows"] == 60
    assert len(other.left_out) == 60
    with pytest.raises(InputError, match="at least"):
        recalibrate(made, dataset(6))


def test_the_packaged_checkpoint_fits_its_pool_and_is_small() -> None:
    assert sum(path.stat().st_size for path in builtin.DIRECTORY.iterdir() if path.is_file()) < 3_000_000
    selector = open_selector()
    assert len(selector.pool.models) == 8
    assert selector.provenance.trained_on
    assert all(len(source.sha256) == 64 and source.licence for source in selector.checkpoint.manifest.data)


def test_opening_names_a_missing_pool_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        read_pool(tmp_path / "none.yaml")
    with pytest.raises(CheckpointError, match="cannot be read"):
        open_selector(SelectionSettings(checkpoint="nowhere"), tmp_path)
