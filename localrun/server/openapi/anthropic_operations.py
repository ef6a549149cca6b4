"""Anthropic's routes for the document.

Pure data. Does not: serve them.
"""

from __future__ import annotations

from localrun.server.anthropic.body import CountBody, MessagesBody
from localrun.server.openapi import anthropic_answers as answers
from localrun.server.openapi.operation import SSE, Family, Operation, Stream

_FAMILY = Family.ANTHROPIC
_ASK = [{"role": "user", "content": "What is 3 + 4?"}]

OPERATIONS = (
    Operation(
        family=_FAMILY, method="POST", path="/v1/messages", summary="The next message of a conversation",
        body=MessagesBody, answer=answers.AnthropicMessage, serves=True,
        stream=Stream(content_type=SSE, item=answers.AnthropicEvent,
                      description="With `stream`: server-sent events named by their type."),
        example={"model": "tiny", "max_tokens": 64, "messages": _ASK},
    ),
    Operation(
        family=_FAMILY, method="POST", path="/v1/messages/count_tokens", summary="How long a prompt would be",
        body=CountBody, answer=answers.CountedTokens, serves=True,
        description="By the model's own tokenizer and template. Loads the model; generates nothing.",
        example={"model": "tiny", "messages": _ASK},
    ),
)  # fmt: skip
