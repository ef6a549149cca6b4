"""Files of models from other machines that have them, by digest: what a node gives the others, and how it asks them.

    GET /sha256:<64 hex digits>[/BYTES]?model=NAME       Authorization: Bearer <hex digits of the token>; Range

answers with a file of that content (of BYTES its beginning alone): a blob, one that belongs to the model or the adapter
NAME here, or of a blob that is just being fetched what is there of the range that was asked for. Nothing else can be
asked for, and nothing without the token.

Whoever fetches asks first those who are fetching, too, in any order of the parts, so that a file leaves the machine
that has it about once, however many want it at the same time. What comes is verified as any download is.

`Giver` has threads of its own. Does not: find out where the others are.
"""

from __future__ import annotations

import dataclasses
import hmac
import http.server
import random
import re
import socketserver
import ssl
import threading
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, quote, urlsplit

import httpx2

from localrun.errors import LocalrunError, SourceRefused
from localrun.models.download import journal
from localrun.models.download.fetch import fetch
from localrun.models.download.journal import Range, RangeSet
from localrun.models.download.partial import paths_of
from localrun.models.download.plan import MIB, FetchLimits, Item
from localrun.models.download.ranges import PassingFailure, RangeClient, why_not
from localrun.models.name import Kind, ModelName
from localrun.models.storage.blobs import hash_file
from localrun.models.storage.manifest import blob_path
from localrun.models.storage.model import Model
from localrun.models.storage.store import Store
from localrun.stored import FileStamp

LIMITS = FetchLimits(part_bytes=16 * MIB, is_in_order=False)
# A piece of a file that is being fetched is not worth a request unless it is so long, or all that was asked for.
LEAST_PIECE_BYTES = MIB
MAX_CONNECTIONS = 64
IDLE_S = 60
# Until a node is asked again that has not begun with a file, or that did not answer.
LACKS_S, BROKEN_S = 1.0, 10.0

_PATH = re.compile(r"/(sha256:[0-9a-f]{64})(?:/([1-9][0-9]{0,11}))?")
_RANGE = re.compile(r"bytes=([0-9]{1,15})-([0-9]{1,15})")
_PIECE = "x-localrun-piece"


# --- who gives --------------------------------------------------------------------------------------------------------


class Giver(http.server.ThreadingHTTPServer):
    """`with Giver(store, host, token=...) as giver:` listens at `giver.port`. Raises OSError."""

    daemon_threads = True

    def __init__(self, store: Store, host: str, *, token: bytes, tls: ssl.SSLContext | None = None) -> None:
        self.secret = f"Bearer {token.hex()}".encode("ascii")
        self._store, self._tls = store, tls
        self._slots = threading.BoundedSemaphore(MAX_CONNECTIONS)
        self._hashing = threading.Lock()
        self._digests: dict[tuple[Path, FileStamp], str] = {}
        super().__init__((host, 0), _Answer)
        self._thread = threading.Thread(target=self.serve_forever, name="neighbours", daemon=True)

    @property
    def port(self) -> int:
        return self.server_address[1]

    def __enter__(self) -> Giver:
        self._thread.start()
        return self

    def __exit__(self, *_of_error: object) -> None:
        self.shutdown()
        self.server_close()

    def file(self, digest: str, model: str) -> Path | None:
        """In a thread: reads files of the model whose content nobody has said."""
        blob = blob_path(self._store.folder, digest)
        if blob.is_file():
            return blob
        with suppress(LocalrunError, OSError):
            if ModelName.parse(model).kind is not Kind.PATH:
                return self._of_model(digest, model)
        return None

    def piece(self, digest: str, asked: Range) -> tuple[Path, Range, int] | None:
        """Of a blob that is being fetched: where, what of the range is there from its start on, and the blob's size."""
        paths = paths_of(blob_path(self._store.folder, digest))
        with suppress(LocalrunError):
            found = journal.read(paths.journal)
            for there in RangeSet(one.range for one in found.records) if found is not None else ():
                end = min(asked.end, there.end)
                if there.start <= asked.start and (end == asked.end or end - asked.start >= LEAST_PIECE_BYTES):
                    assert found is not None
                    return paths.partial, Range(asked.start, end), found.header.size_bytes
        return None

    def _of_model(self, digest: str, name: str) -> Path | None:
        found = self._store.find(name)
        files = found.files if isinstance(found, Model) else (found.path,)
        known = self._store.known_digests(found)
        return next((path for path in files if (known.get(path) or self._hashed(path)) == digest), None)

    def _hashed(self, path: Path) -> str:
        with self._hashing:  # once, however many ask
            stamp = path, FileStamp.of(path)
            if stamp not in self._digests:
                self._digests[stamp] = hash_file(path)
            return self._digests[stamp]

    # --- of the server ------------------------------------------------------------------------------------------------

    def server_bind(self) -> None:
        """Without looking up what the address is called."""
        socketserver.TCPServer.server_bind(self)

    def process_request(self, request: Any, client_address: Any) -> None:
        if self._slots.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._slots.release()

    def finish_request(self, request: Any, client_address: Any) -> None:
        """In the connection's thread: the handshake keeps nobody waiting."""
        request.settimeout(IDLE_S)
        if self._tls is None:
            super().finish_request(request, client_address)
            return
        with self._tls.wrap_socket(request, server_side=True) as encrypted:
            super().finish_request(encrypted, client_address)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Whoever asked has gone, or says nothing that can be read."""


class _Answer(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Giver

    def do_GET(self) -> None:
        said = self.headers.get("Authorization", "").encode("utf-8", "replace")
        url = urlsplit(self.path)
        path = _PATH.fullmatch(url.path)
        asked = _RANGE.fullmatch(self.headers.get("Range", ""))
        if not hmac.compare_digest(said, self.server.secret):
            self._refuse(401)
        elif path is None or asked is None or int(asked[2]) < int(asked[1]):
            self._refuse(400)
        else:
            model = parse_qs(url.query).get("model", [""])[0]
            self._give(path[1], int(path[2] or 0), Range(int(asked[1]), int(asked[2]) + 1), model)

    def _give(self, digest: str, n_bytes: int, asked: Range, model: str) -> None:
        file = self.server.file(digest, model)
        piece = self.server.piece(digest, asked) if file is None and not n_bytes else None
        if file is not None:
            size_bytes = min(n_bytes, file.stat().st_size) if n_bytes else file.stat().st_size
            given = Range(asked.start, min(asked.end, size_bytes))
        elif piece is not None:
            file, given, size_bytes = piece
        else:
            self._refuse(404)
            return
        if given.size_bytes <= 0:
            self._refuse(416)
            return
        with file.open("rb") as content:
            self.send_response(206)
            self.send_header("Content-Range", f"bytes {given.start}-{given.end - 1}/{size_bytes}")
            self.send_header("Content-Length", str(given.size_bytes))
            if piece is not None:
                self.send_header(_PIECE, "1")
            self.end_headers()
            content.seek(given.start)
            left = given.size_bytes
            while left and (data := content.read(min(left, MIB))):
                self.wfile.write(data)
                left -= len(data)
            self.close_connection = left > 0  # it has become shorter

    def _refuse(self, status: int) -> None:
        self.send_response(status)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_said: object) -> None:
        """Nothing: the path names models."""


# --- who asks ---------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class Neighbours:
    """Who may have files: HOST:PORT of each. Without `tls` everything goes in the clear, which is for one machine."""

    addresses: Sequence[str]
    token: bytes = dataclasses.field(repr=False)
    tls: ssl.SSLContext | None = None

    async def fetch(self, items: Sequence[Item], *, limits: FetchLimits = LIMITS) -> None:
        """Items whose `url` is what `path_to` gives. Raises what `fetch` does; SourceRefused where nobody has them."""
        own = httpx2.Limits(max_connections=None, max_keepalive_connections=32)
        headers = {"Authorization": f"Bearer {self.token.hex()}"}
        client = httpx2.AsyncClient(verify=self.tls or False, trust_env=False, headers=headers, limits=own)
        async with client:
            await fetch(
                items, client=client, limits=limits,
                source=lambda item: _Several(item, client, limits, self._urls(item)),
            )  # fmt: skip

    def _urls(self, item: Item) -> list[str]:
        return [f"{'http' if self.tls is None else 'https'}://{address}{item.url}" for address in self.addresses]


def path_to(digest: str, model: str, n_bytes: int = 0) -> str:
    """Of a file, or of so many bytes of its beginning."""
    return f"/{digest}{f'/{n_bytes}' if n_bytes else ''}?model={quote(model, safe='')}"


class _Place(RangeClient):
    """One node. `has_piece` after it gave a piece of what it is fetching; not asked before `not_before_s`."""

    has_piece = False
    not_before_s = float("-inf")


class _Several(RangeClient):
    """One file at several nodes. A part that failed is asked for elsewhere the next time."""

    def __init__(self, item: Item, client: httpx2.AsyncClient, limits: FetchLimits, urls: Sequence[str]) -> None:
        super().__init__(item, client, limits)
        self._name = item.name
        self._places = [_Place(dataclasses.replace(item, url=url), client, limits) for url in urls]
        self._asked: Counter[tuple[int, _Place]] = Counter()  # by where the part ends
        self._was_there = False

    @property
    def host(self) -> str:
        return "another node"

    async def get(self, asked: Range, validator: str) -> httpx2.Response:
        problems = []
        for place in sorted(self._places, key=lambda one: self._rank(asked, one)):
            now_s = time.monotonic()
            if place.not_before_s > now_s and self._was_there:
                continue
            try:
                response = await place.get(asked, "")
            except httpx2.TransportError as error:
                problems.append(f"{place.host}: {why_not(error)}")
                place.not_before_s = time.monotonic() + BROKEN_S
                continue
            if response.status_code == 206:
                self._was_there = True
                self._asked[asked.end, place] += 1
                place.has_piece = _PIECE in response.headers
                return response
            await response.aclose()
            if response.status_code != 404:
                problems.append(f"{place.host} answered {response.status_code}")
            place.not_before_s = now_s + LACKS_S
        if self._was_there:
            raise PassingFailure(f"no node gives it at the moment {'; '.join(problems)}".rstrip())
        why = f" ({'; '.join(problems)})" if problems else ""
        raise SourceRefused(f"no other node has {self._name}{why}", source_status=404)

    def _rank(self, asked: Range, place: _Place) -> tuple[int, bool, float]:
        """Those first who were not asked for this part, and among them those who have pieces: they spare the others."""
        return self._asked[asked.end, place], not place.has_piece, random.random()
