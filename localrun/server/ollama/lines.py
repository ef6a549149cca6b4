"""Ollama's answers: the NDJSON lines of a stream, and the one object that stands for all of them.

Written once per token, so a line is put together from bytes made once per request, the time, and the encoded text. The
same code makes the single answer of `stream: false`, so both have the same fields.

Does not: send, or know where the deltas come from.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from enum import StrEnum
from typing import Any, NamedTuple

import msgspec

from localrun.wire import ChosenLogprob, Usage

_encode = msgspec.json.Encoder().encode

Fields = dict[str, Any]
# {"id": ..., "function": {"index": 0, "name": ..., "arguments": {...}}}
ToolCall = dict[str, Any]


class Kind(StrEnum):
    """Which route's lines: the text of a chat is in `message`, that of generate in `response`."""

    CHAT = "chat"
    GENERATE = "generate"


class Said(NamedTuple):
    """What an answer said, or a part of it."""

    text: str = ""
    thinking: str = ""
    tool_calls: Sequence[ToolCall] = ()


class Lines:
    """One answer's lines. `model` is shown as the client wrote it."""

    def __init__(self, model: str, kind: Kind) -> None:
        self._head = b'{"model":' + _encode(model) + b',"created_at":"'
        is_chat = kind is Kind.CHAT
        self._before_text = b'","message":{"role":"assistant","content":' if is_chat else b'","response":'
        self._after_text = b"}" if is_chat else b""
        self._more = self._after_text + b',"done":false}\n'

    def text(self, text: str, logprobs: Sequence[ChosenLogprob] | None = None) -> bytes:
        """A line with new text."""
        if not logprobs:
            return self._head + rfc3339_now() + self._before_text + _encode(text) + self._more
        return self.part(Said(text), logprobs)

    def part(self, said: Said, logprobs: Sequence[ChosenLogprob] | None = None) -> bytes:
        """A line with new text, thinking or calls."""
        entries = {"logprobs": [logprob_entry(chosen) for chosen in logprobs]} if logprobs else {}
        return self._with_fields(said, entries | {"done": False})

    def end(self, reason: str, fields: Fields, *, said: Said | None = None) -> bytes:
        """The last line, or with `said` the only one."""
        return self._with_fields(said or Said(), {"done": True, "done_reason": reason} | fields)

    def rendered(self, prompt: str) -> bytes:
        """The answer to who only wants to see the prompt."""
        shown = {"rendered_template": prompt, "image_count": 0}
        return self._with_fields(Said(), {"done": False, "_debug_info": shown})

    def _with_fields(self, said: Said, fields: Fields) -> bytes:
        beside: Fields = {}
        if said.thinking:
            beside["thinking"] = said.thinking
        if said.tool_calls:
            beside["tool_calls"] = said.tool_calls
        # Chat has them in the message, generate beside the response: both times right behind the text.
        more = b"," + _encode(beside)[1:-1] if beside else b""
        rest = self._after_text + b"," + _encode(fields)[1:] + b"\n"
        return self._head + rfc3339_now() + self._before_text + _encode(said.text) + more + rest


def metrics(usage: Usage, *, load_s: float, total_s: float) -> dict[str, int]:
    """Counts and integer nanoseconds. All of them are always there, and no duration that clients divide by is 0."""
    return {
        "total_duration": _ns(total_s),
        "load_duration": _ns(load_s),
        "prompt_eval_count": usage.n_prompt,
        "prompt_eval_cached_count": usage.n_cached,
        "prompt_eval_duration": max(1, _ns(usage.prefill_s)),
        "eval_count": usage.n_output,
        "eval_duration": max(1, _ns(usage.decode_s)),
    }


def logprob_entry(chosen: ChosenLogprob) -> dict[str, Any]:
    """One token's entry; `bytes` is there because half a character has no text."""
    return _token_entry(chosen.piece, chosen.logprob) | {
        "top_logprobs": [_token_entry(other.piece, other.logprob) for other in chosen.top]
    }


def rfc3339(moment_ns: int) -> bytes:
    """Nanoseconds since 1970 as UTC text."""
    seconds, rest = divmod(moment_ns, 1_000_000_000)
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(seconds)).encode("ascii") + b".%09dZ" % rest


_second = -1
_second_text = b""


def rfc3339_now() -> bytes:
    """As `rfc3339`, now; the part above the second is made once a second."""
    global _second, _second_text
    seconds, rest = divmod(time.time_ns(), 1_000_000_000)
    if seconds != _second:
        _second_text = rfc3339(seconds * 1_000_000_000)[:19]
        _second = seconds
    return _second_text + b".%09dZ" % rest


def _token_entry(piece: bytes, logprob: float) -> dict[str, Any]:
    return {"token": piece.decode("utf-8", errors="replace"), "logprob": logprob, "bytes": list(piece)}


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)
