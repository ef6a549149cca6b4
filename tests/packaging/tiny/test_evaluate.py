"""The scores: counted right, with the model's own replies in the conversation, over real HTTP."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import pytest

from tiny import evaluate
from tiny.held_out import Case, Reply, Skill


def counting_skill(n_right: int) -> Skill:
    """A skill whose first `n_right` cases are right."""
    numbers = iter(range(1000))
    return Skill("counting", lambda _random: made(next(numbers) < n_right), 0.5)


def made(right: bool) -> Case:
    return Case(("hello",), lambda _reply: right)


def test_the_score_is_the_share_of_right_answers() -> None:
    for n_right in (0, 3, 10):
        share = evaluate.score(lambda _messages: Reply("", 1, "stop"), counting_skill(n_right), 10, n_parallel=2)
        assert share == pytest.approx(n_right / 10)


def test_replies_stay_in_the_conversation() -> None:
    seen: list[list[str]] = []

    def ask(messages: list[dict[str, str]]) -> Reply:
        seen.append([message["content"] for message in messages])
        return Reply(f"reply {len(seen)}", 1, "stop")

    last = evaluate.last_reply(ask, Case(("one", "two"), lambda _reply: True))
    assert seen == [["one"], ["one", "reply 1", "two"]]
    assert last.text == "reply 2"


@contextmanager
def echo_server(bodies: list[dict[str, object]]) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            bodies.append({"path": self.path, **body})
            choice = {"message": {"role": "assistant", "content": "hi"}, "finish_reason": "stop"}
            answer = json.dumps({"choices": [choice], "usage": {"completion_tokens": 2}}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *_arguments: object) -> None:
            """Tests print nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def test_asks_greedily_over_http() -> None:
    bodies: list[dict[str, object]] = []
    with echo_server(bodies) as url:
        reply = evaluate.over_http(url + "/", "tiny")([{"role": "user", "content": "hello"}])
    assert reply == Reply("hi", 2, "stop")
    assert bodies[0]["path"] == "/v1/chat/completions"
    assert bodies[0]["model"] == "tiny"
    assert bodies[0]["temperature"] == 0
