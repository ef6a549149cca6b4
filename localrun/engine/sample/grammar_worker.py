"""The grammar worker: `python -m localrun.engine.sample.grammar_worker`, a process that looks at grammars first.

A grammar comes from a client and is a program for a compiler that follows references and brackets by recursion and
builds automata: some overflow its stack, some take minutes or all memory. What is compiled in an engine would take its
streams along, so each grammar is compiled here before, for a vocabulary of single bytes, under limits of memory and
processor time and with half the stack that the engine's threads have (`grammars.py`). What passes is sent back
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
from typing import Any, NamedTuple
from urllib.parse import unquote

import msgspec
from llguidance import LLMatcher, LLTokenizer
from llguidance.gbnf_to_lark import GbnfToLarkError, GrammarParser, resolve

from localrun import framing
from localrun.engine.sample.grammar_library import WHITESPACE, GrammarVocabulary, compile_grammar, problem_of
from localrun.engine.sample.grammars import TOO_LARGE
from localrun.engine.sample.lexemes import split
from localrun.errors import BadRequest
from localrun.wire import STRICT_COMMENT, Grammar, GrammarCheck, GrammarChecked, GrammarKind
from localrun.worker_limits import allow_cpu, close_limits

MEMORY_BYTES = 1024 * 1024 * 1024
STACK_BYTES = 16 * 1024 * 1024
IDLE_S = 60.0

# How the daemon writes the arguments of a tool, below its name: the call must match, or any object will do. Where they
# are no object, one of them stands below the tool's name and the path of its schema.
_ARGUMENTS_RULE = re.compile(
    r'^// ("(?:[^"\\]|\\.)*")(?: (".*"))?\n((arguments|lenient)_\d+: %json) (\{.*\})$', re.MULTILINE
)
# A schema in a grammar, below the name of its tool if it is of one.
_JSON_RULE = re.compile(r'^((?:// ("(?:[^"\\]|\\.)*").*\n)?\w+: %json) (\{.*\})$', re.MULTILINE)
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
        grammar = msgspec.structs.replace(grammar, text=to_lark(grammar.text))
    elif grammar.kind is GrammarKind.JSON_SCHEMA:
        try:
            json.loads(grammar.text)
        except (ValueError, RecursionError) as error:
            raise BadRequest(f"the JSON schema cannot be read: {error}") from error
    of_lark, of_json = grammar.kind is GrammarKind.LARK, grammar.kind is GrammarKind.JSON_SCHEMA
    ways = [_weakened_lark, _without_faults, _without_schemas] if of_lark else [_weakened] if of_json else []
    notices: list[str] = []
    is_tried = not (ways and _LENGTH_BESIDE_COUNTS.search(grammar.text))
    while True:
        try:
            if is_tried:
                compile_grammar(grammar, vocabulary)
                return GrammarChecked(grammar=grammar, notices=tuple(notices))
        except BadRequest as error:
            if not ways:
                found = _fault(json.loads(grammar.text), "schema") if of_json else None
                raise BadRequest(f"the JSON schema cannot be used: {found.shown}") if found else error from None
        is_tried = True
        grammar = msgspec.structs.replace(grammar, text=ways.pop(0)(grammar.text, notices))


def _weakened_lark(lark: str, notices: list[str]) -> str:
    """The grammar with its schemas weakened."""

    def weaker(rule: re.Match[str]) -> str:
        whose = "" if rule[2] is None else f"the tool {json.loads(rule[2])!r}: "
        return f"{rule[1]} {_weakened(rule[3], notices, whose)}"

    return _JSON_RULE.sub(weaker, lark)


def _without_faults(lark: str, notices: list[str]) -> str:
    """The grammar with any object for arguments whose schema does not compile. Raises BadRequest naming the tool and
    the part of its schema where the call must match."""

    def with_any(found: re.Match[str]) -> str:
        faulty = _fault(json.loads(found[5]), json.loads(found[2] or '"parameters"'))
        if faulty is None:
            return found[0]
        message = f"the tool {json.loads(found[1])!r}: {faulty.shown}"
        if found[4] == "arguments":
            raise BadRequest(message)
        notices.append(f"{message}; {'any value will do' if found[2] else 'its calls take any object'}")
        return _anything(found)

    return _ARGUMENTS_RULE.sub(with_any, lark)


def _without_schemas(lark: str, notices: list[str]) -> str:
    """The grammar with any object for all arguments that need not match: together they are too much."""
    weaker = _ARGUMENTS_RULE.sub(lambda found: found[0] if found[4] == "arguments" else _anything(found), lark)
    if weaker != lark:
        notices.append("the schemas of the tools are too much for one grammar; calls take any object")
    return weaker


def _anything(rule: re.Match[str]) -> str:
    """The rule with any object for arguments, and any value for one of them."""
    schema = {"x-guidance": {"whitespace_pattern": WHITESPACE}, **({} if rule[2] else {"type": "object"})}
    return rule[0].removesuffix(rule[5]) + json.dumps(schema)


# What the library cannot do with a JSON schema, where in it, and the schema without that. Only compiling shows it, so
# the daemon has not seen it. What no answer could match is no such thing: it is refused.

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
_IN_CIRCLE = "circular references with sibling keys"
_NO_SIBLINGS = {"$ref", "$defs", "definitions", "x-guidance"}
# A group that is counted in a schema with lengths: together they may be more than an answer has time for.
_LENGTH_BESIDE_COUNTS = re.compile(r"\)\{\d.*Length\"|Length\".*\)\{\d")


def _weakened(text: str, notices: list[str], whose: str = "") -> str:
    """A JSON schema without what the library can do nothing with, which goes into `notices`; other faults stay. Raises
    BadRequest for one that is strict."""
    schema = json.loads(text)
    if schema.get("$comment") == STRICT_COMMENT:
        if (found := _fault(schema, "schema") or _slow(schema)) is not None:
            raise BadRequest(f"{whose or 'the JSON schema cannot be used: '}{found.shown}")
        return text
    for _ in range(_MAX_LEFT_OUT):
        found = _fault(schema, "schema") or _slow(schema)
        if found is None:
            break
        # The innermost schema may only lead back to the one that is to blame.
        for path, each in reversed(found.way):
            if words := _words_to_leave_out(each, found.problem):
                notices += [f"{whose}{path}.{word}: left out, since {found.problem}" for word in sorted(words)]
                for word in words:
                    del each[word]
                break
        else:
            break
    return json.dumps(schema)


def _words_to_leave_out(schema: dict[str, Any], problem: str) -> set[str]:
    if _IN_CIRCLE not in problem:
        return schema.keys() & set(next((words for says, words in _LEFT_OUT if says in problem), ()))
    if "$ref" in schema:  # the older drafts pass over what stands beside it
        return schema.keys() - _NO_SIBLINGS
    return schema.keys() & ({"allOf"} if "allOf" in schema else {"type"} if "anyOf" in schema else set())


def _slow(root: dict[str, Any]) -> _Fault | None:
    """A pattern whose text the library cannot follow beside its length."""
    waiting, seen = [("schema", root)], {id(root)}
    for path, node in waiting:
        inner = [(f"{path}.{name}", each) for name, each in _inner(node, root) if id(each) not in seen]
        waiting += inner
        seen |= {id(each) for _, each in inner}
        words = {word: node[word] for word in ("pattern", "minLength", "maxLength") if word in node}
        if len(words) > 1 and _LENGTH_BESIDE_COUNTS.search(json.dumps(words)):
            text = LLMatcher.grammar_from_json_schema(json.dumps({"type": "string", **words}))
            matcher = LLMatcher(LLTokenizer("byte"), text, log_level=0)
            for wanted in (b'"', *[b"a0A"] * 12):
                matcher.compute_bitmask()
                if not any(matcher.try_consume_tokens([byte]) for byte in wanted):
                    break
            if "too many expressions" in matcher.get_error():
                return _Fault([(path, node)], "the pattern and the length are too much together")
    return None


# What the library says of a schema that holds the faulty one.
_IN_REFERENCE = "while processing json-schema:"
_WITH_DETAILS = ("Unsatisfiable schema", _IN_CIRCLE)


class _Fault(NamedTuple):
    """The parts of a schema that do not compile, with their paths; the last is the innermost."""

    way: list[tuple[str, dict[str, Any]]]
    problem: str

    @property
    def shown(self) -> str:
        return f"{self.way[-1][0]}: {self.problem}"


def _fault(root: dict[str, Any], path: str) -> _Fault | None:
    """Why a schema does not compile; None if it does."""
    shared: dict[str, Any] = {key: root[key] for key in ("x-guidance", "$defs", "definitions") if key in root}
    problem, way = _problem_of_schema(root), [(path, root)]
    while problem:
        for name, inner in _inner(way[-1][1], root):
            is_passed = any(inner is each for _, each in way)
            found = "" if is_passed else _problem_of_schema({**inner, **shared})
            if found == problem or any(found.startswith(each) and problem.startswith(each) for each in _WITH_DETAILS):
                path, problem = f"{path}.{name}", found
                way.append((path, inner))
                break
        else:
            return _Fault(way, problem)
    return None


def _problem_of_schema(schema: dict[str, Any]) -> str:
    return _problem_of(json.dumps(schema))


# The same parts are looked at before and after something is left out, and each may take a second.
@lru_cache(maxsize=64)
def _problem_of(text: str) -> str:
    error = LLMatcher.validate_grammar(LLMatcher.grammar_from_json_schema(text))
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


def answer(request: GrammarCheck) -> GrammarChecked:
    """Check one grammar; what it cannot be is in the reply."""
    try:
        return checked(request.grammar, request.control_names)
    except BadRequest as error:
        return GrammarChecked(error_message=error.message)
    except (MemoryError, RecursionError):
        return GrammarChecked(error_message=TOO_LARGE)
    finally:
        _problem_of.cache_clear()  # the next grammar has all of the memory


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


# GBNF, llama.cpp's notation for grammars, as lark. The translation is the grammar library's, and pure Python: two
# thousand rules take it 3.4 s. It loses the brackets of a repetition that is repeated and the zeros of `\u0041`,
# refuses `{0}`, and its `.` is no line break; `plainer` writes them so that nothing is lost (llguidance 1.9.1). Which
# rules are tokens is for `lexemes.py` to say.

# A text, a class, a comment, counts, a name, a bracket, or anything else.
_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|\[(?:[^\]\\]|\\.)*\]|#[^\n]*|\{[^}]*\}|[\w-]+|.', re.DOTALL)
# Names that the translator has itself, or cannot write.
_OTHER_NAME = re.compile(r"start|\d.*")
_ENDS_OF_REPETITIONS = ("*", "+", "?", "}")
_REPETITION = re.compile(r"\s*[*+?{]")
_ANY = "[\\x00-\U0010ffff]"
_NEVER = re.compile(r"\{\s*0\s*(?:,\s*0\s*)?\}")
_ESCAPE = re.compile(r"\\(?:u([0-9A-Fa-f]{4})|U([0-9A-Fa-f]{8})|.)", re.DOTALL)


def plainer(text: str) -> str:
    """The same grammar: a repetition in brackets that are repeated is a rule of its own, and characters by their number
    are themselves. What is not balanced stays as it is, for the translator to refuse."""
    prefix = "repeated"
    while prefix in text:
        prefix += "-x"
    rules: list[str] = []
    open_groups: list[list[str]] = [[]]
    for token in _TOKEN.finditer(text):
        found = token[0]
        if found == "(":
            open_groups.append([])
        elif found == ")" and len(open_groups) > 1:
            parts = open_groups.pop()
            group = "".join(parts)
            last = next((part for part in reversed(parts) if part.strip() and part[0] != "#"), "")
            if last[-1:] in _ENDS_OF_REPETITIONS and _REPETITION.match(text, token.end()):
                rules.append(f"\n{prefix}-{len(rules)} ::= ({group})")
                open_groups[-1].append(f"{prefix}-{len(rules) - 1}")
            else:
                open_groups[-1].append(f"({group})")
        elif _NEVER.fullmatch(found) and "".join(open_groups[-1]).strip():
            parts = open_groups[-1]
            while not parts[-1].strip():
                parts.pop()
            parts[-1] = '""'
        else:
            written = f"{prefix}-{found}" if _OTHER_NAME.fullmatch(found) else _ANY if found == "." else found
            open_groups[-1].append(_ESCAPE.sub(_as_itself, found) if found[0] in '"[' else written)
    return "".join([*open_groups[0], *rules]) if len(open_groups) == 1 else text


def _as_itself(escape: re.Match[str]) -> str:
    if escape[0] == "\\-":
        return "\\x2D"
    if not (escape[1] or escape[2]):
        return escape[0]
    number = int(escape[1] or escape[2], 16)
    if 0xD800 <= number < 0xE000 or number > 0x10FFFF:
        return escape[0]
    return f"\\x{number:02X}" if number < 0x80 else chr(number)


def to_lark(text: str) -> str:
    """Raises BadRequest for a text that is no grammar."""
    try:
        rules = GrammarParser().parse(plainer(text))
        resolve(rules)
        split(rules)
        return "\n".join(
            ["%llguidance {}", *(f"{rule.name}: {rule.alternatives.top_str()}" for rule in rules.values())]
        )
    except GbnfToLarkError as error:
        raise BadRequest(f"the GBNF grammar is not valid: {error}") from error
    except RecursionError as error:
        raise BadRequest("the GBNF grammar is nested too deeply") from error
    except Exception as error:
        raise BadRequest(f"the GBNF grammar cannot be read: {error}") from error


def main() -> None:
    """Serve until stdin ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.stack_size(STACK_BYTES)
    thread = threading.Thread(target=_serve)
    thread.start()
    thread.join()


if __name__ == "__main__":
    main()
