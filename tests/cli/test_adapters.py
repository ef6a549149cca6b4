"""Adapters on the command line: listed, shown, created, asked for, copied and removed, with a real daemon."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from localrun.cli import exits
from localrun.cli.daemon import for_daemon
from localrun.models import builtin
from tests.daemon import Daemon, running_daemon
from tests.lora_file import write_lora, write_vector


@pytest.fixture(scope="module")
def served() -> Iterator[Daemon]:
    with running_daemon() as daemon:
        yield daemon


def test_from_a_file_to_an_answer(localrun, served: Daemon, tmp_path: Path):
    def ok(*arguments: str) -> str:
        ended = localrun(*arguments, port=served.port, cwd=tmp_path)
        assert ended.returncode == 0, ended.stderr
        return ended.stdout

    assert "ADAPTER" not in ok("list")
    write_lora(builtin.model_path(), tmp_path / "style.gguf")
    write_vector(builtin.model_path(), tmp_path / "happy.gguf")
    (tmp_path / "Modelfile").write_text("ADAPTER ./happy.gguf\nLICENSE MIT\n")
    assert ok("create", "style", "--from", "./style.gguf").endswith("`localrun run MODEL+style`\n")
    assert ok("create", "happy").endswith("`localrun run MODEL+happy`\n")

    models, adapters = ok("list").split("\n\n")
    assert [line.split()[0] for line in models.splitlines()] == ["NAME", "tiny:latest"]
    header, *rows = [line.split() for line in adapters.splitlines()]
    assert header == ["ADAPTER", "KIND", "FOR", "ID", "SIZE", "RANK", "MODIFIED", "SOURCE"]
    assert [row[:4] for row in rows] == [["happy", "control", "vector", "llama"], ["style", "adapter", "llama", "-"]]
    assert [row["name"] for row in json.loads(ok("list", "--json"))] == ["tiny:latest", "happy", "style"]

    card = ok("show", "style")
    for name, value in (
        ("kind", "adapter"),
        ("architecture", "llama"),
        ("rank", "4"),
        ("alpha", "256"),
        ("use", "localrun run MODEL+style"),
    ):
        assert f"{name:<20}{value}" in card
    card = ok("show", "happy")
    assert "kind                control vector" in card
    assert "rank" not in card
    assert "MIT" in card

    assert ok("run", "tiny+style=0.5+happy", "hello")
    assert ok("cp", "style", "twin") == "copied 'style' to 'twin'\n"
    assert ok("rm", "twin", "style", "happy").count("deleted") == 3
    assert (tmp_path / "style.gguf").is_file()
    assert "ADAPTER" not in ok("list")


def test_an_adapter_alone_and_one_that_is_not_here(localrun, served: Daemon, tmp_path: Path):
    write_lora(builtin.model_path(), tmp_path / "alone.gguf")
    assert localrun("create", "alone", "--from", "./alone.gguf", port=served.port, cwd=tmp_path).returncode == 0
    ended = localrun("run", "alone", "hello", port=served.port)
    assert ended.returncode == exits.ERROR
    assert "ask for MODEL+alone" in ended.stderr
    ended = localrun("run", "tiny+nothing", "hello", port=served.port)
    assert "adapter 'nothing' not found" in ended.stderr
    ended = localrun("rm", "tiny+alone", port=served.port)
    assert "localrun rm alone" in ended.stderr


@pytest.mark.parametrize(
    ("name", "sent"),
    [
        ("tiny+style=0.5", "tiny+style=0.5"),
        ("m.gguf+style", "{}/m.gguf+style"),
        ("./m+n.gguf+a+b=2", "{}/m+n.gguf+a+b=2"),
        ("m+n.gguf", "{}/m+n.gguf"),
        ("owner/repo:m.gguf+style", "owner/repo:m.gguf+style"),
        ("tiny+owner/lora:x-lora.gguf", "tiny+owner/lora:x-lora.gguf"),
        ("tiny+owner/lora:x-lora.gguf=0.5+b", "tiny+owner/lora:x-lora.gguf=0.5+b"),
    ],
)
def test_files_before_adapters_are_sent_with_their_whole_path(
    name: str, sent: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    assert for_daemon(name) == sent.format(tmp_path)
