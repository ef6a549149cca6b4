"""`localrun serve` with fake engines, which need no weights: `python -m tests.fakes.serve --port 11500`.

For tests, and for whoever tries a client: every API answers as it does with a real model, but what it says is a hash of
the prompt, or what the prompt asks for. In the environment, LOCALRUN_FAKE_SCRIPTS=1 lets a prompt hold the reply
(`tokens.scripted_token`), LOCALRUN_FAKE_STEP_MS makes every step last so long and LOCALRUN_FAKE_ROW_US so much longer
for each row, LOCALRUN_FAKE_ENDLESS=1 leaves the ends out, and LOCALRUN_FAKE_DEATHS names a plan of crashes
(`engine.py`).
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from localrun.__main__ import main
from localrun.server import app
from localrun.server.runtime import Runtime
from tests.fakes import ENGINE


def run(*, fake: bool = True) -> None:
    """With what follows the first of `sys.argv`."""
    if fake:
        app.Runtime = partial(Runtime, engine_command=ENGINE)  # type: ignore[misc,assignment]
    sys.argv.insert(1, "serve")
    main()


if __name__ == "__main__":
    run()
