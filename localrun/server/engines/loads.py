"""How a model must be loaded for a request, and whether an engine that there is will do.

What is asked for is said by the request, else by the model's own parameters, else by its table in the settings file
(`Loads.asked`). The settings for all models and what is chosen by the memory only fill in the rest when an engine is
loaded: an engine with another number of slots or threads, say, is as good. A request needs

- room for `num_ctx` tokens, or for more;
- the `kv_type` and the `gpu_layers` that are asked for; where none are, whatever the engine has;
- the rotary embedding as asked for, or the model's own: with another one, answers are others.

Pure but for the look at the installed library. Does not: start engines (supervisor.py), or know what fits (room.py).
"""

from __future__ import annotations

from functools import cached_property

import msgspec

from localrun.config import AUTO_KV_TYPE, NOTHING_ASKED, LoadSettings, Settings
from localrun.errors import BadRequest
from localrun.models import fit
from localrun.models.storage.model import Model
from localrun.server import notices
from localrun.server.engines.machine import has_gpu_library
from localrun.server.engines.resident import Resident

_TAKES_MEMORY = ("num_ctx", "slots", "kv_cells", "kv_type", "gpu_layers", "batch_tokens", "adapters")


class Loads:
    def __init__(self, settings: Settings) -> None:
        self._settings = settings

    def asked(self, model: Model, by_request: LoadSettings = NOTHING_ASKED) -> LoadSettings:
        """What is asked for, without what changes nothing. Raises BadModelFile for parameters of the model's own that
        are out of range."""
        said = by_request.over(model.load).over(self._settings.of_model(model.name))
        if by_request.num_ctx and (problem := fit.too_long(model.header, said)):
            notices.note(problem)
        said = fit.settled_load(model.header, said)
        return said if self._may_use_gpu else msgspec.structs.replace(said, gpu_layers=None)

    def check(self, model: Model, by_request: LoadSettings = NOTHING_ASKED) -> None:
        """Raises BadRequest for what the model cannot be loaded with, and says so if a table wants it."""
        said = by_request.over(model.load)
        table = self._settings.table_of(model.name)
        try:
            fit.check_load(model.header, said if table is None else said.over(table.load), model.name)
        except BadRequest as error:
            if table is None or error.field is None or getattr(said, error.field) is not None:
                raise
            raise BadRequest(f"{table.source}: {error.message}", field=error.field) from None

    def said_by_table(self, model: Model, load: LoadSettings) -> str:
        """What takes memory of that which a model's table says, as the end of a sentence; "" for nothing."""
        table = self._settings.table_of(model.name)
        said = {} if table is None else table.load.said
        names = [name for name in _TAKES_MEMORY if name in said and said[name] == getattr(load, name)]
        return f" ({table.source} sets {', '.join(names)})" if table is not None and names else ""

    @cached_property
    def _may_use_gpu(self) -> bool:
        return has_gpu_library()


def serves(resident: Resident, asked: LoadSettings) -> bool | None:
    """Whether an engine does for what is asked; None as long as its load has to tell."""
    if resident.load == asked:
        return True
    if resident.load.rope != asked.rope:
        return False
    has = (_has_room(resident, asked), _has_type(resident, asked), _has_layers(resident, asked))
    if False in has:
        return False
    return None if None in has else True


def grown(asked: LoadSettings, resident: Resident) -> LoadSettings:
    """How to load an engine that takes the place of one that lacks room: it serves all that this one did."""
    return asked.over(resident.load)


def lacks_only_room(resident: Resident, asked: LoadSettings) -> bool:
    """Whether an engine would do if it had more room."""
    return serves(resident, msgspec.structs.replace(asked, num_ctx=None)) is True


def _has_room(resident: Resident, asked: LoadSettings) -> bool | None:
    n_ctx = asked.num_ctx or 0
    # An engine for vectors reads as much as its model can, or the memory allows.
    if resident.pooling is not None or n_ctx <= (resident.load.num_ctx or 0):
        return True
    return n_ctx <= resident.link.ready.n_ctx if resident.loaded_at_s is not None else None


def _has_type(resident: Resident, asked: LoadSettings) -> bool | None:
    if asked.kv_type in (None, AUTO_KV_TYPE, resident.load.kv_type):
        return True
    if resident.placement is not None:
        return asked.kv_type == resident.kv_type
    return None if resident.settings.kv_type == AUTO_KV_TYPE else asked.kv_type == resident.settings.kv_type


def _has_layers(resident: Resident, asked: LoadSettings) -> bool | None:
    if asked.gpu_layers in (None, resident.load.gpu_layers):
        return True
    if resident.loaded_at_s is not None:
        return asked.gpu_layers == resident.link.ready.n_gpu_layers
    return None if resident.settings.gpu_layers < 0 else False
