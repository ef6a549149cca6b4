"""Opens the disk tier of the model that was just loaded, if there is to be one.

Owner: the engine process, once at start. An engine without a disk tier works as well, so whatever stands in the way is
one line in the log and no error.

Does not: choose the folder or the limit (the daemon does, in `wire.Open`).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path

from localrun.engine.backend import Backend
from localrun.engine.cache.disk import KvDisk
from localrun.engine.cache.disk_files import fingerprint
from localrun.kv_folders import About
from localrun.wire import Open

log = logging.getLogger("localrun.engine")


def open_disk(opened: Open, backend: Backend, library_build: Callable[[], str]) -> KvDisk | None:
    """The disk tier for a model and the backend's build; None when it is off or cannot be had."""
    if not opened.disk_cache_bytes or not opened.kv_folder:
        return None
    parameters = {"kv_type": opened.kv_type, "memory": backend.memory_kind.value, "backend": backend.name}
    if not opened.use_extra_bufts:  # what the quick kernels computed may be the reason for doing without them
        parameters["kernels"] = "plain"
    try:
        build = library_build()
        if opened.adapters:
            files = [fingerprint(Path(path), build=build, parameters={}) for path in opened.adapters]
            parameters["adapters"] = " ".join(file.hex() for file in files)
        return KvDisk(
            Path(opened.kv_folder),
            fingerprint=fingerprint(Path(opened.model_path), build=build, parameters=parameters),
            about=About(model=opened.model, model_path=opened.model_path, build=build, created_at_s=time.time()),
            limit_bytes=opened.disk_cache_bytes,
        )
    except OSError as error:
        log.warning("prefixes are not kept on disk: %s", error)
        return None
