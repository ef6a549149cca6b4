"""The response object: what was asked, what came of it, and what it took.

Pure. Does not: build the output items (`output.py`).
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import msgspec

from localrun.errors import LocalrunError, QueueFull
from localrun.server.openai.chunks import Fields
from localrun.server.openai.responses.body import ResponsesBody
from localrun.wire import Finish, Sampling, Usage


def begun(response_id: str, body: ResponsesBody, sampling: Sampling) -> Fields:
    """The object of a response that runs. `sampling` is what came of the request and of the model's parameters."""
    return {
        "id": response_id,
        "object": "response",
        "created_at": int(time.time()),
        "status": "in_progress",
        "background": False,
        "error": None,
        "incomplete_details": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "metadata": body.metadata or {},
        "model": body.model,
        "output": [],
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "reasoning": {
            "effort": body.effort,
            "summary": (body.reasoning.summary or body.reasoning.generate_summary) if body.reasoning else None,
        },
        "service_tier": "default",
        "store": body.is_kept,
        "temperature": sampling.temperature,
        "text": {"format": _format(body)},
        "tool_choice": "auto" if body.tool_choice is None else _without_none(body.tool_choice),
        "tools": [tool | {"strict": tool.get("strict") or False} for tool in body.offered_tools],
        "top_logprobs": body.top_logprobs or 0,
        "top_p": sampling.top_p,
        "truncation": "disabled",
        "usage": None,
    }


def ended(response: Fields, output: Sequence[Fields], finish: Finish, usage: Usage, n_thinking: int) -> Fields:
    """The object of a response that has ended, with all it said."""
    is_cut = finish is Finish.LENGTH
    return response | {
        "status": "incomplete" if is_cut else "completed",
        "completed_at": None if is_cut else int(time.time()),
        "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
        "output": list(output),
        "usage": _usage(usage, n_thinking),
    }


def failed(response: Fields, output: Sequence[Fields], error: LocalrunError) -> Fields:
    """The object of a response that broke off."""
    code = "rate_limit_exceeded" if isinstance(error, QueueFull) else "server_error"
    return response | {
        "status": "failed",
        "output": list(output),
        "error": {"code": code, "message": error.message, "type": error.code, "param": error.field},
    }


def _usage(usage: Usage, n_thinking: int) -> Fields:
    return {
        "input_tokens": usage.n_prompt,
        # What was computed is kept as a prefix for the next request.
        "input_tokens_details": {
            "cached_tokens": usage.n_cached,
            "cache_write_tokens": usage.n_prompt - usage.n_cached,
        },
        "output_tokens": usage.n_output,
        "output_tokens_details": {"reasoning_tokens": n_thinking},
        "total_tokens": usage.n_prompt + usage.n_output,
    }


def _format(body: ResponsesBody) -> Fields:
    asked = body.text.format if body.text is not None else None
    return {"type": "text"} if asked is None else _without_none(asked)


def _without_none(asked: object) -> Fields:
    """A struct of the body, as the client wrote it."""
    fields: Fields = msgspec.to_builtins(asked)
    return {name: value for name, value in fields.items() if value is not None} if isinstance(fields, dict) else fields
