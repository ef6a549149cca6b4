"""`create`, `cp`, `rm`, `gc` and `push` against a daemon with fake engines."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from localrun.models.synthesize import synthesize
from tests.daemon import Daemon, running_daemon


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    folder = tmp_path_factory.mktemp("models")
    synthesize("tiny", "F16", folder / "big.gguf")
    with running_daemon(LOCALRUN_MODELS=str(folder)) as daemon:
        yield daemon


def names(running: Daemon) -> list[str]:
    return [row["name"] for row in running.http.get("/api/tags").json()["models"]]


def test_create_quantize_copy_and_remove(localrun, running, tmp_path):
    modelfile = tmp_path / "Modelfile"
    modelfile.write_text('FROM big\nSYSTEM """Be\nbrief."""\nPARAMETER temperature 0.3\n')
    made = localrun("create", "small", "-f", str(modelfile), "-q", "q8_0", port=running.port)
    assert made.returncode == 0, made.stderr
    assert made.stdout.splitlines()[1] == "quantizing F16 model to Q8_0"
    assert made.stdout.splitlines()[-2:] == ["writing manifest", "success"]
    assert "Be\n  brief." in localrun("show", "small", port=running.port).stdout
    text = localrun("show", "small", "--modelfile", port=running.port).stdout
    again = localrun("create", "again", "-f", "-", port=running.port, stdin=text)
    assert again.returncode == 0, again.stderr
    assert localrun("show", "again", "--modelfile", port=running.port).stdout == text
    localrun("rm", "again", port=running.port)
    assert localrun("cp", "small", "other", port=running.port).stdout == "copied 'small' to 'other'\n"
    first = localrun("rm", "small", port=running.port).stdout
    assert first.startswith("deleted 'small', freed 0 B\n  kept ")
    assert first.endswith("'other' uses it\n")
    assert localrun("rm", "other", port=running.port).stdout == "deleted 'other', freed 4.0 MB\n"
    assert names(running) == ["tiny", "big"]


def test_create_from_a_name(localrun, running):
    assert localrun("create", "twin", "--from", "tiny", port=running.port).returncode == 0
    assert "twin" in names(running)
    localrun("rm", "twin", port=running.port)


def test_errors_name_the_line_and_the_way_out(localrun, running, tmp_path):
    modelfile = tmp_path / "Modelfile"
    modelfile.write_text("FROM tiny\n\nPARAMETER top_p 7\n")
    ended = localrun("create", "wrong", "-f", str(modelfile), port=running.port)
    assert ended.returncode == 1
    assert ended.stderr.startswith("error: line 3 of the Modelfile: ")
    assert localrun("create", "wrong", "-f", str(tmp_path / "none"), port=running.port).returncode == 2
    assert localrun("create", "wrong", "-f", "x", "--from", "y", port=running.port).returncode == 2
    assert localrun("rm", "nothing", port=running.port).returncode == 5
    for command, message in ((("rm", "tiny"), "is built in"), (("push", "tiny"), "is not supported")):
        ended = localrun(*command, port=running.port)
        assert ended.returncode == 1
        assert message in ended.stderr
    assert "wrong" not in names(running)


def test_gc(localrun, running):
    digest = "sha256:" + hashlib.sha256(b"stray").hexdigest()
    running.http.post(f"/api/blobs/{digest}", content=b"stray")
    assert "--all deletes them" in localrun("gc", port=running.port).stdout
    ended = localrun("gc", "--all", port=running.port).stdout.splitlines()
    assert ended[0].endswith(digest.replace(":", "-"))
    assert ended[-1] == "freed 5 B"


def test_unusable_files_are_named(localrun, running, tmp_path):
    folder = Path(running.post("/api/show", model="big").json()["localrun"]["path"]).parent
    (folder / "broken.gguf").write_bytes(b"GGUF nonsense")
    ended = localrun("list", port=running.port)
    assert "broken" not in ended.stdout
    assert ended.stderr.startswith("not usable: ")
    localrun("rm", "broken", port=running.port)
    assert localrun("list", port=running.port).stderr == ""
