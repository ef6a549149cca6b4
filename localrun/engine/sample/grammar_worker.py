"""The grammar worker: `python -m localrun.engine.sample.grammar_worker`, a process that looks at grammars first.

A grammar comes from a client and is a program for a compiler that follows references and brackets by recursion and
builds automata: some overflow its stack, some take minutes or all memory. What is compiled in an engine would take its
streams along, so each grammar is compiled here before, for a vocabulary of single bytes, under limits of memory and
processor time and with half the stack that the engine's threads have (`grammar_checker.py`). What passes is sent back
as the engine is to compile it: GBNF as lark, and calls of tools without the schemas that do not compile.

Frames of `wire.GrammarCheck` come on stdin, those of `wire.GrammarChecked` go to stdout; the first one says that it is
ready. Ends when stdin ends, and after `IDLE_S` without a grammar.
"""

from __future__ import annotations

import json
import re
import select
import signal
import sys
import threading
from collections.abc import Iterable, Iterator
from functools import lru_cache
from typing import Any

from llguidance import LLMatcher

from localrun import framing
from localrun.engine.sample import gbnf
from localrun.engine.sample.grammar_checker import TOO_LARGE
from localrun.engine.sample.grammar_library import WHITESPACE, GrammarVocabulary, compile_grammar, problem_of
from localrun.errors import BadRequest
from localrun.wire import Grammar, GrammarCheck, GrammarChecked, GrammarKind
from localrun.worker_limits import allow_cpu, close_limits

MEMORY_BYTES = 1024 * 1024 * 1024
STACK_BYTES = 16 * 1024 * 1024
IDLE_S = 60.0

# How the daemon writes the arguments of a tool, below its name: the call must match, or any object will do. Where they
# are no object, one of them stands below the tool's name and the path of its schema.
_ARGUMENTS_RULE = re.compile(
    r'^// ("(?:[^"\\]|\\.)*")(?: (".*"))?\n((arguments|lenient)_\d+: %json) (\{.*\})$', re.MULTILINE
)
_N_BYTES = 256


class _Bytes:
    """A vocabulary of single bytes, control tokens and an end."""

    def __init__(self, control_names: tuple[str, ...]) -> None:
        self._names = (*control_names, "<end>")
        self.n_vocab = _N_BYTES + len(self._names)
        self.eog_tokens = frozenset({self.n_vocab - 1})

    def tokenize(self, text: str, *, parse_special: bool) -> list[int]:
        return list(text.encode())

    def piece(self, token: int) -> bytes:
        return bytes([token])

    def control_text(self, token: int) -> str:
        return self._names[token - _N_BYTES] if token >= _N_BYTES else ""


@lru_cache(maxsize=8)
def _vocabulary(control_names: tuple[str, ...]) -> GrammarVocabulary:
    return GrammarVocabulary(_Bytes(control_names))


def checked(grammar: Grammar, control_names: tuple[str, ...] = ()) -> GrammarChecked:
    """The grammar as an engine can compile it. Raises BadRequest if it is none, or beyond the library's limits.

    Calls that the model need not make (`lenient_...`) take any object instead of failing the request."""
    vocabulary = _vocabulary(control_names)
    if grammar.kind is GrammarKind.GBNF:
        grammar = Grammar(grammar.kind, gbnf.to_lark(grammar.text), grammar.triggers)
    elif grammar.kind is GrammarKind.JSON_SCHEMA:
        _check_json(grammar.text)
    ways = [_without_faults, _without_schemas] if grammar.kind is GrammarKind.LARK else []
    warnings: list[str] = []
    while True:
        try:
            compile_grammar(grammar, vocabulary)
            return GrammarChecked(grammar=grammar, warnings=tuple(warnings))
        except BadRequest as error:
            if not ways:
                fault = _fault(json.loads(grammar.text), "schema") if grammar.kind is GrammarKind.JSON_SCHEMA else ""
                raise BadRequest(f"the JSON schema cannot be used: {fault}") if fault else error from None
        grammar = Grammar(grammar.kind, ways.pop(0)(grammar.text, warnings), grammar.triggers)


def _check_json(text: str) -> None:
    try:
        json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BadRequest(f"the JSON schema cannot be read: {error}") from error


def _without_faults(lark: str, warnings: list[str]) -> str:
    """The grammar with any object for arguments whose schema does not compile. Raises BadRequest naming the tool and
    the part of its schema where the call must match."""

    def with_any(found: re.Match[str]) -> str:
        fault = _fault(json.loads(found[5]), json.loads(found[2] or '"parameters"'))
        if not fault:
            return found[0]
        message = f"the tool {json.loads(found[1])!r}: {fault}"
        if found[4] == "arguments":
            raise BadRequest(message)
        warnings.append(f"{message}; its calls take any object")
        return _any_object(found)

    return _ARGUMENTS_RULE.sub(with_any, lark)


def _without_schemas(lark: str, warnings: list[str]) -> str:
    """The grammar with any object for all arguments that need not match: together they are too much."""
    weaker = _ARGUMENTS_RULE.sub(lambda found: found[0] if found[4] == "arguments" else _any_object(found), lark)
    if weaker != lark:
        warnings.append("the schemas of the tools are too much for one grammar; calls take any object")
    return weaker


def _any_object(rule: re.Match[str]) -> str:
    return f'// {rule[1]}\n{rule[3]} {{"x-guidance":{{"whitespace_pattern":{json.dumps(WHITESPACE)}}},"type":"object"}}'


# What the library says of a schema that holds the faulty one.
_IN_REFERENCE = "while processing json-schema:"
_UNSATISFIABLE = "Unsatisfiable schema"


def _fault(schema: dict[str, Any], path: str) -> str:
    """Why a schema does not compile, with the path of its innermost part that is to blame; empty if it does."""
    shared: dict[str, Any] = {key: schema[key] for key in ("x-guidance", "$defs", "definitions") if key in schema}
    problem = _problem_of_schema(schema)
    while problem:
        for name, inner in _inner(schema):
            found = _problem_of_schema({**inner, **shared})
            if found == problem or (found.startswith(_UNSATISFIABLE) and problem.startswith(_UNSATISFIABLE)):
                schema, path, problem = inner, f"{path}.{name}", found
                break
        else:
            return f"{path}: {problem}"
    return ""


def _problem_of_schema(schema: dict[str, Any]) -> str:
    error = LLMatcher.validate_grammar(LLMatcher.grammar_from_json_schema(json.dumps(schema)))
    return " ".join(problem_of(error.partition(_IN_REFERENCE)[0]).split())


def _inner(schema: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The schemas right below one, and their paths."""
    for keyword, value in schema.items():
        found: Iterable[tuple[str, Any]] = ()
        if keyword in ("properties", "patternProperties"):
            found = ((f"{keyword}.{name}", inner) for name, inner in value.items())
        elif keyword in ("anyOf", "oneOf", "allOf", "prefixItems"):
            found = ((f"{keyword}[{index}]", inner) for index, inner in enumerate(value))
        elif keyword in ("items", "additionalProperties"):
            found = ((keyword, value),)
        yield from ((path, inner) for path, inner in found if isinstance(inner, dict))


def answer(request: GrammarCheck) -> GrammarChecked:
    """Check one grammar; what it cannot be is in the reply."""
    try:
        return checked(request.grammar, request.control_names)
    except BadRequest as error:
        return GrammarChecked(error_message=error.message)
    except (MemoryError, RecursionError):
        return GrammarChecked(error_message=TOO_LARGE)


def _serve() -> None:
    # Everything is imported and made once before the limits close.
    for kind, text in ((GrammarKind.JSON_SCHEMA, '{"type":"object"}'), (GrammarKind.GBNF, 'root ::= "a"')):
        answer(GrammarCheck(grammar=Grammar(kind, text), control_names=(), cpu_s=1))
    close_limits(memory_bytes=MEMORY_BYTES)
    _send(GrammarChecked())
    while _is_asked() and (body := framing.read_body(sys.stdin.buffer)) is not None:
        request = framing.decode_to_grammar_worker(body)
        allow_cpu(request.cpu_s)
        _send(answer(request))


def _is_asked() -> bool:
    """Whether something came within `IDLE_S`. On Windows pipes cannot be asked: it stays as long as its engine."""
    return sys.platform == "win32" or bool(select.select([sys.stdin], [], [], IDLE_S)[0])


def _send(reply: GrammarChecked) -> None:
    sys.stdout.buffer.write(framing.encode(reply))
    sys.stdout.buffer.flush()


def main() -> None:
    """Serve until stdin ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.stack_size(STACK_BYTES)
    thread = threading.Thread(target=_serve)
    thread.start()
    thread.join()


if __name__ == "__main__":
    main()
