"""What a message must say, whatever its words: names, numbers, commands."""

from __future__ import annotations

import re


def says(message: object, *parts: object) -> bool:
    """Whether a message has these parts, in this order."""
    return re.search(".*".join(re.escape(str(part)) for part in parts), str(message), re.DOTALL) is not None
