#!/usr/bin/env python3
"""A stand-in for llama-server: `/health`, and completions of as many tokens as are asked for, one every millisecond.

SCRIPT_STATUS ends it at once with that status, SCRIPT_UNHEALTHY lets so many health checks fail, SCRIPT_REFUSES answers
completions with that status. Its arguments and process id are appended to the file SCRIPT_CALLS.
"""

from __future__ import annotations

import json
import os
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

TOKEN_S = 0.001

unhealthy = int(os.environ.get("SCRIPT_UNHEALTHY", "0"))


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        global unhealthy
        unhealthy -= 1
        self.answer(200 if unhealthy < 0 else 503, {"status": "ok"})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if "SCRIPT_REFUSES" in os.environ:
            self.answer(int(os.environ["SCRIPT_REFUSES"]), {"error": {"message": "not today"}})
            return
        n_tokens = body["max_tokens"]
        usage = {"prompt_tokens": len(body["prompt"]), "completion_tokens": n_tokens}
        if not body.get("stream"):
            self.answer(200, {"choices": [{"text": "x" * n_tokens}], "usage": usage})
            return
        events = [{"choices": [{"text": "x"}]} for _ in range(n_tokens)]
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for event in [*events, {"choices": [], "usage": usage}]:
            # So that pieces do not all arrive as one.
            time.sleep(TOKEN_S)
            self.chunk(b"data: " + json.dumps(event).encode() + b"\n\n")
        self.chunk(b"data: [DONE]\n\n")
        self.chunk(b"")

    def chunk(self, data: bytes) -> None:
        self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")

    def answer(self, status: int, content: object) -> None:
        data = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        pass


if __name__ == "__main__":
    if "SCRIPT_CALLS" in os.environ:
        with open(os.environ["SCRIPT_CALLS"], "a") as calls:
            calls.write(json.dumps({"pid": os.getpid(), "arguments": sys.argv[1:]}) + "\n")
    if "SCRIPT_STATUS" in os.environ:
        print("the model is from another planet", flush=True)
        sys.exit(int(os.environ["SCRIPT_STATUS"]))
    port = int(sys.argv[sys.argv.index("--port") + 1])
    ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()
