"""Files that go to a model with a question: finding their paths in what a person typed, reading them, and saying what
cannot be sent before anything is.

A text goes into the question, below its name; a picture or a sound goes beside it, as the bytes of its file. What a
file is, its first bytes say, not its name. Errors are `BadRequest` with a sentence for the person.

Does not: decode a picture or a sound, or talk to the daemon.
"""

from __future__ import annotations

import base64
import os
import re
from collections.abc import Callable, Iterable, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import unquote, urlsplit

from localrun.errors import BadRequest
from localrun.sound_headers import is_mp3_frame

MAX_TEXT_BYTES = 1_000_000
# What one request may carry: with base64 and the rest of it, just below the daemon's `max_body_bytes` of 32 MiB.
MAX_MEDIA = 16
MAX_MEDIA_BYTES = 24_000_000


class Kind(StrEnum):
    """What a file is to a model."""

    TEXT = "text"
    PICTURE = "picture"
    SOUND = "sound"


# What a kind needs among the `capabilities` of `/api/show`, and what a model without it cannot do.
_CAPABILITIES = {Kind.PICTURE: ("vision", "see pictures"), Kind.SOUND: ("audio", "hear sound")}
_FORMATS = "a picture (PNG, JPEG, GIF, WebP, BMP), sound (WAV, MP3, FLAC, OGG) or text (UTF-8)"
_SUFFIXES = (
    *(".png", ".jpg", ".jpeg", ".jpe", ".jfif", ".gif", ".webp", ".bmp"),
    *(".wav", ".mp3", ".flac", ".ogg", ".oga", ".opus"),
)


class Attachment(NamedTuple):
    """A file as it was when it was read."""

    name: str
    kind: Kind
    data: bytes

    @property
    def as_text(self) -> str:
        """How a text stands in the question: below its name, in a fence that its own fences do not close."""
        text, fence = self.data.decode("utf-8"), "```"
        while fence in text:
            fence += "`"
        return f"{self.name}:\n{fence}\n{text.rstrip()}\n{fence}"


# --- reading ---


def read(path: Path) -> Attachment:
    """Raises BadRequest for what is no file, cannot be read, is too large, or is nothing that a model takes."""
    try:
        if not path.exists():
            raise BadRequest(f"{path} was not found")
        if not path.is_file():  # a pipe or a device might never end
            what = "a folder" if path.is_dir() else "a pipe, a socket or a device"
            raise BadRequest(f"{path} is {what}, not a file")
        with path.open("rb") as file:
            data = file.read(MAX_MEDIA_BYTES + 1)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else None
        raise BadRequest(f"{path} cannot be read: {reason or error}") from None
    # A name that is not UTF-8, or that the locale does not know, cannot be sent as it is.
    return of_bytes(os.fsencode(path.name).decode(errors="replace"), data)


def of_bytes(name: str, data: bytes) -> Attachment:
    """As `read`, for what is in memory."""
    if not data:
        raise BadRequest(f"{name} is empty; send a file with something in it")
    kind = media_kind(data)
    if kind is not None:
        if len(data) > MAX_MEDIA_BYTES:
            raise BadRequest(f"{name} is larger than {MAX_MEDIA_BYTES // 10**6} MB, the most that a request can carry")
        return Attachment(name, kind, data)
    if len(data) > MAX_TEXT_BYTES:
        raise BadRequest(f"{name} is larger than {MAX_TEXT_BYTES // 10**6} MB; send the part that matters")
    try:
        data.decode("utf-8")
    except UnicodeDecodeError:
        raise BadRequest(f"{name} is not {_FORMATS}") from None
    if b"\0" in data:
        raise BadRequest(f"{name} is not {_FORMATS}")
    return Attachment(name, Kind.TEXT, data)


def media_kind(data: bytes) -> Kind | None:
    """Picture or sound, by its first bytes; None for everything else."""
    if data.startswith((b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff", b"GIF87a", b"GIF89a")):
        return Kind.PICTURE
    if data.startswith(b"BM") and data[6:10] == b"\0\0\0\0":
        return Kind.PICTURE
    if data.startswith(b"RIFF"):
        return {b"WEBP": Kind.PICTURE, b"WAVE": Kind.SOUND}.get(data[8:12])
    if data.startswith((b"fLaC", b"OggS")) or (data.startswith(b"ID3") and data[3:4] in (b"\2", b"\3", b"\4")):
        return Kind.SOUND
    return Kind.SOUND if is_mp3_frame(data[:4]) else None


# --- paths in what was typed ---

# In quotes, or without spaces but a narrow one within a word, which macOS writes before the AM in a screenshot's name.
# Where paths have no backslashes, one stands before a space or a quote of a dropped file, or terminals write an
# apostrophe between quotes as a shell wants it: '\'' or '"'"'.
_QUOTED = r"""(?<!\S)"([^"\n]+)"|(?<!\S)'([^'\n]+)'|"""
_APOSTROPHE = r"""'\\''|'"'"'"""
_TOKEN = re.compile(
    rf"""(?<!\S)'((?:[^'\n]|{_APOSTROPHE})*(?:{_APOSTROPHE})[^'\n]*)'|{_QUOTED}((?:\\.|\u202f(?=\w)|[^\s"'\\])+)"""
    if os.sep == "/"
    else rf"""{_QUOTED}([^\s"']+)"""
)
_ENDS = ".,;:!?)]}"


class PathsInText(NamedTuple):
    """What stands in a text: `paths` of files that exist, and `text` with names in their place."""

    text: str
    paths: tuple[Path, ...]


def path_of(text: str) -> Path:
    """The path that a person means: with `~`, or the address of a local file (`file:///...`)."""
    if text.startswith("file://"):
        text = unquote(urlsplit(text).path)
        if os.sep == "\\":
            text = text.lstrip("/")
    try:
        return Path(text).expanduser()
    except RuntimeError:  # there is no such user
        return Path(text)


def find(text: str) -> PathsInText:
    """Pictures and sounds whose paths stand in a question, as a dropped file's does: with a folder or in quotes, and
    with the ending of such a file. Their names stay in the text, unless there is no other text."""
    paths: list[Path] = []
    pieces: list[str] = []
    others: list[str] = []
    position = 0
    for match in _TOKEN.finditer(text):
        path, n_after = _media_path(match)
        if path is not None:
            others.append(text[position : match.start()])
            pieces += [others[-1], path.name]
            position = match.end() - n_after
            paths.append(path)
    others.append(text[position:])
    is_only_paths = not "".join(others).strip()
    return PathsInText("" if is_only_paths else "".join([*pieces, others[-1]]), tuple(dict.fromkeys(paths)))


def dropped(text: str) -> tuple[Path, ...]:
    """The pictures and sounds that a pasted text names, if it is nothing but their paths."""
    lines = text.strip().splitlines()
    if lines and all(is_media(path_of(line.strip())) for line in lines):
        return tuple(dict.fromkeys(path_of(line.strip()) for line in lines))
    paths: list[Path] = []
    end = 0
    for match in _TOKEN.finditer(text):  # up to the first that is something else: a book may be pasted
        path, n_after = _media_path(match)
        if path is None or n_after or text[end : match.start()].strip():
            return ()
        paths.append(path)
        end = match.end()
    return () if text[end:].strip() else tuple(dict.fromkeys(paths))


def named(argument: str) -> tuple[Path, ...]:
    """The files of a command's argument: one path, spaces and all, or several with spaces between them."""
    whole = path_of(argument.strip("'\""))
    if is_file(whole):
        return (whole,)
    return tuple(path_of(_meant(match)) for match in _TOKEN.finditer(argument))


def _media_path(match: re.Match[str]) -> tuple[Path | None, int]:
    """The path of an existing picture or sound, and how many characters behind it belong to the sentence."""
    text = _meant(match)
    is_quoted = match.group() != text and match.group()[0] in "\"'"
    for n_after in range(1 if is_quoted else 1 + len(text) - len(text.rstrip(_ENDS))):
        shown = text[: len(text) - n_after]
        path = path_of(shown)
        has_folder = any(separator in shown for separator in ("/", os.sep))
        if (is_quoted or has_folder) and is_media(path):
            return path, n_after
    return None, 0


def _meant(match: re.Match[str]) -> str:
    text = match.group(match.lastindex or 0)
    if os.sep != "/":
        return text
    if match.lastindex == _TOKEN.groups:
        return re.sub(r"\\(.)", r"\1", text)
    return re.sub(_APOSTROPHE, "'", text) if match.lastindex == 1 else text


def is_media(path: Path) -> bool:
    """Whether it exists and is named like a picture or a sound."""
    return path.suffix.lower() in _SUFFIXES and is_file(path)


def is_file(path: Path) -> bool:
    """Whether it exists; False too for what is no path at all."""
    return _is(path.is_file)


def is_meant_as_file(word: str, *, is_alone: bool = False) -> bool:
    """Whether a single word can only be a path: that of a picture or a sound, which is missed when it does not exist,
    or, unless it is the whole prompt, of a folder, a pipe or a device that is named with a folder."""
    if re.search(r"\s", word):
        return False
    has_folder = any(separator in word for separator in ("/", os.sep))
    return word.lower().endswith(_SUFFIXES) or (has_folder and not is_alone and _is(path_of(word).exists))


def _is(ask: Callable[[], bool]) -> bool:
    try:
        return ask()
    except (OSError, ValueError):  # too long for a path, or with a NUL
        return False


# --- a question with files ---


def content(text: str, files: Iterable[Attachment]) -> str:
    """What the model reads: the texts among the files, and the question below them."""
    texts = [file.as_text for file in files if file.kind is Kind.TEXT]
    return "\n\n".join([*texts, text])


_FILE = re.compile(r"\A([^\n]+):\n(`{3,})\n.*?\n\2(?:\n\n|\Z)", re.DOTALL)


def question_of(content: str) -> str:
    """What was asked, without the texts of files above it; the names of these where nothing was."""
    names = []
    while found := _FILE.match(content):
        names.append(found[1])
        content = content[found.end() :]
    return content.strip() or ", ".join(names)


def user_message(text: str, files: Sequence[Attachment]) -> dict[str, Any]:
    """The question as `/api/chat` takes it."""
    media = [base64.b64encode(file.data).decode("ascii") for file in files if file.kind is not Kind.TEXT]
    return {"role": "user", "content": content(text, files), **({"images": media} if media else {})}


def taken_kinds(capabilities: Iterable[str]) -> frozenset[Kind]:
    """What a model takes, by the `capabilities` of `/api/show`."""
    has = set(capabilities)
    return frozenset({Kind.TEXT, *(kind for kind, (capability, _) in _CAPABILITIES.items() if capability in has)})


def check_kind(model: str, taken: frozenset[Kind], kind: Kind, name: str) -> None:
    """Raises BadRequest when the model does not take such a file."""
    if kind not in taken:
        raise BadRequest(f"{name}: {model} cannot {_CAPABILITIES[kind][1]}; choose a model that can")


def check_amount(sizes_bytes: Sequence[int]) -> None:
    """Raises BadRequest when the pictures and sounds of one question are too many, or too large together."""
    if len(sizes_bytes) > MAX_MEDIA:
        raise BadRequest(f"{len(sizes_bytes)} pictures and sounds are too many for one question; at most {MAX_MEDIA}")
    if sum(sizes_bytes) > MAX_MEDIA_BYTES:
        raise BadRequest(
            f"the pictures and sounds have {sum(sizes_bytes) / 1e6:.1f} MB together; a request can carry "
            f"{MAX_MEDIA_BYTES // 10**6} MB"
        )


def n_carried(sizes_bytes: Sequence[int]) -> int:
    """How many of a conversation's pictures and sounds one request carries, counted from the newest; `sizes_bytes` are
    of all, the oldest first."""
    total = 0
    for number, size_bytes in enumerate(reversed(sizes_bytes)):
        total += size_bytes
        if number == MAX_MEDIA or total > MAX_MEDIA_BYTES:
            return number
    return len(sizes_bytes)
