"""The shared Hugging Face cache: where it is, and how one file leaves it. Checked with the hub's own client."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from huggingface_hub import scan_cache_dir

from localrun.models.storage import hub_cache


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({"HF_HUB_CACHE": "/a", "HF_HOME": "/b"}, "/a"),
        ({"HUGGINGFACE_HUB_CACHE": "/c", "HF_HOME": "/b"}, "/c"),
        ({"HF_HOME": "/b", "XDG_CACHE_HOME": "/d"}, "/b/hub"),
        ({"XDG_CACHE_HOME": "/d"}, "/d/huggingface/hub"),
        ({}, os.path.expanduser("~/.cache/huggingface/hub")),
    ],
)
def test_the_folder_follows_the_hubs_variables(environ: dict[str, str], expected: str) -> None:
    assert hub_cache.folder(environ) == Path(expected)


def put(cache: Path, commit: str, name: str, content: bytes, *, ref: str = "") -> str:
    repo = cache / "models--org--repo"
    blob = repo / "blobs" / f"etag-{content.decode()}"
    link = repo / "snapshots" / commit / name
    for path in (blob, link, repo / "refs" / "main"):
        path.parent.mkdir(parents=True, exist_ok=True)
    blob.write_bytes(content)
    link.symlink_to(os.path.relpath(blob, link.parent))
    if ref:
        (repo / "refs" / ref).write_text(commit)
    return str(link.relative_to(cache))


def test_a_file_goes_and_the_others_of_the_repository_stay(tmp_path: Path) -> None:
    model = put(tmp_path, "a" * 40, "sub/model.gguf", b"weights", ref="main")
    put(tmp_path, "a" * 40, "config.json", b"{}")
    assert hub_cache.remove(tmp_path, model) == len(b"weights")
    assert hub_cache.remove(tmp_path, model) == 0
    (repo,) = scan_cache_dir(tmp_path).repos
    assert [file.file_name for revision in repo.revisions for file in revision.files] == ["config.json"]
    assert [path.name for path in (tmp_path / "models--org--repo" / "blobs").iterdir()] == ["etag-{}"]


def test_a_content_that_another_commit_has_stays(tmp_path: Path) -> None:
    old = put(tmp_path, "a" * 40, "model.gguf", b"weights")
    new = tmp_path / "models--org--repo" / "snapshots" / ("b" * 40) / "model.gguf"
    new.parent.mkdir()
    new.symlink_to("../../blobs/etag-weights")
    assert hub_cache.remove(tmp_path, old) == 0
    assert new.read_bytes() == b"weights"
    assert hub_cache.remove(tmp_path, str(new.relative_to(tmp_path))) == 7


def test_the_last_file_takes_the_repository_with_it(tmp_path: Path) -> None:
    model = put(tmp_path, "a" * 40, "model.gguf", b"weights", ref="main")
    assert hub_cache.remove(tmp_path, model) == 7
    assert list(tmp_path.iterdir()) == []


def test_the_content_behind_a_hard_link_goes_with_the_last_of_them(tmp_path: Path) -> None:
    """As it is on Windows, where symbolic links need a right that few have."""
    old = put(tmp_path, "a" * 40, "model.gguf", b"weights")
    repo = tmp_path / "models--org--repo"
    new = repo / "snapshots" / ("b" * 40) / "model.gguf"
    new.parent.mkdir()
    for link in (tmp_path / old, new):
        link.unlink(missing_ok=True)
        link.hardlink_to(repo / "blobs" / "etag-weights")
    assert hub_cache.remove(tmp_path, old) == 0
    assert hub_cache.remove(tmp_path, str(new.relative_to(tmp_path))) == 7
    assert list(tmp_path.iterdir()) == []


def test_a_link_that_leads_out_of_the_cache_is_not_followed(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    outside = tmp_path / "outside.gguf"
    outside.write_bytes(b"mine")
    link = cache / "models--org--repo" / "snapshots" / ("a" * 40) / "model.gguf"
    link.parent.mkdir(parents=True)
    link.symlink_to(outside)
    assert hub_cache.remove(cache, str(link.relative_to(cache))) == 0
    assert outside.read_bytes() == b"mine"
