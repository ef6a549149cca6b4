"""The routes of files and batches: OpenAI's `/v1/files` and `/v1/batches`, and Anthropic's `/v1/messages/batches`.

Files are kept for batches above all: every purpose of OpenAI's is taken, and nothing here reads another one's. A
completion window may be any from a second to 30 days; OpenAI has `24h` alone.

Anthropic's requests come in one body, as large as a body may be (`max_body_bytes`). Results are kept for 29 days from
the batch's making, as Anthropic keeps them, or until it is deleted.
"""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from localrun.errors import BadRequest, NotFound
from localrun.server.batches.files import MAX_FORM_BYTES, Upload
from localrun.server.batches.lines import ENDPOINTS, MAX_REQUESTS, AskedMessage
from localrun.server.batches.service import INPUTS_KEPT_S
from localrun.server.batches.store import Api, Batch, StoredFile, new_id
from localrun.server.http.exchange import Exchange, parameter, whole_number
from localrun.server.openai.responses.create import Metadata, TokenUsage
from localrun.server.runtime import Runtime

PURPOSES = ("assistants", "batch", "fine-tune", "vision", "user_data", "evals")
MAX_FILES = 10_000
MAX_BATCHES = 100
MAX_MESSAGE_BATCHES = 1000
_BATCHES = 20
_WINDOW = re.compile(r"([0-9]{1,7})(s|m|h|d)", re.ASCII)
_UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
_LONGEST_S = 30 * 86_400
_SHORTEST_EXPIRY_S = 3600


class FileObject(msgspec.Struct, frozen=True, kw_only=True):
    """A file. `status` is always `processed`: OpenAI's clients wait for it."""

    id: str
    object: Literal["file"]
    bytes: int
    created_at: int
    expires_at: int | None
    filename: str
    purpose: str
    status: Literal["processed"]
    status_details: None = None


class Page(msgspec.Struct, frozen=True, kw_only=True):
    """A part of a list."""

    object: Literal["list"]
    first_id: str | None
    last_id: str | None
    has_more: bool


class Files(Page, frozen=True, kw_only=True):
    """A page of files."""

    data: list[FileObject]


class FileDeleted(msgspec.Struct, frozen=True, kw_only=True):
    """The file is gone."""

    id: str
    object: Literal["file"]
    deleted: bool


class BatchError(msgspec.Struct, frozen=True, kw_only=True):
    """What is wrong with the input; `line` counts from 1."""

    code: str
    message: str
    param: str | None
    line: int | None


class BatchErrors(msgspec.Struct, frozen=True, kw_only=True):
    """What is wrong with the input, the first hundred of it."""

    object: Literal["list"]
    data: list[BatchError]


class RequestCounts(msgspec.Struct, frozen=True, kw_only=True):
    """Lines of a batch. Those that were cancelled or expired are neither completed nor failed."""

    total: int
    completed: int
    failed: int


class BatchObject(msgspec.Struct, frozen=True, kw_only=True):
    """A batch. Times are seconds since 1970."""

    id: str
    object: Literal["batch"]
    endpoint: str
    model: str | None
    errors: BatchErrors | None
    input_file_id: str
    completion_window: str
    status: str
    output_file_id: str | None
    error_file_id: str | None
    created_at: int
    in_progress_at: int | None
    expires_at: int
    finalizing_at: int | None
    completed_at: int | None
    failed_at: int | None
    expired_at: int | None
    cancelling_at: int | None
    cancelled_at: int | None
    request_counts: RequestCounts
    usage: TokenUsage
    metadata: dict[str, str] | None


class Batches(Page, frozen=True, kw_only=True):
    """A page of batches, newest first."""

    data: list[BatchObject]


class ExpiresAfter(msgspec.Struct, frozen=True, kw_only=True):
    """`output_expires_after`."""

    anchor: Literal["created_at"]
    seconds: Annotated[int, Meta(ge=_SHORTEST_EXPIRY_S, le=_LONGEST_S)]


class BatchBody(msgspec.Struct, frozen=True, kw_only=True):
    """POST /v1/batches."""

    input_file_id: str
    endpoint: str
    completion_window: str
    metadata: Metadata | None = None
    output_expires_after: ExpiresAfter | None = None


# --- files ---


async def upload(runtime: Runtime, exchange: Exchange) -> None:
    batch_service, owner = runtime.batch_service, exchange.caller.id
    file_id = new_id("file-")
    await batch_service.ask(
        lambda store: store.batches("", Api.OPENAI, after="", limit=1)
    )  # the folder is this daemon's
    most_bytes = exchange.caller.storage_bytes
    least_bytes = max(1, exchange.announced_bytes - MAX_FORM_BYTES)
    await batch_service.ask(lambda store: store.check_storage(owner, least_bytes, most_bytes))
    await asyncio.to_thread(batch_service.blobs.check_room, exchange.announced_bytes)
    with Upload(batch_service.blobs, file_id, exchange.header(b"content-type")) as form:
        async for piece in exchange.large_pieces():
            await asyncio.to_thread(form.write, piece)
        purpose = form.fields.get("purpose", "")
        if purpose not in PURPOSES:
            raise BadRequest.of("purpose", f"{purpose[:40]!r} is not known; use {', '.join(PURPOSES)}")
        now = int(time.time())
        expires_s = _expires_s(form) or (INPUTS_KEPT_S if purpose == "batch" else None)
        await asyncio.to_thread(form.finish)
        file = StoredFile(
            id=file_id, owner=owner, filename=form.filename, purpose=purpose, size_bytes=form.size_bytes,
            created_at=now, expires_at=now + expires_s if expires_s else None,
        )  # fmt: skip
        try:
            await batch_service.ask(lambda store: store.add_file(file, most_bytes))
        except BaseException:
            batch_service.blobs.delete([file_id])
            raise
    await exchange.answer_json(_file(file))


def _expires_s(form: Upload) -> int | None:
    anchor, seconds = form.fields.get("expires_after[anchor]"), form.fields.get("expires_after[seconds]")
    if anchor is None and seconds is None:
        return None
    if anchor != "created_at":
        raise BadRequest.of("expires_after[anchor]", "use created_at")
    if not (seconds or "").isdecimal() or not _SHORTEST_EXPIRY_S <= int(seconds or "") <= _LONGEST_S:
        raise BadRequest.of("expires_after[seconds]", f"use {_SHORTEST_EXPIRY_S} to {_LONGEST_S}")
    return int(seconds or "")


async def list_files(runtime: Runtime, exchange: Exchange) -> None:
    limit = whole_number(exchange, "limit", default=MAX_FILES, most=MAX_FILES)
    order = parameter(exchange, "order") or "desc"
    if order not in ("asc", "desc"):
        raise BadRequest.of("order", f"{order[:40]!r} is not an order; use asc or desc")
    page = await runtime.batch_service.ask(
        lambda store: store.files(
            exchange.caller.id,
            purpose=parameter(exchange, "purpose"),
            after=parameter(exchange, "after"),
            limit=limit,
            is_ascending=order == "asc",
        )
    )
    rows = [_file(file) for file in page.rows]
    await exchange.answer_json(Files(object="list", data=rows, has_more=page.has_more, **_ends_of(rows)))


async def one_file(runtime: Runtime, exchange: Exchange) -> None:
    await exchange.answer_json(_file(await _named_file(runtime, exchange)))


async def file_content(runtime: Runtime, exchange: Exchange) -> None:
    file = await _named_file(runtime, exchange)
    n_bytes, pieces = await runtime.batch_service.blobs.pieces(file.id)
    await exchange.answer_in_pieces(n_bytes, pieces, [(b"content-type", b"application/octet-stream")])


async def delete_file(runtime: Runtime, exchange: Exchange) -> None:
    file = await _named_file(runtime, exchange)
    await runtime.batch_service.delete_file(file.id, file.owner)
    await exchange.answer_json(FileDeleted(id=file.id, object="file", deleted=True))


async def _named_file(runtime: Runtime, exchange: Exchange) -> StoredFile:
    return await runtime.batch_service.ask(lambda store: store.file(exchange.path_id, exchange.caller.id))


def _file(file: StoredFile) -> FileObject:
    return FileObject(
        id=file.id, object="file", bytes=file.size_bytes, created_at=file.created_at, expires_at=file.expires_at,
        filename=file.filename, purpose=file.purpose, status="processed",
    )  # fmt: skip


# --- batches ---


async def create(runtime: Runtime, exchange: Exchange) -> None:
    body = await exchange.read_json(BatchBody)
    if body.endpoint not in ENDPOINTS:
        raise BadRequest.of("endpoint", f"{body.endpoint[:80]!r} has no batches; use {', '.join(ENDPOINTS)}")
    window_s = _window_s(body.completion_window)
    file = await runtime.batch_service.ask(lambda store: store.file(body.input_file_id, exchange.caller.id))
    if file.purpose != "batch":
        raise BadRequest.of(
            "input_file_id", f"the purpose of '{file.id}' is {file.purpose}; upload it with the purpose batch"
        )
    batch = await runtime.batch_service.create(
        file,
        endpoint=body.endpoint,
        window=body.completion_window,
        window_s=window_s,
        metadata=None if body.metadata is None else json.dumps(body.metadata),
        output_expires_s=body.output_expires_after.seconds if body.output_expires_after else None,
        most_bytes=exchange.caller.storage_bytes,
    )
    await exchange.answer_json(_batch(batch))


def _window_s(text: str) -> float:
    match = _WINDOW.fullmatch(text)
    seconds = int(match[1]) * _UNITS_S[match[2]] if match else 0
    if not 1 <= seconds <= _LONGEST_S:
        raise BadRequest.of(
            "completion_window", f"{text[:40]!r} cannot be used; write a time from 1s to 30d, such as 30m, 12h or 7d"
        )
    return float(seconds)


async def list_batches(runtime: Runtime, exchange: Exchange) -> None:
    limit = whole_number(exchange, "limit", default=_BATCHES, most=MAX_BATCHES)
    page = await runtime.batch_service.ask(
        lambda store: store.batches(exchange.caller.id, Api.OPENAI, after=parameter(exchange, "after"), limit=limit)
    )
    rows = [_batch(batch) for batch in page.rows]
    await exchange.answer_json(Batches(object="list", data=rows, has_more=page.has_more, **_ends_of(rows)))


async def one_batch(runtime: Runtime, exchange: Exchange) -> None:
    batch = await runtime.batch_service.ask(lambda store: store.batch(exchange.path_id, exchange.caller.id, Api.OPENAI))
    await exchange.answer_json(_batch(batch))


async def cancel(runtime: Runtime, exchange: Exchange) -> None:
    await exchange.answer_json(
        _batch(await runtime.batch_service.cancel(exchange.path_id, exchange.caller.id, Api.OPENAI))
    )


_SAME = ("id", "endpoint", "model", "input_file_id", "completion_window", "status", "output_file_id", "error_file_id")
_TIMES = tuple(name for name in BatchObject.__struct_fields__ if name.endswith("_at"))


def _batch(batch: Batch) -> BatchObject:
    errors: list[dict[str, Any]] = json.loads(batch.errors) if batch.errors else []
    kept: dict[str, Any] = {name: getattr(batch, name) for name in (*_SAME, *_TIMES)}
    kept |= {name: int(kept[name]) for name in _TIMES if kept[name] is not None}
    return BatchObject(
        object="batch",
        **kept,
        errors=BatchErrors(object="list", data=[BatchError(**one) for one in errors]) if errors else None,
        request_counts=RequestCounts(total=batch.n_lines, completed=batch.n_succeeded, failed=batch.n_errored),
        usage=TokenUsage(
            input_tokens=batch.n_input_tokens,
            input_tokens_details={"cached_tokens": batch.n_cached_tokens},
            output_tokens=batch.n_output_tokens,
            output_tokens_details={"reasoning_tokens": batch.n_thinking_tokens},
            total_tokens=batch.n_input_tokens + batch.n_output_tokens,
        ),
        metadata=json.loads(batch.metadata) if batch.metadata else None,
    )


# --- Anthropic's batches ---


class MessageBatchesBody(msgspec.Struct, frozen=True, kw_only=True):
    """POST /v1/messages/batches."""

    requests: Annotated[list[AskedMessage], Meta(min_length=1, max_length=MAX_REQUESTS)]


class MessageCounts(msgspec.Struct, frozen=True, kw_only=True):
    """Requests of a batch. All count as `processing` until it has ended."""

    processing: int
    succeeded: int
    errored: int
    canceled: int
    expired: int


class MessageBatch(msgspec.Struct, frozen=True, kw_only=True):
    """A batch of messages."""

    id: str
    type: Literal["message_batch"]
    processing_status: Literal["in_progress", "canceling", "ended"]
    request_counts: MessageCounts
    created_at: str
    expires_at: str
    ended_at: str | None
    cancel_initiated_at: str | None
    archived_at: str | None
    results_url: str | None


class MessageBatches(msgspec.Struct, frozen=True, kw_only=True):
    """A page of batches, newest first."""

    data: list[MessageBatch]
    has_more: bool
    first_id: str | None
    last_id: str | None


class MessageBatchDeleted(msgspec.Struct, frozen=True, kw_only=True):
    """The batch is gone, with its results."""

    id: str
    type: Literal["message_batch_deleted"]


class MessageBatchResult(msgspec.Struct, frozen=True, kw_only=True):
    """A line of the results. `result` has a `type` (succeeded, errored, canceled, expired), and by it the `message` or
    the `error`."""

    custom_id: str
    result: dict[str, Any]


async def create_messages(runtime: Runtime, exchange: Exchange) -> None:
    body = await exchange.read_json(MessageBatchesBody)
    batch = await runtime.batch_service.create_messages(
        body.requests, exchange.caller.id, exchange.caller.storage_bytes
    )
    await exchange.answer_json(_message_batch(batch, exchange))


async def list_message_batches(runtime: Runtime, exchange: Exchange) -> None:
    limit = whole_number(exchange, "limit", default=_BATCHES, most=MAX_MESSAGE_BATCHES)
    before, after = parameter(exchange, "before_id"), parameter(exchange, "after_id")
    if before and after:
        raise BadRequest.of("before_id", "not together with after_id; send one of them")
    page = await runtime.batch_service.ask(
        lambda store: store.batches(
            exchange.caller.id, Api.ANTHROPIC, after=before or after, limit=limit, is_ascending=bool(before)
        )
    )
    rows = [_message_batch(batch, exchange) for batch in (reversed(page.rows) if before else page.rows)]
    await exchange.answer_json(MessageBatches(data=rows, has_more=page.has_more, **_ends_of(rows)))


async def one_message_batch(runtime: Runtime, exchange: Exchange) -> None:
    await exchange.answer_json(_message_batch(await _named_messages(runtime, exchange), exchange))


async def message_results(runtime: Runtime, exchange: Exchange) -> None:
    batch = await _named_messages(runtime, exchange)
    if batch.archived_at is not None:
        raise NotFound(f"the results of '{batch.id}' were kept for 29 days, and are gone", field="id")
    if not batch.has_ended or batch.output_file_id is None:
        raise NotFound(f"batch '{batch.id}' has no results yet; wait until its processing_status is ended", field="id")
    n_bytes, pieces = await runtime.batch_service.blobs.pieces(batch.output_file_id)
    await exchange.answer_in_pieces(n_bytes, pieces, [(b"content-type", b"application/x-jsonl")])


async def cancel_messages(runtime: Runtime, exchange: Exchange) -> None:
    batch = await runtime.batch_service.cancel(exchange.path_id, exchange.caller.id, Api.ANTHROPIC)
    await exchange.answer_json(_message_batch(batch, exchange))


async def delete_messages(runtime: Runtime, exchange: Exchange) -> None:
    await runtime.batch_service.delete_batch(exchange.path_id, exchange.caller.id, Api.ANTHROPIC)
    await exchange.answer_json(MessageBatchDeleted(id=exchange.path_id, type="message_batch_deleted"))


async def _named_messages(runtime: Runtime, exchange: Exchange) -> Batch:
    return await runtime.batch_service.ask(
        lambda store: store.batch(exchange.path_id, exchange.caller.id, Api.ANTHROPIC)
    )


def _message_batch(batch: Batch, exchange: Exchange) -> MessageBatch:
    has_ended = batch.has_ended
    ended_at = batch.completed_at or batch.cancelled_at or batch.expired_at
    at = f"{exchange.scope['scheme']}://{exchange.header(b'host')}"  # clients send their key there
    return MessageBatch(
        id=batch.id,
        type="message_batch",
        processing_status="ended" if has_ended else "in_progress" if batch.cancelling_at is None else "canceling",
        request_counts=MessageCounts(
            processing=0 if has_ended else batch.n_lines,
            succeeded=batch.n_succeeded if has_ended else 0,
            errored=batch.n_errored if has_ended else 0,
            canceled=batch.n_canceled if has_ended else 0,
            expired=batch.n_expired if has_ended else 0,
        ),
        created_at=_time(batch.created_at),
        expires_at=_time(batch.expires_at),
        ended_at=_time(ended_at) if has_ended and ended_at is not None else None,
        cancel_initiated_at=_time(batch.cancelling_at) if batch.cancelling_at is not None else None,
        archived_at=_time(batch.archived_at) if batch.archived_at is not None else None,
        results_url=f"{at}/v1/messages/batches/{batch.id}/results" if has_ended and batch.archived_at is None else None,
    )


def _time(seconds: float) -> str:
    """RFC 3339."""
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")


def _ends_of(rows: Sequence[Any]) -> dict[str, Any]:
    """The ids of a page's first and last row."""
    return {"first_id": rows[0].id if rows else None, "last_id": rows[-1].id if rows else None}
