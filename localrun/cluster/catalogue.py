"""Models of the cluster that this machine lacks. A node that is to compute gets their files (`at_hand`), from its
neighbours or else from where the model was pulled first; a door that only shows them gets their cards (`Shelf`), which
are some megabytes. And the other side of both: what a node gives the others (`giving`).

A model that was brought is this machine's like one that was pulled. Its name never takes the place of another model.

Does not: ask Ray where neighbours are, or load anything.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from localrun.cluster import settings as kept
from localrun.cluster.description import Described, Description, Has, check_memory, found
from localrun.cluster.settings import Membership
from localrun.config import Settings, folders
from localrun.errors import (
    BadModelFile,
    Conflict,
    DigestMismatch,
    DiskFull,
    DownloadFailed,
    LocalrunError,
    ModelNotFound,
)
from localrun.hardware.memory import machine_memory
from localrun.models import naming, pull
from localrun.models.download.fetch import new_client
from localrun.models.download.huggingface import Hub
from localrun.models.download.neighbours import Giver, Neighbours, path_to
from localrun.models.download.plan import FetchLimits, Item, NoProgress, RemotePlan
from localrun.models.gguf.header import FileKind
from localrun.models.gguf.reader import Shard, read_header
from localrun.models.name import Kind, ModelName
from localrun.models.storage.manifest import Manifest, ManifestKey, Place, Role, blob_path
from localrun.models.storage.model import Model, NamedAdapter, Origin, OwnAdapter
from localrun.models.storage.store import Store
from localrun.server.engines import machine

# Folders with cards that stay when nobody looks at them.
MAX_CARDS = 64


@contextmanager
def giving(member: Membership, settings: Settings) -> Iterator[Has]:
    """While the others can have this machine's models. What it has, for Ray's labels."""
    with Giver(Store.of(settings), member.address, token=kept.frames_token(), tls=member.tls_to_listen()) as giver:
        gpus = asyncio.run(machine.answering_gpus())
        yield Has(
            machine_memory().total_bytes, tuple(gpu.emptied.free_bytes for gpu in gpus if not gpu.is_shared), giver.port
        )


def neighbours(member: Membership, addresses: Iterable[str]) -> Neighbours:
    """Those at HOST:PORT."""
    return Neighbours(addresses=tuple(addresses), token=kept.frames_token(), tls=member.tls_to_connect())


def check_fits(description: Description, settings: Settings, nodes: Iterable[tuple[str, Has]]) -> None:
    """Before anything is deployed. Raises CannotFit. Of a model that is not on this machine nothing is known."""
    try:
        model = Store.of(settings).resolve(description.model)
    except LocalrunError:
        return
    check_memory(description, model, settings, nodes)


# --- who computes -----------------------------------------------------------------------------------------------------


async def at_hand(store: Store, said: Description, others: Neighbours) -> Model:
    """The model that is described, on this machine, with the adapters that belong to it. Raises what `found` raises,
    Conflict for something else that has an adapter's name, DiskFull before anything is fetched, and DownloadFailed
    where nobody has it."""
    try:
        model = await asyncio.to_thread(found, store, said)
    except ModelNotFound:
        if said.files is None or ModelName.parse(said.model).kind is not Kind.STORED:
            raise
        await _bring(store, said.files, others)
        model = await asyncio.to_thread(found, store, said)
    for adapter in said.adapters:
        if await asyncio.to_thread(_adapter, store, adapter) is None:
            await _bring(store, adapter, others)
    return model


def adapters_of(store: Store, said: Description, model: Model) -> dict[bytes, str]:
    """The files of all adapters that requests may ask for, by their digests. In a thread: may read them."""
    own = [(store.adapter_sha256(adapter.file), adapter.path) for adapter in model.adapters]
    named = [found for one in said.adapters if (found := _adapter(store, one)) is not None]
    return {bytes.fromhex(sha256): str(path) for sha256, path in (*own, *((one.sha256, one.path) for one in named))}


def _adapter(store: Store, said: Described) -> NamedAdapter | None:
    """As it is here; None where nothing has its name. Raises Conflict, and BadModelFile."""
    name = said.manifest.name
    try:
        adapter = store.find(name)
    except ModelNotFound:
        return None
    if adapter.origin == Origin.CLUSTER:
        return None
    if not isinstance(adapter, NamedAdapter) or f"sha256:{adapter.sha256}" != said.manifest.main.digest:
        raise Conflict(
            f"'{name}' is something else here than the cluster's adapter of that name; give it another name (localrun "
            f"cp, localrun rm), or deploy the model without that adapter (--adapter)"
        )
    return adapter


async def _bring(store: Store, said: Described, others: Neighbours) -> None:
    """Gets what is missing of it, and gives it its name."""
    manifest = said.manifest
    await asyncio.to_thread(naming.check_free, store, manifest.name)
    final = _targets(store, manifest)
    items = [
        Item(
            url=path_to(file.digest, manifest.name), target=blob_path(store.folder, file.digest),
            name=f"{file.role} of {manifest.name}", size_bytes=file.size_bytes,
            sha256=file.digest.removeprefix("sha256:"),
        )
        for file, target in zip(manifest.files, final, strict=True)
        if not target.is_file()
    ]  # fmt: skip
    with store.held(manifest.files):
        try:
            await _fetch(items, others)
        except (DiskFull, DigestMismatch):
            raise
        except DownloadFailed as error:
            await _pull(store, manifest, error)
            return
        await asyncio.to_thread(_name, store, manifest, final)


async def _fetch(items: Sequence[Item], others: Neighbours) -> None:
    """From all together; of a file that came wrong it is not known who was to blame, so from one after the other."""
    try:
        await others.fetch(items)
    except DigestMismatch:
        for address in others.addresses:
            try:
                await dataclasses.replace(others, addresses=(address,)).fetch(items)
            except DownloadFailed:
                continue
            return
        raise


async def _pull(store: Store, manifest: Manifest, why: DownloadFailed) -> None:
    """From where it was pulled first. Raises `why` for a model that was made on some machine."""
    if manifest.source.kind not in ("hub", "registry"):
        raise why
    async with new_client() as client:
        context = pull.PullContext(
            store=store, hub=Hub.from_environment(), client=client, limits=FetchLimits(),
            memory_bytes=machine_memory().total_bytes,
        )  # fmt: skip
        try:
            await pull.pull(manifest.name, context=context, observer=_Nobody())
        except LocalrunError as error:
            raise DownloadFailed(f"{why.message}, and it cannot be pulled: {error.message}") from None


class _Nobody(NoProgress):
    """Observes a pull."""

    def status(self, text: str) -> None: ...
    def planned(self, plan: RemotePlan) -> None: ...


def _targets(store: Store, manifest: Manifest) -> list[Path]:
    """Where its files are going to lie. llama.cpp finds those of a split model by their names, which blobs have not."""
    n_shards = len(manifest.of_role(Role.MODEL))
    folder = store.folder / "shards" / manifest.main.digest[-16:]
    return [
        folder / Shard("model", at + 1, n_shards).name
        if file.role is Role.MODEL and n_shards > 1
        else blob_path(store.folder, file.digest)
        for at, file in enumerate(manifest.files)
    ]


def _name(store: Store, manifest: Manifest, final: Sequence[Path]) -> None:
    files = []
    for file, target in zip(manifest.files, final, strict=True):
        blob = blob_path(store.folder, file.digest)
        if target != blob:
            target.parent.mkdir(parents=True, exist_ok=True)
            if not target.is_file():
                os.link(blob, target)  # the blob has no name of a model, and goes as garbage
            file = msgspec.structs.replace(file, place=Place.FILE, path=str(target.absolute()))
        files.append(file)
    said = msgspec.structs.replace(manifest, files=tuple(files), created_at=datetime.now(UTC))
    if not said.is_adapter:
        store.model_of(said)  # whatever it is, it is looked at before it has a name
    naming.point(store, said.name, said)


# --- who shows --------------------------------------------------------------------------------------------------------


class Shelf:
    """A door's cards: the store finds and lists what is put here, until it is taken away."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._cards: dict[str, Mapping[ManifestKey, Model | NamedAdapter]] = {}  # by the app's model

    async def put(self, said: Description, others: Neighbours) -> Model:
        """The model as this machine has it, or else by its card. Raises what `found` raises but ModelNotFound, and
        DownloadFailed where nobody gives the card."""
        cards: dict[ManifestKey, Model | NamedAdapter] = {}
        try:
            model = await asyncio.to_thread(found, self._store, said)
        except ModelNotFound:
            if said.files is None:
                raise
            model = await _model(said.files, others)
            cards[ManifestKey.of(model.name)] = model
        for adapter in said.adapters:
            with suppress(Conflict, BadModelFile):  # what has its name here is not what requests get
                if await asyncio.to_thread(_adapter, self._store, adapter) is None:
                    cards[ManifestKey.of(adapter.manifest.name)] = await _adapter_card(adapter, others)
        self._cards[said.model.removesuffix(":latest")] = cards
        self._show()
        return model

    def take_away(self, model: str) -> None:
        self._cards.pop(model, None)
        self._show()

    def _show(self) -> None:
        self._store.cards = {key: card for cards in self._cards.values() for key, card in cards.items()}


async def _model(said: Described, others: Neighbours) -> Model:
    manifest = said.manifest
    n_shards = len(manifest.of_role(Role.MODEL))
    names = [
        Shard("model", at + 1, n_shards).name if file.role is Role.MODEL and n_shards > 1 else f"{at}-{file.role}.gguf"
        for at, file in enumerate(manifest.files)
    ]
    paths = await _fetch_cards(said, names, others)
    files = list(zip(manifest.files, paths, strict=True))
    sizes = {path.name: file.size_bytes for file, path in files}
    projector = next((path for file, path in files if file.role is Role.PROJECTOR), None)
    return Model(
        name=manifest.name, path=paths[0], size_bytes=sum(sizes.values()),
        modified_at=datetime.fromtimestamp(paths[0].stat().st_mtime, UTC),
        header=await asyncio.to_thread(read_header, paths[0], sizes=sizes), origin=Origin.CLUSTER, manifest=manifest,
        adapters=tuple(OwnAdapter(file, path) for file, path in files if file.role is Role.ADAPTER),
        projector=projector,
        projector_header=None if projector is None else read_header(projector, kind=FileKind.PROJECTOR, sizes=sizes),
        no_projector=manifest.no_projector,
    )  # fmt: skip


async def _adapter_card(said: Described, others: Neighbours) -> NamedAdapter:
    (path,) = await _fetch_cards(said, ["adapter.gguf"], others)
    file = said.manifest.main
    header = await asyncio.to_thread(read_header, path, kind=FileKind.ADAPTER, sizes={path.name: file.size_bytes})
    modified_at = datetime.fromtimestamp(path.stat().st_mtime, UTC)
    return NamedAdapter(
        said.manifest.name, path, file.size_bytes, modified_at, header, Origin.CLUSTER, manifest=said.manifest
    )


async def _fetch_cards(said: Described, names: Sequence[str], others: Neighbours) -> list[Path]:
    """Those that are here from before are not fetched again."""
    root = folders().cache / "cards"
    folder = root / said.manifest.main.digest[-32:]
    paths = [folder / name for name in names]
    items = [
        Item(
            url=path_to(file.digest, said.manifest.name, card.n_bytes), target=path,
            name=f"the card of {said.manifest.name}", size_bytes=card.n_bytes,
            sha256=card.digest.removeprefix("sha256:"),
        )
        for file, card, path in zip(said.manifest.files, said.cards, paths, strict=True)
    ]  # fmt: skip
    await _fetch(items, others)
    os.utime(folder)
    for old in sorted(root.iterdir(), key=lambda one: one.stat().st_mtime)[:-MAX_CARDS]:
        shutil.rmtree(old, ignore_errors=True)
    return paths
