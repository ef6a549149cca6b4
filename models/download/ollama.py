"""Ollama registries as a source: a manifest, and blobs that are named by their digests.

Runs in the daemon's event loop. Parameters, system prompt, messages and licence are small layers, read into memory and
verified; model, projector and adapters are planned as files (`storage/other_programs.py` says what is left out).

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
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urljoin, urlsplit

import httpx2

from localrun.config import is_loopback
from localrun.errors import DownloadFailed, ModelNotFound, SourceRefused, by_code
from localrun.models.download.plan import Item, PlannedFile, RemotePlan
from localrun.models.download.ranges import RedirectPolicy, why_not
from localrun.models.storage.manifest import Place, Role, Source, StoredFile, blob_path
from localrun.models.storage.other_programs import (
    MAX_MANIFEST_BYTES,
    MAX_TEXT_BYTES,
    TEXTS,
    Layer,
    ManifestReader,
    files_among,
    joined,
)

MAX_REDIRECTS = 5
ATTEMPTS = 4
BACKOFF_S = 0.5
TIMEOUT_S = 30.0

_UNREACHED = "cannot be reached: {}; check the connection and pull again"
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
            problem = _UNREACHED.format(f"no answer in {TIMEOUT_S:g} s")
            continue
        except httpx2.ConnectError as error:
            # No network, or nobody there: who waits for that can ask again.
            problem = _UNREACHED.format(why_not(error))
            break
        except httpx2.HTTPError as error:
            problem = _UNREACHED.format(why_not(error))
            continue
        if status == 200:
            return body
        if status != 429 and status < 500:
            raise SourceRefused(f"{_host_of(url)} answered with status {status}", source_status=status)
        what = "has had too many requests from here" if status == 429 else f"answered with status {status}"
        problem = f"{what}; pull again in some minutes"
    raise DownloadFailed(f"{_host_of(url)} {problem}")


async def _follow(
    client: httpx2.AsyncClient, url: str, limit_bytes: int, headers: Mapping[str, str]
) -> tuple[int, bytes]:
    policy = RedirectPolicy()
    for _ in range(MAX_REDIRECTS + 1):
        sent = {**headers, "Accept-Encoding": "identity"}
        policy.check_url(httpx2.URL(url))
        async with client.stream("GET", url, headers=sent, follow_redirects=False) as response:
            await policy.check_answer(response)
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


_MANIFEST_TYPE = "application/vnd.docker.distribution.manifest.v2+json"


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
        scheme = "http" if self.is_insecure or is_loopback(self.host.partition(":")[0]) else "https"
        return f"{scheme}://{self.host}/v2/{self.repo}"

    @property
    def shown(self) -> str:
        return f"{self.host}/{self.repo}:{self.tag}"


async def plan(
    name: RegistryName, *, models_folder: Path, client: httpx2.AsyncClient, without_projector: bool = False
) -> RemotePlan:
    """What the registry has under that name, perhaps without its projector. Nothing is written.

    Raises ModelNotFound, SourceRefused (private, or any other refusal), and DownloadFailed for a registry that cannot
    be reached or sends what no registry should.
    """
    url = f"{name.url}/manifests/{name.tag}"
    try:
        content = await small_document(client, url, limit_bytes=MAX_MANIFEST_BYTES, headers={"Accept": _MANIFEST_TYPE})
    except SourceRefused as refusal:
        raise _refused(name, refusal) from None
    reader = ManifestReader(f"'{name.shown}'", f"'{name.repo}' that {name.host} sent", DownloadFailed)
    layers = reader.layers(content)
    texts = {
        kind: [await _text(layer, name, client) for layer in layers if layer.kind == kind] for kind in sorted(TEXTS)
    }
    files = [_planned(layer, role, name, models_folder) for layer, role in files_among(layers)]
    left = [file for file in files if without_projector and file.stored.role is Role.PROJECTOR]
    revision = f"sha256:{hashlib.sha256(content).hexdigest()}"
    repo = f"{name.host}/{name.repo}"
    return RemotePlan(
        repo=repo,
        revision=revision,
        files=tuple(file for file in files if file not in left),
        source=Source(kind="registry", repo=repo, revision=revision, file=name.tag, url=url),
        licence_text=joined(texts["license"]),
        parameters=reader.parameters(texts["params"]),
        system=joined(texts["system"]),
        messages=reader.messages(texts["messages"]),
        left_projector=left[0].item.name if left else "",
    )


def _planned(layer: Layer, role: Role, name: RegistryName, models_folder: Path) -> PlannedFile:
    item = Item(
        url=f"{name.url}/blobs/{layer.digest}",
        target=blob_path(models_folder, layer.digest),
        name=f"{name.repo}:{name.tag} ({role.value})",
        size_bytes=layer.size,
        sha256=layer.digest.removeprefix("sha256:"),
    )
    return PlannedFile(item, StoredFile(role=role, place=Place.BLOB, size_bytes=layer.size, digest=layer.digest))


async def _text(layer: Layer, name: RegistryName, client: httpx2.AsyncClient) -> bytes:
    if layer.size > MAX_TEXT_BYTES:
        raise DownloadFailed(f"'{name.shown}' has {layer.kind} of {layer.size} bytes; the limit is {MAX_TEXT_BYTES}")
    try:
        content = await small_document(client, f"{name.url}/blobs/{layer.digest}", limit_bytes=MAX_TEXT_BYTES)
    except SourceRefused as refusal:
        raise _refused(name, refusal) from None
    if f"sha256:{hashlib.sha256(content).hexdigest()}" != layer.digest:
        raise DownloadFailed(f"{name.host} sent {layer.kind} of '{name.repo}' that does not have its digest")
    return content


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
    if refusal.source_status == 400:  # so the hub's own registry says of tags, and so do mirrors of it
        return SourceRefused(
            f"{name.host} has no '{name.tag}' of '{name.repo}' as one file; if it is a mirror of the Hugging Face hub, "
            f"set HF_ENDPOINT to it and pull {name.repo}",
            source_status=400,
        )
    if refusal.source_status == 412:
        return SourceRefused(
            f"{name.host} gives '{name.repo}:{name.tag}' to a newer Ollama alone; look for a GGUF of it "
            f"(localrun search)",
            source_status=412,
        )
    return refusal
