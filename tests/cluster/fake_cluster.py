"""`localrun` with fake engines, also in a cluster: `python -m tests.cluster.fake_cluster cluster up`."""

from __future__ import annotations

import sys
from functools import partial

from localrun.__main__ import main
from localrun.cluster import reports
from localrun.server import app
from localrun.server.runtime import Runtime
from tests.fakes import ENGINE

if __name__ == "__main__":
    app.Runtime = partial(Runtime, engine_command=ENGINE)  # type: ignore[misc,assignment]
    reports.COMMAND = (sys.executable, "-m", "tests.cluster.fake_bridge")
    main()
