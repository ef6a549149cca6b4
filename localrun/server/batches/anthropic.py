"""Anthropic's `/v1/messages/batches`.

The requests come in one body, as large as a body may be (`max_body_bytes`). Results are kept for 29 days from the
batch's making, as Anthropic keeps them, or until it is deleted.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from localrun.errors import BadRequest, NotFound
from localrun.server.batches.lines import MAX_REQUESTS, AskedMessage
from localrun.server.batches.openai import ends_of
from localrun.server.batches.store import Api, Batch
from localrun.server.http.exchange import Exchange, parameter, whole_number
from localrun.server.runtime import Runtime

MAX_BATCHES = 1000
_BATCHES = 20


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


async def create(runtime: Runtime, exchange: Exchange) -> None:
    body = await exchange.read_json(MessageBatchesBody)
    batch = await runtime.batch_service.create_messages(
        body.requests, exchange.caller.id, exchange.caller.storage_bytes
    )
    await exchange.answer_json(_shown(batch, exchange))


async def list_batches(runtime: Runtime, exchange: Exchange) -> None:
    limit = whole_number(exchange, "limit", default=_BATCHES, most=MAX_BATCHES)
    before, after = parameter(exchange, "before_id"), parameter(exchange, "after_id")
    if before and after:
        raise BadRequest.of("before_id", "not together with after_id; send one of them")
    page = await runtime.batch_service.ask(
        lambda store: store.batches(
            exchange.caller.id, Api.ANTHROPIC, after=before or after, limit=limit, is_ascending=bool(before)
        )
    )
    rows = [_shown(batch, exchange) for batch in (reversed(page.rows) if before else page.rows)]
    await exchange.answer_json(MessageBatches(data=rows, has_more=page.has_more, **ends_of(rows)))


async def one_batch(runtime: Runtime, exchange: Exchange) -> None:
    await exchange.answer_json(_shown(await _named(runtime, exchange), exchange))


async def results(runtime: Runtime, exchange: Exchange) -> None:
    batch = await _named(runtime, exchange)
    if batch.archived_at is not None:
        raise NotFound(f"the results of '{batch.id}' were kept for 29 days, and are gone", field="id")
    if not batch.has_ended or batch.output_file_id is None:
        raise NotFound(f"batch '{batch.id}' has no results yet; wait until its processing_status is ended", field="id")
    n_bytes, pieces = await runtime.batch_service.blobs.pieces(batch.output_file_id)
    await exchange.answer_in_pieces(n_bytes, pieces, [(b"content-type", b"application/x-jsonl")])


async def cancel(runtime: Runtime, exchange: Exchange) -> None:
    batch = await runtime.batch_service.cancel(exchange.path_id, exchange.caller.id, Api.ANTHROPIC)
    await exchange.answer_json(_shown(batch, exchange))


async def delete(runtime: Runtime, exchange: Exchange) -> None:
    await runtime.batch_service.delete_batch(exchange.path_id, exchange.caller.id, Api.ANTHROPIC)
    await exchange.answer_json(MessageBatchDeleted(id=exchange.path_id, type="message_batch_deleted"))


async def _named(runtime: Runtime, exchange: Exchange) -> Batch:
    return await runtime.batch_service.ask(
        lambda store: store.batch(exchange.path_id, exchange.caller.id, Api.ANTHROPIC)
    )


def _shown(batch: Batch, exchange: Exchange) -> MessageBatch:
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
