"""What the memory that holds a model allows at most: the bound of `bound.py` for a model file and a bandwidth."""

from __future__ import annotations

from pathlib import Path

from localrun.bench.bandwidth import read_bandwidth_bytes_per_s
from localrun.bench.bound import decode_bound_tokens_per_s, step_bytes
from localrun.models.gguf import read_header
from localrun.models.header import Header


class Roofline:
    """`header` is the model's; `bandwidth_bytes_per_s` that of the memory that holds it."""

    def __init__(self, header: Header, bandwidth_bytes_per_s: float) -> None:
        self.bandwidth_bytes_per_s = bandwidth_bytes_per_s
        self.header = header

    def bound_tokens_per_s(self, n_streams: int, context_tokens: float) -> float:
        """Most that `n_streams` streams with so many tokens of context each can get together."""
        read = step_bytes(self.header, n_streams=n_streams)
        return decode_bound_tokens_per_s(read, self.bandwidth_bytes_per_s, [context_tokens] * n_streams)


def roofline(model: Path, n_threads: int, bandwidth_bytes_per_s: float | None = None) -> Roofline:
    """Of a model file. Without a bandwidth, that of this machine's main memory is measured now, with `n_threads`.

    Raises BadModelFile for a file that cannot be read.
    """
    header = read_header(model)
    return Roofline(header, bandwidth_bytes_per_s or read_bandwidth_bytes_per_s(n_threads))
