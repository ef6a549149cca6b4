"""The loopback registry itself: `/v2/<owner>/<name>/manifests/<tag>` and `/blobs/<digest>` as Ollama's answers them.

Blobs are answered by a redirect to a storage path on another host name, with ranges. What it does wrong is set by
attributes, which may be changed at any time.
"""

from __future__ import annotations

import hashlib
import json
import re
import ssl
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple

_PREFIX = "application/vnd.ollama.image."
_PATH = re.compile(r"/v2/(?P<repo>[^/]+/[^/]+)/(?P<what>manifests|blobs)/(?P<reference>[^/]+)")
_RANGE = re.compile(r"bytes=(\d+)-(\d*)")


class Layer(NamedTuple):
    """`kind` as Ollama's media types end: model, params, system, license, template, ..."""

    kind: str
    content: bytes

    @property
    def digest(self) -> str:
        return f"sha256:{hashlib.sha256(self.content).hexdigest()}"


class Registry(ThreadingHTTPServer):
    """A context manager. `requests` are the paths that were asked for; `content_bytes` what was sent of blobs.

    `bytes_per_s` slows blobs down; with `drop_after` set every answer with a blob breaks off after so many bytes;
    `statuses` are given away, first come first served, instead of true answers; with `location` set, every question is
    answered by a redirect to it.
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.manifests: dict[str, bytes] = {}
        self.blobs: dict[str, bytes] = {}
        self.requests: list[str] = []
        self.content_bytes = 0
        self.bytes_per_s: float | None = None
        self.drop_after: int | None = None
        self.statuses: list[int] = []
        self.location = ""
        self.lock = threading.Lock()

    def __enter__(self) -> Registry:
        threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()
        self.server_close()

    def handle_error(self, *_: object) -> None:
        """Nothing: clients that break off are what is tested."""

    @property
    def host(self) -> str:
        return f"127.0.0.1:{self.server_address[1]}"

    def add(self, repo: str, *layers: Layer, tag: str = "latest") -> str:
        """Publishes a model. What to pull."""
        described = [self.described(layer) for layer in layers]
        return self.add_manifest(repo, {"schemaVersion": 2, "layers": described}, tag=tag)

    def add_manifest(self, repo: str, manifest: Any, *, tag: str = "latest") -> str:
        """Publishes any manifest, sound or not. What to pull."""
        content = manifest if isinstance(manifest, bytes) else json.dumps(manifest).encode()
        self.manifests[f"{repo}:{tag}"] = content
        return f"{self.host}/{repo}:{tag}"

    def described(self, layer: Layer) -> dict[str, Any]:
        """A layer's entry in a manifest; its content can be fetched from now on."""
        self.blobs[layer.digest] = layer.content
        return {"mediaType": _PREFIX + layer.kind, "digest": layer.digest, "size": len(layer.content)}

    def asked_for(self, part: str) -> int:
        return sum(part in path for path in self.requests)


class _Handler(BaseHTTPRequestHandler):
    server: Registry
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        with self.server.lock:
            self.server.requests.append(self.path)
            status = self.server.statuses.pop(0) if self.server.statuses else 0
        if status:
            self._answer(status, b"the body of a refusal")
        elif self.server.location:
            self._answer(302, b"", Location=self.server.location)
        elif self.path.startswith("/storage/"):
            self._blob(self.server.blobs[self.path.removeprefix("/storage/")])
        elif found := _PATH.fullmatch(self.path):
            self._registry(**found.groupdict())
        else:
            self._answer(404, b"{}")

    def _registry(self, repo: str, what: str, reference: str) -> None:
        if what == "manifests":
            content = self.server.manifests.get(f"{repo}:{reference}")
            self._answer(404 if content is None else 200, content or b'{"errors":[{"code":"MANIFEST_UNKNOWN"}]}')
        elif reference not in self.server.blobs:
            self._answer(404, b"{}")
        else:
            scheme = "https" if isinstance(self.server.socket, ssl.SSLSocket) else "http"
            location = f"{scheme}://localhost:{self.server.server_address[1]}/storage/{reference}"
            self._answer(307, b"", Location=location)

    def _blob(self, content: bytes) -> None:
        start, end = 0, len(content)
        asked = _RANGE.fullmatch(self.headers.get("Range", ""))
        if asked:
            start, end = int(asked[1]), min(end, int(asked[2]) + 1 if asked[2] else end)
        headers = {"ETag": '"blob"', "Accept-Ranges": "bytes"}
        if asked:
            headers["Content-Range"] = f"bytes {start}-{end - 1}/{len(content)}"
        self._head(206 if asked else 200, end - start, headers)
        until = end if self.server.drop_after is None else min(end, start + self.server.drop_after)
        for position in range(start, until, 16 * 1024):
            chunk = content[position : min(position + 16 * 1024, until)]
            try:
                self.wfile.write(chunk)
            except OSError:
                break
            with self.server.lock:
                self.server.content_bytes += len(chunk)
            if self.server.bytes_per_s:
                time.sleep(len(chunk) / self.server.bytes_per_s)
        if until < end:
            self.close_connection = True

    def _answer(self, status: int, content: bytes, **headers: str) -> None:
        self._head(status, len(content), headers)
        self.wfile.write(content)

    def _head(self, status: int, n_bytes: int, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(n_bytes))
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Nothing: the tests look at `requests`."""
