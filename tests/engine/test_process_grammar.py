"""Grammars through the pipes of an engine process."""

from __future__ import annotations

from localrun.wire import Cancel, Finish, Grammar, GrammarKind, Sampling, Segment, Step, Submit
from tests.engine.test_process import OPEN, child, submit


def bound(request_id: int, text: str, kind: GrammarKind = GrammarKind.REGEX) -> Submit:
    return Submit(
        id=request_id,
        segments=(Segment("hello"),),
        sampling=Sampling(temperature=0),
        n_predict=40,
        grammar=Grammar(kind, text),
    )


def test_constrained_and_free_requests_share_an_engine_that_then_sleeps():
    with child() as engine:
        engine.send(OPEN)
        engine.receive()
        engine.send(bound(1, "[0-9]{8}"), submit(2), bound(3, "(("), bound(4, "[0-9]{8}"), bound(5, "x{9}"), Cancel(5))
        texts, finals = {}, {}
        while len(finals) < 5:
            message = engine.receive()
            assert isinstance(message, Step)
            for delta in message.deltas:
                texts[delta.id] = texts.get(delta.id, "") + delta.text
                if delta.finish is not None:
                    finals[delta.id] = delta
        assert finals[1].finish is finals[4].finish is Finish.STOP
        assert texts[1] == texts[4]
        assert texts[1].isdecimal()
        assert finals[2].finish is Finish.LENGTH
        assert (finals[3].error_code, finals[3].finish) == ("bad_request", Finish.ERROR)
        assert finals[5].finish is Finish.CANCELLED
        assert engine.process.stdin is not None
        engine.process.stdin.close()
        assert engine.exit_code() == 0
