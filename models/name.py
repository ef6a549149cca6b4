"""Model names: what a client may write where a model is asked for.

Pure. A name is one of three kinds, told apart by its form alone:

- `built-in`: `tiny`, `tiny:latest`, `localrun/tiny`, `localrun/tiny:latest`;
- `path`: anything that ends in `.gguf` and is not a file of a hub repository: a model file, used in place;
- `stored`: `name[:tag]`: a model of the catalogue, one that was created here, or a file in the models folder;
  `owner/repo[@revision][:quant]`, also after `hf.co/` or `huggingface.co/`: a repository on the Hugging Face hub, whose
  tag is a quantization or the name of one of its files; `host[:port]/owner/name[:tag]`: a model of an Ollama registry.
  `https://` before any of them is left out, and an address of a file or a folder on the hub is its repository with the
  file's name, so that an address copied from a browser is a name. In names of files `_` stands for what no tag has.
  What Ollama leaves out is left out: `library/` and `registry.ollama.ai/library/`.

Adapters follow the model's name after plus signs, each with its strength after an equals sign if that is not 1:
`model+adapter`, `model+a+b=0.5` (`split_adapters`). Neither sign can be in a name, nor can a plus sign in a path be
taken for that: an adapter is asked for by its name, and what ends in `.gguf` after the plus sign is a path.

Names become parts of paths, so they are limited to characters that mean nothing to any file system, and to what every
system can store (no device names of Windows). Paths may not climb (`..`): a client that means a file outside its folder
knows where that is, and writes it in full.

Does not: look at the disk, or at a network.
"""

from __future__ import annotations

import re
from enum import StrEnum
from pathlib import PurePath
from typing import NamedTuple, NoReturn
from urllib.parse import unquote

from localrun.config import MAX_ADAPTERS, MAX_SCALE, SCALE
from localrun.errors import BadRequest

BUILT_IN = "tiny"
DEFAULT_TAG = "latest"
HUB_HOST = "hf.co"
OLLAMA_HOST = "registry.ollama.ai"
MAX_NAME_CHARS = 512
MAX_PATH_BYTES = 4_096

_HUB_HOSTS = frozenset({HUB_HOST, "huggingface.co", "www.huggingface.co"})
_SCHEME = "https://"
_OWNER = "localrun/"
_SUFFIX = ".gguf"
_LIBRARY = re.compile(rf"\A({re.escape(OLLAMA_HOST)}/)?library/(?=[^/]+\Z)", re.IGNORECASE)
_PART = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}")
_HOST = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}(:[0-9]{1,5})?")
_LAST_PART = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}(@[A-Za-z0-9][A-Za-z0-9._-]{0,127})?")
_TAG = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}")
_MAX_PARTS = 3
_AND, _TIMES = "+", "="
_RESERVED = re.compile(r"(con|prn|aux|nul|com[0-9]|lpt[0-9])(\..*)?", re.IGNORECASE)


_ADDRESS = re.compile(
    r"(?:https://)?((?:www\.)?huggingface\.co|hf\.co)/([^/?]+/[^/?:@]+)"
    r"(?:/(?:blob|resolve|raw|tree)/([^/?]+)(?:/([^?]+?))?)?/?(?:\?.*)?",
    re.IGNORECASE,
)
_IN_NO_TAG = re.compile(r"[^A-Za-z0-9._-]")


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
        if address := _ADDRESS.fullmatch(text):
            host, repo, revision, path = address.groups()
            at = f"@{revision}" if revision and revision != "main" else ""
            text = f"{host}/{repo}{at}" + (f":{unquote(path).rpartition('/')[2]}" if path else "")
        if text.lower().endswith(_SUFFIX):
            before, colon, file_name = text.rpartition(":")
            named = text if re.search(r"[/\\]", file_name) else f"{before}{colon}{as_tag(file_name)}"
            return _name(named) if _is_file_of_a_repo(named) else _path(text)
        return _name(text)

    @property
    def is_hub(self) -> bool:
        """Whether it names a repository on the Hugging Face hub."""
        parts = self.name.split("/")
        return len(parts) == 2 or (len(parts) == _MAX_PARTS and parts[0].lower() in _HUB_HOSTS)

    @property
    def registry_host(self) -> str:
        """The host of the Ollama registry that it names, `host[:port]`; empty for every other name."""
        parts = self.name.split("/")
        return parts[0].lower() if len(parts) == _MAX_PARTS and not self.is_hub else ""

    @property
    def says_ollama(self) -> bool:
        """Whether it names Ollama's own registry."""
        return self.text.lower().startswith(f"{OLLAMA_HOST}/")

    @property
    def in_ollama(self) -> ModelName | None:
        """What `owner/name[:tag]` means to Ollama, which is none of the hub's; None for other names."""
        says_more = self.name.count("/") != 1 or self.revision or self.text.lower().endswith(_SUFFIX)
        return None if says_more or not self.is_hub else ModelName.parse(f"{OLLAMA_HOST}/{self.text}")

    @property
    def repo(self) -> str:
        """`owner/name` without host, revision and tag; just the name where no owner is given."""
        return "/".join(self.name.split("/")[-2:]).partition("@")[0]

    @property
    def revision(self) -> str:
        """What stands after the `@`; empty without one."""
        return self.name.partition("@")[2]


class AdaptedName(NamedTuple):
    """A model's name, unchecked, and the adapters that were asked for with it: (name, scale)."""

    model: str
    adapters: tuple[tuple[str, float], ...] = ()


def split_adapters(text: str) -> AdaptedName:
    """The parts of `model+a+b=0.5`; a text that is no such thing is a model's name, whatever is wrong with it.

    Raises BadRequest, with field "model", for a scale beyond the limit, an adapter that is named twice, and too many.
    """
    rest, found = text, list[tuple[str, str]]()
    while len(found) <= MAX_ADAPTERS:
        before, _, last = rest.rpartition(_AND)
        name, equals, scale = last.partition(_TIMES)
        if not before or not _is_name(name):
            break
        if equals and not SCALE.fullmatch(scale):
            if text.lower().endswith(_SUFFIX):
                break
            _refuse(f"asks for '{name}' with the scale '{scale[:40]}'; write a number, as in model+{name}=0.5")
        found.insert(0, (name, scale if equals else "1"))
        rest = before
    # A folder may be called so as well: where the whole may be a path, what is left must be a name.
    if not found or (text.lower().endswith(_SUFFIX) and not _is_name(rest)):
        return AdaptedName(text)
    if len(found) > MAX_ADAPTERS:
        _refuse(f"asks for more than {MAX_ADAPTERS} adapters")
    for index, (name, scale) in enumerate(found):
        if abs(float(scale)) > MAX_SCALE:
            _refuse(f"asks for '{name}' with the scale {scale[:40]}; the limit is {MAX_SCALE:g}, or -{MAX_SCALE:g}")
        if name in (other for other, _ in found[:index]):
            _refuse(f"asks for '{name}' twice")
    return AdaptedName(rest, tuple((name, float(scale)) for name, scale in found))


def as_tag(file_name: str) -> str:
    return _IN_NO_TAG.sub("_", file_name)


def _is_name(text: str) -> bool:
    try:
        return ModelName.parse(text).kind is not Kind.PATH
    except BadRequest:
        return False


def _is_file_of_a_repo(text: str) -> bool:
    """Whether text that ends in .gguf is `owner/repo:file.gguf`, with or without the hub's host, and no path."""
    before, colon, file_name = text.removeprefix(_SCHEME).rpartition(":")
    parts = before.split("/")
    is_file_name = bool(colon) and _TAG.fullmatch(file_name) is not None
    if not is_file_name or not _LAST_PART.fullmatch(parts[-1]) or not all(map(_PART.fullmatch, parts[:-1])):
        return False
    return len(parts) == 2 or (len(parts) == _MAX_PARTS and parts[0].lower() in _HUB_HOSTS)


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
    if text.lower().startswith("http://"):
        _refuse("begins with http://; write it without (a registry without TLS is for pulls that say insecure)")
    text = text.removeprefix(_SCHEME)
    short = _LIBRARY.sub("", text)
    name, colon, tag = short.rpartition(":")
    if not colon or "/" in tag:
        name, tag = short, ""
        colon = ""
    parts = name.split("/")
    if not _are_parts(parts) or ".." in name:
        _refuse(
            f"'{text}' is neither name[:tag], owner/repo[:quant] or host/owner/name[:tag], with letters, digits, '.', "
            f"'_' and '-', nor a path that ends in .gguf"
        )
    if colon and (not _TAG.fullmatch(tag) or ".." in tag):
        _refuse(f"'{text}' has a malformed tag after the colon; use letters, digits, '.', '_' and '-'")
    for part in (*parts, tag):
        if _RESERVED.fullmatch(part.partition("@")[0]):
            _refuse(f"'{part}' is a device name on Windows")
        if part.endswith(".") or ".@" in part:
            _refuse(f"'{part}' ends in a dot, which not every file system can store")
    if name.removeprefix(_OWNER).lower() == BUILT_IN and tag.lower() in ("", DEFAULT_TAG):
        return ModelName(Kind.BUILT_IN, text, BUILT_IN, None)
    parsed = ModelName(Kind.STORED, text, name, tag if colon else None)
    if parsed.revision and not parsed.is_hub:
        _refuse(f"'{text}' has a revision after the '@'; only repositories on the hub (owner/repo) have them")
    return parsed


def _are_parts(parts: list[str]) -> bool:
    *before, last = parts
    if len(parts) > _MAX_PARTS or not _LAST_PART.fullmatch(last):
        return False
    if len(parts) == _MAX_PARTS:
        return _HOST.fullmatch(before[0]) is not None and _PART.fullmatch(before[1]) is not None
    return all(_PART.fullmatch(part) for part in before)


def _refuse(problem: str) -> NoReturn:
    raise BadRequest(f"the model name {problem}", field="model")
