"""Bodies of POST /api/chat and /api/generate, and their `options`.

Unknown fields are ignored. What is known and cannot be done is refused with its name, while the empty values that
clients send by habit (`tools: []`, `format: ""`) pass. Of the options that decide how Ollama loads a model those count
that a request can need (`Options.load`); the others are checked for their type and otherwise ignored.
Does not: know the model, but for its parameters, which are defaults below a request's options; what only the model can
tell (does it think) is found out by the routes.
"""

from __future__ import annotations

from typing import Annotated, Any, Self

import msgspec
from msgspec import Meta

from localrun.config import CHOICES, KV_TYPES, NOTHING_ASKED, ROPE_SCALINGS, LoadSettings, RopeBase, RopeScale
from localrun.errors import BadModelFile, BadRequest
from localrun.models.creation import is_go
from localrun.models.storage.model import Model
from localrun.server import notices, structured
from localrun.server.http import fields
from localrun.server.prompting.ask import (
    MAX_MESSAGES,
    Attachments,
    ChatRequest,
    ChatTools,
    Choice,
    Message,
    ToolCall,
    arguments_of,
    assistant,
    called,
    check_goes_on,
    choose_tools,
    role_of,
    tools_of_chat,
)
from localrun.wire import Grammar, Sampling

_Predict = Annotated[float, Meta(ge=-2, le=fields.MAX_TOKENS)]
_Keep = Annotated[float, Meta(ge=-1, le=fields.MAX_TOKENS)]
_Count = Annotated[float, Meta(ge=0, le=fields.MAX_TOKENS)]
# Of Ollama's `api/types.go`, whatever the model.
_DEFAULT = Sampling(temperature=0.8, top_k=40, top_p=0.9)


class Options(fields.Parameters, frozen=True, kw_only=True):
    """`options`. None means Ollama's default; unknown names are ignored."""

    num_predict: _Predict | None = None
    num_keep: _Keep | None = None
    num_ctx: _Count | None = None
    num_batch: _Count | None = None
    num_gpu: _Keep | None = None
    main_gpu: _Count | None = None
    num_thread: _Count | None = None
    draft_num_predict: _Count | None = None
    use_mmap: bool | None = None
    speculation: fields.Speculation | None = None
    draft: fields.DraftName | None = None
    kv_type: Annotated[str, Meta(extra_json_schema={"enum": list(KV_TYPES)})] | None = None
    slots: Annotated[float, Meta(ge=1, le=256)] | None = None
    kv_cells: _Count | None = None
    rope_scaling: Annotated[str, Meta(extra_json_schema={"enum": list(ROPE_SCALINGS)})] | None = None
    rope_frequency_base: RopeBase | None = None
    rope_frequency_scale: RopeScale | None = None
    yarn_orig_ctx: _Count | None = None

    def load(self) -> LoadSettings:
        """What a request needs of the engine: numbers of slots, cells and threads are no request's business. Raises
        BadRequest."""
        return LoadSettings(
            num_ctx=int(self.num_ctx or 0) or None,
            gpu_layers=None if self.num_gpu is None else int(self.num_gpu),
            kv_type=_word("kv_type", self.kv_type),
            rope_scaling=_word("rope_scaling", self.rope_scaling),
            rope_frequency_base=self.rope_frequency_base,
            rope_frequency_scale=self.rope_frequency_scale,
            yarn_orig_ctx=int(self.yarn_orig_ctx or 0) or None,
        )

    @property
    def n_predict(self) -> int:
        """Tokens to generate at most; -1 until the context is full."""
        return -1 if self.num_predict is None or self.num_predict < 0 else int(self.num_predict)

    @property
    def n_keep(self) -> int:
        """Tokens at the start of a prompt that truncation keeps; -1 is all that may be kept."""
        return 4 if self.num_keep is None else int(self.num_keep)

    @property
    def stop_strings(self) -> tuple[str, ...]:
        return fields.stop_strings(self.stop)

    def over(self, model: Model) -> Options:
        """These options, and the model's own parameters where they say nothing. Raises BadModelFile naming one that is
        out of range."""
        if not model.parameters:
            return self
        try:
            # Registries write numbers in several ways ("40", 40.0).
            own = msgspec.convert(model.parameters, Options, strict=False)
        except msgspec.ValidationError as error:
            raise BadModelFile(f"a parameter of model '{model.name}' is out of range: {error}") from None
        missing = {name: getattr(own, name) for name in self.__struct_fields__ if getattr(self, name) is None}
        return msgspec.structs.replace(self, **missing)

    def sampling(self) -> Sampling:
        return fields.sampling((self,), _DEFAULT)


def _word(name: str, text: str | None) -> str | None:
    if text is not None and text not in CHOICES[name]:
        raise BadRequest.of(f"options.{name}", f"{text[:40]!r} is not one of {', '.join(CHOICES[name])}")
    return text


_LEVELS = ("low", "medium", "high", "xhigh", "max")


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

    @property
    def service(self) -> Self:
        """With what stands only among the options: some clients can send nothing else."""
        if self.options is None:
            return self
        speculation = self.options.speculation if self.speculation is None else self.speculation
        return msgspec.structs.replace(self, speculation=speculation, draft=self.draft or self.options.draft)

    @property
    def effort(self) -> str | None:
        """`think`, where it is a level; none for false."""
        if self.think is False:
            return "none"
        return self.think if isinstance(self.think, str) and self.think else None

    @property
    def load(self) -> LoadSettings:
        """How the model is to be loaded for the request. Raises BadRequest."""
        return NOTHING_ASKED if self.options is None else self.options.load()

    def answer_grammar(self) -> Grammar | None:
        """None for free text. Raises BadRequest naming a keyword of a schema that nothing can be held to."""
        if self.format is None or self.format == "":
            return None
        if self.format == "json":
            return structured.json_object()
        if not isinstance(self.format, dict):
            raise BadRequest.of("format", "use 'json', or a JSON schema as an object")
        return structured.json_schema(self.format, field="format")

    def thinking(self) -> bool | str | None:
        """`think` in the words of templates; None where the request leaves it to the model. Raises BadRequest."""
        if self.think is None or isinstance(self.think, bool):
            return self.think
        if self.think == "":
            return None
        if self.think not in _LEVELS:
            raise BadRequest.of(
                "think", f"{self.think[:40]!r} is no level; use true, false, {', '.join(map(repr, _LEVELS))}"
            )
        return self.think


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


Images = list[str]
_PLACE = "[img]"


def with_images(text: str, images: Images | None, field: str, media: Attachments) -> str:
    """The text with what is in `images`, pictures and recordings alike: at the places that the text has for them
    (`[img]`), the others in front of it."""
    markers = [media.add(image, f"{field}[{index}]") for index, image in enumerate(images or ())]
    pieces = text.split(_PLACE, len(markers))
    n_placed = len(pieces) - 1
    inside = [part for marker, piece in zip(markers, pieces[1:], strict=False) for part in (marker, piece)]
    return "".join((*markers[n_placed:], pieces[0], *inside))


class ChatMessage(msgspec.Struct, frozen=True, kw_only=True):
    """One of `messages`. `reasoning_content` is what some editors call `thinking`."""

    role: str
    content: str | None = None
    thinking: str | None = None
    reasoning_content: str | None = None
    images: Images | None = None
    tool_calls: list[ToolCall] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None


class ChatBody(PromptFields, frozen=True, kw_only=True):
    """`tool_choice` is not Ollama's but OpenAI's, in its words."""

    messages: Annotated[list[ChatMessage], Meta(max_length=MAX_MESSAGES)] | None = None
    tools: ChatTools | None = None
    tool_choice: Choice | None = None

    def ask(self) -> ChatRequest:
        """The conversation and what is wanted next; an assistant's last message is gone on with. Raises BadRequest."""
        tools, choice = choose_tools(self.tool_choice, tools_of_chat(self.tools or ()))
        media = Attachments()
        messages = [self._message(message, f"messages[{at}]", media) for at, message in enumerate(self.messages or [])]
        continues = bool(messages) and messages[-1]["role"] == "assistant" and "tool_calls" not in messages[-1]
        if continues:
            check_goes_on(choice)
        return ChatRequest(
            messages=messages,
            tools=tools,
            tool_choice=choice,
            response_grammar=self.answer_grammar(),
            think=self.thinking(),
            continue_last=continues,
            media=media.all(),
        )

    def _message(self, message: ChatMessage, where: str, media: Attachments) -> Message:
        role = role_of(message.role, where)
        content = with_images(message.content or "", message.images, f"{where}.images", media)
        if role == "assistant":
            calls = [
                called(call.function.name, arguments_of(call.function.arguments), call.id)
                for call in message.tool_calls or ()
            ]
            return assistant(content, thinking=message.thinking or message.reasoning_content, calls=calls)
        made: Message = {"role": role, "content": content}
        if role == "tool":
            made["tool_call_id"] = message.tool_call_id or ""
            made["name"] = message.tool_name or ""
        return made


class GenerateBody(PromptFields, frozen=True, kw_only=True):
    """`raw` and `suffix` make prompts that no chat template is in."""

    prompt: str | None = None
    suffix: str | None = None
    system: str | None = None
    template: str | None = None
    context: list[fields.TokenId] | None = None
    raw: bool | None = None
    images: Images | None = None

    @property
    def is_plain(self) -> bool:
        """Whether the prompt goes to the model without a chat template."""
        return bool(self.raw or self.suffix)

    def check_supported(self) -> None:
        """Raises BadRequest for what cannot be done, and for fields that contradict each other."""
        if self.images and (self.suffix or self.context):
            other = "suffix" if self.suffix else "context"
            raise BadRequest.of("images", f"not together with {other}; use /api/chat, or leave one of them out")
        if self.is_plain:
            kind = "suffix" if self.suffix else "raw"
            for name in ("template", "system", "context", "think"):
                if getattr(self, name):
                    raise BadRequest.of(name, f"not together with {kind}, which uses no template; leave it out")

    def ask(self) -> ChatRequest:
        """The prompt as a conversation of one message, after `system`. Raises BadRequest."""
        messages: list[Message] = [{"role": "system", "content": self.system}] if self.system else []
        media = Attachments()
        prompt = with_images(self.prompt or "", self.images, "images", media)
        messages.append({"role": "user", "content": prompt})
        template = self.template or None
        if template and is_go(template):
            notices.note("template (Go's are not run; the model's chat template is used)")
            template = None
        return ChatRequest(
            messages=messages,
            response_grammar=self.answer_grammar(),
            think=self.thinking(),
            template=template,
            media=media.all(),
        )
