"""Streaming requests against any OpenAI-compatible server, with the times at which text arrived.

One asyncio process holds all streams, so its own cost is small beside the server's. Times are `time.perf_counter()`.

Does not: start servers, or judge the numbers.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field

import msgspec

from localrun.bench.wire_client import post_stream
from localrun.errors import LocalrunError

_PREFIX = b"data: "
_DONE = b"data: [DONE]"


@dataclass
class StreamRecord:
    """One stream. `arrivals_s` has an entry per piece of text; `n_output` is the server's own count of tokens."""

    sent_at_s: float
    arrivals_s: list[float] = field(default_factory=list)
    n_prompt: int = 0
    n_cached: int = 0
    n_output: int = 0
    problem: str = ""

    @property
    def ttft_s(self) -> float:
        return self.arrivals_s[0] - self.sent_at_s


class _Details(msgspec.Struct):
    cached_tokens: int = 0


class _Usage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int
    prompt_tokens_details: _Details | None = None


class _Choice(msgspec.Struct):
    text: str = ""


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: dict[str, object] | None = None


async def stream_all(base_url: str, model: str, prompts: list[list[int]], n_output: int) -> list[StreamRecord]:
    """Send all prompts (token ids) at once to `/v1/completions` and read every stream to its end.

    Raises LocalrunError when a stream fails.
    """
    return await asyncio.gather(*(_stream(base_url, model, prompt, n_output) for prompt in prompts))


async def _stream(base_url: str, model: str, prompt: list[int], n_output: int) -> StreamRecord:
    body = {
        "model": model,
        "prompt": prompt,
        "max_tokens": n_output,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    record = StreamRecord(time.perf_counter())
    rest = b""

    def take(data: bytes, now_s: float) -> None:
        nonlocal rest
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            if line.startswith(_PREFIX) and not line.startswith(_DONE):
                _take(record, _decoder.decode(line[len(_PREFIX) :]), now_s)

    await post_stream(f"{base_url}/v1/completions", msgspec.json.encode(body), take)
    if record.problem:
        raise LocalrunError(record.problem)
    return record


def _take(record: StreamRecord, chunk: _Chunk, now_s: float) -> None:
    if chunk.error is not None:
        record.problem = str(chunk.error.get("message"))
    if any(choice.text for choice in chunk.choices):
        record.arrivals_s.append(now_s)
    if chunk.usage is not None:
        record.n_prompt, record.n_output = chunk.usage.prompt_tokens, chunk.usage.completion_tokens
        details = chunk.usage.prompt_tokens_details
        record.n_cached = details.cached_tokens if details else 0


_decoder = msgspec.json.Decoder(_Chunk)
