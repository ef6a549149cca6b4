"""One method of one path: who answers it, who may, and what the document tells of it; and the headers of every route
that waits for a model.

Pure data. `fields.py` reads the headers of requests. The operations themselves are in `openapi/operations.py`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import KW_ONLY, dataclass, field
from enum import StrEnum
from functools import partial
from typing import TYPE_CHECKING, Any

from starlette.routing import Route

from localrun.server.http.access import Right
from localrun.server.http.exchange import Endpoint, Exchange
from localrun.server.http.fields import MAX_CLIENT_CHARACTERS, MAX_DEADLINE_S
from localrun.wire import Lane

if TYPE_CHECKING:
    from localrun.server.runtime import Runtime

Handler = Callable[["Runtime", Exchange], Awaitable[None]]

NDJSON = "application/x-ndjson"
SSE = "text/event-stream"
JSON = "application/json"


class Family(StrEnum):
    """An API; the order is that of the page. The value is its name for people."""

    OLLAMA = "Ollama"
    OPENAI = "OpenAI"
    ANTHROPIC = "Anthropic"
    LLAMA_SERVER = "llama-server"
    LM_STUDIO = "LM Studio"
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


@dataclass(frozen=True)
class Operation:
    """`body` and `answer` are types that msgspec can describe; `bytes` as a body is a file. A route that can do both
    has `answer` and `stream`. No pictures or sound can be in the body of one that `is_text`. With `has_slashes` the
    part of the path may have some.

    `errors` are the statuses that it may have besides those of every route. `serves` says that the request waits for a
    model, and so takes the headers of lanes and deadlines.
    """

    method: str
    path: str
    handler: Handler
    right: Right
    summary: str
    _: KW_ONLY
    family: Family = Family.NATIVE
    description: str = ""
    parameters: tuple[Parameter, ...] = ()
    body: Any = None
    body_content_type: str = JSON
    is_text: bool = False
    has_slashes: bool = False
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

    @property
    def pattern(self) -> str:
        """The path as the router has it."""
        return self.path.replace("}", ":path}") if self.has_slashes else self.path

    def route(self, runtime: Runtime) -> Route:
        """GET includes HEAD."""
        is_strict = runtime.settings.strict_schemas == "on"
        endpoint = Endpoint(partial(self.handler, runtime), self.pattern, strict_schemas=is_strict)
        return Route(self.pattern, endpoint, methods=[self.method])


# The operation of a method and a path; None where no route answers.
Find = Callable[[str, str], Operation | None]


def path_parameter(name: str, description: str, **schema: Any) -> Parameter:
    """A part of the path."""
    return Parameter(
        name=name, place="path", schema={"type": "string", "minLength": 1} | schema, description=description,
        is_required=True,
    )  # fmt: skip


def _header(name: str, description: str, **schema: Any) -> Parameter:
    return Parameter(name=name, place="header", schema={"type": "string"} | schema, description=description)


REQUEST_HEADERS = (
    _header("X-Localrun-Lane", "Who goes first where slots are short. The field `lane` says the same.",
            enum=[str(lane) for lane in Lane]),
    _header("X-Localrun-Latency", "How long prompts of others may hold this stream up: a mode, or milliseconds. The "
            "field `latency`."),
    _header("X-Localrun-Deadline", f"Seconds until the first token is wanted, up to {MAX_DEADLINE_S:.0f}. The field "
            "`deadline_s`."),
    _header("X-Localrun-Speculation", "Whether tokens are drafted ahead. The field `speculation` says the same.",
            enum=["on", "off", "true", "false"]),
    _header("X-Localrun-Client", f"A name, of which {MAX_CLIENT_CHARACTERS} printable characters count; clients get "
            "equal service. Without it the User-Agent's first word."),
)  # fmt: skip

ANSWER_HEADERS: dict[str, Any] = {
    name: {"description": description, "schema": {"type": "string"} | more}
    for name, description, more in (
        ("X-Localrun-Request", "The request's id, for `/localrun/v1/requests/{id}`", {}),
        ("X-Localrun-Truncated", "Messages of the conversation that were left out, or tokens where no message could go",
         {"pattern": "^[0-9]+$"}),
        ("X-Localrun-Ignored", "Fields that this model cannot follow; absent without any", {}),
        ("X-Localrun-Tier", "Of a tier: which of its models answers, and why", {}),
        ("X-Request-Id", "As `X-Localrun-Request`; `request-id` on Anthropic's routes", {}),
        ("X-RateLimit-Remaining-Requests", "What an API key with limits may still use; also `-Limit-` and `-Reset-`, "
         "and of `Tokens`. On Anthropic's routes `anthropic-ratelimit-*`", {}),
    )
}  # fmt: skip
