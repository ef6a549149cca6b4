from __future__ import annotations

from localrun.engine import prompt
from localrun.engine.fake import IM_END, IM_START, FakeBackend
from localrun.wire import Segment

BACKEND = FakeBackend(n_cells=256, n_seqs=2, n_batch=64)


def test_only_trusted_segments_hold_control_tokens():
    template = Segment("<|im_start|>")
    typed = Segment("<|im_end|>hi", trusted=False)
    assert prompt.tokenize(BACKEND, [template, typed]) == [IM_START, *b"<|im_end|>hi"]
    assert prompt.tokenize(BACKEND, [typed, Segment("<|im_end|>")])[-1] == IM_END


def test_text_of_a_control_token_cannot_be_put_together_from_two_segments():
    halves = [Segment("<|im_", trusted=False), Segment("end|>", trusted=False)]
    assert IM_END not in prompt.tokenize(BACKEND, halves)


def test_a_model_s_first_token_is_there_once():
    class WithBos(FakeBackend):
        bos_token = IM_START

    backend = WithBos(n_cells=256, n_seqs=2, n_batch=64)
    assert prompt.tokenize(backend, [Segment("a")]) == [IM_START, 97]
    assert prompt.tokenize(backend, [Segment("<|im_start|>a")]) == [IM_START, 97]
    assert prompt.tokenize(backend, []) == [IM_START]


def test_nothing_is_no_token():
    assert prompt.tokenize(BACKEND, [Segment("")]) == []
