"""How many threads engines use here: what limits them, and what was measured. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from localrun.doctor.finding import Finding, ok, warn
from localrun.processors import Processors
from localrun.thread_choice import Kept

MAX_MODELS = 3


def check_threads(processors: Processors, kept: Iterable[Kept], *, wanted: int) -> Finding:
    """`wanted` is the setting `threads`, and `kept` all that was measured, here and under other limits."""
    most, usual = processors.most_threads, processors.usual_threads
    what = ", ".join(filter(None, (processors.kinds, processors.limit)))
    if wanted > most:
        return warn(
            "threads", f"`threads` is {wanted}, but only {most} can run at once ({what}): each step waits for the rest",
            "unset it (LOCALRUN_THREADS, or `threads` in localrun.toml), or give this process more processors",
        )  # fmt: skip
    if wanted:
        return ok("threads", f"{wanted}, because `threads` is set ({what})")
    text = f"{usual} ({what})"
    here = [each for each in kept if each.processors == processors.identity]
    if here:
        newest = sorted(here, key=lambda each: each.at_s)[-MAX_MODELS:]
        found = "; ".join(
            f"{each.model} {each.threads.decode} for streams and {each.threads.prompt} for prompts" for each in newest
        )
        return ok("threads", f"{text}; measured: {found}")
    others = sorted({each.n_threads for each in processors.candidates()} - {usual})
    if others:
        shown = ", ".join(map(str, others))
        return ok("threads", f"{text}; an engine also tries {shown} when it is idle after its first load")
    return ok("threads", text)
