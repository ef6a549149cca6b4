"""What the grammar library cannot do with a JSON schema, where in it, and the schema without that.

Only compiling shows it, so the daemon has not seen it. What no answer could match is no such thing: it is refused.

Owner: the grammar worker.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple
from urllib.parse import unquote

from llguidance import LLMatcher, LLTokenizer

from localrun.engine.sample.grammar_library import problem_of
from localrun.errors import BadRequest
from localrun.wire import STRICT_COMMENT

# What of a schema is left out for what the library says of it.
_LEFT_OUT = (
    ("lookarounds not supported", ("pattern",)),
    ("are not disjoint", ("patternProperties", "additionalProperties")),
    ("are too much together", ("minLength", "maxLength")),
    ("Unable to determine if regex is empty", ("minLength", "maxLength", "allOf")),
    ("min/maxProperties only supported", ("minProperties", "maxProperties")),
    ("Schema intersection stack level exceeded", ("allOf",)),
)
_MAX_LEFT_OUT = 20
# A group that is counted in a schema with lengths: together they may be more than an answer has time for.
LENGTH_BESIDE_COUNTS = re.compile(r"\)\{\d.*Length\"|Length\".*\)\{\d")
_N_TRIED = 12


def weakened(text: str, notices: list[str], whose: str = "") -> str:
    """A JSON schema without what the library can do nothing with, which goes into `notices`; other faults stay. Raises
    BadRequest for one that is strict."""
    schema = json.loads(text)
    if schema.get("$comment") == STRICT_COMMENT:
        if (found := fault(schema, "schema") or _slow(schema)) is not None:
            raise BadRequest(f"{whose or 'the JSON schema cannot be used: '}{found.shown}")
        return text
    for _ in range(_MAX_LEFT_OUT):
        found = fault(schema, "schema") or _slow(schema)
        words = () if found is None else next((words for says, words in _LEFT_OUT if says in found.problem), ())
        if found is None or not found.schema.keys() & words:
            break
        for word in found.schema.keys() & words:
            del found.schema[word]
            notices.append(f"{whose}{found.path}.{word}: left out, since {found.problem}")
    return json.dumps(schema)


def _slow(root: dict[str, Any]) -> SchemaFault | None:
    """A pattern whose text the library cannot follow beside its length."""
    waiting, seen = [("schema", root)], {id(root)}
    for path, node in waiting:
        inner = [(f"{path}.{name}", each) for name, each in _inner(node, root) if id(each) not in seen]
        waiting += inner
        seen |= {id(each) for _, each in inner}
        words = {word: node[word] for word in ("pattern", "minLength", "maxLength") if word in node}
        if len(words) > 1 and LENGTH_BESIDE_COUNTS.search(json.dumps(words)):
            text = LLMatcher.grammar_from_json_schema(json.dumps({"type": "string", **words}))
            matcher = LLMatcher(LLTokenizer("byte"), text, log_level=0)
            for wanted in (b'"', *[b"a0A"] * _N_TRIED):
                matcher.compute_bitmask()
                if not any(matcher.try_consume_tokens([byte]) for byte in wanted):
                    break
            if "too many expressions" in matcher.get_error():
                return SchemaFault(node, path, "the pattern and the length are too much together")
    return None


# What the library says of a schema that holds the faulty one.
_IN_REFERENCE = "while processing json-schema:"
_UNSATISFIABLE = "Unsatisfiable schema"


class SchemaFault(NamedTuple):
    """Why a schema does not compile: its innermost part that is to blame, and where that is."""

    schema: dict[str, Any]
    path: str
    problem: str

    @property
    def shown(self) -> str:
        return f"{self.path}: {self.problem}"


def fault(root: dict[str, Any], path: str) -> SchemaFault | None:
    """None for a schema that compiles."""
    shared: dict[str, Any] = {key: root[key] for key in ("x-guidance", "$defs", "definitions") if key in root}
    problem, way = _problem_of_schema(root), [root]
    while problem:
        for name, inner in _inner(way[-1], root):
            is_passed = any(inner is each for each in way)
            found = "" if is_passed else _problem_of_schema({**inner, **shared})
            if found == problem or (found.startswith(_UNSATISFIABLE) and problem.startswith(_UNSATISFIABLE)):
                path, problem = f"{path}.{name}", found
                way.append(inner)
                break
        else:
            return SchemaFault(way[-1], path, problem)
    return None


def _problem_of_schema(schema: dict[str, Any]) -> str:
    error = LLMatcher.validate_grammar(LLMatcher.grammar_from_json_schema(json.dumps(schema)))
    return " ".join(problem_of(error.partition(_IN_REFERENCE)[0]).split())


def _target(root: Any, ref: str) -> Any:
    """What a reference leads to, which the daemon has checked."""
    for part in filter(None, ref[1:].split("/")):
        name = unquote(part).replace("~1", "/").replace("~0", "~")
        root = root[int(name)] if isinstance(root, list) else root[name]
    return root


def _inner(schema: dict[str, Any], root: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """The schemas right below one, or that it refers to, and their paths."""
    for keyword, value in schema.items():
        found: Iterable[tuple[str, Any]] = ()
        if keyword in ("properties", "patternProperties"):
            found = ((f"{keyword}.{name}", inner) for name, inner in value.items())
        elif keyword in ("anyOf", "oneOf", "allOf", "prefixItems"):
            found = ((f"{keyword}[{index}]", inner) for index, inner in enumerate(value))
        elif keyword in ("items", "additionalProperties"):
            found = ((keyword, value),)
        elif keyword == "$ref":
            found = ((value, _target(root, value)),)
        yield from ((path, inner) for path, inner in found if isinstance(inner, dict))
