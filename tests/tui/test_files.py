from __future__ import annotations

import base64
import json
import subprocess
from pathlib import Path

import pytest

from localrun.tui.files import (
    MAX_TEXT_BYTES,
    BadAttachment,
    Question,
    code_blocks,
    edited,
    read_attachment,
    to_json,
    to_markdown,
)
from localrun.tui.history import Message

PNG = b"\x89PNG\r\n\x1a\n" + b"\0" * 20


def test_a_text_goes_into_the_question_and_an_image_beside_it(tmp_path: Path):
    (tmp_path / "a.py").write_text("print('```')\n")
    (tmp_path / "b.png").write_bytes(PNG)
    files = tuple(read_attachment(tmp_path / name) for name in ("a.py", "b.png"))
    question = Question("What is this?", files)
    assert question.content == "a.py:\n````\nprint('```')\n````\n\nWhat is this?"
    assert question.extra == {
        "shown": "What is this?\n[with a.py, b.png]",
        "images": [base64.b64encode(PNG).decode()],
    }
    assert Question("alone").extra == {}


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"\xff\xfe\x00binary", "neither text"),
        (b"a\0b", "not a text"),
        (b"x" * (MAX_TEXT_BYTES + 1), "larger than 1 MB"),
    ],
)
def test_what_cannot_be_sent_is_said(tmp_path: Path, content: bytes, reason: str):
    (tmp_path / "f").write_bytes(content)
    with pytest.raises(BadAttachment, match=reason):
        read_attachment(tmp_path / "f")


def test_no_file_and_a_folder(tmp_path: Path):
    with pytest.raises(BadAttachment, match="cannot be read"):
        read_attachment(tmp_path / "nowhere")
    with pytest.raises(BadAttachment, match="not a file"):
        read_attachment(tmp_path)


MESSAGES = [
    Message(1, 1, None, "user", "What is a fox?", {}, 1_700_000_000.0),
    Message(2, 1, 1, "assistant", "An **animal**.", {"thinking": "hm,\nwell", "caption": "3 tokens"}, 1_700_000_001.0),
]


def test_markdown_has_all_that_was_said():
    text = to_markdown("Foxes", "tiny", "Be brief.", MESSAGES)
    assert text.startswith("# Foxes\n\nModel: tiny\n\nSystem prompt:\n\n> Be brief.\n\n## You, 2023-11-1")
    assert text.endswith("> hm,\n> well\n\nAn **animal**.\n")


def test_json_can_be_sent_again():
    document = json.loads(to_json("Foxes", "tiny", "Be brief.", {"temperature": 0.5}, MESSAGES))
    assert (document["title"], document["model"], document["options"]) == ("Foxes", "tiny", {"temperature": 0.5})
    assert [(m["role"], m["content"]) for m in document["messages"]] == [
        ("user", "What is a fox?"),
        ("assistant", "An **animal**."),
    ]
    assert document["messages"][1]["created_at"] == "2023-11-14T22:13:21+00:00"


@pytest.mark.parametrize(
    ("markdown", "blocks"),
    [
        ("no code", []),
        ("```python\na\nb\n```\ntext\n~~~\nc\n~~~", ["a\nb", "c"]),
        ("````md\n```\nin\n```\n````", ["```\nin\n```"]),
        ("```\ncut off", ["cut off"]),
        ("```\n```", [""]),
    ],
)
def test_code_blocks(markdown: str, blocks: list[str]):
    assert code_blocks(markdown) == blocks


def _script(path: Path, body: str) -> str:
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return str(path)


def test_the_editors_text_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("VISUAL", f"{_script(tmp_path / 'ed', 'echo more >> $2')} --flag")
    assert edited("first\n", tmp_path) == "first\nmore"


def test_an_editor_that_fails_or_is_missing_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("VISUAL", _script(tmp_path / "ed", "exit 3"))
    with pytest.raises(subprocess.CalledProcessError):
        edited("x", tmp_path)
    monkeypatch.setenv("VISUAL", str(tmp_path / "nothing"))
    with pytest.raises(OSError, match="No such file"):
        edited("x", tmp_path)
