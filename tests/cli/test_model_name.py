"""Names stay names; files become absolute, whichever folder the daemon runs in."""

from __future__ import annotations

from pathlib import Path

import pytest

from localrun.cli.model_name import for_daemon


@pytest.mark.parametrize("name", ["tiny", "tiny:latest", "localrun/tiny", "org/name:Q4_K_M", ""])
def test_names_stay(name):
    assert for_daemon(name) == name


@pytest.mark.parametrize("name", ["x.gguf", "./x.gguf", "sub/x.gguf", "./x", "sub/plain"])
def test_files_become_absolute(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "plain").touch()
    assert for_daemon(name) == str(tmp_path / name)


def test_home_and_absolute_paths():
    assert for_daemon("~/m/x.gguf") == str(Path.home() / "m" / "x.gguf")
    assert for_daemon("/m/x.gguf") == "/m/x.gguf"


def test_a_file_of_a_repository_on_the_hub_is_no_path():
    for name in (
        "owner/repo:model-Q4_0.gguf",
        "hf.co/owner/repo@v1:m.gguf",
        "https://huggingface.co/owner/repo:m.gguf",
    ):
        assert for_daemon(name) == name
    for path in ("./owner/repo:m.gguf", "../repo:m.gguf", "repo:m.gguf", "/owner/repo:m.gguf"):
        assert for_daemon(path) == str(Path(path).absolute())
