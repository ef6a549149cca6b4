"""Files that go into a chat and come out of it: attachments, a chat as a document, a prompt in the person's own editor.

Of an attachment, text goes into the question and images beside it. It is read once, when it is attached; BadAttachment
has a sentence for the person. Whether the model can see, the daemon says when it is asked.
"""

from __future__ import annotations

import base64
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from localrun.tui import short_text
from localrun.tui.history import Message

MAX_TEXT_BYTES = 1_000_000
MAX_IMAGE_BYTES = 20_000_000

_IMAGE_BEGINNINGS = (b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff", b"GIF87a", b"GIF89a")


class BadAttachment(Exception):
    """The file cannot be sent; the message says why."""


class Attachment(NamedTuple):
    """`image` is base64, None for a text."""

    name: str
    size_bytes: int
    text: str = ""
    image: str | None = None

    @property
    def as_text(self) -> str:
        """How a text stands in the question: below its name, in a fence that its own fences do not close."""
        fence = "```"
        while fence in self.text:
            fence += "`"
        return f"{self.name}:\n{fence}\n{self.text.rstrip()}\n{fence}"


class Question(NamedTuple):
    """What a person asks: what was typed, and what was attached. `again` is set on a question that is repeated as it
    was; its files' texts are in `text`."""

    text: str
    attachments: tuple[Attachment, ...] = ()
    again: Message | None = None

    @classmethod
    def of(cls, message: Message) -> Question:
        """A question that was asked before, to be asked again."""
        images = message.extra.get("images", [])
        names = str(message.extra.get("shown", "")).rpartition("[with ")[2].removesuffix("]").split(", ")
        if len(names) != len(images):  # texts were attached too
            names = [f"image {number + 1}" for number in range(len(images))]
        attached = [
            Attachment(name, len(image) * 3 // 4, image=image) for name, image in zip(names, images, strict=True)
        ]
        return cls(message.content, tuple(attached), message)

    @property
    def content(self) -> str:
        """What the model reads."""
        texts = [attachment.as_text for attachment in self.attachments if attachment.image is None]
        return "\n\n".join([*texts, self.text])

    @property
    def extra(self) -> dict[str, Any]:
        """What is kept beside it: the images, and what a person sees in place of the files."""
        if self.again is not None:
            return self.again.extra
        if not self.attachments:
            return {}
        names = ", ".join(attachment.name for attachment in self.attachments)
        images = [attachment.image for attachment in self.attachments if attachment.image is not None]
        return {"shown": f"{self.text}\n[with {names}]", **({"images": images} if images else {})}


def read_attachment(path: Path) -> Attachment:
    path = path.expanduser()
    try:
        size_bytes = path.stat().st_size
        if not path.is_file():
            raise BadAttachment(f"{path.name} is not a file")
        with path.open("rb") as file:
            data = file.read(MAX_IMAGE_BYTES + 1)
    except OSError as error:
        raise BadAttachment(f"{path} cannot be read: {error.strerror or error}") from error
    if data.startswith(_IMAGE_BEGINNINGS) or (data[:4] == b"RIFF" and data[8:12] == b"WEBP"):
        if len(data) > MAX_IMAGE_BYTES:
            raise BadAttachment(f"{path.name} is larger than {MAX_IMAGE_BYTES / 1e6:.0f} MB")
        return Attachment(path.name, size_bytes, image=base64.b64encode(data).decode("ascii"))
    if len(data) > MAX_TEXT_BYTES:
        raise BadAttachment(f"{path.name} is larger than {MAX_TEXT_BYTES / 1e6:.0f} MB; send the part that matters")
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError:
        raise BadAttachment(f"{path.name} is neither text (UTF-8) nor an image (PNG, JPEG, GIF, WebP)") from None
    if "\0" in text:
        raise BadAttachment(f"{path.name} is not a text file")
    return Attachment(path.name, size_bytes, text=text)


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
        parts.append(message.content)
    return "\n\n".join(parts) + "\n"


def to_json(title: str, model: str, system: str, parameters: dict[str, Any], messages: Sequence[Message]) -> str:
    """The messages as `/api/chat` takes them, with what is known of each besides."""
    document = {
        "title": title,
        "model": model,
        "system": system,
        "options": parameters,
        "messages": [
            {
                "role": message.role,
                "content": message.content,
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
