"""What an app of the cluster is: a model by the contents of its files, how it is loaded, and the adapters that requests
may ask for. All of its replicas are opened by one description, on whatever node, so that a stream can go on on any of
them. It has the manifests of all that, with each file by its digest, so that a machine without them can get them, or
their cards (`catalogue.py`).

Does not: say where replicas run, or fetch files.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from localrun import __version__
from localrun.config import NOTHING_ASKED, LoadSettings
from localrun.errors import BadRequest, Conflict
from localrun.models.gguf.header import RANK, Header
from localrun.models.gguf.reader import card_bytes
from localrun.models.storage.blobs import hash_file
from localrun.models.storage.manifest import Manifest, Place, Role, Source, StoredFile
from localrun.models.storage.model import Model, NamedAdapter, Origin
from localrun.models.storage.store import Store
from localrun.server.engines.resident import Use

# Of a manifest, which every door hears of every second. A licence that is longer stays where it is.
MAX_MANIFEST_BYTES = 128 * 1024
# Of what is described, wherever it is: two machines that pulled it at different times have the same.
_NO_TIME = datetime.fromtimestamp(0, UTC)


class Card(msgspec.Struct, frozen=True):
    """Of one file: the `n_bytes` of its beginning that say what it is, and their digest."""

    n_bytes: int
    digest: str


class Described(msgspec.Struct, frozen=True):
    """A model or an adapter. The files of `manifest` are all that an engine opens, as blobs; each has its card."""

    manifest: Manifest
    cards: tuple[Card, ...]


class Scale(msgspec.Struct, frozen=True):
    """Between how many replicas. With none at least, the first request after a pause waits for one to start."""

    least: int
    most: int

    def within(self, n: int) -> int:
        return min(max(n, self.least), self.most)


class Description(msgspec.Struct, frozen=True, kw_only=True):
    """`contents` is of all files that an engine opens. `n_gpus` is for each replica, a part of one for less. Without
    `scale` there are as many replicas as were asked for, and without `files` each machine needs its own."""

    model: str
    contents: str
    load: LoadSettings = NOTHING_ASKED
    n_gpus: float = 0.0
    scale: Scale | None = None
    files: Described | None = None
    adapters: tuple[Described, ...] = ()

    @property
    def fingerprint(self) -> str:
        """What a door and a replica must agree on. Other versions of localrun may compute otherwise."""
        adapters = [one.manifest.main.digest for one in self.adapters]
        said = msgspec.json.encode((__version__, self.model, self.contents, self.load, adapters), order="sorted")
        return hashlib.sha256(said).hexdigest()

    @property
    def adapter_digests(self) -> frozenset[str]:
        """Of all that requests may ask for, 64 hex digits of each."""
        own = () if self.files is None else self.files.manifest.of_role(Role.ADAPTER)
        return frozenset(
            file.digest.removeprefix("sha256:") for file in (*own, *(one.manifest.main for one in self.adapters))
        )

    @property
    def app(self) -> str:
        """The name that Serve has for it: the same for every description of this model."""
        return app_name(self.model)


def app_name(model: str) -> str:
    digest = hashlib.sha256(model.encode()).hexdigest()[:8]
    return f"{re.sub(r'[^A-Za-z0-9.-]', '_', model)}-{digest}"


def use_of(header: Header) -> Use:
    """What replicas of a model are for: what it was made for."""
    return Use.RERANK if header.pooling == RANK else Use.TEXT if header.generates else Use.EMBED


def parts_of(model: Model) -> list[tuple[Role, Path]]:
    """All files that an engine opens, in the order of a manifest."""
    roles = [(Role.MODEL, path) for path in model.header.shard_paths or (model.path,)]
    roles += [(Role.PROJECTOR, model.projector)] if model.projector is not None else []
    return [*roles, *((Role.ADAPTER, adapter.path) for adapter in model.adapters)]


def digests_of(store: Store, found: Model | NamedAdapter, paths: Iterable[Path]) -> list[str]:
    """Reads the files that the store does not know by their content. Raises OSError, and Conflict for a file that is
    being written."""
    known = store.known_digests(found)
    return [known.get(path) or hash_file(path) for path in paths]


def contents_of(store: Store, model: Model) -> str:
    """A digest over the contents of all files that an engine opens of it. Raises as `digests_of`."""
    return _together(digests_of(store, model, [path for _, path in parts_of(model)]))


def _together(digests: Sequence[str]) -> str:
    return hashlib.sha256("".join(digests).encode("ascii")).hexdigest()


def described(
    store: Store, name: str, load: LoadSettings, n_gpus: float, adapters: Sequence[str] = (), scale: Scale | None = None
) -> Description:
    """Of a model of this machine, with all adapters that fit it, or those of these names. Raises what the store raises
    for a name, BadRequest for an adapter that does not fit, and Conflict."""
    model = store.resolve(name)
    model.check_here()
    named = [store.adapter(one, field="adapters") for one in adapters]
    for adapter in named:
        if problem := adapter.misfit(model.header):
            raise BadRequest(f"the adapter '{adapter.name}' cannot be used with '{model.name}': it {problem}")
    if not named and use_of(model.header) is Use.TEXT:
        named = [adapter for adapter in store.adapters() if not adapter.misfit(model.header)]
    files = _described(store, model, parts_of(model))
    return Description(
        model=model.name, contents=_together([file.digest for file in files.manifest.files]), load=load, n_gpus=n_gpus,
        scale=scale, files=files,
        adapters=tuple(_described(store, adapter, [(Role.ADAPTER, adapter.path)]) for adapter in named),
    )  # fmt: skip


def _described(store: Store, found: Model | NamedAdapter, parts: Sequence[tuple[Role, Path]]) -> Described:
    """Raises as `described`."""
    digests = digests_of(store, found, [path for _, path in parts])
    files = tuple(
        StoredFile(role=role, place=Place.BLOB, size_bytes=path.stat().st_size, digest=digest)
        for (role, path), digest in zip(parts, digests, strict=True)
    )
    source = found.manifest.source if found.manifest is not None else Source(kind="")
    said = msgspec.structs.replace(
        found.manifest or Manifest(name="", files=(), created_at=_NO_TIME, source=source), name=found.name, files=files,
        # Where it lies on this machine means nothing on others.
        source=source if source.kind in ("hub", "registry") else Source(kind=Origin.CLUSTER.value), created_at=_NO_TIME,
        no_projector=found.no_projector if isinstance(found, Model) else "",
    )  # fmt: skip
    if len(msgspec.json.encode(said)) > MAX_MANIFEST_BYTES:
        said = msgspec.structs.replace(said, licence_text="")
    if (n_bytes := len(msgspec.json.encode(said))) > MAX_MANIFEST_BYTES:
        raise BadRequest(
            f"the system prompt, messages and template of '{found.name}' have {n_bytes} bytes; in a cluster "
            f"{MAX_MANIFEST_BYTES} are the most"
        )
    return Described(said, tuple(_card(path) for _, path in parts))


def _card(path: Path) -> Card:
    with path.open("rb") as file:
        beginning = file.read(card_bytes(path))
    return Card(len(beginning), f"sha256:{hashlib.sha256(beginning).hexdigest()}")


def found(store: Store, description: Description) -> Model:
    """The model that is described, on this machine. Reads its files. Raises what the store raises for the name,
    ModelNotFound where only its card is here, and Conflict for another one of this name."""
    model = store.resolve(description.model)
    model.check_here()
    if contents_of(store, model) != description.contents:
        raise Conflict(
            f"'{description.model}' is here with other contents than the cluster's; copy that file, or pull it again"
        )
    return model
