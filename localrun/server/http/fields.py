"""Types of request fields that several APIs share: what a number may be, in one place.

The bounds keep values inside what the engine's samplers are defined for; they are wider than any useful setting. A
field that clients send as null when it is unset is `| None` in the body that uses it.

Does not: hold defaults (each API has its own).
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

MAX_STOPS = 16
MAX_LOGIT_BIASES = 1024
MAX_CHOICES = 16
MAX_TOP_LOGPROBS = 20
# Above any context length; what is larger than the context is cut to it, so no loop or allocation follows this number.
MAX_TOKENS = 2**31 - 1

Temperature = Annotated[float, Meta(ge=0.0, le=100.0)]
Probability = Annotated[float, Meta(ge=0.0, le=1.0)]
TypicalP = Annotated[float, Meta(gt=0.0, le=1.0)]
RepeatPenalty = Annotated[float, Meta(gt=0.0, le=100.0)]
AdditivePenalty = Annotated[float, Meta(ge=-100.0, le=100.0)]
MirostatTau = Annotated[float, Meta(ge=0.0, le=100.0)]

# -1 stands for off (top_k), for the whole context (last_n), and for a random one (seed).
TopK = Annotated[int, Meta(ge=-1, le=MAX_TOKENS)]
LastN = Annotated[int, Meta(ge=-1, le=MAX_TOKENS)]
Seed = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
MirostatVersion = Annotated[int, Meta(ge=0, le=2)]

StopString = Annotated[str, Meta(max_length=1024)]
Stop = StopString | Annotated[list[StopString], Meta(max_length=MAX_STOPS)]
Bias = Annotated[float, Meta(ge=-100.0, le=100.0)]
TopLogprobs = Annotated[int, Meta(ge=0, le=MAX_TOP_LOGPROBS)]
TokenId = Annotated[int, Meta(ge=0, le=MAX_TOKENS)]


class ServiceFields(msgspec.Struct, frozen=True, kw_only=True):
    """How a request wants to be served: localrun's own fields, at the top level of every API's body. `caller.py` reads
    them, beside the headers that say the same."""

    lane: str | None = None
    latency: str | float | None = None
    deadline_s: float | None = None


def stop_strings(stop: str | list[str] | None) -> tuple[str, ...]:
    """The stop strings of a request; an empty one would match everywhere and is left out."""
    if stop is None:
        return ()
    return tuple(text for text in ([stop] if isinstance(stop, str) else stop) if text)


def seed_or_random(seed: int | None) -> int | None:
    """None, a seed drawn by the engine, for both spellings of random."""
    return None if seed == -1 else seed
