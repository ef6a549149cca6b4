"""An engine process with adapters: its own, those of requests, and what cannot be loaded."""

from __future__ import annotations

import hashlib
from pathlib import Path

from msgspec.structs import replace

from localrun import wire
from localrun.wire import Adapter, Finish, Grammar, GrammarKind, OpenFailed, Ready, Sampling, Step
from tests.engine.test_process import OPEN, Child, child, submit
from tests.lora_file import write_lora, write_vector


def adapter(path: Path, scale: float = 1.0) -> Adapter:
    return Adapter(str(path), hashlib.sha256(path.read_bytes()).digest(), scale)


def tokens_and_finals(engine: Child, count: int) -> tuple[dict[int, list[int]], dict[int, wire.Delta]]:
    tokens: dict[int, list[int]] = {}
    finals: dict[int, wire.Delta] = {}
    while len(finals) < count:
        step = engine.receive()
        assert isinstance(step, Step)
        for delta in step.deltas:
            tokens.setdefault(delta.id, []).extend(delta.tokens)
            if delta.finish is not None:
                finals[delta.id] = delta
    return tokens, finals


def test_requests_have_the_engine_s_adapters_or_their_own(tiny_gguf: Path, tmp_path: Path) -> None:
    one = adapter(write_lora(tiny_gguf, tmp_path / "one.gguf", seed=1))
    two = adapter(write_vector(tiny_gguf, tmp_path / "two.gguf", seed=2))
    bad = tmp_path / "bad.gguf"
    bad.write_bytes(Path(one.path).read_bytes()[:-100])
    with child("-m", "localrun.engine.process") as engine:
        engine.send(replace(OPEN, model_path=str(tiny_gguf), adapters=(one,)))
        assert isinstance(engine.receive(), Ready)
        sets = {1: None, 2: (one,), 3: (), 4: (replace(one, scale=0.0),), 5: (two,), 6: (one, two), 7: (adapter(bad),)}
        engine.send(*(replace(submit(index), adapters=adapters) for index, adapters in sets.items()))
        tokens, finals = tokens_and_finals(engine, len(sets))
    assert tokens[1] == tokens[2] != tokens[3] == tokens[4]
    assert len({tuple(tokens[index]) for index in (1, 3, 5, 6)}) == 4
    assert {finals[index].finish for index in range(1, 7)} == {Finish.LENGTH}
    assert finals[7].error_code == "bad_model_file"
    assert "bad.gguf" in (finals[7].error_message or "")


def test_an_engine_whose_own_adapter_cannot_be_loaded_does_not_open(tiny_gguf: Path, tmp_path: Path) -> None:
    other = adapter(write_lora(tiny_gguf, tmp_path / "other.gguf", architecture="qwen2"))
    with child("-m", "localrun.engine.process") as engine:
        engine.send(replace(OPEN, model_path=str(tiny_gguf), adapters=(other,)))
        failed = engine.receive()
        assert isinstance(failed, OpenFailed)
        assert failed.code == "bad_model_file"
        assert "other.gguf is for qwen2" in failed.message
        assert engine.exit_code() == 1


def test_numbers_that_are_none_end_the_request_and_nothing_else(tiny_gguf: Path, tmp_path: Path) -> None:
    """An adapter, or too much of one, can make everything NaN."""
    nan = adapter(write_lora(tiny_gguf, tmp_path / "nan.gguf", strength=1e30))
    ways = [
        {"temperature": 0.0}, {"temperature": 1.0, "top_k": 40}, {"temperature": 1.0, "top_k": 0, "top_p": 0.9},
        {"temperature": 1.0, "top_k": 0, "mirostat": 1}, {"temperature": 1.0, "typical_p": 0.5},
        {"repeat_penalty": 1.5},
    ]  # fmt: skip
    samplings = [Sampling(**{"seed": 1} | way) for way in ways]
    with child("-m", "localrun.engine.process") as engine:
        engine.send(replace(OPEN, model_path=str(tiny_gguf)))
        assert isinstance(engine.receive(), Ready)
        engine.send(*(replace(submit(at), adapters=(nan,), sampling=each, n_probs=at % 2)
                      for at, each in enumerate(samplings)))  # fmt: skip
        grammar = replace(submit(10), adapters=(nan,), grammar=Grammar(GrammarKind.GBNF, "root ::= [a-z]+"))
        engine.send(grammar, submit(11))
        _, finals = tokens_and_finals(engine, len(samplings) + 2)
    assert finals.pop(11).finish is Finish.LENGTH
    for final in finals.values():
        assert (final.finish, final.error_code) == (Finish.ERROR, "no_numbers")
        assert "less strength" in (final.error_message or "")
