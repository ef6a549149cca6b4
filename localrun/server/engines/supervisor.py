"""Which models are loaded: loads on demand, lends, unloads, evicts, and starts again what died.

Runs in the daemon's event loop. A model is loaded once however many wait for it; the load belongs to nobody, so a
waiter that leaves does not end it for the others, and a failing load fails all its waiters alike. One that all have
left goes on, for whoever asks again, unless it is in another model's way or waits for room itself.

A request is given any engine that serves its load settings (loads.py). Where none does for lack of room, a larger one
is loaded, and requests go on on the smaller one until it is there; then that ends when it is idle, and the larger one
serves all. Where settings exclude each other there are several engines, like those of several models.

Invariants: at most one resident per resolved file path, own adapters and projector, way of use (text, or vectors) and
load settings that were asked for, whatever adapters its requests ask for; a resident in `_residents` has a process or
is about to; nothing is unloaded while leased; an engine's death removes its resident before any task runs that was told
of it, so that whoever was told can ask again at once.

Does not: talk to engines (link.py), weigh memory (room.py), or see requests (job.py).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

from localrun import wire
from localrun.config import NOTHING_ASKED, LoadSettings, Settings
from localrun.errors import BadModelFile, CannotFit, DeviceLost, LocalrunError, ModelNotFound, QueueFull, Unavailable
from localrun.hardware.kernels import Verdict
from localrun.hardware.memory import machine_memory
from localrun.models import adapters
from localrun.models.name import split_adapters
from localrun.models.storage.model import Evidence, Model, Part
from localrun.models.storage.store import Store
from localrun.server.engines.faults import EARLY_S, MAX_KILLED_LOADS, Breaker, StallWatch
from localrun.server.engines.kernels import Kernels, is_allowed, wrong_types
from localrun.server.engines.link import ENGINE_COMMAND, EngineLink
from localrun.server.engines.loads import Loads, grown, lacks_only_room, serves
from localrun.server.engines.placement import Placement
from localrun.server.engines.resident import (
    Drafts,
    EngineLease,
    Resident,
    ResidentState,
    Stamps,
    Use,
    on_wire,
    path_to_open,
    pooling_for,
    speculates,
)
from localrun.server.engines.room import Room
from localrun.snapshot import EngineRow

_log = logging.getLogger(__name__)

# The file, resolved; what is opened with it; the way of use; the load settings asked for.
Key = tuple[Path, tuple[Part, ...], wire.Pooling | None, LoadSettings]
# What a name means: the model, its file resolved, what its files were like, and the load settings by itself.
Found = tuple[Model, Path, Stamps, LoadSettings]
# Names whose meaning is remembered; one model can be called by any number.
MAX_FOUND = 256

StepSeen = Callable[[EngineLink, wire.Step], None]
LinkSeen = Callable[[EngineLink], None]


class Supervisor:
    """See the module. `on_step` sees every step of every engine, `on_loaded` and `on_ended` their coming and going.
    Without `kv_folder` no state is kept on disk, without `threads_file` engines try no numbers of threads, and without
    `kernels_folder` nobody asks whether the quick kernels are right."""

    def __init__(
        self,
        settings: Settings,
        store: Store,
        *,
        command: Sequence[str] = ENGINE_COMMAND,
        on_step: StepSeen,
        on_loaded: LinkSeen,
        on_ended: LinkSeen,
        available_bytes: Callable[[], int] = lambda: machine_memory().available_bytes,
        kv_folder: Path | None = None,
        threads_file: Path | None = None,
        kernels_folder: Path | None = None,
    ) -> None:
        self._settings = settings
        self._store = store
        self._command = command
        self._kv_folder = kv_folder
        self._threads_file = threads_file
        self._on_step = on_step
        self._on_loaded = on_loaded
        self._on_ended = on_ended
        self._residents: dict[Key, Resident] = {}
        self._load_s: dict[Key, float] = {}
        self._found: dict[str, tuple[Evidence, Found]] = {}
        self._breakers: dict[tuple[Key, Stamps], Breaker] = {}
        # Who has answered anything, with whatever kernels.
        self._sound: set[tuple[Key, Stamps]] = set()
        self._room = Room(settings, residents=self.residents, end=self._end, available_bytes=available_bytes)
        self.room_for = self._room.for_model
        self.loads = Loads(settings)
        self._drafts = Drafts(settings, store, self._room.make_for_draft)
        self._stalls = StallWatch(
            lambda: [r.link for r in self.residents() if r.state is not ResidentState.STOPPING],
            has_devices=lambda: self._room.has_gpus,
        )
        self._kernels = Kernels(kernels_folder, is_quiet=self._is_quiet, on_found=self._on_kernels_found)
        self._tasks: set[asyncio.Task[None]] = set()
        self._stall_task: asyncio.Task[None] | None = None
        self._is_closed = False

    # --- what others use -----------------------------------------------------------------------------------------

    def start(self) -> None:
        self._stall_task = asyncio.create_task(self._stalls.run())
        self._kernels.start()

    async def stop(self) -> None:
        """Ends every engine; loads in progress are given up. Nothing is lent afterwards."""
        self._is_closed = True
        if self._stall_task is not None:
            self._stall_task.cancel()
        await self._kernels.stop()
        for resident in self.residents():
            if resident.state is not ResidentState.STOPPING:
                self._begin_end(resident)
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for resident in self.residents():  # cancelled before their load began
            self._gone(resident)

    def residents(self) -> list[Resident]:
        return list(self._residents.values())

    def loaded(self) -> list[EngineRow]:
        """A row for every engine that is loading, ready or stopping, in order of loading."""
        return [resident.row(self._settings.target_itl_s) for resident in self.residents()]

    def lend(
        self, name: str, keep_alive_s: float | None, use: Use = Use.TEXT, load: LoadSettings = NOTHING_ASKED
    ) -> EngineLease | None:
        """A lease at once of a model that is loaded for `use`, and so that it serves `load`, and stays so; None when
        there is anything to wait for or to refuse, which `acquire` does."""
        found = self._found_before(name)
        if found is None or self._is_closed:
            return None
        model, path, stamps, own = found
        asked = own if load == NOTHING_ASKED else self.loads.asked(model, load)
        resident = self._serving((path, model.parts, pooling_for(model, use), asked))
        if resident is None or not resident.takes_requests or not resident.is_of(stamps):
            return None
        resident.is_unwanted = False
        return self._lease(resident, model, keep_alive_s)

    async def acquire(
        self,
        name: str,
        keep_alive_s: float | None,
        use: Use = Use.TEXT,
        load: LoadSettings = NOTHING_ASKED,
        *,
        is_resumed: bool = False,
    ) -> EngineLease:
        """A lease of the model, loaded for `use` and so that it serves `load` if need be; no line is too long for a
        request whose engine died.

        Raises what the store raises for the name, BadRequest for a model of no such use and for settings that it cannot
        be loaded with, what loading raises, QueueFull when too many wait for this load, and Unavailable when the daemon
        is stopping.
        """
        began_s = time.monotonic()
        has_waited = False
        while True:
            found = self._found_before(name)
            model, path, stamps, own = await asyncio.to_thread(self._look_up, name) if found is None else found
            if self._is_closed:
                raise Unavailable("localrun is shutting down")
            asked = own if load == NOTHING_ASKED else self.loads.asked(model, load)
            key = path, model.parts, pooling_for(model, use), asked
            resident = self._serving(key)
            if resident is None:
                resident = self._start_loading(model, key, stamps, load)
            elif resident.state is ResidentState.READY and not resident.is_of(stamps):
                # A file was replaced: the next idle moment is the time to take the new one.
                resident.unload_when_idle = True
                self._if_idle(resident)
            resident.is_unwanted = False
            if resident.state is ResidentState.LOADING:
                has_waited = True
                try:
                    await self._join(resident, is_resumed=is_resumed)
                except LocalrunError:
                    # What others asked for may be why it cannot be loaded.
                    if resident.asked == asked or not resident.ended.is_set():
                        raise
                    continue
            elif resident.state is ResidentState.STOPPING or resident.is_draining:
                has_waited = True
                await self._outwait(resident, is_resumed=is_resumed)
            if resident.takes_requests and serves(resident, asked):
                waited_s = time.monotonic() - began_s if has_waited else 0.0
                return self._lease(resident, model, keep_alive_s, waited_s)

    def _lease(
        self, resident: Resident, model: Model, keep_alive_s: float | None, waited_s: float = 0.0
    ) -> EngineLease:
        return EngineLease(
            resident=resident, model=model, keep_alive_s=keep_alive_s, waited_s=waited_s, drafts=self._drafts,
            make_room=self._room.make_for_adapters, released=self._if_idle,
        )  # fmt: skip

    async def residents_of(self, name: str) -> list[Resident]:
        """Those with the files that this name stands for, whatever name they were loaded under. Raises ModelNotFound
        for a name that is neither loaded nor in the store, and BadModelFile for a model that is not loaded and cannot
        be."""
        try:
            model, key, *_ = await asyncio.to_thread(self._look_up, name)
            return [r for r in self.residents() if (r.key, r.model.parts) == (key, model.parts)]
        except (ModelNotFound, BadModelFile):
            residents = [r for r in self.residents() if r.model.name == name]
            if not residents:
                raise
            return residents

    async def unload(self, name: str, *, has_other_names: bool = True) -> bool:
        """Unloads a model: now and waiting for it if it is idle, else when its requests have ended, unless another one
        begins before. Without `has_other_names` what was loaded under another name of the same files stays.

        A name with adapters is that of its model. False when it is not loaded. Raises as `residents_of`.
        """
        name = split_adapters(name).model
        residents = await self.residents_of(name)
        if not has_other_names:
            own = self._found[name][1][0].name if name in self._found else name
            residents = [r for r in residents if r.model.name == own]
        for resident in residents:
            resident.is_unwanted = True
            if resident.can_be_evicted:
                await self._end(resident)
        return bool(residents)

    # --- for those who give way to others (batches/runner.py) ----------------------------------------------------

    @property
    def n_wanting_room(self) -> int:
        """Models that wait for room."""
        return self._room.n_in_line

    def loaded_as(self, name: str) -> str:
        """The name under which the model is loaded, or is being loaded, that requests by this name get; empty where
        none is known. Reads no disk."""
        found = self._found.get(split_adapters(name).model)
        if found is None:
            return ""
        _, (_, path, *_) = found
        return next((r.model.name for r in self.residents() if r.key == path), "")

    def slots_of(self, name: str) -> int:
        """Slots of the engine that serves this name; 0 while none is ready."""
        ready = [r for r in self._residents_found(name) if r.takes_requests]
        return max((resident.link.ready.n_slots for resident in ready), default=0)

    def streams_within(self, name: str, step_s: float) -> int:
        """How many streams of this model a step of that length has, at least one, by how long its steps take now."""
        rows = [r.row(self._settings.target_itl_s) for r in self._residents_found(name)]
        took = [row.step_s / max(1, row.slots_busy) for row in rows if row.step_s]
        return max(1, int(step_s / max(took))) if took else 1

    def _residents_found(self, name: str) -> list[Resident]:
        found = self._found_before(split_adapters(name).model)
        return [r for r in self.residents() if found is not None and r.key == found[1]]

    async def would_evict(self, name: str) -> bool:
        """Whether loading this model would take the place of others. False for what cannot be loaded, as loading it
        says."""
        try:
            model, path, stamps, own = await asyncio.to_thread(self._look_up, split_adapters(name).model)
            pooling = pooling_for(model, Use.TEXT if model.header.generates else Use.EMBED)
        except LocalrunError:
            return False
        newcomer = Resident(
            key=path, pooling=pooling, model=model, stamps=stamps, link=self._new_link(model), asked=own, load=own,
            settings=self._settings.with_load(own), replaces=None,
        )  # fmt: skip
        return not await self._room.is_free_for(newcomer)

    # --- loading -------------------------------------------------------------------------------------------------

    def _look_up(self, name: str) -> Found:
        """In a thread: reads the disk."""
        evidence = self._store.evidence(name)
        model = self._store.resolve(name)
        model.check_here()
        evidence = evidence.joined(adapters.evidence(self._store, self._settings, model))
        model = adapters.opened(self._store, self._settings, model)
        files = Evidence.of(model.files)
        if None in files.stamps:
            raise ModelNotFound(name)
        found = model, model.path.resolve(), files.stamps, self.loads.asked(model)
        if len(self._found) >= MAX_FOUND:
            self._found.clear()
        self._found[name] = evidence.joined(files), found
        return found

    def _found_before(self, name: str) -> Found | None:
        """What the name meant the last time, while nothing has changed and that model is loaded. In the event loop: a
        request to a loaded model waits for no thread, whatever the others do."""
        if name not in self._found:
            return None
        evidence, found = self._found[name]
        if all(found[1] != key for key, *_ in self._residents):
            return None
        return found if evidence.holds() else None

    def _serving(self, key: Key) -> Resident | None:
        """An engine that serves the load settings of `key`: best one that takes requests (opened for just these
        settings, and not about to be replaced), else one that loads and may do, else one that has to end first."""
        same = self._residents.get(key)
        if same is not None and same.takes_requests and not same.unload_when_idle:
            return same
        *files, asked = key
        serving = [r for r in self.residents() if [*_key(r)[:3]] == files and serves(r, asked) is not False]
        return min(serving, key=lambda r: (_rank(r), r.unload_when_idle, r.load != asked), default=None)

    def _start_loading(self, model: Model, key: Key, stamps: Stamps, by_request: LoadSettings) -> Resident:
        """A resident for a key that none serves; a larger one where one only lacks room. Raises BadRequest for settings
        that the model cannot be loaded with."""
        path, parts, pooling, asked = key
        self.loads.check(model, by_request)
        smaller = next((r for r in self.residents() if _key(r)[:3] == key[:3] and r.takes_requests
                        and lacks_only_room(r, asked)), None)  # fmt: skip
        load = asked if smaller is None else grown(asked, smaller)
        key = path, parts, pooling, load
        breaker = self._breakers.get((key, stamps))
        if breaker is not None:
            breaker.check(model.name, time.monotonic())
        resident = Resident(
            key=path, pooling=pooling, model=model, stamps=stamps, link=self._new_link(model), asked=asked, load=load,
            settings=self._settings.with_load(load), replaces=smaller,
        )  # fmt: skip
        shown = {name: " ".join(value) if isinstance(value, tuple) else value for name, value in load.said.items()}
        if said := ", ".join(f"{name} {value}" for name, value in shown.items()):
            _log.info("%s is loaded with %s%s", model.name, said, " in place of a smaller one" if smaller else "")
        for note in model.notes:
            _log.warning("%s: %s", model.name, note)
        self._residents[key] = resident
        delay_s = breaker.delay_s(time.monotonic()) if breaker is not None else 0.0
        resident.loading = self._spawn(self._load(resident, delay_s))
        return resident

    def _new_link(self, model: Model) -> EngineLink:
        return EngineLink(
            model=model.name, command=self._command, on_step=self._on_step, on_end=self._on_link_end,
            on_answered=self._on_answered,
        )  # fmt: skip

    async def _join(self, resident: Resident, *, is_resumed: bool) -> None:
        """Waits for a load. Raises what it raises, and QueueFull when too many wait."""
        if not is_resumed:
            self._check_line(resident, resident.n_waiting)
        resident.n_waiting += 1
        try:
            await asyncio.shield(resident.loading)
        except asyncio.CancelledError:
            if self._is_closed and resident.loading.cancelled():
                raise Unavailable("localrun is shutting down") from None
            raise
        finally:
            resident.n_waiting -= 1
            # A waiter that goes on takes a lease right away, before this can unload anything.
            asyncio.get_running_loop().call_soon(self._if_idle, resident)

    async def _outwait(self, resident: Resident, *, is_resumed: bool) -> None:
        """Waits until an engine that takes no new requests is gone. Raises QueueFull when too many wait."""
        if not is_resumed:
            self._check_line(resident, resident.n_behind)
        resident.n_behind += 1
        try:
            await resident.ended.wait()
        finally:
            resident.n_behind -= 1

    def _check_line(self, resident: Resident, n_waiting: int) -> None:
        limit = self._settings.max_queue + resident.settings.slots
        if n_waiting >= limit:
            name = resident.model.name
            usual_s = self._load_s.get(_key(resident))
            if resident.state is ResidentState.LOADING:
                wait_s = resident.load_left_s(time.monotonic(), usual_s)
            else:  # it has to end and be loaded anew
                wait_s = usual_s or 0.0
            raise QueueFull(f"{limit} requests already wait for model '{name}' to load", retry_after_s=wait_s)

    async def _load(self, resident: Resident, delay_s: float) -> None:
        try:
            await asyncio.sleep(delay_s)
            await self._drafts.choose_own(resident)
            try:
                placement = await self._room.make(resident)
            except CannotFit as error:
                error.message += self.loads.said_by_table(resident.model, resident.load)
                raise
            self._drafts.keep_own_if_placed(resident)
            may_be_quick = all([await self._kernels.allow_quick(header) for header in resident.headers])
            resident.is_quick = may_be_quick and not self._kernels.suspects(_file(resident))
            if not may_be_quick:
                _log.info("%s is loaded without the quick kernels (`localrun doctor` says why)", resident.model.name)
            try:
                await self._open(resident, placement)
                if resident.state is ResidentState.STOPPING:  # given up in the moment in which it was there
                    await resident.link.stop()
                    raise asyncio.CancelledError
            except LocalrunError as error:
                _log.warning("cannot load %s: %s", resident.model.name, error.message)
                self._note_death(resident, error)
                raise
        except BaseException:
            self._gone(resident)
            raise
        resident.state = ResidentState.READY
        resident.loaded_at_s = time.monotonic()
        self._load_s[_key(resident)] = resident.loaded_at_s - resident.began_at_s
        ready = resident.link.ready
        _log.info(
            "loaded %s in %.1f s: %d KV cells, context %d, pid %s",
            resident.model.name, ready.load_s, ready.n_kv_cells, ready.n_ctx, resident.link.pid,
        )  # fmt: skip
        self._on_loaded(resident.link)
        if (smaller := resident.replaces) is not None:
            resident.replaces = None
            smaller.unload_when_idle = True
            self._if_idle(smaller)
        self._if_idle(resident)

    async def _open(self, resident: Resident, placement: Placement) -> None:
        """Starts the engine; again if others end it, on the CPU if its GPU is lost and that is allowed, once more
        without its projector, without the quick kernels if they may be why it crashes, and without its draft model,
        each of which may be why it cannot be loaded."""
        n_killed = n_missed = 0
        doubted: Path | None = None
        while True:
            try:
                own = await asyncio.to_thread(adapters.own, self._store, resident.model)
                message = self._open_message(resident, placement, on_wire(own))
                await resident.link.open(message, self._settings.load_timeout_s)
                if not self._is_without_its_gpu(resident, placement) or n_missed:
                    return
                n_missed += 1
                await resident.link.stop()
                placement = await self._room.after_failure(resident) or placement
            except DeviceLost:
                raise
            except LocalrunError as error:
                n_killed += resident.link.was_killed
                other = None if resident.link.was_killed else await self._room.after_failure(resident)
                if other is not None:
                    placement = other
                elif resident.link.was_killed and n_killed <= MAX_KILLED_LOADS:
                    _log.warning("%s; it is started once more", error.message.partition("; most likely")[0])
                elif resident.projector is not None and doubted is None and not resident.link.was_killed:
                    _log.warning(
                        "%s is used without its projector %s, for text only: with it the model cannot be loaded: %s",
                        resident.model.name, resident.projector.name, error.message,
                    )  # fmt: skip
                    doubted, resident.projector = resident.projector, None
                else:
                    resident.projector = doubted  # it was not that
                    if self._suspects_kernels(resident):
                        resident.is_quick = False
                    elif resident.draft is not None and not resident.link.was_killed:
                        self._drafts.leave_out(resident, f"with it the model cannot be loaded: {error.message}")
                    elif not self._was_for_gpu(resident) or resident.link.was_killed:
                        raise
                    elif self._settings.cpu_fallback == "on":
                        placement = await self._room.on_cpu(resident, f"on a GPU it cannot be: {error.message}")
                    else:
                        error.message += ". It was to lie on a GPU: num_gpu 0 and --gpu-layers 0 leave that out"
                        raise
            resident.link = self._new_link(resident.model)

    def _was_for_gpu(self, resident: Resident) -> bool:
        """Whether its engine has, or was to get, layers on a GPU."""
        n_placed = None if resident.placement is None else resident.placement.n_gpu_layers
        return resident.link.is_on_device or (
            self._room.has_gpus and resident.settings.gpu_layers != 0 and n_placed != 0
        )

    def _is_without_its_gpu(self, resident: Resident, placement: Placement) -> bool:
        """Whether the GPUs that it was placed on were gone when it came there."""
        return self._room.has_gpus and bool(placement.n_gpu_layers) and not resident.link.ready.n_gpu_layers

    def _open_message(self, resident: Resident, placement: Placement, own: tuple[wire.Adapter, ...]) -> wire.Open:
        settings, load = resident.settings, resident.load
        base, scale, scaling, yarn_orig_ctx = load.rope
        return wire.Open(
            model_path=str(path_to_open(resident.model, resident.key)),
            n_slots=placement.n_slots or settings.slots,
            n_kv_cells=placement.n_kv_cells,
            n_batch=settings.batch_tokens,
            n_threads=settings.threads,
            n_gpu_layers=settings.gpu_layers if placement.n_gpu_layers is None else placement.n_gpu_layers,
            kv_type=resident.kv_type,
            target_itl_s=settings.target_itl_s,
            ram_cache_bytes=settings.ram_cache_bytes,
            max_queue=settings.max_queue,
            log_level=settings.log_level,
            n_layers=resident.model.header.n_layers,
            weights_bytes=resident.model.header.weights_bytes,
            kv_bytes=placement.kv_bytes,
            model=resident.model.name,
            disk_cache_bytes=settings.disk_cache_bytes,
            kv_folder=str(self._kv_folder) if self._kv_folder is not None else "",
            pooling=resident.pooling,
            adapters=own,
            threads_file=str(self._threads_file or ""),
            use_extra_bufts=resident.is_quick,
            speculates=speculates(self._settings, resident.model),
            draft_model_path=str(resident.draft.path) if resident.draft is not None else "",
            projector_path=str(resident.projector or ""),
            n_ctx=load.num_ctx or 0,
            rope=(base or 0.0, scale or 0.0, scaling or "", yarn_orig_ctx or 0),
            later_shards=tuple(map(str, resident.model.header.shard_paths[1:])),
        )

    # --- kernels that are wrong ----------------------------------------------------------------------------------

    def _is_quiet(self) -> bool:
        return all(resident.is_loaded and resident.can_be_evicted for resident in self.residents())

    def _on_kernels_found(self, verdict: Verdict) -> None:
        """What runs with kernels that are wrong is loaded anew for the next request after it is idle."""
        for resident in self.residents():
            headers = resident.headers
            is_sound = all(is_allowed(verdict, header) for header in headers) or not resident.is_quick
            if not is_sound or any(wrong_types(verdict, header) for header in headers):
                resident.unload_when_idle = True
                self._if_idle(resident)

    def _suspects_kernels(self, resident: Resident) -> bool:
        """Notes an end. Whether the next engine goes without the quick kernels because of it."""
        if resident.link.was_killed or self._was_for_gpu(resident):
            return False  # others ended it, or a device or its driver may have
        return self._kernels.suspects_after(resident.link, _file(resident), is_quick=resident.is_quick)

    def _on_answered(self, link: EngineLink) -> None:
        for resident in self.residents():
            if resident.link is not link:
                continue
            self._sound.add(_file(resident))
            if (how := self._kernels.answered(_file(resident), is_quick=resident.is_quick)) is not None:
                self._spawn(self._kernels.learn(resident.model.header, how, resident.model.name))

    # --- ending --------------------------------------------------------------------------------------------------

    def _if_idle(self, resident: Resident) -> None:
        """After anything that may have made it idle: unload it, or start its countdown."""
        if not resident.can_be_evicted:
            return
        if resident.unload_when_idle or resident.is_unwanted or resident.keep_alive_s == 0:
            self._expired(resident)
        elif resident.is_loaded:
            resident.start_countdown(self._expired)
        self._room.changed()

    def _expired(self, resident: Resident) -> None:
        if resident.can_be_evicted:
            self._begin_end(resident)

    async def _end(self, resident: Resident) -> None:
        """Unloads it, whatever runs on it. Returns when its process is reaped."""
        if resident.state is not ResidentState.STOPPING:
            self._begin_end(resident)
        await resident.ended.wait()

    def _begin_end(self, resident: Resident) -> None:
        _log.info("unloading %s", resident.model.name)
        is_loaded, resident.state = resident.is_loaded, ResidentState.STOPPING
        resident.stop_countdown()
        if resident.lived_s(time.monotonic()) > EARLY_S:
            self._breakers.pop(_file(resident), None)
        if is_loaded:
            self._spawn(self._stop_link(resident))
        else:
            resident.loading.cancel()

    async def _stop_link(self, resident: Resident) -> None:
        try:
            await resident.link.stop()
        finally:
            self._gone(resident)

    def _on_link_end(self, link: EngineLink) -> None:
        """The process is gone. While loading or stopping, whoever loads or stops it sees to the rest."""
        for resident in self.residents():
            if resident.link is link and resident.state is ResidentState.READY:
                assert link.error is not None
                self._suspects_kernels(resident)
                self._note_death(resident, link.error)
                self._gone(resident)

    def _note_death(self, resident: Resident, error: LocalrunError) -> None:
        """A death over requests is theirs, where the model is known to answer others; where it never has, they and it
        are suspects, and a request counts once, however many engines died of it."""
        link = resident.link
        is_over_requests = link.n_at_work and (_file(resident) in self._sound or link.is_survived_by_all)
        if link.was_killed or is_over_requests:
            return
        now_s = time.monotonic()
        breaker = self._breakers.setdefault(_file(resident), Breaker())
        breaker.died(now_s, resident.lived_s(now_s), error, has_answered=resident.link.has_answered)

    def _gone(self, resident: Resident) -> None:
        if self._residents.get(_key(resident)) is resident:
            del self._residents[_key(resident)]
        resident.state = ResidentState.STOPPING
        resident.stop_countdown()
        resident.ended.set()
        self._on_ended(resident.link)
        self._room.changed()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """A task that nobody has to await: its error is for those who joined it."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(lambda done: done.cancelled() or done.exception())
        return task


def _key(resident: Resident) -> Key:
    return resident.key, resident.model.parts, resident.pooling, resident.load


def _rank(resident: Resident) -> int:
    return 0 if resident.takes_requests else 1 if resident.state is ResidentState.LOADING else 2


def _file(resident: Resident) -> tuple[Key, Stamps]:
    return _key(resident), resident.stamps
