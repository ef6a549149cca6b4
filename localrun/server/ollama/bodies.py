"""What bodies of Ollama's `/api/*` have in common.

Unknown fields are ignored. What is known and cannot be done is refused with its name, while the empty values that
clients send by habit (`tools: []`, `format: ""`) pass.

Does not: know the model; what only the model can tell (does it think) is found out by the routes.
"""

from __future__ import annotations

from typing import Any

import msgspec

from localrun.errors import BadRequest
from localrun.server import structured
from localrun.server.http import fields
from localrun.server.ollama.options import Options
from localrun.wire import Grammar

# Templates know three levels at most; the highest of them stands for what is above.
_LEVELS = {"low": "low", "medium": "medium", "high": "high", "max": "high"}


class PromptFields(fields.ServiceFields, frozen=True, kw_only=True):
    """Of chat and generate. `lane`, `latency` and `deadline_s` stand beside `model`, not among the options: they are
    about the request, not about the text. `shift` has no effect: an answer ends where the context does."""

    model: str
    stream: bool | None = None
    truncate: bool | None = None
    shift: bool | None = None
    options: Options | None = None
    logprobs: bool | None = None
    top_logprobs: fields.TopLogprobs | None = None
    format: Any = None
    think: bool | str | None = None
    debug_render_only: bool | None = msgspec.field(default=None, name="_debug_render_only")

    def answer_grammar(self) -> Grammar | None:
        """None for free text. Raises BadRequest naming a keyword of a schema that nothing can be held to."""
        if self.format is None or self.format == "":
            return None
        if self.format == "json":
            return structured.json_object()
        if not isinstance(self.format, dict):
            raise BadRequest("format: use 'json', or a JSON schema as an object", field="format")
        return structured.json_schema(self.format, field="format")

    def thinking(self) -> bool | str | None:
        """`think` in the words of templates; None where the request leaves it to the model. Raises BadRequest."""
        if self.think is None or isinstance(self.think, bool):
            return self.think
        if self.think == "":
            return None
        if self.think not in _LEVELS:
            raise BadRequest(
                f"think: {self.think[:40]!r} is no level; use true, false, {', '.join(map(repr, _LEVELS))}",
                field="think",
            )
        return _LEVELS[self.think]


class ModelBody(msgspec.Struct, frozen=True, kw_only=True):
    """A body that names a model, as `model` or by the older `name`."""

    model: str | None = None
    name: str | None = None
    verbose: bool | None = None
    stream: bool | None = None

    @property
    def model_name(self) -> str:
        """Raises BadRequest when neither is given."""
        name = self.model or self.name
        if not name:
            raise BadRequest("model is required", field="model")
        return name


def refuse_images(images: list[Any] | None, field: str, model: str) -> None:
    """Raises BadRequest where there are images: no model here sees."""
    if images:
        raise BadRequest(
            f"{field}: '{model[:80]}' does not support images; send text, or describe the picture in it", field=field
        )
