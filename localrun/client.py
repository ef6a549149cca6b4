"""The async HTTP client of a localrun daemon, used by the CLI, the TUI and the benchmark.

One client keeps its connections open and may run any number of calls at once from one event loop. A stream has no read
timeout, since a model may take minutes to load; ending or cancelling an iteration closes its connection at once, which
the daemon takes as a cancel. Every failure is one of `errors.py`: what the daemon refused as the class it was there,
a daemon that is not there or goes away as DaemonUnreachable.

Does not: start a daemon, retry, or go through a proxy.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from types import TracebackType
from typing import Any, Self
from urllib.parse import urlencode

import msgspec

from localrun import errors
from localrun.client_connection import Connection, lines_of
from localrun.client_pieces import ChatMetrics, ChatPiece, PullPiece, piece_of, pull_piece_of
from localrun.snapshot import CacheCleared, CacheReport, LogLine, PullRow, Snapshot

__all__ = ["ChatMetrics", "ChatPiece", "Client", "PullPiece"]

# Events come at least once a second; a daemon silent for this long hangs.
EVENTS_TIMEOUT_S = 15.0


class Client:
    """An async context manager. `name` is what the daemon's request table calls this client."""

    def __init__(self, base_url: str, *, name: str = "localrun") -> None:
        self.base_url = base_url
        self._daemon = Connection(base_url, name=name)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._daemon.close()

    async def health(self) -> bool:
        """Whether a daemon answers and is well. Never raises for one that does not."""
        try:
            return (await self._daemon.json("GET", "/health")).get("status") == "ok"
        except errors.LocalrunError:
            return False

    def chat(
        self,
        model: str,
        messages: list[dict[str, Any]],
        *,
        options: dict[str, Any] | None = None,
        think: bool | str | None = None,
        lane: str = "interactive",
        keep_alive: float | str | None = None,
    ) -> AsyncGenerator[ChatPiece, None]:
        """Stream the answer to a conversation. Raises what the daemon refused, and DaemonUnreachable."""
        body = {
            "model": model, "messages": messages, "options": options, "think": think, "keep_alive": keep_alive,
        }  # fmt: skip
        return self._stream("/api/chat", body, lane)

    def generate(
        self,
        model: str,
        prompt: str,
        *,
        system: str | None = None,
        raw: bool = False,
        options: dict[str, Any] | None = None,
        lane: str = "interactive",
        keep_alive: float | str | None = None,
    ) -> AsyncGenerator[ChatPiece, None]:
        """Stream the continuation of a prompt; `raw` sends it to the model without a template."""
        body = {
            "model": model, "prompt": prompt, "system": system, "raw": raw or None, "options": options,
            "keep_alive": keep_alive,
        }  # fmt: skip
        return self._stream("/api/generate", body, lane)

    async def events(self, hz: int = 4) -> AsyncGenerator[Snapshot, None]:
        """The daemon's state, `hz` (1 to 10) times a second, for ever. Raises DaemonUnreachable when it goes."""
        path = f"/localrun/v1/events?hz={hz}"
        async with (
            self._daemon.stream("GET", path, silence_s=EVENTS_TIMEOUT_S) as response,
            aclosing(lines_of(response)) as lines,
        ):
            async for line in lines:
                if line.startswith(b"data:"):
                    yield _snapshot.decode(line[5:])
        raise errors.DaemonUnreachable(f"the daemon at {self.base_url} ended its event stream")

    async def logs(self, since: int = 0) -> AsyncGenerator[LogLine, None]:
        """The daemon's log: what is kept from after the line with this number, then what comes. Raises
        DaemonUnreachable when the daemon goes."""
        path = f"/localrun/v1/logs?since={since}"
        async with self._daemon.stream("GET", path) as response, aclosing(lines_of(response)) as lines:
            async for line in lines:
                if line.startswith(b"data:"):
                    yield _log_line.decode(line[5:])
        raise errors.DaemonUnreachable(f"the daemon at {self.base_url} ended its log stream")

    async def snapshot(self) -> Snapshot:
        """The daemon's state now."""
        return await self._daemon.value(Snapshot, "GET", "/localrun/v1/snapshot")

    async def cancel(self, request_id: str) -> bool:
        """Cancel a request; False when it is unknown or has ended."""
        try:
            await self._daemon.call("DELETE", f"/localrun/v1/requests/{request_id}")
        except (errors.NotFound, errors.Conflict):
            return False
        return True

    async def cache(self) -> CacheReport:
        """What is kept of each model's prompts."""
        return await self._daemon.value(CacheReport, "GET", "/localrun/v1/cache")

    async def clear_cache(self, model: str | None = None, *, ram: bool = True, disk: bool = True) -> CacheCleared:
        """Forget what is kept of one model's prompts, or of all, in memory, on disk or both."""
        query = {"model": model} if model is not None else {}
        if ram != disk:
            query["tier"] = "ram" if ram else "disk"
        return await self._daemon.value(CacheCleared, "DELETE", f"/localrun/v1/cache?{urlencode(query)}")

    async def models(self) -> list[dict[str, Any]]:
        """The rows of `/api/tags`: every model that can be loaded."""
        return (await self._daemon.value(_Models, "GET", "/api/tags")).models

    async def loaded(self) -> list[dict[str, Any]]:
        """The rows of `/api/ps`: every model that is loaded."""
        return (await self._daemon.value(_Models, "GET", "/api/ps")).models

    async def show(self, model: str) -> dict[str, Any]:
        """What `/api/show` says of a model. Raises ModelNotFound."""
        return await self._daemon.json("POST", "/api/show", {"model": model})

    async def fit(self, model: str) -> dict[str, Any]:
        """What `/localrun/v1/fit` says: how the model would be opened, and what each device would hold."""
        return await self._daemon.json("GET", f"/localrun/v1/fit?{urlencode({'model': model})}")

    async def store(self) -> dict[str, Any]:
        """The whole of `/api/tags`: `models`, and `unusable` files with their problems."""
        return await self._daemon.json("GET", "/api/tags")

    async def remove(self, model: str) -> dict[str, Any]:
        """Remove a model: `freed_bytes`, the `deleted` files, and those `kept` with the reason. Raises its refusal."""
        return await self._daemon.json("DELETE", "/api/delete", {"model": model})

    async def copy(self, source: str, destination: str) -> None:
        """Give a model a second name."""
        await self._daemon.call("POST", "/api/copy", {"source": source, "destination": destination})

    async def push(self, model: str) -> None:
        """Raises NotSupported."""
        await self._daemon.call("POST", "/api/push", {"model": model})

    async def collect_garbage(self, *, is_all: bool) -> dict[str, Any]:
        """Delete files that nobody needs: `freed_bytes`, the `deleted` files, and the number of `kept_blobs`. Recent
        ones too if `is_all`."""
        body = {"min_age_s": 0, "partial_min_age_s": 0} if is_all else {}
        return await self._daemon.json("POST", "/localrun/v1/gc", body)

    async def create(self, body: dict[str, Any]) -> AsyncGenerator[dict[str, Any], None]:
        """Make a model, by the body of `/api/create`: the lines that tell how it goes. Raises the daemon's refusal."""
        async with self._daemon.stream("POST", "/api/create", body) as response, aclosing(lines_of(response)) as lines:
            async for line in lines:
                said = msgspec.json.decode(line, type=dict[str, Any])
                if "error" in said:
                    raise errors.by_code(said.get("code", errors.EngineFailed.code), said["error"])
                yield said

    async def load(self, model: str) -> None:
        """Load a model and wait until it is ready."""
        await self._daemon.call("POST", "/api/generate", {"model": model, "stream": False}, is_patient=True)

    async def unload(self, model: str) -> None:
        """Unload a model, as soon as its running requests have ended."""
        body = {"model": model, "stream": False, "keep_alive": 0}
        await self._daemon.call("POST", "/api/generate", body, is_patient=True)

    async def pull(self, model: str, *, insecure: bool = False) -> AsyncGenerator[PullPiece, None]:
        """Bring a model here; ends after the piece `success`. Raises what the daemon refused or what went wrong."""
        done = False
        body = {"model": model, "insecure": insecure}
        async with self._daemon.stream("POST", "/api/pull", body) as response, aclosing(lines_of(response)) as lines:
            async for line in lines:
                piece = pull_piece_of(line)
                done = done or piece.status == "success"
                yield piece
        if not done:
            raise errors.DaemonUnreachable(f"the daemon at {self.base_url} broke off its answer")

    async def pulls(self) -> list[PullRow]:
        """The pulls that run, and the last ones that ended."""
        return (await self._daemon.value(_Pulls, "GET", "/localrun/v1/pulls")).pulls

    async def cancel_pull(self, model: str) -> None:
        """Cancel a pull, whoever asked for it. Raises NotFound when none runs."""
        await self._daemon.call("DELETE", f"/localrun/v1/pulls?{urlencode({'model': model})}")

    async def catalog(self, model: str | None = None) -> list[dict[str, Any]]:
        """The entries of the catalogue; with `model` the one that this name stands for, if there is one."""
        query = "" if model is None else "?" + urlencode({"model": model})
        return (await self._daemon.value(_Models, "GET", f"/localrun/v1/catalog{query}")).models

    async def search(self, query: str, *, limit: int = 20) -> dict[str, Any]:
        """Models to pull: `catalog` entries, `hub` repositories, and the `problem` that kept the latter away."""
        query_string = urlencode({"query": query, "limit": limit})
        return await self._daemon.json("GET", f"/localrun/v1/search?{query_string}", is_patient=True)

    async def shutdown(self) -> None:
        """Ask the daemon to end. It may still be answering others when this returns."""
        await self._daemon.call("POST", "/localrun/v1/shutdown", {})

    async def _stream(self, path: str, body: dict[str, Any], lane: str) -> AsyncGenerator[ChatPiece, None]:
        given = {name: value for name, value in body.items() if value is not None}
        given["stream"] = True
        done = False
        async with self._daemon.stream("POST", path, given, headers={"X-Localrun-Lane": lane}) as response:
            request_id = response.headers.get("X-Localrun-Request")
            was_cut = "X-Localrun-Truncated" in response.headers
            async with aclosing(lines_of(response)) as lines:
                async for line in lines:
                    piece = piece_of(line, request_id, was_cut=was_cut)
                    done = done or piece.done
                    yield piece
        if not done:
            raise errors.DaemonUnreachable(f"the daemon at {self.base_url} broke off its answer")


class _Models(msgspec.Struct):
    models: list[dict[str, Any]]


class _Pulls(msgspec.Struct):
    pulls: list[PullRow]


_snapshot = msgspec.json.Decoder(Snapshot)
_log_line = msgspec.json.Decoder(LogLine)
