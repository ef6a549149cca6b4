"""What chat and completions both take.

Does not: know the model.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from localrun.server.http import fields
from localrun.server.http.fields import MaxTokens
from localrun.server.openai.answer_format import FormatFields

# Each answer is a job; this many may come of one request, whatever `n` and the number of prompts.
MAX_ANSWERS = 64

Choices = Annotated[int, Meta(ge=1, le=fields.MAX_CHOICES)]


class StreamOptions(msgspec.Struct, frozen=True, kw_only=True):
    """`stream_options`."""

    include_usage: bool | None = None


class CommonFields(FormatFields, frozen=True, kw_only=True):
    """See the module."""

    model: str
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Choices | None = None
    max_tokens: MaxTokens | None = None

    @property
    def n_choices(self) -> int:
        return self.n or 1

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)
