"""How far tests go that could go on for ever: `max_examples=60 * DEPTH`.

`make test` draws some examples, the same each time, kills some processes, writes some models. `make test-deep` does ten
times as much, draws others each time, and runs what is marked `deep`: more of what another test says in small.
"""

from __future__ import annotations

import os

DEPTH = int(os.environ.get("LOCALRUN_TEST_DEPTH", "1"))
