"""What a conversation with a model begins with, where its manifest says so: a system prompt, and first messages.

Pure. Does not: read manifests (the store does).
"""

from __future__ import annotations

from collections.abc import Sequence

from localrun.models.store import Model
from localrun.server.jobs.prompt import Message


def begun(model: Model, messages: Sequence[Message]) -> list[Message]:
    """The conversation with the model's own messages before it. The model's system prompt counts where the
    conversation does not begin with one, as with Ollama."""
    # One that the client brings stays the first message: templates refuse it anywhere else.
    head = list(messages[:1]) if messages and messages[0]["role"] == "system" else []
    rest = messages[len(head) :]
    if not head and model.system:
        head = [{"role": "system", "content": model.system}]
    return [*head, *({"role": message.role, "content": message.content} for message in model.messages), *rest]
