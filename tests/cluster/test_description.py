"""An app by its contents: what is the same on two machines, and what is not."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import msgspec
import pytest

from localrun.cluster.description import Description, Scale, app_name, contents_of, described, found
from localrun.config import NOTHING_ASKED, LoadSettings
from localrun.errors import BadRequest, Conflict, ModelNotFound
from localrun.models import naming
from localrun.models.storage.manifest import Source
from localrun.models.storage.store import Store


def test_a_copy_on_another_machine_is_the_same(models_dir: Path, tmp_path: Path) -> None:
    there = tmp_path / "there"
    there.mkdir()
    shutil.copy(models_dir / "alpha.gguf", there / "alpha.gguf")
    os.utime(there / "alpha.gguf", (1, 1))
    told = described(Store(models_dir), "alpha", NOTHING_ASKED, 0)
    assert found(Store(there), told).name == "alpha"


def test_another_model_of_the_same_name_is_refused(models_dir: Path) -> None:
    told = described(Store(models_dir), "alpha", NOTHING_ASKED, 0)
    with (models_dir / "alpha.gguf").open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        last = file.read(1)[0]
        file.seek(-1, os.SEEK_END)
        file.write(bytes([last ^ 1]))
    with pytest.raises(Conflict, match="'alpha' is here with other contents"):
        found(Store(models_dir), told)
    (models_dir / "alpha.gguf").unlink()
    with pytest.raises(ModelNotFound):
        found(Store(models_dir), told)


def test_the_fingerprint_is_of_contents_and_settings_alone() -> None:
    one = Description(model="m", contents="c")
    assert one.fingerprint == msgspec.structs.replace(one, n_gpus=0.5, scale=Scale(1, 4)).fingerprint
    others = [
        msgspec.structs.replace(one, **changes)
        for changes in ({"contents": "d"}, {"model": "n"}, {"load": LoadSettings(num_ctx=512)})
    ]
    assert len({each.fingerprint for each in (one, *others)}) == 4


def test_names_of_apps_tell_models_apart_and_hold_nothing_odd() -> None:
    names = {app_name(model) for model in ("a/b:c", "a_b_c", "a/b_c", "modèle")}
    assert len(names) == 4
    assert all(set(name) <= set("abcdefghijklmnopqrstuvwxyz0123456789_-.") for name in names)


def test_copies_have_the_same_contents(models_dir: Path) -> None:
    store = Store(models_dir)
    assert contents_of(store, store.resolve("alpha")) == contents_of(store, store.resolve("beta"))


def test_what_a_description_says_holds_on_every_machine(models_dir: Path, tmp_path: Path) -> None:
    store = Store(models_dir)
    naming.copy(store, "alpha", "mine")
    naming.copy(store, "alpha", "pulled")
    pulled = store.resolve("pulled").manifest
    assert pulled is not None
    naming.point(store, "pulled", msgspec.structs.replace(pulled, source=Source(kind="hub", repo="a/b"), system="hi"))
    said = {name: described(store, name, NOTHING_ASKED, 0).files for name in ("alpha", "mine", "pulled")}
    manifests = {name: one.manifest for name, one in said.items() if one is not None}
    assert [one.source.kind for one in manifests.values()] == ["cluster", "cluster", "hub"]
    assert len({(file.digest, file.path) for one in manifests.values() for file in one.files}) == 1
    assert str(models_dir) not in msgspec.json.encode(manifests).decode()
    assert manifests["pulled"].system == "hi"


def test_texts_that_are_too_long_for_every_report_are_left_out_or_refused(models_dir: Path) -> None:
    store = Store(models_dir)
    naming.copy(store, "alpha", "mine")
    mine = store.resolve("mine").manifest
    assert mine is not None
    naming.point(store, "mine", msgspec.structs.replace(mine, licence_text="x" * 200_000))
    files = described(store, "mine", NOTHING_ASKED, 0).files
    assert files is not None
    assert files.manifest.licence_text == ""
    naming.point(store, "mine", msgspec.structs.replace(mine, system="x" * 200_000))
    with pytest.raises(BadRequest, match="the system prompt, messages and template of 'mine' have 2"):
        described(store, "mine", NOTHING_ASKED, 0)
