"""The bandwidth limit: how long a reader of n bytes has to wait so that all readers together keep to a rate. Pure."""

from __future__ import annotations


class RateLimit:
    """Shared by all connections of a fetch. Time is given by the caller, in seconds of any one clock.

    Bytes are paid for after they came, so the first are not held up; idle time is not saved up for a burst.
    """

    def __init__(self, rate_bytes_per_s: int) -> None:
        if rate_bytes_per_s < 1:
            raise ValueError("the rate must be at least 1 byte per second")
        self._rate_bytes_per_s = rate_bytes_per_s
        self._paid_until_s = float("-inf")

    def pay(self, n_bytes: int, now_s: float) -> float:
        """The seconds to wait before reading on, `n_bytes` having been read."""
        self._paid_until_s = max(self._paid_until_s, now_s) + n_bytes / self._rate_bytes_per_s
        return self._paid_until_s - now_s
