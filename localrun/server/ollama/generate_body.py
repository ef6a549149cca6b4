"""The body of POST /api/generate.

Does not: know the model, or make the prompt.
"""

from __future__ import annotations

from typing import Any

from localrun.errors import BadRequest
from localrun.models.creation import refuse_go
from localrun.server.http import fields
from localrun.server.ollama.bodies import PromptFields, refuse_images
from localrun.server.prompting.ask import ChatAsk, Message


class GenerateBody(PromptFields, frozen=True, kw_only=True):
    """See the module. `raw` and `suffix` make prompts that no chat template is in."""

    prompt: str | None = None
    suffix: str | None = None
    system: str | None = None
    template: str | None = None
    context: list[fields.TokenId] | None = None
    raw: bool | None = None
    images: list[Any] | None = None

    @property
    def is_plain(self) -> bool:
        """Whether the prompt goes to the model without a chat template."""
        return bool(self.raw or self.suffix)

    def check_supported(self) -> None:
        """Raises BadRequest for what cannot be done, and for fields that contradict each other."""
        refuse_images(self.images, "images", self.model)
        if self.template:
            refuse_go(self.template)
        if self.is_plain:
            kind = "suffix" if self.suffix else "raw"
            for name in ("template", "system", "context"):
                if getattr(self, name):
                    raise BadRequest(f"{name}: not together with {kind}, which uses no template; leave it out",
                                     field=name)  # fmt: skip
            if self.think:
                raise BadRequest(f"think: not together with {kind}, which uses no template; leave it out",
                                 field="think")  # fmt: skip

    def ask(self) -> ChatAsk:
        """The prompt as a conversation of one message, after `system`. Raises BadRequest."""
        messages: list[Message] = [{"role": "system", "content": self.system}] if self.system else []
        messages.append({"role": "user", "content": self.prompt or ""})
        return ChatAsk(
            messages=messages,
            response_grammar=self.answer_grammar(),
            think=self.thinking(),
            template=self.template or None,
        )
