"""One method of one path, as the document has it.

Pure data. Does not: serve anything; a test compares the operations with the routes of the app.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

NDJSON = "application/x-ndjson"
SSE = "text/event-stream"
JSON = "application/json"


class Family(StrEnum):
    """An API; the order is that of the page. The value is its name for people."""

    OLLAMA = "Ollama"
    OPENAI = "OpenAI"
    ANTHROPIC = "Anthropic"
    EMBEDDING = "Embeddings and reranking"
    NATIVE = "localrun"


@dataclass(frozen=True, kw_only=True)
class Parameter:
    """Of the path, the query or the headers. `schema` is JSON schema."""

    name: str
    place: str = "query"
    schema: Mapping[str, Any] = field(default_factory=lambda: {"type": "string"})
    description: str = ""
    is_required: bool = False


@dataclass(frozen=True, kw_only=True)
class Stream:
    """An answer that comes in pieces. `item` is the type of one line of NDJSON, or of one event's data."""

    content_type: str
    item: Any
    description: str


@dataclass(frozen=True, kw_only=True)
class Operation:
    """`body` and `answer` are types that msgspec can describe. A route that can do both has `answer` and `stream`.

    `errors` are the statuses that it may have besides those of every route. `serves` says that the request waits for a
    model, and so takes the headers of lanes and deadlines.
    """

    family: Family
    method: str
    path: str
    summary: str
    description: str = ""
    parameters: tuple[Parameter, ...] = ()
    body: Any = None
    body_content_type: str = JSON
    is_body_required: bool = True
    answer: Any = None
    answer_content_type: str = JSON
    stream: Stream | None = None
    status: int = 200
    other_statuses: tuple[int, ...] = ()
    errors: tuple[int, ...] = ()
    serves: bool = False
    example: Mapping[str, Any] | None = None

    @property
    def id(self) -> str:
        """Unique, and the anchor on the page."""
        words = [part for part in self.path.replace("{", "").replace("}", "").split("/") if part]
        return "-".join([self.method.lower(), *words]).replace(".", "-") or self.method.lower()


def path_parameter(name: str, description: str, **schema: Any) -> Parameter:
    """A part of the path."""
    return Parameter(
        name=name, place="path", schema={"type": "string", "minLength": 1} | schema, description=description,
        is_required=True,
    )  # fmt: skip
