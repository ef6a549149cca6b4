"""Makes room for a model that is to be loaded: counts, compares with the memory, evicts, waits.

Runs in the daemon's event loop. Newcomers stand in one line and are served in order. The first in line takes its room
at once if there is some, else evicts idle models, least recently used first (but before them the engine that it
replaces), else waits for a busy one to become idle. A busy model that keeps others waiting for `DRAIN_AFTER_S` is
drained: its running requests end in peace, new ones wait until it was unloaded, behind those who waited longer.
Requests for models that are loaded never stand in this line.

Invariants: a model with running or waiting requests is never evicted; nothing is evicted for a model that would not fit
even so; both the line and the waiting are bounded.

A GPU that is lost while the daemon runs (its driver ended, it was unplugged, it fell off the bus) is named, and what
was to run there is refused, or computed on the CPU with the setting `cpu_fallback`. It is asked for before each load,
so that it is used again when it comes back.

Does not: start or stop processes itself (`end` does), or know llama.cpp's memory (placement.py asks).
"""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress

import msgspec

from localrun.config import MAX_ADAPTERS, Settings
from localrun.errors import CannotFit, DeviceLost, LocalrunError, QueueFull, Unavailable
from localrun.models.adapters import InEffect
from localrun.models.fit import Gpu, Machine, in_gb
from localrun.models.memory import draft_estimate
from localrun.server.engines import machine
from localrun.server.engines.machine import installed_gpus
from localrun.server.engines.placement import Placement, place_embeddings, place_text, wish_of
from localrun.server.engines.resident import Draft, ExtraDraft, Resident, ResidentState

MAX_IN_LINE = 32
DRAIN_AFTER_S = 10.0

_WAYS_OUT = (
    ". Look at the driver and the device, or compute on the CPU: ask with num_gpu 0, or start localrun with "
    "--cpu-fallback on or --gpu-layers 0"
)
_log = logging.getLogger(__name__)


class Room:
    """See the module. `residents` are all of them, `end` unloads one, `available_bytes` and `gpus` ask the system."""

    def __init__(
        self,
        settings: Settings,
        *,
        residents: Callable[[], Sequence[Resident]],
        end: Callable[[Resident], Awaitable[None]],
        available_bytes: Callable[[], int],
        gpus: Callable[[], Awaitable[tuple[Gpu, ...]]] = installed_gpus,
    ) -> None:
        self._settings = settings
        self._residents = residents
        self._end = end
        self._available_bytes = available_bytes
        self._gpus = gpus
        self._gpu_names: list[str] = []
        self._line = asyncio.Lock()
        self.n_in_line = 0  # models that wait for room
        self._changed = asyncio.Event()

    def changed(self) -> None:
        """A resident became idle, ready or ended: the first in line looks again."""
        self._changed.set()

    async def is_free_for(self, newcomer: Resident) -> bool:
        """Whether it would get its room without anybody's going; True also for what never will, which `make` says."""
        others = [resident for resident in self._residents() if resident.placement is not None]
        try:
            return isinstance(self._offer(newcomer, others, await self._gpus_if_known() or ()), Placement)
        except LocalrunError:
            return True

    async def make(self, newcomer: Resident) -> Placement:
        """Waits for room and takes it (`newcomer.placement`).

        Raises CannotFit when no eviction would help, QueueFull when the line is too long, DeviceLost, and Unavailable
        or CannotFit when room did not come within `load_timeout_s`.
        """
        if self.n_in_line >= MAX_IN_LINE:
            # A constant, since others decide when they are done; but by then the first in line has made room.
            raise QueueFull(
                f"{self.n_in_line} models already wait to be loaded; try again later", retry_after_s=DRAIN_AFTER_S
            )
        self.n_in_line += 1
        try:
            async with self._line:
                newcomer.placement = await self._first_in_line(newcomer)
                return newcomer.placement
        finally:
            self.n_in_line -= 1

    async def _first_in_line(self, newcomer: Resident) -> Placement:
        began_s = time.monotonic()
        deadline_s = began_s + self._settings.load_timeout_s
        while True:
            self._changed.clear()
            gpus = await self._gpus_for(newcomer)
            others = [r for r in self._residents() if r is not newcomer and r.placement is not None]
            offer = self._offer(newcomer, others, gpus)
            if isinstance(offer, Placement):
                return offer
            if newcomer.is_idle:
                raise Unavailable(f"nobody waits for '{newcomer.model.name}' any more")
            idle = [resident for resident in others if resident.can_be_evicted]
            if idle:
                await self._end(_first_to_go(idle, newcomer))
                continue
            now_s = time.monotonic()
            if now_s >= deadline_s:
                raise offer
            drain_at_s = began_s + DRAIN_AFTER_S
            if now_s >= drain_at_s:
                _drain_one(others, newcomer)
                drain_at_s = deadline_s
            with suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), min(deadline_s, drain_at_s) - now_s)

    async def _gpus_for(self, newcomer: Resident) -> tuple[Gpu, ...]:
        """The GPUs that it may be placed on. Where they are lost it wants none from now on, if that is allowed; raises
        DeviceLost if it is not."""
        if newcomer.settings.gpu_layers == 0:
            return ()
        try:
            return await self._known_gpus()
        except DeviceLost as lost:
            # Where none was ever seen, none is lost.
            if self.has_gpus and self._settings.cpu_fallback == "off":
                raise
            self._want_no_gpu(newcomer, lost.message.partition(_WAYS_OUT)[0])
            return ()

    @property
    def has_gpus(self) -> bool:
        """Whether there is a GPU, as far as anybody has looked, or was one that is lost."""
        return bool(self._gpu_names)

    def _want_no_gpu(self, resident: Resident, why: str) -> None:
        _log.warning("%s is loaded for the CPU: %s", resident.model.name, why)
        resident.settings = msgspec.structs.replace(resident.settings, gpu_layers=0)

    async def _gpus_if_known(self) -> tuple[Gpu, ...] | None:
        """None where they cannot be asked: then what runs there finds out, and goes on elsewhere if it may."""
        try:
            return await self._known_gpus()
        except DeviceLost:
            return None

    async def _known_gpus(self) -> tuple[Gpu, ...]:
        """Those that are there. Raises DeviceLost when none is left, or none can be asked."""
        try:
            found = await self._gpus()
        except DeviceLost as error:
            lost = error.message
        else:
            gone = Counter(self._gpu_names) - Counter(gpu.name for gpu in found)
            if found or not gone:
                if gone:
                    _log.warning("no longer there: %s", ", ".join(gone.elements()))
                self._gpu_names = [gpu.name for gpu in found]
                return found
            lost = "llama.cpp does not find any GPU now"
        names = ", ".join(self._gpu_names) or "the GPUs"
        raise DeviceLost(f"{names} cannot be used any more: {lost}{_WAYS_OUT}")

    async def after_failure(self, resident: Resident) -> Placement | None:
        """Another placement for an engine that failed on a device that is lost; None when that was not why. Raises
        DeviceLost."""
        if resident.settings.gpu_layers == 0 or not self.has_gpus:
            return None
        await self._gpus_for(resident)
        return await self._anew(resident) if resident.settings.gpu_layers == 0 else None

    async def on_cpu(self, resident: Resident, why: str) -> Placement:
        """A placement without GPUs, for an engine that failed on one that is there. Raises as `make`."""
        self._want_no_gpu(resident, why)
        return await self._anew(resident)

    async def _anew(self, resident: Resident) -> Placement:
        """At once where there is room: it may be others in the line who wait for this one. Else it gives up the room
        that it has, and stands in the line."""
        others = [r for r in self._residents() if r is not resident and r.placement is not None]
        offer = self._offer(resident, others, ())
        if not isinstance(offer, Placement):
            resident.placement = None
            return await self.make(resident)
        resident.placement = offer
        return offer

    def _offer(
        self, newcomer: Resident, others: Sequence[Resident], gpus: tuple[Gpu, ...]
    ) -> Placement | LocalrunError:
        """A placement for now, or why not yet. Raises CannotFit when it will not be, whoever leaves."""
        best = self._place(newcomer, self.left_by(others, (), tuple(gpu.emptied for gpu in gpus)))
        limit = self._settings.max_models
        if limit and sum(resident is not newcomer.replaces for resident in others) >= limit:
            names = ", ".join(sorted(resident.model.name for resident in others))
            return Unavailable(
                f"{limit} models may be loaded at once (setting max_models) and all are busy: {names}; try again "
                f"later, or stop one (localrun stop)"
            )
        try:
            now = self._place(newcomer, self.left_by((), others, gpus))
        except CannotFit as refusal:
            return refusal
        if _is_worse(now, best) and any(resident.can_be_evicted for resident in others):
            return CannotFit(f"model '{newcomer.model.name}' would get less memory beside idle models")
        return now

    def left_by(self, leaving: Sequence[Resident], staying: Sequence[Resident], gpus: tuple[Gpu, ...]) -> Machine:
        """What there is for a newcomer when some have ended.

        What the others were estimated to need and did not take yet is theirs: a pool that was not written to, and
        mapped weights, which the system counts as available although the next step reads them again.
        """
        owed = sum(max(0, resident.needed_bytes - held_bytes(resident)) for resident in staying)
        ram_bytes = self._available_bytes() + sum(map(held_bytes, leaving)) - owed
        shared_bytes = sum(resident.shared_bytes for resident in staying)
        return Machine(max(0, ram_bytes), tuple(gpu.beside(shared_bytes) for gpu in gpus))

    def for_model(self, name: str, gpus: tuple[Gpu, ...]) -> tuple[Machine, int]:
        """What there would be for a model if it were asked for now, and how much of that idle engines, and its own,
        would give back."""
        parted: tuple[list[Resident], list[Resident]] = [], []
        for resident in self._residents():
            parted[not (resident.can_be_evicted or resident.model.name == name)].append(resident)
        leaving, staying = parted
        if leaving and not staying:
            gpus = tuple(gpu.emptied for gpu in gpus)
        return self.left_by(leaving, staying, gpus), sum(map(held_bytes, leaving))

    def _place(self, newcomer: Resident, here: Machine) -> Placement:
        settings, model, n_ctx = newcomer.settings, newcomer.model, newcomer.load.num_ctx or 0
        if newcomer.pooling is not None:
            shared = [gpu.free_bytes for gpu in here.gpus if gpu.is_shared and settings.gpu_layers]
            placement = place_embeddings(model, settings, min([here.ram_bytes, *shared]), n_ctx=n_ctx)
            return placement._replace(shared_bytes=placement.needed_bytes if shared else 0)
        draft = newcomer.draft.header if newcomer.draft is not None else None
        wish = wish_of(
            settings, n_ctx=n_ctx, n_roomy_cells=newcomer.n_roomy_cells, adapter_bytes=model.adapter_bytes,
            projector=model.projector_header, draft=draft,
        )  # fmt: skip
        return place_text(model.name, model.header, here, wish)

    async def make_for_draft(self, resident: Resident, draft: Draft) -> None:
        """Takes room for a draft model that a request asks for, in place of the one before (`resident.extra_draft`).
        Raises CannotFit; nothing is evicted for it."""
        before = resident.extra_draft or ExtraDraft(draft.path, 0, 0, 0)
        if resident.extra_draft is not None and before.path == draft.path:
            return
        ready = resident.link.ready
        needed = draft_estimate(
            draft.header, n_kv_cells=ready.n_kv_cells, n_slots=ready.n_slots, n_ubatch=resident.settings.batch_tokens,
            kv_type=resident.kv_type,
        )  # fmt: skip
        is_on_gpu = ready.n_gpu_layers > resident.model.header.n_layers
        gpus = await self._gpus_if_known() if is_on_gpu else ()
        here = self.left_by((), self._residents(), gpus or ())
        gpu = max(here.gpus, key=lambda gpu: gpu.free_bytes, default=Gpu("", 0))
        free_bytes, fits = here.ram_bytes + before.ram_bytes, True
        if not is_on_gpu or gpu.is_shared:
            fits = Machine(free_bytes).usable_ram_bytes >= needed.total_bytes
        if is_on_gpu and fits:
            free_bytes = gpu.free_bytes + before.gpu_bytes
            fits = gpus is None or gpu._replace(free_bytes=free_bytes).usable_bytes >= needed.total_bytes
        if not fits:
            raise CannotFit.of(
                "draft",
                f"'{draft.name}' needs {in_gb(needed.total_bytes)} of memory (weights "
                f"{in_gb(needed.weights_bytes)}, KV cache of {ready.n_kv_cells} cells {in_gb(needed.kv_bytes)}) beside "
                f"'{resident.model.name}' but {in_gb(free_bytes)} is available, of which a part stays free; leave "
                f"draft out, name a smaller model, or stop other models (localrun stop)",
            )
        resident.extra_draft = ExtraDraft(
            draft.path, needed.weights_bytes + needed.kv_bytes,
            ram_bytes=needed.total_bytes if not is_on_gpu or gpu.is_shared else 0,
            gpu_bytes=needed.total_bytes if is_on_gpu else 0,
        )  # fmt: skip

    async def make_for_adapters(self, resident: Resident, adapters: Sequence[InEffect]) -> None:
        """Takes room for the adapters that a request asks for and the engine has not loaded yet, in RAM and, where the
        model has layers on GPUs, there as well: each takes its share, and none is known. Raises CannotFit; nothing is
        evicted for it. Like the engine it forgets those that were used longest ago beyond `MAX_ADAPTERS`."""
        loaded = resident.extra_adapters
        own = {adapter.path for adapter in resident.model.adapters}
        wanted = {each.path: each.size_bytes for each in adapters if each.path not in own}
        new_bytes = sum(size_bytes for path, size_bytes in wanted.items() if path not in loaded)
        if new_bytes:
            gpus = await self._gpus_if_known() if resident.link.ready.n_gpu_layers else None
            here = self.left_by((), self._residents(), gpus or ())
            free_bytes, fits = here.ram_bytes, here.usable_ram_bytes >= new_bytes
            if fits and gpus is not None:
                free_bytes = sum(gpu.free_bytes for gpu in here.gpus)
                fits = sum(gpu.usable_bytes for gpu in here.gpus) >= new_bytes
            if not fits:
                raise CannotFit(
                    f"the adapters need {in_gb(new_bytes)} of memory beside '{resident.model.name}' but "
                    f"{in_gb(free_bytes)} is available, of which a part stays free; ask for fewer, or stop other "
                    f"models (localrun stop)",
                    field="model",
                )
        for path, size_bytes in wanted.items():
            loaded.pop(path, None)
            loaded[path] = size_bytes
        while len(loaded) > MAX_ADAPTERS:
            del loaded[next(iter(loaded))]


def _is_worse(now: Placement, best: Placement) -> bool:
    """Fewer cells or slots, smaller cells, fewer layers on a GPU, or no draft model."""
    return (
        now.n_kv_cells < best.n_kv_cells
        or now.kv_type != best.kv_type
        or now.n_slots < best.n_slots
        or (now.n_gpu_layers or 0) < (best.n_gpu_layers or 0)
        or bool(now.draft_bytes) < bool(best.draft_bytes)
    )


def _first_to_go(residents: Sequence[Resident], newcomer: Resident) -> Resident:
    """The one that the newcomer replaces, else the least recently used."""
    return min(residents, key=lambda resident: (resident is not newcomer.replaces, resident.last_used_s))


def held_bytes(resident: Resident) -> int:
    """What its engine has taken of the machine's memory and would give back by ending, mapped weights left out. Only a
    Mac counts what its GPU holds as the process's own."""
    if resident.link.pid is None:
        return 0
    on_gpus_bytes = resident.shared_bytes if resident.is_loaded and sys.platform != "darwin" else 0
    return machine.private_bytes(resident.link.pid) + on_gpus_bytes


def _drain_one(others: Sequence[Resident], newcomer: Resident) -> None:
    """Closes the busy model that is replaced, or else the least recently used, to new requests, unless one is on its
    way out already."""
    if any(resident.is_draining or resident.state is ResidentState.STOPPING for resident in others):
        return
    busy = [resident for resident in others if resident.state is ResidentState.READY]
    if busy:
        victim = _first_to_go(busy, newcomer)
        victim.is_draining = victim.unload_when_idle = True
