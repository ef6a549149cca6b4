"""Whether an engine and a request speculate, and which draft model they do it with.

A model's own draft model (its setting `draft`) is loaded with it. Where it is not here any more, does not fit the model
or has no room, the model is loaded without, and a warning in the log says why. A request's draft model that is not the
engine's is loaded by the engine when the request comes, one such at a time; what is wrong with it is the request's
error, and there must be room for it beside everything that is loaded. Nothing is evicted for it.

Models with the same files share an engine, also if they have other settings. So what a model's settings say is given
to the engine with its requests where the engine was opened for another name.

Runs in the daemon's event loop; files are read in a thread.
Does not: judge vocabularies (models/draft.py), or weigh memory (room.py).
"""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

from localrun.config import NOTHING_ASKED, LoadSettings, Settings
from localrun.errors import BadRequest, CannotFit, LocalrunError
from localrun.models import draft
from localrun.models.storage.model import Evidence, Model
from localrun.models.storage.store import Store
from localrun.server.engines.resident import Draft, Resident
from localrun.server.engines.room import Room

_log = logging.getLogger(__name__)


def speculates(settings: Settings, model: Model) -> bool:
    """Whether requests to a model draft that do not say so themselves."""
    if model.speculates is not None:
        return model.speculates
    return (_table(settings, model).speculation or settings.speculation) == "on"


def own_draft(settings: Settings, model: Model) -> str:
    """The draft model that a model's own settings name, or else its table in the settings file; "" for none."""
    return model.draft or _table(settings, model).draft or ""


def problem_of(settings: Settings, model: Model, error: LocalrunError) -> str:
    """What is wrong with that draft model, and which table names it."""
    table = None if model.draft else settings.table_of(model.name)
    return draft.problem_of(error) + ("" if table is None else f" ({table.source} sets draft)")


def missing(settings: Settings, store: Store) -> dict[str, str]:
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
    def __init__(self, settings: Settings, store: Store, room: Room) -> None:
        self._settings = settings
        self._store = store
        self._room = room

    def speculates(self, model: Model) -> bool:
        return speculates(self._settings, model)

    async def choose_own(self, resident: Resident) -> None:
        """Finds the draft model that an engine is to be opened with (`resident.draft`), before there is room for it."""
        model = resident.model
        name = own_draft(self._settings, model)
        if resident.pooling is not None or not name or not self.speculates(model):
            return
        resident.settled_drafts.add(name)
        try:
            resident.draft = await self._find(model, name)
        except BadRequest as error:
            self.leave_out(resident, problem_of(self._settings, model, error))

    def keep_own_if_placed(self, resident: Resident) -> None:
        """After its room was found: without the draft model if there is none for that."""
        if resident.draft is not None and resident.placement is not None and not resident.placement.draft_bytes:
            self.leave_out(resident, f"there is no room for '{resident.draft.name}'")

    async def of_request(
        self, resident: Resident, model: Model, speculates: bool | None, name: str
    ) -> tuple[bool | None, str]:
        """For a request to `model` that asks for the draft model `name`: `Submit.speculates` and `draft_model_path`.

        Raises BadRequest for one that is not here or does not fit the model, and CannotFit, of what was asked for.
        """
        own = self.speculates(model)
        if speculates is None and own != self.speculates(resident.model):
            speculates = own
        does = own if speculates is None else speculates
        if name:
            if not does:  # nothing takes room, but what is wrong is said
                await self._find(model, name)
                return speculates, ""
            return speculates, await self._path(resident, model, name)
        own_name = own_draft(self._settings, model)
        if not does or not own_name or own_name in resident.settled_drafts:
            return speculates, ""
        try:
            return speculates, await self._path(resident, model, own_name)
        except (BadRequest, CannotFit) as error:
            _warn(model, problem_of(self._settings, model, error))
            resident.settled_drafts.add(own_name)
            return speculates, ""

    def leave_out(self, resident: Resident, why: str) -> None:
        """The engine is opened without its draft model."""
        _warn(resident.model, why)
        resident.draft = None

    async def _path(self, resident: Resident, model: Model, name: str) -> str:
        found = await self._find(model, name)
        if resident.draft is not None and found.path == resident.draft.path:
            return ""
        await self._room.make_for_draft(resident, found)
        return str(found.path)

    async def _find(self, model: Model, name: str) -> Draft:
        return await asyncio.to_thread(self._found, model, name)

    def _found(self, model: Model, name: str) -> Draft:
        """In a thread: reads the disk. Raises BadRequest."""
        found = draft.find(self._store, name, model=model.name, target=model.header)
        return Draft(found.name, path_to_open(found, found.path.resolve()), found.header, Evidence.of(found.files))


def path_to_open(model: Model, resolved: Path) -> Path:
    """The file itself; but of a model in several files llama.cpp finds the others by the name of the first."""
    return model.path if model.header.shard_paths else resolved


def _warn(model: Model, why: str) -> None:
    _log.warning("%s is used without its draft model: %s", model.name, why)
