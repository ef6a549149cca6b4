"""Requests with pictures and sound, over the fake: how they are computed, encoded, kept, and ended."""

from __future__ import annotations

import hashlib
import itertools

import pytest
from msgspec import structs

from localrun.engine.backend import DecodeFailed, MemoryKind
from localrun.engine.sample.text import count, prompt_of
from localrun.engine.speculate.speculation import Speculation
from localrun.errors import BadRequest
from localrun.wire import Count, Finish, Lane, Media, MediaKind, Resume, Sampling, Segment, Submit
from tests.engine.harness import Harness, expected_media_output, expected_output
from tests.engine.memory_disk import MemoryDisk
from tests.engine.test_adapters import A, B
from tests.fakes.backend import FakeBackend
from tests.fakes.media import PATCH_PIXELS, FakeProjector


def picture(name: str, nx: int = 4, ny: int = 3) -> Segment:
    """A picture of so many patches."""
    width, height = nx * PATCH_PIXELS, ny * PATCH_PIXELS
    digest = hashlib.sha256(f"{name} {width} {height}".encode()).digest()
    return Segment("", media=Media(MediaKind.IMAGE, f"/{name}", digest, width=width, height=height))


def sound(name: str, seconds: int = 2) -> Segment:
    digest = hashlib.sha256(name.encode()).digest()
    return Segment("", media=Media(MediaKind.AUDIO, f"/{name}", digest, n_samples=16_000 * seconds))


def asked(*parts: str | Segment) -> tuple[Segment, ...]:
    return tuple(Segment(part) if isinstance(part, str) else part for part in parts)


def alone(harness: Harness, segments: tuple[Segment, ...], n_output: int = 16) -> list[int]:
    """What the request must say."""
    projector = harness.backend.projector
    assert projector is not None
    return expected_media_output(prompt_of(harness.backend, Submit(id=0, segments=segments)), projector, n_output)


KINDS = {
    "causal": FakeProjector,
    "whole": lambda: FakeProjector(is_causal=False),
    "mrope": lambda: FakeProjector(is_mrope=True),
    "whole mrope": lambda: FakeProjector(is_causal=False, is_mrope=True, has_ends=False),
}
LAYOUTS = {
    "one pool": {},
    "streams": {"is_split": True},
    "background": {"is_split": True, "n_background_seqs": 2},
    "window": {"memory_kind": MemoryKind.WINDOW},
    "hybrid": {"memory_kind": MemoryKind.HYBRID},
}


@pytest.fixture(params=KINDS)
def projector(request: pytest.FixtureRequest) -> FakeProjector:
    return KINDS[request.param]()


@pytest.fixture(params=LAYOUTS)
def layout(request: pytest.FixtureRequest) -> dict:
    return LAYOUTS[request.param]


def big(layout: dict, projector: FakeProjector, **more) -> Harness:
    return Harness(**{"n_cells": 2048, "n_batch": 256, **layout, **more}, projector=projector)


def test_every_kind_answers_what_it_sees(layout: dict, projector: FakeProjector):
    harness = big(layout, projector)
    prompts = [
        asked("what is this? ", picture("cat", 9, 8), " and this? ", picture("dog"), " say it"),
        asked("listen: ", sound("bark"), "well?"),
        asked(picture("cat", 9, 8), picture("cat", 9, 8), "which one?"),
        asked("what is this? ", picture("cow", 9, 8), "?"),
    ]
    for request_id, prompt in enumerate(prompts):
        harness.submit(request_id, prompt)
    harness.submit(9, "only text")
    harness.run()
    for request_id, prompt in enumerate(prompts):
        assert harness.tokens[request_id] == alone(harness, prompt)
        n_media = sum(
            placed.chunk.n_tokens for placed in prompt_of(harness.backend, Submit(id=0, segments=prompt)).chunks
        )
        assert harness.finals[request_id].usage.n_media == n_media
    assert harness.tokens[9] == expected_output([*b"only text"], 16)


@pytest.mark.parametrize("n_patches", [(2, 1), (4, 3), (10, 10)])
def test_a_prompt_may_end_in_a_picture(layout: dict, projector: FakeProjector, n_patches: tuple[int, int]):
    projector._has_ends = False
    disk = MemoryDisk()
    prompt = asked("x" * 120, picture("cat", *n_patches))
    for _ in range(2):
        harness = big(layout, projector, disk=disk)
        for request_id in range(3):
            harness.submit(request_id, prompt)
            harness.run()
            assert harness.tokens[request_id] == alone(harness, prompt)
        harness.engine.close()
        harness.engine.cache.tiers.flush(1.0, harness._clock)


def test_only_a_picture(layout: dict, projector: FakeProjector):
    projector._has_ends = False
    harness = big(layout, projector)
    harness.submit(0, asked(picture("cat")))
    harness.run()
    assert harness.tokens[0] == alone(harness, asked(picture("cat")))


def test_eight_clients_with_the_same_picture_have_it_encoded_once(layout: dict, projector: FakeProjector):
    harness = big(layout, projector, n_slots=8, n_seqs=24, n_cells=8192)
    prompts = [asked("look: ", picture("cat", 9, 8), f" question {number}") for number in range(8)]
    for number, prompt in enumerate(prompts):
        harness.submit(number, prompt, client=f"client {number}")
    harness.run()
    assert len(projector.begun) == 1
    for number, prompt in enumerate(prompts):
        assert harness.tokens[number] == alone(harness, prompt)
    if harness.backend.memory_kind is MemoryKind.ATTENTION:
        # Shared in one pool, or copied from the one who computed it.
        assert harness.backend.n_media_rows_computed == 72


def test_two_sets_of_adapters_share_the_encoding_of_a_picture_and_nothing_else(layout: dict, projector: FakeProjector):
    harness = big(layout, projector)
    prompt = asked("look: ", picture("cat", 9, 8), "?")
    sets = [(), (A,), (B,), (A,)]
    for request_id, adapters in enumerate(sets):
        harness.submit(request_id, prompt, adapters=adapters)
    harness.run()
    read = prompt_of(harness.backend, Submit(id=0, segments=prompt))
    for request_id, adapters in enumerate(sets):
        assert harness.tokens[request_id] == expected_media_output(read, projector, 16, adapters)
    assert len(projector.begun) == 1


def test_the_next_turn_has_the_picture_in_its_cells_in_memory_and_on_disk(layout: dict, projector: FakeProjector):
    disk = MemoryDisk()
    harness = big(layout, projector, disk=disk)
    end = "<|im_end|>"
    first = asked("look: ", picture("cat", 9, 8), f" what is it?{end}" + "z" * 40)
    harness.submit(0, first)
    harness.run()
    n_rows = harness.backend.n_media_rows_computed
    assert n_rows == 72
    answer = bytes(harness.tokens[0]).decode("utf-8", "replace")
    turn = asked(*first, *([answer] if "\ufffd" not in answer else []), f"{end} and then?")
    harness.submit(1, turn)
    harness.run()
    assert harness.tokens[1] == alone(harness, turn)
    assert harness.finals[1].usage.n_cached >= 72
    other = asked(*first[:2], " who else?")
    harness.submit(2, other)
    harness.run()
    assert harness.tokens[2] == alone(harness, other)
    assert harness.finals[2].usage.n_cached >= 72
    assert (len(projector.begun), harness.backend.n_media_rows_computed) == (1, n_rows)

    harness.engine.close()
    harness.engine.cache.tiers.flush(1.0, harness._clock)
    again = big(layout, FakeProjector(is_causal=projector._is_causal, is_mrope=projector._is_mrope,
                                      has_ends=projector._has_ends), disk=disk)  # fmt: skip
    again.submit(0, turn)
    again.run()
    assert again.tokens[0] == harness.tokens[1]
    assert again.finals[0].usage.n_cached >= 72
    assert not again.backend.projector.begun
    assert again.engine.cache.tiers.disk_hit_tokens


def test_another_picture_or_projector_shares_nothing(layout: dict):
    disk = MemoryDisk()
    for fingerprint, name, n_begun in ((b"one", "cat", 1), (b"two", "cat", 1), (b"one", "dog", 1), (b"one", "cat", 0)):
        projector = FakeProjector(fingerprint=fingerprint)
        harness = big(layout, projector, disk=disk)
        prompt = asked(picture(name, 9, 8), "?" * 60)
        harness.submit(0, prompt)
        harness.run()
        assert harness.tokens[0] == alone(harness, prompt)
        assert len(projector.begun) == n_begun
        harness.engine.close()
        harness.engine.cache.tiers.flush(1.0, harness._clock)


def test_a_picture_follows_where_another_request_has_text(layout: dict, projector: FakeProjector):
    """What both begin with is copied from a stream that goes on differently: with text, or with another picture."""
    start = "what both of them begin with, and it is long enough to copy: "
    for others in (asked(start + "some text"), asked(start, picture("cat", 5, 3)), asked(start, picture("dot", 2, 1))):
        harness = big(layout, projector, n_slots=3, ram_cache_bytes=0)
        harness.submit(0, others, n_predict=24)
        for _ in range(8):
            harness.step()
        harness.submit(1, asked(start, picture("dog", 5, 3)))
        harness.run()
        assert harness.tokens[0] == alone(harness, others, 24)
        assert harness.tokens[1] == alone(harness, asked(start, picture("dog", 5, 3)))


def test_few_rows_are_not_shared_between_requests():
    harness = big({}, FakeProjector())
    prompt = asked("look: ", picture("dot", 2, 2), "?" * 30)
    for request_id in range(2):
        harness.submit(request_id, prompt)
        harness.run()
        assert harness.tokens[request_id] == alone(harness, prompt)
        assert harness.finals[request_id].usage.n_cached <= len("look: <")
    assert len(harness.backend.projector.begun) == 1, "their rows are the same all the same"


def test_rows_are_kept_within_a_part_of_the_memory_for_prefixes():
    projector = FakeProjector()
    harness = big({}, projector, ram_cache_bytes=4 * 72 * 16 * 2)  # for two pictures
    for at, name in enumerate(["a", "b", "a", "c", "b"]):
        harness.submit(at, asked(f"{at}", picture(name, 9, 8), "?"))
        harness.run()
    assert [chunk.media.path for chunk in projector.begun] == ["/a", "/b", "/c", "/b"]
    media = harness.steps[-1].stats.media
    assert (media.n_encoded, media.n_reused, media.n_tokens) == (4, 1, 5 * 72)
    assert media.kept_bytes == 2 * 72 * 16
    harness.engine.clear_cache(ram=True, disk=False)
    harness.submit(9, asked("9", picture("b", 9, 8), "?"))
    harness.run()
    assert len(projector.begun) == 5


def test_without_memory_for_prefixes_nothing_is_kept():
    harness = big({}, FakeProjector(), ram_cache_bytes=0)
    for at in range(2):
        harness.submit(at, asked(f"{at}", picture("cat", 9, 8), "?"))
        harness.run()
    assert len(harness.backend.projector.begun) == 2
    assert harness.steps[-1].stats.media.kept_bytes == 0


# --- what goes wrong ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("problem", "code", "says"),
    [
        (DecodeFailed("no memory", is_fatal=False), "engine_failed", "a picture of the prompt cannot be encoded"),
        (BadRequest("the picture is empty"), "bad_request", "the picture is empty"),
        (ValueError("the file is shorter than it should be"), "engine_failed", "cannot be encoded: the file is"),
    ],
)
def test_an_encoding_that_fails_ends_its_request_alone(layout: dict, problem: Exception, code: str, says: str):
    projector = FakeProjector()
    projector.problems = [problem]
    harness = big(layout, projector)
    prompt = asked("look", picture("cat", 9, 8), "?")
    for request_id in range(2):
        harness.submit(request_id, prompt)
    harness.submit(2, "text")
    harness.run()
    assert (harness.finals[0].finish, harness.finals[0].error_code) == (Finish.ERROR, code)
    assert says in harness.finals[0].error_message
    assert harness.tokens[1] == alone(harness, prompt)
    assert harness.tokens[2] == expected_output([*b"text"], 16)


def test_what_is_wrong_with_a_picture_names_its_field(layout: dict):
    projector = FakeProjector()
    harness = big(layout, projector)
    cat, dog = picture("cat", 9, 8), picture("dog", 9, 8)
    named = [structs.replace(each, field=f"images[{at}]") for at, each in enumerate((cat, dog))]
    tokenize, projector.problems = projector.tokenize, [BadRequest("it is empty")]

    def without_dogs(segments):
        if any(segment.media == dog.media for segment in segments):
            raise BadRequest("a picture of 36 x 32 pixels: no dogs")
        return tokenize(segments)

    harness.submit(0, (Segment("look"), named[0], Segment("?")))
    harness.run()
    assert harness.finals[0].error_message == "images[0]: it is empty"
    projector.tokenize = without_dogs
    with pytest.raises(BadRequest, match=r"^images\[1\]: a picture of 36 x 32 pixels: no dogs"):
        prompt_of(harness.backend, Submit(id=1, segments=(*named,)))


def test_a_projector_that_refuses_to_begin_ends_the_request(layout: dict):
    projector = FakeProjector()
    harness = big(layout, projector)

    def begin(chunk):
        raise ValueError("the file is gone")

    projector.begin = begin
    harness.submit(0, asked("look", picture("cat"), "?"))
    harness.submit(1, "text")
    harness.run()
    assert "the file is gone" in harness.finals[0].error_message
    assert harness.finals[1].finish is Finish.LENGTH


@pytest.mark.parametrize("n_steps", range(0, 12, 2))
def test_a_cancel_at_any_point_leaves_the_others_alone(layout: dict, projector: FakeProjector, n_steps: int):
    harness = big(layout, projector)
    prompts = [asked("look" * 20, picture("cat", 9, 8), f"{number}?") for number in range(3)]
    prompts.append(asked(picture("dog", 9, 8), "and?"))
    for number, prompt in enumerate(prompts):
        harness.submit(number, prompt)
    for _ in range(n_steps):
        harness.step()
    harness.engine.cancel(0)
    harness.run()
    for number in (1, 2, 3):
        assert harness.tokens[number] == alone(harness, prompts[number])
    assert harness.backend.n_open_samplers == 0


def test_what_is_encoded_for_nobody_is_given_up():
    projector = FakeProjector(looks=1000)
    harness = big({}, projector)
    harness.submit(0, asked("look", picture("cat", 9, 8), "?"))
    harness.submit(1, asked("see", picture("cat", 9, 8), "?"))
    for _ in range(3):
        harness.step()
    harness.engine.cancel(0)
    harness.step()
    assert projector.n_halted == 0, "the other one needs it, too"
    harness.engine.cancel(1)
    assert projector.n_halted == 1
    harness.run()
    projector.looks = 2
    harness.submit(2, asked("see", picture("cat", 9, 8), "?"))
    harness.run(max_steps=3000)
    assert harness.finals[2].finish is Finish.LENGTH


def test_the_engine_may_end_while_something_is_encoded(layout: dict):
    projector = FakeProjector(looks=1000)
    harness = big(layout, projector)
    harness.submit(0, asked("look" * 30, picture("cat", 9, 8), "?"))
    for _ in range(12):
        harness.step()
    harness.engine.close()
    assert projector.n_halted == 1


@pytest.mark.parametrize("n_steps", range(1, 16, 3))
def test_a_preempted_request_comes_back(layout: dict, projector: FakeProjector, n_steps: int):
    projector.looks = 4
    harness = big(layout, projector, n_slots=2)
    low = asked("look" * 20, picture("cat", 9, 8), "?")
    harness.submit(0, low, lane=Lane.BATCH)
    harness.submit(1, low, lane=Lane.BATCH)
    for _ in range(n_steps):
        harness.step()
    for request_id in (2, 3):
        harness.submit(request_id, asked(picture("dog"), f"now! {request_id}"), lane=Lane.INTERACTIVE)
    harness.run()
    assert harness.tokens[0] == harness.tokens[1] == alone(harness, low)


def test_cells_run_out(projector: FakeProjector):
    harness = Harness(n_cells=256, n_slots=4, projector=projector, n_batch=128)
    prompts = [asked("look", picture(f"p{number}", 8, 8), "?") for number in range(6)]
    for number, prompt in enumerate(prompts):
        harness.submit(number, prompt, n_predict=60)
    harness.run()
    for number, prompt in enumerate(prompts):
        assert harness.tokens[number] == alone(harness, prompt, 60)


def test_a_request_outgrows_its_stream(projector: FakeProjector):
    harness = Harness(n_cells=512, n_slots=4, is_split=True, n_background_seqs=1, n_batch=128, projector=projector)
    prompts = [asked("look", picture("cat", 8, 8), f"{number}?") for number in range(3)]
    for number, prompt in enumerate(prompts):
        harness.submit(number, prompt, n_predict=100)
    harness.run()
    for number, prompt in enumerate(prompts):
        assert harness.tokens[number] == alone(harness, prompt, 100)


def test_another_engine_goes_on_with_the_answer(layout: dict, projector: FakeProjector):
    prompt = asked("look", picture("cat", 9, 8), "?")
    first = big(layout, projector)
    sampling = Sampling(temperature=1.0, seed=7, repeat_penalty=1.3, mirostat=2)
    first.submit(0, prompt, sampling=sampling)
    first.run()
    second = big(layout, FakeProjector(is_causal=projector._is_causal, is_mrope=projector._is_mrope,
                                       has_ends=projector._has_ends))  # fmt: skip
    said = first.tokens[0][:6]
    mu = next(delta.mu for step in first.steps for delta in step.deltas if delta.n_output == 6 and delta.tokens)
    second.submit(0, prompt, sampling=sampling, resume=Resume(output=tuple(said), started_at_s=0.0, mu=mu))
    second.run()
    assert [*said, *second.tokens[0]] == first.tokens[0]


# --- at the door --------------------------------------------------------------------------------------------------


def test_a_picture_that_one_call_cannot_compute_is_refused():
    harness = Harness(n_batch=64, n_cells=1024, projector=FakeProjector(is_causal=False))
    harness.submit(0, asked(picture("large", 9, 8), "?"))
    harness.submit(1, asked(picture("small", 8, 8), "?"))
    harness.run()
    assert harness.finals[0].error_code == "bad_request"
    assert "72 tokens" in harness.finals[0].error_message
    assert "64" in harness.finals[0].error_message
    assert harness.finals[1].finish is Finish.LENGTH


def test_a_causal_picture_larger_than_the_batch_is_cut():
    harness = Harness(n_batch=64, n_cells=1024, projector=FakeProjector(is_mrope=True))
    prompt = asked(picture("large", 16, 16), "?")
    harness.submit(0, prompt)
    harness.run()
    assert harness.tokens[0] == alone(harness, prompt)


def test_a_model_without_a_projector_says_so():
    backend = FakeBackend(n_cells=64, n_seqs=1, n_batch=32)
    with pytest.raises(BadRequest, match="takes text only"):
        prompt_of(backend, Submit(id=0, segments=asked(picture("cat"))))


def test_a_projector_without_ears_says_so():
    projector = FakeProjector()
    projector.kinds = (MediaKind.IMAGE,)
    backend = FakeBackend(n_cells=64, n_seqs=1, n_batch=32, projector=projector)
    with pytest.raises(BadRequest, match="takes image, and no audio"):
        prompt_of(backend, Submit(id=0, segments=asked(sound("bark"))))


def test_tokens_below_zero_are_nobody_s_to_send():
    backend = FakeBackend(n_cells=64, n_seqs=1, n_batch=32, projector=FakeProjector())
    tokens = tuple(prompt_of(backend, Submit(id=0, segments=asked(picture("cat")))).tokens)
    with pytest.raises(BadRequest, match="not in the vocabulary"):
        prompt_of(backend, Submit(id=0, tokens=tokens))


def test_counting_takes_no_pixels():
    backend = FakeBackend(n_cells=64, n_seqs=1, n_batch=32, projector=FakeProjector())
    segments = asked("ab", picture("cat"), "c", sound("bark"))
    assert len(count(backend, Count(id=0, segments=segments))) == 2 + 14 + 1 + 20


# --- beside others ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("looks", [3, 300])
def test_streams_keep_their_pace_while_a_picture_is_encoded(looks: int):
    projector = FakeProjector(looks=looks)
    target_s = 0.05
    harness = Harness(
        n_cells=4096, n_slots=4, is_split=True, n_background_seqs=1, n_batch=256, projector=projector,
        target_itl_s=target_s, background_looks=30,
    )  # fmt: skip
    for request_id in range(3):
        harness.submit(request_id, f"stream {request_id}", n_predict=400)
    for _ in range(40):
        harness.step()
    harness.submit(3, asked("look", picture("cat", 16, 16), "?"), n_predict=8)
    times: list[float] = []
    while 3 not in harness.finals:
        step = harness.step()
        if step is not None and any(delta.id == 0 and delta.tokens for delta in step.deltas):
            times.append(harness.now_s)
    gaps = [after - before for before, after in itertools.pairwise(times)]
    assert len(gaps) > 2
    # Each look at the clock takes a millisecond of it.
    assert max(gaps) <= target_s + 0.03
    if looks == 300:
        assert len(gaps) < 150, "the encoding had the time between the streams' steps"
    assert harness.tokens[3] == alone(harness, asked("look", picture("cat", 16, 16), "?"), 8)


def test_text_goes_on_while_a_picture_is_encoded():
    projector = FakeProjector(looks=10_000)
    harness = big({}, projector)
    harness.submit(0, asked("look", picture("cat", 9, 8), "?"))
    harness.submit(1, "text", n_predict=5, target_itl_s=0.01)
    for _ in range(200):
        if 1 in harness.finals:
            break
        harness.step()
    assert harness.tokens[1] == expected_output([*b"text"], 5)
    assert 0 not in harness.finals


def test_drafts_never_reach_into_a_picture(layout: dict, projector: FakeProjector):
    harness = big(layout, projector, speculation=Speculation)
    prompt = asked("abcabcabc", picture("cat", 9, 8), "abcabcabcabc")
    harness.submit(0, prompt, n_predict=60)
    harness.run()
    assert harness.tokens[0] == alone(harness, prompt, 60)


def test_penalties_know_only_text():
    harness = big({}, FakeProjector())
    sampling = Sampling(temperature=1.0, seed=3, repeat_penalty=1.5, penalty_last_n=1000)
    harness.submit(0, asked("look", picture("cat", 9, 8), "?"), sampling=sampling)
    assert harness.engine._requests[0].sampler._recent == [*b"look<>?"]
