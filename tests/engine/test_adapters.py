"""Requests with adapters of their own, on the fake backend, whose tokens depend on the set that computed every one."""

from __future__ import annotations

import re
from itertools import pairwise

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from localrun.engine.adapters import MOST_LOADED
from localrun.engine.backend import BASE, AdapterSet, MemoryKind
from localrun.engine.sample.text import prompt_of
from localrun.errors import BadRequest
from localrun.wire import Adapter, Finish, Lane, Media, MediaKind, Segment, Submit
from tests.depth import DEPTH
from tests.engine.harness import Harness, expected_media_output, expected_output
from tests.engine.memory_disk import MemoryDisk
from tests.fakes.backend import FakeBackend
from tests.fakes.media import PATCH_PIXELS, FakeProjector


def adapter(name: str, scale: float = 1.0) -> Adapter:
    return Adapter(f"/adapters/{name}", name.encode().ljust(32, b"."), scale)


A, B, C, D = (adapter(name) for name in "abcd")
SETS: dict[str, tuple[Adapter, ...]] = {
    "base": (), "a": (A,), "b": (B,), "both": (A, B), "minus a": (adapter("a", -1.0),), "half a": (adapter("a", 0.5),),
}  # fmt: skip
PROMPT = [10 + at % 90 for at in range(100)]
LAYOUTS = {
    "one pool": {"n_cells": 2048},
    "split": {"n_cells": 2048, "is_split": True},
    "split, background": {"n_cells": 2048, "is_split": True, "n_background_seqs": 2},
    "window": {"n_cells": 2048, "memory_kind": MemoryKind.WINDOW},
    "hybrid": {"n_cells": 2048, "memory_kind": MemoryKind.HYBRID},
}


def test_a_set_has_a_name_by_what_is_in_effect():
    one = AdapterSet.of([A, B])
    assert one == AdapterSet.of([B, A]) == AdapterSet.of([B, adapter("c", 0.0), adapter("a", 0.25), adapter("a", 0.75)])
    assert AdapterSet.of([]) == AdapterSet.of([adapter("a", 0.0)]) == AdapterSet.of([A, adapter("a", -1.0)]) == BASE
    assert AdapterSet.of([adapter("a", 0.1)]) == AdapterSet.of([adapter("a", 0.1 + 1e-12)])
    names = {AdapterSet.of(adapters).hash for adapters in SETS.values()}
    assert len(names) == len(SETS)
    assert {len(name) for name in names} == {0, 16}


@pytest.mark.parametrize("scale", [float("nan"), float("inf"), 1e300])
def test_a_strength_that_is_no_number_is_refused(scale: float):
    with pytest.raises(BadRequest, match="/adapters/a is no number"):
        AdapterSet.of([adapter("a", scale)])
    harness = Harness()
    harness.submit(1, "hello", adapters=[adapter("a", scale)])
    harness.run()
    assert harness.finals[1].error_code == "bad_request"


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_set_says_what_it_says_alone(layout: str):
    harness = Harness(**LAYOUTS[layout])
    for round_ in range(2):  # computed, and then found in the cache
        for index, adapters in enumerate(SETS.values()):
            harness.submit(10 * round_ + index, PROMPT, n_predict=20, adapters=adapters)
        harness.run()
        for index, adapters in enumerate(SETS.values()):
            final = harness.finals[10 * round_ + index]
            assert harness.tokens[10 * round_ + index] == expected_output(PROMPT, 20, adapters=adapters)
            assert final.usage is not None
            assert (final.usage.n_cached > 0) == (round_ > 0)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_a_set_computed_is_found_on_disk_by_that_set_alone(layout: str):
    disk = MemoryDisk()
    first = Harness(**LAYOUTS[layout], disk=disk)
    first.submit(1, PROMPT, n_predict=8, adapters=[A])
    first.run()
    first.engine.close()
    again = Harness(**LAYOUTS[layout], disk=disk)
    for request_id, adapters in enumerate(([B], [], [A]), start=2):
        again.submit(request_id, PROMPT, n_predict=8, adapters=adapters)
        again.run()
        assert again.tokens[request_id] == expected_output(PROMPT, 8, adapters=adapters)
    assert [usage.n_cached > 0 for i in (2, 3, 4) if (usage := again.finals[i].usage)] == [False, False, True]


def test_nobody_waits_for_a_prompt_with_other_adapters():
    harness = Harness(n_cells=2048, n_batch=16)
    harness.submit(1, PROMPT, adapters=[A])
    harness.step()
    harness.submit(2, PROMPT, adapters=[B])
    harness.submit(3, PROMPT, adapters=[A])
    harness.step()
    harness.step()
    assert {request.id for request in harness.engine.scheduler.running} == {1, 2}
    harness.run()
    assert [usage.n_cached > 0 for i in (2, 3) if (usage := harness.finals[i].usage)] == [False, True]


def test_the_engine_s_own_adapters_are_for_those_that_name_none():
    harness = Harness(n_cells=1024, adapters=[A])
    for request_id, adapters in enumerate((None, [], [B]), start=1):
        harness.submit(request_id, PROMPT, n_predict=8, adapters=adapters)
    harness.run()
    for request_id, adapters in enumerate(([A], [], [B]), start=1):
        assert harness.tokens[request_id] == expected_output(PROMPT, 8, adapters=adapters)


def test_an_adapter_that_cannot_be_loaded_ends_the_requests_that_name_it_and_no_others():
    harness = Harness(n_cells=1024)
    harness.submit(1, PROMPT, n_predict=40)
    harness.step()
    for request_id in (2, 3):
        harness.submit(request_id, PROMPT, adapters=[A, adapter("broken")])
    harness.run()
    assert harness.finals[1].finish is Finish.LENGTH
    assert harness.tokens[1] == expected_output(PROMPT, 40)
    for request_id in (2, 3):
        assert harness.finals[request_id].error_code == "bad_model_file"
        assert "/adapters/broken" in (harness.finals[request_id].error_message or "")


def test_a_preempted_request_goes_on_with_its_adapters():
    harness = Harness(n_cells=1024, n_slots=1)
    harness.submit(1, PROMPT, n_predict=30, adapters=[A], lane=Lane.BATCH)
    for _ in range(8):
        harness.step()
    harness.submit(2, PROMPT, n_predict=5, adapters=[B], lane=Lane.INTERACTIVE)
    harness.run()
    assert harness.tokens[1] == expected_output(PROMPT, 30, adapters=[A])
    assert harness.tokens[2] == expected_output(PROMPT, 5, adapters=[B])


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("is_causal", [True, False])
def test_a_picture_is_encoded_once_and_computed_by_each_set(layout: str, is_causal: bool):
    projector = FakeProjector(is_causal=is_causal)
    harness = Harness(**LAYOUTS[layout], n_batch=256, projector=projector)
    media = Media(MediaKind.IMAGE, "/cat", b"cat", width=9 * PATCH_PIXELS, height=8 * PATCH_PIXELS)
    asked = (Segment("what is this? "), Segment("", media=media), Segment("say it"))
    sets = dict(enumerate(([], [A], [A, B], [A]), start=1))
    for request_id, adapters in sets.items():
        harness.submit(request_id, asked, adapters=adapters)
    harness.run()
    prompt = prompt_of(harness.backend, Submit(id=0, segments=asked))
    for request_id, adapters in sets.items():
        assert harness.tokens[request_id] == expected_media_output(prompt, projector, 16, adapters)
    assert len(projector.begun) == 1


def test_a_set_s_plan_of_streams_is_made_once():
    harness = Harness(n_cells=1024)
    for request_id, adapters in enumerate(([A], [B], [A], []), start=1):
        harness.submit(request_id, [request_id, 2], n_predict=40, adapters=adapters)
    while not harness.engine.scheduler.reusable_plan():
        harness.step()
    plans = []
    for _ in range(9):
        plans.append(harness.engine.scheduler.reusable_plan())
        harness.step()
    assert plans[:3] == plans[3:6] == plans[6:]
    assert len({id(plan) for plan in plans}) == 3
    assert sorted(len(plan.grants) for plan in plans[:3] if plan is not None) == [1, 1, 2]


def names(backend: FakeBackend) -> set[str]:
    return {one.path.removeprefix("/adapters/") for one in backend.adapters.values()}


def test_the_adapter_that_was_used_the_longest_ago_makes_room():
    harness = Harness(n_cells=2048)
    for request_id, number in enumerate((*range(MOST_LOADED), 0), start=100):
        harness.submit(request_id, "hello", n_predict=2, adapters=[adapter(f"{number}")])
        harness.run()
    assert names(harness.backend) == {f"{number}" for number in range(MOST_LOADED)}
    harness.submit(1, "hello", n_predict=2, adapters=[adapter("new")])
    harness.run()
    assert names(harness.backend) == {f"{number}" for number in range(MOST_LOADED) if number != 1} | {"new"}


def test_one_adapter_too_many_waits_until_another_is_not_needed():
    harness = Harness(n_cells=4096, n_slots=MOST_LOADED + 2)
    for number in range(MOST_LOADED):
        harness.submit(number, "hello", n_predict=10 + number, adapters=[adapter(f"{number}")])
    harness.submit(100, "hello", n_predict=3, adapters=[adapter("new")])
    harness.submit(101, "hello", n_predict=3, adapters=[adapter("7")])
    while 0 not in harness.finals:
        harness.step()
        assert not {100, 101} & harness.tokens.keys(), "it would take the place of one that is needed"
    harness.run()
    assert harness.tokens[100] == expected_output(list(b"hello"), 3, adapters=[adapter("new")])
    assert harness.tokens[101] == expected_output(list(b"hello"), 3, adapters=[adapter("7")])


@pytest.mark.parametrize(
    ("n_own", "n_more", "said"),
    [
        (0, MOST_LOADED + 1, "needs 9 adapters; an engine has at most 8 loaded at once; use fewer"),
        (MOST_LOADED, 1, "needs 1 adapters and the model has 8 of its own .* or a model with fewer of its own"),
    ],
)
def test_who_needs_more_than_can_be_loaded_is_told_the_limit_and_the_way_out(n_own: int, n_more: int, said: str):
    harness = Harness(n_cells=1024, adapters=[adapter(f"own {number}") for number in range(n_own)])
    harness.submit(1, "hello", adapters=[adapter(f"{number}") for number in range(n_more)])
    harness.run()
    assert harness.finals[1].error_code == "bad_request"
    assert re.search(said, harness.finals[1].error_message or "")


def test_a_cancelled_request_lets_go_of_its_adapters():
    harness = Harness(n_cells=4096, n_slots=1)
    for number in range(MOST_LOADED + 1):
        harness.submit(number, "hello", adapters=[adapter(f"{number}")])
        harness.step()
    assert len(harness.engine.scheduler.waiting) == MOST_LOADED
    harness.engine.cancel(MOST_LOADED)
    harness.engine.cancel(1)
    harness.submit(100, "hello", n_predict=4, adapters=[adapter("new")])
    harness.run()
    assert harness.tokens[100] == expected_output(list(b"hello"), 4, adapters=[adapter("new")])


@settings(max_examples=40 * DEPTH)
@given(
    sets=st.lists(st.integers(0, 3), min_size=2, max_size=8),
    target_s=st.sampled_from([0.0, 0.003, 0.05]),
    layout=st.sampled_from(["one pool", "split", "split, background"]),
    prompts=st.lists(st.tuples(st.integers(2, 40), st.integers(0, 3), st.integers(1, 200)), max_size=4),
)
@example(sets=[0, 1], target_s=0.0, layout="one pool", prompts=[(30, 0, 1)])  # comes when its set was just done
def test_between_two_tokens_of_a_stream_every_other_set_has_one_step_at_most(
    sets: list[int], target_s: float, layout: str, prompts: list[tuple[int, int, int]]
):
    """However many streams and prompts there are. Prompts' own steps are no part of rounds."""
    adapters = [[], [A], [B], [C, D]]
    harness = Harness(**{**LAYOUTS[layout], "n_cells": 4096}, n_slots=12, n_seqs=24, target_itl_s=target_s)
    steps: list[tuple[bytes, set[int], bool]] = []  # the set, who got a token, whether one had some
    for index, which in enumerate(sets):
        harness.submit(index, [10 + index, 20, 30], n_predict=8, adapters=adapters[which])
    sent = sorted(prompts, reverse=True)
    for number in range(3000):
        if harness.engine.is_idle and not sent:
            break
        if sent and number >= sent[-1][0]:
            _, which, length = sent.pop()
            harness.submit(100 + len(sent), [50 + len(sent)] * length, n_predict=10, adapters=adapters[which])
        n_used, counts = len(harness.backend.used), {i: len(tokens) for i, tokens in harness.tokens.items()}
        harness.step()
        for adapter_hash in harness.backend.used[n_used:]:
            got = {i for i, tokens in harness.tokens.items() if len(tokens) > counts.get(i, 0)}
            steps.append((adapter_hash, got, any(counts.get(i) for i in got)))
    assert len(harness.finals) == len(sets) + len(prompts)
    mixes = harness.backend.mixes_rows
    for index, which in enumerate(sets):
        assert harness.tokens[index] == expected_output([10 + index, 20, 30], 8, adapters=adapters[which])
        its = [at for at, (_, got, _) in enumerate(steps) if index in got]
        for begin, end in pairwise(its):
            between = [adapter_hash for adapter_hash, _, is_streams in steps[begin + 1 : end] if is_streams or mixes]
            assert len(between) == len(set(between)), "a set had two turns while a stream waited for one"
