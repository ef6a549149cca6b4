"""What a step says leaves while the next one computes, where a backend computes by itself; and never later."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from localrun import framing, wire
from localrun.engine.engine import Engine, Limits
from localrun.engine.pipes import Inbox, Outbox, run_steps
from localrun.wire import Sampling, Step, Submit
from tests.engine.harness import expected_output
from tests.fakes.backend import FakeBackend

GREEDY = Sampling(temperature=0)


class Overlapping(FakeBackend):
    """Computes by itself. `events` says what happened in which order."""

    overlaps = True

    def __init__(self, **shape: Any) -> None:
        super().__init__(n_cells=512, n_seqs=4, n_batch=64, **shape)
        self.events: list[str] = []
        self.at_decode: Callable[[int], None] = lambda n_decodes: None
        self._n_decodes = 0

    def decode(self, n_rows: int) -> None:
        self._n_decodes += 1
        self.at_decode(self._n_decodes)
        self.events.append("decode")
        super().decode(n_rows)
        self.events.append("computed")


class Noted(Outbox):
    """Says when a step is sent."""

    events: list[str]

    def put(self, message: object) -> None:
        if isinstance(message, Step):
            self.events.append("sent")
        super().put(message)


class Loop:
    def __init__(self, *, overlaps: bool = True) -> None:
        self.backend = Overlapping()
        self.backend.overlaps = overlaps
        ticks = itertools.count()
        self.inbox: Inbox[Engine] = Inbox()
        self.engine = Engine(self.backend, Limits(2, 8, 0.0, 1 << 20), lambda: next(ticks) * 1e-3, ring=self.inbox.ring)
        self._reader, self._writer = os.pipe()
        self._outbox = Noted(self._writer, lambda error: None)
        self._outbox.events = self.backend.events

    def submit(self, request_id: int, n_predict: int) -> None:
        submit = Submit(id=request_id, sampling=GREEDY, n_predict=n_predict, ignore_eos=True)
        self.inbox.put(lambda engine: engine.submit(submit, [*b"hello"]))

    def run(self) -> list[str]:
        run_steps(self.engine, self.inbox, self._outbox, self._leave_when_idle)
        return self.backend.events

    def sent(self) -> Iterator[Step]:
        os.close(self._writer)
        with os.fdopen(self._reader, "rb") as frames:
            while (body := framing.read_body(frames)) is not None:
                step = framing.decode_from_engine(body)
                assert isinstance(step, wire.Step)
                yield step

    def told(self) -> list[int]:
        return [token for step in self.sent() for delta in step.deltas for token in delta.tokens]

    def _leave_when_idle(self, is_idle: bool) -> None:
        if is_idle:
            self.inbox.leave(0)


def test_news_leave_while_the_next_step_computes():
    loop = Loop()
    loop.submit(1, 6)
    events = loop.run()
    # The prompt's step is followed by one that is planned anew, the last one by nothing.
    assert events[:4] == ["decode", "computed", "sent", "decode"]
    held = events[3:]
    assert held.count("sent") == held.count("decode")
    assert ["decode", "sent", "computed"] in [held[at : at + 3] for at in range(len(held))]
    assert events[-1] == "sent"
    assert [token for step in loop.sent() for delta in step.deltas for token in delta.tokens] == expected_output(
        [*b"hello"], 6
    )


def test_where_it_does_not_overlap_every_step_is_sent_at_once():
    loop = Loop(overlaps=False)
    loop.submit(1, 6)
    events = loop.run()
    assert all(events[at + 1 : at + 3] == ["computed", "sent"] for at, event in enumerate(events) if event == "decode")
    assert [token for step in loop.sent() for delta in step.deltas for token in delta.tokens] == expected_output(
        [*b"hello"], 6
    )


@pytest.mark.parametrize("what", ["submit", "cancel"])
def test_news_do_not_wait_for_whoever_comes_or_goes(what: str):
    """With work in the inbox, which may take long, they leave before it."""
    loop = Loop()
    loop.submit(1, 12)
    events = loop.backend.events

    def come(n_decodes: int) -> None:
        if n_decodes == 5:
            loop.inbox.put(lambda engine: events.append("work"))
            if what == "cancel":
                loop.inbox.put(lambda engine: engine.cancel(1))
            else:
                loop.submit(2, 3)

    loop.backend.at_decode = come
    loop.run()
    at = events.index("work")
    assert events[:at].count("sent") == events[:at].count("computed"), "everything was said before"
    finals = [delta.id for step in loop.sent() for delta in step.deltas if delta.finish is not None]
    assert sorted(finals) == ([1] if what == "cancel" else [1, 2])
