"""Rewriting a model for faster kernels, and the library that is fetched by name."""

from __future__ import annotations

import base64
import hashlib
import io
import tarfile
from pathlib import Path

import pytest

from weighbridge.core.errors import ModelError
from weighbridge.engine import library_store, model_store
from weighbridge.engine.gguf import read_layout, read_model_file, tensor_bytes
from weighbridge.engine.model import LlamaModel, ModelOptions
from weighbridge.engine.model_comparison import compare, reading_text
from weighbridge.engine.requantise import requantise

pytestmark = pytest.mark.engine


def test_a_model_rewritten_as_q8_0_says_almost_the_same(model: LlamaModel, tmp_path: Path) -> None:
    target = tmp_path / "faster.gguf"
    heard: list[float] = []
    assert requantise(model.library, model.file.path, target, "q8_0", heard.append) == 210
    assert (heard[-1], sorted(heard)) == (1.0, heard)
    before, after = read_layout(model.file.path), read_layout(target)
    assert [tensor.name for tensor in after.tensors] == [tensor.name for tensor in before.tensors]
    assert {tensor.kind for tensor in after.tensors} == {0, 8}
    assert read_model_file(target).kv_bytes(1) == model.file.kv_bytes(1)
    rewritten = LlamaModel(model.library, ModelOptions(target))
    try:
        found = compare(model, rewritten, reading_text(), windows=1, window_tokens=128)
    finally:
        rewritten.close()
    assert found.tokens == 64 and found.same_top > 0.9 and 0 < found.kl < 0.03
    assert abs(found.perplexity / found.source_perplexity - 1) < 0.05
    with pytest.raises(ModelError, match="would gain nothing"):
        requantise(model.library, target, tmp_path / "again.gguf")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["faster.gguf"], "no part is left"


def test_what_is_not_rewritten_is_copied_byte_for_byte(model: LlamaModel, tmp_path: Path) -> None:
    source, target = model.file.path, tmp_path / "q4_0.gguf"
    requantise(model.library, source, target, "q4_0")
    before, after = read_layout(source), read_layout(target)
    old, new = source.read_bytes(), target.read_bytes()
    for was, is_now in zip(before.tensors, after.tensors, strict=True):
        if was.kind == is_now.kind:
            size = tensor_bytes(was.kind, was.values)
            first, second = before.data_start + was.offset, after.data_start + is_now.offset
            assert old[first : first + size] == new[second : second + size]
    assert after.file_type_at is not None and new[after.file_type_at] == 2


def test_a_rewritten_model_is_found_by_name_and_only_then(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(ModelError, match="run `weighbridge model optimise smollm2-135m-instruct --kind q8_0`"):
        model_store.resolve_model("smollm2-135m-instruct-q8_0")
    path = model_store.rewritten_path("smollm2-135m-instruct", "q8_0")
    path.parent.mkdir(parents=True)
    path.write_bytes(b"GGUF")
    assert model_store.resolve_model("smollm2-135m-instruct-q8_0") == (path, "smollm2-135m-instruct-q8_0")
    with pytest.raises(ModelError, match="is not here yet"):
        model_store.resolve_model("smollm2-135m-instruct")


def test_the_dispatching_library_is_asked_for_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert library_store.resolve_library(None) is None
    assert library_store.resolve_library("/x/libllama.so") == Path("/x/libllama.so")
    with pytest.raises(ModelError, match="run `weighbridge model library`"):
        library_store.resolve_library("dispatch")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ModelError, match=r"npm is not installed|is for Linux on x86-64"):
        library_store.fetch_library()


def test_an_archive_is_checked_and_only_its_libraries_are_taken(tmp_path: Path) -> None:
    archive = tmp_path / "x.tgz"
    with tarfile.open(archive, "w:gz") as tar:
        for name in ("package/bins/linux-x64/libllama.so", "package/bins/linux-x64/addon.node", "../../libevil.so"):
            member = tarfile.TarInfo(name)
            member.size = 4
            tar.addfile(member, io.BytesIO(b"data"))
    digest = base64.b64encode(hashlib.sha512(archive.read_bytes()).digest()).decode()
    with pytest.raises(ModelError, match="another hash"):
        library_store.unpack(archive, tmp_path, digest[::-1])
    folder = library_store.unpack(archive, tmp_path, digest)
    assert [path.name for path in folder.iterdir()] == ["libllama.so"]


@pytest.mark.skipif(not library_store.library_path().is_file(), reason="`weighbridge model library` was not run")
def test_the_dispatching_library_computes_the_same_model(model: LlamaModel) -> None:
    from weighbridge.engine.libllama import Library

    other = LlamaModel(Library(library_store.resolve_library("dispatch")), ModelOptions(model.file.path))
    try:
        found = compare(model, other, reading_text(), windows=1, window_tokens=128)
        assert found.same_top > 0.95 and found.kl < 0.01
    finally:
        other.close()
