"""The shapes of the answers of embeddings, reranking and the daemon's own routes, for the document alone, where
`snapshot.py` has none. A test holds each answer to its shape.

Does not: encode answers.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from localrun.snapshot import PullRow, RequestRow


class EmbeddingUsage(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens of the inputs."""

    prompt_tokens: int
    total_tokens: int


class EmbeddingRow(msgspec.Struct, frozen=True, kw_only=True):
    """One vector of length 1: numbers, or with `base64` its little-endian 32-bit floats."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class Embeddings(msgspec.Struct, frozen=True, kw_only=True):
    """One vector for each input, in order."""

    object: Literal["list"]
    data: list[EmbeddingRow]
    model: str
    usage: EmbeddingUsage


class OllamaEmbeddings(msgspec.Struct, frozen=True, kw_only=True):
    """One vector for each input, in order; durations are nanoseconds."""

    model: str
    embeddings: list[list[float]]
    total_duration: int
    load_duration: int
    prompt_eval_count: int


class LegacyEmbedding(msgspec.Struct, frozen=True, kw_only=True):
    """The prompt's vector; empty without a prompt."""

    embedding: list[float]


class RankedDocument(msgspec.Struct, frozen=True, kw_only=True):
    """The document's text, with `return_documents`."""

    text: str


class RankedRow(msgspec.Struct, frozen=True, kw_only=True):
    """A document by its place in the request, and how well it answers the query."""

    index: int
    relevance_score: float
    document: RankedDocument | msgspec.UnsetType = msgspec.UNSET


class Ranking(msgspec.Struct, frozen=True, kw_only=True):
    """The documents, best first."""

    id: str
    object: Literal["list"]
    model: str
    results: list[RankedRow]
    usage: EmbeddingUsage
    meta: dict[str, Any]


class NativeErrorBody(msgspec.Struct, frozen=True, kw_only=True):
    """`code` is stable; `field` names the field."""

    code: str
    message: str
    field: str | None


class NativeError(msgspec.Struct, frozen=True, kw_only=True):
    """An error."""

    error: NativeErrorBody


class Health(msgspec.Struct, frozen=True, kw_only=True):
    """The daemon is up."""

    status: Literal["ok"]
    version: str


class Stopping(msgspec.Struct, frozen=True, kw_only=True):
    """The daemon is about to end."""

    status: Literal["stopping"]


class Requests(msgspec.Struct, frozen=True, kw_only=True):
    """The requests that run, wait, or ended in the last minute."""

    requests: list[RequestRow]


class CancelledRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The request ends within a step."""

    id: str
    cancelled: bool


class Pulls(msgspec.Struct, frozen=True, kw_only=True):
    """The downloads that run, and those that ended lately."""

    pulls: list[PullRow]


class CancelledPull(msgspec.Struct, frozen=True, kw_only=True):
    """The download ends; what came is kept for the next one."""

    model: str
    cancelled: bool


class CatalogAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """Entries of the catalogue."""

    models: list[dict[str, Any]]


class SearchAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """What was found in the catalogue and on the hub; `problem` says why the hub did not answer."""

    catalog: list[dict[str, Any]]
    hub: list[dict[str, Any]]
    problem: str | None


class Collected(msgspec.Struct, frozen=True, kw_only=True):
    """What was deleted."""

    freed_bytes: int
    deleted: list[str]
    kept_blobs: int


class FitAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """How a model would be opened here; `problem` is the refusal that a request would get."""

    model: str
    fits: bool
    slots: int
    kv_cells: int
    kv_type: str
    context: int
    gpu_layers: int
    layers: int
    devices: list[dict[str, Any]]
    total_bytes: int
    resident_bytes: int
    process_bytes: int
    background_bytes: int
    prefix_cache_bytes: int
    idle_bytes: int
    notes: list[str]
    problem: str | None
