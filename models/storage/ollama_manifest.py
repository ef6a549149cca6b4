"""Ollama's manifests, as registries send them and as Ollama keeps them on the disk: layers, and small texts in them.

Pure. A manifest comes from somebody else and is checked whole before anything is made of it: the digests become file
names, so each is 64 hex digits or the manifest is refused; names in it are not used at all. The template is Go's and is
left out: the model file brings its own, in Jinja.

Does not: read or fetch layers.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Annotated, Any

import msgspec

from localrun.errors import BadRequest
from localrun.models import modelfile
from localrun.models.storage.manifest import Message, Role, check_digest

DEFAULT_OWNER = "library"
MAX_MANIFEST_BYTES = 1024 * 1024
MAX_LAYERS = 64
MAX_TEXT_BYTES = 1024 * 1024
# No file of a model is larger; what a hostile manifest claims beyond it would only fail later.
MAX_FILE_BYTES = 1 << 44

FILE_ROLES = {"model": Role.MODEL, "projector": Role.PROJECTOR, "adapter": Role.ADAPTER}
TEXTS = frozenset({"params", "system", "messages", "license"})

_LAYER_PREFIX = "application/vnd.ollama.image."
_IGNORED = frozenset({"template", "prompt", "embed"})
# Deep nesting is the one way in which JSON fails that msgspec leaves to Python.
_UNREADABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)


class InvalidManifest(Exception):
    """What is wrong, as a predicate: the caller puts before it what it is about."""


class Layer(msgspec.Struct, frozen=True):
    digest: str
    size: Annotated[int, msgspec.Meta(ge=0, le=MAX_FILE_BYTES)]
    type: str = msgspec.field(name="mediaType", default="")

    @property
    def kind(self) -> str:
        return self.type.removeprefix(_LAYER_PREFIX) if self.type.startswith(_LAYER_PREFIX) else ""


class _Manifest(msgspec.Struct, frozen=True):
    layers: Annotated[tuple[Layer, ...], msgspec.Meta(max_length=MAX_LAYERS)] | None


class _Message(msgspec.Struct, frozen=True):
    role: str
    content: str = ""


_manifest_decoder = msgspec.json.Decoder(_Manifest)
_messages_decoder = msgspec.json.Decoder(Annotated[list[_Message], msgspec.Meta(max_length=1024)])
_parameters_decoder = msgspec.json.Decoder(dict[str, str | int | float | bool | list[str]])


def layers_of(content: bytes) -> tuple[Layer, ...]:
    """The layers of a manifest, with sound digests. Raises Unsound: the manifest ..."""
    try:
        layers = _manifest_decoder.decode(content).layers or ()
        for layer in layers:
            check_digest(layer.digest)
    except _UNREADABLE as error:
        raise InvalidManifest(f"is not valid: {error}") from None
    except BadRequest as error:
        raise InvalidManifest(f"is not valid: {error.message}") from None
    return layers


def check_layers(layers: Sequence[Layer]) -> None:
    """Raises Unsound when the layers make no model that can run here: a model ..."""
    if not layers:
        raise InvalidManifest(
            "has no files: it runs in Ollama's cloud, and not here; `localrun search` finds models that do"
        )
    kinds = [layer.kind for layer in layers]
    if kinds.count("model") != 1:
        if "tensor" in kinds:
            raise InvalidManifest(
                "is made of safetensors, which cannot run here; look for a GGUF of it (localrun search)"
            )
        raise InvalidManifest(f"is no model: its manifest names {kinds.count('model')} model files")
    unknown = next((layer.type for layer in layers if layer.kind not in {*FILE_ROLES, *TEXTS, *_IGNORED}), None)
    if unknown is not None:
        raise InvalidManifest(f"has a part of the unknown kind {unknown[:80]!r}; it may need Ollama itself")


def joined(texts: Iterable[bytes]) -> str:
    """System prompts or licences as one text."""
    return "\n\n".join(text.decode("utf-8", errors="replace") for text in texts)


def parameters_of(texts: Iterable[bytes]) -> dict[str, Any]:
    """Those that engines here read; others come from other releases of Ollama. Raises Unsound: the parameters ..."""
    merged: dict[str, Any] = {}
    for text in texts:
        try:
            merged |= _parameters_decoder.decode(text)
        except _UNREADABLE as error:
            raise InvalidManifest(f"are not valid: {error}") from None
    return {key: value for key, value in merged.items() if _is_parameter(key, value)}


def messages_of(texts: Iterable[bytes]) -> tuple[Message, ...]:
    """Raises Unsound: the messages ..."""
    try:
        found = [message for text in texts for message in _messages_decoder.decode(text)]
    except _UNREADABLE as error:
        raise InvalidManifest(f"are not valid: {error}") from None
    return tuple(Message(message.role, message.content) for message in found)


def _is_parameter(key: str, value: Any) -> bool:
    if key in modelfile.TEXT_PARAMETERS:
        return isinstance(value, str | list)
    if key in modelfile.BOOLEAN_PARAMETERS:
        return isinstance(value, bool)
    return key in modelfile.KNOWN_PARAMETERS and isinstance(value, int | float) and not isinstance(value, bool)
