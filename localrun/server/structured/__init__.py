"""Grammars that an answer must match: from a client's JSON schema or GBNF, or from callable tools.

What is refused here names the field, the keyword and its path, before the engine sees anything. The engine compiles
the rest, and refuses what it cannot in the same way.

Owner: the daemon's event loop; pure. Does not: compile a grammar (the engine does), or parse an answer.
See README.md for the features of JSON schema.
"""

from localrun.server.structured.grammars import (
    ArgumentShape,
    CallShape,
    calls,
    check_size,
    gbnf,
    json_object,
    json_schema,
)

__all__ = ["ArgumentShape", "CallShape", "calls", "check_size", "gbnf", "json_object", "json_schema"]
