"""From computed rows to answers: what token is drawn, what of it is said, and when an answer is over.

Owner: the engine's main thread; what takes long is drawn in threads (`grammars.py`).
Does not: decode, or end a request: that is the engine's, at each `AnswerEnd`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

from localrun.engine.backend import Backend, Logprobs
from localrun.engine.report import Report
from localrun.engine.request import Request
from localrun.engine.sample.constraint import DEAD_END, UNKNOWN
from localrun.engine.sample.grammars import GrammarQueue, LateRows
from localrun.engine.sample.text import text_of
from localrun.errors import BadRequest, LocalrunError, NoNumbers, UnknownToken
from localrun.wire import ChosenLogprob, Finish, Phase, Scores, Submit

_UNKNOWN_TOKEN = (
    "llama.cpp chose a token that this model does not have, so the answer ends here; ask again, and if it happens "
    "again on a GPU, compute on the CPU (--gpu-layers 0)"
)


class AnswerEnd(NamedTuple):
    """An answer has come to its end at this time, or will never begin."""

    request: Request
    finish: Finish
    now_s: float
    error: LocalrunError | None = None


class LogitsRow(NamedTuple):
    """A row of the last decode whose logits say a request's next token. The rows after it were computed for `drafts`,
    one after the other."""

    request: Request
    at: int
    drafts: tuple[int, ...] = ()


def non_finite_error(request: Request) -> NoNumbers:
    """Why a request ends whose logits are none."""
    way_out = "for this prompt; on ARM --kv-type q8_0 may help, for sums of 16 bits are too small for some models"
    if request.adapters.adapters:
        way_out = "with these adapters; give them less strength"
    return NoNumbers(f"the model computes NaN instead of numbers {way_out}")


class Answers:
    """See the module. The caller ends the request of an `AnswerEnd` before it asks for the next one. What became ready
    beside the steps `ring`s."""

    def __init__(self, backend: Backend, report: Report, clock: Callable[[], float], ring: Callable[[], None]) -> None:
        self._backend = backend
        self._report = report
        self._clock = clock
        self._grammars = GrammarQueue(backend, ring)
        self._late = LateRows(backend, ring)

    def begin(self, request: Request, submit: Submit) -> AnswerEnd | None:
        """A new request; with a grammar it waits until that is compiled. What another engine said of its answer is not
        said again."""
        resume = submit.resume
        tokens = request.tokens if request.scoring is None else request.scoring.tokens
        said = [token for token in tokens if token >= 0] if request.chunks else tokens
        request.sampler.accept(said, resume.mu if resume is not None else None)
        if submit.grammar is not None:
            self._grammars.add(request, submit, submit.grammar)
        for token in request.output:
            request.text.feed(self._shown(request, token))
        # With a grammar that is known as soon as it has seen the tokens (`collect`).
        return self._over(request, self._clock()) if request.n_output and submit.grammar is None else None

    def extend(self, rows: Sequence[LogitsRow]) -> Iterator[AnswerEnd]:
        """Draw the next token of each request, from its row of the last decode. Slow ones follow with `collect`.

        Where that is what the request had drafted, the next row was computed after it and gives one more token, and so
        on: what is drawn does not depend on what was drafted, only how many tokens a step gives.
        """
        while rows:
            late = {
                row.request for row in rows if row.request.constraint is not None and row.request.constraint.is_slow
            }
            if late:
                for row in rows:
                    if row.request in late:
                        self._late.postpone(row.request, row.at)
                    self._report.delta(row.request)  # each in its place, and all of them
                rows = [row for row in rows if row.request not in late]
            tokens = self._backend.sample([(row.request.sampler, row.at) for row in rows])
            now_s = self._clock()
            right: list[LogitsRow] = []
            for row, token in zip(rows, tokens, strict=True):
                request, at, drafts = row
                is_right = bool(drafts) and drafts[0] == token
                logprobs = None if request.n_probs is None else partial(self._backend.logprobs, at)
                over = self._take(request, logprobs, token, now_s, is_computed=is_right)
                if over is not None:
                    yield over
                elif is_right:
                    right.append(LogitsRow(request, at + 1, drafts[1:]))
            rows = right

    def score(self, request: Request, row: int, n_rows: int) -> None:
        """The scores that the next `n_rows` tokens of a prompt give, of which the first is in this row of the last
        decode. Those that were said before a part was computed anew are left out."""
        scoring = request.scoring
        assert scoring is not None
        chosen: list[ChosenLogprob] = []
        first, end = scoring.n_reported, min(request.n_computed + n_rows + 1, len(scoring.tokens))
        for at in range(first, end):
            token = scoring.tokens[at]
            piece = text_of(self._backend, token)
            if at:
                before = row + at - 1 - request.n_computed
                chosen.append(ChosenLogprob(token, piece, *self._backend.logprobs(before, token, request.n_probs or 0)))
            else:  # the first one comes after nothing
                chosen.append(ChosenLogprob(token, piece, 0.0, ()))
        if chosen:
            scoring.n_reported = end
            self._report.delta(request).scores = Scores(first, tuple(chosen))

    def collect(self, now_s: float) -> Iterator[AnswerEnd]:
        """Take what became ready beside the steps: grammars, and tokens that took long."""
        if self._grammars.entries:
            for request, error, notices in self._grammars.collect():
                if notices:
                    self._report.delta(request).notices = notices
                if error is not None:
                    yield AnswerEnd(request, Finish.ERROR, now_s, error)
                elif request.n_output and (over := self._over(request, now_s)) is not None:
                    yield over
        if self._late.rows:
            for request, token, logprobs in self._late.collect():
                over = self._take(request, logprobs, token, self._clock())
                if over is not None:
                    yield over

    @property
    def look_again_s(self) -> float:
        """When to `collect`, though nothing rang."""
        return self._grammars.look_again_s

    @property
    def is_waited_for(self) -> bool:
        """Whether a grammar is being compiled, or a token drawn, beside the steps."""
        return bool(self._grammars.entries or self._late.rows)

    def end(self, request: Request) -> None:
        if request in self._late.rows:
            self._late.finish(request)
        request.sampler.close()
        if request.awaits_grammar:
            self._grammars.drop(request)

    def close(self) -> None:
        """End the threads."""
        self._grammars.close()
        self._late.close()

    def _take(
        self, request: Request, logprobs: Logprobs | None, token: int, now_s: float, *, is_computed: bool = False
    ) -> AnswerEnd | None:
        """A token was chosen; `logprobs` are of its row, where they are wanted. `is_computed`: it was drafted, so it is
        in its cell already."""
        constraint = request.constraint
        if token == DEAD_END:
            if constraint is not None and constraint.problem:
                return AnswerEnd(request, Finish.ERROR, now_s, BadRequest(constraint.problem))
            return AnswerEnd(request, Finish.ERROR, now_s, non_finite_error(request))
        if token == UNKNOWN:
            return AnswerEnd(request, Finish.ERROR, now_s, UnknownToken(_UNKNOWN_TOKEN))
        if request.ends_at_eog and token in self._backend.eog_tokens:
            if request.scoring is not None and logprobs is not None:
                # Whoever reads scores counts on those of all that was drawn, and leaves the last one out.
                self._note_logprob(request, logprobs, token, text_of(self._backend, token))
            return AnswerEnd(request, Finish.STOP, now_s)
        request.append(token, now_s)
        request.n_computed += is_computed
        delta = self._report.delta(request)
        delta.phase = Phase.DECODE  # also of one that lost its slot while its token was drawn
        delta.tokens.append(token)
        delta.text += request.text.feed(self._shown(request, token))
        delta.mu = request.sampler.mu
        if logprobs is not None:
            self._note_logprob(request, logprobs, token, self._backend.piece(token))
        return self._over(request, now_s)

    def _note_logprob(self, request: Request, logprobs: Logprobs, token: int, piece: bytes) -> None:
        """Of a token that was drawn from the row of these."""
        logprob, top = logprobs(token, request.n_probs or 0)
        delta = self._report.delta(request)
        delta.logprobs = [*(delta.logprobs or []), ChosenLogprob(token, piece, logprob, top)]

    def _shown(self, request: Request, token: int) -> bytes:
        """What a token adds to the text: of a control token its name, where that is shown, or a stop string, as in many
        a Modelfile."""
        if piece := self._backend.piece(token):
            return piece
        name = self._backend.control_text(token)
        return name.encode() if request.shows_control or request.text.ends_at(name) else b""

    def _over(self, request: Request, now_s: float) -> AnswerEnd | None:
        """Whether an answer of at least one token has come to its end."""
        constraint = request.constraint
        if request.text.stopped is not None or (constraint is not None and constraint.is_complete):
            return AnswerEnd(request, Finish.STOP, now_s)
        return AnswerEnd(request, Finish.LENGTH, now_s) if request.n_output >= request.max_output else None
