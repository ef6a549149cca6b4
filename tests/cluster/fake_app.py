"""A replica as Serve starts it, with a fake engine."""

from __future__ import annotations

from localrun.cluster.on_ray.serve_app import Engine
from tests.fakes import ENGINE


class FakeEngine(Engine):
    command = ENGINE
