"""POST /v1/responses.

A response is one answer to a conversation of items: those of the response it goes on with, then those of `input`.
When it ends well, or at its limit, it is kept before its end is sent, so that who goes on at once finds it.
"""

from __future__ import annotations

import msgspec

from localrun.errors import LocalrunError
from localrun.server.http import bodies, caller
from localrun.server.http.exchange import Exchange
from localrun.server.http.fields import defaults_of
from localrun.server.jobs import streaming
from localrun.server.jobs.job import Job
from localrun.server.openai import generation
from localrun.server.openai.chat_body import think_of
from localrun.server.openai.chunks import Fields, encode
from localrun.server.openai.prompt_field import naming
from localrun.server.openai.responses import items as response_items
from localrun.server.openai.responses import response as response_object
from localrun.server.openai.responses.body import ResponsesBody
from localrun.server.openai.responses.events import Events
from localrun.server.openai.responses.items import Item
from localrun.server.openai.responses.kept import KeptResponses
from localrun.server.openai.responses.output import Output
from localrun.server.parsing.pieces import Reply
from localrun.server.prompting import conversation as beginning
from localrun.server.prompting.ask import ChatAsk, choose_tools
from localrun.server.prompting.prepare import prepare
from localrun.server.runtime import Runtime
from localrun.wire import Delta, Finish


async def create(kept: KeptResponses, runtime: Runtime, exchange: Exchange) -> None:
    """The route's handler."""
    body = await bodies.read(exchange, ResponsesBody)
    body.check_supported()
    before: tuple[Item, ...] = ()
    if body.previous_response_id is not None:
        before = kept.get(body.previous_response_id, field="previous_response_id").conversation
    sent = response_items.items_of(body.input, kept.item)
    # Checked as what was sent, so that an error names the item of this body.
    response_items.messages_of(None, sent)
    conversation = [*before, *sent]
    tools, choice = choose_tools(body.tool_choice, body.function_tools())
    ask = ChatAsk(
        messages=response_items.messages_of(body.instructions, conversation),
        tools=tools,
        tool_choice=choice,
        parallel_calls=body.parallel_tool_calls is not False,
        response_grammar=body.answer_grammar(),
        think=think_of(body.effort),
    )
    who = caller.ask(exchange, body.model, body)
    async with exchange.while_connected(), runtime.job(who) as job:
        messages = beginning.begun(job.model, ask.messages)
        with naming("input", effort="reasoning.effort"):
            prepared = await prepare(runtime, job, msgspec.structs.replace(ask, messages=messages))
        defaults = defaults_of(job.model)
        plan = streaming.plan(
            body,
            job,
            defaults,
            max_output=body.max_output_tokens,
            stop=prepared.stop,
            grammar=prepared.grammar,
            show_control=prepared.show_control,
            logprobs=body.wants_logprobs,
            n_probs=body.top_logprobs or 0,
        )
        await job.submit(plan, segments=prepared.segments)
        begun = response_object.begun("resp_" + streaming.answer_id([job]), body, plan.sampling)
        run = _Run(
            exchange,
            job,
            Reply(prepared.new_parser()),
            begun,
            summarizes=body.summarizes,
            kept=kept if body.is_kept else None,
            conversation=conversation,
        )
        with naming("input"):
            await run.send(stream=bool(body.stream))


class _Run:
    """One response that runs; it is kept in `kept`, where there is one, before its end is sent."""

    def __init__(
        self,
        exchange: Exchange,
        job: Job,
        reply: Reply,
        response: Fields,
        *,
        summarizes: bool,
        kept: KeptResponses | None,
        conversation: list[Item],
    ) -> None:
        self._exchange = exchange
        self._job = job
        self._reply = reply
        self._response = response
        self._events = Events()
        self._output = Output(self._events, summarizes=summarizes)
        self._headers = generation.headers_of([job])
        self._kept = kept
        self._conversation = conversation

    async def send(self, *, stream: bool) -> None:
        """Sends all of it. Raises what the job's iteration raises, unless a stream has begun: then its last event says
        it."""
        if not stream:
            async for delta in self._job:
                self.take(0, delta)
            await self._exchange.answer(encode(self._response), headers=self._headers)
            return
        try:
            await streaming.stream(self._exchange, [self._job], self, self._headers)
        except LocalrunError as error:
            if not self._exchange.started:
                raise
            self._response = response_object.failed(self._response, self._output.items, error)
            await self._exchange.close_stream(self.end())

    # --- as the writer of a stream -------------------------------------------------------------------------------

    def begin(self) -> bytes:
        return self._event("response.created") + self._event("response.in_progress")

    def take(self, _: int, delta: Delta) -> bytes:
        """With the final delta the response has ended."""
        told = self._output.take(self._reply.take(delta), delta.logprobs)
        if delta.finish is None:
            return told
        finish, usage = generation.ended(delta)
        told += self._output.finish(status="incomplete" if finish is Finish.LENGTH else "completed")
        self._response = response_object.ended(
            self._response, self._output.items, finish, usage, self._reply.n_thinking
        )
        if self._kept is not None:
            self._kept.add(self._response, self._conversation)
        return told

    def end(self) -> bytes:
        """How it ended, also when it broke off."""
        return self._event(f"response.{self._response['status']}")

    def _event(self, kind: str) -> bytes:
        return self._events.event(kind, {"response": self._response})
