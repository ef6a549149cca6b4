"""What a streamed answer is made of: lines of bytes, and the pieces that they carry. Used by `client.py` alone.

Pure. Does not: know about connections.
"""

from __future__ import annotations

from typing import Any

import msgspec

from localrun import errors

MAX_LINE_BYTES = 64 * 1024 * 1024


class ChatMetrics(msgspec.Struct, frozen=True, kw_only=True):
    """Counts and times of one answer, as the daemon measured them. `prompt_tokens` includes `cached_tokens`."""

    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    load_s: float
    prefill_s: float
    decode_s: float
    total_s: float


class ChatPiece(msgspec.Struct, kw_only=True):
    """A part of an answer. The last one has `done` true and the metrics. `request_id` is what `Client.cancel` takes.
    `thinking` is what the model thought before it answered, `tool_calls` what it wants called, as `/api/chat` has them.
    `was_prompt_cut`, in the last one, says that the prompt was too long and lost a part of itself."""

    text: str = ""
    thinking: str = ""
    tool_calls: list[dict[str, Any]] = []
    done: bool = False
    request_id: str | None = None
    done_reason: str | None = None
    metrics: ChatMetrics | None = None
    was_prompt_cut: bool = False


class _Message(msgspec.Struct):
    content: str = ""
    thinking: str | None = None
    tool_calls: list[dict[str, Any]] | None = None


class _Line(msgspec.Struct):
    """One line of an `/api/chat` or `/api/generate` stream. Durations are nanoseconds."""

    message: _Message | None = None
    response: str = ""
    thinking: str | None = None
    done: bool = False
    done_reason: str | None = None
    error: str | None = None
    code: str | None = None
    prompt_eval_count: int = 0
    prompt_eval_cached_count: int = 0
    eval_count: int = 0
    load_duration: int = 0
    prompt_eval_duration: int = 0
    eval_duration: int = 0
    total_duration: int = 0


def piece_of(line: bytes, request_id: str | None, *, was_cut: bool = False) -> ChatPiece:
    """The piece that a line carries. Raises the error that the daemon reports in it, and msgspec.DecodeError."""
    parsed = _line.decode(line)
    if parsed.error is not None:
        raise errors.by_code(parsed.code or errors.EngineFailed.code, parsed.error)
    said = parsed.message or _Message(parsed.response, parsed.thinking)
    text, thinking, tool_calls = said.content, said.thinking or "", said.tool_calls or []
    if not parsed.done:
        return ChatPiece(text=text, thinking=thinking, tool_calls=tool_calls, request_id=request_id)
    metrics = ChatMetrics(
        prompt_tokens=parsed.prompt_eval_count,
        cached_tokens=parsed.prompt_eval_cached_count,
        output_tokens=parsed.eval_count,
        load_s=parsed.load_duration / 1e9,
        prefill_s=parsed.prompt_eval_duration / 1e9,
        decode_s=parsed.eval_duration / 1e9,
        total_s=parsed.total_duration / 1e9,
    )
    return ChatPiece(
        text=text,
        thinking=thinking,
        tool_calls=tool_calls,
        done=True,
        request_id=request_id,
        done_reason=parsed.done_reason,
        metrics=metrics,
        was_prompt_cut=was_cut,
    )


class PullPiece(msgspec.Struct, kw_only=True):
    """A line of a pull: a new status, or how far one file is. `digest` may be empty where the source has none."""

    status: str = ""
    digest: str = ""
    total: int = 0
    completed: int = 0
    error: str | None = None
    code: str | None = None


def pull_piece_of(line: bytes) -> PullPiece:
    """The piece that a line carries. Raises the error that the daemon reports in it, and msgspec.DecodeError."""
    piece = _pull_line.decode(line)
    if piece.error is not None:
        raise errors.by_code(piece.code or errors.DownloadFailed.code, piece.error)
    return piece


class LineBuffer:
    """Cuts a stream of bytes into lines at line feeds alone: JSON text may contain every other character that Unicode
    calls a line end. A last line without its line feed was broken off and is never given out."""

    def __init__(self) -> None:
        self._pending = bytearray()

    def feed(self, chunk: bytes) -> list[bytes]:
        """The lines that `chunk` completes, without empty ones. Raises DaemonUnreachable beyond `MAX_LINE_BYTES`."""
        self._pending += chunk
        if b"\n" in chunk:
            *lines, self._pending = self._pending.split(b"\n")
            return [bytes(line) for line in lines if line]
        if len(self._pending) > MAX_LINE_BYTES:
            raise errors.DaemonUnreachable(f"the daemon sent a line of more than {MAX_LINE_BYTES} bytes")
        return []


_line = msgspec.json.Decoder(_Line)
_pull_line = msgspec.json.Decoder(PullPiece)
