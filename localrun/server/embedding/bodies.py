"""Bodies of the embedding and reranking routes.

One request may hold `MAX_INPUTS` inputs, OpenAI's own limit; how long all of them may be is the limit of a body
(`max_body_bytes`). Unknown fields are ignored: clients send `user`, `input_type`, `task` and others that change nothing
here.

Does not: know the model; what only the model can tell (is this token id in its vocabulary) the engine says.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from localrun.errors import BadRequest
from localrun.server.http import fields
from localrun.server.openai.bodies import ChatMessage, for_template, part_text
from localrun.server.prompting.ask import Attachments, ChatRequest
from localrun.server.prompting.segments import is_one

MAX_INPUTS = 2048

# Where a file belongs in the text of an input, as llama-server has it.
MEDIA_PLACE = "<__media__>"


class MediaInput(msgspec.Struct, frozen=True, kw_only=True):
    """An input with pictures or sound, in llama-server's two forms: a `prompt_string` with `<__media__>` where each of
    `multimodal_data` belongs; or `content`, which is parts as in chats."""

    prompt_string: str | None = None
    multimodal_data: list[str] | None = None
    content: list[dict[str, Any]] | None = None

    def text(self, where: str, media: Attachments) -> str:
        """With markers in the place of what is added to `media`. Raises BadRequest."""
        if self.content is not None and self.prompt_string is None and self.multimodal_data is None:
            return "".join(part_text(part, f"{where}.content[{at}]", media) for at, part in enumerate(self.content))
        if self.prompt_string is None or self.content is not None:
            raise BadRequest.of(
                where,
                f"an object needs prompt_string, with {MEDIA_PLACE} for each of its multimodal_data, or content alone",
            )
        if self.multimodal_data is None:
            return self.prompt_string
        text, *others = self.prompt_string.split(MEDIA_PLACE)
        if len(others) != len(self.multimodal_data):
            raise BadRequest.of(
                f"{where}.prompt_string",
                f"{len(others)} places for pictures or sound ({MEDIA_PLACE}), and "
                f"{len(self.multimodal_data)} of multimodal_data; write one for each",
            )
        for at, (source, other) in enumerate(zip(self.multimodal_data, others, strict=True)):
            text += media.add(source, f"{where}.multimodal_data[{at}]") + other
        return text


_Inputs = Annotated[list[str | MediaInput], Meta(max_length=MAX_INPUTS)]
_Dimensions = Annotated[int, Meta(ge=1, le=fields.MAX_TOKENS)]

# A text, or token ids with or without texts between them.
Input = str | tuple[int | str, ...]
_Input = str | list[str | fields.TokenId | list[str | fields.TokenId] | MediaInput] | MediaInput


class EmbeddingsBody(fields.ServiceFields, frozen=True, kw_only=True):
    """POST /v1/embeddings and /embedding. `truncate` and `keep_alive` are not OpenAI's; `content` is llama-server's
    name of `input`; `messages` are vLLM's, and with them the two fields after."""

    model: fields.ModelName = ""
    input: _Input | None = None
    content: _Input | None = None
    messages: list[ChatMessage] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    encoding_format: str | None = None
    dimensions: _Dimensions | None = None
    truncate: bool | None = None

    @property
    def asked(self) -> _Input | None:
        """The inputs, by either name."""
        return self.content if self.input is None else self.input

    @property
    def is_base64(self) -> bool:
        """Whether vectors are wanted in base64, or as lists. Raises BadRequest for anything else."""
        asked = (self.encoding_format or "float").lower()
        if asked not in ("float", "base64"):
            raise BadRequest.of("encoding_format", f"{asked[:40]!r} is not known; use float or base64")
        return asked == "base64"

    def chat(self, media: Attachments) -> ChatRequest | None:
        """The one input that `messages` are by the model's template, if there are any. Raises BadRequest."""
        if self.messages is None:
            return None
        if self.asked is not None:
            raise BadRequest.of("messages", "not together with input; send one of them")
        continues = bool(self.continue_final_message)
        if continues and self.add_generation_prompt:
            raise BadRequest.of("add_generation_prompt", "not together with continue_final_message, which adds none")
        made = for_template(self.messages, media)
        adds_prompt = continues or bool(self.add_generation_prompt)
        return ChatRequest(messages=made, continue_last=continues, adds_prompt=adds_prompt, media=media.all())

    def inputs(self, media: Attachments) -> list[Input]:
        """Each as text or as token ids; what their objects show goes into `media`. Raises BadRequest for none, ids
        beside other inputs, an empty one, and too many."""
        asked = self.asked or []
        if isinstance(asked, str | MediaInput):
            inputs: list[Input] = [_text(asked, "input", media)]
        elif is_one(asked):
            inputs = [tuple(item for item in asked if isinstance(item, int | str))]
        else:
            inputs = [
                tuple(item) if isinstance(item, list) else _text(item, f"input[{at}]", media)
                for at, item in enumerate(asked)
                if not isinstance(item, int) and not (isinstance(item, list) and item and not is_one(item))
            ]
            if not inputs or len(inputs) != len(asked):
                raise BadRequest.of(
                    "input",
                    "must be a text, a list of token ids with or without texts between them, or a list of "
                    "these, not empty; an object with pictures or sound counts as an input of its own",
                )
        if len(inputs) > MAX_INPUTS:
            raise BadRequest.of(
                "input", f"{len(inputs)} inputs are more than {MAX_INPUTS} in one request; send several"
            )
        empty = next((index for index, item in enumerate(inputs) if not item), None)
        if empty is not None:
            where = f"input[{empty}]" if len(inputs) > 1 else "input"
            raise BadRequest.of(where, "must not be empty; leave it out")
        return inputs


def _text(item: str | MediaInput, where: str, media: Attachments) -> str:
    return item if isinstance(item, str) else item.text(where, media)


class EmbedBody(fields.ServiceFields, frozen=True, kw_only=True):
    """POST /api/embed. Of `options` none is about embeddings: they decide how a model is loaded, or sample."""

    model: str
    input: str | _Inputs | MediaInput | None = None
    truncate: bool | None = None
    dimensions: Annotated[int, Meta(ge=0, le=fields.MAX_TOKENS)] | None = None
    options: dict[str, Any] | None = None

    def inputs(self, media: Attachments) -> list[Input]:
        """None at all means to load the model. What objects show goes into `media`. Raises BadRequest."""
        if isinstance(self.input, str | MediaInput):
            return [_text(self.input, "input", media)] if self.input else []
        return [_text(item, f"input[{at}]", media) for at, item in enumerate(self.input or ())]


class LegacyEmbeddingsBody(fields.ServiceFields, frozen=True, kw_only=True):
    """POST /api/embeddings."""

    model: str
    prompt: str = ""
    options: dict[str, Any] | None = None


class DocumentObject(msgspec.Struct, frozen=True):
    """A document as Jina and Cohere write it when it is not a bare text."""

    text: str


class RerankBody(fields.ServiceFields, frozen=True, kw_only=True):
    """POST /v1/rerank, and the other paths of it. `truncate` and `keep_alive` are localrun's own; `texts` and
    `return_text` are of TEI, whose form the answer has then."""

    model: fields.ModelName = ""
    query: Annotated[str, Meta(min_length=1)]
    documents: Annotated[list[str | DocumentObject], Meta(min_length=1, max_length=MAX_INPUTS)] | None = None
    texts: Annotated[list[str], Meta(min_length=1, max_length=MAX_INPUTS)] | None = None
    return_text: bool | None = None
    top_n: Annotated[int, Meta(ge=1, le=fields.MAX_TOKENS)] | None = None
    return_documents: bool | None = None
    truncate: bool | None = None

    def each(self) -> list[str]:
        """The documents, in either form. Raises BadRequest for none."""
        if self.documents is not None:
            return [one if isinstance(one, str) else one.text for one in self.documents]
        if self.texts is None:
            raise BadRequest("documents is required", field="documents")
        return self.texts
