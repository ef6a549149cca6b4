"""Grammars over a real vocabulary and real sampler chains: on a synthesized model, and on the built-in one."""

from __future__ import annotations

import json
import re
import time
from importlib.resources import files
from typing import Any

import jsonschema
import numpy as np
import pytest

from localrun.engine.engine import Limits
from localrun.engine.native.llama import LlamaBackend
from localrun.engine.sample.constraint import Constraint
from localrun.engine.sample.grammar_library import CompiledGrammar, GrammarVocabulary
from localrun.server.structured import json_schema
from localrun.wire import Delta, Finish, Grammar, GrammarKind, Sampling, Submit
from tests.engine.conftest import compute
from tests.engine.sample.compiling import compile_grammar
from tests.engine.stepped import SteppedEngine

PROMPT = list(range(300, 340))
ROW = len(PROMPT) - 1
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 30},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["red", "green"]}, "maxItems": 3},
        "more": {"anyOf": [{"type": "null"}, {"type": "object", "properties": {"x": {"type": "number"}}}]},
    },
    "required": ["name", "age", "tags", "more"],
    "additionalProperties": False,
}


def compiled(backend: LlamaBackend, kind: GrammarKind, text: str) -> CompiledGrammar:
    return compile_grammar(Grammar(kind, text), GrammarVocabulary(backend))


def constraint(grammar: CompiledGrammar, *, triggers: tuple[str, ...] = ()) -> Constraint:
    return Constraint(grammar, triggers=triggers, banned=frozenset(), clock=time.monotonic)


def drawn(backend: LlamaBackend, grammar: CompiledGrammar, sampling: Sampling, count: int) -> dict[int, int]:
    """How often each token was drawn from the same row, by a new chain every time."""
    counts: dict[int, int] = {}
    for seed in range(count):
        sampler = backend.sampler(Sampling(**{**_fields(sampling), "seed": seed}), ignore_eos=False)
        sampler.constrain(constraint(grammar))
        token = sampler.sample(ROW)
        sampler.close()
        counts[token] = counts.get(token, 0) + 1
    return counts


def _fields(sampling: Sampling) -> dict[str, Any]:
    return {name: getattr(sampling, name) for name in sampling.__struct_fields__}


def beginning_with(backend: LlamaBackend, pattern: bytes) -> list[int]:
    """Tokens that match a pattern as a whole."""
    return [token for token in range(backend.n_vocab) if re.fullmatch(pattern, backend.piece(token))]


def test_draws_follow_the_masked_and_renormalised_distribution(backend: LlamaBackend):
    logits = compute(backend, 0, PROMPT).astype(np.float64)
    grammar = compiled(backend, GrammarKind.REGEX, "[a-e]{1,200}x")
    allowed = beginning_with(backend, b"[a-e]+x?")
    assert len(allowed) > 4
    weights = np.exp((logits[allowed] - logits[allowed].max()) / 1.3)
    expected = dict(zip(allowed, weights / weights.sum(), strict=True))
    counts = drawn(backend, grammar, Sampling(temperature=1.3), 3000)
    assert counts.keys() <= expected.keys()
    for token, probability in expected.items():
        assert counts.get(token, 0) / 3000 == pytest.approx(probability, abs=4.5 * (probability / 3000) ** 0.5 + 1e-3)


def test_truncation_counts_allowed_tokens_only(backend: LlamaBackend):
    logits = compute(backend, 0, PROMPT)
    grammar = compiled(backend, GrammarKind.REGEX, "[a-e]{1,200}x")
    best = sorted(beginning_with(backend, b"[a-e]+x?"), key=lambda token: -logits[token])[:2]
    counts = drawn(backend, grammar, Sampling(temperature=5.0, top_k=2), 100)
    assert set(counts) == set(best)


@pytest.mark.parametrize("stages", [{}, {"repeat_penalty": 1.5}, {"logit_bias": ((5, 1.0),)}])
def test_greedy_is_the_best_of_what_is_allowed(backend: LlamaBackend, stages: dict[str, Any]):
    logits = compute(backend, 0, PROMPT)
    grammar = compiled(backend, GrammarKind.REGEX, "[a-e]{1,200}x")
    best = max(beginning_with(backend, b"[a-e]+x?"), key=lambda token: logits[token])
    assert set(drawn(backend, grammar, Sampling(temperature=0, **stages), 2)) == {best}


def test_a_token_that_goes_on_wrongly_after_a_trigger_is_drawn_again(backend: LlamaBackend):
    logits = compute(backend, 0, PROMPT)
    best = next(
        int(token) for token in np.argsort(-logits) if len(backend.piece(int(token)).decode("utf-8", "replace")) > 2
    )
    first = backend.piece(best).decode("utf-8", "replace")[0]
    sampler = backend.sampler(Sampling(temperature=0, logit_bias=((best, 100.0),)), ignore_eos=False)
    sampler.constrain(constraint(compiled(backend, GrammarKind.REGEX, "[0-9]{3}"), triggers=(first,)))
    token = sampler.sample(ROW)
    sampler.close()
    assert token != best
    shown = backend.piece(token)
    assert (
        first.encode() not in shown or shown.split(first.encode(), 1)[1].decode().isdecimal() or shown == first.encode()
    )


def test_the_vocabulary_knows_control_tokens_by_name_only(backend: LlamaBackend):
    vocabulary = GrammarVocabulary(backend)
    (start,) = backend.tokenize("<|im_start|>", parse_special=True)
    assert vocabulary.cut("a<|im_start|>b") == [("a", start), ("b", -1)]
    assert vocabulary.shown(start) == b"<|im_start|>"
    text = compiled(backend, GrammarKind.LARK, 'start: "<|im_start|>"').matcher
    assert text.validate_tokens([start]) == 0


# --- the built-in model ---------------------------------------------------------------------------------------------


def run(submits: list[Submit]) -> tuple[dict[int, str], dict[int, Delta]]:
    """The texts and the last deltas of these requests, together in one engine."""
    backend = LlamaBackend(
        str(files("localrun.models.builtin") / "tiny.gguf"), n_cells=4096, n_seqs=8, n_batch=64, n_threads=1,
        n_gpu_layers=0, kv_type="f16",
    )  # fmt: skip
    engine = SteppedEngine(backend, Limits(8, 64, 0.0, 0), time.monotonic)
    texts: dict[int, str] = {submit.id: "" for submit in submits}
    finals: dict[int, Delta] = {}
    for submit in submits:
        engine.submit(submit, backend.tokenize(f"<|im_start|>user\nTell me {submit.id}", parse_special=True))
    while len(finals) < len(submits):
        step = engine.step()
        for delta in step.deltas if step is not None else []:
            texts[delta.id] += delta.text
            if delta.finish is not None:
                finals[delta.id] = delta
    engine.close()
    backend.close()
    return texts, finals


SAMPLINGS = [
    Sampling(temperature=0),
    Sampling(temperature=0, repeat_penalty=1.3),
    Sampling(temperature=0.8, top_k=40, top_p=0.9, min_p=0.05, seed=1),
    Sampling(temperature=1.5, seed=2),
    Sampling(temperature=1.0, typical_p=0.7, presence_penalty=1.0, frequency_penalty=0.5, seed=3),
    Sampling(temperature=1.0, mirostat=1, seed=4),
    Sampling(temperature=1.0, mirostat=2, seed=5),
    Sampling(temperature=2.0, logit_bias=((7, 5.0), (9, float("-inf"))), seed=6),
]


@pytest.mark.parametrize("ignore_eos", [False, True])
def test_with_every_sampler_an_answer_matches_its_schema(ignore_eos: bool):
    grammar = json_schema(PERSON, field="format")
    submits = [
        Submit(id=number, sampling=sampling, grammar=grammar, n_predict=400, ignore_eos=ignore_eos)
        for number, sampling in enumerate(SAMPLINGS)
    ]
    texts, finals = run(submits)
    assert {final.error_message for final in finals.values()} == {None}
    finished = [number for number, final in finals.items() if final.finish is Finish.STOP]
    assert len(finished) >= 6
    for number in finished:
        jsonschema.validate(json.loads(texts[number]), PERSON)


def test_a_seed_gives_the_same_answer_alone_and_among_others():
    grammar = json_schema(PERSON, field="format")
    one = Submit(id=0, sampling=Sampling(temperature=1.0, seed=9), grammar=grammar, n_predict=100)
    others = [Submit(id=number, sampling=SAMPLINGS[number], grammar=grammar, n_predict=50) for number in range(1, 4)]
    alone, _ = run([one])
    together, _ = run([one, *others])
    assert alone[0] == together[0]


def test_while_a_grammar_waits_for_its_trigger_the_vocabulary_is_listed_once(
    backend: LlamaBackend, monkeypatch: pytest.MonkeyPatch
):
    compute(backend, 0, PROMPT)
    n_lists = 0
    list_all = np.delete

    def counted(*given: Any) -> Any:
        nonlocal n_lists
        n_lists += 1
        return list_all(*given)

    monkeypatch.setattr(np, "delete", counted)
    sampler = backend.sampler(Sampling(temperature=1.0, top_k=40, seed=3), ignore_eos=True)
    sampler.constrain(constraint(compiled(backend, GrammarKind.REGEX, "[a-e]+"), triggers=("no such text",)))
    for _ in range(5):
        assert sampler.sample(ROW) not in backend.eog_tokens
    sampler.close()
    assert n_lists == 1
