"""A trained selector as a directory: `manifest.json` says what it is, `tensors.safetensors` holds the numbers.

Loading only reads. It refuses, with the reason, a directory whose hash, encoder, text builder or models do not fit.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from weighbridge.core.errors import CheckpointError
from weighbridge.selection import tensors
from weighbridge.selection.encoders import encoder_named
from weighbridge.selection.features import SKETCH_DIMS, Encoder
from weighbridge.selection.pool import Pool, pool_hash
from weighbridge.selection.text import TextLimits

FORMAT = 1
MANIFEST, TENSORS = "manifest.json", "tensors.safetensors"
MAX_BYTES = 256 << 20
Array32 = NDArray[np.float32]


class DataSource(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One file of training data. `rows` counts texts, `sha256` is of the whole file."""

    name: str
    rows: int
    sha256: str = ""
    licence: str = ""


class Manifest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a checkpoint is, where it came from and how good it was on rows it had not seen."""

    format: int
    created: str
    encoder: str
    text: str
    pool: str
    pool_hash: str
    models: tuple[str, ...]
    data: tuple[DataSource, ...]
    rows: int
    penalty: float
    output_penalty: float
    threshold: float
    """Familiarity below which a text belongs to no family seen in training."""
    gate_quantile: float
    versions: dict[str, str]
    held_out: dict[str, float]
    tensors_sha256: str = ""

    @property
    def id(self) -> str:
        """Twelve digits of the tensors' hash: the name under which numbers of this checkpoint are quoted."""
        return self.tensors_sha256[:12]


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """M models, D buckets. `weights` is D x 2M: quality columns, then the logarithm of output tokens.

    `prior` M and `output_prior` M hold for an average text; `unknown_prior` M for a family never seen (the mean over
    families). `curves` M x 2 turns quality scores into chances, `output_scale` M turns exp(log tokens) into a mean,
    `input_fit` M x 2 is (tokens, tokens per byte), `anchors` K x SKETCH_DIMS, `left_out` S x M holds held-out chances.
    """

    manifest: Manifest
    weights: Array32
    prior: Array32
    unknown_prior: Array32
    curves: Array32
    output_prior: Array32
    output_scale: Array32
    input_fit: Array32
    anchors: Array32
    left_out: Array32

    @property
    def models(self) -> tuple[str, ...]:
        return self.manifest.models


_HALF = ("weights", "anchors", "left_out")  # stored as 16-bit floats: enough for three digits, half the bytes
_NAMES = (
    "weights",
    "prior",
    "unknown_prior",
    "curves",
    "output_prior",
    "output_scale",
    "input_fit",
    "anchors",
    "left_out",
)


def pack(checkpoint: Checkpoint) -> tuple[bytes, bytes]:
    """The two files' bytes, manifest first; the manifest gets the hash of the tensors."""
    arrays = {name: getattr(checkpoint, name).astype(np.float16 if name in _HALF else np.float32) for name in _NAMES}
    data = tensors.pack(arrays)
    digest = hashlib.sha256(data).hexdigest()
    manifest = msgspec.structs.replace(checkpoint.manifest, tensors_sha256=digest)
    return msgspec.json.format(msgspec.json.encode(manifest), indent=2) + b"\n", data


def unpack(manifest_bytes: bytes, tensor_bytes: bytes, source: str = "checkpoint") -> Checkpoint:
    """The checkpoint in two files' bytes.

    Raises:
        CheckpointError: damaged, of another format, or its numbers do not fit its manifest.
    """
    try:
        head = msgspec.json.decode(manifest_bytes)
    except msgspec.DecodeError as error:
        raise CheckpointError(f"{source}/{MANIFEST}: is not JSON: {error}") from None
    if not isinstance(head, dict) or head.get("format") != FORMAT:
        found = head.get("format") if isinstance(head, dict) else None
        raise CheckpointError(f"{source}/{MANIFEST}: has format {found!r}, this version reads {FORMAT}; train it again")
    try:
        manifest = msgspec.convert(head, Manifest)
    except msgspec.ValidationError as error:
        raise CheckpointError(f"{source}/{MANIFEST}: {error}") from None
    digest = hashlib.sha256(tensor_bytes).hexdigest()
    if digest != manifest.tensors_sha256:
        raise CheckpointError(
            f"{source}/{TENSORS}: its SHA-256 begins {digest[:12]}, the manifest says {manifest.tensors_sha256[:12]}; "
            "the file was changed or cut short, copy the directory again"
        )
    if manifest.pool_hash != pool_hash(manifest.models):
        raise CheckpointError(f"{source}/{MANIFEST}: pool_hash does not belong to the models it lists")
    try:
        arrays = tensors.unpack(tensor_bytes)
    except tensors.TensorError as error:
        raise CheckpointError(f"{source}/{TENSORS}: {error}") from None
    encoder = encoder_of(manifest, source)
    _check_shapes(arrays, len(manifest.models), encoder.buckets, source)
    values = {name: np.ascontiguousarray(arrays[name], np.float32) for name in _NAMES}
    if not all(bool(np.isfinite(value).all()) for value in values.values()):
        raise CheckpointError(f"{source}/{TENSORS}: holds a number that is not finite")
    return Checkpoint(manifest=manifest, **values)


def _check_shapes(arrays: dict[str, tensors.Array], models: int, buckets: int, source: str) -> None:
    wanted: dict[str, tuple[int | None, ...]] = {
        "weights": (buckets, 2 * models),
        "prior": (models,),
        "unknown_prior": (models,),
        "curves": (models, 2),
        "output_prior": (models,),
        "output_scale": (models,),
        "input_fit": (models, 2),
        "anchors": (None, SKETCH_DIMS),
        "left_out": (None, models),
    }
    for name, shape in wanted.items():
        found = arrays[name].shape if name in arrays else None
        if (
            found is None
            or len(found) != len(shape)
            or any(w not in (None, f) for w, f in zip(shape, found, strict=True))
        ):
            raise CheckpointError(f"{source}/{TENSORS}: tensor '{name}' has shape {found}, expected {shape}")


def encoder_of(manifest: Manifest, source: str = "checkpoint") -> Encoder:
    """The encoder that the weights were trained with, or a refusal that names both versions."""
    return encoder_named(manifest.encoder, source)


def check_fit(checkpoint: Checkpoint, pool: Pool, limits: TextLimits, source: str = "checkpoint") -> None:
    """Refuse a checkpoint that was not made for these models or this way of reading a request."""
    manifest = checkpoint.manifest
    if manifest.text != limits.version:
        raise CheckpointError(
            f"{source}: was trained on routing text '{manifest.text}', the settings say '{limits.version}'; "
            "use the same text limits or train it again"
        )
    known = set(manifest.models)
    missing = [model.name for model in pool.models if model.learned_as not in known]
    if missing:
        raise CheckpointError(
            f"{source}: knows nothing about {', '.join(missing)} (pool '{pool.pool}' {pool.hash}, checkpoint "
            f"{manifest.pool_hash}); set `like:` to one of {', '.join(manifest.models)}, or train on this pool"
        )
    if pool.hash != manifest.pool_hash and not pool.subset:
        extra = sorted(known - {model.learned_as for model in pool.models})
        raise CheckpointError(
            f"{source}: also knows {', '.join(extra)}, which pool '{pool.pool}' does not list; "
            "set `subset: true` in the pool file if that is meant"
        )


def load(directory: Path) -> Checkpoint:
    """Read a checkpoint directory.

    Raises:
        CheckpointError: a file is missing, too large, or refused by `unpack`.
    """
    parts: list[bytes] = []
    for name in (MANIFEST, TENSORS):
        path = directory / name
        try:
            size = path.stat().st_size
            if size > MAX_BYTES:
                raise CheckpointError(f"{path}: is {size} bytes, more than a checkpoint can be")
            parts.append(path.read_bytes())
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from None
    return unpack(parts[0], parts[1], str(directory))


def save(checkpoint: Checkpoint, directory: Path) -> Manifest:
    """Write the directory (made when missing) and return the manifest as written; same checkpoint, same bytes."""
    manifest, data = pack(checkpoint)
    directory.mkdir(parents=True, exist_ok=True)
    for name, content in ((TENSORS, data), (MANIFEST, manifest)):
        partial = directory / f".{name}.partial"
        partial.write_bytes(content)
        partial.replace(directory / name)
    return msgspec.json.decode(manifest, type=Manifest)
