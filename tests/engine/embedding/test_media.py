"""Inputs with pictures and sound in the embedding engine, on an embedder whose vectors tell what a sequence had."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest

from localrun.engine.backend import Batch, DecodeFailed, MediaChunk, NoRoom
from localrun.engine.embedding.engine import EmbeddingEngine, normalised
from localrun.wire import Delta, Embed, Finish, Media, MediaKind, Mixed, Pooling, Segment, Vector
from tests.fakes.embedder import FakeEmbedder, check_sequences, token_vector
from tests.fakes.media import FakeProjector, contents_of, fake_rows
from tests.fakes.tokens import IM_END, IM_START
from tests.says import says


def picture(name: str = "a", width: int = 90, height: int = 60) -> Media:
    return Media(MediaKind.IMAGE, name, hashlib.sha256(name.encode()).digest(), width, height)


def mixed(*parts: str | Media) -> Mixed:
    return Mixed(tuple(Segment(part) if isinstance(part, str) else Segment("", media=part) for part in parts))


class Harness:
    """Every step checks all books."""

    def __init__(
        self, *, pooling: Pooling = Pooling.LAST, n_ctx: int = 200, n_rows: int = 64, kept_bytes: int = 1 << 20,
        projector: FakeProjector | None = None, is_blind: bool = False,
    ) -> None:  # fmt: skip
        self.now_s = 0.0
        self.pooling = pooling
        self.projector = projector or FakeProjector()
        self.embedder = FakeEmbedder(
            pooling=pooling, n_ctx=n_ctx, n_rows=n_rows, projector=None if is_blind else self.projector
        )
        self.engine = EmbeddingEngine(self.embedder, max_queue=16, clock=self._clock, encoded_bytes=kept_bytes)
        self.vectors: dict[tuple[int, int], Vector] = {}
        self.order: list[tuple[int, int]] = []
        self.finals: dict[int, Delta] = {}

    def _clock(self) -> float:
        self.now_s += 0.001
        return self.now_s

    def submit(self, request_id: int, *inputs: str | Mixed, truncate: bool = False) -> None:
        self.engine.submit(Embed(id=request_id, inputs=inputs, truncate=truncate, arrived_at_s=self.now_s))

    def step(self) -> None:
        step = self.engine.step()
        check_sequences(self.engine)
        for delta in step.deltas if step else ():
            assert delta.id not in self.finals, "news of a request that had ended"
            for vector in delta.vectors or ():
                assert (delta.id, vector.index) not in self.vectors, "an input was done twice"
                self.vectors[delta.id, vector.index] = vector
                self.order.append((delta.id, vector.index))
            if delta.finish is not None:
                self.finals[delta.id] = delta

    def run(self) -> None:
        for _ in range(2000):
            if self.engine.is_idle:
                assert self.embedder.held == {}, "a sequence was not emptied"
                return
            self.step()
        raise AssertionError("not idle after 2000 steps")

    def check(self, request_id: int, index: int, *parts: str | Media) -> None:
        """The vector is that of these parts alone."""
        held = [IM_START]
        for piece in self.projector.tokenize(mixed(*parts).segments):
            is_chunk = isinstance(piece, MediaChunk)
            held += contents_of(piece, fake_rows(self.projector.fingerprint, piece)) if is_chunk else piece
        held.append(IM_END)
        rows = [token_vector(held[: at + 1], 8) for at in range(len(held))]
        pooled = {Pooling.MEAN: np.mean(rows, axis=0), Pooling.CLS: rows[0], Pooling.LAST: rows[-1]}[self.pooling]
        vector = self.vectors[request_id, index]
        assert np.frombuffer(vector.values, "<f4") == pytest.approx(normalised(pooled.astype(np.float32)), abs=1e-5)
        assert vector.n_tokens == len(held)

    def error(self, request_id: int) -> str:
        assert self.finals[request_id].finish is Finish.ERROR
        return str(self.finals[request_id].error_message)


PROJECTORS = {
    "causal": FakeProjector,
    "rows that see each other": lambda: FakeProjector(is_causal=False),
    "nothing around": lambda: FakeProjector(has_ends=False),
}


@pytest.mark.parametrize("pooling", [Pooling.LAST, Pooling.MEAN, Pooling.CLS])
@pytest.mark.parametrize("kind", PROJECTORS)
@pytest.mark.parametrize("n_rows", [64, 5])
def test_a_mixture_gives_what_each_input_gives_alone(pooling: Pooling, kind: str, n_rows: int) -> None:
    harness = Harness(pooling=pooling, projector=PROJECTORS[kind](), n_rows=n_rows)
    a, b = picture("a"), picture("b", 150, 40)
    inputs = {
        1: [["text"], ["see ", a, " and ", b, "!"], [b], ["text again"]],
        2: [[a, b], ["x" * 100], [a, "what is it?"]],
        3: [["short"]],
    }
    for request_id, lists in inputs.items():
        harness.submit(request_id, *(mixed(*one) if len(one) > 1 or one == [b] else str(one[0]) for one in lists))
    harness.run()
    for request_id, lists in inputs.items():
        for index, parts in enumerate(lists):
            harness.check(request_id, index, *parts)
        usage = harness.finals[request_id].usage
        assert usage is not None
        assert usage.n_prompt == sum(harness.vectors[request_id, index].n_tokens for index in range(len(lists)))
        media = [part for parts in lists for part in parts if isinstance(part, Media)]
        chunks = harness.projector.tokenize(mixed(*media).segments)
        assert usage.n_media == sum(one.n_tokens for one in chunks if isinstance(one, MediaChunk))


def test_equal_pictures_are_encoded_once() -> None:
    harness = Harness()
    harness.submit(1, *(mixed(f"{at}", picture("same")) for at in range(4)))
    harness.submit(2, mixed(picture("same"), "other text"))
    harness.run()
    assert len(harness.projector.begun) == 1
    harness.submit(3, mixed(picture("same")))
    harness.run()
    assert len(harness.projector.begun) == 1
    harness.engine.clear()
    harness.submit(4, mixed(picture("same")))
    harness.run()
    assert len(harness.projector.begun) == 2


def test_texts_do_not_wait_for_pictures() -> None:
    harness = Harness(projector=FakeProjector(looks=20))
    harness.submit(1, mixed("before ", picture(), " after"))
    harness.submit(2, *["text"] * 20)
    harness.run()
    assert harness.order[-1] == (1, 0)
    assert harness.finals[1].finish is harness.finals[2].finish is Finish.STOP


def test_an_input_over_the_context_is_refused_before_anything_is_encoded() -> None:
    harness = Harness(n_ctx=60)
    harness.submit(1, "text", mixed("x" * 50, picture()), truncate=True)
    harness.run()
    n_media = harness.projector.tokenize(mixed(picture()).segments)[1].n_tokens
    assert says(harness.error(1), "input[1]", 50 + n_media + 4, n_media, 60, "never cut")
    assert not harness.projector.begun


def test_the_picture_for_which_everybody_waits_is_encoded_first() -> None:
    harness = Harness(n_rows=5)
    a, b = picture("a"), picture("b")
    harness.submit(1, mixed(a, "some words between", b))
    while not harness.embedder.steps:
        harness.step()
    for request_id in range(2, 6):
        harness.submit(request_id, mixed("some words before", picture(f"of {request_id}")))
    harness.run()
    assert [chunk.media.path for chunk in harness.projector.begun[:2]] == ["a", "b"]
    for request_id in range(2, 6):
        harness.check(request_id, 0, "some words before", picture(f"of {request_id}"))


def test_a_picture_that_one_call_cannot_compute_is_refused() -> None:
    harness = Harness(projector=FakeProjector(is_causal=False))
    harness.embedder.batch = Batch(64)
    large = Segment("", media=picture("large", 9 * 16, 8 * 16), field="input[1].multimodal_data[0]")
    harness.submit(1, "text", Mixed((large,)))
    harness.submit(2, "text", mixed(large.media))
    harness.submit(3, mixed(picture("small", 8 * 16, 8 * 16)))
    harness.run()
    assert harness.error(1).startswith("input[1].multimodal_data[0]: ")
    assert harness.error(2).startswith("input[1]: ")
    for request_id in (1, 2):
        assert harness.finals[request_id].error_code == "bad_request"
        assert says(harness.error(request_id), 72, 64, "smaller", "--batch-tokens")
    assert harness.finals[3].finish is Finish.STOP


def test_a_model_that_takes_text_only_says_so() -> None:
    harness = Harness(is_blind=True)
    harness.submit(1, mixed("a", picture()))
    harness.submit(2, mixed("only ", "text"))
    harness.run()
    assert says(harness.error(1), "input", "takes text only", "mmproj")
    assert harness.finals[2].finish is Finish.STOP


def test_a_picture_that_cannot_be_encoded_fails_its_request_alone() -> None:
    harness = Harness()
    harness.projector.problems = [DecodeFailed("no", is_fatal=False)]
    harness.submit(1, "fine", mixed(picture("bad")))
    harness.submit(2, mixed(picture("good")))
    harness.run()
    assert says(harness.error(1), "input[1]", "cannot be encoded")
    harness.check(2, 0, picture("good"))


def test_who_leaves_while_a_picture_is_encoded_stops_it() -> None:
    harness = Harness(projector=FakeProjector(looks=50))
    harness.submit(1, mixed("a", picture("slow")))
    for _ in range(3):
        harness.step()
    harness.engine.cancel(1)
    harness.submit(2, "text")
    harness.run()
    assert harness.finals[1].finish is Finish.CANCELLED
    assert harness.projector.n_halted == 1


@pytest.mark.parametrize("error", [NoRoom("no room"), DecodeFailed("failed", is_fatal=True)])
def test_a_call_that_fails_is_made_again(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    harness = Harness()
    compute, calls = harness.embedder.compute_media, []

    def failing(*arguments: object) -> None:
        calls.append(arguments)
        if len(calls) == 2:
            raise error
        compute(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(harness.embedder, "compute_media", failing)
    lists = [["a", picture("a")], ["text"], [picture("b"), "b"], [picture("a")]]
    harness.submit(1, *(mixed(*one) for one in lists))
    harness.submit(2, "other", mixed(picture("b")))
    harness.run()
    for index, parts in enumerate(lists):
        harness.check(1, index, *parts)
    harness.check(2, 1, picture("b"))


def test_a_refused_batch_ends_its_request_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    harness = Harness()

    def refusing(*_: object) -> None:
        raise DecodeFailed("refused", is_fatal=False)

    monkeypatch.setattr(harness.embedder, "compute_media", refusing)
    harness.submit(1, "one", mixed(picture()), "three")
    harness.submit(2, *["text"] * 5)
    harness.run()
    assert harness.error(1) == "refused"
    assert harness.finals[2].finish is Finish.STOP
