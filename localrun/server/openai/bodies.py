"""Bodies of OpenAI's `/v1/chat/completions` and `/v1/completions`, with the extras of llama-server and vLLM.

Fields that ask for what this build does not do are refused with their name; the values that mean "nothing of it" pass.
Defaults are OpenAI's: temperature 1, everything else neutral.

Does not: know the model; what only the model can tell (is this token id in its vocabulary) is checked by the routes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from localrun.errors import BadRequest
from localrun.server.http import fields
from localrun.server.jobs.prompt import Message
from localrun.wire import Sampling

# Each answer is a job; this many may come of one request, whatever `n` and the number of prompts.
MAX_ANSWERS = 64

_Choices = Annotated[int, Meta(ge=1, le=fields.MAX_CHOICES)]
_MaxTokens = Annotated[int, Meta(ge=1, le=fields.MAX_TOKENS)]
_Penalty = Annotated[float, Meta(ge=-2.0, le=2.0)]
_LogitBias = Annotated[dict[str, fields.Bias], Meta(max_length=fields.MAX_LOGIT_BIASES)]

_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}


class StreamOptions(msgspec.Struct, frozen=True, kw_only=True):
    """`stream_options`."""

    include_usage: bool | None = None


class _Common(fields.ServiceFields, frozen=True, kw_only=True):
    """What both routes take. None means OpenAI's default."""

    model: str
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: _Choices | None = None
    stop: fields.Stop | None = None
    seed: fields.Seed | None = None
    temperature: fields.Temperature | None = None
    top_p: fields.Probability | None = None
    presence_penalty: _Penalty | None = None
    frequency_penalty: _Penalty | None = None
    logit_bias: _LogitBias | None = None
    max_tokens: _MaxTokens | None = None
    # Not OpenAI's; as llama-server and vLLM name them.
    ignore_eos: bool | None = None
    top_k: fields.TopK | None = None
    min_p: fields.Probability | None = None
    typical_p: fields.TypicalP | None = None
    repeat_penalty: fields.RepeatPenalty | None = None
    repetition_penalty: fields.RepeatPenalty | None = None
    repeat_last_n: fields.LastN | None = None
    mirostat: fields.MirostatVersion | None = None
    mirostat_tau: fields.MirostatTau | None = None
    mirostat_eta: fields.Probability | None = None
    keep_alive: float | str | None = None

    @property
    def n_choices(self) -> int:
        return self.n or 1

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def stop_strings(self) -> tuple[str, ...]:
        return fields.stop_strings(self.stop)

    def sampling(self, n_vocab: int) -> Sampling:
        """Raises BadRequest for a biased token outside the vocabulary."""
        repeat_penalty = self.repeat_penalty if self.repeat_penalty is not None else self.repetition_penalty
        return Sampling(
            temperature=_or(self.temperature, 1.0),
            top_k=max(0, self.top_k or 0),
            top_p=_or(self.top_p, 1.0),
            min_p=_or(self.min_p, 0.0),
            typical_p=_or(self.typical_p, 1.0),
            repeat_penalty=_or(repeat_penalty, 1.0),
            presence_penalty=_or(self.presence_penalty, 0.0),
            frequency_penalty=_or(self.frequency_penalty, 0.0),
            penalty_last_n=64 if self.repeat_last_n is None else self.repeat_last_n,
            mirostat=self.mirostat or 0,
            mirostat_tau=_or(self.mirostat_tau, 5.0),
            mirostat_eta=_or(self.mirostat_eta, 0.1),
            seed=fields.seed_or_random(self.seed),
            logit_bias=_biases(self.logit_bias or {}, n_vocab),
        )


class ChatMessage(msgspec.Struct, frozen=True, kw_only=True):
    """One of `messages`. `content` is text, or parts of which each has its own type."""

    role: str
    content: str | list[dict[str, Any]] | None = None
    tool_calls: list[Any] | None = None
    function_call: Any = None


class ChatBody(_Common, frozen=True, kw_only=True):
    """POST /v1/chat/completions."""

    messages: list[ChatMessage]
    max_completion_tokens: _MaxTokens | None = None
    logprobs: bool | None = None
    top_logprobs: fields.TopLogprobs | None = None
    tools: list[Any] | None = None
    functions: list[Any] | None = None
    tool_choice: Any = None
    function_call: Any = None
    response_format: Any = None
    modalities: list[str] | None = None
    audio: Any = None

    @property
    def n_predict(self) -> int:
        """Tokens to generate at most; -1 until the context is full."""
        return self.max_completion_tokens or self.max_tokens or -1

    def check_supported(self) -> None:
        """Raises BadRequest for what this build does not do, and for fields that contradict each other."""
        if self.tools or self.functions:
            field = "tools" if self.tools else "functions"
            raise BadRequest(f"{field}: tool calling is not supported yet; leave {field} out", field=field)
        for field, choice in (("tool_choice", self.tool_choice), ("function_call", self.function_call)):
            if choice not in (None, "none", "auto"):
                raise BadRequest(f"{field}: tool calling is not supported yet; leave {field} out", field=field)
        kind = self.response_format.get("type") if isinstance(self.response_format, dict) else self.response_format
        if kind not in (None, "text"):
            raise BadRequest(
                "response_format: structured output is not supported yet; ask for JSON in the prompt",
                field="response_format",
            )
        if self.audio is not None or any(modality != "text" for modality in self.modalities or ()):
            raise BadRequest("modalities: only text is supported; leave modalities and audio out", field="modalities")
        if self.top_logprobs and not self.logprobs:
            raise BadRequest("top_logprobs: needs logprobs to be true", field="top_logprobs")

    def template_messages(self) -> list[Message]:
        """The messages as chat templates want them. Raises BadRequest naming the message."""
        if not self.messages:
            raise BadRequest("messages: at least one message is required", field="messages")
        return [_template_message(message, f"messages[{index}]") for index, message in enumerate(self.messages)]


class CompletionBody(_Common, frozen=True, kw_only=True):
    """POST /v1/completions."""

    prompt: str | list[str | fields.TokenId | list[fields.TokenId]]
    echo: bool | None = None
    logprobs: fields.TopLogprobs | None = None
    best_of: _Choices | None = None
    suffix: str | None = None

    def check_supported(self) -> None:
        """Raises BadRequest for what this build does not do."""
        if self.suffix:
            raise BadRequest("suffix: filling in the middle is not supported yet", field="suffix")
        if self.best_of is not None and self.best_of != self.n_choices:
            raise BadRequest(
                f"best_of: must be n ({self.n_choices}); choosing among more is not supported", field="best_of"
            )
        if self.echo and self.logprobs is not None:
            raise BadRequest(
                "echo: log-probabilities of the prompt are not supported; leave one of the two out", field="echo"
            )

    def prompts(self) -> list[str | list[int]]:
        """The prompts, each as text or as token ids. Raises BadRequest for none, a mixture, and too many."""
        if isinstance(self.prompt, str):
            prompts: list[str | list[int]] = [self.prompt]
        elif self.prompt and all(isinstance(item, int) for item in self.prompt):
            prompts = [[item for item in self.prompt if isinstance(item, int)]]
        else:
            prompts = [item for item in self.prompt if not isinstance(item, int)]
            if len(prompts) != len(self.prompt) or len({type(item) for item in prompts}) != 1:
                raise BadRequest(
                    "prompt: must be a text, a list of texts, a list of token ids, or a list of such lists, not empty "
                    "and not mixed",
                    field="prompt",
                )
        if not all(prompts):
            raise BadRequest("prompt: must not be empty", field="prompt")
        if self.echo and not isinstance(prompts[0], str):
            raise BadRequest("echo: needs prompts that are text, not token ids", field="echo")
        if len(prompts) * self.n_choices > MAX_ANSWERS:
            raise BadRequest(
                f"prompt: {len(prompts)} prompts with n {self.n_choices} are more than {MAX_ANSWERS} answers in one "
                f"request; send several",
                field="prompt",
            )
        return prompts


def _template_message(message: ChatMessage, where: str) -> Message:
    role = _ROLES.get(message.role)
    if role is None:
        raise BadRequest(
            f"{where}.role: {message.role[:40]!r} is not a role; use {', '.join(_ROLES)}", field=f"{where}.role"
        )
    if message.tool_calls or message.function_call is not None:
        raise BadRequest(
            f"{where}.tool_calls: tool calling is not supported yet; leave such messages out",
            field=f"{where}.tool_calls",
        )
    content = message.content
    if isinstance(content, list):
        # Templates of text models take one text; llama-server and vLLM join the parts in the same way.
        content = "\n".join(_part_text(part, f"{where}.content[{at}]") for at, part in enumerate(content))
    return {"role": role, "content": content or ""}


def _part_text(part: dict[str, Any], where: str) -> str:
    kind = part.get("type")
    if kind not in ("text", "input_text", "output_text"):
        raise BadRequest(f"{where}: {str(kind)[:40]!r} parts are not supported by this model; send text", field=where)
    text = part.get("text")
    if not isinstance(text, str):
        raise BadRequest(f"{where}.text: expected a text", field=f"{where}.text")
    return text


def check_tokens(prompts: Sequence[str | list[int]], n_vocab: int) -> None:
    """Raises BadRequest for a token id outside the vocabulary; a text holds none."""
    for prompt in prompts:
        wrong = 0 if isinstance(prompt, str) else max(prompt)
        if wrong >= n_vocab:
            raise BadRequest(f"prompt: {wrong} is not a token of this model, which has {n_vocab}", field="prompt")


def _biases(biases: dict[str, float], n_vocab: int) -> tuple[tuple[int, float], ...]:
    result = []
    for name, bias in biases.items():
        token = int(name) if name.isascii() and name.isdigit() and len(name) <= 10 else -1
        if not 0 <= token < n_vocab:
            raise BadRequest(
                f"logit_bias: {name[:40]!r} is not a token of this model; keys are token ids below {n_vocab}",
                field="logit_bias",
            )
        # -100 means a ban in OpenAI's API.
        result.append((token, -math.inf if bias <= -100 else bias))
    return tuple(result)


def _or(value: float | None, default: float) -> float:
    return default if value is None else value
