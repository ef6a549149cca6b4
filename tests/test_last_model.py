"""Which model is begun with where none is named, and what is remembered of the one that was used last."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from localrun.errors import DaemonUnreachable, ModelNotFound
from localrun.last_model import first_model, kept_at, last_model, remember_model

TINY = {
    "name": "tiny", "capabilities": ["completion"], "modified_at": "2026-09-01", "loaded": True, "source": "built-in",
}  # fmt: skip
TOY = TINY | {"name": "toy"}
OLD = {"name": "qwen3:8b", "capabilities": ["completion", "tools"], "modified_at": "2026-01-01"}
NEW = {"name": "gemma3:4b", "capabilities": ["completion"], "modified_at": "2026-02-01"}
BASE = {"name": "base", "capabilities": ["completion"], "modified_at": "2026-03-01"}
EMBEDDER = {"name": "all-minilm", "capabilities": ["embedding"], "modified_at": "2026-04-01"}


class Here:
    """A daemon with these models. `base` has no chat template; the file of one that is `broken` is damaged."""

    def __init__(self, *rows: dict[str, Any], broken: str = "") -> None:
        self._rows = rows
        self._broken = broken

    async def models(self) -> list[dict[str, Any]]:
        return list(self._rows)

    async def show(self, model: str) -> dict[str, Any]:
        if model == self._broken or model not in {row["name"] for row in self._rows}:
            raise ModelNotFound(model)
        return {"template": "" if model == "base" else "{{ messages }}"}


@pytest.mark.parametrize(
    ("here", "last", "begun_with"),
    [
        (Here(TINY, OLD, NEW), "qwen3:8b", "qwen3:8b"),
        (Here(TINY, TOY, OLD, NEW), "", "gemma3:4b"),
        (Here(TINY, TOY, OLD, NEW), "toy", "toy"),
        (Here(TINY, OLD, NEW), "gone:1b", "gemma3:4b"),
        (Here(TINY, OLD | {"loaded": True}, NEW), "", "qwen3:8b"),
        (Here(TINY, BASE, EMBEDDER, OLD), "", "qwen3:8b"),
        (Here(TINY, OLD, NEW, broken="gemma3:4b"), "gemma3:4b", "qwen3:8b"),
        (Here(TINY, BASE, EMBEDDER), "", "tiny"),
    ],
)
async def test_the_model_to_begin_with(here: Here, last: str, begun_with: str) -> None:
    assert await first_model(here, last) == begun_with


async def test_a_daemon_that_does_not_answer_is_no_reason_for_another_model() -> None:
    class Gone(Here):
        async def models(self) -> list[dict[str, Any]]:
            raise DaemonUnreachable("gone")

    with pytest.raises(DaemonUnreachable):
        await first_model(Gone(), "qwen3:8b")


def test_the_last_one_is_kept_for_its_owner_alone_and_the_toy_never(tmp_path: Path) -> None:
    path = tmp_path / "state" / "last-model"
    assert last_model(path) == ""
    for name in ("qwen3:8b", "tiny", "tiny:latest"):
        remember_model(path, name)
        assert last_model(path) == "qwen3:8b"
    assert path.stat().st_mode & 0o077 == 0
    remember_model(path, "/models/größe.gguf+style")
    assert last_model(path) == "/models/größe.gguf+style"


def test_a_file_that_cannot_be_read_or_written_is_as_none(tmp_path: Path) -> None:
    damaged = tmp_path / "last-model"
    damaged.write_bytes(b"\xff\xfe")
    assert last_model(damaged) == ""
    remember_model(damaged / "below-a-file", "qwen3:8b")
    assert last_model(damaged / "below-a-file") == ""


def test_each_machine_has_its_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("LOCALRUN_HOME", str(tmp_path))
    urls = ("http://127.0.0.1:11434", "http://[::1]:5000", "https://studio.local:11434", "https://[fd00::1]:11434")
    here = ("last-model", "last-model", "last-model-studio.local", "last-model-fd00__1")
    assert [kept_at(url) for url in urls] == [tmp_path / "state" / name for name in here]
