"""From messages to prompt segments, by the model's own chat template.

Runs in the daemon's event loop; the template itself runs in its worker process.

Does not: tokenize (the engine does), or shorten (`truncation.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

from localrun.models.header import Header
from localrun.models.token_text import special_token_text
from localrun.server.jobs.job import Job
from localrun.server.runtime import Runtime
from localrun.server.templates.renderer import fallback_template
from localrun.wire import Segment

# {"role": "system" | "user" | "assistant" | "tool", "content": str}
Message = dict[str, Any]


async def render(runtime: Runtime, job: Job, messages: Sequence[Message]) -> tuple[Segment, ...]:
    """The prompt that asks the model for the next message. Raises BadTemplate, and BadRequest when the template refuses
    the order or the roles of the messages."""
    header = job.model.header
    bos_token, eos_token = _special_tokens(header)
    variables = {
        "messages": list(messages),
        "add_generation_prompt": True,
        "bos_token": bos_token,
        "eos_token": eos_token,
        "tools": None,
    }
    template = header.chat_template or fallback_template(header.architecture)
    return await runtime.renderer.render(template, variables, job.control_tokens)


# A header lives as long as the store remembers its file; finding its tokens is a walk through the vocabulary.
_known: WeakKeyDictionary[Header, tuple[str, str]] = WeakKeyDictionary()


def _special_tokens(header: Header) -> tuple[str, str]:
    tokens = _known.get(header)
    if tokens is None:
        tokens = (
            special_token_text(header, "tokenizer.ggml.bos_token_id"),
            special_token_text(header, "tokenizer.ggml.eos_token_id"),
        )
        _known[header] = tokens
    return tokens
