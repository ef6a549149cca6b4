"""`localrun run` with pictures, sounds and texts."""

from __future__ import annotations

import base64
import os
import socket
import sys
from pathlib import Path
from typing import Any

import pytest

from localrun.cli import exits

PNG = b"\x89PNG\r\n\x1a\npicture"
WAV = b"RIFF\x24\0\0\0WAVEfmt "
SENT_PNG, SENT_WAV = (base64.b64encode(data).decode() for data in (PNG, WAV))


@pytest.fixture
def folder(tmp_path: Path, daemon: Any) -> Path:
    daemon.shown = daemon.shown | {"capabilities": ["completion", "vision", "audio"]}
    (tmp_path / "a.png").write_bytes(PNG)
    (tmp_path / "b.wav").write_bytes(WAV)
    (tmp_path / "notes.txt").write_text("Foxes are red.")
    return tmp_path


def _asked(daemon: Any) -> dict[str, Any]:
    (body,) = daemon.chats
    (message,) = body["messages"]
    return dict(message)


def test_files_after_the_prompt_are_attached(localrun, daemon, folder: Path):
    ended = localrun("run", "m", "what is this?", "a.png", str(folder / "b.wav"), port=daemon.port, cwd=folder)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert _asked(daemon) == {"role": "user", "content": "what is this?", "images": [SENT_PNG, SENT_WAV]}


def test_words_are_one_prompt_and_a_text_is_part_of_it(localrun, daemon, folder: Path):
    localrun("run", "m", "sum", "up", "notes.txt", port=daemon.port, cwd=folder)
    assert _asked(daemon) == {"role": "user", "content": "notes.txt:\n```\nFoxes are red.\n```\n\nsum up"}


def test_a_path_in_the_prompt_is_attached(localrun, daemon, folder: Path):
    localrun("run", "m", "compare ./a.png with './b.wav'", port=daemon.port, cwd=folder)
    assert _asked(daemon) == {"role": "user", "content": "compare a.png with b.wav", "images": [SENT_PNG, SENT_WAV]}


def test_a_picture_alone_and_a_text_that_is_only_named(localrun, daemon, folder: Path):
    localrun("run", "m", "a.png", port=daemon.port, cwd=folder)
    assert _asked(daemon) == {"role": "user", "content": "", "images": [SENT_PNG]}
    daemon.bodies.clear()
    localrun("run", "m", "notes.txt", port=daemon.port, cwd=folder)
    assert _asked(daemon) == {"role": "user", "content": "notes.txt"}


def test_a_picture_is_piped_in(localrun, daemon, folder: Path):
    localrun("run", "m", "what is this?", stdin=PNG, port=daemon.port)
    assert _asked(daemon) == {"role": "user", "content": "what is this?", "images": [SENT_PNG]}


def test_what_cannot_be_sent_is_said_before_anything_is(localrun, daemon, folder: Path):
    (folder / "c.bin").write_bytes(b"\xff\xfe\0")
    (folder / "many").mkdir()
    many = [folder / "many" / f"{number}.png" for number in range(17)]
    for path in many:
        path.write_bytes(PNG)
    for files, reason in (
        (["nowhere.png"], "nowhere.png was not found"),
        (["c.bin"], "c.bin is not a picture (PNG, JPEG, GIF, WebP, BMP), sound (WAV, MP3, FLAC, OGG) or text (UTF-8)"),
        (map(str, many), "17 pictures and sounds are too many for one question; at most 16"),
    ):
        ended = localrun("run", "m", "what is this?", *files, port=daemon.port, cwd=folder)
        assert (ended.returncode, ended.stderr) == (exits.ERROR, f"error: {reason}\n")
    assert daemon.chats == []


def test_a_model_that_cannot_see_is_not_asked(localrun, daemon, folder: Path):
    daemon.shown = daemon.shown | {"capabilities": ["completion", "audio"]}
    ended = localrun("run", "m", "what is this?", "a.png", port=daemon.port, cwd=folder)
    assert (ended.returncode, daemon.chats) == (exits.ERROR, [])
    assert ended.stderr == "error: a.png: m cannot see pictures; choose a model that can\n"


def test_a_path_is_text_to_a_model_for_text(localrun, daemon, folder: Path):
    daemon.shown = daemon.shown | {"capabilities": ["completion"]}
    ended = localrun("run", "m", "why is ./a.png so large?", port=daemon.port, cwd=folder)
    assert (ended.returncode, _asked(daemon)["content"]) == (0, "why is ./a.png so large?")
    assert ended.stderr == "(m cannot see pictures or hear sound; a.png is only text to it)\n"


def test_a_path_in_a_piped_text_is_no_file(localrun, daemon, folder: Path):
    localrun("run", "m", "sum up", stdin=f"a log line about {folder}/a.png", port=daemon.port)
    assert _asked(daemon) == {"role": "user", "content": f"sum up\n\na log line about {folder}/a.png"}


@pytest.mark.skipif(sys.platform == "win32", reason="needs pipes and devices with names")
def test_what_is_no_file_or_has_nothing_in_it_is_refused_at_once(localrun, daemon, folder: Path):
    os.mkfifo(folder / "pipe.png")
    (folder / "empty.png").touch()
    (folder / "empty.txt").touch()
    with (folder / "huge.bin").open("wb") as huge:
        huge.truncate(10**12)
    (folder / "huge.png").write_bytes(PNG)
    os.truncate(folder / "huge.png", 10**12)
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(str(folder / "s.png"))
    for path, said in (
        ("/dev/zero", "a device"), ("./", "is a folder"), ("pipe.png", "is a pipe"), ("s.png", "a socket"),
        ("empty.png", "is empty"), ("empty.txt", "is empty"), ("huge.bin", "larger than 1 MB"),
        ("huge.png", "larger than 24 MB"), ("none.png", "was not found"),
    ):  # fmt: skip
        ended = localrun("run", "m", "what is this?", path, port=daemon.port, cwd=folder)
        assert ended.returncode != 0, path
        assert path.rstrip("/").lstrip("./") in ended.stderr, path
        assert said in ended.stderr, (path, ended.stderr)
    assert not daemon.chats
    listening.close()


def test_a_folder_s_name_may_be_a_word_of_the_prompt(localrun, daemon, folder: Path):
    (folder / "src").mkdir()
    localrun("run", "m", "explain", "src", port=daemon.port, cwd=folder)
    assert _asked(daemon) == {"role": "user", "content": "explain src"}
