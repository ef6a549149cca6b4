"""Blobs are named by their content, once it is complete."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from localrun.errors import BadRequest
from localrun.models.storage import blobs
from localrun.models.storage.blobs import Blobs, BlobWriter


def digest_of(content: bytes) -> str:
    return f"sha256:{hashlib.sha256(content).hexdigest()}"


def put(store: Blobs, content: bytes) -> str:
    with BlobWriter(store) as writer:
        writer.write(content)
        return writer.finish()


def test_a_blob_has_its_name_when_it_is_finished(tmp_path: Path) -> None:
    store = Blobs(tmp_path)
    with BlobWriter(store) as writer:
        for piece in (b"he", b"llo"):
            writer.write(piece)
        assert not store.has(digest_of(b"hello"))
        assert writer.finish(digest_of(b"hello").upper().replace("SHA256:", "sha256-")) == digest_of(b"hello")
    assert store.has(digest_of(b"hello"))
    (blob,) = store.all()
    assert (blob.digest, blob.size_bytes, blob.path.read_bytes()) == (digest_of(b"hello"), 5, b"hello")


def test_the_wrong_content_leaves_nothing(tmp_path: Path) -> None:
    store = Blobs(tmp_path)
    with BlobWriter(store) as writer:
        writer.write(b"hello")
        with pytest.raises(BadRequest, match="has the digest"):
            writer.finish(digest_of(b"other"))
    with BlobWriter(store) as writer:
        writer.write(b"given up")
    assert list(store.folder.iterdir()) == []


def test_a_held_blob_stays(tmp_path: Path) -> None:
    store = Blobs(tmp_path)
    digest = put(store, b"hello")
    with store.held([digest]), store.held([digest]):
        assert store.remove(digest) == 0
        assert store.has(digest)
    assert store.remove(digest) == 5
    assert store.remove(digest) == 0
    assert not store.has(digest)


def test_a_finished_file_is_adopted(tmp_path: Path) -> None:
    store = Blobs(tmp_path)
    store.folder.mkdir()
    (tmp_path / "blobs" / "made").write_bytes(b"hello")
    assert blobs.adopt(store, store.folder / "made") == digest_of(b"hello")
    assert [blob.digest for blob in store.all()] == [digest_of(b"hello")]
    assert blobs.hash_file(store.all()[0].path) == digest_of(b"hello")


def test_other_files_are_no_blobs(tmp_path: Path) -> None:
    store = Blobs(tmp_path)
    assert store.all() == ()
    store.folder.mkdir()
    (store.folder / "sha256-short").touch()
    assert store.all() == []
    with pytest.raises(BadRequest):
        store.has("../../etc/passwd")
