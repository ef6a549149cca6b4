"""One line of the daemon's log for each HTTP request that has ended, where the setting `request_log` asks for it: a
text for people, or JSON for programs, with the same fields.

    POST /v1/chat/completions 200 1.234s id=req_… model=tiny prompt_tokens=16 cached_tokens=0 output_tokens=10
    ttft_s=0.050 reason=length from=127.0.0.1 client=curl client_id=my-42

`reason` is why the last answer ended, or the code of the error. Fields that a request does not have are left out.
Does not: tell anything of what was asked or answered, or of a request's query.
"""

from __future__ import annotations

import json
import logging
import re
from datetime import UTC, datetime
from typing import Any

from starlette.types import Scope

from localrun.server.http.exchange import CLIENT_GONE, Account
from localrun.server.http.fields import ids_of
from localrun.server.http.limits import Ended
from localrun.server.metering.logs import WHOLE

MAX_PATH_CHARACTERS = 200
# What needs no quotation marks.
_WORD = re.compile(r"[\w./:+@=~-]+", re.ASCII)

_log = logging.getLogger("localrun.requests")


def writer(form: str) -> Ended:
    """What writes the lines, of the form text or json. Whatever the log's level is, they are in it."""
    _log.setLevel(logging.INFO)
    return _as_json if form == "json" else _as_text


def _as_text(scope: Scope, account: Account, seconds: float) -> None:
    fields = _fields(scope, account)
    beginning = [fields.pop("method"), _shown(fields.pop("path")), str(fields.pop("status")), f"{seconds:.3f}s"]
    _log.info("%s", " ".join(beginning + [f"{name}={_shown(value)}" for name, value in fields.items()]))


def _as_json(scope: Scope, account: Account, seconds: float) -> None:
    now = datetime.now(UTC).isoformat(timespec="milliseconds")
    line = {"time": now} | _fields(scope, account) | {"duration_s": round(seconds, 6)}
    _log.info("%s", json.dumps(line), extra={WHOLE: True})


def _fields(scope: Scope, account: Account) -> dict[str, Any]:
    caller, peer = scope.get("localrun.caller"), scope.get("client")
    # Without those by which a tier chose.
    records = [record for record in account.records if record.api == scope["path"]]
    client_id, trace_id = ids_of(scope)
    found: dict[str, Any] = {
        "method": scope["method"],
        "path": scope["path"][:MAX_PATH_CHARACTERS],
        "status": account.status or CLIENT_GONE,
        "id": account.request_id,
    }
    if records:
        first = records[0]
        found |= {
            "model": first.model,
            "prompt_tokens": first.n_prompt,
            "cached_tokens": first.n_cached,
            "output_tokens": sum(record.n_output for record in records),
            "ttft_s": None if first.ttft_s is None else round(first.ttft_s, 6),
            "reason": records[-1].finish_reason,
        }
    if account.error is not None:
        found["reason"] = account.error.code
    found |= {
        "from": peer[0] if peer else None,
        "client": records[0].client if records else None,
        "key": None if caller is None or caller.key is None else caller.name,
        "client_id": client_id,
        "trace_id": trace_id,
    }
    return {name: value for name, value in found.items() if value not in (None, "")}


def _shown(value: object) -> str:
    text = f"{value:.3f}" if isinstance(value, float) else str(value)
    return text if _WORD.fullmatch(text) else json.dumps(text)
