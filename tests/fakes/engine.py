"""An engine for tests that ends its own process at a planned token, as a crash or a kill would.

The file that LOCALRUN_FAKE_DEATHS names holds a plan, one death a line: `SIGSEGV before 3`, `SIGKILL after 0 poison`.
The process sends itself the signal right before, or right after, it says that a request has so many tokens of its
answer; with a word, only of a request whose prompt holds that word. After 0 is when it has got its slot, or with its
first token where that comes at once. A death takes its line off the file, so a plan says how often engines die,
whichever process it is. Without the file nothing happens.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import ClassVar

from localrun.engine.backend import never_abort
from localrun.engine.engine import Engine
from localrun.engine.sample.text import MediaSpan
from localrun.wire import Step, Submit


class FakeEngine(Engine):
    """See the module."""

    _deaths = Path(os.environ.get("LOCALRUN_FAKE_DEATHS", ""))
    _prompts: ClassVar[dict[int, bytes]] = {}
    _is_last_moment = False

    def submit(
        self, submit: Submit, tokens: list[int], prediction: Sequence[int] = (), chunks: tuple[MediaSpan, ...] = ()
    ) -> None:
        self._prompts[submit.id] = bytes(token for token in tokens if 0 <= token < 256)
        super().submit(submit, tokens, prediction, chunks)

    def step(self, should_abort: Callable[[], bool] = never_abort) -> Step | None:
        step = super().step(should_abort)
        if step is not None and self._deaths.is_file():
            self._is_last_moment = self._is_planned(step, "after")
            if self._is_planned(step, "before"):
                self._die()
        return step

    @property
    def is_idle(self) -> bool:
        if self._is_last_moment:  # asked right after the step was sent
            self._die()
        return super().is_idle

    def _is_planned(self, step: Step, when: str) -> bool:
        return any(
            self._is_near(line, step, when) for line in self._deaths.read_text(encoding="utf-8").splitlines()[:1]
        )

    def _is_near(self, line: str, step: Step, when: str) -> bool:
        _, planned_when, n_tokens, *words = line.split()
        started = {started.id: 0 for started in step.started}
        n_output = started | {delta.id: delta.n_output for delta in step.deltas}
        return planned_when == when and any(
            n >= int(n_tokens) and all(word.encode() in self._prompts.get(request_id, b"") for word in words)
            for request_id, n in n_output.items()
        )

    def _die(self) -> None:
        line, *others = self._deaths.read_text(encoding="utf-8").splitlines()
        self._deaths.write_text("".join(f"{other}\n" for other in others), encoding="utf-8")
        os.kill(os.getpid(), getattr(signal, line.split()[0]))
        signal.pause()
