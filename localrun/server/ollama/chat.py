"""POST /api/chat.

The conversation goes through the model's chat template; a conversation that is too long loses its oldest messages (see
`truncation.py`), unless `truncate` is false. No messages at all is a request to load the model, or with `keep_alive` 0
to unload it.
"""

from __future__ import annotations

from collections.abc import Sequence

from localrun.server.http import bodies, caller, keep_alive
from localrun.server.http.exchange import Exchange
from localrun.server.jobs import prompt
from localrun.server.jobs.job import Job
from localrun.server.jobs.prompt import Message
from localrun.server.ollama import loading as ollama_loading
from localrun.server.ollama import truncation
from localrun.server.ollama.bodies import ChatBody, Options
from localrun.server.ollama.generation import Answer
from localrun.server.ollama.lines import Kind, Lines
from localrun.server.ollama.truncation import Tokens
from localrun.server.runtime import Runtime
from localrun.wire import Segment


async def chat(runtime: Runtime, exchange: Exchange) -> None:
    """The route's handler."""
    body = bodies.decode(await exchange.read_body(), ChatBody)
    body.check_supported()
    messages = body.template_messages()
    options = body.options or Options()
    ask = caller.ask(exchange, body.model, keep_alive_s=keep_alive.seconds(body.keep_alive), fields=body)
    lines = Lines(body.model, Kind.CHAT)
    async with exchange.while_connected():
        if not messages:
            await ollama_loading.load_or_unload(runtime, exchange, ask, lines)
            return
        async with runtime.job(ask) as job:
            fitted = await _fit(runtime, job, messages, options, may_cut=body.truncate is not False)
            await job.submit(
                segments=fitted.segments,
                tokens=fitted.tokens,
                sampling=options.sampling(),
                n_predict=options.n_predict,
                stop=options.stop_strings,
                logprobs=bool(body.logprobs),
                n_probs=body.top_logprobs or 0,
            )
            answer = Answer(exchange, job, lines, prompt_tokens=None, n_cut=fitted.n_cut)
            await answer.send(stream=body.stream is not False)


class _Fitted:
    """A prompt as the engine takes it: segments, or tokens where they had to be counted. `n_cut` messages are gone, or
    that many tokens of a message that alone was too long."""

    def __init__(self, segments: Sequence[Segment] = (), tokens: Tokens | None = None, n_cut: int = 0) -> None:
        self.segments = segments
        self.tokens = tokens
        self.n_cut = n_cut


async def _fit(runtime: Runtime, job: Job, messages: Sequence[Message], options: Options, *, may_cut: bool) -> _Fitted:
    segments = await prompt.render(runtime, job, messages)
    limit = truncation.limit_tokens(job.n_ctx, options.n_predict)
    # No tokenizer makes more tokens than bytes, but for a BOS and a leading space: most chats need no count.
    if not may_cut or sum(len(segment.text.encode()) for segment in segments) + 8 <= limit:
        return _Fitted(segments=segments)

    async def tokens_of(part: Sequence[Message]) -> Tokens:
        rendered = segments if part is messages else await prompt.render(runtime, job, part)
        return await job.count(rendered)

    tokens, n_cut = await truncation.cut_messages(messages, tokens_of, limit=limit)
    fitting = truncation.cut_tokens(tokens, limit=limit, n_keep=options.n_keep)
    return _Fitted(tokens=fitting, n_cut=n_cut or len(tokens) - len(fitting))
