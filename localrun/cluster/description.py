"""An app of the cluster: what it is, whether a replica of it fits on any node, and how many of them there should be.

It is a model by the contents of its files, how it is loaded, and the adapters that requests may ask for. All of its
replicas are opened by one description, on whatever node, so that a stream can go on on any of them. It has the
manifests of all that, with each file by its digest, so that a machine without them can get them, or their cards
(`catalogue.py`).

Does not: choose a node (Ray does), or fetch files.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

import msgspec

from localrun import __version__
from localrun.config import NOTHING_ASKED, LoadSettings, Settings
from localrun.errors import BadRequest, CannotFit, Conflict
from localrun.models.fit import USABLE_RAM, Gpu, Machine, choose, in_gb
from localrun.models.gguf.reader import card_bytes
from localrun.models.storage.blobs import hash_file
from localrun.models.storage.manifest import Manifest, Place, Role, Source, StoredFile
from localrun.models.storage.model import Model, NamedAdapter, Origin
from localrun.models.storage.store import Store
from localrun.server.engines.placement import place_embeddings, wish_of
from localrun.server.engines.resident import Use, use_of

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


# --- whether it fits on any node, by what nodes say of their memory when they join ---
#
# What counts is all memory that a node has: whether so much is free there, its own replica finds out. A node says what
# it has in labels, which are Ray's for facts about a machine; their values hold few characters.

_RAM, _GPUS, _FILES = "localrun/ram-mib", "localrun/gpus-mib", "localrun/files-port"
_MIB = 1024 * 1024
_SOME_GPUS = re.compile(r"(\d{1,3})x(\d{1,9})")


class Has(msgspec.Struct, frozen=True):
    """What a node has: memory, that of each GPU, and the port at which it gives files. 0 is not known."""

    ram_bytes: int = 0
    gpu_bytes: tuple[int, ...] = ()
    files_port: int = 0

    @property
    def labels(self) -> dict[str, str]:
        gpus = Counter(size // _MIB for size in self.gpu_bytes)
        shown = ".".join(f"{count}x{size}" for size, count in sorted(gpus.items(), reverse=True)[:4])
        said = {_RAM: str(self.ram_bytes // _MIB), _FILES: str(self.files_port)}
        return said | ({_GPUS: shown} if shown else {})

    @classmethod
    def of(cls, labels: Mapping[str, str]) -> Has:
        """Of a node's labels, which may be anybody's."""
        ram, port = (labels.get(key, "") for key in (_RAM, _FILES))
        gpus = _SOME_GPUS.findall(labels.get(_GPUS, ""))
        return cls(
            int(ram) * _MIB if ram.isdecimal() else 0,
            tuple(int(size) * _MIB for count, size in gpus for _ in range(int(count))),
            int(port) if port.isdecimal() else 0,
        )


def check_memory(description: Description, model: Model, settings: Settings, nodes: Iterable[tuple[str, Has]]) -> None:
    """Raises CannotFit with what each node has, if a replica fits on none of those whose memory is known."""
    known = [(name, has) for name, has in sorted(nodes, key=lambda node: node[0]) if has.ram_bytes]
    needed = [_needed_bytes(description, model, settings, has) for _, has in known]
    if not known or None in needed:
        return
    sizes = sorted(size for size in needed if size)
    wanted = f"{in_gb(sizes[0])} of memory" if sizes else "GPUs"
    raise CannotFit(
        f"'{model.name}' fits on no node: each replica needs {wanted}{_on(description.n_gpus)}; "
        f"{'; '.join(f'{name} has {_shown(has)}' for name, has in known)}; of RAM {USABLE_RAM:.0%} may be used. Take a "
        f"smaller model or a stronger quantization, or deploy it with fewer --slots or a smaller --num-ctx"
    )


def _on(n_gpus: float) -> str:
    return f" with {n_gpus:g} GPU{'s' if n_gpus > 1 else ''}" if n_gpus else ""


def _shown(has: Has) -> str:
    gpus = f"{len(has.gpu_bytes)} x {in_gb(max(has.gpu_bytes))} on GPUs" if has.gpu_bytes else "no GPU"
    return f"{in_gb(has.ram_bytes)} of RAM and {gpus}"


def _needed_bytes(description: Description, model: Model, settings: Settings, has: Has) -> int | None:
    """What it lacks there: None where it fits, 0 where the node has too few GPUs."""
    n_gpus = description.n_gpus
    if n_gpus > len(has.gpu_bytes):
        return 0
    load = description.load.over(model.load)
    settings = settings.with_load(load)
    if use_of(model.header) is not Use.TEXT:
        sizes: Sequence[int] = has.gpu_bytes[: math.ceil(n_gpus)]
        try:
            place_embeddings(model, settings, has.ram_bytes + sum(sizes), n_ctx=load.num_ctx or 0)
        except CannotFit:
            return model.size_bytes
        return None
    share = min(1.0, n_gpus)
    gpus = tuple(Gpu("GPU", int(size * share)) for size in has.gpu_bytes[: math.ceil(n_gpus)])
    wish = wish_of(
        settings, n_ctx=load.num_ctx or 0, adapter_bytes=model.adapter_bytes, projector=model.projector_header
    )
    fit = choose(model.header, Machine(has.ram_bytes, gpus), wish)
    return None if fit.fits else fit.estimate.total_bytes


# --- how many replicas it should have, by the seconds of work that wait ---
# Two prompts of 60,000 tokens are more work than twenty of 60. More when what waits has been too much for some seconds,
# at most twice as many at a time; one less when the others could have done it for ten minutes. As long as replicas are
# starting there is nothing to learn from how much waits, so nothing is added: loading a model may take minutes.

UP_AFTER_S = 15.0
DOWN_AFTER_S = 600.0
# What an app is scaled for: so long a new request waits for its first token where it waits.
TARGET_WAIT_S = 2.0


class Load(NamedTuple):
    """Of one replica. `wait_s` is how long what waits there last is expected to wait, None where nobody knows."""

    n_slots: int
    n_running: int
    n_queued: int
    wait_s: float | None


class Scaler:
    """Of one app: what it remembers is since when."""

    def __init__(self) -> None:
        self._n = -1
        self._behind_since_s: float | None = None
        self._idle_since_s: float | None = None

    def wanted(self, scale: Scale, n: int, loads: Sequence[Load], now_s: float) -> int:
        """How many there should be, of `n` now; `loads` are of those that are ready."""
        if n != self._n:
            self._n, self._behind_since_s, self._idle_since_s = n, None, None
        if n != scale.within(n):
            return scale.within(n)
        wait_s = _mean_wait_s(loads)
        is_behind = len(loads) >= n > 0 and wait_s > TARGET_WAIT_S
        self._behind_since_s = (self._behind_since_s or now_s) if is_behind else None
        is_idle = n > scale.least and _others_suffice(n, loads)
        self._idle_since_s = (self._idle_since_s or now_s) if is_idle else None
        if self._behind_since_s is not None and now_s - self._behind_since_s >= UP_AFTER_S:
            return scale.within(min(2 * n, math.ceil(n * wait_s / TARGET_WAIT_S)))
        if self._idle_since_s is not None and now_s - self._idle_since_s >= DOWN_AFTER_S:
            return n - 1
        return n


def _mean_wait_s(loads: Sequence[Load]) -> float:
    """Over the replicas: what waits could be spread. A queue that nobody can predict asks for twice as many."""
    waits = [(2 * TARGET_WAIT_S if one.wait_s is None else one.wait_s) if one.n_queued else 0.0 for one in loads]
    return sum(waits) / len(waits) if waits else 0.0


def _others_suffice(n: int, loads: Sequence[Load]) -> bool:
    """Whether one less could do what is done. One that never became ready is not missed, as long as none waits; but the
    first one is being waited for."""
    if not loads or any(one.n_queued for one in loads):
        return False
    n_slots = sum(one.n_slots for one in loads)
    if len(loads) >= n:
        n_slots -= max((one.n_slots for one in loads), default=0)
    return sum(one.n_running for one in loads) <= n_slots
