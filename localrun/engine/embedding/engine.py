"""The step of an embedding engine: fill rows with inputs, compute, hand out what is done.

Owner: the engine process's main thread; the clock is passed in. A step takes as many inputs as its rows hold, of as
many requests as there are, in the order of `turns.py`. Where the model reads from left to right a long input is
computed over several steps, and only one is under way at a time, so that the KV cells of one suffice; where it reads in
both directions, an input with more rows than a step should have is a step of its own.

Rows of pictures and sound are encoded beside the steps (`encoding.py`), and an input waits for those that it needs
next. They are computed in calls of their own, before the step's text. While something is encoded, it has the
processors as long as the steps have them.

If what comes out of a call are no numbers (a damaged model computes such), the inputs whose numbers they are may be to
blame or may only have been computed beside the one that is. They are computed anew, one by one, in wiped cells; what
still has no numbers then ends its request.

Invariant: every submitted request gets exactly one final delta, with all of its vectors before or in it.
Does not: read or write pipes, or tokenize (`inputs.py`).
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Sequence
from itertools import chain
from typing import NamedTuple

import numpy as np

from localrun.engine.backend import DecodeFailed, MediaRows, NoRoom, never_abort
from localrun.engine.embedding import inputs
from localrun.engine.embedding.inputs import Embedder, FloatMatrix, FloatVector, InputTokens
from localrun.engine.embedding.turns import EmbeddingQueue, EmbeddingRequest, InputProgress
from localrun.engine.encoding import Encodings
from localrun.engine.request import refusal
from localrun.engine.sample.text import MediaSpan
from localrun.errors import BadRequest, EngineFailed, LocalrunError, NoNumbers, by_code
from localrun.wire import Delta, Embed, Finish, Phase, Pooling, Resume, Started, Step, StepStats, Vector

log = logging.getLogger("localrun.engine")

# A step that fails as a whole is tried again this often before the process gives up and lets itself be replaced.
MAX_FAILED_STEPS = 3
# Fewer rows than this are not worth cutting a long input for: a batch costs nearly as much with them as without.
LEAST_ROWS = 64
# Inputs that a step tokenizes only to find that they do not fit any more; then it fills up with those that are at hand.
MOST_UNFIT = 4


class Piece(NamedTuple):
    """`n_rows` of an input's tokens, computed in this step as sequence `seq`; of media if they are `span`, whose rows
    are `encoded`."""

    ticket: EmbeddingRequest
    current: InputProgress
    seq: int
    n_rows: int
    span: MediaSpan | None = None
    encoded: FloatMatrix | None = None

    @property
    def is_last(self) -> bool:
        """Whether the input ends with it, so that its sequence is nobody's after the step."""
        return self.n_rows == self.current.n_left


class EmbeddingEngine:
    """See the module. At most `max_queue` requests may be there at once. Encoded media take at most `encoded_bytes`,
    besides what is about to be computed."""

    can_defer_output = False

    def __init__(
        self,
        embedder: Embedder,
        *,
        max_queue: int,
        clock: Callable[[], float],
        encoded_bytes: int = 0,
        ring: Callable[[], None] = lambda: None,
    ) -> None:
        self.wait_s = 0.0
        embedder.tell(ring)
        self._embedder = embedder
        self._clock = clock
        self._turns = EmbeddingQueue(max_tickets=max_queue)
        self._encodings: Encodings[EmbeddingRequest] = Encodings(embedder.projector, encoded_bytes, clock)
        self._encoder_until_s = 0.0
        self._free_seqs = list(reversed(range(embedder.n_seqs)))
        self._isolated: set[tuple[EmbeddingRequest, int]] = set()  # inputs, by their requests and numbers
        self._deltas: dict[int, Delta] = {}
        self._started: list[Started] = []
        self._n_failed_steps = 0
        self._n_steps = self._n_rows_total = 0
        self._step_s = 0.0
        self._n_rows = 0

    @property
    def is_idle(self) -> bool:
        """True when there is neither anything to compute nor to say: the caller may sleep."""
        return not self._turns.tickets and not self._deltas

    # --- requests come and go ----------------------------------------------------------------------------------

    def submit(self, embed: Embed) -> None:
        """A new request. A refusal is reported by the next `step`."""
        resume = embed.resume or Resume()
        ticket = EmbeddingRequest(embed, n_computed=resume.n_cached, started_at_s=resume.started_at_s)
        try:
            self._check(embed)
            if embed.resume is None:
                self._turns.check(ticket)
        except LocalrunError as error:
            self.refuse(embed.id, error)
        else:
            self._turns.enter(ticket)

    def refuse(self, request_id: int, error: LocalrunError) -> None:
        """A request that never starts: its first and last delta says why."""
        self._deltas[request_id] = refusal(request_id, error, n_prompt=0)

    def cancel(self, request_id: int) -> None:
        """End a request now. An unknown id is a request that ended already."""
        ticket = self._turns.tickets.get(request_id)
        if ticket is not None:
            self._end(ticket, Finish.CANCELLED)

    def close(self) -> None:
        """End what is there."""
        for request_id in list(self._turns.tickets):
            self.cancel(request_id)
        self._encodings.close()

    def clear(self) -> None:
        """Forget encoded media that nobody is about to compute."""
        self._encodings.clear()

    def call_during_steps(self, on_compute: Callable[[], None]) -> None:
        """Nothing is held here."""

    # --- the step ----------------------------------------------------------------------------------------------

    def step(self, should_abort: Callable[[], bool] = never_abort) -> Step | None:
        """Compute one step and return its news; None if there was neither anything to do nor to say."""
        self.wait_s = 0.0
        for ticket, error in self._encodings.collect():
            where, chunks = _where(ticket.embed, ticket.n_begun - 1), ticket.current.chunks if ticket.current else ()
            message = inputs.located(error.message, where, (span.field for span in chunks))
            self._end(ticket, Finish.ERROR, by_code(error.code, message))
        now_s = self._clock()
        is_encoders = self._encodings.is_busy and now_s < self._encoder_until_s and not self._encodings.is_over
        pieces = [] if is_encoders else self._next_pieces(now_s)
        if self._embedder.projector is not None:
            self._encodings.want(self._wanted(now_s))
        if pieces:
            self._compute(pieces)
        elif self._encodings.is_busy and not self._encodings.is_over:
            self.wait_s = self._encoder_until_s - now_s if is_encoders else math.inf
        return self._publish()

    def _wanted(self, now_s: float) -> list[tuple[EmbeddingRequest, MediaSpan]]:
        """The chunks that inputs at hand need next, in the order of their turns; but first all of the input under way,
        for whose cells others wait that do not fit into a step."""
        found = [
            (ticket, span)
            for ticket in self._turns.tickets.values()
            if ticket.current is not None
            for span in ticket.current.chunks_left[: 1 if ticket.seq is None else None]
        ]
        return sorted(found, key=lambda one: (one[0].seq is None, self._turns.place(one[0], now_s)))

    def _next_pieces(self, now_s: float) -> list[Piece]:
        """The inputs of the next step. While there are isolated ones, inputs are computed one by one from beginning to
        end, first those of requests that have isolated ones."""
        if not self._isolated:
            return self._fill(now_s)
        if partial := self._partial:
            return self._fill(now_s, [partial])
        return self._fill(now_s, [ticket for ticket, _ in self._isolated]) or self._fill(now_s)

    @property
    def _partial(self) -> EmbeddingRequest | None:
        """The request that has an input under way."""
        return next((ticket for ticket in self._turns.tickets.values() if ticket.seq is not None), None)

    def _fill(self, now_s: float, among: Collection[EmbeddingRequest] | None = None) -> list[Piece]:
        """Inputs of these requests, or of all, as many as a step has rows for. Those that cannot be computed end their
        request here."""
        pieces: list[Piece] = []
        left, n_unfit = self._embedder.n_rows, 0
        partial = self._partial
        turns = self._turns.round(now_s)
        while left > 0 and (ticket := turns.next_up()) is not None:
            if self._isolated and pieces:
                break
            if among is not None and ticket not in among:
                continue
            is_new = ticket.current is None
            if is_new and (n_unfit == MOST_UNFIT or not self._free_seqs):
                continue
            try:
                current = ticket.next_input(self._tokens_of)
            except LocalrunError as error:
                left += self._withdraw(ticket, pieces)
                self._end(ticket, Finish.ERROR, error)
                continue
            n_rows, span, encoded = 0, None, None
            if current.chunks:
                span, encoded = self._chunk_for(ticket, current, pieces)
            if span is None or encoded is not None:
                n_rows = self._rows_for(ticket, current, left, is_first=not pieces, partial=partial)
            if not n_rows:
                n_unfit += is_new
                continue
            left -= n_rows
            if span is not None and current.n_computed < span.start:
                span = encoded = None  # it only had to be there
            pieces.append(self._piece(Piece(ticket, current, -1, n_rows, span, encoded), now_s))
            if n_rows < current.n_left:
                partial = ticket
                continue
            partial = None if partial is ticket else partial
            ticket.current = None
            if ticket.has_more:
                turns.put_back(ticket)
        return pieces

    def _chunk_for(
        self, ticket: EmbeddingRequest, current: InputProgress, pieces: Sequence[Piece]
    ) -> tuple[MediaSpan | None, FloatMatrix | None]:
        """The chunk that an input needs next, if any, and its rows, if it may go on: no input is begun that would have
        to wait for an encoding with its text in cells, and media are computed before the text of a step."""
        span = current.next_chunk
        if span is None or (span.start <= current.n_computed and any(one.ticket is ticket for one in pieces)):
            return span, None
        return span, self._encodings.rows(span)

    def _rows_for(
        self,
        ticket: EmbeddingRequest,
        current: InputProgress,
        left: int,
        *,
        is_first: bool,
        partial: EmbeddingRequest | None,
    ) -> int:
        """How many rows of an input fit into the rest of a step; 0 for none. `partial` has an input under way."""
        if ticket.seq is None and not self._free_seqs:
            return 0
        n_next = current.n_next
        may_go_on = partial in (None, ticket)
        if n_next <= left and (n_next == current.n_left or may_go_on):
            return n_next
        if not self._embedder.can_split:
            return n_next if is_first else 0
        if n_next <= self._embedder.n_rows and ticket.seq is None:
            return 0  # whole in the next step
        if not may_go_on or (left < LEAST_ROWS and not is_first):
            return 0
        span = current.next_chunk
        if span is not None and span.start <= current.n_computed and not span.chunk.is_causal:
            return n_next if is_first else 0
        return left

    def _piece(self, piece: Piece, now_s: float) -> Piece:
        ticket, current, _, n_rows = piece[:4]
        seq = ticket.seq
        if seq is None:
            seq = self._free_seqs.pop()
            if current.chunks:
                self._embedder.set_chunks(seq, tuple((span.start, span.chunk) for span in current.chunks))
        ticket.seq = None if piece.is_last else seq
        is_first = ticket.served_at_s is None
        self._turns.charge(ticket, n_rows, now_s)
        if is_first:
            ticket.started_at_s = ticket.started_at_s or now_s
            self._started.append(Started(ticket.id, 0, ticket.n_computed + ticket.about_tokens, 0, ticket.started_at_s))
        return piece._replace(seq=seq)

    def _withdraw(self, ticket: EmbeddingRequest, pieces: list[Piece]) -> int:
        """Take the inputs of a request out of the step that is being filled. The rows that this frees."""
        own = [piece for piece in pieces if piece.ticket is ticket]
        for piece in own:
            pieces.remove(piece)
            self._release(piece.seq)
        ticket.seq = None
        return sum(piece.n_rows for piece in own)

    def _compute(self, pieces: list[Piece]) -> None:
        """The native calls, and what follows from them. Those for media come first: an input that ends with media ends
        before the next one of its request, which may be text."""
        began_s = self._clock()
        if self._isolated and not pieces[0].current.n_computed:
            self._embedder.wipe()
        calls = [[piece] for piece in pieces if piece.span is not None]
        if text := [piece for piece in pieces if piece.span is None]:
            calls.append(text)
        n_rows = 0
        for at, call in enumerate(calls):
            if at:
                call = self._still_there(call)
            try:
                vectors = self._vectors(call)
            except (NoRoom, DecodeFailed) as error:
                self._recover(call, [*chain(*map(self._still_there, calls[at + 1 :]))], error)
                return
            non_finite = [piece for piece, vector in zip(call, vectors, strict=True) if not np.isfinite(vector).all()]
            if non_finite:
                self._isolate(non_finite, [*call, *chain(*map(self._still_there, calls[at + 1 :]))])
                return
            for piece, vector in zip(call, vectors, strict=True):
                n_rows += piece.n_rows
                piece.current.take(vector, piece.n_rows, self._embedder.pooling)
                self._advance(piece)
        self._n_failed_steps = 0
        now_s = self._clock()
        self._step_s = now_s - began_s
        self._encoder_until_s = now_s + self._step_s
        self._n_steps += 1
        self._n_rows = n_rows
        self._n_rows_total += n_rows
        self._turns.observe(n_rows, self._step_s)

    def _still_there(self, call: list[Piece]) -> list[Piece]:
        """Without those whose request an earlier call of the step has ended."""
        gone = [piece for piece in call if piece.ticket.id not in self._turns.tickets]
        for piece in gone:
            if piece.is_last:  # else its request held the sequence
                self._release(piece.seq)
        return [piece for piece in call if piece not in gone] if gone else call

    def _vectors(self, call: Sequence[Piece]) -> list[FloatVector]:
        """What pooling makes of the rows of each piece: of text, or of one chunk."""
        if not call:
            return []
        span, encoded = call[0].span, call[0].encoded
        if span is not None and encoded is not None:
            _, current, seq, n_rows = call[0][:4]
            first = current.n_computed - span.start
            self._embedder.compute_media(MediaRows(seq, span.start, span.chunk, encoded, first, n_rows))
            self._encodings.computed(span, n_rows, is_last=current.n_computed + n_rows == span.end)
            return [self._embedder.vector(seq)]
        batch, at = self._embedder.batch, 0
        for _, current, seq, n_rows, *_ in call:
            rows, start = slice(at, at + n_rows), current.n_computed
            batch.token[rows] = current.tokens[start : start + n_rows]
            batch.pos[rows] = range(start, start + n_rows)
            batch.seq[rows] = seq
            batch.wants_logits[rows] = 1
            at += n_rows
        self._embedder.compute(at)
        return [self._embedder.vector(piece.seq) for piece in call]

    def _advance(self, piece: Piece) -> None:
        ticket, current = piece.ticket, piece.current
        if not current.n_left:
            self._release(piece.seq)
        if ticket.id not in self._turns.tickets:  # another of its inputs has just ended it
            return
        ticket.n_computed += piece.n_rows
        delta = self._delta(ticket)
        if current.n_left:
            return
        ticket.n_done += 1
        ticket.n_media += sum(span.chunk.n_tokens for span in current.chunks)
        self._isolated.discard((ticket, current.index))
        vector = finish(current, ticket.embed.dimensions, self._embedder.pooling)
        delta.vectors = [*(delta.vectors or ()), vector]
        if ticket.is_done:
            self._end(ticket, Finish.STOP)

    def _recover(self, call: list[Piece], later: list[Piece], error: NoRoom | DecodeFailed) -> None:
        """A call failed: its inputs begin anew, and so do those of the step's `later` calls. A refused batch ends its
        requests. After `MAX_FAILED_STEPS` in a row the process gives up, since only a new context can help."""
        self._n_failed_steps += 1
        if self._n_failed_steps >= MAX_FAILED_STEPS:
            raise error
        self._begin_anew([*call, *later])
        if isinstance(error, DecodeFailed) and not error.is_fatal:
            for ticket in {piece.ticket: None for piece in call}:
                self._end(ticket, Finish.ERROR, EngineFailed(str(error)))

    def _isolate(self, non_finite: list[Piece], pieces: list[Piece]) -> None:
        """A call gave the `non_finite` ones of its pieces results that are not finite. All `pieces` of the step that
        are left begin anew, and so does the input under way, because the cells are wiped."""
        was_alone = bool(self._isolated)
        self._begin_anew(pieces)
        if (partial := self._partial) is not None and (current := partial.current) is not None:
            assert partial.seq is not None
            self._begin_anew([Piece(partial, current, partial.seq, 0)])
        self._embedder.wipe()
        for piece in non_finite:
            if was_alone:
                where = _where(piece.ticket.embed, piece.current.index)
                problem = "the model computes NaN or infinite numbers from it; its file may be damaged"
                self._end(piece.ticket, Finish.ERROR, NoNumbers(f"{where}: {problem}"))
            else:
                self._isolated.add((piece.ticket, piece.current.index))

    def _begin_anew(self, pieces: list[Piece]) -> None:
        """The inputs of these pieces are computed from their beginnings again."""
        for piece in pieces:
            self._release(piece.seq)
            piece.ticket.n_computed -= piece.current.n_computed
        for ticket in {piece.ticket: None for piece in pieces}:
            first = min(piece.current.index for piece in pieces if piece.ticket is ticket)
            ticket.n_begun, ticket.current, ticket.seq = first, None, None

    # --- inside ------------------------------------------------------------------------------------------------

    def _check(self, embed: Embed) -> None:
        if not embed.inputs:
            raise BadRequest("the input is empty; send at least one text", field="input")
        if (self._embedder.pooling is Pooling.RANK) != (embed.query is not None):
            raise BadRequest("embeddings and reranking need a model of their own kind", field="model")

    def _tokens_of(self, embed: Embed, index: int) -> InputTokens:
        where = _where(embed, index)
        try:
            return inputs.tokens_of(
                self._embedder, embed.inputs[index], query=embed.query, truncate=embed.truncate, where=where
            )
        except LocalrunError:
            raise
        except Exception as error:
            log.exception("an input cannot be tokenized")
            raise EngineFailed(f"{where} cannot be tokenized: {error!r}") from error

    def _release(self, seq: int) -> None:
        self._embedder.forget(seq)
        self._free_seqs.append(seq)

    def _end(self, ticket: EmbeddingRequest, finish: Finish, error: LocalrunError | None = None) -> None:
        delta = self._delta(ticket)
        delta.phase, delta.finish, delta.usage = Phase.DONE, finish, ticket.usage(self._clock())
        if error is not None:
            delta.error_code, delta.error_message = error.code, error.message
        if ticket.seq is not None:
            self._release(ticket.seq)
            ticket.seq = None
        self._encodings.drop(ticket)
        self._isolated = {one for one in self._isolated if one[0] is not ticket}
        self._turns.leave(ticket)

    def _delta(self, ticket: EmbeddingRequest) -> Delta:
        delta = self._deltas.get(ticket.id)
        if delta is None:
            delta = self._deltas[ticket.id] = Delta(ticket.id, Phase.PREFILL, 0, 0, tokens=[])
        delta.n_computed = ticket.n_computed
        return delta

    def _publish(self) -> Step | None:
        """All news since the last call as one message; None without news."""
        if not self._deltas and not self._started:
            return None
        tickets = self._turns.tickets.values()
        n_waiting = sum(ticket.started_at_s is None for ticket in tickets)
        stats = StepStats(
            step=self._n_steps,
            step_s=self._step_s,
            n_prefill_rows=self._n_rows,
            n_decode_rows=0,
            n_running=len(tickets) - n_waiting,
            n_queued=n_waiting,
            kv_cells_used=sum(t.current.n_computed for t in tickets if t.current is not None),
            kv_cells_shared=0,
            cached_sequences=0,
            ram_cache_bytes=0,
            prefill_tokens_total=self._n_rows_total,
            decode_tokens_total=0,
            prompt_tokens_total=self._n_rows_total,
            cached_tokens_total=0,
            preemptions_total=0,
            media=self._encodings.counts,
        )
        step = Step(sent_at_s=self._clock(), deltas=list(self._deltas.values()), stats=stats, started=self._started)
        self._deltas, self._started, self._n_rows = {}, [], 0
        return step


def _where(embed: Embed, index: int) -> str:
    """What an input is called in errors."""
    name = "documents" if embed.query is not None else "input"
    return f"{name}[{index}]" if len(embed.inputs) > 1 else name


def finish(current: InputProgress, dimensions: int, pooling: Pooling) -> Vector:
    """The result of an input that is done, cut to the dimensions that are wanted, and normalised. Vectors have length 1
    (L2), as those of llama.cpp's server and of Ollama. Cut vectors are normalised again: a model that was trained for
    it (Matryoshka) puts what matters first. Scores are left as the model's head gives them."""
    assert current.vector is not None
    values = current.vector
    if pooling is not Pooling.RANK:
        values = normalised(values[: dimensions or None])
    return Vector(current.index, values.astype("<f4").tobytes(), len(current.tokens), current.n_cut)


def normalised(values: FloatVector) -> FloatVector:
    """Of length 1; zeros stay zeros."""
    wide = values.astype(np.float64)
    length = float(np.sqrt(wide @ wide))
    result: FloatVector = (wide / length if length else wide).astype(np.float32)
    return result
