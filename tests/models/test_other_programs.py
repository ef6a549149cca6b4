from pathlib import Path

import pytest

from localrun.models import other_programs
from localrun.models.store import Store
from localrun.models.synthesize import synthesize


def test_without_any_there_is_no_folder(tmp_path: Path):
    assert other_programs.package_folders(tmp_path, ["no_such_package_at_all"]) == ()


def test_a_package_beside_localrun_and_the_cache_folder_are_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    package = tmp_path / "site" / "package_with_a_model"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('nobody may import this')", encoding="utf-8")
    synthesize("tiny", "Q4_0", package / "Carried.gguf")
    kept = other_programs.package_cache(tmp_path / "cache")
    kept.mkdir(parents=True)
    synthesize("tiny", "Q4_0", kept / "Kept.gguf")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    folders = other_programs.package_folders(tmp_path / "cache", ["package_with_a_model"])
    assert folders == (package, kept)
    store = Store(tmp_path / "models", model_dirs=folders)
    assert [model.name for model in store.list()] == ["tiny", "Carried", "Kept"]
