"""One model's place in memory, from the decision to load it until its process is gone, what it is loaded for, and which
draft model it and its requests speculate with.

Owner: the supervisor, on the daemon's event loop. A resident is keyed by its resolved file path, so a model that is
called by several names is one engine. An engine either generates or computes vectors; a model that is asked for both
has two engines, of which the second one shares the weights' pages with the first. So has a model that is asked for with
load settings that exclude each other (loads.py).

Invariants: it is idle exactly when nobody holds or awaits a lease; only idle residents are evicted; `ended` is set once
the process is reaped, never before.

Does not: start or stop the process (supervisor.py does).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Hashable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from pathlib import Path
from typing import NamedTuple, Protocol

from localrun import wire
from localrun.config import NOTHING_ASKED, LoadSettings, Settings
from localrun.errors import BadRequest, CannotFit, LocalrunError
from localrun.models import draft
from localrun.models.adapters import AdaptedModel, InEffect
from localrun.models.fit import gpu_share
from localrun.models.gguf.header import RANK, RANKING_HEADS, Header
from localrun.models.storage.model import Evidence, Model
from localrun.models.storage.store import Store
from localrun.server.engines.link import EngineLink, Sink
from localrun.server.engines.placement import Placement
from localrun.snapshot import EngineRow
from localrun.stored import FileStamp
from localrun.wire import Pooling

_log = logging.getLogger(__name__)

# Fields of a row that are copied from the engine's last step.
_OF_STEP = frozenset(EngineRow.__struct_fields__) & frozenset(wire.StepStats.__struct_fields__)


class Use(StrEnum):
    """What a model is loaded for. Any model that generates can be asked for embeddings, as with Ollama: they are the
    last token's hidden state, which is what such models offer and no match for a model trained for it."""

    TEXT = "text"
    EMBED = "embed"
    RERANK = "rerank"


def use_of(header: Header) -> Use:
    """What a model was made for."""
    return Use.RERANK if header.pooling == RANK else Use.TEXT if header.generates else Use.EMBED


def pooling_for(model: Model, use: Use) -> Pooling | None:
    """How an engine for this use pools; None for one that generates.

    Raises BadRequest for a model of another kind, naming what it is for.
    """
    header = model.header
    name = f'"{model.name}"'
    is_reranker = header.pooling == RANK
    if use is Use.RERANK:
        if not is_reranker:
            raise BadRequest(
                f"{name} does not support reranking; choose a model whose file has a ranking head (its pooling type "
                f"is rank), such as bge-reranker or Qwen3-Reranker",
                field="model",
            )
        if header.lacks_ranking_head:
            raise BadRequest(
                f"{name} cannot rank: its file has no ranking head ({' or '.join(sorted(RANKING_HEADS))}); "
                f"look for another GGUF of it",
                field="model",
            )
        return Pooling.RANK
    if is_reranker:
        what = "embeddings" if use is Use.EMBED else "chat or generate"
        raise BadRequest(f"{name} does not support {what}; it ranks documents: use /v1/rerank", field="model")
    if use is Use.EMBED:
        return Pooling(header.pooling)
    if not header.generates:
        raise BadRequest(
            f"{name} does not support chat or generate; it is an embedding model: use /api/embed or /v1/embeddings",
            field="model",
        )
    return None


def path_to_open(model: Model, resolved: Path) -> Path:
    """The resolved file; but a model in several files is opened by its own path, since llama.cpp derives the other
    files' names from it."""
    return model.path if model.header.shard_paths else resolved


def on_wire(adapters: Sequence[InEffect]) -> tuple[wire.Adapter, ...]:
    """The adapters as messages to engines have them."""
    return tuple(wire.Adapter(str(each.path), bytes.fromhex(each.sha256), each.scale) for each in adapters)


# Longer than this is for ever: timers are not made for it.
LONGEST_KEEP_ALIVE_S = 1e9


class ResidentState(StrEnum):
    LOADING = "loading"
    READY = "ready"
    STOPPING = "stopping"


# What all files of a model were like.
Stamps = tuple[FileStamp | None, ...]


class Draft(NamedTuple):
    """A draft model: what it is called, the file to open, its header, and what its files were like."""

    name: str
    path: Path
    header: Header
    evidence: Evidence


class ExtraDraft(NamedTuple):
    """The draft model that requests asked for last, its weights and cells, and what it takes of RAM or of a GPU."""

    path: Path
    size_bytes: int
    ram_bytes: int
    gpu_bytes: int


@dataclass(eq=False, repr=False, kw_only=True)
class Resident:
    """See the module. `placement` is None while it waits for room, and it takes no room until then.

    With `pooling` its engine computes vectors, else it generates. `projector` and `draft` are opened with it, and
    `extra_draft` was loaded for a request since, as were `extra_adapters`, by their files, with their sizes in bytes
    and the last one used at the end. The draft models of settings that are in `settled_drafts` are its own, or were
    found not to do: nothing is to be done about them for a request. `n_waiting` requests wait for its load and will use
    it; `n_behind` wait for its end, to load it anew.

    `asked` is what the request wanted that it is loaded for, `load` that and what the engine had that it `replaces`,
    which has too little room, and `settings` are all settings with that.
    """

    key: Path
    model: Model
    stamps: Stamps
    link: EngineLink
    asked: LoadSettings
    load: LoadSettings
    settings: Settings
    pooling: Pooling | None = None
    replaces: Resident | None = None
    loading: asyncio.Task[None] = field(init=False)
    keep_alive_s: float = field(init=False)
    state: ResidentState = ResidentState.LOADING
    placement: Placement | None = None
    projector: Path | None = field(init=False)
    draft: Draft | None = None
    extra_draft: ExtraDraft | None = None
    extra_adapters: dict[Path, int] = field(default_factory=dict)
    settled_drafts: set[str] = field(default_factory=set)
    # Whether it was opened with the quick kernels.
    is_quick: bool = True
    n_leases: int = 0
    n_waiting: int = 0
    n_behind: int = 0
    began_at_s: float = field(default_factory=time.monotonic)
    loaded_at_s: float | None = None
    # Unload at the next idle moment: it is not what should run, whoever still comes; or it was asked for while in use,
    # and nobody has asked for the model since. With `is_draining`, new requests wait for that moment.
    unload_when_idle: bool = False
    is_unwanted: bool = False
    is_draining: bool = False
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    _expiry: asyncio.TimerHandle | None = None

    def __post_init__(self) -> None:
        self.keep_alive_s = self.settings.keep_alive_s
        self.projector = None if self.pooling is Pooling.RANK else self.model.projector
        self.last_used_s = self.began_at_s

    @property
    def use(self) -> Use:
        return Use.TEXT if self.pooling is None else Use.RERANK if self.pooling is Pooling.RANK else Use.EMBED

    @property
    def needed_bytes(self) -> int:
        """What it was promised of RAM."""
        placed_bytes = 0 if self.placement is None else self.placement.needed_bytes
        extra_bytes = 0 if self.extra_draft is None else self.extra_draft.ram_bytes
        return placed_bytes + extra_bytes + sum(self.extra_adapters.values())

    @property
    def shared_bytes(self) -> int:
        """The part of that on GPUs that compute in RAM."""
        extra = self.extra_draft
        return (self.placement.shared_bytes if self.placement else 0) + (
            min(extra.ram_bytes, extra.gpu_bytes) if extra else 0
        )

    @property
    def n_roomy_cells(self) -> int:
        """Twice what the engine had that it replaces, as far as one request can use it: clients that ask for a little
        more room each time have it loaded seldom."""
        if self.replaces is None:
            return 0
        return min(2 * self.replaces.link.ready.n_kv_cells, max(self.model.header.n_ctx_train, self.load.num_ctx or 0))

    @property
    def kv_type(self) -> str:
        """The type of its KV cache, as soon as there is a placement."""
        return (self.placement and self.placement.kv_type) or self.settings.plain_kv_type

    @property
    def headers(self) -> tuple[Header, ...]:
        """Of the models that its engine is opened with."""
        return (self.model.header, *([] if self.draft is None else [self.draft.header]))

    def is_of(self, stamps: Stamps) -> bool:
        """Whether it was opened with just these files, and its draft model's are as they were."""
        return self.stamps == stamps and (self.draft is None or self.draft.evidence.holds())

    @property
    def is_idle(self) -> bool:
        return self.n_leases == 0 and self.n_waiting == 0

    @property
    def is_loaded(self) -> bool:
        return self.state is ResidentState.READY

    @property
    def takes_requests(self) -> bool:
        return self.state is ResidentState.READY and not self.is_draining

    @property
    def can_be_evicted(self) -> bool:
        return self.is_idle and self.state is not ResidentState.STOPPING

    def lived_s(self, now_s: float) -> float:
        """Since the load; 0 while it is not loaded."""
        return 0.0 if self.loaded_at_s is None else now_s - self.loaded_at_s

    def load_left_s(self, now_s: float, usual_s: float | None) -> float:
        """How much longer its load will take, if the last one took `usual_s`. A load that was never seen to end, or
        takes longer than usual, is expected to take as long again as it has taken."""
        elapsed_s = now_s - self.began_at_s
        return usual_s - elapsed_s if usual_s is not None and usual_s > elapsed_s else elapsed_s

    def start_countdown(self, expired: Callable[[Resident], None]) -> None:
        """Calls `expired` after the keep-alive time, unless it is for ever or the countdown is stopped."""
        self.stop_countdown()
        if 0 <= self.keep_alive_s < LONGEST_KEEP_ALIVE_S:
            self._expiry = asyncio.get_running_loop().call_later(self.keep_alive_s, expired, self)

    def stop_countdown(self) -> None:
        if self._expiry is not None:
            self._expiry.cancel()
            self._expiry = None

    def row(self, target_itl_s: float) -> EngineRow:
        """What people see of it; `rss_bytes` is left to whoever samples processes."""
        row = EngineRow(model=self.model.name, name=self.model.full_name, pid=self.link.pid, state=self.state.value)
        row.use = self.use.value
        row.expires_in_s = self._expires_in_s()
        row.target_itl_s = target_itl_s or None
        row.load = self.load.said
        if self.placement is not None:
            row.kv_cells = self.placement.n_kv_cells
            row.kv_type = self.kv_type
            row.size_bytes = self.placement.needed_bytes
        if self.loaded_at_s is not None:
            ready = self.link.ready
            row.n_ctx = ready.n_ctx
            row.slots = ready.n_slots
            row.kv_cells = ready.n_kv_cells + ready.n_pool_cells
            row.size_bytes = ready.model_size_bytes + ready.kv_size_bytes + self._beside_bytes
            row.backend = ready.backend
            row.gpu_layers = ready.n_gpu_layers
            row.gpu_bytes = int(row.size_bytes * self._gpu_share)
            row.layers = self.model.header.n_layers
            row.load_s = ready.load_s
        row.is_preparing = self.link.is_preparing
        row.slots_busy = min(row.slots, self.link.n_requests)  # until a step says better
        show_last_step(row, self.link)
        return row

    @cached_property
    def _gpu_share(self) -> float:
        return gpu_share(self.model.header, self.link.ready.n_gpu_layers)  # looks through all tensors

    @property
    def _beside_bytes(self) -> int:
        """What is loaded beside the model: draft models, with their cells, and the projector."""
        found = 0 if self.extra_draft is None else self.extra_draft.size_bytes
        if self.placement is not None:
            found += self.placement.draft_bytes if self.draft is not None else 0
            found += self.placement.projector_bytes if self.projector is not None else 0
        return found

    def _expires_in_s(self) -> float | None:
        """While it is in use, the whole keep-alive time is still to come."""
        if self._expiry is not None:
            return max(0.0, self._expiry.when() - asyncio.get_running_loop().time())
        return self.keep_alive_s if 0 <= self.keep_alive_s < LONGEST_KEEP_ALIVE_S else None


def show_last_step(row: EngineRow, link: EngineLink) -> None:
    stats = link.stats
    if stats is None:
        return
    if not row.is_preparing:
        row.slots_busy = stats.n_running
        row.queued = stats.n_queued
    for name in _OF_STEP:
        setattr(row, name, getattr(stats, name))
    row.kv_runs, row.long_steps = link.kv_runs(), link.long_steps()


def speculates(settings: Settings, model: Model) -> bool:
    """Whether requests to a model draft that do not say so themselves."""
    if model.speculates is not None:
        return model.speculates
    return (_table(settings, model).speculation or settings.speculation) == "on"


def own_draft(settings: Settings, model: Model) -> str:
    """The draft model that a model's own settings name, or else its table in the settings file; "" for none."""
    return model.draft or _table(settings, model).draft or ""


def draft_problem(settings: Settings, model: Model, error: LocalrunError) -> str:
    """What is wrong with that draft model, and which table names it."""
    table = None if model.draft else settings.table_of(model.name)
    return draft.problem_of(error) + ("" if table is None else f" ({table.source} sets draft)")


def missing_drafts(settings: Settings, store: Store) -> dict[str, str]:
    """Models that run without their own draft model because it is not here, with its name. In a thread: reads the
    disk."""
    found = {}
    for model in store.list():
        name = own_draft(settings, model)
        try:
            if name:
                store.resolve(name)
        except LocalrunError:
            found[model.name] = name
    return found


def _table(settings: Settings, model: Model) -> LoadSettings:
    return settings.of_model(model.name) if settings.models else NOTHING_ASKED


class Drafts:
    """Whether an engine and a request speculate, and which draft model they do it with.

    A model's own draft model (its setting `draft`) is loaded with it. Where it is not here any more, does not fit the
    model or has no room, the model is loaded without, and a warning in the log says why. A request's draft model that
    is not the engine's is loaded by the engine when the request comes, one such at a time; what is wrong with it is the
    request's error, and there must be room for it beside everything that is loaded (`make_room`). Nothing is evicted
    for it.

    Models with the same files share an engine, also if they have other settings. So what a model's settings say is
    given to the engine with its requests where the engine was opened for another name.

    Files are read in a thread. Does not: judge vocabularies (models/draft.py).
    """

    def __init__(
        self, settings: Settings, store: Store, make_room: Callable[[Resident, Draft], Awaitable[None]]
    ) -> None:
        self._settings = settings
        self._store = store
        self._make_room = make_room

    async def choose_own(self, resident: Resident) -> None:
        """Finds the draft model that an engine is to be opened with (`resident.draft`), before there is room for it."""
        model = resident.model
        name = own_draft(self._settings, model)
        if resident.pooling is not None or not name or not speculates(self._settings, model):
            return
        resident.settled_drafts.add(name)
        try:
            resident.draft = await self._find(model, name)
        except BadRequest as error:
            self.leave_out(resident, draft_problem(self._settings, model, error))

    def keep_own_if_placed(self, resident: Resident) -> None:
        """After its room was found: without the draft model if there is none for that."""
        if resident.draft is not None and resident.placement is not None and not resident.placement.draft_bytes:
            self.leave_out(resident, f"there is no room for '{resident.draft.name}'")

    async def of_request(
        self, resident: Resident, model: Model, asked: bool | None, name: str
    ) -> tuple[bool | None, str]:
        """For a request to `model` that `asked` to speculate or not to, with the draft model `name`:
        `Submit.speculates` and `draft_model_path`.

        Raises BadRequest for one that is not here or does not fit the model, and CannotFit, of what was asked for.
        """
        own = speculates(self._settings, model)
        if asked is None and own != speculates(self._settings, resident.model):
            asked = own
        does = own if asked is None else asked
        if name:
            if not does:  # nothing takes room, but what is wrong is said
                await self._find(model, name)
                return asked, ""
            return asked, await self._path(resident, model, name)
        own_name = own_draft(self._settings, model)
        if not does or not own_name or own_name in resident.settled_drafts:
            return asked, ""
        try:
            return asked, await self._path(resident, model, own_name)
        except (BadRequest, CannotFit) as error:
            _warn(model, draft_problem(self._settings, model, error))
            resident.settled_drafts.add(own_name)
            return asked, ""

    def leave_out(self, resident: Resident, why: str) -> None:
        """The engine is opened without its draft model."""
        _warn(resident.model, why)
        resident.draft = None

    async def _path(self, resident: Resident, model: Model, name: str) -> str:
        found = await self._find(model, name)
        if resident.draft is not None and found.path == resident.draft.path:
            return ""
        await self._make_room(resident, found)
        return str(found.path)

    async def _find(self, model: Model, name: str) -> Draft:
        return await asyncio.to_thread(self._found, model, name)

    def _found(self, model: Model, name: str) -> Draft:
        """In a thread: reads the disk. Raises BadRequest."""
        found = draft.find(self._store, name, model=model.name, target=model.header)
        return Draft(found.name, path_to_open(found, found.path.resolve()), found.header, Evidence.of(found.files))


def _warn(model: Model, why: str) -> None:
    _log.warning("%s is used without its draft model: %s", model.name, why)


class Turn(AbstractAsyncContextManager[object], Protocol):
    """Whose turn it is to find out that an engine survives it: an `asyncio.Lock`, or one of several places."""

    def locked(self) -> bool: ...


class Link(Protocol):
    """The conversation with whatever computes a model: see `EngineLink`."""

    @property
    def model(self) -> str: ...
    @property
    def ready(self) -> wire.Ready: ...
    @property
    def error(self) -> LocalrunError | None: ...
    @property
    def was_killed(self) -> bool: ...
    @property
    def pid(self) -> int | None: ...
    @property
    def turn(self) -> Turn: ...
    def next_id(self) -> int: ...
    async def writable(self) -> None: ...
    def submit(self, message: wire.Submit | wire.Embed, sink: Sink) -> None: ...
    def cancel(self, request_id: int) -> None: ...
    async def count(
        self, segments: tuple[wire.Segment, ...], *, is_prompt: bool = True, wants_pieces: bool = False
    ) -> wire.Counted: ...
    def queue_position(self, request_id: int) -> int | None: ...
    def predicted_wait_s(self, request_id: int, now_s: float) -> float | None: ...


class Lease(Protocol):
    """The right to use a loaded model. While it is held, the model is not unloaded. `identity` tells which files were
    loaded, `load` how; a request goes on on an engine that was loaded like the one before."""

    @property
    def model(self) -> Model: ...
    @property
    def identity(self) -> Hashable: ...
    @property
    def load(self) -> LoadSettings: ...
    @property
    def link(self) -> Link: ...
    @property
    def waited_s(self) -> float: ...
    async def speculation(self, speculates: bool | None, draft: str) -> tuple[bool | None, str]: ...
    async def adapters(self, adapted: AdaptedModel) -> tuple[wire.Adapter, ...] | None: ...
    def release(self) -> None: ...


class Capacity(Protocol):
    """What batches ask to see whether others need the room. See the supervisor's methods of these names."""

    @property
    def n_wanting_room(self) -> int: ...
    def slots_of(self, name: str) -> int: ...
    def streams_within(self, name: str, step_s: float) -> int: ...
    async def would_evict(self, name: str) -> bool: ...


class Lender(Protocol):
    """Who gives leases: the supervisor."""

    def lend(self, name: str, keep_alive_s: float | None, use: Use, load: LoadSettings) -> Lease | None: ...
    async def acquire(
        self, name: str, keep_alive_s: float | None, use: Use, load: LoadSettings, *, is_resumed: bool = False
    ) -> Lease: ...


class Engines(Lender, Capacity, Protocol):
    """Who has engines: this machine, or others besides."""


@dataclass(eq=False, kw_only=True)
class EngineLease:
    """The right to use a resident. `waited_s` is what getting it took beyond a lookup: loading, room, an old engine.

    `model` is the model as it was asked for: its name, template and parameters may be others than those of the model
    that the engine was loaded for, its files are the same. `keep_alive_s` None leaves the resident's as it is: what
    somebody asked for holds until somebody asks for something else. `make_room` is for the adapters of a request.
    """

    resident: Resident
    model: Model
    keep_alive_s: float | None
    waited_s: float
    drafts: Drafts
    make_room: Callable[[Resident, Sequence[InEffect]], Awaitable[None]]
    released: Callable[[Resident], None]
    is_held: bool = field(default=True, init=False)

    def __post_init__(self) -> None:
        self.resident.n_leases += 1
        self._used()
        self.resident.stop_countdown()

    @property
    def link(self) -> EngineLink:
        return self.resident.link

    @property
    def load(self) -> LoadSettings:
        """What was asked for when it was loaded."""
        return self.resident.load

    @property
    def identity(self) -> tuple[object, ...]:
        """Tells which files were loaded, and what they were like."""
        return self.resident.key, self.resident.model.parts, self.resident.stamps, self.resident.load.rope

    async def speculation(self, speculates: bool | None, draft: str) -> tuple[bool | None, str]:
        """`Submit.speculates` and `draft_model_path` for a request that asks for this. Raises BadRequest and CannotFit
        for a draft model that does not do."""
        return await self.drafts.of_request(self.resident, self.model, speculates, draft)

    async def adapters(self, adapted: AdaptedModel) -> tuple[wire.Adapter, ...] | None:
        """`Submit.adapters` for a request. Raises CannotFit where there is no memory for them."""
        if adapted.adapters is None:
            return None
        await self.make_room(self.resident, adapted.adapters)
        return on_wire(adapted.adapters)

    def release(self) -> None:
        """Gives it back; of those who asked for a keep-alive time the one who gives back last has it."""
        if not self.is_held:
            return
        self.is_held = False
        self.resident.n_leases -= 1
        self._used()
        self.released(self.resident)

    def _used(self) -> None:
        self.resident.last_used_s = time.monotonic()
        if self.keep_alive_s is not None:
            self.resident.keep_alive_s = self.keep_alive_s
