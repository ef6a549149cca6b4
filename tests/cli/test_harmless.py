"""Nothing that came from outside reaches a terminal as a command, whatever field it came in and whichever command shows
it."""

from __future__ import annotations

import io
import json
import os
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from localrun.cli import root
from localrun.visible import visible, visible_json, visible_line
from tests.daemon import running_daemon
from tests.poisoned import POISON, attacks, poisoning

SHOWN = visible(POISON)


@pytest.fixture(scope="module")
def port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """A daemon with a model, an adapter's name, a batch and a log, all of whose answers are poisoned."""
    with running_daemon(LOCALRUN_HF_ENDPOINT="http://127.0.0.1:9") as daemon:
        line = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions"}
        line["body"] = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
        file = daemon.http.post(
            "/v1/files", data={"purpose": "batch"}, files={"file": ("a.jsonl", json.dumps(line).encode())}
        )
        made = daemon.post(
            "/v1/batches", input_file_id=file.json()["id"], endpoint=line["url"], completion_window="24h"
        )
        daemon.post("/api/create", model="other", **{"from": "tiny"}, system="Be brief.", license="Mine.")
        daemon.post("/api/chat", model="tiny", messages=line["body"]["messages"], stream=False)
        assert made.status_code == 200, made.text
        with poisoning(daemon.url) as at:
            yield at


class _Screen(io.TextIOWrapper):
    def isatty(self) -> bool:
        return True


def shown_by(*arguments: str) -> str:
    """What a command writes to a terminal."""
    screens = [_Screen(io.BytesIO(), encoding="utf-8", errors="replace", write_through=True) for _ in range(2)]
    with pytest.MonkeyPatch.context() as patch, open(os.devnull, encoding="utf-8") as nothing:
        patch.setattr(sys, "stdin", nothing)
        patch.setattr(sys, "stdout", screens[0])
        patch.setattr(sys, "stderr", screens[1])
        root.run(arguments)
    return "".join(screen.buffer.getvalue().decode() for screen in screens)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "command",
    [
        *("ps", "ps --json", "top --once", "top --once --json", "list", "list --json", "show other"),
        *("show other --fit", "show other --template", "show other --modelfile", "show other --json"),
        "show other --fit --json",
        *("search", "search q --json", "cache", "cache --json", "usage --by model", "usage --by model --json"),
        *("batch list", "batch list --json", "batch show ID", "batch results ID", "batch cancel ID", "logs"),
        *("run tiny hi", "run tiny hi --verbose", "run tiny hi --json", "run nowhere hi", "cp other third", "rm other"),
        *("stop tiny", "gc", "pull nowhere", "create fourth --from tiny", "create fourth --from nowhere", "version"),
    ],
)  # fmt: skip
def test_answers_of_a_daemon(port, environment, monkeypatch, command):
    for name in ("NO_COLOR", "TERM"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("LOCALRUN_PORT", str(port))
    if "ID" in command:
        batches = json.loads(shown_by("batch", "list", "--json"))
        command = command.replace("ID", batches[0]["id"].removesuffix(POISON))
    text = shown_by(*command.split())
    assert text.strip()
    assert not attacks(text), text


def test_the_names_that_tables_show_are_there(port, environment, monkeypatch):
    monkeypatch.setenv("LOCALRUN_PORT", str(port))
    shown_by("run", "tiny", "hi")  # loads it
    for command in ("ps", "top --once", "list", "cache", "usage --by model"):
        text = shown_by(*command.split())
        assert f"tiny{SHOWN}" in text.replace("tiny:latest", "tiny"), command


@pytest.fixture
def free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return int(listening.getsockname()[1])


def test_logs_of_a_daemon_that_is_gone(environment, monkeypatch, free_port):
    monkeypatch.setenv("LOCALRUN_PORT", str(free_port))
    folder = Path(environment["LOCALRUN_HOME"]) / "state"
    folder.mkdir(parents=True)
    (folder / f"daemon-{free_port}.log").write_text(f"said {POISON}\nnext\n", newline="")
    text = shown_by("logs")
    assert "said ␛]52;c;aGk=␇" in text
    assert not attacks(text)


def test_keys_made_by_hand(environment):
    shown_by("key", "create", "--name", "one")
    path = next((Path(environment["LOCALRUN_HOME"]) / "data").glob("*keys*"))
    path.write_text(path.read_text().replace("one", f"one{json.dumps(POISON)[1:-1]}"))
    assert not attacks(shown_by("key", "list"))


def test_arguments(environment, port, monkeypatch):
    monkeypatch.setenv("LOCALRUN_PORT", str(port))
    for command in ("show", "rm", "stop", "pull", "run"):
        assert not attacks(shown_by(command, f"x{POISON}", *(["hi"] if command == "run" else []))), command


def test_text_is_as_long_as_before_and_json_has_the_same_value():
    assert len(SHOWN) == len(POISON)
    assert visible_line("a\tb\nc") == "a␉b␊c"
    assert visible("\ud800") == "\ufffd"
    value = {"a": "\x9b\u202e\x7fé"}
    assert json.loads(visible_json(json.dumps(value, ensure_ascii=False))) == value
