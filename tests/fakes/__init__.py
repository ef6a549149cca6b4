"""Engines without weights, and a daemon with them (`serve.py`). The product knows nothing of them."""

from __future__ import annotations

import sys
from pathlib import Path

_FOLDER = Path(__file__).parent
# The argv of such an engine, and of such a daemon, which takes what `localrun serve` takes; both from any folder. `-P`
# keeps what lies in this one from being taken for modules of others.
ENGINE = (sys.executable, "-P", str(_FOLDER / "process.py"))
SERVE = (sys.executable, "-P", str(_FOLDER / "serve.py"))
