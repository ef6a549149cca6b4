"""A model whose files were replaced answers as the new one: while it is loaded, loaded anew, and after a restart. The
first shard of a split model is the same in both, as it is where only the weights of the others were mended."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest

from localrun.models import builtin
from tests.daemon import Daemon, running_daemon
from tests.hub.repository import Repository
from tests.hub.server import Hub
from tests.models.test_shards import split_copy

# Long enough to be kept on disk when the model is unloaded.
PROMPT = "Once upon a time there was a dragon who lived in a valley behind the hills. " * 12


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Path], list[Path]]:
    """The shards of one model, and those of another that differs in the weights of the later ones alone."""
    folders = [tmp_path_factory.mktemp(name) for name in ("old", "new")]
    split_copy(builtin.model_path(), folders[0])
    shutil.copytree(folders[0], folders[1], dirs_exist_ok=True)
    old, new = (sorted(folder.iterdir()) for folder in folders)
    for path in new[1:]:
        for tensor in gguf.GGUFReader(path, "r+").tensors:
            if "ffn_up" in tensor.name:
                tensor.data[:] = tensor.data[::-1].copy()
    assert old[0].read_bytes() == new[0].read_bytes()
    assert [path.stat().st_size for path in old] == [path.stat().st_size for path in new]
    return old, new


def asked(daemon: Daemon, model: str, **more: Any) -> tuple[str, int]:
    """The text, and how many tokens of the prompt were known."""
    options = {"temperature": 0, "num_predict": 12}
    answer = daemon.post(
        "/api/generate", model=model, prompt=PROMPT, raw=True, stream=False, options=options, **more
    ).json()
    return answer["response"], answer.get("prompt_eval_cached_count", 0)


def digest(daemon: Daemon, model: str) -> str:
    rows = daemon.http.get("/api/tags").json()["models"]
    return next(row["digest"] for row in rows if row["name"] == f"{model}:latest")


def renamed(source: Path, target: Path) -> None:
    shutil.copy2(source, target.with_name("coming"))
    target.with_name("coming").replace(target)


def in_place(source: Path, target: Path) -> None:
    """The old modification time is put back."""
    status = target.stat()
    with target.open("r+b") as file:
        file.write(source.read_bytes())
    os.utime(target, ns=(status.st_atime_ns, status.st_mtime_ns))


@pytest.mark.parametrize("replace", [renamed, in_place])
def test_later_shards_that_are_replaced(
    made: tuple[list[Path], list[Path]], tmp_path: Path, replace: Callable[[Path, Path], None]
) -> None:
    old, new = made
    models, home = tmp_path / "models", tmp_path / "home"
    models.mkdir()
    for path in old:
        shutil.copy2(path, models)
    with running_daemon(fake=False, LOCALRUN_MODELS=str(models), LOCALRUN_HOME=str(home)) as daemon:
        theirs, _ = asked(daemon, str(new[0]), keep_alive=0)
        first, _ = asked(daemon, "copy")
        assert first != theirs
        before = digest(daemon, "copy")
        for source in new[1:]:
            replace(source, models / source.name)
        assert asked(daemon, "copy", keep_alive=0) == (theirs, 0), "while it was loaded"
        assert digest(daemon, "copy") != before
        text, n_known = asked(daemon, "copy")
        assert text == theirs
        assert n_known > 0, "what the new files computed is kept"
    for source in old[1:]:
        replace(source, models / source.name)
    with running_daemon(fake=False, LOCALRUN_MODELS=str(models), LOCALRUN_HOME=str(home)) as daemon:
        assert asked(daemon, "copy") == (first, 0), "after a restart"


@pytest.mark.parametrize("keep_alive", [0, 300])
def test_a_pull_that_brings_other_later_shards(made: tuple[list[Path], list[Path]], keep_alive: int) -> None:
    old, new = ({path.name: path.read_bytes() for path in paths} for paths in made)
    with Hub(Repository("o/shards-GGUF", old)) as hub, running_daemon(fake=False, HF_ENDPOINT=hub.endpoint) as daemon:
        theirs, _ = asked(daemon, str(made[1][0]), keep_alive=0)
        for files, text in ((old, None), (new, theirs)):
            hub.repositories["o/shards-GGUF"] = Repository("o/shards-GGUF", files)
            assert daemon.post("/api/pull", model="o/shards-GGUF", stream=False).json() == {"status": "success"}
            answer, n_known = asked(daemon, "o/shards-GGUF", keep_alive=keep_alive)
            assert n_known == 0
            assert (answer == theirs) is (text is not None)
