"""An engine that a test steps itself, without the loop of `pipes.py`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from localrun.engine.backend import never_abort
from localrun.engine.engine import Engine
from localrun.engine.pipes import Inbox
from localrun.wire import Step

NAP_S = 0.005


class SteppedEngine(Engine):
    """Waits a little before a step that has nothing to do, unless something rings: who steps it need not."""

    def __init__(self, *arguments: Any, **more: Any) -> None:
        self._rung: Inbox[Any] = Inbox()
        super().__init__(*arguments, ring=self._rung.ring, **more)

    def step(self, should_abort: Callable[[], bool] = never_abort) -> Step | None:
        if self.wait_s:
            self._rung.drain(self, min(self.wait_s, NAP_S))
        return super().step(should_abort)
