"""POST /v1/chat/completions, with the extras of llama-server, vLLM and DeepSeek.

The conversation goes through the model's chat template, and what the model writes through the parser of its format. A
conversation longer than the context is refused with both numbers; nothing is cut silently. Fields that ask for what
this build does not do are refused with their name; the values that mean "nothing of it" pass.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from localrun.errors import BadRequest
from localrun.server import streaming
from localrun.server.http import fields
from localrun.server.http.exchange import Exchange, apart
from localrun.server.jobs.job import Job
from localrun.server.openai.answer import Answer, ChatChunks, naming
from localrun.server.openai.bodies import ChatMessage, CommonFields, for_template, text_of
from localrun.server.parsing.pieces import Reply
from localrun.server.prompting.ask import (
    MAX_MESSAGES,
    Attachments,
    ChatRequest,
    ChatTools,
    Choice,
    FunctionName,
    Functions,
    NamedChoice,
    Tool,
    check_goes_on,
    choose_tools,
    tools_of_chat,
    tools_of_functions,
)
from localrun.server.prompting.conversation import begun
from localrun.server.prompting.prepare import Prepared, prepare, thinks_by_default
from localrun.server.prompting.segments import shown
from localrun.server.routing import RoutingInput
from localrun.server.runtime import Runtime

_BUDGETS = (
    *("reasoning_budget", "thinking_budget", "reasoning_budget_tokens", "thinking_budget_tokens"),
    "thinking_token_budget",
)
_OWN_VARIABLES = frozenset(("messages", "tools", "add_generation_prompt"))

Effort = Annotated[str, Meta(pattern="^[a-z_]{1,32}$")]


class InputTokens(msgspec.Struct, frozen=True, kw_only=True):
    """How many tokens the prompt of a request has."""

    object: Literal["response.input_tokens"] = "response.input_tokens"
    input_tokens: int


class ChatReasoning(msgspec.Struct, frozen=True, kw_only=True):
    """`reasoning`, which is of responses, and which other servers take in chats as well. The rest is OpenRouter's."""

    effort: Effort | None = None
    enabled: bool | None = None
    max_tokens: int | None = None


class Prediction(msgspec.Struct, frozen=True, kw_only=True):
    """`prediction`: a text that much of the answer is expected to be like."""

    type: Literal["content"]
    content: str | list[dict[str, Any]]

    @property
    def text(self) -> str:
        """Raises BadRequest for a part that is not text."""
        return text_of(self.content, "prediction.content")


class ChatBody(CommonFields, frozen=True, kw_only=True):
    """POST /v1/chat/completions."""

    messages: Annotated[list[ChatMessage], Meta(max_length=MAX_MESSAGES)]
    logprobs: bool | None = None
    top_logprobs: fields.TopLogprobs | None = None
    tools: ChatTools | None = None
    tool_choice: Choice | None = None
    parallel_tool_calls: bool | None = None
    functions: Functions | None = None
    function_call: str | FunctionName | None = None
    reasoning_effort: Effort | None = None
    reasoning: ChatReasoning | None = None
    # As other servers have it: Ollama, Qwen's service, DeepSeek's and GLM's, llama-server, vLLM.
    think: bool | str | None = None
    enable_thinking: bool | None = None
    thinking: Any = None
    reasoning_budget: int | None = None
    thinking_budget: int | None = None
    reasoning_budget_tokens: int | None = None
    thinking_budget_tokens: int | None = None
    thinking_token_budget: int | None = None
    modalities: list[str] | None = None
    audio: Any = None
    prediction: Prediction | None = None
    # Not OpenAI's: vLLM's and llama-server's.
    verbose: bool | None = None
    continue_final_message: bool | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    documents: list[dict[str, Any]] | None = None

    @property
    def uses_functions(self) -> bool:
        """Whether the calls are to be answered in the older form."""
        return bool(self.functions)

    @property
    def effort(self) -> str | None:
        """How much the model is to think, in the client's words, whichever server's field says it."""
        asked = self.reasoning or ChatReasoning()
        levels = (self.reasoning_effort, asked.effort, self.think if isinstance(self.think, str) else None)
        said = next((level for level in levels if level), None)
        kind = self.thinking.get("type") if isinstance(self.thinking, dict) else self.thinking
        switches = (asked.enabled, self.enable_thinking, self.think, False if kind == "disabled" else kind)
        is_off = any(one is False for one in switches) or 0 in self._budgets.values()
        return "none" if said is None and is_off else said

    @property
    def _budgets(self) -> dict[str, int]:
        said = self.thinking.get("budget_tokens") if isinstance(self.thinking, dict) else None
        # 0 says nothing there, as with Anthropic.
        own = {"thinking.budget_tokens": said} if isinstance(said, int) and said > 0 else {}
        return budgets_of(self, *_BUDGETS) | own

    def check_supported(self) -> None:
        """Raises BadRequest for what this build does not do, and for fields that contradict each other."""
        if self.audio is not None or any(modality != "text" for modality in self.modalities or ()):
            raise BadRequest.of("modalities", "answers are text only; leave modalities and audio out")
        if self.top_logprobs and not self.logprobs:
            raise BadRequest.of("top_logprobs", "needs logprobs to be true")
        if self.functions and self.tools:
            raise BadRequest.of("functions", "not together with tools; use tools")

    def ask(self) -> ChatRequest:
        """The conversation and what is wanted next. Raises BadRequest."""
        tools, choice = self._tools()
        field = "function_call" if self.uses_functions else "tool_choice"
        allowed, wanted = choose_tools(choice, tools, field=field)
        media = Attachments()
        messages = for_template(self.messages, media)
        continues = self.continues()
        if continues:
            check_goes_on(wanted, field=field)
        return ChatRequest(
            messages=messages,
            tools=allowed,
            tool_choice=wanted,
            # The older form has one call to an answer.
            parallel_calls=self.parallel_tool_calls is not False and not self.uses_functions,
            response_grammar=self.answer_grammar(),
            think=think_of(self.effort),
            passed_over="reasoning.effort" if self.reasoning_effort is None else "reasoning_effort",
            thinking_limit=next(iter(self._budgets), ""),
            documents=self.documents or (),
            template_variables=self._template_variables(),
            continue_last=continues,
            media=media.all(),
        )

    def _tools(self) -> tuple[tuple[Tool, ...], Choice | None]:
        if not self.functions:
            return tools_of_chat(self.tools or ()), self.tool_choice
        choice: Choice | None
        if isinstance(self.function_call, FunctionName):
            choice = NamedChoice(name=self.function_call.name)
        elif self.function_call in (None, "auto"):
            choice = None
        elif self.function_call == "none":
            choice = "none"
        else:
            raise BadRequest.of("function_call", "use 'auto', 'none', or an object that names a function")
        return tools_of_functions(self.functions), choice

    def _template_variables(self) -> dict[str, Any]:
        """What the body hands to the template by name. The daemon's own names, and those of the model's control tokens,
        which a template trusts, are not to be had."""
        given = self.chat_template_kwargs or {}
        for name in given:
            if name in _OWN_VARIABLES or name.endswith("_token"):
                field = f"chat_template_kwargs.{name[:40]}"
                raise BadRequest.of(field, "this name is the template's own; leave it out")
        return given

    def continues(self) -> bool:
        """Whether the answer goes on where the last message ends. Raises BadRequest."""
        for index, message in enumerate(self.messages[:-1]):
            if message.prefix:
                field = f"messages[{index}].prefix"
                raise BadRequest.of(field, "only the last message can be a prefix of the answer")
        last = self.messages[-1]
        if not last.prefix and not self.continue_final_message:
            if self.add_generation_prompt is False:
                raise BadRequest.of(
                    "add_generation_prompt", "false needs continue_final_message; leave both out for a new message"
                )
            return False
        field = f"messages[{len(self.messages) - 1}].prefix" if last.prefix else "continue_final_message"
        if last.role != "assistant":
            raise BadRequest.of(field, "the last message must have the role assistant to be continued")
        if self.add_generation_prompt:
            raise BadRequest.of("add_generation_prompt", f"not together with {field}, which adds none")
        return True


def budgets_of(body: Any, *names: str) -> dict[str, int]:
    """The tokens that thinking may take, by the fields of a body that say so; fewer than none are no limit."""
    said = {name: getattr(body, name) for name in names}
    said["reasoning.max_tokens"] = body.reasoning and body.reasoning.max_tokens
    return {name: budget for name, budget in said.items() if budget is not None and budget >= 0}


def think_of(effort: str | None) -> bool | str | None:
    """Of `reasoning_effort`. None leaves it to the model."""
    return False if effort == "none" else effort


async def chat(runtime: Runtime, exchange: Exchange) -> None:
    await answer_chat(runtime, exchange, await exchange.read_json(ChatBody))


async def answer_chat(runtime: Runtime, exchange: Exchange, body: ChatBody, answer_type: type[Answer] = Answer) -> None:
    """Also used by routes whose bodies extend this one."""
    body.check_supported()
    ask = await apart(body.ask)
    prediction = body.prediction.text if body.prediction is not None else ""
    question = RoutingInput(ask=ask, effort=body.effort)
    async with streaming.entered(runtime, exchange, body, question, n_jobs=body.n_choices) as (body, ask, jobs):
        prepared = await prepared_of(runtime, jobs[0], ask)
        plan = await streaming.plan(
            body,
            jobs[0],
            max_output=body.max_output,
            prepared=prepared,
            logprobs=bool(body.logprobs),
            n_probs=body.top_logprobs or 0,
            prediction=prediction,
        )
        for index, job in enumerate(jobs):
            await job.submit(plan, segments=prepared.segments, choice=index)
        chunks = ChatChunks(
            request_id=streaming.answer_id(jobs),
            model=body.model,
            replies=[Reply(prepared.new_parser()) for _ in jobs],
            uses_functions=body.uses_functions,
        )
        answer = answer_type(
            exchange,
            jobs,
            chunks,
            n_per_prompt=body.n_choices,
            include_usage=body.include_usage,
            prompt_field="messages",
            told={"__verbose": {"prompt": shown(prepared.segments)[0]}} if body.verbose else {},
        )
        await answer.send(stream=bool(body.stream), wanted=body)


async def count_tokens(runtime: Runtime, exchange: Exchange) -> None:
    """POST /v1/chat/completions/input_tokens, which llama-server has: what the prompt of a chat comes to."""
    body = await exchange.read_json(ChatBody)
    body.check_supported()
    ask = await apart(body.ask)
    question = RoutingInput(ask=ask, effort=body.effort, may_probe=False)
    async with streaming.entered(runtime, exchange, body, question) as (_, ask, [job]):
        prepared = await prepared_of(runtime, job, ask)
        await exchange.answer_json(InputTokens(input_tokens=len(await job.count(prepared.segments))))


async def prepared_of(runtime: Runtime, job: Job, ask: ChatRequest) -> Prepared:
    """The prompt, with what the model's own parameters say besides. Raises what `prepare` raises."""
    whole = thinks_by_default(job, msgspec.structs.replace(ask, messages=begun(job.model, ask.messages)))
    with naming("messages"):
        return await prepare(runtime, job, whole)
