"""Whether a model fits on any node, by what nodes say of their memory when they join, and what is said if it does not;
and how many replicas there should be.

What counts is all memory that a node has: whether so much is free there, its own replica finds out. A node says what
it has in labels, which are Ray's for facts about a machine; their values hold few characters.

Pure. Does not: choose a node (Ray does).
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import msgspec

from localrun.cluster.description import Description, Scale, use_of
from localrun.config import Settings
from localrun.errors import CannotFit
from localrun.models.fit import USABLE_RAM, Gpu, Machine, choose, in_gb
from localrun.models.storage.model import Model
from localrun.server.engines.placement import place_embeddings, wish_of
from localrun.server.engines.resident import Use

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


def check(description: Description, model: Model, settings: Settings, nodes: Iterable[tuple[str, Has]]) -> None:
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


# --- how many replicas an app should have, by the seconds of work that wait ---
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
