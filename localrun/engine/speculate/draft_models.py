"""The draft models of an engine, as one drafter: its own, and one that requests name instead.

The own one is loaded when the engine opens. Another one is loaded in a thread once a request that names it wants to
draft; until it is there, such requests go on without drafts. There is one of these at a time. When nobody uses it any
more it stays, until somebody names yet another one.

Owner: the engine's main thread; a thread of its own loads and frees models.
Does not: know how to load a model, or what it says (`draft_model.py`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from localrun.engine.request import Request
from localrun.engine.speculate.draft_model import MOST_TOKENS
from localrun.engine.speculate.drafter import Drafter
from localrun.wire import DraftSource

log = logging.getLogger("localrun.engine")

# Loads the model of a path, and may give up when the other one says that it is not wanted any more.
OpenDraft = Callable[[str, Callable[[], bool]], Drafter]


class DraftModels:
    """See the module and `drafter.Drafter`. Drafts for requests without a draft model are empty.

    Raises what `open_draft` raises for the engine's own, if it has one."""

    source = DraftSource.DRAFT_MODEL
    n_most = MOST_TOKENS

    def __init__(self, open_draft: OpenDraft, own_path: str = "") -> None:
        self._open_draft = open_draft
        self._is_closed = False
        # By path. The own one stays, the other one comes and goes.
        self._loaded: dict[str, Drafter] = {}
        self._own_path = own_path
        if own_path:
            self._loaded[own_path] = open_draft(own_path, self._is_open)
        self._users: dict[Request, str] = {}  # of others than the own one
        self._refused: set[str] = set()
        self._loader = ThreadPoolExecutor(1, "drafts")
        self._loading: tuple[str, Future[Drafter]] | None = None

    def drafter_for(self, request: Request) -> Drafter | None:
        """This, unless the request has no draft model, or names one that cannot be loaded."""
        path = self._path_of(request)
        return self if path and path not in self._refused else None

    def propose(self, wanted: Sequence[tuple[Request, int]]) -> list[list[int]]:
        drafts: list[list[int]] = [[] for _ in wanted]
        for request, _ in wanted:
            path = self._path_of(request)
            if path != self._own_path and path not in self._refused:
                self._users[request] = path
        if self._users:
            self._look()
        places: dict[Drafter, list[int]] = {}
        for place, (request, _) in enumerate(wanted):
            drafter = self._loaded.get(self._path_of(request))
            if drafter is not None:
                places.setdefault(drafter, []).append(place)
        for drafter, its_places in places.items():
            proposed = drafter.propose([wanted[place] for place in its_places])
            for place, draft in zip(its_places, proposed, strict=True):
                drafts[place] = draft
        return drafts

    def decoded(self, n_rows: int) -> None:
        pass

    def drop(self, request: Request) -> None:
        self._users.pop(request, None)
        for drafter in self._loaded.values():
            drafter.drop(request)

    def close(self) -> None:
        """Waits for the model that is being loaded, which gives up."""
        self._is_closed = True
        self._loader.shutdown()
        self._take_loaded()
        for drafter in self._loaded.values():
            drafter.close()
        self._loaded.clear()

    def _path_of(self, request: Request) -> str:
        return request.draft_model_path or self._own_path

    def _is_open(self) -> bool:
        return not self._is_closed

    def _look(self) -> None:
        """Take what was loaded, and load what is waited for, in place of what nobody uses."""
        if self._loading is not None and not self._take_loaded():
            return
        other = next((path for path in self._loaded if path != self._own_path), None)
        used = self._users.values()
        wanted = next((path for path in used if path not in self._loaded), None)
        if wanted is None or other in used:
            return
        unused = self._loaded.pop(other) if other is not None else None
        self._loading = wanted, self._loader.submit(self._replace, unused, wanted)

    def _replace(self, unused: Drafter | None, path: str) -> Drafter:
        """Loader thread."""
        if unused is not None:
            unused.close()
        return self._open_draft(path, self._is_open)

    def _take_loaded(self) -> bool:
        """Whether nothing is being loaded any more."""
        if self._loading is None:
            return True
        path, loading = self._loading
        if not loading.done():
            return False
        self._loading = None
        try:
            self._loaded[path] = loading.result()
        except Exception as error:
            self._refused.add(path)
            self._users = {request: other for request, other in self._users.items() if other != path}
            if not self._is_closed:
                log.warning("requests that name the draft model %s go on without drafts: %s", path, error)
        return True
