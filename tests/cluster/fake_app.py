"""A replica as Serve starts it, with a fake engine; none starts where the node's state has a file `refuses`."""

from __future__ import annotations

from localrun.cluster.on_ray.serve_app import Engine
from localrun.config import folders
from tests.fakes import ENGINE


class FakeEngine(Engine):
    command = ENGINE

    async def _open(self) -> None:
        if (folders().state / "refuses").exists():
            raise OSError("the memory is broken")
        await super()._open()
