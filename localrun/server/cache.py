"""What is kept of prompts, over all engines and on disk: shows it and clears it.

Owner: one per Runtime, on the daemon's event loop; looking at the disk happens in a thread. What an engine keeps is
asked of and cleared by the engine; folders of models that are not loaded are looked at and emptied here.

Invariant: a model that is loaded and has a folder is one row; all folders of one model file (other builds, other KV
types) belong to its row.
Does not: know how state is stored (the engine's `kv_disk`), or load models.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from localrun import kv_folders
from localrun.config import Settings
from localrun.errors import LocalrunError, ModelNotFound
from localrun.kv_folders import ModelFolder
from localrun.models.storage.store import Store
from localrun.server.engines.resident import Resident, ResidentState
from localrun.snapshot import CacheCleared, CacheReport, CacheRow, EngineRow


@dataclass(frozen=True, kw_only=True)
class Cache:
    """See the module. `residents` gives those of the supervisor; `folder` is where all models' state lies. `elsewhere`
    gives engines of other machines, which are shown and no more."""

    settings: Settings
    store: Store
    residents: Callable[[], list[Resident]]
    folder: Path
    elsewhere: Callable[[], list[EngineRow]]

    async def report(self) -> CacheReport:
        """Everything that is kept now."""
        folders = await asyncio.to_thread(kv_folders.survey, self.folder)
        rows: dict[str, CacheRow] = {}
        for resident in self.residents():
            # A file that is loaded twice (with other adapters, or for vectors) is two rows; the first one has the disk.
            owner = str(resident.key)
            owner = f"{owner} {resident.link.pid}" if owner in rows else owner
            rows[owner] = _row_of_engine(resident.row(self.settings.target_itl_s))
        for folder in folders:
            if not folder.files:
                continue
            row = rows.setdefault(folder.owner, CacheRow(model=folder.model_name))
            row.disk_bytes += folder.size_bytes
            row.disk_entries += folder.n_entries
            if folder.used_at_s is not None:
                row.disk_used_at_s = max(folder.used_at_s, row.disk_used_at_s or 0.0)
        models = list(rows.values())
        return CacheReport(
            models=[*models, *(_row_of_engine(row, row.node) for row in self.elsewhere())],
            ram_bytes=sum(row.ram_bytes for row in models),
            ram_limit_bytes=self.settings.ram_cache_bytes,
            disk_bytes=sum(row.disk_bytes for row in models),
            disk_limit_bytes=self.settings.disk_cache_bytes,
            disk_folder=str(self.folder),
        )

    async def clear(self, model: str | None, *, ram: bool, disk: bool) -> CacheCleared:
        """Forgets what is kept of one model, or of all (None), in memory, on disk or both.

        Raises ModelNotFound, or what else the store says of the name, when nothing by that name is known here.
        """
        belongs = (lambda name, path: True) if model is None else await asyncio.to_thread(self._named, model)
        cleared = CacheCleared()
        before = await asyncio.to_thread(self._folders_that, belongs) if disk else []
        loaded = [resident for resident in self.residents() if belongs(resident.model.name, str(resident.key))]
        ready = [resident for resident in loaded if resident.state is ResidentState.READY]
        for done in await asyncio.gather(
            *(resident.link.clear_cache(ram=ram, disk=disk) for resident in ready), return_exceptions=True
        ):
            # An engine that ended meanwhile keeps nothing in memory any more.
            if isinstance(done, BaseException) and not isinstance(done, LocalrunError):
                raise done
            if not isinstance(done, BaseException):
                cleared.ram_bytes += done.ram_bytes
        if disk:
            in_use = {str(resident.key) for resident in loaded}
            await asyncio.to_thread(_empty, before, in_use)
            after = await asyncio.to_thread(self._folders_that, belongs)
            left = {file for folder in after for file in folder.files}
            cleared.disk_bytes = sum(file.size_bytes for folder in before for file in folder.files if file not in left)
        return cleared

    def _named(self, model: str) -> Callable[[str, str], bool]:
        """In a thread. Tells by name and path what belongs to `model`."""
        try:
            found = self.store.resolve(model)
            names = {found.name, str(found.path), str(found.path.resolve())}
        except (LocalrunError, OSError) as error:
            # The file may be gone or damaged; what is kept of it must still be clearable.
            names = {model}
            if not self._is_known(model):
                raise error if isinstance(error, LocalrunError) else ModelNotFound(model) from error
        return lambda name, path: bool(names & {name, path})

    def _is_known(self, model: str) -> bool:
        is_loaded = any(model in (resident.model.name, str(resident.key)) for resident in self.residents())
        return is_loaded or any(folder.is_of(model) for folder in kv_folders.survey(self.folder))

    def _folders_that(self, belongs: Callable[[str, str], bool]) -> list[ModelFolder]:
        return [folder for folder in kv_folders.survey(self.folder) if belongs(*_names_of(folder))]


def _row_of_engine(engine: EngineRow, node: str = "") -> CacheRow:
    return CacheRow(
        model=engine.model,
        node=node,
        pid=engine.pid,
        kv_cells=engine.kv_cells,
        kv_cells_used=engine.kv_cells_used,
        ram_bytes=engine.ram_cache_bytes,
        ram_entries=engine.ram_entries,
        ram_restored_tokens=engine.ram_restored_tokens_total,
        disk_restored_tokens=engine.disk_restored_tokens_total,
        hit_rate=engine.hit_rate,
    )


def _names_of(folder: ModelFolder) -> tuple[str, str]:
    """A folder that lost its note belongs to nobody by name, but to all together."""
    return (folder.about.model, folder.about.model_path) if folder.about is not None else ("", "")


def _empty(folders: list[ModelFolder], paths_in_use: set[str]) -> None:
    for folder in folders:
        if folder.owner in paths_in_use:
            kv_folders.clear(folder.path)
        else:
            kv_folders.remove(folder.path)
