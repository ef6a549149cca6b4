"""A child process that speaks the engine's protocol and says that it drafted. Run by tests only.

It answers with what it was asked about drafts. At a prompt with the word "die" it ends in the middle of the answer,
unless it goes on with it for another engine.
"""

from __future__ import annotations

import os
import signal
import sys
import time

from localrun import framing, wire
from localrun.wire import DraftSource

READY = wire.Ready(
    n_ctx=4096, n_ctx_train=4096, n_vocab=258, n_slots=2, n_kv_cells=8192, n_threads=1, n_gpu_layers=0,
    model_size_bytes=0, kv_size_bytes=0, load_s=0.0, backend="scripted",
)  # fmt: skip
# In the middle of an answer, and at its end.
HALF = (wire.DraftCounts(DraftSource.LOOKUP, 1, 4, 3, 0.25),)
WHOLE = (wire.DraftCounts(DraftSource.LOOKUP, 2, 6, 4, 0.5), wire.DraftCounts(DraftSource.PREDICTION, 1, 4, 3, 0.125))
SPEEDUP = 2.25


def _send(deltas: list[wire.Delta], n_ended: int, begun: tuple[wire.DraftCounts, ...] = ()) -> None:
    """`n_ended` requests have ended on this engine, and one has `begun`."""
    totals: dict[DraftSource, wire.DraftCounts] = {}
    for one in (*(WHOLE * n_ended), *begun):
        last = totals.get(one.source, wire.DraftCounts(one.source, 0, 0, 0))
        totals[one.source] = wire.DraftCounts(
            one.source, last.n_drafts + one.n_drafts, last.n_drafted + one.n_drafted,
            last.n_accepted + one.n_accepted, last.seconds + one.seconds,
        )  # fmt: skip
    stats = wire.StepStats(*[0] * 15, n_draft_rows=4, drafts=tuple(totals.values()))
    started = [wire.Started(delta.id, 0, 10, 0, time.monotonic()) for delta in deltas if delta.finish is None]
    step = wire.Step(sent_at_s=time.monotonic(), deltas=deltas, stats=stats, started=started)
    sys.stdout.buffer.write(framing.encode(step))
    sys.stdout.buffer.flush()


def _answer(asked: wire.Submit, n_ended: int) -> None:
    if asked.resume is None:
        says = f"speculates {asked.speculates}, prediction {asked.prediction!r}"
        half = wire.Delta(
            asked.id, wire.Phase.DECODE, 10, 5, text=says, tokens=[65] * 5, n_drafted=4, n_accepted=3
        )  # fmt: skip
        _send([half], n_ended, HALF)
        if any("die" in segment.text for segment in asked.segments):
            os.kill(os.getpid(), signal.SIGKILL)
    usage = wire.Usage(10, 0, 10, 0.0, 0.1, 0.1, drafts=WHOLE, speedup=SPEEDUP)
    end = wire.Delta(asked.id, wire.Phase.DONE, 10, 10, tokens=[65] * 5, finish=wire.Finish.STOP, usage=usage)
    _send([end], n_ended + 1)


def main() -> None:
    assert isinstance(framing.decode_to_engine(framing.read_body(sys.stdin.buffer) or b""), wire.Open)
    sys.stdout.buffer.write(framing.encode(READY))
    sys.stdout.buffer.flush()
    n_ended = 0
    while (body := framing.read_body(sys.stdin.buffer)) is not None:
        message = framing.decode_to_engine(body)
        if isinstance(message, wire.Submit):
            _answer(message, n_ended)
            n_ended += 1
        elif isinstance(message, wire.Count):
            sys.stdout.buffer.write(framing.encode(wire.Counted(id=message.id, tokens=(1,) * 10)))
            sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
