"""Replies as the models of each format write them, and what they mean.

Neighbouring pieces of one kind are one here; calls are (name, arguments).
"""

from __future__ import annotations

from tests.server.replies.golden_case import SCHEMAS, THINK, Golden
from tests.server.replies.golden_marks import MARKED
from tests.server.replies.golden_tags import TAGGED

__all__ = ["GOLDEN", "SCHEMAS", "THINK", "Golden"]

GOLDEN: tuple[Golden, ...] = TAGGED + MARKED
