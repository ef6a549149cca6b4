"""Answers with drafts are the answers without: random traces over the fake backend, whose next token is a hash of the
cells that a row really sees. A draft that is not taken off its cells, a row too many or a token counted twice changes
what follows."""

from __future__ import annotations

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from localrun.engine.backend import MemoryKind, NoRoom
from localrun.wire import Finish, Lane, Sampling
from tests.depth import DEPTH
from tests.engine.harness import GREEDY, Harness, expected_output
from tests.engine.speculate.drafters import drafting
from tests.fakes.backend import FakeBackend
from tests.fakes.tokens import IM_END

prompts = st.lists(
    st.sampled_from([b"system ", b"ab", b"abc", b"user: ", b"z" * 40, b"message" * 6 + b"."]), min_size=1, max_size=5
).map(lambda parts: [IM_END if letter == ord(".") else letter for letter in b"".join(parts)])
samplings = st.sampled_from(
    [
        GREEDY,
        Sampling(temperature=1, seed=7),
        Sampling(temperature=1, seed=8, repeat_penalty=1.3, penalty_last_n=16),
        Sampling(temperature=1, seed=9, mirostat=2),
    ]
)
submits = st.fixed_dictionaries(
    {
        "prompt": prompts,
        "n_predict": st.integers(0, 40),
        "ignore_eos": st.booleans(),
        "sampling": samplings,
        "stop": st.sampled_from([(), ("a",), ("e ", "é"), ("qu",)]),
        "n_probs": st.sampled_from([None, 0, 2]),
        "lane": st.sampled_from(list(Lane)),
        "client": st.sampled_from(["one", "two"]),
    }
)
events = st.one_of(submits, st.integers(1, 6), st.tuples(st.just("cancel"), st.integers(0, 12)))
shapes = st.fixed_dictionaries(
    {
        "n_cells": st.sampled_from([256, 320, 512]),
        "n_slots": st.integers(1, 5),
        "n_batch": st.sampled_from([32, 64]),
        "n_seqs": st.integers(5, 10),
        "ram_cache_bytes": st.sampled_from([0, 600, 1 << 20]),
        "is_split": st.booleans(),
        "n_background_seqs": st.integers(1, 2),
        "abort_every": st.sampled_from([0, 1, 3]),
        "n_ctx": st.sampled_from([80, 512]),
        "memory_kind": st.sampled_from([MemoryKind.ATTENTION, MemoryKind.WINDOW, MemoryKind.HYBRID]),
    }
)


def strict(fake: FakeBackend, n_ctx: int) -> FakeBackend:
    """A backend that drafts must fit: they take no cell from anybody, and nobody drafts while prompts are computed."""
    fake.n_ctx = min(fake.n_ctx, n_ctx)
    decode = fake.decode

    def checked(n_rows: int, *should_abort: object) -> None:
        batch = fake.batch
        n_wanted = Counter(batch.seq[:n_rows][batch.wants_logits[:n_rows] > 0].tolist())
        has_drafts = max(n_wanted.values(), default=0) > 1
        assert batch.pos[:n_rows].max() < fake.n_ctx, "a row behind the end of the context"
        if has_drafts:
            assert sum(n_wanted.values()) == n_rows, "drafts beside prompts"
            assert max(n_wanted.values()) <= 1 + fake.n_rollback, "drafts that cannot be taken off"
            assert fake.worker is None or not fake.worker.is_busy, "drafts beside a prompt in the background"
        try:
            decode(n_rows, *should_abort)
        except NoRoom as error:
            if has_drafts:
                raise RuntimeError("drafts without cells") from error
            raise

    fake.decode = checked
    return fake


def played(shape, trace, speculation=None) -> Harness:
    """Cancels are by tokens and not by steps, for a step may give several."""
    shape = dict(shape)
    n_ctx = shape.pop("n_ctx")
    harness = Harness(**shape, speculation=speculation, wrap=lambda fake: strict(fake, n_ctx))
    charged: Counter[str] = Counter()
    charge = harness.engine.scheduler.policy.charge

    def noted(client: str, *, n_prefill: int = 0, n_output: int = 0) -> None:
        charged[client] += n_output
        charge(client, n_prefill=n_prefill, n_output=n_output)

    harness.engine.scheduler.policy.charge = noted
    clients: list[str] = []
    n_asked = 0
    for event in trace:
        if isinstance(event, dict):
            harness.submit(n_asked, **event)
            clients.append(event["client"])
            n_asked += 1
        elif isinstance(event, int):
            for _ in range(event):
                harness.step()
        else:
            harness.engine.cancel(event[1])
    harness.run()
    assert set(harness.finals) == set(range(n_asked)), "a request without an end"
    assert harness.backend.n_open_samplers == 0, "a sampler leaked"
    for client in set(clients):
        own = [len(harness.tokens[request_id]) for request_id in range(n_asked) if clients[request_id] == client]
        # The end of an answer may have been one draw more.
        assert sum(own) <= charged[client] <= sum(own) + len(own), "tokens that nobody or somebody else paid for"
    return harness


@given(shapes, st.lists(events, max_size=25), st.integers(0, 1 << 20), st.sampled_from([0.0, 0.5, 0.9, 1.0]))
@settings(max_examples=80 * DEPTH)
def test_drafts_change_no_answer(shape, trace, seed, share_right):
    plain, drafted = played(shape, trace), played(shape, trace, drafting(seed, share_right))
    for request_id, final in drafted.finals.items():
        was, tokens, old = plain.finals[request_id], drafted.tokens[request_id], plain.tokens[request_id]
        n_both = min(len(tokens), len(old))
        assert tokens[:n_both] == old[:n_both], "drafts changed an answer"
        assert len(drafted.logprobs[request_id]) in (0, len(tokens)), "a token without its log-probability"
        assert final.usage.n_output == len(tokens)
        if Finish.CANCELLED in (final.finish, was.finish):
            continue
        assert (final.finish, final.stop_text, final.error_code) == (was.finish, was.stop_text, was.error_code)
        assert (tokens, drafted.texts[request_id]) == (old, plain.texts[request_id])
        assert drafted.logprobs[request_id] == plain.logprobs[request_id]
        if final.tokens and was.tokens:  # an end may come in a piece of its own
            assert final.mu == was.mu
        assert all(0 <= count.n_accepted <= count.n_drafted for count in final.usage.drafts)
    service = drafted.engine.scheduler.policy
    assert not service.service("one"), "the service of clients who are gone"


@given(prompts, st.integers(2, 60), st.integers(0, 1 << 20), st.floats(0, 1), st.data())
@settings(max_examples=40 * DEPTH)
def test_a_prediction_speeds_an_answer_up_and_changes_nothing(prompt, n_predict, seed, share_right, data):
    answer = expected_output(prompt, n_predict)
    wrong = data.draw(st.lists(st.integers(0, len(answer) - 1), max_size=3))
    prediction = [token if at not in wrong else 97 for at, token in enumerate(answer)]
    harness = Harness(n_cells=512, speculation=drafting(seed, share_right))
    harness.submit(0, prompt, n_predict=n_predict, prediction=prediction)
    harness.run()
    assert harness.tokens[0] == answer


def test_right_drafts_give_many_tokens_in_few_steps():
    harness = Harness(n_cells=512, speculation=drafting(1, 1.0))
    harness.submit(0, "tell me a story", n_predict=200)
    harness.run()
    assert harness.tokens[0] == expected_output(list(b"tell me a story"), 200)
    assert len(harness.steps) < 100
    (counts,) = (count for count in harness.finals[0].usage.drafts if count.source == "draft_model")
    assert counts.n_accepted == counts.n_drafted > 100
