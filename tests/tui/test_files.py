from __future__ import annotations

import base64
import json
import subprocess
from pathlib import Path

import pytest

from localrun.attachments import Attachment, Kind
from localrun.errors import BadRequest
from localrun.tui.files import Question, attached, code_blocks, edited, in_clipboard, to_json, to_markdown
from localrun.tui.history import Message
from localrun.tui.media import examined, extra_of

PNG = b"\x89PNG\r\n\x1a\n" + b"\0" * 20


def test_a_text_goes_into_the_question_and_a_picture_beside_it(tmp_path: Path):
    (tmp_path / "a.py").write_text("print()\n")
    (tmp_path / "b.png").write_bytes(PNG)
    text, picture = (attached(tmp_path / name) for name in ("a.py", "b.png"))
    question = Question("What is this?", (text, picture))
    assert question.content == "a.py:\n```\nprint()\n```\n\nWhat is this?"
    assert question.media == (picture.medium,)
    assert question.extra == {"shown": "What is this?\n[with a.py]", **extra_of([picture.medium])}
    assert Question("alone").extra == {}


def test_a_question_that_is_asked_again_has_the_files_that_are_still_there():
    files = {name: examined(Attachment(name, Kind.PICTURE, name.encode())) for name in ("a.png", "b.png")}
    message = Message(1, 1, None, "user", "what", extra_of([file.medium for file in files.values()]), 1.0)
    question = Question.of(message, {files["b.png"].medium.sha256: b"b.png"}.get)
    assert (question.text, question.attachments, question.extra) == ("what", (files["b.png"],), message.extra)


MESSAGES = [
    Message(1, 1, None, "user", "What is a fox?", {}, 1_700_000_000.0),
    Message(2, 1, 1, "assistant", "An **animal**.", {"thinking": "hm,\nwell", "caption": "3 tokens"}, 1_700_000_001.0),
]


def test_markdown_has_all_that_was_said():
    text = to_markdown("Foxes", "tiny", "Be brief.", MESSAGES)
    assert text.startswith("# Foxes\n\nModel: tiny\n\nSystem prompt:\n\n> Be brief.\n\n## You, 2023-11-1")
    assert text.endswith("> hm,\n> well\n\nAn **animal**.\n")


def test_json_can_be_sent_again():
    document = json.loads(to_json("Foxes", "tiny", "Be brief.", {"temperature": 0.5}, MESSAGES, {}.get))
    assert (document["title"], document["model"], document["options"]) == ("Foxes", "tiny", {"temperature": 0.5})
    assert [(m["role"], m["content"]) for m in document["messages"]] == [
        ("user", "What is a fox?"),
        ("assistant", "An **animal**."),
    ]
    assert document["messages"][1]["created_at"] == "2023-11-14T22:13:21+00:00"


def test_an_exported_chat_has_its_pictures():
    fox = examined(Attachment("fox.png", Kind.PICTURE, PNG)).medium
    messages = [MESSAGES[0]._replace(extra=extra_of([fox])), MESSAGES[1]]
    document = json.loads(to_json("Foxes", "tiny", "", {}, messages, {fox.sha256: PNG}.get))
    assert document["messages"][0]["images"] == [base64.b64encode(PNG).decode()]
    assert "[with fox.png]\n\nWhat is a fox?" in to_markdown("Foxes", "tiny", "", messages)


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


def test_the_clipboards_picture_comes_from_the_program_that_is_at_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "fox.png").write_bytes(PNG)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(BadRequest, match="needs one of these programs: wl-paste, xclip, pngpaste"):
        in_clipboard()
    _script(tmp_path / "wl-paste", "echo 'no compositor' >&2; exit 1")
    with pytest.raises(BadRequest, match="no picture in the clipboard"):
        in_clipboard()
    _script(tmp_path / "xclip", f"while read -r line; do echo; done; exec /bin/cat {tmp_path}/fox.png")
    assert (in_clipboard().file.name, in_clipboard().file.data) == ("clipboard.png", PNG)
