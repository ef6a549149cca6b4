"""Virtual time, and where it went. Nothing here, and nothing that is simulated, asks for the real one."""

from __future__ import annotations

import math
from enum import StrEnum


class Account(StrEnum):
    """What time is spent on."""

    PROMPTS = "computing prompts"
    DECODE = "decoding"
    COPIES = "copying state"
    HOST = "scheduling and sampling"
    DAEMON = "answering clients"
    IDLE = "idle"


class VirtualClock:
    """The engine's clock. `spent_s` adds up to the time that has passed."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.spent_s = dict.fromkeys(Account, 0.0)

    def __call__(self) -> float:
        return self.now_s

    def spend(self, seconds: float, account: Account) -> None:
        """Let time pass: late in a long run a moment that is too short to be added is the shortest that can be."""
        before_s = self.now_s
        self.now_s += seconds
        if self.now_s == before_s and seconds > 0:
            self.now_s = math.nextafter(before_s, math.inf)
        self.spent_s[account] += seconds

    def sleep_until(self, at_s: float, account: Account) -> None:
        """Let time pass until then, none if that is over."""
        if at_s > self.now_s:
            self.spent_s[account] += at_s - self.now_s
            self.now_s = at_s
