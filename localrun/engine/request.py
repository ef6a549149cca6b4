"""One request inside the engine: pure state and counters.

There is no prefill phase and no decode phase: `n_computed` tokens are in KV cells and catch up with `n_tokens`, the
prompt and what was generated. Whether a request is prefilling is a question, not a state (`is_prefilling`).

Invariant: 0 <= n_computed <= n_tokens; `seq` is set exactly while the request runs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from localrun.engine.backend import Backend, Sampler
from localrun.engine.cache.tree import Key
from localrun.engine.sample import chain
from localrun.engine.sample.constraint import Constraint
from localrun.engine.sample.text import TextStream
from localrun.errors import BadRequest, ContextExceeded, LocalrunError, QueueFull
from localrun.wire import Delta, Finish, Lane, Phase, Resume, Submit, Usage

if TYPE_CHECKING:
    from localrun.engine.speculate.speculation import Drafting


@dataclass(eq=False, slots=True)
class Request:
    """`tokens` is the prompt and then the output. Times are seconds of the monotonic clock.

    `target_itl_s` is how long a step may hold this stream up, 0 is no limit. `draft_model_path` is empty for the
    engine's own. `is_away`: it takes no part in steps now, for it is computed in the background, or its next token is
    drawn beside the steps. `rank`, `waited_s`, `n_preempted` and `requeued_at_s` are the policy's: the rank that a
    running request started with, what it waited until then, how often and when it last gave up a slot. `drafting` is
    None for one that does not draft.
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
    draft_model_path: str = ""
    constraint: Constraint | None = None
    drafting: Drafting | None = None

    seq: int | None = None
    slot: int | None = None
    n_computed: int = 0
    next_stop: int | None = None
    is_away: bool = False
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
    def key(self) -> Key:
        """What the cache knows it by."""
        return Key(self.tokens)

    @property
    def n_tokens(self) -> int:
        return len(self.tokens)

    @property
    def n_output(self) -> int:
        return len(self.tokens) - self.n_prompt

    @property
    def n_pending(self) -> int:
        """Tokens that are known but not in KV cells yet. At least 1 while the request runs."""
        return len(self.tokens) - self.n_computed

    @property
    def n_grantable(self) -> int:
        """Pending tokens that one step may compute: a step ends at `next_stop`, where the cache saves a state."""
        n_pending = len(self.tokens) - self.n_computed
        return n_pending if self.next_stop is None else min(n_pending, self.next_stop - self.n_computed)

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
            n_prompt=self.n_prompt,
            n_cached=self.n_cached,
            n_output=self.n_output,
            queued_s=max(0.0, started - self.arrived_at_s),
            prefill_s=max(0.0, first - started),
            decode_s=max(0.0, last - first),
            drafts=self.drafting.counts.by_source() if self.drafting is not None else (),
            speedup=self.drafting.speedup if self.drafting is not None else 1.0,
        )


def check(submit: Submit, tokens: list[int], backend: Backend) -> None:
    """Raises BadRequest or ContextExceeded for what this model cannot do."""
    if not tokens:
        raise BadRequest("the prompt is empty; send at least one token", field="prompt")
    output = submit.resume.output if submit.resume is not None else ()
    if output and not 0 <= min(output) <= max(output) < backend.n_vocab:
        raise BadRequest("what the answer begins with has tokens that this model has not")
    if len(tokens) >= backend.n_ctx:
        raise ContextExceeded(len(tokens), backend.n_ctx)
    chain.check(submit.sampling, n_vocab=backend.n_vocab)


def new_request(submit: Submit, tokens: list[int], backend: Backend, *, target_itl_s: float) -> Request:
    """A checked message as a request; `target_itl_s` is for those that do not name their own. One that another engine
    had begun is as if it had been preempted here."""
    most = backend.n_ctx - len(tokens)
    resume = submit.resume or Resume()
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
