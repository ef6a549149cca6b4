from __future__ import annotations

import base64
from pathlib import Path

import pytest

from localrun.tui.attachment import MAX_TEXT_BYTES, BadAttachment, Question, read_attachment

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
        (b"x" * (MAX_TEXT_BYTES + 1), "larger than 1 MiB"),
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
