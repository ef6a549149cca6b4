"""One request inside the engine: pure state and counters.

There is no prefill phase and no decode phase: `n_computed` tokens are in KV cells and catch up with `n_tokens`, the
prompt and what was generated. Whether a request is prefilling is a question, not a state (`is_prefilling`).

Invariant: 0 <= n_computed <= n_tokens; `seq` is set exactly while the request runs.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Sequence
from dataclasses import dataclass

from localrun.engine.backend import BASE, HASH_BYTES, AdapterSet, Backend, MediaChunk, Sampler
from localrun.engine.cache.tree import PrefixKey
from localrun.engine.sample import chain
from localrun.engine.sample.constraint import Constraint
from localrun.engine.sample.text import MediaSpan, Prompt, TextStream
from localrun.errors import BadRequest, ContextExceeded, LocalrunError, QueueFull
from localrun.wire import Delta, DraftCounts, DraftSource, Finish, Lane, MediaKind, Phase, Resume, Submit, Usage

# So many rows of a step have logits for the scores of a prompt: as many as there are for drafts, which no step has
# beside prompts.
SCORED_ROWS = 32


class Scoring:
    """A prompt whose log-probabilities are wanted. These need the logits of every prompt token, so the prompt is fed in
    parts of `SCORED_ROWS` tokens, and `Request.tokens` holds only what was fed so far. Cached prefixes have no logits:
    an `own_salt` keeps the request out of the prefix cache. Scores of the first `n_reported` of its `tokens` were
    reported."""

    def __init__(self, tokens: list[int]) -> None:
        self.tokens = tokens
        self.n_reported = 0

    @property
    def is_over(self) -> bool:
        return self.n_reported == len(self.tokens)


@dataclass(eq=False, slots=True)
class Request:
    """`tokens` is the prompt and then the output. Times are seconds of the monotonic clock.

    `chunks` are the rows of media in it, which are computed in native calls of their own.

    `target_itl_s` is how long a step may hold this stream up, 0 is no limit. `draft_model_path` is empty for the
    engine's own. `skips_steps`: it takes no part in steps now, for it is computed in the background, its next token is
    drawn beside the steps, or the rows of its next chunk are not encoded yet. `is_long`: it is longer than a stream,
    and its steps are computed in the pool beside the streams, whose context `is_held` while it computes a prompt.
    `rank`, `waited_s`, `n_preempted` and `requeued_at_s` are the policy's: the rank that a running request started
    with, what it waited until then, how often and when it last gave up a slot. `drafts` is None for one that does not
    draft. Until it has `isolated_until` tokens in cells it is computed alone, for its logits, or those of others in the
    same call, were no numbers (`Engine._isolate`). `was_aborted`: its last step was aborted for a higher
    lane; its next step must not be. With an `own_salt` it neither uses nor leaves anything in the prefix cache.
    """

    id: int
    tokens: list[int]
    n_prompt: int
    max_output: int
    sampler: Sampler
    text: TextStream
    client: str = ""
    lane: Lane = Lane.DEFAULT
    target_itl_s: float = 0.0
    arrived_at_s: float = 0.0
    ends_at_eog: bool = True
    n_probs: int | None = None
    shows_control: bool = False
    awaits_grammar: bool = False
    awaits_adapters: bool = False
    draft_model_path: str = ""
    adapters: AdapterSet = BASE
    namespace: bytes = b""
    constraint: Constraint | None = None
    drafts: DraftTotals | None = None
    chunks: tuple[MediaSpan, ...] = ()
    own_salt: bytes = b""
    scoring: Scoring | None = None

    seq: int | None = None
    slot: int | None = None
    n_computed: int = 0
    next_stop: int | None = None
    skips_steps: bool = False
    is_long: bool = False
    is_held: bool = False
    isolated_until: int = 0
    n_isolations: int = 0
    was_aborted: bool = False
    n_cached: int = 0
    started_at_s: float | None = None
    first_token_at_s: float | None = None
    last_token_at_s: float | None = None
    rank: int = 0
    waited_s: float = 0.0
    n_preempted: int = 0
    requeued_at_s: float = -math.inf

    @property
    def output(self) -> list[int]:
        return self.tokens[self.n_prompt :]

    @property
    def was_started(self) -> bool:
        return self.started_at_s is not None

    @property
    def awaits_something(self) -> bool:
        """Whether it cannot start yet: its grammar is being compiled, or its adapters loaded."""
        return self.awaits_grammar or self.awaits_adapters

    @property
    def batch_group(self) -> bytes:
        """Requests are computed together if this is the same: they have the same adapters, are in the same context, and
        none is isolated."""
        batch_group = self.adapters.hash if not self.is_long else self.adapters.hash + b"long"
        return batch_group if not self.isolated_until else batch_group + b"%d" % self.id

    @property
    def sits_out(self) -> bool:
        """Whether it takes no part in steps now."""
        return self.skips_steps or self.is_held

    @property
    def key(self) -> PrefixKey:
        """What the cache knows it by."""
        atoms = tuple((span.start, span.end) for span in self.chunks)
        return PrefixKey(self.tokens, self.namespace + (self.own_salt or self.adapters.hash), atoms)

    @property
    def is_scoring(self) -> bool:
        """Whether log-probabilities of its prompt are still to be said."""
        return self.scoring is not None and not self.scoring.is_over

    @property
    def n_whole_prompt(self) -> int:
        """Tokens of its prompt, read or not."""
        return self.n_prompt if self.scoring is None else len(self.scoring.tokens)

    @property
    def n_known(self) -> int:
        """Tokens that it has, read or not."""
        return self.n_whole_prompt + self.n_output

    def read_on(self) -> int:
        """The next part of a prompt whose scores are wanted. Returns how many tokens that is; 0 at the end."""
        if self.scoring is None:
            return 0
        more = self.scoring.tokens[self.n_prompt : self.n_prompt + SCORED_ROWS] if not self.n_output else []
        self.tokens += more
        self.n_prompt += len(more)
        return len(more)

    def read_anew(self) -> None:
        """As at the beginning, for what was computed is lost. What was said is not said again."""
        if self.is_scoring:
            self.tokens = self.tokens[:1]  # another list: the cache may still have a sequence with all of them
            self.n_prompt = 1

    @property
    def chunk_table(self) -> tuple[tuple[int, MediaChunk], ...]:
        """As `Backend.set_chunks` wants it."""
        return tuple((span.start, span.chunk) for span in self.chunks)

    @property
    def n_tokens(self) -> int:
        return len(self.tokens)

    @property
    def n_output(self) -> int:
        return len(self.tokens) - self.n_prompt

    @property
    def n_left(self) -> int:
        """Tokens that its limit leaves of its answer."""
        return self.max_output - self.n_output

    @property
    def n_pending(self) -> int:
        """Tokens that are known but not in KV cells yet. At least 1 while the request runs."""
        return len(self.tokens) - self.n_computed

    @property
    def n_grantable(self) -> int:
        """Pending tokens that one step may compute: a step ends at `next_stop`, where the cache saves a state, and
        where a chunk begins or ends."""
        end = len(self.tokens) if self.next_stop is None else min(len(self.tokens), self.next_stop)
        for span in self.chunks:
            if self.n_computed < span.end:
                end = min(end, span.start if self.n_computed < span.start else span.end)
                break
        return end - self.n_computed

    @property
    def next_chunk(self) -> MediaSpan | None:
        """The chunk that the next pending token is a row of, if it is one."""
        span = self.chunk_after(self.n_computed) if self.chunks else None
        return span if span is not None and span.start <= self.n_computed else None

    def chunk_after(self, n_tokens: int) -> MediaSpan | None:
        """The first chunk that is not all within the first `n_tokens`."""
        return next((span for span in self.chunks if n_tokens < span.end), None)

    @property
    def last_start(self) -> int:
        """Where the rows begin whose logits are wanted first: the last token, or the chunk that it is a row of."""
        return self.key.floor(len(self.tokens) - 1) if self.chunks else len(self.tokens) - 1

    @property
    def is_prefilling(self) -> bool:
        """True while more than the last sampled token is pending, or nothing was sampled yet."""
        n_tokens = len(self.tokens)
        return n_tokens - self.n_computed > 1 or n_tokens == self.n_prompt

    @property
    def phase(self) -> Phase:
        if self.seq is None:
            return Phase.QUEUED
        n_tokens = len(self.tokens)
        is_prefilling = n_tokens - self.n_computed > 1 or n_tokens == self.n_prompt
        return Phase.PREFILL if is_prefilling else Phase.DECODE

    def append(self, token: int, now_s: float) -> None:
        """A token was sampled."""
        self.tokens.append(token)
        if self.first_token_at_s is None:
            self.first_token_at_s = now_s
        self.last_token_at_s = now_s

    def usage(self, now_s: float) -> Usage:
        """Counts and times so far."""
        started = self.started_at_s if self.started_at_s is not None else now_s
        first = self.first_token_at_s if self.first_token_at_s is not None else now_s
        last = self.last_token_at_s if self.last_token_at_s is not None else first
        return Usage(
            n_prompt=self.n_whole_prompt,
            n_cached=self.n_cached,
            n_output=self.n_output,
            queued_s=max(0.0, started - self.arrived_at_s),
            prefill_s=max(0.0, first - started),
            decode_s=max(0.0, last - first),
            drafts=self.drafts.by_source() if self.drafts is not None else (),
            speedup=self.drafts.speedup(self.n_output) if self.drafts is not None else 1.0,
            n_media=sum(span.chunk.n_tokens for span in self.chunks),
        )


def check(submit: Submit, prompt: Prompt, backend: Backend) -> None:
    """Raises BadRequest or ContextExceeded for what this model cannot do."""
    tokens, chunks = prompt
    if not tokens:
        raise BadRequest("the prompt is empty; send at least one token", field="prompt")
    output = submit.resume.output if submit.resume is not None else ()
    if output and not 0 <= min(output) <= max(output) < backend.n_vocab:
        raise BadRequest("the beginning of the answer has tokens that this model does not have")
    if len(tokens) >= backend.n_ctx:
        raise ContextExceeded(len(tokens), backend.n_ctx)
    check_chunks(chunks, backend.batch.capacity)
    chain.check(submit.sampling, n_vocab=backend.n_vocab)


def check_chunks(chunks: Sequence[MediaSpan], n_batch: int, where: str = "the prompt") -> None:
    """Raises BadRequest for a chunk that no batch of `n_batch` rows can compute. `where` names what it is a part of."""
    for _, chunk, _, field in chunks:
        if not chunk.is_causal and chunk.n_tokens > n_batch:
            kind = "picture" if chunk.media.kind is MediaKind.IMAGE else "recording"
            raise BadRequest(
                f"{field or where}: a {kind} has {chunk.n_tokens} tokens that must be computed at once, and at most "
                f"{n_batch} can be; send a smaller one, or give localrun serve more --batch-tokens",
                field=field or None,
            )


def new_request(
    submit: Submit, prompt: Prompt, backend: Backend, *, target_itl_s: float, adapters: AdapterSet = BASE
) -> Request:
    """A checked message as a request; `target_itl_s` and `adapters` are for those that do not name their own. One that
    another engine had begun is as if it had been preempted here. Raises BadRequest."""
    own = adapters if submit.adapters is None else AdapterSet.of(submit.adapters)
    tokens, chunks = prompt
    most = backend.n_ctx - len(tokens)
    resume = submit.resume or Resume()
    scoring = None
    if submit.scores_prompt and tokens and not chunks and not resume.output:
        scoring, tokens = Scoring(tokens), tokens[:1]
    # What others computed of a prompt has no logits.
    is_shared = submit.caches and scoring is None
    return Request(
        id=submit.id,
        tokens=[*tokens, *resume.output],
        n_prompt=len(tokens),
        max_output=most if submit.n_predict < 0 else min(submit.n_predict, most),
        sampler=backend.sampler(submit.sampling, ignore_eos=submit.ignore_eos),
        text=TextStream(submit.stop),
        client=submit.client,
        lane=submit.lane,
        target_itl_s=target_itl_s if submit.target_itl_s is None else submit.target_itl_s,
        arrived_at_s=submit.arrived_at_s,
        ends_at_eog=not submit.ignore_eos,
        n_probs=submit.n_probs if submit.logprobs else None,
        shows_control=submit.show_control,
        draft_model_path=submit.draft_model_path,
        adapters=own,
        namespace=submit.namespace,
        chunks=chunks,
        own_salt=b"" if is_shared else secrets.token_bytes(HASH_BYTES),
        scoring=scoring,
        n_cached=resume.n_cached,
        started_at_s=resume.started_at_s,
        first_token_at_s=resume.first_token_at_s,
        last_token_at_s=resume.last_token_at_s,
    )


def refusal(request_id: int, error: LocalrunError | None, *, n_prompt: int) -> Delta:
    """The first and last that is heard of a request that never starts. Without an error it was cancelled."""
    return Delta(
        id=request_id,
        phase=Phase.DONE,
        n_computed=0,
        n_output=0,
        finish=Finish.CANCELLED if error is None else Finish.ERROR,
        usage=Usage(n_prompt, 0, 0, 0.0, 0.0, 0.0),
        error_code=None if error is None else error.code,
        error_message=None if error is None else error.message,
        retry_after_s=error.retry_after_s if isinstance(error, QueueFull) else None,
    )


class DraftTotals:
    """What was drafted of each source, and what became of it. All of it counts in the `total`, too."""

    def __init__(self, total: DraftTotals | None = None) -> None:
        self._total = total
        self.n_drafted = self.n_accepted = 0
        self.n_saved = 0.0  # steps, of a request: one without drafts would have given a token
        self._counts: dict[DraftSource, list[float]] = {}

    def add(self, source: DraftSource, *, n_drafted: int = 0, n_accepted: int = 0, seconds: float = 0.0) -> None:
        """A draft; without tokens only the time that it took."""
        counts = self._counts.setdefault(source, [0, 0, 0, 0.0])
        self.n_drafted += n_drafted
        self.n_accepted += n_accepted
        counts[0] += n_drafted > 0
        counts[1] += n_drafted
        counts[2] += n_accepted
        counts[3] += seconds
        if self._total is not None:
            self._total.add(source, n_drafted=n_drafted, n_accepted=n_accepted, seconds=seconds)

    def by_source(self) -> tuple[DraftCounts, ...]:
        """For messages."""
        return tuple(
            DraftCounts(source, int(n), int(n_drafted), int(n_accepted), seconds)
            for source, (n, n_drafted, n_accepted, seconds) in self._counts.items()
        )

    def speedup(self, n_output: int) -> float:
        """How many times as fast an answer of so many tokens was as without drafts: a step without any counts as what a
        token costs."""
        return n_output / max(1.0, n_output - self.n_saved) if n_output else 1.0
