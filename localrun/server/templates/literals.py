"""A pattern for the longest of many literal texts at a place.

Built as a tree of common prefixes: with a plain alternation a text of "<<<<" would try thousands of control tokens at
every character.

Pure. Does not: remember patterns; compiling one for a thousand texts takes nearly 0.1 s.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

# Characters and what follows them; "" where a text ends.
Tree = dict[str, Any]


def tree(texts: Iterable[str]) -> Tree:
    """The common prefixes of `texts`, which are not empty."""
    root: Tree = {}
    for text in texts:
        node = root
        for character in text:
            node = node.setdefault(character, {})
        node[""] = {}
    return root


def alternatives(node: Tree) -> str:
    """A regular expression for the longest text of the tree."""
    branches = []
    for character, child in node.items():
        if not character:
            continue
        literal = character
        while len(child) == 1 and "" not in child:
            ((following, child),) = child.items()
            literal += following
        branches.append(re.escape(literal) + alternatives(child))
    if not branches:
        return ""
    body = branches[0] if len(branches) == 1 and "" not in node else f"(?:{'|'.join(branches)})"
    return body + "?" if "" in node else body
