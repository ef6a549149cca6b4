"""A proxy before a daemon that makes every text of its answers one that attacks terminals, and what such a text is."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx2

# OSC 52 (clipboard), OSC 8 (a link), CSI in both forms, backspace, bell, delete, a carriage return; right-to-left
# override, isolate and mark.
POISON = "\x1b]52;c;aGk=\x07\x1b]8;;http://a/\x1b\\\x1b[5;7m\x9b2J\b\x7f\r\u202e\u2066\u200f\u061c"
# Words of a fixed list, moments and addresses of the daemon itself: others than these are no answers of a daemon.
_KEPT = {
    *("state", "status", "lane", "level", "object", "modified_at", "created_at", "expires_at", "done_reason", "api"),
    *("version", "type", "digest", "source_kind", "reason_code", "updated_at", "since", "role", "kind_of"),
}
# Colours and weights of this program's own, and a line that it writes anew.
OWN = re.compile(r"\x1b\[(?:0|1|2|31|32|33)m|\r\x1b\[2K")
_BAD = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]")


def attacks(shown: str) -> list[str]:
    """The characters that a terminal must not get from elsewhere."""
    return _BAD.findall(OWN.sub("", shown))


def poisoned(value: Any, key: str = "") -> Any:
    """Every text in a JSON value with the poison at its end."""
    if isinstance(value, dict):
        return {name: poisoned(each, name) for name, each in value.items()}
    if isinstance(value, list):
        return [poisoned(each, key) for each in value]
    return value + POISON if isinstance(value, str) and key not in _KEPT else value


class _Proxy(BaseHTTPRequestHandler):
    upstream: httpx2.Client

    def log_message(self, *_: object) -> None:
        """Say nothing."""

    def do_GET(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        headers = {"Content-Type": self.headers["Content-Type"]} if body else {}
        # What was poisoned in one answer comes back in the next request.
        clean = body.decode().replace(json.dumps(POISON)[1:-1], "").replace(POISON, "").encode()
        path = re.sub("%1B.*?(?=[/?&]|$)", "", self.path)
        answer = self.upstream.request(self.command, path, content=clean, headers=headers)
        is_health = path in ("/health", "/")
        try:
            lines = [json.loads(line) for line in answer.text.splitlines() if line.strip()]
            text = "\n".join(json.dumps(line if is_health else poisoned(line)) for line in lines)
        except ValueError:
            text = answer.text
        data = (text + "\n").encode()
        self.send_response(answer.status_code)
        for name in ("X-Localrun-Error", "X-Localrun-Request"):
            if name in answer.headers:
                self.send_header(name, answer.headers[name])
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_POST(self) -> None:
        self.do_GET()

    def do_DELETE(self) -> None:
        self.do_GET()


@contextmanager
def poisoning(url: str) -> Iterator[int]:
    """The port of a proxy before the daemon at `url`."""
    with httpx2.Client(base_url=url, timeout=60, trust_env=False) as upstream:
        handler = type("Handler", (_Proxy,), {"upstream": upstream})
        server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield int(server.server_address[1])
        finally:
            server.shutdown()
            server.server_close()
            thread.join()
