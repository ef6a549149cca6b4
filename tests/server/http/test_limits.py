"""Host, Origin, body type and body size, checked before the handler runs."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from typing import Any

import pytest
from starlette.types import Message, Receive, Scope, Send

from localrun.access.keys import OUTPUT_TOKENS, PROMPT_TOKENS, REQUESTS, TOKENS, Key, Limit
from localrun.access.quotas import Quota
from localrun.config import ConfigError, Settings
from localrun.errors import LocalrunError, QueueFull
from localrun.server.http import failures
from localrun.server.http.access import Caller
from localrun.server.http.exchange import id_header
from localrun.server.http.limits import MAX_BODIES, MAX_UPLOADS, Limits
from localrun.server.openapi.operations import find
from tests.server.waiting import until

JSON = [("content-type", "application/json")]
LOCAL = [("host", "localhost:11434")]
LIMIT_BYTES = 2048


class Handler:
    """Reads the body and answers 200; remembers that it ran."""

    def __init__(self) -> None:
        self.body: bytes | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.body = b""
        try:
            more = True
            while more:
                message = await receive()
                self.body += message["body"]
                more = message["more_body"]
        except LocalrunError as error:
            answer = failures.body(error, failures.shape_of(scope["path"]))
            await send({"type": "http.response.start", "status": error.status, "headers": failures.headers(error)})
            await send({"type": "http.response.body", "body": answer})
            return
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/plain")]})
        await send({"type": "http.response.body", "body": b"fine"})


class Answer:
    def __init__(self, sent: list[Message]) -> None:
        self.status: int = sent[0]["status"]
        self.headers = {name.decode(): value.decode() for name, value in sent[0]["headers"]}
        self.body = b"".join(message.get("body", b"") for message in sent[1:])
        self.is_complete = not sent[-1].get("more_body", False)


def ask(
    handler: Handler,
    *,
    method: str = "GET",
    path: str = "/api/tags",
    headers: list[tuple[str, str]] | None = None,
    chunks: list[bytes] | None = None,
    settings: Settings | None = None,
    client: str | None = None,
) -> Answer:
    pieces = list(chunks or [b""])
    sent: list[Message] = []

    async def receive() -> Message:
        if not pieces:
            return {"type": "http.disconnect"}
        return {"type": "http.request", "body": pieces.pop(0), "more_body": bool(pieces)}

    async def send(message: Message) -> None:
        sent.append(message)

    raw = [(name.encode(), value.encode("latin-1")) for name, value in (LOCAL if headers is None else headers)]
    scope: dict[str, Any] = {"type": "http", "method": method, "path": path, "headers": raw}
    if client is not None:
        scope |= {"client": (client, 5), "server": ("192.0.2.7", 11434), "scheme": "https"}
    app = Limits(handler, settings or Settings(max_body_bytes=LIMIT_BYTES), find=find)
    asyncio.run(app(scope, receive, send))
    return Answer(sent)


@pytest.mark.parametrize(
    "host",
    [
        "localhost",
        "LOCALHOST:1",
        "127.0.0.1",
        "127.0.0.1:11434",
        "[::1]",
        "[::1]:80",
        "0.0.0.0:11434",
        "host.docker.internal:11434",
    ],
)
def test_loopback_names_pass(host: str) -> None:
    handler = Handler()
    assert ask(handler, headers=[("host", host)]).status == 200
    assert handler.body == b""


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 200),
        ({"origin": "https://ai.example.org"}, 200),
        ({"origin": "http://localhost:3000"}, 200),
        ({"host": "localhost", "origin": "https://ai.example.org"}, 403),
        ({"origin": "http://ai.example.org"}, 403),
        ({"origin": "https://ai.example.org.evil.com"}, 403),
        ({"host": "b.example.org"}, 403),
    ],
)
def test_a_proxy_of_this_machine_may_pass_on_a_listed_name(headers: dict[str, str], status: int) -> None:
    """As Caddy, Traefik and `tailscale serve` do unless they are told otherwise."""
    listed = Settings(host_names="studio.lan, AI.example.org.", max_body_bytes=LIMIT_BYTES)
    sent = list(({"host": "ai.example.org"} | headers).items())
    assert ask(Handler(), headers=sent, settings=listed).status == status
    everywhere = Settings(host_names="ai.example.org", host="0.0.0.0", max_body_bytes=LIMIT_BYTES)
    refused = 403 if sent[0][1] != "localhost" else status
    assert ask(Handler(), headers=sent, settings=everywhere).status == refused, "others come without a proxy"


@pytest.mark.parametrize(
    "host",
    [
        "evil.com", "evil.com:11434", "localhost.evil.com", "evil.com/localhost", "127.0.0.1.nip.io", "localhost.",
        "", " localhost", "localhost:80:80", "localhost@evil.com", "[::1].evil.com", "docker.internal", "192.168.1.2",
        "my-desktop.local", "\xe9vil",
    ],
)  # fmt: skip
def test_other_hosts_are_refused_before_the_handler(host: str) -> None:
    handler = Handler()
    answer = ask(handler, headers=[("host", host)])
    assert (answer.status, answer.headers["x-localrun-error"]) == (403, "forbidden")
    assert handler.body is None


@pytest.mark.parametrize("headers", [[], [("host", "localhost"), ("host", "evil.com")]])
def test_no_host_and_two_hosts_are_refused(headers: list[tuple[str, str]]) -> None:
    assert ask(Handler(), headers=headers).status == 403


def test_the_address_listened_on_is_a_host() -> None:
    settings = Settings(host="127.0.0.5")
    assert ask(Handler(), headers=[("host", "127.0.0.5:11434")], settings=settings).status == 200
    assert ask(Handler(), headers=[("host", "127.0.0.5:11434")]).status == 403


@pytest.mark.parametrize(
    "origin",
    [
        "http://localhost", "http://localhost:3000", "https://127.0.0.1:8443", "http://[::1]:5173",
        "vscode-webview://1ab2c3", "tauri://localhost", "app://obsidian.md", "file://",
    ],
)  # fmt: skip
def test_local_origins_pass_with_a_grant(origin: str) -> None:
    answer = ask(Handler(), headers=[*LOCAL, ("origin", origin)])
    assert answer.status == 200
    assert answer.headers["access-control-allow-origin"] == origin
    assert "x-localrun-request" in answer.headers["access-control-expose-headers"]
    assert answer.headers["vary"] == "origin"


@pytest.mark.parametrize("shape", failures.Shape)
def test_a_page_may_read_what_is_left_of_its_key_s_limits(shape: failures.Shape) -> None:
    limits = tuple(Limit(kind, 10, 60.0) for kind in (REQUESTS, TOKENS, PROMPT_TOKENS, OUTPUT_TOKENS))
    key = Key(id="a", name="a", salt=b"", hash=b"", check=b"", created_at_s=0.0, limits=limits)
    said = [*Caller(key, Quota(key, 0.0)).headers(shape), *id_header(shape, "req_1")]
    refused = failures.headers(QueueFull("", retry_after_s=1.0))
    answer = ask(Handler(), headers=[*LOCAL, ("origin", "http://localhost:3000")])
    exposed = answer.headers["access-control-expose-headers"].split(", ")
    readable_by_all = {"content-type"}
    assert {name.decode() for name, _ in (*said, *refused)} <= {*exposed, *readable_by_all}


@pytest.mark.parametrize(
    "origin",
    [
        "http://evil.com", "https://localhost.evil.com", "http://localhost:3000.evil.com", "http://evil.com:11434",
        "null", "", "http://localhost:3000/path", "http://user@localhost", "http://localhost, http://evil.com",
        "chrome-extension://abc",
    ],
)  # fmt: skip
def test_foreign_origins_are_refused_without_a_grant(origin: str) -> None:
    handler = Handler()
    answer = ask(handler, headers=[*LOCAL, ("origin", origin)])
    assert answer.status == 403
    assert not any(name.startswith("access-control") for name in answer.headers)
    assert handler.body is None


@pytest.mark.parametrize(
    ("origin", "status"),
    [("https://192.0.2.7:11434", 200), ("http://localhost:3000", 403), ("tauri://localhost", 403)],
)
def test_what_is_local_on_another_machine_is_not_local_here(origin: str, status: int) -> None:
    """A page that some program serves there must not use this daemon with the browser's rights."""
    headers = [("host", "192.0.2.7:11434"), ("origin", origin)]
    assert ask(Handler(), headers=headers, client="192.0.2.9").status == status


def test_what_a_foreign_page_makes_a_browser_get_is_refused_before_the_handler() -> None:
    handler = Handler()
    answer = ask(handler, path="/localrun/v1/search", headers=[*LOCAL, ("sec-fetch-site", "cross-site")])
    assert (answer.status, handler.body) == (403, None)
    assert "LOCALRUN_ORIGINS" in json.loads(answer.body)["error"]["message"]


@pytest.mark.parametrize("site", ["none", "same-origin", "same-site"])
def test_what_the_user_opens_in_a_browser_passes(site: str) -> None:
    assert ask(Handler(), headers=[*LOCAL, ("sec-fetch-site", site)]).status == 200


def test_a_page_from_another_site_that_may_use_the_server_passes() -> None:
    headers = [*LOCAL, ("sec-fetch-site", "cross-site"), ("origin", "https://chat.example.com")]
    assert ask(Handler(), headers=headers, settings=Settings(origins="https://chat.example.com")).status == 200
    assert ask(Handler(), headers=headers).status == 403


def test_origins_from_the_settings_pass() -> None:
    settings = Settings(origins="https://chat.example.com, chrome-extension://*, HTTP://Box.local:8080/")
    for origin in ("https://chat.example.com", "chrome-extension://abcdef", "http://box.local:8080"):
        assert ask(Handler(), headers=[*LOCAL, ("origin", origin)], settings=settings).status == 200
    for origin in ("https://chat.example.com.evil.com", "http://chat.example.com", "moz-extension://abcdef"):
        assert ask(Handler(), headers=[*LOCAL, ("origin", origin)], settings=settings).status == 403


@pytest.mark.parametrize(
    "origins", ["*", "example.com", "http://*", "https://*.example.com", "https://a.com/b", "https://"]
)
def test_settings_that_are_no_origins_are_refused(origins: str) -> None:
    with pytest.raises(ConfigError, match="origins"):
        Limits(Handler(), Settings(origins=origins))


def preflight(origin: str) -> Answer:
    headers = [
        *LOCAL,
        ("origin", origin),
        ("access-control-request-method", "POST"),
        ("access-control-request-headers", "content-type, x-stainless-retry-count, x-my-own"),
    ]
    return ask(Handler(), method="OPTIONS", path="/v1/chat/completions", headers=headers)


def test_a_preflight_grants_what_the_sdks_send() -> None:
    answer = preflight("http://localhost:3000")
    assert (answer.status, answer.body) == (200, b"")
    assert answer.headers["access-control-allow-origin"] == "http://localhost:3000"
    assert "POST" in answer.headers["access-control-allow-methods"]
    assert answer.headers["access-control-allow-private-network"] == "true"
    allowed = {name.strip() for name in answer.headers["access-control-allow-headers"].split(",")}
    assert {"authorization", "content-type", "x-stainless-retry-count", "x-stainless-os", "x-my-own"} <= allowed


def test_a_foreign_preflight_gets_nothing() -> None:
    answer = preflight("https://evil.com")
    assert answer.status == 403
    assert not any(name.startswith("access-control") for name in answer.headers)


@pytest.mark.parametrize(
    "content_type",
    [
        "application/json",
        "Application/JSON; charset=utf-8",
        None,
        "text/plain",
        "application/x-www-form-urlencoded",
        "",
    ],
)
def test_json_bodies_pass(content_type: str | None) -> None:
    handler = Handler()
    headers = [*LOCAL, ("content-length", "2"), *([("content-type", content_type)] if content_type is not None else [])]
    assert ask(handler, method="POST", headers=headers, chunks=[b"{}"]).status == 200
    assert handler.body == b"{}"


@pytest.mark.parametrize(
    "content_type",
    ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", "application/jsonx", ""],
)
@pytest.mark.parametrize("length", [("content-length", "2"), ("transfer-encoding", "chunked")])
@pytest.mark.parametrize("mark", [("origin", "http://localhost:3000"), ("sec-fetch-site", "same-origin")])
def test_other_bodies_of_a_page_are_refused_before_the_handler(
    content_type: str, length: tuple[str, str], mark: tuple[str, str]
) -> None:
    handler = Handler()
    headers = [*LOCAL, length, mark, ("content-type", content_type)]
    answer = ask(handler, method="POST", headers=headers, chunks=[b"{}"])
    assert (answer.status, handler.body, answer.is_complete) == (415, None, True)
    assert "application/json" in json.loads(answer.body)["error"]


def test_a_browser_must_name_the_content_type() -> None:
    headers = [*LOCAL, ("content-length", "2"), ("origin", "http://localhost:3000")]
    assert ask(Handler(), method="POST", headers=headers, chunks=[b"{}"]).status == 415


def test_an_announced_body_over_the_limit_is_refused_unread() -> None:
    handler = Handler()
    headers = [*LOCAL, *JSON, ("content-length", str(LIMIT_BYTES + 1))]
    answer = ask(handler, method="POST", headers=headers, chunks=[b"x" * (LIMIT_BYTES + 1)])
    assert (answer.status, handler.body) == (413, None)
    assert answer.headers["connection"] == "close"
    assert str(LIMIT_BYTES) in json.loads(answer.body)["error"]


def test_a_chunked_body_is_cut_off_at_the_limit() -> None:
    handler = Handler()
    headers = [*LOCAL, *JSON, ("transfer-encoding", "chunked")]
    answer = ask(handler, method="POST", headers=headers, chunks=[b"x" * 1024] * 8)
    assert (answer.status, answer.headers["connection"], answer.is_complete) == (413, "close", True)
    assert handler.body is not None
    assert len(handler.body) == LIMIT_BYTES


def sender(pieces: list[bytes], *, pause_s: float = 0.0) -> Receive:
    """Sends these, the last one first, and takes them out of the list."""

    async def receive() -> Message:
        await asyncio.sleep(pause_s)
        return {"type": "http.request", "body": pieces.pop(), "more_body": bool(pieces)}

    return receive


async def post(
    app: Limits, receive: Receive, on_status: Callable[[int], None] = lambda _: None, *, length: int | None = None
) -> None:
    """In chunks where no length is announced."""

    async def send(message: Message) -> None:
        if message["type"] == "http.response.start":
            on_status(message["status"])

    announced = ("transfer-encoding", "chunked") if length is None else ("content-length", str(length))
    headers = [(name.encode(), value.encode()) for name, value in (*LOCAL, *JSON, announced)]
    await app({"type": "http", "method": "POST", "path": "/api/generate", "headers": headers}, receive, send)


async def test_a_refused_body_is_read_for_as_long_as_it_comes() -> None:
    """Clients that look for an answer only when they have sent everything would be told of a reset connection."""
    sent, statuses = [b"x" * 1024] * 7, list[int]()

    app = Limits(Handler(), Settings(max_body_bytes=LIMIT_BYTES))
    await post(app, sender(sent, pause_s=0.25), statuses.append)
    assert (statuses, sent) == ([413], [])


async def test_a_daemon_that_ends_reads_no_refused_body_on() -> None:
    n_read, statuses = 0, list[int]()

    async def receive() -> Message:
        nonlocal n_read
        n_read += 1
        return {"type": "http.request", "body": b"x" * 1024, "more_body": n_read < 1000}

    settings = Settings(max_body_bytes=LIMIT_BYTES)
    await post(Limits(Handler(), settings, is_stopping=lambda: n_read >= 10), receive, statuses.append)
    assert (statuses, n_read) == ([413], 10)


async def test_bodies_that_are_thrown_away_take_no_room() -> None:
    app = Limits(Handler(), Settings(max_body_bytes=LIMIT_BYTES))
    statuses, ending = list[int](), asyncio.Event()

    def held_open(n_bytes: int) -> Receive:
        pieces = [b"x" * n_bytes]

        async def receive() -> Message:
            if not pieces:
                await ending.wait()
            return {"type": "http.request", "body": pieces.pop() if pieces else b"", "more_body": not ending.is_set()}

        return receive

    refused = []
    for n in range(1, MAX_BODIES + 2):
        refused.append(asyncio.create_task(post(app, held_open(LIMIT_BYTES + 1), statuses.append)))
        await until(lambda n=n: len(statuses) == n)
    ending.set()
    await post(app, held_open(LIMIT_BYTES), statuses.append)
    assert statuses == [413] * len(refused) + [200]
    await asyncio.gather(*refused)


@pytest.mark.parametrize("headers", [[("content-length", str(LIMIT_BYTES))], [("transfer-encoding", "chunked")]])
def test_a_body_of_exactly_the_limit_passes(headers: list[tuple[str, str]]) -> None:
    handler = Handler()
    answer = ask(handler, method="POST", headers=[*LOCAL, *JSON, *headers], chunks=[b"x" * 1024] * 2)
    assert (answer.status, handler.body) == (200, b"x" * LIMIT_BYTES)


def test_the_bodies_of_all_requests_are_bounded_together_and_free_again_at_their_end() -> None:
    async def run() -> None:
        going_on = asyncio.Event()
        n_read = 0

        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            nonlocal n_read
            while (await receive())["more_body"]:
                pass
            n_read += 1
            await going_on.wait()

        limits = Limits(app, Settings(max_body_bytes=LIMIT_BYTES))

        async def posted(length: int) -> None:
            await post(limits, sender([b"x" * 1024] * (length // 1024)), length=length)

        async with asyncio.TaskGroup() as group:
            running = [group.create_task(posted(LIMIT_BYTES)) for _ in range(MAX_BODIES)]
            await until(lambda: n_read == MAX_BODIES)
            with pytest.raises(QueueFull, match=f"{MAX_BODIES * LIMIT_BYTES} bytes together .* try again") as caught:
                await asyncio.wait_for(posted(1024), 30)
            assert caught.value.retry_after_s > 0
            assert not any(task.done() for task in running)
            going_on.set()
        await posted(LIMIT_BYTES)

    asyncio.run(run())


def test_refusals_come_in_the_family_s_shape() -> None:
    headers = [("host", "evil.com")]
    assert isinstance(json.loads(ask(Handler(), path="/api/tags", headers=headers).body)["error"], str)
    openai = json.loads(ask(Handler(), path="/v1/models", headers=headers).body)["error"]
    assert openai["type"] == "invalid_request_error"
    assert set(openai) == {"message", "type", "param", "code"}
    native = json.loads(ask(Handler(), path="/localrun/v1/requests", headers=headers).body)["error"]
    assert set(native) == {"code", "message", "field"}


async def no_more() -> Message:
    return {"type": "http.disconnect"}


async def to_nobody(_: Message) -> None:
    return None


async def test_idle_is_the_time_without_a_request() -> None:
    inside, leave = asyncio.Event(), asyncio.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        inside.set()
        await leave.wait()

    limits = Limits(app, Settings())
    scope: dict[str, Any] = {"type": "http", "method": "GET", "path": "/", "headers": [(b"host", b"localhost")]}
    await asyncio.sleep(0.01)
    assert limits.idle_s() > 0
    two = [asyncio.create_task(limits(scope, no_more, to_nobody)) for _ in range(2)]
    await inside.wait()
    assert limits.idle_s() == 0
    two[0].cancel()
    await asyncio.wait([two[0]])
    assert limits.idle_s() == 0, "one is still open"
    left_at_s = time.monotonic()
    leave.set()
    await two[1]
    await asyncio.sleep(0.01)
    assert 0 < limits.idle_s() <= time.monotonic() - left_at_s


async def test_the_lifespan_is_no_request() -> None:
    seen: list[str] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        seen.append(scope["type"])
        await asyncio.sleep(0.01)
        assert limits.idle_s() > 0

    limits = Limits(app, Settings())
    await limits({"type": "lifespan"}, no_more, to_nobody)
    assert seen == ["lifespan"]


def test_files_uploaded_at_once_are_bounded_and_the_next_may_come_when_one_has_ended() -> None:
    async def run() -> None:
        going_on = asyncio.Event()
        n_begun = 0

        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            nonlocal n_begun
            n_begun += 1
            await going_on.wait()
            await send({"type": "http.response.start", "status": 201, "headers": []})

        limits = Limits(app, Settings(max_body_bytes=LIMIT_BYTES), find=find)

        async def upload() -> Message:
            sent: list[Message] = []

            async def receive() -> Message:
                return {"type": "http.request", "body": b"x", "more_body": False}

            async def send(message: Message) -> None:
                sent.append(message)

            raw = [(name.encode(), value.encode()) for name, value in (*LOCAL, *JSON, ("transfer-encoding", "chunked"))]
            await limits({"type": "http", "method": "POST", "path": "/api/blobs/x", "headers": raw}, receive, send)
            return {**sent[0], "body": b"".join(message.get("body", b"") for message in sent)}

        async with asyncio.TaskGroup() as group:
            running = [group.create_task(upload()) for _ in range(MAX_UPLOADS)]
            await until(lambda: n_begun == MAX_UPLOADS)
            refused = await asyncio.wait_for(upload(), 30)
            assert refused["status"] == 429
            assert dict(refused["headers"])[b"retry-after"] == b"1"
            assert f"{MAX_UPLOADS} files are being uploaded".encode() in refused["body"]
            going_on.set()
        assert {task.result()["status"] for task in running} == {201}
        assert (await upload())["status"] == 201

    asyncio.run(run())
