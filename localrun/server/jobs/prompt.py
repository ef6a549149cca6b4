"""From messages to prompt segments, by the model's own chat template.

Runs in the daemon's event loop; the template itself runs in its worker process.

Does not: tokenize (the engine does), shorten (`truncation.py`), or change messages to suit a template (`replies`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

from localrun.models.header import Header, special_token_text
from localrun.server.jobs.job import Job
from localrun.server.runtime import Runtime
from localrun.server.templates.fallback import fallback_template
from localrun.wire import Segment

# {"role": "system" | "user" | "assistant" | "tool", "content": str}, and more for tool calls (`replies/messages.py`)
Message = dict[str, Any]


def template_of(job: Job) -> str:
    """The model's chat template: its manifest's, else its file's, else the one of its family."""
    header = job.model.header
    return job.model.template or fallback_template(header.architecture, job.control_tokens)


async def render(
    runtime: Runtime,
    job: Job,
    messages: Sequence[Message],
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    variables: Mapping[str, Any] | None = None,
    template: str | None = None,
) -> tuple[Segment, ...]:
    """The prompt that asks the model for the next message. `variables` are the template's besides; `template` is one to
    use instead of the model's own.

    Raises BadTemplate, and BadRequest when the template refuses the order or the roles of the messages.
    """
    bos_token, eos_token = _special_tokens(job.model.header)
    given = {
        **(variables or {}),
        "messages": list(messages),
        "add_generation_prompt": True,
        "bos_token": bos_token,
        "eos_token": eos_token,
        "tools": None if tools is None else list(tools),
    }
    return await runtime.renderer.render(template or template_of(job), given, job.control_tokens)


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
