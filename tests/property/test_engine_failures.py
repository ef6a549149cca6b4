"""Random traces in which decodes fail in every way that llama.cpp knows: whoever is not told so gets the right answer.

Does not: fail three times in a row; the engine gives up then, see `tests/engine/test_engine.py`.
"""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from localrun.engine.backend import DecodeFailed, MemoryKind, NoRoom
from localrun.wire import Finish
from tests.depth import DEPTH
from tests.engine.harness import Harness, expected_output
from tests.fakes.backend import FakeBackend

prompts = st.lists(st.sampled_from([b"system ", b"ab", b"z" * 40, b"q"]), min_size=1, max_size=5).map(
    lambda parts: list(b"".join(parts))
)
outcomes = st.lists(st.sampled_from(["done", "done", "no room", "aborted", "broken off", "refused"]), max_size=40)


class Failing(FakeBackend):
    """Each decode ends as `outcomes` say, and well when there are no more; never badly three times in a row."""

    outcomes: list[str]
    n_failed = 0

    def decode(self, n_rows: int) -> None:
        outcome = self.outcomes.pop(0) if self.outcomes and self.n_failed < 2 else "done"
        self.n_failed = 0 if outcome == "done" else self.n_failed + 1
        if outcome == "no room":
            raise NoRoom("no room")
        if outcome == "refused":
            raise DecodeFailed("refused", is_fatal=False)
        super().decode(n_rows)
        if outcome == "broken off":
            raise DecodeFailed("broken off, and rows of earlier micro-batches stay", is_fatal=True)
        if outcome == "aborted":
            first = {int(seq): int(pos) for seq, pos in reversed(list(zip(*self._rows(n_rows), strict=True)))}
            for seq, pos in first.items():
                self.seq_remove(seq, pos)
            raise DecodeFailed("aborted", is_fatal=True)

    def _rows(self, n_rows: int) -> tuple[list[int], list[int]]:
        return self.batch.seq[:n_rows].tolist(), self.batch.pos[:n_rows].tolist()


def failing(fake: FakeBackend, planned: list[str]) -> FakeBackend:
    backend = Failing(
        n_cells=fake.n_cells, n_seqs=fake.n_seqs, n_batch=fake.batch.capacity, memory_kind=fake.memory_kind
    )
    backend.outcomes = list(planned)
    return backend


@given(
    st.lists(prompts, min_size=1, max_size=7), outcomes, st.sampled_from([0, 600, 1 << 20]), st.sampled_from(MemoryKind)
)
@settings(max_examples=60 * DEPTH)
def test_failed_steps_lose_and_mix_nothing(
    batch: list[list[int]], planned: list[str], ram_cache_bytes: int, memory_kind: MemoryKind
):
    harness = Harness(
        n_cells=256,
        n_slots=4,
        ram_cache_bytes=ram_cache_bytes,
        memory_kind=memory_kind,
        wrap=lambda fake: failing(fake, planned),
    )
    for request_id, prompt in enumerate(batch):
        harness.submit(request_id, prompt, n_predict=20)
        harness.step()
    harness.run()
    assert set(harness.finals) == set(range(len(batch)))
    for request_id, prompt in enumerate(batch):
        got, expected = harness.tokens[request_id], expected_output(prompt, min(20, 256 - len(prompt)))
        if harness.finals[request_id].finish is Finish.ERROR:
            assert harness.finals[request_id].error_code in ("engine_failed", "context_length_exceeded")
            assert got == expected[: len(got)]
        else:
            assert got == expected
    assert harness.backend.n_open_samplers == 0
