"""Sampling where the logits were computed, as on a GPU: here llama.cpp does it on the CPU, by the same path."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from localrun.engine.engine import Limits
from localrun.engine.native.context import DEVICE_TOP_K
from localrun.engine.native.llama import LlamaBackend
from localrun.wire import ChosenLogprob, Delta, Grammar, GrammarKind, Sampling, Submit
from tests.engine.conftest import compute, open_tiny
from tests.engine.stepped import SteppedEngine

PROMPT = list(range(300, 340))
SAMPLINGS = {
    "greedy": Sampling(temperature=0),
    "few candidates": Sampling(temperature=0.8, top_k=40, top_p=0.9, min_p=0.01, seed=3),
    "as many as there are": Sampling(temperature=1.5, top_k=DEVICE_TOP_K, seed=4),
    "more than there are": Sampling(temperature=1.5, top_k=DEVICE_TOP_K + 1, seed=5),
    "all": Sampling(temperature=1.5, top_k=0, top_p=1, min_p=0, seed=6),
    "penalties": Sampling(temperature=0, repeat_penalty=1.3),
    "a bias": Sampling(temperature=0, logit_bias=((300, 50.0),)),
}


@pytest.fixture(scope="module")
def on_device(tiny_gguf: Path) -> Iterator[LlamaBackend]:
    backend = open_tiny(tiny_gguf, samples_on_device=True)
    yield backend
    backend.close()


@pytest.fixture(scope="module")
def on_host(tiny_gguf: Path) -> Iterator[LlamaBackend]:
    backend = open_tiny(tiny_gguf)
    yield backend
    backend.close()


def answers(backend: LlamaBackend, submits: list[Submit]) -> dict[int, list[Delta]]:
    for seq in range(backend.n_seqs):
        backend.seq_remove(seq, 0)
    engine = SteppedEngine(backend, Limits(4, 16, 0.05, 0), time.monotonic)
    for submit in submits:
        engine.submit(submit, list(submit.tokens or ()))
    told: dict[int, list[Delta]] = {submit.id: [] for submit in submits}
    while not engine.is_idle:
        step = engine.step()
        for delta in step.deltas if step is not None else ():
            told[delta.id].append(delta)
    engine.close()
    return told


def tokens(deltas: list[Delta]) -> list[int]:
    return [token for delta in deltas for token in delta.tokens]


def logprobs(deltas: list[Delta]) -> list[ChosenLogprob]:
    return [each for delta in deltas for each in delta.logprobs or ()]


def submit(number: int, sampling: Sampling, **more: object) -> Submit:
    return Submit(id=number, tokens=tuple(PROMPT[number:]), sampling=sampling, n_predict=24, ignore_eos=False, **more)


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
def test_the_answer_is_the_same_wherever_it_is_sampled(on_device: LlamaBackend, on_host: LlamaBackend, sampling):
    asked = submit(1, sampling)
    expected = tokens(answers(on_host, [asked])[1])
    assert tokens(answers(on_device, [asked])[1]) == expected
    assert expected


def test_a_sequence_may_be_of_either_kind_in_turn(on_device: LlamaBackend, on_host: LlamaBackend):
    for sampling in (*SAMPLINGS.values(), *reversed(SAMPLINGS.values())):
        asked = submit(1, sampling)
        assert tokens(answers(on_device, [asked])[1]) == tokens(answers(on_host, [asked])[1])


def test_requests_of_both_kinds_run_together(on_device: LlamaBackend, on_host: LlamaBackend):
    asked = [submit(number, sampling) for number, sampling in enumerate(list(SAMPLINGS.values())[:4], 1)]
    found, expected = answers(on_device, asked), answers(on_host, asked)
    for each in asked:
        assert tokens(found[each.id]) == tokens(expected[each.id])
        assert tokens(found[each.id])


def test_log_probabilities_and_grammars_have_all_logits(on_device: LlamaBackend, on_host: LlamaBackend):
    greedy = SAMPLINGS["greedy"]
    with_logprobs = submit(1, greedy, logprobs=True, n_probs=3)
    grammar = Grammar(GrammarKind.REGEX, "(yes|no) [a-z]{4}")
    constrained = submit(2, greedy, grammar=grammar)
    for asked in (with_logprobs, constrained):
        found, expected = answers(on_device, [asked])[asked.id], answers(on_host, [asked])[asked.id]
        assert tokens(found) == tokens(expected)
        assert "".join(delta.text for delta in found) == "".join(delta.text for delta in expected)
        assert logprobs(found) == logprobs(expected)
    assert any(delta.logprobs for delta in answers(on_device, [with_logprobs])[1])


def test_logits_that_stayed_on_the_device_are_refused(on_device: LlamaBackend):
    greedy = on_device.sampler(SAMPLINGS["greedy"], ignore_eos=False)
    on_device.expect(0, greedy, wants_logprobs=False)
    on_device.seq_remove(0, 0)
    batch = on_device.batch
    batch.token[0], batch.pos[0], batch.seq[0], batch.wants_logits[0] = 300, 0, 0, 1
    on_device.decode(1)
    with pytest.raises(ValueError, match="stayed on the device"):
        on_device.logits(0)
    likeliest = greedy.sample(0)
    on_device.expect(0, greedy, wants_logprobs=True)
    on_device.seq_remove(0, 0)
    assert int(compute(on_device, 0, [300]).argmax()) == likeliest
    greedy.close()
