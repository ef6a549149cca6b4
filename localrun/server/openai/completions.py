"""POST /v1/completions, and Mistral's /v1/fim/completions. llama-server's `/infill` is in `llama_server/`.

Prompts go to the model as they are, control tokens included; each of them, and each of its answers, is a job of its
own. With `suffix` the model fills in between the two. A prompt longer than the context is refused with both numbers;
nothing is cut silently. Without `max_tokens` an answer goes on until the model ends it or the context is full, as with
llama-server and Ollama (OpenAI stops at 16).

With `echo` and `logprobs` the answer has the log-probabilities of the prompt as well, which evaluations read with
`max_tokens` 0 or 1. Then every token of the prompt is computed, whatever the cache has.

A request to fill in the middle is like one of completions, its answer like that of chat. A model without FIM tokens is
refused, also when there is no suffix: an editor wants code that fits, not a chat model's continuation.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence

import msgspec

from localrun.errors import BadRequest
from localrun.server import streaming
from localrun.server.http import fields
from localrun.server.http.exchange import Exchange, apart
from localrun.server.http.fields import MaxTokens, SamplingFields
from localrun.server.jobs.job import Job
from localrun.server.openai.answer import Answer, ChatChunks, Chunks, Fields, piece_text
from localrun.server.openai.bodies import MAX_ANSWERS, Choices, CommonFields
from localrun.server.parsing.pieces import PlainParser, Reply
from localrun.server.prompting.segments import check_ids, infill
from localrun.server.routing import RoutingInput
from localrun.server.runtime import Runtime
from localrun.wire import ChosenLogprob, Delta, Segment, TokenLogprob

Prompt = str | list[int]


class CompletionBody(CommonFields, frozen=True, kw_only=True):
    """POST /v1/completions."""

    prompt: str | list[str | fields.TokenId | list[fields.TokenId]]
    echo: bool | None = None
    logprobs: fields.TopLogprobs | bool | None = None
    best_of: Choices | None = None
    suffix: str | None = None

    @property
    def n_candidates(self) -> int:
        """Answers that are generated for each prompt; the best `n_choices` of them are sent."""
        return self.best_of or self.n_choices

    @property
    def n_logprobs(self) -> int | None:
        """Alternatives of each token, by a number or, as for chat, a switch; None without log-probabilities."""
        return None if self.logprobs is False or self.logprobs is None else int(self.logprobs)

    @property
    def scores_prompt(self) -> bool:
        """Whether the log-probabilities of the prompt are wanted, too."""
        return bool(self.echo) and self.n_logprobs is not None

    def check_supported(self) -> None:
        """Raises BadRequest for fields that contradict each other, and for what this build does not do."""
        if self.n_candidates < self.n_choices:
            raise BadRequest.of("best_of", f"must not be below n ({self.n_choices})")
        if self.stream and self.n_candidates > self.n_choices:
            raise BadRequest.of("best_of", "the best is known at the end only; leave stream or best_of out")
        if self.scores_prompt and self.stream:
            raise BadRequest.of(
                "echo", "log-probabilities of the prompt are not streamed; leave stream, echo or logprobs out"
            )
        if self.max_output == 0 and not self.echo:
            raise BadRequest.of("max_tokens", "0 needs echo, for there would be no answer")
        if self.suffix and self.echo:
            raise BadRequest.of("echo", "not together with suffix; leave one of the two out")

    def prompts(self) -> list[Prompt]:
        """The prompts, each as text or as token ids. Raises BadRequest for none, a mixture, and too many."""
        if isinstance(self.prompt, str):
            prompts: list[Prompt] = [self.prompt]
        elif self.prompt and all(isinstance(item, int) for item in self.prompt):
            prompts = [[item for item in self.prompt if isinstance(item, int)]]
        else:
            prompts = [item for item in self.prompt if not isinstance(item, int)]
            if len(prompts) != len(self.prompt) or len({type(item) for item in prompts}) != 1:
                raise BadRequest.of(
                    "prompt",
                    "must be a text, a list of texts, a list of token ids, or a list of such lists, not empty "
                    "and not mixed",
                )
        if not self.suffix and not all(prompts):
            raise BadRequest.of("prompt", "must not be empty")
        if self.suffix and not isinstance(prompts[0], str):
            raise BadRequest.of("suffix", "needs prompts that are text, not token ids")
        if len(prompts) * self.n_candidates > MAX_ANSWERS:
            raise BadRequest.of(
                "prompt",
                f"{len(prompts)} prompts with {self.n_candidates} answers each are more than {MAX_ANSWERS} "
                f"answers in one request; send several",
            )
        return prompts


class FimBody(SamplingFields, frozen=True, kw_only=True):
    """POST /v1/fim/completions, as Mistral has it."""

    model: str = ""
    prompt: str
    suffix: str | None = None
    max_tokens: MaxTokens | None = None
    random_seed: fields.Seed | None = None
    stream: bool | None = None


def check_tokens(prompts: Sequence[Prompt], n_vocab: int) -> None:
    """Raises BadRequest for a token id outside the vocabulary; a text holds none."""
    for prompt in prompts:
        if not isinstance(prompt, str):
            check_ids(prompt, n_vocab, "prompt")


class CompletionChunks(Chunks):
    """Text as the model wrote it. `echoes` are the prompts to put before the choices' text; empty for none."""

    id_prefix = "cmpl-"
    stream_object = "text_completion"
    whole_object = "text_completion"
    before_text = b'"text":'
    after_text = b""
    no_text = b'"text":""'

    def __init__(
        self, *, request_id: str, model: str, n_choices: int, echoes: Sequence[str] = (), shows_logprobs: bool = True
    ) -> None:
        replies = [Reply(PlainParser()) for _ in range(n_choices)]
        super().__init__(request_id=request_id, model=model, replies=replies)
        self._echoes = echoes
        self._shows_logprobs = shows_logprobs
        self._offsets: dict[int, int] = {}
        self._decoders = [codecs.getincrementaldecoder("utf-8")(errors="replace") for _ in replies]
        self._scores: dict[int, list[ChosenLogprob]] = {}

    def first(self, index: int) -> bytes:
        return self.text(index, self._echoes[index]) if self._echoes else b""

    def update(self, index: int, delta: Delta) -> bytes:
        return self.text(index, delta.text, delta.logprobs) if delta.text or delta.logprobs else b""

    def gather(self, index: int, delta: Delta) -> None:
        super().gather(index, delta)
        if delta.scores is not None:
            # After an engine died those of a prompt begin anew.
            self._scores.setdefault(index, [])[delta.scores.first :] = delta.scores.tokens

    def choice(self, index: int, reason: str) -> Fields:
        echoed = self._echoes[index] if self._echoes else ""
        scores, said = self._scores.get(index, []), self._replies[index].gathered
        logprobs = [*scores, *said.logprobs] if self._shows_logprobs else None
        return {
            "index": index,
            "text": echoed + said.content_text,
            "logprobs": _without_first(self.logprobs(index, logprobs), bool(scores)) if logprobs else None,
            "finish_reason": reason,
        }

    def score(self, index: int) -> float:
        """How probable a gathered choice was to the model: the mean over its tokens, by which `best_of` chooses."""
        kept = self._replies[index].gathered.logprobs
        return sum(chosen.logprob for chosen in kept) / len(kept) if kept else 0.0

    def logprobs(self, index: int, logprobs: Sequence[ChosenLogprob]) -> Fields:
        """`text_offset` counts whole characters from the start of the choice's text, so the parts of a character have
        the same. What a tokenizer puts in front of a prompt (BOS, a space) is not in the text."""
        scores, decoder = self._scores.get(index), self._decoders[index]
        if index not in self._offsets:
            prompt = b"".join(chosen.piece for chosen in scores or ()).decode("utf-8", errors="replace")
            self._offsets[index] = len(self._echoes[index]) - len(prompt) if scores else 0
        offset = self._offsets[index]
        offsets: list[int] = []
        for chosen in logprobs:
            if not b"\x80" <= chosen.piece[:1] < b"\xc0":  # no further part of a character
                offset += len(decoder.decode(b"", final=True))
            offsets.append(max(0, offset))
            offset += len(decoder.decode(chosen.piece))
        self._offsets[index] = offset
        return {
            "tokens": [piece_text(chosen.piece) for chosen in logprobs],
            "token_logprobs": [chosen.logprob for chosen in logprobs],
            "top_logprobs": [_by_text((*chosen.top, chosen)) if chosen.top else {} for chosen in logprobs],
            "text_offset": offsets,
        }


def _by_text(top: Sequence[TokenLogprob | ChosenLogprob]) -> dict[str, float]:
    """With the chosen one, as OpenAI has it. Of tokens that have the same text, such as parts of characters, the
    likeliest."""
    found: dict[str, float] = {}
    for other in top:
        found.setdefault(piece_text(other.piece), other.logprob)
    return found


def _without_first(logprobs: Fields, is_prompt: bool) -> Fields:
    """The first token of a prompt comes after nothing, so it has no probability."""
    if is_prompt:
        logprobs["token_logprobs"][0] = logprobs["top_logprobs"][0] = None
    return logprobs


async def complete(runtime: Runtime, exchange: Exchange) -> None:
    await answer_completion(runtime, exchange, await exchange.read_json(CompletionBody))


async def answer_completion(
    runtime: Runtime, exchange: Exchange, body: CompletionBody, answer_type: type[Answer] = Answer
) -> None:
    """Also used by routes whose bodies extend this one."""
    body.check_supported()
    prompts = [prompt for prompt in body.prompts() for _ in range(body.n_candidates)]
    grammar = await apart(body.answer_grammar)
    question = RoutingInput(prompts=prompts, suffix=body.suffix or "", has_schema=grammar is not None)
    async with streaming.entered(runtime, exchange, body, question, n_jobs=len(prompts)) as (body, _, jobs):
        check_tokens(prompts, jobs[0].ready.n_vocab)
        chooses = body.n_candidates > body.n_choices
        plan = await streaming.plan(
            body,
            jobs[0],
            max_output=body.max_output,
            grammar=grammar,
            logprobs=body.n_logprobs is not None or chooses,
            n_probs=body.n_logprobs or 0,
        )
        plan = msgspec.structs.replace(plan, scores_prompt=body.scores_prompt)
        echoes = [one if isinstance(one, str) else await jobs[0].text_of(one) for one in prompts] if body.echo else ()
        for index, (job, prompt) in enumerate(zip(jobs, prompts, strict=True)):
            await job.submit(
                plan,
                segments=_segments(job, prompt, body.suffix),
                tokens=None if isinstance(prompt, str) else prompt,
                choice=index % body.n_candidates,
            )
        chunks = CompletionChunks(
            request_id=streaming.answer_id(jobs),
            model=body.model,
            n_choices=len(jobs),
            echoes=echoes,
            shows_logprobs=body.n_logprobs is not None,
        )
        answer = answer_type(
            exchange,
            jobs,
            chunks,
            n_per_prompt=body.n_candidates,
            include_usage=body.include_usage,
            prompt_field="prompt",
        )
        if chooses:
            await answer.send_choices(best(chunks, await answer.gather(), body.n_candidates, body.n_choices))
        else:
            await answer.send(stream=bool(body.stream), wanted=body)


def best(chunks: CompletionChunks, reasons: list[str], n_candidates: int, n_choices: int) -> list[Fields]:
    """Of each prompt's candidates the `n_choices` that were the most probable per token, best first."""
    chosen: list[Fields] = []
    for start in range(0, len(reasons), n_candidates):
        ranked = sorted(range(start, start + n_candidates), key=chunks.score, reverse=True)
        for index in ranked[:n_choices]:
            chosen.append(chunks.choice(index, reasons[index]) | {"index": len(chosen)})
    return chosen


def _segments(job: Job, prompt: Prompt, suffix: str | None) -> tuple[Segment, ...]:
    if not isinstance(prompt, str):
        return ()
    if suffix:
        return infill(job.model.header, prompt, suffix, field="suffix")
    return (Segment(prompt),)


async def complete_fim(runtime: Runtime, exchange: Exchange) -> None:
    body = await exchange.read_json(FimBody)
    if body.seed is None and body.random_seed is not None:
        body = msgspec.structs.replace(body, seed=body.random_seed)
    question = RoutingInput(prompts=[body.prompt], suffix=body.suffix or "", fills_in=True)
    async with streaming.entered(runtime, exchange, body, question) as (body, _, jobs):
        segments = infill(jobs[0].model.header, body.prompt, body.suffix or "", field="model")
        plan = await streaming.plan(body, jobs[0], max_output=body.max_tokens)
        await jobs[0].submit(plan, segments=segments)
        chunks = ChatChunks(request_id=streaming.answer_id(jobs), model=body.model, replies=[Reply(PlainParser())])
        answer = Answer(exchange, jobs, chunks, n_per_prompt=1, include_usage=False, prompt_field="prompt")
        await answer.send(stream=bool(body.stream))
