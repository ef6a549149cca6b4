"""The headers of every route that waits for a model.

Pure data. `http/caller.py` reads the first ones.
"""

from __future__ import annotations

from typing import Any

from localrun.server.http.caller import MAX_CLIENT_CHARACTERS, MAX_DEADLINE_S
from localrun.server.openapi.operation import Parameter
from localrun.wire import Lane

REQUEST_HEADERS = (
    Parameter(
        name="X-Localrun-Lane", place="header", schema={"type": "string", "enum": [str(lane) for lane in Lane]},
        description="Who goes first where slots are short. The field `lane` says the same.",
    ),
    Parameter(
        name="X-Localrun-Latency", place="header", schema={"type": "string"},
        description="How long prompts of others may hold this stream up: a mode, or milliseconds. The field `latency`.",
    ),
    Parameter(
        name="X-Localrun-Deadline", place="header", schema={"type": "string"},
        description=f"Seconds until the first token is wanted, up to {MAX_DEADLINE_S:.0f}. The field `deadline_s`.",
    ),
    Parameter(
        name="X-Localrun-Client", place="header", schema={"type": "string"},
        description=f"A name, of which {MAX_CLIENT_CHARACTERS} printable characters count; clients get equal service. "
        "Without it the User-Agent's first word.",
    ),
)  # fmt: skip

ANSWER_HEADERS: dict[str, Any] = {
    "X-Localrun-Request": {
        "description": "The request's id, for `/localrun/v1/requests/{id}`", "schema": {"type": "string"}
    },
    "X-Localrun-Truncated": {
        "description": "Tokens of the prompt or input that were left out; absent without any",
        "schema": {"type": "string", "pattern": "^[0-9]+$"},
    },
    "X-Localrun-Ignored": {
        "description": "Fields that this model cannot follow; absent without any", "schema": {"type": "string"}
    },
}  # fmt: skip
