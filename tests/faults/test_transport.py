"""Faults 1 to 10: who asks, the form of the request, and clients that send, read or leave as they should not."""

from __future__ import annotations

import contextlib
import hashlib
import json
import selectors
import socket
import struct
import sys
import time
import zlib
from collections.abc import Iterator
from typing import Any

import httpx2
import pytest

from localrun.server.http.connection import MAX_CONNECTIONS, MAX_HEAD_BYTES
from tests.daemon import Daemon, running_daemon
from tests.faults import raw
from tests.faults.postcondition import unharmed
from tests.faults.proxy import Line, proxy
from tests.faults.raw import JSON, PATIENCE_S, ask, head, post

if sys.platform != "win32":
    import resource

MAX_BODY_BYTES = 64 * 1024
# Requests that would be seen if they were handled: the first would end the daemon, the second would make tokens.
SHUTDOWN = "/localrun/v1/shutdown"
COMPLETE = "/v1/completions"
PROMPT: dict[str, Any] = {"model": "tiny", "prompt": "Tell me", "max_tokens": 4, "temperature": 0}
ENDLESS = PROMPT | {"max_tokens": 1900, "stream": True, "ignore_eos": True}
ROUTES = ("/", "/health", "/metrics", "/api/tags", "/v1/models", "/localrun/v1/events", "/nothing", SHUTDOWN)


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    """Its bounds are small, so that they are soon reached."""
    with running_daemon(
        LOCALRUN_FAKE_STEP_MS="5", LOCALRUN_BATCH_TOKENS="32",
        LOCALRUN_MAX_BODY_BYTES=str(MAX_BODY_BYTES), LOCALRUN_RECEIVE_DEADLINE_S="2",
    ) as running:  # fmt: skip
        yield running


def code_of(answer: httpx2.Response) -> tuple[int, str]:
    assert answer.json()["error"]
    return answer.status_code, answer.headers["x-localrun-error"]


def n_requests(daemon: Daemon) -> int:
    """How many requests for tokens there have been."""
    return int(daemon.http.get("/localrun/v1/snapshot").json()["aggregate"]["requests_total"])


def rows(daemon: Daemon) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = daemon.http.get("/localrun/v1/snapshot").json()["requests"]
    return found


def until(daemon: Daemon, is_so: Any) -> list[dict[str, Any]]:
    """The requests, once they are so."""
    deadline_s = time.monotonic() + PATIENCE_S
    while not is_so(seen := rows(daemon)):
        assert time.monotonic() < deadline_s, seen
        time.sleep(0.01)
    return seen


def is_idle(seen: list[dict[str, Any]]) -> bool:
    return all(row["state"] in ("done", "cancelled", "failed") for row in seen)


def test_fault_01_a_foreign_host_is_refused_before_any_handler(daemon: Daemon) -> None:
    with unharmed(daemon):
        before = n_requests(daemon)
        for host in ("evil.com", "localhost.evil.com", f"127.0.0.1.nip.io:{daemon.port}", "192.168.1.2", "[::1].evil"):
            for path in ROUTES:
                assert code_of(daemon.http.get(path, headers={"Host": host})) == (403, "forbidden")
            for path in (SHUTDOWN, COMPLETE):
                answer = daemon.http.post(path, json=PROMPT, headers={"Host": host})
                assert code_of(answer) == (403, "forbidden")
        assert n_requests(daemon) == before


def test_fault_02_a_foreign_origin_gets_nothing_and_no_grant(daemon: Daemon) -> None:
    with unharmed(daemon):
        before = n_requests(daemon)
        for origin in ("http://evil.com", "null", "http://localhost.evil.com", "chrome-extension://abc"):
            asked = {"Origin": origin, "Access-Control-Request-Method": "POST"}
            answers = [daemon.http.get(path, headers={"Origin": origin}) for path in ROUTES]
            answers += [daemon.http.options(path, headers=asked) for path in ROUTES]
            answers += [
                daemon.http.post(path, json=PROMPT, headers={"Origin": origin}) for path in (SHUTDOWN, COMPLETE)
            ]
            for answer in answers:
                assert code_of(answer) == (403, "forbidden")
                assert not any(name.startswith("access-control") for name in answer.headers)
        assert n_requests(daemon) == before


def test_fault_03_a_form_of_another_page_is_refused(daemon: Daemon) -> None:
    """What a browser sends without asking first: the three types of forms, and a body without any."""
    with unharmed(daemon):
        before = n_requests(daemon)
        own = {"Origin": daemon.url}
        for path in (SHUTDOWN, COMPLETE, "/api/delete", "/api/pull", "/api/blobs/sha256:" + "0" * 64):
            for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", ""):
                answer = daemon.http.post(path, content=json.dumps(PROMPT), headers=own | {"Content-Type": kind})
                assert code_of(answer) == (415, "unsupported_media_type")
        answer = daemon.http.get("/api/tags", headers={"Sec-Fetch-Site": "cross-site"})
        assert code_of(answer) == (403, "forbidden")
        assert n_requests(daemon) == before


def test_fault_04_a_body_over_the_limit_is_refused_before_it_is_there(daemon: Daemon) -> None:
    with unharmed(daemon):
        before_bytes = raw.rss_bytes(daemon)
        announced = ask(daemon, head("POST", COMPLETE, JSON, length=10**12))
        assert (announced.status, json.loads(announced.body)["error"]["code"]) == (413, "body_too_large")
        chunked = head("POST", "/api/chat", JSON, "Transfer-Encoding: chunked")
        piece = b"10000\r\n" + b" " * 0x10000 + b"\r\n"
        answers = [ask(daemon, chunked, *[piece] * 64) for _ in range(10)]
        # Where the client still sends when the daemon closes, the system may throw the answer away.
        assert {answer.status for answer in answers} <= {413, 0}
        assert 413 in {answer.status for answer in answers}
        sent_bytes = 10 * 64 * 0x10000
        assert raw.rss_bytes(daemon) - before_bytes < sent_bytes / 4
        for length in (MAX_BODY_BYTES, MAX_BODY_BYTES + 1):
            content = json.dumps(PROMPT).encode().ljust(length)
            answer = ask(daemon, head("POST", COMPLETE, JSON, length=length), content)
            assert answer.status == (200 if length == MAX_BODY_BYTES else 413)


def test_fault_05_five_hundred_senders_of_a_byte_now_and_then_are_closed_while_others_are_served(
    daemon: Daemon,
) -> None:
    """They never fall silent, and are closed all the same."""
    beginnings = (
        b"POST /api/chat HTTP/1.1\r\nHost: localhost\r\nX: ",
        b"POST /api/chat HTTP/1.1\r\nHost: localhost\r\nContent-Length: 60000\r\n\r\n{",
    )
    with unharmed(daemon), selectors.DefaultSelector() as selector:
        assert daemon.post(COMPLETE, PROMPT).status_code == 200
        for number in range(500):
            sender = raw.connect(daemon)
            sender.sendall(beginnings[number % 2])
            selector.register(sender, selectors.EVENT_READ)
        n_served = 0
        while senders := [key.fileobj for key in selector.get_map().values()]:
            assert daemon.post(COMPLETE, PROMPT).status_code == 200
            n_served += 1
            for key, _ in selector.select(timeout=0.05):
                assert isinstance(key.fileobj, socket.socket)
                assert not raw.read(key.fileobj).startswith(b"HTTP/1.1 2")
                selector.unregister(key.fileobj)
                key.fileobj.close()
                senders.remove(key.fileobj)
            for sender in senders:
                try:
                    sender.sendall(b"x")  # type: ignore[union-attr]
                except ConnectionError:
                    continue  # closed meanwhile: the next look finds it
        assert n_served > 1, "while they were there"


def test_fault_06_a_head_without_end_is_refused_and_not_kept(daemon: Daemon) -> None:
    heads = {
        "a header of 1 MB": head("GET", "/health", "X: " + "a" * 1_000_000),
        "a path of 1 MB": head("GET", "/" + "a" * 1_000_000),
        "10,000 headers": head("GET", "/health", *["X-Y: 1"] * 10_000),
        "129 headers": head("GET", "/health", *["X-Y: 1"] * 129),
    }
    with unharmed(daemon):
        before_bytes = raw.rss_bytes(daemon)
        for whole in heads.values():
            # The daemon closes while the rest is on its way: the system may throw the answer away.
            assert {ask(daemon, whole).status for _ in range(8)} <= {431, 0}
            assert ask(daemon, whole[: MAX_HEAD_BYTES + 1]).status in (431, 0)
        assert ask(daemon, heads["129 headers"]).status == 431
        assert ask(daemon, head("GET", "/health", *["X-Y: 1"] * 100)).status == 200
        sent_bytes = sum(map(len, heads.values())) * 8
        assert raw.rss_bytes(daemon) - before_bytes < sent_bytes / 2


def test_fault_07_two_lengths_of_one_body_are_never_handled(daemon: Daemon) -> None:
    """Where a proxy believes the one and a server the other, the rest of the body is a request that nobody checked."""
    hidden = head("POST", SHUTDOWN, JSON, length=2) + b"{}"
    lengths = (
        (f"Content-Length: {len(hidden)}", "Transfer-Encoding: chunked"),
        ("Transfer-Encoding: chunked", f"Content-Length: {len(hidden)}"),
        ("Content-Length: 0", f"Content-Length: {len(hidden)}"),
        ("Content-Length: -1",),
        ("Content-Length: 99999999999999999999999",),
        ("Content-Length: 1_0",),
        ("Content-Length: 0x10",),
        ("Transfer-Encoding: chunked, identity",),
        ("Transfer-Encoding: chunked", "Transfer-Encoding: x"),
    )
    with unharmed(daemon):
        for headers in lengths:
            with raw.connect(daemon) as client:
                client.sendall(head("POST", "/api/show", JSON, *headers) + b"0\r\n\r\n" + hidden)
                answer = raw.answer_of(raw.read(client))
            assert answer.status in (0, 400), (headers, answer)
            assert b"HTTP/1.1" not in answer.body, "one answer, and then the end"


def test_fault_08_a_compressed_body_is_not_unpacked_beyond_the_limit(daemon: Daemon) -> None:
    """A megabyte of them can be a gigabyte."""
    bomb = zlib.compress(bytes(32 * 2**20), 9)
    with unharmed(daemon):
        for encoding, code in (("deflate", (413, "body_too_large")), ("br", (415, "unsupported_media_type"))):
            length = f"Content-Length: {len(bomb)}"
            answer = ask(daemon, head("POST", COMPLETE, JSON, f"Content-Encoding: {encoding}", length) + bomb)
            assert (answer.status, json.loads(answer.body)["error"]["code"]) == code


def test_fault_09_a_client_that_never_reads_is_cancelled_and_holds_nothing() -> None:
    """Its queue fills, whose length is bounded, long before the answer ends."""
    body = ENDLESS | {"max_tokens": 30_000, "logprobs": 5}
    settings = {"LOCALRUN_KV_CELLS": "32768", "LOCALRUN_SLOTS": "2", "LOCALRUN_BATCH_TOKENS": "32"}
    with running_daemon(**settings) as daemon, unharmed(daemon):
        client = socket.socket()
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(("127.0.0.1", daemon.port))
        with client:
            client.sendall(post(COMPLETE, body))
            assert daemon.post(COMPLETE, PROMPT).status_code == 200, "others are served"
            (row,) = [row for row in until(daemon, is_idle) if row["api"] == COMPLETE and row["error"]]
            assert row["state"] == "cancelled"
            assert "too slowly" in row["error"]
            assert row["output_tokens"] < 30_000


@pytest.mark.parametrize("state", ["prefill", "decode"])
def test_fault_10_a_client_that_leaves_frees_its_slot_and_what_was_computed_is_kept(daemon: Daemon, state: str) -> None:
    body = ENDLESS | {"prompt": f"{state} " * 150, "max_tokens": 800}
    with unharmed(daemon):
        with raw.connect(daemon) as client:
            client.sendall(post(COMPLETE, body))
            (before,) = [
                row
                for row in until(daemon, lambda seen: any(row["state"] == state for row in seen))
                if row["state"] == state
            ]
        ended = next(row for row in until(daemon, is_idle) if row["id"] == before["id"])
        assert ended["state"] == "cancelled"
        assert ended["output_tokens"] < 800
        if state == "prefill":
            assert ended["computed_tokens"] < ended["prompt_tokens"]
        again = daemon.post(COMPLETE, body | {"stream": False, "max_tokens": 1}).json()["usage"]
        assert again["prompt_tokens_details"]["cached_tokens"] >= before["computed_tokens"] // 2 > 0


# --- hostile input beyond the list ----------------------------------------------------------------------------------


def test_a_chat_that_is_cut_at_any_byte_leaves_nothing(daemon: Daemon) -> None:
    whole = post("/api/chat", {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "stream": True})
    with unharmed(daemon):
        for length in range(len(whole) + 1):
            send_and_leave(daemon, whole[:length], resets=length % 2 == 0)
        assert daemon.http.get("/health").status_code == 200


def test_an_upload_that_is_cut_at_any_byte_leaves_nothing(daemon: Daemon) -> None:
    content = b"GGUF of no more than some bytes"
    digest = hashlib.sha256(content).hexdigest()
    whole = head("POST", f"/api/blobs/sha256:{digest}", "Content-Type: application/octet-stream", length=len(content))
    whole += content
    with unharmed(daemon):
        for length in range(len(whole)):
            send_and_leave(daemon, whole[:length], resets=length % 2 == 0)
        with proxy(daemon, up=Line(cut_after=len(whole) - 1)) as port:
            assert ask(daemon, whole, port=port).status == 0
        assert daemon.http.head(f"/api/blobs/sha256:{digest}").status_code == 404
        assert ask(daemon, whole).status == 201
        assert daemon.http.head(f"/api/blobs/sha256:{digest}").status_code == 200


def send_and_leave(daemon: Daemon, sent: bytes, *, resets: bool) -> None:
    with raw.connect(daemon) as client:
        if resets:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        client.sendall(sent)


@pytest.mark.parametrize("line", [Line(piece=1), Line(piece=16, pause_s=0.002)], ids=["byte by byte", "slow"])
def test_a_client_on_a_bad_line_gets_the_same_answer(daemon: Daemon, line: Line) -> None:
    with unharmed(daemon):
        for more in ({"stream": False}, {"stream": True}):
            whole = post(COMPLETE, PROMPT | more)
            straight = ask(daemon, whole)
            with proxy(daemon, up=line, down=line) as port:
                late = ask(daemon, whole, port=port)
            assert (late.status, straight.status) == (200, 200)
            assert texts_of(late) == texts_of(straight) != ""


def texts_of(answer: raw.Answer) -> str:
    """The text of an answer, streamed or not."""
    found = [json.loads(line[line.index(b"{") :]) for line in answer.body.splitlines() if b'"choices"' in line]
    return "".join(choice["text"] for event in found for choice in event["choices"])


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no such limit")
def test_two_thousand_connections_at_once_are_served_or_told_to_come_back() -> None:
    """On a system that gives a process 256 descriptors, unless it asks for more."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
    try:
        with running_daemon() as daemon:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
            with unharmed(daemon):
                _connect_two_thousand(daemon)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def _connect_two_thousand(daemon: Daemon) -> None:
    request = head("GET", "/health")
    daemon.disconnect()
    held = [raw.connect(daemon) for _ in range(MAX_CONNECTIONS)]
    # One connection after the other is answered, so these are all there, and no more are served.
    beyond = ask(daemon, request)
    assert beyond.status == 503
    assert b"close some" in beyond.body
    more = [raw.connect(daemon) for _ in range(2000 - MAX_CONNECTIONS)]
    for connection in (*more, *held):
        with contextlib.suppress(ConnectionError):
            connection.sendall(request)
    answers = [[raw.answer_of(raw.read(one)).status for one in group] for group in (held, more)]
    for connection in (*held, *more):
        connection.close()
    assert set(answers[0]) == {200}, "those within the limit"
    # One beyond it that sends nothing for a second is closed, and here the last has to wait for 2,000 others.
    assert set(answers[1]) <= {503, 200, 0}
    assert 503 in answers[1]
    assert daemon.http.get("/health").status_code == 200


def test_a_connection_without_a_request_lives_while_an_agent_runs_its_tool(daemon: Daemon) -> None:
    """Clients keep theirs for up to 90 seconds, and do not repeat a POST that went into a closed one."""
    request = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
    with contextlib.closing(raw.connect(daemon)) as connection:
        for pause_s in (0, 7):
            time.sleep(pause_s)
            connection.sendall(request)
            answer = connection.recv(4096)
            while not answer.endswith(b"}"):  # head and body may come apart
                answer += connection.recv(4096)
            assert answer.startswith(b"HTTP/1.1 200 ")


def test_bodies_that_are_too_large_together_are_refused_and_those_under_way_are_served(daemon: Daemon) -> None:
    """Eight of the largest may be there at once, each from its first byte to the end of its answer."""
    body = json.dumps(ENDLESS | {"max_tokens": 100}).encode().ljust(MAX_BODY_BYTES)
    whole = head("POST", COMPLETE, JSON, length=len(body)) + body
    with unharmed(daemon):
        held = [raw.connect(daemon) for _ in range(8)]
        for connection in held:
            connection.sendall(whole)
        until(daemon, lambda seen: sum(row["state"] in ("prefill", "decode", "queued") for row in seen) == 8)
        refused = ask(daemon, whole)
        assert (refused.status, json.loads(refused.body)["error"]["code"]) == (429, "queue_full")
        assert "retry-after" in refused.head
        for connection in held:
            assert b"[DONE]" in raw.read(connection)
            connection.close()
        assert ask(daemon, whole).status == 200
