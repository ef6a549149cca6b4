"""Bodies of Ollama's `/api/*`, and their options as sampling parameters.

Fields that Ollama knows and this build does not do yet are parsed, so that a value that asks for something is refused
with its name, while the empty values that clients send by habit (`tools: []`, `think: false`) pass. Options that decide
how Ollama loads a model are checked for their type and otherwise ignored: the daemon's settings decide, and a loaded
model is never loaded again for a request.

Does not: know the model; what only the model can tell (is this token id in its vocabulary) is checked by the routes.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from localrun.errors import BadRequest
from localrun.server.http import fields
from localrun.server.jobs.prompt import Message
from localrun.wire import Sampling

# Ollama reads every JSON number as a double and cuts it for its integer options; clients rely on it (8192.0, 1.25 * n).
_LastN = Annotated[float, Meta(ge=-1, le=fields.MAX_TOKENS)]
_Predict = Annotated[float, Meta(ge=-2, le=fields.MAX_TOKENS)]
_Count = Annotated[float, Meta(ge=0, le=fields.MAX_TOKENS)]
_Version = Annotated[float, Meta(ge=0, le=2)]
_Seed = fields.Seed | Annotated[float, Meta(ge=-(2.0**53), le=2.0**53)]

_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """`options`. None means Ollama's default; unknown names are ignored."""

    temperature: fields.Temperature | None = None
    top_k: _LastN | None = None
    top_p: fields.Probability | None = None
    min_p: fields.Probability | None = None
    typical_p: fields.TypicalP | None = None
    repeat_last_n: _LastN | None = None
    repeat_penalty: fields.RepeatPenalty | None = None
    presence_penalty: fields.AdditivePenalty | None = None
    frequency_penalty: fields.AdditivePenalty | None = None
    mirostat: _Version | None = None
    mirostat_tau: fields.MirostatTau | None = None
    mirostat_eta: fields.Probability | None = None
    seed: _Seed | None = None
    num_predict: _Predict | None = None
    num_keep: _LastN | None = None
    stop: fields.Stop | None = None
    num_ctx: _Count | None = None
    num_batch: _Count | None = None
    num_gpu: _LastN | None = None
    main_gpu: _Count | None = None
    num_thread: _Count | None = None
    use_mmap: bool | None = None

    @property
    def n_predict(self) -> int:
        """Tokens to generate at most; -1 until the context is full."""
        return -1 if self.num_predict is None or self.num_predict < 0 else int(self.num_predict)

    @property
    def n_keep(self) -> int:
        """Tokens at the start of a prompt that truncation keeps; -1 is all that may be kept."""
        return int(_or(self.num_keep, 4))

    @property
    def stop_strings(self) -> tuple[str, ...]:
        return fields.stop_strings(self.stop)

    def sampling(self) -> Sampling:
        """With the defaults of Ollama's `api/types.go`, whatever the model."""
        return Sampling(
            temperature=_or(self.temperature, 0.8),
            top_k=max(0, int(_or(self.top_k, 40))),
            top_p=_or(self.top_p, 0.9),
            min_p=_or(self.min_p, 0.0),
            typical_p=_or(self.typical_p, 1.0),
            repeat_penalty=_or(self.repeat_penalty, 1.0),
            presence_penalty=_or(self.presence_penalty, 0.0),
            frequency_penalty=_or(self.frequency_penalty, 0.0),
            penalty_last_n=int(_or(self.repeat_last_n, 64)),
            mirostat=int(_or(self.mirostat, 0)),
            mirostat_tau=_or(self.mirostat_tau, 5.0),
            mirostat_eta=_or(self.mirostat_eta, 0.1),
            seed=None if self.seed is None else fields.seed_or_random(int(self.seed)),
        )


class GenerateBody(fields.ServiceFields, frozen=True, kw_only=True):
    """POST /api/generate. `lane`, `latency` and `deadline_s` stand beside `model`, not among the options: they are
    about the request, not about the text."""

    model: str
    prompt: str | None = None
    system: str | None = None
    context: list[fields.TokenId] | None = None
    raw: bool | None = None
    stream: bool | None = None
    truncate: bool | None = None
    options: Options | None = None
    keep_alive: float | str | None = None
    logprobs: bool | None = None
    top_logprobs: fields.TopLogprobs | None = None
    template: str | None = None
    suffix: str | None = None
    images: list[Any] | None = None
    format: Any = None
    think: bool | str | None = None

    def check_supported(self) -> None:
        """Raises BadRequest for what this build does not do."""
        if self.template:
            raise BadRequest(
                "template: Go templates are not supported; the model's own chat template is used (or send raw: true)",
                field="template",
            )
        if self.suffix:
            raise BadRequest("suffix: filling in the middle is not supported yet", field="suffix")
        _refuse_common(format_=self.format, think=self.think, model=self.model)
        _refuse_images(self.images, "images", self.model)


class ChatMessage(msgspec.Struct, frozen=True, kw_only=True):
    """One of `messages`. `thinking` of an earlier answer is dropped, as templates of this build's models expect."""

    role: str
    content: str | None = None
    images: list[Any] | None = None
    tool_calls: list[Any] | None = None
    tool_name: str | None = None


class ChatBody(fields.ServiceFields, frozen=True, kw_only=True):
    """POST /api/chat. `lane`, `latency` and `deadline_s` as for generate."""

    model: str
    messages: list[ChatMessage] | None = None
    stream: bool | None = None
    truncate: bool | None = None
    options: Options | None = None
    keep_alive: float | str | None = None
    logprobs: bool | None = None
    top_logprobs: fields.TopLogprobs | None = None
    tools: list[Any] | None = None
    format: Any = None
    think: bool | str | None = None

    def check_supported(self) -> None:
        """Raises BadRequest for what this build does not do."""
        if self.tools:
            raise BadRequest("tools: tool calling is not supported yet; leave tools out", field="tools")
        _refuse_common(format_=self.format, think=self.think, model=self.model)

    def template_messages(self) -> list[Message]:
        """The messages as chat templates want them. Raises BadRequest naming the message."""
        result: list[Message] = []
        for index, message in enumerate(self.messages or []):
            where = f"messages[{index}]"
            role = _ROLES.get(message.role)
            if role is None:
                raise BadRequest(
                    f"{where}.role: {message.role[:40]!r} is not a role; use {', '.join(_ROLES)}", field=f"{where}.role"
                )
            _refuse_images(message.images, f"{where}.images", self.model)
            if message.tool_calls:
                raise BadRequest(
                    f"{where}.tool_calls: tool calling is not supported yet; leave such messages out",
                    field=f"{where}.tool_calls",
                )
            result.append({"role": role, "content": message.content or ""})
        return result


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


def _or(value: float | None, default: float) -> float:
    return default if value is None else value


def _refuse_common(*, format_: Any, think: bool | str | None, model: str) -> None:
    if format_ not in (None, ""):
        raise BadRequest("format: structured output is not supported yet; ask for JSON in the prompt", field="format")
    if think not in (None, False, ""):
        raise BadRequest(f"think: '{model[:80]}' does not support thinking; leave think out", field="think")


def _refuse_images(images: list[Any] | None, field: str, model: str) -> None:
    if images:
        raise BadRequest(f"{field}: '{model[:80]}' does not support images; send text", field=field)
