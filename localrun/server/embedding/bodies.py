"""Bodies of the embedding and reranking routes.

One request may hold `MAX_INPUTS` inputs, OpenAI's own limit; how long all of them may be is the limit of a body
(`max_body_bytes`). Unknown fields are ignored: clients send `user`, `input_type`, `task` and others that change nothing
here.

Does not: know the model; what only the model can tell (is this token id in its vocabulary) the engine says.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from localrun.errors import BadRequest
from localrun.server.http import fields

MAX_INPUTS = 2048

_Inputs = Annotated[list[str], Meta(max_length=MAX_INPUTS)]
_Dimensions = Annotated[int, Meta(ge=1, le=fields.MAX_TOKENS)]

Input = str | tuple[int, ...]


class EmbeddingsBody(fields.ServiceFields, frozen=True, kw_only=True):
    """POST /v1/embeddings. `truncate` and `keep_alive` are not OpenAI's."""

    model: str
    input: str | list[str | fields.TokenId | list[fields.TokenId]]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: _Dimensions | None = None
    truncate: bool | None = None

    def inputs(self) -> list[Input]:
        """Each as text or as token ids. Raises BadRequest for none, a mixture, an empty one, and too many."""
        if isinstance(self.input, str):
            inputs: list[Input] = [self.input]
        elif self.input and all(isinstance(item, int) for item in self.input):
            inputs = [tuple(item for item in self.input if isinstance(item, int))]
        else:
            inputs = [
                tuple(item) if isinstance(item, list) else item for item in self.input if not isinstance(item, int)
            ]
            if not inputs or len(inputs) != len(self.input) or len({type(item) for item in inputs}) != 1:
                raise BadRequest(
                    "input: must be a text, a list of texts, a list of token ids, or a list of such lists, not empty "
                    "and not mixed",
                    field="input",
                )
        if len(inputs) > MAX_INPUTS:
            raise BadRequest(
                f"input: {len(inputs)} inputs are more than {MAX_INPUTS} in one request; send several", field="input"
            )
        empty = next((index for index, item in enumerate(inputs) if not item), None)
        if empty is not None:
            where = f"input[{empty}]" if len(inputs) > 1 else "input"
            raise BadRequest(f"{where}: must not be empty; leave it out", field=where)
        return inputs


class EmbedBody(fields.ServiceFields, frozen=True, kw_only=True):
    """POST /api/embed. Of `options` none is about embeddings: they decide how a model is loaded, or sample."""

    model: str
    input: str | _Inputs | None = None
    truncate: bool | None = None
    dimensions: Annotated[int, Meta(ge=0, le=fields.MAX_TOKENS)] | None = None
    options: dict[str, Any] | None = None

    def inputs(self) -> list[Input]:
        """None at all means to load the model."""
        if isinstance(self.input, str):
            return [self.input] if self.input else []
        return list(self.input or ())


class LegacyEmbeddingsBody(fields.ServiceFields, frozen=True, kw_only=True):
    """POST /api/embeddings."""

    model: str
    prompt: str = ""
    options: dict[str, Any] | None = None


class DocumentObject(msgspec.Struct, frozen=True):
    """A document as Jina and Cohere write it when it is not a bare text."""

    text: str


class RerankBody(fields.ServiceFields, frozen=True, kw_only=True):
    """POST /v1/rerank, and the other paths of it. `truncate` and `keep_alive` are localrun's own."""

    model: str
    query: Annotated[str, Meta(min_length=1)]
    documents: Annotated[list[str | DocumentObject], Meta(min_length=1, max_length=MAX_INPUTS)]
    top_n: Annotated[int, Meta(ge=1, le=fields.MAX_TOKENS)] | None = None
    return_documents: bool | None = None
    truncate: bool | None = None

    def texts(self) -> list[str]:
        return [one if isinstance(one, str) else one.text for one in self.documents]
