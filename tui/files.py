"""Files that go into a chat and come out of it: its model, a question with its attachments, a chat as a document, a
prompt in the person's own editor.
"""

from __future__ import annotations

import base64
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from localrun import attachments
from localrun.attachments import Attachment
from localrun.errors import BadRequest
from localrun.tui import short_text
from localrun.tui.history import Message
from localrun.tui.media import AttachedFile, Medium, examined, extra_of, media_of

_Load = Callable[[str], bytes | None]


class Question(NamedTuple):
    """What a person asks: what was typed, and what was attached. `again` is set on a question that is repeated as it
    was; its files' texts are in `text`."""

    text: str
    attachments: tuple[AttachedFile, ...] = ()
    again: Message | None = None

    @classmethod
    def of(cls, message: Message, load: _Load) -> Question:
        """A question that was asked before, to be asked again. `load` gives the bytes of a file by its SHA-256, None
        when it is gone."""
        found = ((medium, load(medium.sha256)) for medium in media_of(message.extra))
        files = [
            AttachedFile(Attachment(medium.name, medium.kind, data), medium)
            for medium, data in found
            if data is not None
        ]
        return cls(message.content, tuple(files), message)

    @property
    def gone(self) -> str:
        """The names of the pictures and sounds of a question asked before that are no longer there."""
        there = {medium.sha256 for medium in self.media}
        media = media_of(self.again.extra) if self.again is not None else ()
        return ", ".join(medium.name for medium in media if medium.sha256 not in there)

    @property
    def content(self) -> str:
        """What the model reads."""
        return attachments.content(self.text, [attached.file for attached in self.attachments])

    @property
    def media(self) -> tuple[Medium, ...]:
        return tuple(attached.medium for attached in self.attachments if attached.medium is not None)

    @property
    def extra(self) -> dict[str, Any]:
        """What is kept beside it: the pictures and sounds, and what a person sees in place of the texts."""
        if self.again is not None:
            return self.again.extra
        names = ", ".join(attached.file.name for attached in self.attachments if attached.medium is None)
        return ({"shown": f"{self.text}\n[with {names}]"} if names else {}) | extra_of(self.media)


def model_file(text: str) -> Path | None:
    """An absolute path, since the daemon's folder is not this one's; None when the text does not look like a path."""
    text = text.strip()
    if not text.endswith(".gguf") and not text.startswith(("/", "./", "~")):
        return None
    return Path(text).expanduser().absolute()


def attached(path: Path) -> AttachedFile:
    """A file, read and examined, which takes a moment for a large one. Raises BadRequest."""
    return examined(attachments.read(path))


# Programs that write the clipboard's picture to stdout: of Wayland, X11 and macOS. Each fails where it is not at home.
_CLIPBOARD_READERS = (
    ("wl-paste", "--no-newline", "--type", "image/png"),
    ("xclip", "-selection", "clipboard", "-target", "image/png", "-out"),
    ("pngpaste", "-"),
)
_CLIPBOARD_TIMEOUT_S = 10.0


def in_clipboard() -> AttachedFile:
    """The picture in the clipboard of this machine. Takes a moment. Raises BadRequest when there is none."""
    present = [command for command in _CLIPBOARD_READERS if shutil.which(command[0])]
    for command in present:
        try:
            ended = subprocess.run(
                command, stdin=subprocess.DEVNULL, capture_output=True, check=False, timeout=_CLIPBOARD_TIMEOUT_S
            )
        except (OSError, subprocess.TimeoutExpired):
            continue
        if attachments.media_kind(ended.stdout) is not None:
            return examined(attachments.of_bytes("clipboard.png", ended.stdout))
    if not present:
        programs = ", ".join(command[0] for command in _CLIPBOARD_READERS)
        raise BadRequest(f"reading the clipboard needs one of these programs: {programs}")
    raise BadRequest("there is no picture in the clipboard")


# --- a chat as a document: Markdown to read, JSON to work with ---

_NAMES = {"user": "You", "assistant": "Model", "tool": "Tool"}


def to_markdown(title: str, model: str, system: str, messages: Sequence[Message]) -> str:
    """Every message below a heading of its own, thinking as a quote before its answer."""
    parts = [f"# {title or 'A chat'}", f"Model: {model}"]
    if system:
        parts.append(f"System prompt:\n\n{_quoted(system)}")
    for message in messages:
        parts.append(f"## {_NAMES.get(message.role, message.role)}, {short_text.when(message.created_at_s)}")
        if message.extra.get("thinking"):
            parts.append(_quoted(str(message.extra["thinking"])))
        parts += [f"[with {medium.name}]" for medium in media_of(message.extra)]
        parts.append(_fenced(message.content) if message.role == "tool" else message.content)
        parts += [f"Calls {_called(call)}" for call in message.extra.get("tool_calls") or ()]
    return "\n\n".join(parts) + "\n"


def to_json(
    title: str, model: str, system: str, parameters: dict[str, Any], messages: Sequence[Message], load: _Load
) -> str:
    """The messages as `/api/chat` takes them, with what is known of each besides. `load` as in `Question.of`."""

    def images(message: Message) -> dict[str, Any]:
        files = (load(medium.sha256) for medium in media_of(message.extra))
        found = [base64.b64encode(data).decode("ascii") for data in files if data is not None]
        return {"images": found} if found else {}

    document = {
        "title": title,
        "model": model,
        "system": system,
        "options": parameters,
        "messages": [
            {
                "role": message.role,
                "content": message.content,
                **images(message),
                **message.extra,
                "created_at": datetime.fromtimestamp(message.created_at_s, UTC).isoformat(),
            }
            for message in messages
        ],
    }
    return json.dumps(document, indent=2, ensure_ascii=False) + "\n"


def code_blocks(markdown: str) -> list[str]:
    """What stands in fenced blocks, in order; a fence that is never closed runs to the end."""
    found: list[str] = []
    inside: list[str] | None = None
    fence = ""
    for text in markdown.splitlines():
        stripped = text.strip()
        if inside is None:
            if stripped.startswith(("```", "~~~")):
                fence = stripped[0] * (len(stripped) - len(stripped.lstrip(stripped[0])))
                inside = []
        elif stripped.startswith(fence) and not stripped.strip(fence[0]):
            found.append("\n".join(inside))
            inside = None
        else:
            inside.append(text)
    if inside:
        found.append("\n".join(inside))
    return found


def _called(call: dict[str, Any]) -> str:
    function = call.get("function") or {}
    return f"{function.get('name', '?')} with\n\n{_fenced(json.dumps(function.get('arguments'), ensure_ascii=False))}"


def _fenced(text: str) -> str:
    """Verbatim, whatever stands in it."""
    longest = max((len(run) for run in re.findall("`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}\n{text}\n{fence}"


def _quoted(text: str) -> str:
    return "\n".join(f"> {line}" for line in text.splitlines())


# --- the editor ---


def edited(text: str, folder: Path) -> str:
    """What $VISUAL, else $EDITOR, else `vi` (`notepad` on Windows) leaves of `text`, without white space at the end.

    Blocks until the editor ends; the terminal must be free for it. `folder` is for the file. Raises OSError when there
    is no such program, and subprocess.CalledProcessError when it failed: the text is then as it was.
    """
    file = folder / "prompt.md"
    file.write_text(text, encoding="utf-8")
    usual = "notepad" if sys.platform == "win32" else "vi"
    command = os.environ.get("VISUAL") or os.environ.get("EDITOR") or usual
    subprocess.run([*shlex.split(command), str(file)], check=True)
    return file.read_text(encoding="utf-8").rstrip()
