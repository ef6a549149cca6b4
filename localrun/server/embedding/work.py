"""One embedding or reranking request, from the checked inputs to all of its results, and vectors as JSON.

Pictures and sound of inputs go the way of those in chats (`media/`).

Runs in the task of the request. The engine computes in batches with whatever else is there; here the results are put
back into order. A list of a thousand vectors of a thousand numbers is 20 MB of text and takes half a second to write,
so it is written in parts, and other requests have their turn in between.
Does not: parse bodies, or write an API's answer.
"""

from __future__ import annotations

import asyncio
import base64
import sys
from array import array
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from localrun.errors import BadRequest, Cancelled
from localrun.server import streaming
from localrun.server.embedding.bodies import Input
from localrun.server.engines.resident import Use
from localrun.server.http.exchange import Exchange
from localrun.server.http.failures import Headers
from localrun.server.http.fields import ServiceFields
from localrun.server.jobs.job import Job
from localrun.server.prompting.ask import Attached, ChatRequest
from localrun.server.prompting.prepare import prepare
from localrun.server.prompting.segments import placed, segments_of
from localrun.server.routing import RoutingInput
from localrun.server.runtime import Runtime
from localrun.wire import Finish, Media, Mixed, Segment, Vector

# About a millisecond of work.
_NUMBERS_PER_TURN = 16_384
_BYTES_PER_NUMBER = 4

_encoder = msgspec.json.Encoder()


def vector_values(vector: Vector) -> list[float]:
    """Its numbers."""
    numbers = array("f", vector.values)
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers.tolist()


def base64_json(vector: Vector) -> bytes:
    """As OpenAI's `encoding_format` base64: the little-endian float32 bytes, in quotes."""
    return b'"' + base64.b64encode(vector.values) + b'"'


async def lists_json(vectors: Sequence[Vector]) -> list[bytes]:
    lists, n_since = [], 0
    for vector in vectors:
        lists.append(_encoder.encode(vector_values(vector)))
        n_since += len(vector.values) // _BYTES_PER_NUMBER
        if n_since >= _NUMBERS_PER_TURN:
            n_since = 0
            await asyncio.sleep(0)
    return lists


@dataclass(frozen=True, kw_only=True)
class Work:
    """What is wanted. With `query`, the inputs are documents to be scored. Markers in the inputs stand for `media`. A
    `chat` is the only input. `needs_name` is of APIs that have no requests without a model's name."""

    inputs: Sequence[Input] = ()
    media: Sequence[Attached] = ()
    chat: ChatRequest | None = None
    query: str | None = None
    truncate: bool = False
    dimensions: int = 0
    fields: ServiceFields
    needs_name: bool = False


class Results(NamedTuple):
    """One vector for each input, in order."""

    vectors: list[Vector]

    @property
    def n_tokens(self) -> int:
        return sum(vector.n_tokens for vector in self.vectors)

    @property
    def n_cut(self) -> int:
        """Tokens that were left out of inputs that were too long."""
        return sum(vector.n_cut for vector in self.vectors)


@asynccontextmanager
async def done(runtime: Runtime, exchange: Exchange, work: Work) -> AsyncIterator[tuple[Job, Results]]:
    """The job and its results, while the model is held and the client is there.

    Raises BadRequest for a model of another kind, for `dimensions` that it does not have and for media that it does not
    take, ContextExceeded for an input that is too long, and what loading and the engine raise.
    """
    use = Use.EMBED if work.query is None else Use.RERANK
    question = RoutingInput(ask=ChatRequest(messages=(), media=tuple(work.media)))
    entered = streaming.entered(runtime, exchange, work.fields, question, use=use, needs_name=work.needs_name)
    async with entered as (_, _, [job]):
        if work.dimensions > job.n_embd:
            raise BadRequest(
                f"dimensions: the vectors of this model have {job.n_embd} numbers, {work.dimensions} is more; ask for "
                f"fewer or leave it out",
                field="dimensions",
            )
        vectors: list[Vector] = []
        if inputs := await _inputs(runtime, job, work):
            await job.embed(inputs, query=work.query, truncate=work.truncate, dimensions=work.dimensions)
            async for delta in job:
                vectors += delta.vectors or ()
                if delta.finish is Finish.CANCELLED:
                    raise Cancelled("the request was cancelled")
        vectors.sort(key=lambda vector: vector.index)
        yield job, Results(vectors)


async def _inputs(runtime: Runtime, job: Job, work: Work) -> Sequence[str | tuple[int, ...] | Mixed]:
    """As the engine takes them: a conversation by the model's template, and media in the places of their markers."""
    if work.chat is not None:
        return [Mixed((await prepare(runtime, job, work.chat)).segments)]
    decoded = await runtime.media.attach(job, work.media) if work.media else {}
    return [_in_segments(one, work.media, decoded, job.n_vocab) for one in work.inputs]


def _in_segments(
    one: Input, media: Sequence[Attached], decoded: Mapping[str, Media], n_vocab: int
) -> str | tuple[int, ...] | Mixed:
    """An input of more than one kind in segments, others as they are."""
    if isinstance(one, tuple):
        ids = tuple(item for item in one if isinstance(item, int))
        return ids if len(ids) == len(one) else Mixed(segments_of(one, n_vocab, field="input"))
    own = [attached for attached in media if attached.marker in one]
    return Mixed(placed([Segment(one)], own, decoded, ())) if own else one


def headers(job: Job, results: Results) -> Headers:
    """The request's id, and how many tokens were cut, if any."""
    found = [(b"x-localrun-request", job.id.encode("ascii"))]
    if results.n_cut:
        found.append((b"x-localrun-truncated", str(results.n_cut).encode("ascii")))
    return found
