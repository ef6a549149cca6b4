"""What a server says of itself before it is measured: the model to ask for, and how much it holds.

Does not: raise for a server that says nothing; for one that is not there it raises DaemonUnreachable.
"""

from __future__ import annotations

import http.client
from typing import NamedTuple, TypeVar
from urllib.parse import urlsplit

import msgspec

from localrun.errors import BadRequest, DaemonUnreachable
from localrun.snapshot import EngineRow

TIMEOUT_S = 10.0
MAX_BODY_BYTES = 4 * 1024 * 1024
BUILT_IN = "tiny"

T = TypeVar("T")


class Holds(NamedTuple):
    """Of one model, loaded by a localrun daemon."""

    slots: int
    kv_cells: int
    context_tokens: int
    backend: str


def base_url_of(text: str) -> str:
    """What a person gives as the address of a server, without `/v1` at its end. Raises BadRequest if it is not HTTP."""
    url = text if "://" in text else f"http://{text}"
    if urlsplit(url).scheme != "http" or not urlsplit(url).hostname:
        raise BadRequest(f"{text} is no address that can be measured; give one such as http://127.0.0.1:8080")
    return url.rstrip("/").removesuffix("/v1")


def model_of(base_url: str) -> str | None:
    """The only model that `/v1/models` lists, else the built-in one if it is among them, else None."""
    listed = _get(base_url, "/v1/models", _Models)
    names = [each.id for each in listed.data] if listed is not None else []
    if len(names) == 1:
        return names[0]
    return next((name for name in names if name.partition(":")[0] == BUILT_IN), None)


def holds_of(base_url: str, model: str) -> Holds | None:
    """What a localrun daemon gives this model, or its only model; None when it is not loaded, or not localrun's."""
    snapshot = _get(base_url, "/localrun/v1/snapshot", _Snapshot)
    engines = snapshot.engines if snapshot is not None else []
    ours = [engine for engine in engines if engine.model == model] or engines
    if len(ours) != 1:
        return None
    return Holds(ours[0].slots, ours[0].kv_cells, ours[0].n_ctx, ours[0].backend)


class _Model(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    data: list[_Model]


class _Snapshot(msgspec.Struct):
    engines: list[EngineRow]


def _get(base_url: str, path: str, kind: type[T]) -> T | None:
    parts = urlsplit(base_url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port or 80, timeout=TIMEOUT_S)
    try:
        connection.connect()
    except OSError as error:
        raise DaemonUnreachable(f"nothing answers at {base_url}: {error}") from error
    try:
        connection.request("GET", parts.path.rstrip("/") + path)
        response = connection.getresponse()
        body = response.read(MAX_BODY_BYTES)
        return msgspec.json.decode(body, type=kind) if response.status == 200 else None
    except (OSError, http.client.HTTPException, msgspec.DecodeError):
        return None
    finally:
        connection.close()
