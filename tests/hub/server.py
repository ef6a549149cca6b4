"""The loopback hub itself: a hub at 127.0.0.1 and a storage at localhost, in a thread with an event loop of its own.

Two host names, because huggingface_hub follows redirects within one host by itself and takes only those to another for
the way to a storage. `hub.faults` may be changed at any time; `hub.record` says what was asked and sent.
"""

from __future__ import annotations

import asyncio
import json
import re
import threading
from collections.abc import AsyncIterator
from urllib.parse import parse_qs, quote, unquote

from .faults import Faults, Record, Request
from .http import CHUNK_BYTES, Answer, serve
from .repository import Repository

TOKEN = "hf_loopback_secret"

_API = re.compile(
    r"/api/models/(?P<repo>[^/]+/[^/]+)(?:/(?P<what>revision|tree|refs|auth-check)(?:/(?P<revision>[^/]+))?)?"
)
_RESOLVE = re.compile(r"/(?P<repo>[^/]+/[^/]+)/resolve/(?P<revision>[^/]+)/(?P<path>.+)")
_RANGE = re.compile(r"bytes=(\d+)-(\d*)")


class Hub:
    """A context manager; `endpoint` is its address."""

    def __init__(self, *repositories: Repository) -> None:
        self.repositories = {repository.repo: repository for repository in repositories}
        self.faults = Faults()
        self.record = Record()
        self._n_links = 0
        self._link_uses: dict[str, int] = {}
        self._loop = asyncio.new_event_loop()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run, name="loopback-hub", daemon=True)
        self._ports: tuple[int, int] = (0, 0)

    def __enter__(self) -> Hub:
        self._thread.start()
        assert self._ready.wait(10)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(10)
        assert not self._thread.is_alive()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self._ports[0]}"

    @property
    def storage(self) -> str:
        return f"http://localhost:{self._ports[1]}"

    def resolve_url(self, repo: str, path: str, revision: str = "main") -> str:
        return f"{self.endpoint}/{repo}/resolve/{revision}/{quote(path)}"

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._serve())
        finally:
            self._loop.close()

    async def _serve(self) -> None:
        self._stop = asyncio.Event()
        connections: set[asyncio.Task[None]] = set()

        def accept(handle: object) -> object:
            async def run(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
                task = asyncio.current_task()
                assert task is not None
                connections.add(task)
                self.record.n_connections += 1
                task.add_done_callback(connections.discard)
                try:
                    await serve(handle, reader, writer)
                except asyncio.CancelledError:
                    writer.transport.abort()

            return run

        hub = await asyncio.start_server(accept(self._hub), "127.0.0.1", 0)
        storage = await asyncio.start_server(accept(self._storage), "localhost", 0, family=2)
        self._ports = (hub.sockets[0].getsockname()[1], storage.sockets[0].getsockname()[1])
        self._ready.set()
        await self._stop.wait()
        hub.close()
        storage.close()
        for task in list(connections):
            task.cancel()
        await asyncio.gather(*connections, return_exceptions=True)
        # An aborted transport closes its socket in the loop's next turn.
        await asyncio.sleep(0)

    async def _hub(self, method: str, target: str, headers: dict[str, str]) -> Answer:
        self.record.requests.append(Request("hub", method, target, headers))
        if self.faults.hub_answers:
            status, extra = self.faults.hub_answers.pop(0)
            return Answer(status, extra)
        path, _, query = target.partition("?")
        path = unquote(path)
        if path == "/api/models":
            return self._search(parse_qs(query))
        if found := _API.fullmatch(path):
            return self._api(found["repo"], found["what"] or "", found["revision"] or "main", headers)
        if found := _RESOLVE.fullmatch(path):
            return await self._resolve(found["repo"], found["revision"], found["path"], headers)
        return Answer(404, {"X-Error-Message": "no such route"})

    def _search(self, query: dict[str, list[str]]) -> Answer:
        wanted = query.get("search", [""])[0].lower()
        filters = {one for each in query.get("filter", []) for one in each.split(",")}
        found = [
            repository
            for repository in self.repositories.values()
            if wanted in repository.repo.lower() and filters <= set(repository.tags) and not repository.private
        ]
        found.sort(key=lambda repository: -repository.n_downloads)
        limit = int(query.get("limit", ["100"])[0])
        return _json([repository.info() for repository in found[:limit]])

    def _api(self, repo: str, what: str, revision: str, headers: dict[str, str]) -> Answer:
        repository = self.repositories.get(repo)
        refusal = self._refusal(repository, headers, is_content=what == "auth-check")
        if refusal is not None or repository is None:
            return refusal or Answer(404)
        if not repository.knows(revision):
            return Answer(404, {"X-Error-Code": "RevisionNotFound", "X-Error-Message": f"Invalid rev id: {revision}"})
        if what == "tree":
            return _json(repository.tree())
        if what == "refs":
            branches = [
                {"name": name, "ref": f"refs/heads/{name}", "targetCommit": repository.commit}
                for name in repository.branches
            ]
            return _json({"branches": branches, "tags": [], "converts": []})
        return _json({} if what == "auth-check" else repository.info())

    def _refusal(self, repository: Repository | None, headers: dict[str, str], *, is_content: bool) -> Answer | None:
        """The answer to those who may not: a repository that is not there, private, or gated."""
        has_token = headers.get("authorization") == f"Bearer {TOKEN}"
        if repository is None or (repository.private and not has_token):
            status = 404 if has_token else 401
            return Answer(status, {"X-Error-Code": "RepoNotFound", "X-Error-Message": "Repository not found"})
        if is_content and repository.gated and not has_token:
            status = 403 if "authorization" in headers else 401
            message = f"Access to model {repository.repo} is restricted."
            return Answer(status, {"X-Error-Code": "GatedRepo", "X-Error-Message": message})
        return None

    async def _resolve(self, repo: str, revision: str, path: str, headers: dict[str, str]) -> Answer:
        repository = self.repositories.get(repo)
        refusal = self._refusal(repository, headers, is_content=True)
        if refusal is not None or repository is None:
            return refusal or Answer(404)
        if not repository.knows(revision):
            return Answer(404, {"X-Error-Code": "RevisionNotFound"})
        common = {"X-Repo-Commit": repository.commit}
        if path not in repository.files:
            return Answer(404, {**common, "X-Error-Code": "EntryNotFound", "X-Error-Message": "Entry not found"})
        etag = f'"{repository.etag(path)}"'
        if not repository.is_lfs(path):
            return self._content(repository.files[path], {**common, "ETag": etag}, headers)
        self._n_links += 1
        base = self.faults.storage_url or self.storage
        location = f"{base}/{quote(repo)}/{quote(path)}?signature={self._n_links}"
        linked = {
            "X-Linked-Etag": etag,
            "X-Linked-Size": str(len(repository.files[path])),
            "ETag": f'"pointer-{etag[1:]}',
        }
        return Answer(self.faults.redirect_status, {**common, **linked, "Location": location})

    async def _storage(self, method: str, target: str, headers: dict[str, str]) -> Answer:
        self.record.requests.append(Request("storage", method, target, headers))
        if self.faults.storage_answers:
            status, extra = self.faults.storage_answers.pop(0)
            return Answer(status, extra)
        path, _, query = target.partition("?")
        owner, name, file_path = unquote(path).lstrip("/").split("/", 2)
        self._link_uses[query] = self._link_uses.get(query, 0) + 1
        allowed = self.faults.requests_per_link
        if self.faults.refuse_storage or (allowed is not None and self._link_uses[query] > allowed):
            return Answer(403, {"X-Error-Message": "Request has expired"})
        content = self.repositories[f"{owner}/{name}"].files[file_path]
        etag = {"ETag": self.faults.storage_etag} if self.faults.storage_etag else {}
        return self._content(content, etag, headers)

    def _content(self, content: bytes, extra: dict[str, str], headers: dict[str, str]) -> Answer:
        faults = self.faults
        if faults.flip_byte_at is not None:
            at = faults.flip_byte_at
            content = content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :]
        start, end, status = 0, len(content), 200
        asked = _RANGE.fullmatch(headers.get("range", ""))
        if_range = headers.get("if-range")
        if asked and not faults.ignore_range and (if_range is None or if_range == extra.get("ETag")):
            start = int(asked[1])
            end = min(len(content), int(asked[2]) + 1 if asked[2] else len(content))
            if start >= len(content):
                return Answer(416, {"Content-Range": f"bytes */{len(content)}"})
            status = 206
            extra = {**extra, "Content-Range": f"bytes {start}-{end - 1}/{len(content)}"}
        n = self.record.n_content_answers
        self.record.n_content_answers += 1
        length = None if faults.endless or faults.no_length or faults.short_by else end - start
        body = self._body(content[start : end - faults.short_by], faults.drop_after(n))
        return Answer(status, {**extra, "Accept-Ranges": "bytes"}, body=body, length=length)

    async def _body(self, content: bytes, drop_after: int | None) -> AsyncIterator[bytes]:
        faults = self.faults
        until = len(content) if drop_after is None else min(drop_after, len(content))
        step = CHUNK_BYTES if faults.bytes_per_s is None else 8 * 1024
        for position in range(0, until, step):
            chunk = content[position : min(position + step, until)]
            if position and faults.n_stalls:
                faults.n_stalls -= 1
                await asyncio.sleep(3600)
            if faults.bytes_per_s is not None:
                await asyncio.sleep(len(chunk) / faults.bytes_per_s)
            self.record.content_bytes += len(chunk)
            yield chunk
        while faults.endless and drop_after is None:
            yield bytes(CHUNK_BYTES)
            await asyncio.sleep(0)


def _json(value: object) -> Answer:
    return Answer(200, {"Content-Type": "application/json"}, json.dumps(value).encode())
