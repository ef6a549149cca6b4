"""An engine on the fake backend with a clock of its own, driven request by request."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from functools import lru_cache, partial
from typing import Any

from localrun.engine.backend import AdapterSet, Backend, MediaChunk, MemoryKind
from localrun.engine.cache.cells import PoolCells, StreamCells
from localrun.engine.cache.tiers import DiskTier
from localrun.engine.engine import Limits
from localrun.engine.request import Request
from localrun.engine.sample.text import MediaSpan, Prompt, prompt_of
from localrun.engine.speculate.speculation import Speculation
from localrun.wire import (
    Adapter,
    ChosenLogprob,
    Delta,
    Finish,
    Grammar,
    Lane,
    Resume,
    Sampling,
    Segment,
    Step,
    Submit,
)
from tests.engine.stepped import SteppedEngine
from tests.fakes.backend import FakeBackend
from tests.fakes.media import FakeProjector, contents_of, fake_rows
from tests.fakes.tokens import IM_END, digest_after, next_token

GREEDY = Sampling(temperature=0)


class AtOnce(Executor):
    """No threads: what is submitted is done before that returns."""

    def submit(self, call: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(call(*args, **kwargs))
        except Exception as error:
            future.set_exception(error)
        return future


class Harness:
    """`texts`, `finals` and `tokens` collect what was published; every step checks all books."""

    def __init__(
        self,
        *,
        n_cells: int = 256,
        n_slots: int = 4,
        n_batch: int = 64,
        n_seqs: int = 12,
        ram_cache_bytes: int = 1 << 20,
        max_queue: int = 64,
        target_itl_s: float = 0.0,
        memory_kind: MemoryKind = MemoryKind.ATTENTION,
        is_split: bool = False,
        n_background_seqs: int = 0,
        background_looks: int = 2,
        disk: DiskTier | None = None,
        wrap: Callable[[FakeBackend], FakeBackend] = lambda backend: backend,
        speculation: Callable[[FakeBackend, Callable[[], float]], Speculation] | None = None,
        adapters: Sequence[Adapter] = (),
        projector: FakeProjector | None = None,
        abort_every: int = 0,
    ) -> None:
        self.now_s = 0.0
        self._abort_every, self._n_asked = abort_every, 0
        fake = FakeBackend(
            n_cells=n_cells,
            n_seqs=n_seqs,
            n_batch=n_batch,
            memory_kind=memory_kind,
            n_slots=n_slots if is_split else 0,
            n_background_seqs=n_background_seqs,
            background_looks=background_looks,
            projector=projector,
        )
        self.backend = wrap(fake)
        limits = Limits(n_slots, max_queue, target_itl_s, ram_cache_bytes)
        # Without drafts, so that a step is a token, unless a test is about them.
        drafting = speculation or partial(Speculation, is_on=False)
        own = AdapterSet.of(adapters)
        for adapter in own.adapters:
            self.backend.load_adapter(adapter)
        self.engine = SteppedEngine(
            self.backend,
            limits,
            self._clock,
            disk,
            speculation=drafting(self.backend, self._clock),
            adapters=own,
            loader=AtOnce(),
        )
        self.steps: list[Step] = []
        self.texts: dict[int, str] = {}
        self.notices: dict[int, tuple[str, ...]] = {}
        self.tokens: dict[int, list[int]] = {}
        self.logprobs: dict[int, list[ChosenLogprob]] = {}
        self.finals: dict[int, Delta] = {}

    def _clock(self) -> float:
        self.now_s += 0.001
        return self.now_s

    def submit(
        self,
        request_id: int,
        prompt: str | list[int] | tuple[Segment, ...],
        *,
        n_predict: int = 16,
        stop: tuple[str, ...] = (),
        ignore_eos: bool = True,
        client: str = "",
        lane: Lane = Lane.DEFAULT,
        target_itl_s: float | None = None,
        deadline_s: float | None = None,
        sampling: Sampling = GREEDY,
        n_probs: int | None = None,
        grammar: Grammar | None = None,
        show_control: bool = False,
        prediction: Sequence[int] = (),
        adapters: Sequence[Adapter] | None = None,
        resume: Resume | None = None,
    ) -> None:
        chunks: tuple[MediaSpan, ...] = ()
        if isinstance(prompt, tuple):
            tokens, chunks = prompt_of(self.backend, Submit(id=request_id, segments=prompt))
        else:
            tokens = self.backend.tokenize(prompt, parse_special=True) if isinstance(prompt, str) else list(prompt)
        submit = Submit(
            id=request_id,
            sampling=sampling,
            n_predict=n_predict,
            stop=stop,
            ignore_eos=ignore_eos,
            client=client,
            lane=lane,
            target_itl_s=target_itl_s,
            deadline_s=deadline_s,
            arrived_at_s=self.now_s,
            logprobs=n_probs is not None,
            n_probs=n_probs or 0,
            grammar=grammar,
            show_control=show_control,
            adapters=None if adapters is None else tuple(adapters),
            resume=resume,
        )
        self.engine.submit(submit, tokens, prediction, chunks)

    def _should_abort(self) -> bool:
        self._n_asked += 1
        return bool(self._abort_every) and self._n_asked % self._abort_every == 0

    def step(self) -> Step | None:
        step = self.engine.step(self._should_abort)
        self.check()
        if step is None:
            return None
        self.steps.append(step)
        for delta in step.deltas:
            assert delta.id not in self.finals, "news of a request that had ended"
            self.texts[delta.id] = self.texts.get(delta.id, "") + delta.text
            self.notices[delta.id] = self.notices.get(delta.id, ()) + delta.notices
            self.tokens.setdefault(delta.id, []).extend(delta.tokens)
            self.logprobs.setdefault(delta.id, []).extend(delta.logprobs or [])
            if delta.finish is not None:
                self.finals[delta.id] = delta
        return step

    def run(self, max_steps: int = 5000) -> None:
        """Step until idle."""
        for _ in range(max_steps):
            if self.engine.is_idle:
                return
            self.step()
        raise AssertionError(f"not idle after {max_steps} steps")

    def check(self) -> None:
        """Every book agrees with every other and with the backend's own cells."""
        cache = self.engine.cache
        cache.check_integrity()
        assert cache.cells.n_used == self.backend.n_used, "the mirror and the backend count different cells"
        alive = [request.seq for request in self.engine.scheduler.running]
        assert len(alive) == len(set(alive)), "one sequence id serves two requests"
        for request in self.engine.scheduler.running:
            assert request.seq is not None
            held = self.backend.tokens_of(request.seq)
            assert held == _contents(self.backend, request), "a sequence does not hold its own tokens"
        for seq in range(self.backend.n_seqs + n_seqs_away(self.backend)):
            pool, at = cache.cells, seq
            if isinstance(pool, StreamCells) and seq >= pool.n_seqs:
                pool, at = pool.pool, seq - pool.n_seqs
            if isinstance(pool, PoolCells) and self.backend.cuts_states:  # where cells are shared it matters which ones
                mirrored = pool.cells_of(at).tolist()
                assert mirrored == self.backend.cells_of(seq), f"the mirror has sequence {seq} in other cells"
            else:
                assert cache.cells.length(seq) == len(self.backend.cells_of(seq)), f"sequence {seq} has another length"


def n_seqs_away(backend: Backend) -> int:
    """Sequences of its background."""
    return backend.worker.n_seqs if backend.worker else 0


def _contents(backend: FakeBackend, request: Request) -> list[int]:
    """What must be in the cells of a running request."""
    contents = list(request.tokens)
    for start, chunk, *_ in request.chunks:
        assert backend.projector is not None
        contents[start : start + chunk.n_tokens] = _contents_of(chunk, backend.projector.fingerprint)
    return contents[: request.n_computed]


@lru_cache(maxsize=64)
def _contents_of(chunk: MediaChunk, fingerprint: bytes) -> list[int]:
    return contents_of(chunk, fake_rows(fingerprint, chunk))


def expected_media_output(
    prompt: Prompt, projector: FakeProjector, n_output: int, adapters: Sequence[Adapter] = ()
) -> list[int]:
    """What a request with media must generate, whose positions are counted one by one here."""
    state = number = position = 0
    adapter_hash = AdapterSet.of(adapters).hash

    def see(token: int, at: int) -> None:
        nonlocal state, number
        state, number = digest_after(state, token, number - at, adapter_hash), number + 1

    chunks = {span.start: span.chunk for span in prompt.chunks}
    while number < len(prompt.tokens):
        chunk = chunks.get(number)
        if chunk is None:
            see(prompt.tokens[number], position)
            position += 1
            continue
        for row, content in enumerate(contents_of(chunk, fake_rows(projector.fingerprint, chunk))):
            see(content, position + (row if chunk.n_pos == chunk.n_tokens else 0))
        position += chunk.n_pos
    output: list[int] = []
    while len(output) < n_output:
        output.append(next_token(state, ignore_eos=True))
        see(output[-1], position)
        position += 1
    return output


def expected_output(
    prompt: list[int], n_output: int, *, ignore_eos: bool = True, adapters: Sequence[Adapter] = ()
) -> list[int]:
    """What a request must generate, computed without an engine."""
    state, adapter_hash = 0, AdapterSet.of(adapters).hash
    for token in prompt:
        state = digest_after(state, token, 0, adapter_hash)
    output: list[int] = []
    while len(output) < n_output:
        token = next_token(state, ignore_eos=ignore_eos)
        if token == IM_END and not ignore_eos:
            break
        output.append(token)
        state = digest_after(state, token, 0, adapter_hash)
    return output


__all__ = ["Finish", "Harness", "expected_output"]
