"""Files that go with a question: what is one, where its path stands in a text, and what cannot be sent."""

from __future__ import annotations

import base64
import os
from pathlib import Path

import pytest

from localrun import attachments
from localrun.attachments import MAX_MEDIA_BYTES, MAX_TEXT_BYTES, Attachment, Kind
from localrun.errors import BadRequest

PNG = b"\x89PNG\r\n\x1a\n" + b"\0" * 20


@pytest.mark.parametrize(
    ("data", "kind"),
    [
        (PNG, Kind.PICTURE),
        (b"\xff\xd8\xff\xe0\0\x10JFIF", Kind.PICTURE),
        (b"GIF89a\1\0\1\0", Kind.PICTURE),
        (b"BM\x46\0\0\0\0\0\0\0\x36\0\0\0", Kind.PICTURE),
        (b"RIFF\x24\0\0\0WEBPVP8 ", Kind.PICTURE),
        (b"RIFF\x24\0\0\0WAVEfmt ", Kind.SOUND),
        (b"RIFF\x24\0\0\0AVI LIST", None),
        (b"fLaC\0\0\0\x22", Kind.SOUND),
        (b"OggS\0\2", Kind.SOUND),
        (b"ID3\4\0\0\0\0\0\0", Kind.SOUND),
        (b"\xff\xfb\x90\x00", Kind.SOUND),
        (b"\xff\xfe\x00b", None),  # UTF-16
        (b"ID3 tags are old", None),
        (b"BMW builds cars", None),
        (b"", None),
    ],
)
def test_the_first_bytes_say_what_a_file_is(data: bytes, kind: Kind | None):
    assert attachments.media_kind(data) is kind


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"\xff\xfe\x00binary", "is not a picture .PNG.* or text"),
        (b"a\0b", "is not a picture"),
        (b"x" * (MAX_TEXT_BYTES + 1), "larger than 1 MB"),
        (PNG + b"\0" * MAX_MEDIA_BYTES, "larger than 24 MB"),
    ],
)
def test_what_cannot_be_sent_is_said(tmp_path: Path, content: bytes, reason: str):
    (tmp_path / "f").write_bytes(content)
    with pytest.raises(BadRequest, match=reason):
        attachments.read(tmp_path / "f")


def test_no_file_a_folder_and_a_pipe_without_a_writer(tmp_path: Path):
    with pytest.raises(BadRequest, match="was not found"):
        attachments.read(tmp_path / "nowhere")
    with pytest.raises(BadRequest, match="not a file"):
        attachments.read(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(BadRequest, match="not a file"):
        attachments.read(tmp_path / "pipe")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("a.png", "b c.JPG", "d'e.wav", "9.41\u202fAM.png", "notes.txt"):
        (tmp_path / name).write_bytes(PNG)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


@pytest.mark.parametrize(
    ("text", "left", "names"),
    [
        ("what is ./a.png?", "what is a.png?", ["a.png"]),
        ("./a.png", "", ["a.png"]),
        (" './a.png'  '{folder}/b c.JPG' ", "", ["a.png", "b c.JPG"]),
        ("it's ~/a.png, isn't it", "it's a.png, isn't it", ["a.png"]),
        ("see {folder}/b\\ c.JPG and ./d\\'e.wav.", "see b c.JPG and d'e.wav.", ["b c.JPG", "d'e.wav"]),
        ("see '{folder}/d'\\''e.wav' now", "see d'e.wav now", ["d'e.wav"]),
        ("look: file://{folder}/b%20c.JPG", "look: b c.JPG", ["b c.JPG"]),
        ('"b c.JPG" now', "b c.JPG now", ["b c.JPG"]),
        ("./a.png ./a.png", "", ["a.png"]),
        ("see ./9.41\u202fAM.png\u202f?", "see 9.41\u202fAM.png\u202f?", ["9.41\u202fAM.png"]),
        # Not: a name alone, a text, a file that is not there, the user of somebody else.
        ("why is a.png too large", "why is a.png too large", []),
        ("sum up ./notes.txt", "sum up ./notes.txt", []),
        ("./nowhere.png and ~nobody-here/a.png", "./nowhere.png and ~nobody-here/a.png", []),
        ("/" + "x" * 5000 + ".png", "/" + "x" * 5000 + ".png", []),
        ("./a\0.png", "./a\0.png", []),
    ],
)
def test_paths_in_a_question(folder: Path, text: str, left: str, names: list[str]):
    found = attachments.find(text.replace("{folder}", str(folder)))
    assert (found.text, [path.name for path in found.paths]) == (left, names)


def test_a_pasted_text_is_a_file_only_if_it_is_nothing_else(folder: Path):
    assert attachments.dropped(f"{folder}/a.png \n") == (folder / "a.png",)
    assert attachments.dropped(f"{folder}/b c.JPG") == (folder / "b c.JPG",)
    assert attachments.dropped(f"'{folder}/b c.JPG' {folder}/a.png") == (folder / "b c.JPG", folder / "a.png")
    assert attachments.dropped(f"see {folder}/a.png") == ()
    assert attachments.dropped(f"{folder}/notes.txt") == ()
    assert attachments.dropped("words") == ()


@pytest.mark.skipif(os.sep != "/", reason="other terminals quote otherwise")
@pytest.mark.parametrize(
    "text",
    [
        r"""'{folder}/it'\''s.png' '{folder}/b c.JPG'""",  # terminals of GNOME
        r"""'{folder}/it'"'"'s.png' '{folder}/b c.JPG'""",  # kitty
        r"""{folder}/it\'s.png {folder}/b\ c.JPG """,  # macOS
        "{folder}/it's.png\r{folder}/b c.JPG\r",  # copied in a file manager
        "file://{folder}/it's.png\nfile://{folder}/b%20c.JPG\n",
    ],
)
def test_files_are_dropped_in_the_ways_of_terminals(folder: Path, text: str):
    (folder / "it's.png").write_bytes(PNG)
    text = text.format(folder=folder)
    assert attachments.dropped(text) == (folder / "it's.png", folder / "b c.JPG")
    assert attachments.dropped(f"{text} and more") == ()


def test_a_pasted_book_is_read_up_to_its_first_word(monkeypatch: pytest.MonkeyPatch):
    looked: list[str] = []
    monkeypatch.setattr(attachments, "path_of", lambda text: looked.append(text) or Path(text))
    assert attachments.dropped("It's said of 'it' in c.png\n" * 10_000) == ()
    assert len(looked) < 10


def test_the_files_of_a_command(folder: Path):
    assert attachments.named("b c.JPG") == (Path("b c.JPG"),)
    assert attachments.named("'b c.JPG' ~/notes.txt nowhere.png") == (
        *(Path("b c.JPG"), folder / "notes.txt", Path("nowhere.png")),
    )


def test_a_text_goes_into_the_question_and_media_beside_it():
    files = (Attachment("a.py", Kind.TEXT, b"print('```')\n"), Attachment("b.png", Kind.PICTURE, PNG))
    assert attachments.user_message("What is this?", files) == {
        "role": "user",
        "content": "a.py:\n````\nprint('```')\n````\n\nWhat is this?",
        "images": [base64.b64encode(PNG).decode()],
    }
    assert attachments.user_message("alone", ()) == {"role": "user", "content": "alone"}


@pytest.mark.parametrize(
    ("text", "names", "question"),
    [
        ("What is this?", ("a.py", "b.md"), "What is this?"),
        ("", ("a.py", "b.md"), "a.py, b.md"),
        ("Fix it:\n```\nx\n```\nplease", (), "Fix it:\n```\nx\n```\nplease"),
    ],
)
def test_the_question_without_its_files(text: str, names: tuple[str, ...], question: str):
    files = [Attachment(name, Kind.TEXT, b"one\n\n```\ntwo\n```\n") for name in names]
    assert attachments.question_of(attachments.content(text, files)) == question


def test_a_model_takes_what_its_capabilities_say():
    taken = attachments.taken_kinds(["completion", "vision"])
    attachments.check_kind("gemma", taken, Kind.PICTURE, "a.png")
    attachments.check_kind("gemma", taken, Kind.TEXT, "a.txt")
    with pytest.raises(BadRequest, match=r"a.wav: gemma cannot hear sound"):
        attachments.check_kind("gemma", taken, Kind.SOUND, "a.wav")


def test_how_much_one_request_carries():
    attachments.check_amount([1] * 16)
    with pytest.raises(BadRequest, match="17 pictures and sounds are too many"):
        attachments.check_amount([1] * 17)
    with pytest.raises(BadRequest, match=r"25\.0 MB together"):
        attachments.check_amount([5_000_000] * 5)
    assert attachments.n_carried([]) == 0
    assert attachments.n_carried([1] * 20) == 16
    assert attachments.n_carried([5_000_000] * 20) == 4
    assert attachments.n_carried([23_000_000, 1, 2]) == 3
