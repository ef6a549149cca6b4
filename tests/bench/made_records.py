"""Records as tests write them."""

from __future__ import annotations

from localrun.bench.results import StreamRecord


def made_record(*arrivals_s: float, sent_s: float = 0.0, n_output: int | None = None, **fields: object) -> StreamRecord:
    """A request that was sent at `sent_s`, with a token in every piece unless `n_output` says otherwise."""
    return StreamRecord(
        intended_at_s=sent_s, sent_at_s=sent_s, arrivals_s=list(arrivals_s),
        n_output=len(arrivals_s) if n_output is None else n_output, **fields,  # type: ignore[arg-type]
    )  # fmt: skip
