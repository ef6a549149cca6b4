"""Model names: what a client may write where a model is asked for.

Pure. A name is one of three kinds, told apart by its form alone:

- `built-in`: `tiny`, `tiny:latest`, `localrun/tiny`, `localrun/tiny:latest`;
- `path`: anything that ends in `.gguf`: a model file, used where it lies;
- `stored`: `name[:tag]`, a file in the models folder; also `owner/name[:tag]` and `host/owner/name[:tag]`, which are
  well-formed names of models elsewhere and can only be "not found" here.

Names become parts of paths, so they are limited to characters that mean nothing to any file system, and to what every
system can store (no device names of Windows). Paths may not climb (`..`): a client that means a file outside its folder
knows where that is, and writes it in full.

Does not: look at the disk.
"""

from __future__ import annotations

import re
from enum import StrEnum
from pathlib import PurePath
from typing import NamedTuple, NoReturn

from localrun.errors import BadRequest

BUILT_IN = "tiny"
DEFAULT_TAG = "latest"
MAX_NAME_CHARS = 256
MAX_PATH_BYTES = 4_096

_OWNER = "localrun/"
_PART = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_TAG = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}")
_MAX_PARTS = 3
_RESERVED = re.compile(r"(con|prn|aux|nul|com[0-9]|lpt[0-9])(\..*)?", re.IGNORECASE)


class Kind(StrEnum):
    BUILT_IN = "built-in"
    PATH = "path"
    STORED = "stored"


class ModelName(NamedTuple):
    """A checked name. `name` and `tag` (None when not given) are empty for a path, which is in `text`."""

    kind: Kind
    text: str
    name: str = ""
    tag: str | None = None

    @classmethod
    def parse(cls, text: str) -> ModelName:
        """Raises BadRequest, with field "model", for anything that is not a name or a path by the rules above."""
        if not text:
            _refuse("is empty")
        if any(ord(character) < 32 or ord(character) == 127 for character in text):
            _refuse("has a control character in it")
        if text.lower().endswith(".gguf"):
            return _path(text)
        return _name(text)


def _path(text: str) -> ModelName:
    try:
        n_bytes = len(text.encode())
    except UnicodeEncodeError:
        _refuse("is not valid Unicode text")
    if n_bytes > MAX_PATH_BYTES:
        _refuse(f"is a path of {n_bytes} bytes; the limit is {MAX_PATH_BYTES}")
    # Both separators count on every system: what is a harmless file name here is a way up elsewhere.
    if ".." in re.split(r"[/\\]", text):
        _refuse("is a path with '..' in it; give the absolute path instead")
    if _RESERVED.fullmatch(PurePath(text).name):
        _refuse(f"'{PurePath(text).name}' is a device name on Windows")
    return ModelName(Kind.PATH, text)


def _name(text: str) -> ModelName:
    if len(text) > MAX_NAME_CHARS:
        _refuse(f"has {len(text)} characters; the limit is {MAX_NAME_CHARS}")
    name, colon, tag = text.rpartition(":")
    if not colon or "/" in tag:
        name, tag = text, ""
        colon = ""
    parts = name.split("/")
    if len(parts) > _MAX_PARTS or not all(_PART.fullmatch(part) for part in parts) or ".." in name:
        _refuse(
            f"'{text}' is neither name[:tag], with letters, digits, '.', '_' and '-', nor a path that ends in .gguf"
        )
    if colon and (not _TAG.fullmatch(tag) or ".." in tag):
        _refuse(f"'{text}' has a malformed tag after the colon; use letters, digits, '.', '_' and '-'")
    for part in (*parts, tag):
        if _RESERVED.fullmatch(part):
            _refuse(f"'{part}' is a device name on Windows")
    if name.removeprefix(_OWNER).lower() == BUILT_IN and tag.lower() in ("", DEFAULT_TAG):
        return ModelName(Kind.BUILT_IN, text, BUILT_IN, None)
    return ModelName(Kind.STORED, text, name, tag if colon else None)


def _refuse(problem: str) -> NoReturn:
    raise BadRequest(f"the model name {problem}", field="model")
