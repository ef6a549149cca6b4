"""Manifests: names to paths, what is read back, and what a damaged one does."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import pytest
from msgspec import structs

from localrun.errors import BadModelFile, BadRequest
from localrun.models.storage import manifest
from localrun.models.storage.manifest import Manifest, ManifestKey, Message, Place, Role, Source, StoredFile

DIGEST = "sha256:" + "ab" * 32
BLOB = StoredFile(role=Role.MODEL, place=Place.BLOB, size_bytes=5, digest=DIGEST)


def said(name: str = "fox", **fields: object) -> Manifest:
    whole = {
        "files": (BLOB,),
        "created_at": datetime(2026, 1, 2, tzinfo=UTC),
        "source": Source(kind="create"),
        **fields,
    }
    return Manifest(name=name, **whole)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "path", "canonical"),
    [
        ("fox", "local/library/fox/latest", "fox"),
        ("Fox:latest", "local/library/fox/latest", "Fox"),
        ("fox:Q4", "local/library/fox/q4", "fox:Q4"),
        ("Org/Repo:Q8_0", "hf.co/org/repo/q8_0", "Org/Repo:Q8_0"),
        ("hf.co/Org/Repo", "hf.co/org/repo/latest", "Org/Repo"),
        ("huggingface.co/Org/Repo@main:x.gguf", "hf.co/org/repo@main/x.gguf", "Org/Repo@main:x.gguf"),
        ("Registry.ollama.ai/me/fox", "registry.ollama.ai/me/fox/latest", "Registry.ollama.ai/me/fox"),
        ("registry.ollama.ai/library/Fox", "local/library/fox/latest", "Fox"),
        ("Library/_fox:1b", "local/library/_fox/1b", "_fox:1b"),
        ("127.0.0.1:5000/library/fox:1b", "127.0.0.1+5000/library/fox/1b", "127.0.0.1:5000/library/fox:1b"),
    ],
)
def test_a_name_is_a_path_and_the_path_a_name(name: str, path: str, canonical: str, tmp_path: Path) -> None:
    assert ManifestKey.of(name).path(tmp_path) == tmp_path / "manifests" / f"{path}.json"
    assert manifest.canonical(name) == canonical
    assert ManifestKey.of(canonical) == ManifestKey.of(name)
    manifest.write(tmp_path, name, said(canonical))
    survey = manifest.read_all(tmp_path)
    assert (list(survey.manifests), survey.damaged) == ([ManifestKey.of(name)], [])


@pytest.mark.parametrize(
    "name", ["", "../fox", "a/../b", "fox\0", "tiny", "local/library/tiny", "./fox.gguf", "con", "a//b"]
)
def test_what_is_no_name_writes_nothing(name: str, tmp_path: Path) -> None:
    for call in (manifest.read, manifest.remove):
        with pytest.raises(BadRequest):
            call(tmp_path, name)
    with pytest.raises(BadRequest):
        manifest.write(tmp_path, name, said())
    assert list(tmp_path.iterdir()) == []


def test_everything_is_read_back(tmp_path: Path) -> None:
    hub = StoredFile(
        role=Role.ADAPTER, place=Place.HUB, size_bytes=1, digest=DIGEST, path="models--a--b/snapshots/c/d.gguf"
    )
    whole = said(
        files=(BLOB, hub, StoredFile(role=Role.PROJECTOR, place=Place.FILE, size_bytes=0, path="/somewhere/x.gguf")),
        parameters={"stop": ["a", "b"], "temperature": 0.5, "seed": 3, "use_mmap": True},
        system="Be brief.",
        template="{{ messages }}",
        messages=(Message("user", "hi"), Message("assistant", "yo")),
        licence_text="MIT",
        requires="0.14.0",
    )
    manifest.write(tmp_path, "fox", whole)
    assert manifest.read(tmp_path, "FOX:latest") == whole
    assert manifest.read(tmp_path, "fox:other") is None
    assert [file.role for file in whole.of_role(Role.ADAPTER)] == ["adapter"]


def test_removal_takes_the_empty_folders_along(tmp_path: Path) -> None:
    manifest.write(tmp_path, "fox", said())
    manifest.write(tmp_path, "fox:two", structs.replace(said(), name="fox:two"))
    assert manifest.remove(tmp_path, "fox")
    assert not manifest.remove(tmp_path, "fox")
    assert manifest.read(tmp_path, "fox:two") is not None
    assert manifest.remove(tmp_path, "fox:two")
    assert list((tmp_path / "manifests").iterdir()) == []


@pytest.mark.parametrize(
    "content",
    [
        b"", b"{", b"[]", b"\xff\xfe", b'{"name": "fox"}',
        b'{"name":"wolf","files":[{"role":"model","place":"file","size_bytes":1,"path":"/x.gguf"}],'
        b'"created_at":"2026-01-02T00:00:00Z","source":{"kind":"x"}}',
        b'{"name":"fox","files":[],"created_at":"2026-01-02T00:00:00Z","source":{"kind":"x"}}',
        b'{"name":"fox","files":[{"role":"model","place":"blob","size_bytes":1,"digest":"sha256:../../x"}],'
        b'"created_at":"2026-01-02T00:00:00Z","source":{"kind":"x"}}',
        b'{"name":"fox","files":[{"role":"model","place":"hub","size_bytes":1,"path":"a/../../../etc/passwd"}],'
        b'"created_at":"2026-01-02T00:00:00Z","source":{"kind":"x"}}',
        b'{"name":"fox","files":[{"role":"model","place":"hub","size_bytes":1,"path":"/etc/passwd"}],'
        b'"created_at":"2026-01-02T00:00:00Z","source":{"kind":"x"}}',
    ],
)  # fmt: skip
def test_a_damaged_manifest_is_reported_and_in_nobodys_way(content: bytes, tmp_path: Path) -> None:
    path = manifest.write(tmp_path, "fox", said())
    manifest.write(tmp_path, "good", said("good"))
    path.write_bytes(content)
    with pytest.raises(BadModelFile, match=r"latest\.json is no manifest"):
        manifest.read(tmp_path, "fox")
    survey = manifest.read_all(tmp_path)
    assert [found.name for found in survey.manifests.values()] == ["good"]
    assert [damaged.path for damaged in survey.damaged] == [path]


def test_a_manifest_without_bounds_is_refused_by_its_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = manifest.write(tmp_path, "fox", said())
    monkeypatch.setattr(manifest, "MAX_MANIFEST_BYTES", 100)
    with pytest.raises(BadModelFile, match="more than 100 bytes"):
        manifest.read(tmp_path, "fox")
    with pytest.raises(BadModelFile, match="the limit is 100"):
        manifest.write(tmp_path, "fox", said())
    assert path.is_file()


@pytest.mark.parametrize(
    "digest", ["sha256:../x", "../../etc/passwd", "sha256:" + "g" * 64, "md5:" + "a" * 64, "", DIGEST + "0"]
)
def test_a_digest_is_checked_before_a_path_is_made_of_it(digest: str, tmp_path: Path) -> None:
    with pytest.raises(BadRequest, match="is no digest"):
        manifest.blob_path(tmp_path, digest)


def test_both_spellings_of_a_digest(tmp_path: Path) -> None:
    expected = tmp_path / "blobs" / ("sha256-" + "ab" * 32)
    assert manifest.blob_path(tmp_path, DIGEST) == manifest.blob_path(tmp_path, "sha256-" + "AB" * 32) == expected
