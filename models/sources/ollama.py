"""Ollama registries as a source: a manifest, and blobs that are named by their digests.

Runs in the daemon's event loop. The registry's manifest is checked whole before anything is made of it: the digests
become file names, so each is 64 hex digits or the manifest is refused; names in it are not used at all. Parameters,
system prompt, messages and licence are small layers, read into memory and verified; model and adapters are planned as
files. The template is Go's and is left out: the model file brings its own, in Jinja. So is the projector, as no model
here reads images.

Small documents come from a server that nobody has vouched for. The body is read as it comes and dropped at its limit,
without decompression (a few bytes that unpack to gigabytes are refused, not unpacked). Redirects are followed a few
times, never from https to http. Messages name the server and the status, and never quote the body: it may come from a
server on this network that the one who asked has no business reading.

Plain http is for loopback hosts, and for those that the one who asks calls insecure.

Does not: sign in to a registry, or fetch files.
"""

from __future__ import annotations

import asyncio
import hashlib
import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urljoin, urlsplit

import httpx2
import msgspec

from localrun.errors import BadRequest, DownloadFailed, ModelNotFound, SourceRefused, by_code
from localrun.models import parameters
from localrun.models.download.item import Item
from localrun.models.manifest import Message, Place, Role, Source, StoredFile, blob_path, check_digest
from localrun.models.sources.remote_plan import PlannedFile, RemotePlan

MAX_REDIRECTS = 5
ATTEMPTS = 4
BACKOFF_S = 0.5
TIMEOUT_S = 30.0

_REDIRECTS = frozenset({301, 302, 303, 307, 308})


async def small_document(
    client: httpx2.AsyncClient, url: str, *, limit_bytes: int, headers: Mapping[str, str] | None = None
) -> bytes:
    """The body of a 200 answer. Tries again, a few times, when the answer breaks off or the server is overloaded.

    Raises SourceRefused with the status for every other answer, DownloadFailed when there is none, or too much of it.
    """
    problem = ""
    for attempt in range(ATTEMPTS):
        if attempt:
            await asyncio.sleep(BACKOFF_S * 2 ** (attempt - 1))
        try:
            async with asyncio.timeout(TIMEOUT_S):
                status, body = await _follow(client, url, limit_bytes, headers or {})
        except TimeoutError:
            problem = f"no answer in {TIMEOUT_S:g} s"
            continue
        except httpx2.ConnectError as error:
            # No network, or nobody there: who waits for that can ask again.
            problem = str(error) or type(error).__name__
            break
        except httpx2.HTTPError as error:
            problem = str(error) or type(error).__name__
            continue
        if status == 200:
            return body
        if status != 429 and status < 500:
            raise SourceRefused(f"{_host_of(url)} answered with status {status}", source_status=status)
        problem = f"status {status}"
    raise DownloadFailed(f"{_host_of(url)} cannot be reached: {problem}; check the connection and pull again")


async def _follow(
    client: httpx2.AsyncClient, url: str, limit_bytes: int, headers: Mapping[str, str]
) -> tuple[int, bytes]:
    for _ in range(MAX_REDIRECTS + 1):
        sent = {**headers, "Accept-Encoding": "identity"}
        async with client.stream("GET", url, headers=sent, follow_redirects=False) as response:
            location = response.headers.get("Location", "")
            if response.status_code not in _REDIRECTS or not location:
                return response.status_code, await _body(response, limit_bytes) if response.is_success else b""
        target = urljoin(url, location)
        scheme = urlsplit(target).scheme
        if scheme != "https" and scheme != urlsplit(url).scheme:
            raise DownloadFailed(f"{_host_of(url)} sends us on to an address that is not https; this is not followed")
        url = target
    raise DownloadFailed(f"{_host_of(url)} sends us on more than {MAX_REDIRECTS} times")


async def _body(response: httpx2.Response, limit_bytes: int) -> bytes:
    if response.headers.get("Content-Encoding", "identity").lower() not in ("", "identity"):
        raise DownloadFailed(f"{response.url.host} sent a compressed answer that was not asked for")
    body = bytearray()
    async for chunk in response.aiter_raw():
        body += chunk
        if len(body) > limit_bytes:
            raise DownloadFailed(f"{response.url.host} sent more than {limit_bytes} bytes where a small text belongs")
    return bytes(body)


def _host_of(url: str) -> str:
    return urlsplit(url).netloc.rpartition("@")[2]


DEFAULT_HOST = "registry.ollama.ai"
DEFAULT_OWNER = "library"
MAX_MANIFEST_BYTES = 1024 * 1024
MAX_LAYERS = 64
MAX_TEXT_BYTES = 1024 * 1024
# No file of a model is larger; what a hostile manifest claims beyond it would only fail later.
MAX_FILE_BYTES = 1 << 44

_MANIFEST_TYPE = "application/vnd.docker.distribution.manifest.v2+json"
_LAYER_PREFIX = "application/vnd.ollama.image."
_FILE_ROLES = {"model": Role.MODEL, "adapter": Role.ADAPTER}
_TEXTS = frozenset({"params", "system", "messages", "license"})
_IGNORED = frozenset({"template", "prompt", "embed", "projector"})


@dataclass(frozen=True)
class RegistryName:
    """`host[:port]`, `owner/name` and tag of a model. All three were checked by ModelName."""

    host: str
    repo: str
    tag: str
    is_insecure: bool = False

    @property
    def url(self) -> str:
        """Where the registry keeps the repository."""
        scheme = "http" if self.is_insecure or _is_loopback(self.host) else "https"
        return f"{scheme}://{self.host}/v2/{self.repo}"

    @property
    def shown(self) -> str:
        return f"{self.host}/{self.repo}:{self.tag}"


class _Layer(msgspec.Struct, frozen=True):
    digest: str
    size: Annotated[int, msgspec.Meta(ge=0, le=MAX_FILE_BYTES)]
    type: str = msgspec.field(name="mediaType", default="")

    @property
    def kind(self) -> str:
        return self.type.removeprefix(_LAYER_PREFIX) if self.type.startswith(_LAYER_PREFIX) else ""


class _RegistryManifest(msgspec.Struct, frozen=True):
    layers: Annotated[tuple[_Layer, ...], msgspec.Meta(max_length=MAX_LAYERS)]


class _Message(msgspec.Struct, frozen=True):
    role: str
    content: str = ""


# Deep nesting is the one way in which JSON fails that msgspec leaves to Python.
_UNREADABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)

_manifest_decoder = msgspec.json.Decoder(_RegistryManifest)
_messages_decoder = msgspec.json.Decoder(Annotated[list[_Message], msgspec.Meta(max_length=1024)])
_parameters_decoder = msgspec.json.Decoder(dict[str, str | int | float | bool | list[str]])


async def plan(name: RegistryName, *, models_folder: Path, client: httpx2.AsyncClient) -> RemotePlan:
    """What the registry has under that name. Nothing is written.

    Raises ModelNotFound, SourceRefused (private, or any other refusal), and DownloadFailed for a registry that cannot
    be reached or sends what no registry should.
    """
    url = f"{name.url}/manifests/{name.tag}"
    try:
        content = await small_document(client, url, limit_bytes=MAX_MANIFEST_BYTES, headers={"Accept": _MANIFEST_TYPE})
    except SourceRefused as refusal:
        raise _refused(name, refusal) from None
    layers = _checked_layers(content, name)
    texts = {
        kind: [await _text(layer, name, client) for layer in layers if layer.kind == kind] for kind in sorted(_TEXTS)
    }
    files = tuple(
        _planned(layer, role, name, models_folder)
        for kind, role in _FILE_ROLES.items()
        for layer in layers
        if layer.kind == kind
    )
    return RemotePlan(
        repo=f"{name.host}/{name.repo}",
        revision=f"sha256:{hashlib.sha256(content).hexdigest()}",
        files=files,
        source=Source(
            kind="registry",
            repo=f"{name.host}/{name.repo}",
            revision=f"sha256:{hashlib.sha256(content).hexdigest()}",
            file=name.tag,
            url=url,
        ),
        licence_text="\n\n".join(text.decode("utf-8", errors="replace") for text in texts["license"]),
        parameters=_parameters(texts["params"], name),
        system="\n\n".join(text.decode("utf-8", errors="replace") for text in texts["system"]),
        messages=_messages(texts["messages"], name),
    )


def _checked_layers(content: bytes, name: RegistryName) -> tuple[_Layer, ...]:
    """The layers, all of them sound. Layers of other kinds than Ollama's images have are left out."""
    try:
        layers = _manifest_decoder.decode(content).layers
        for layer in layers:
            check_digest(layer.digest)
    except _UNREADABLE as error:
        raise DownloadFailed(f"{name.host} sent a manifest of '{name.repo}' that is none: {error}") from None
    except BadRequest as error:
        raise DownloadFailed(
            f"{name.host} sent a manifest of '{name.repo}' with a bad digest: {error.message}"
        ) from None
    kinds = [layer.kind for layer in layers]
    if kinds.count("model") != 1:
        other = "is not a GGUF model, and cannot run here" if "tensor" in kinds else "is no model"
        raise DownloadFailed(f"'{name.shown}' {other}: its manifest names {kinds.count('model')} model files")
    unknown = next((layer.type for layer in layers if layer.kind not in {*_FILE_ROLES, *_TEXTS, *_IGNORED}), None)
    if unknown is not None:
        raise DownloadFailed(
            f"'{name.shown}' has a part of the unknown kind {unknown[:80]!r}; it may need Ollama itself"
        )
    return layers


def _planned(layer: _Layer, role: Role, name: RegistryName, models_folder: Path) -> PlannedFile:
    digest = check_digest(layer.digest)
    item = Item(
        url=f"{name.url}/blobs/{digest}",
        target=blob_path(models_folder, digest),
        name=f"{name.repo}:{name.tag} ({role.value})",
        size_bytes=layer.size,
        sha256=digest.removeprefix("sha256:"),
    )
    return PlannedFile(item, StoredFile(role=role, place=Place.BLOB, size_bytes=layer.size, digest=digest))


async def _text(layer: _Layer, name: RegistryName, client: httpx2.AsyncClient) -> bytes:
    """A small layer's content, verified."""
    if layer.size > MAX_TEXT_BYTES:
        raise DownloadFailed(f"'{name.shown}' has {layer.kind} of {layer.size} bytes; the limit is {MAX_TEXT_BYTES}")
    digest = check_digest(layer.digest)
    try:
        content = await small_document(client, f"{name.url}/blobs/{digest}", limit_bytes=MAX_TEXT_BYTES)
    except SourceRefused as refusal:
        raise _refused(name, refusal) from None
    if f"sha256:{hashlib.sha256(content).hexdigest()}" != digest:
        raise DownloadFailed(f"{name.host} sent {layer.kind} of '{name.repo}' that does not have its digest")
    return content


def _parameters(texts: list[bytes], name: RegistryName) -> dict[str, Any]:
    merged: dict[str, Any] = {}
    for text in texts:
        try:
            merged |= _parameters_decoder.decode(text)
        except _UNREADABLE as error:
            raise DownloadFailed(f"{name.host} sent parameters of '{name.repo}' that are none: {error}") from None
    # Those that no engine here reads are left out; they come from other releases of Ollama.
    return {key: value for key, value in merged.items() if _is_parameter(key, value)}


def _is_parameter(key: str, value: Any) -> bool:
    if key in parameters.TEXTS:
        return isinstance(value, str | list)
    if key in parameters.BOOLEANS:
        return isinstance(value, bool)
    return key in parameters.KNOWN and isinstance(value, int | float) and not isinstance(value, bool)


def _messages(texts: list[bytes], name: RegistryName) -> tuple[Message, ...]:
    try:
        found = [message for text in texts for message in _messages_decoder.decode(text)]
    except _UNREADABLE as error:
        raise DownloadFailed(f"{name.host} sent messages of '{name.repo}' that are none: {error}") from None
    return tuple(Message(message.role, message.content) for message in found)


def _refused(name: RegistryName, refusal: SourceRefused) -> Exception:
    if refusal.source_status == 404:
        return by_code(
            ModelNotFound.code,
            f"'{name.shown}' was not found; `localrun search` looks for models on the Hugging Face hub, whose names "
            f"are owner/repo[:quant]",
        )
    if refusal.source_status in (401, 403):
        return SourceRefused(
            f"'{name.shown}' does not exist, or is private: localrun does not sign in to Ollama registries",
            source_status=refusal.source_status,
        )
    return refusal


def _is_loopback(host: str) -> bool:
    bare = host.partition(":")[0]
    try:
        return bare == "localhost" or ipaddress.ip_address(bare).is_loopback
    except ValueError:
        return False
