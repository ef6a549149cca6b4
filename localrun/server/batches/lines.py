"""The requests of a batch: what a line of the input must be, its way through its route, and a line of the results.

An input is read to its end whatever is wrong with it, so that all mistakes are told at once, the first `MAX_ERRORS` of
them. A line goes through its route without HTTP: the route's own endpoint gets the line's body, and what it would have
sent is the answer. So a line means what the same request means, and every way it can end is an answer.

Does not: know whether a model is here (`lacks` says), check what the route of a line checks, or decide when it runs.
"""

from __future__ import annotations

import asyncio
import codecs
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from starlette.types import ASGIApp, Message, Scope

from localrun.errors import BadRequest, LocalrunError
from localrun.server.batches.store import Kind, Line, Result, Usage
from localrun.server.http import failures
from localrun.server.http.access import Caller
from localrun.server.http.failures import Shape
from localrun.wire import Lane

# A line may say what any request may, except what would make it another one's guest or break its answer into pieces.
_OWN_FIELDS = ("lane", "latency", "deadline_s")


class LineResult(NamedTuple):
    """`code` is that of an error, as `X-Localrun-Error` has it."""

    status: int
    request_id: str
    code: str
    body: bytes


class _Known(msgspec.Struct):
    stream: Any = None
    lane: Any = None
    latency: Any = None
    deadline_s: Any = None


async def answer(endpoint: ASGIApp, path: str, body: bytes, *, client: str, caller: Caller) -> LineResult:
    """The answer of the route. `client` is who gets equal service, and `caller` whose request it is. Raises
    CancelledError alone."""
    try:
        _check(body)
    except BadRequest as error:
        return LineResult(error.status, "", error.code, failures.body(error, failures.shape_of(path)))
    sent: list[Message] = []
    has_body = True

    async def receive() -> Message:
        nonlocal has_body
        if has_body:
            has_body = False
            return {"type": "http.request", "body": body, "more_body": False}
        await asyncio.Event().wait()  # this client never leaves; who cancels it cancels the task
        raise AssertionError("nobody sets it")

    async def send(message: Message) -> None:
        sent.append(message)

    try:
        await endpoint({**_scope(path, len(body), client), "localrun.caller": caller}, receive, send)
    finally:
        caller.leave()
    headers = dict(sent[0]["headers"])
    return LineResult(
        status=sent[0]["status"],
        request_id=headers.get(b"x-localrun-request", b"").decode("latin-1"),
        code=headers.get(b"x-localrun-error", b"").decode("latin-1"),
        body=b"".join(message.get("body", b"") for message in sent[1:]),
    )


def _check(body: bytes) -> None:
    """Raises BadRequest for fields that have no meaning here. What is wrong besides, the route says."""
    try:
        known = msgspec.json.decode(body, type=_Known)
    except msgspec.MsgspecError:
        return
    if known.stream:
        raise BadRequest.of("stream", "the answers of a batch are whole; leave stream out")
    for name in _OWN_FIELDS:
        if getattr(known, name) not in (None, str(Lane.BATCH)):
            raise BadRequest.of(name, f"the lines of a batch run in the lane batch; leave {name} out")


def _scope(path: str, n_bytes: int, client: str) -> Scope:
    headers = {
        "content-type": "application/json",
        "content-length": str(n_bytes),
        "user-agent": "localrun-batch",
        "x-localrun-client": client,
        "x-localrun-lane": Lane.BATCH.value,
        "x-localrun-latency": "throughput",
    }
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode("ascii"),
        "query_string": b"",
        "root_path": "",
        "headers": [(name.encode("ascii"), value.encode("ascii")) for name, value in headers.items()],
        "client": None,
        "server": None,
        "path_params": {},
    }


# OpenAI's limits, and Anthropic's.
MAX_LINES = 50_000
MAX_INPUT_BYTES = 200 * 1000 * 1000
MAX_REQUESTS = 100_000
ENDPOINTS = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses")
MESSAGES = "/v1/messages"

MAX_ERRORS = 100
_MAX_ID_CHARACTERS = 512
_MAX_SHOWN = 80
CUSTOM_ID = re.compile(r"[a-zA-Z0-9_-]{1,64}", re.ASCII)

_WORDS = {Kind.CANCELED: "the batch was cancelled before this request was computed",
          Kind.EXPIRED: "this request was not computed before the batch expired"}  # fmt: skip


class _Asked(msgspec.Struct):
    """A line. Everything is checked by hand: an error names the field in OpenAI's words."""

    custom_id: Any = None
    method: Any = None
    url: Any = None
    body: msgspec.Raw = msgspec.Raw(b"null")


class _Body(msgspec.Struct):
    model: Any = None


class Checked(NamedTuple):
    """What an input was found to be: its lines in the order of running, or what is wrong with it."""

    lines: list[Line]
    model: str | None
    errors: list[dict[str, Any]]


class _Wrong(Exception):
    """What is wrong with one line."""

    def __init__(self, code: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.code, self.message, self.param = code, message, param


def check_input(path: Path, endpoint: str, *, max_line_bytes: int, lacks: Callable[[str], str | None]) -> Checked:
    """In a thread: reads an input of OpenAI's form. `lacks` is the model that is not here of those that a name stands
    for, if there is one. Raises OSError."""
    found = Checked([], None, [])
    if path.stat().st_size > MAX_INPUT_BYTES:
        return found._replace(
            errors=[error_of(None, "file_too_large", f"the file is larger than {MAX_INPUT_BYTES} bytes; split it")]
        )
    ids: set[str] = set()
    lacking: dict[str, str | None] = {}
    model: str | None = None
    offset = 0
    with path.open("rb") as file:
        number = 0
        while text := file.readline(max_line_bytes + 1):
            number += 1
            begin, offset = offset, offset + len(text)
            if number == 1 and text.startswith(codecs.BOM_UTF8):  # as Windows' editors write it
                begin, text = len(codecs.BOM_UTF8), text.removeprefix(codecs.BOM_UTF8)
            if number == 1 and text.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
                found.errors.append(error_of(None, "invalid_file_format", "the file is UTF-16; save it as UTF-8"))
                break
            if len(text) > max_line_bytes and not text.endswith(b"\n"):
                message = f"the line is longer than {max_line_bytes} bytes; LOCALRUN_MAX_BODY_BYTES sets the limit"
                found.errors.append(error_of(number, "line_too_long", message))
                break
            if not text.strip():
                continue
            try:
                line, named = _line(text, number, begin, endpoint, ids)
                if model is not None and named != model:
                    raise _Wrong(
                        "mismatched_model",
                        f"the model is {named[:_MAX_SHOWN]!r}, that of the lines before {model[:_MAX_SHOWN]!r}; a "
                        f"batch has one model",
                        "body.model",
                    )
                model = named
                if named not in lacking:
                    lacking[named] = lacks(named)
                gone = lacking[named]
                if gone is not None:
                    of_tier = f" of the tier {named[:_MAX_SHOWN]!r}" if gone != named else ""
                    raise _Wrong(
                        "model_not_found",
                        f"the model {gone[:_MAX_SHOWN]!r}{of_tier} is not here; `localrun list` shows what is",
                        "body.model",
                    )
            except _Wrong as wrong:
                found.errors.append(error_of(number, wrong.code, wrong.message, wrong.param))
            else:
                found.lines.append(line)
            if len(found.lines) > MAX_LINES:
                message = f"the file has more than {MAX_LINES} requests; split it"
                found.errors.append(error_of(number, "too_many_tasks", message))
            if len(found.errors) >= MAX_ERRORS or len(found.lines) > MAX_LINES:
                break
    if not found.lines and not found.errors:
        found.errors.append(error_of(None, "empty_file", "the file has no requests"))
    return found._replace(model=model)


def _line(text: bytes, number: int, begin: int, endpoint: str, ids: set[str]) -> tuple[Line, str]:
    """One line, and its model. Raises _Wrong."""
    try:
        asked = msgspec.json.decode(text, type=_Asked)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise _Wrong("invalid_json_line", f"this line is not a JSON object: {str(error)[:200]}") from None
    for name in ("custom_id", "method", "url", "body"):
        if getattr(asked, name) in (None, msgspec.Raw(b"null")):
            raise _Wrong("missing_required_parameter", f"{name} is required", name)
    custom_id = asked.custom_id
    if not isinstance(custom_id, str) or not 0 < len(custom_id) <= _MAX_ID_CHARACTERS:
        raise _Wrong("invalid_custom_id", f"custom_id: use a text of 1 to {_MAX_ID_CHARACTERS} characters", "custom_id")
    if custom_id in ids:
        raise _Wrong(
            "duplicate_custom_id", f"custom_id: an earlier line has {custom_id[:_MAX_SHOWN]!r}, too", "custom_id"
        )
    if asked.method != "POST":
        raise _Wrong("invalid_method", f"method: {str(asked.method)[:_MAX_SHOWN]!r} is not POST", "method")
    if asked.url != endpoint:
        raise _Wrong(
            "invalid_url", f"url: {str(asked.url)[:_MAX_SHOWN]!r} is not the endpoint of the batch, {endpoint}", "url"
        )
    try:
        model = msgspec.json.decode(asked.body, type=_Body).model
    except msgspec.MsgspecError:
        raise _Wrong("invalid_request", "body: expected an object", "body") from None
    if not isinstance(model, str) or not model:
        raise _Wrong("missing_required_parameter", "body.model is required", "body.model")
    ids.add(custom_id)
    return Line(number, number, custom_id, model, begin, len(text)), model


def error_of(line: int | None, code: str, message: str, param: str | None = None) -> dict[str, Any]:
    """What is wrong with a line, or with all of the input."""
    return {"code": code, "message": message, "param": param, "line": line}


class AskedMessage(msgspec.Struct, frozen=True, kw_only=True):
    """One of `requests` of Anthropic's batches. `params` is the body of a message."""

    custom_id: str
    params: msgspec.Raw


def check_requests(asked: Sequence[AskedMessage]) -> tuple[list[Line], bytes]:
    """The lines of Anthropic's batch in the order of running, one model after the other, and the blob that they are in.
    Raises BadRequest naming the request."""
    ids: set[str] = set()
    lines: list[Line] = []
    texts: list[bytes] = []
    offset = 0
    for index, one in enumerate(asked):
        where = f"requests[{index}]"
        if not CUSTOM_ID.fullmatch(one.custom_id):
            raise BadRequest.of(f"{where}.custom_id", "use 1 to 64 letters, digits, hyphens and underscores")
        if one.custom_id in ids:
            raise BadRequest.of(f"{where}.custom_id", f"{one.custom_id!r} is that of a request before")
        ids.add(one.custom_id)
        try:
            model = msgspec.json.decode(one.params, type=_Body).model
        except msgspec.MsgspecError:
            raise BadRequest.of(f"{where}.params", "expected an object") from None
        if not isinstance(model, str) or not model:
            raise BadRequest(f"{where}.params.model is required", field=f"{where}.params.model")
        text = bytes(one.params) + b"\n"
        texts.append(text)
        lines.append(Line(0, index + 1, one.custom_id, model, offset, len(text)))
        offset += len(text)
    lines.sort(key=lambda line: line.model)
    return [line._replace(place=place) for place, line in enumerate(lines, 1)], b"".join(texts)


def body_of(text: bytes, endpoint: str) -> bytes:
    if endpoint == MESSAGES:
        return text
    return bytes(msgspec.json.decode(text, type=_Asked).body)


# --- results ---


def openai_line(line: Line, answered: LineResult, batch_id: str) -> bytes:
    """The line of a computed request in the output file, or the error file."""
    response = {"status_code": answered.status, "request_id": answered.request_id, "body": msgspec.Raw(answered.body)}
    return _encoded({
        "id": _request_id(batch_id, line.line), "custom_id": line.custom_id, "response": response, "error": None,
    })  # fmt: skip


def anthropic_line(line: Line, answered: LineResult) -> bytes:
    """The line of a computed request in the results."""
    body = msgspec.Raw(answered.body)
    result = {"type": "succeeded", "message": body} if answered.status < 400 else {"type": "errored", "error": body}
    return _encoded({"custom_id": line.custom_id, "result": result})


def unanswered(result: Result, batch_id: str, *, is_anthropic: bool) -> bytes:
    """The line of a request that was not computed."""
    word = result.kind.name.lower()
    if is_anthropic:
        return _encoded({"custom_id": result.custom_id, "result": {"type": word}})
    code = "batch_expired" if result.kind is Kind.EXPIRED else "batch_cancelled"
    return _encoded({
        "id": _request_id(batch_id, result.line), "custom_id": result.custom_id, "response": None,
        "error": {"code": code, "message": _WORDS[result.kind]},
    })  # fmt: skip


def refused(error: LocalrunError, *, is_anthropic: bool) -> LineResult:
    """The answer of a line that never came to its route."""
    shape = Shape.ANTHROPIC if is_anthropic else Shape.OPENAI
    return LineResult(error.status, "", error.code, failures.body(error, shape))


def message_of(body: bytes) -> str:
    """What an answer with an error says."""
    return str(msgspec.json.decode(body)["error"]["message"])


def _request_id(batch_id: str, line: int) -> str:
    return f"batch_req_{batch_id.removeprefix('batch_')}_{line}"


def _encoded(value: dict[str, Any]) -> bytes:
    return msgspec.json.encode(value) + b"\n"


class _Answer(msgspec.Struct):
    usage: dict[str, Any] | None = None


def usage_of(body: bytes) -> Usage:
    """What an answer says that it used; nothing for errors."""
    try:
        counts = msgspec.json.decode(body, type=_Answer).usage or {}
    except msgspec.MsgspecError:
        return Usage()
    # By the words of all APIs, of which an answer has one's.
    read = counts.get("prompt_tokens_details") or counts.get("input_tokens_details") or {}
    said = counts.get("completion_tokens_details") or counts.get("output_tokens_details") or {}
    return Usage(
        n_input=_sum(counts, "prompt_tokens", "input_tokens", "cache_read_input_tokens"),
        n_cached=_sum(read, "cached_tokens") + _sum(counts, "cache_read_input_tokens"),
        n_output=_sum(counts, "completion_tokens", "output_tokens"),
        n_thinking=_sum(said, "reasoning_tokens", "thinking_tokens"),
    )


def _sum(counts: dict[str, Any], *names: str) -> int:
    return sum(counts.get(name) or 0 for name in names)
