"""The template worker: `python -m localrun.server.templates.worker`, a process that renders chat templates.

A template comes with a model file from anywhere and is a program. It runs here, apart from the daemon, in Jinja's
sandbox, one at a time, and the daemon kills the process when a render takes too long. Where the system has resource
limits the worker also bounds its own memory and processor time, and cannot open a file or a socket, write a core dump
or (unless it runs as root, whom no such limit binds) start a process: the limits are set once everything is imported,
so even a way out of the sandbox finds nothing to open. Its environment is what Python needs, without anybody's secrets.

The Jinja is that of the `transformers` library, for which templates are written: `trim_blocks` and `lstrip_blocks`,
`break` and `continue`, `tojson` without HTML escaping, `raise_exception`, `strftime_now`, the `generation` tag, and
undefined names that print as nothing. Data passed in, which is a copy, can be changed by `append` and `pop` alone; an
attribute that starts with an underscore is an error.

Frames of `wire.RenderRequest` come on stdin, those of `wire.RenderReply` go to stdout. Ends when stdin ends. Imports
nothing of the daemon but `errors`, `framing`, `wire`, `marks` and `worker_limits`; the daemon never imports this
module, so that it never loads Jinja.
"""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Iterator, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError, TemplateSyntaxError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from localrun import framing
from localrun.errors import BadRequest, BadTemplate, LocalrunError
from localrun.server.templates.marks import Shadow, mark, marked_again, replaced, shadow_of, split
from localrun.wire import RenderReply, RenderRequest
from localrun.worker_limits import allow_cpu, close_limits

MEMORY_BYTES = 1024 * 1024 * 1024
MAX_MESSAGE_CHARACTERS = 500
COMPILED_TEMPLATES = 32

# Rendered once before the limits close: it makes Python import the codecs, the time zone and the traceback code that
# Jinja would otherwise load at first use.
_WARM_UP = (
    "{{ '\\u00e9' | upper }}{{ '<b>' | striptags }}{{ strftime_now('%Y-%m-%d %Z') }}{{ messages | tojson }}"
    "{{ missing.attribute }}"
)


class TemplateRefusalError(Exception):
    """The template called `raise_exception`: the conversation has a shape that the model does not know."""


class OutputTooLargeError(Exception):
    """The prompt grew beyond its limit."""


class _GenerationTag(Extension):
    """`{% generation %}...{% endgeneration %}` marks assistant text for training; for inference it means nothing."""

    tags = {"generation"}  # noqa: RUF012 - the base class declares it as a plain set

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _ChatEnvironment(ImmutableSandboxedEnvironment):
    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        # Kimi's template keeps a list of its own. What is passed in is this render's copy, so no harm is done to it.
        return (isinstance(obj, list) and attr in ("append", "pop")) or super().is_safe_attribute(obj, attr, value)

    def unsafe_undefined(self, obj: Any, attribute: str) -> jinja2.Undefined:
        # The base class prints nothing for a forbidden attribute and objects only when it is used. Forbidden attributes
        # have no honest use; methods that change data do (`x.update is defined`), so those stay as they are.
        if attribute.startswith("_"):
            raise jinja2.exceptions.SecurityError(f"access to {attribute!r} of a {type(obj).__name__}")
        return super().unsafe_undefined(obj, attribute)


def render(template: str, variables: dict[str, Any], output_bytes: int) -> str:
    """The rendered text.

    Stops as soon as it exceeds `output_bytes` of UTF-8, by OutputTooLargeError. Raises TemplateRefusalError for the
    template's own `raise_exception`, and whatever else Jinja or the template's expressions raise.
    """
    return _generated(_compiled(template), variables, output_bytes)


def _generated(template: jinja2.Template, variables: dict[str, Any], output_bytes: int) -> str:
    pieces: list[str] = []
    size_bytes = 0
    for piece in template.generate(variables):
        size_bytes += len(piece) if piece.isascii() else len(piece.encode())
        if size_bytes > output_bytes:
            raise OutputTooLargeError
        pieces.append(piece)
    return "".join(pieces)


@lru_cache(maxsize=COMPILED_TEMPLATES)
def _compiled(template: str) -> jinja2.Template:
    return _environment.from_string(template)


@lru_cache(maxsize=COMPILED_TEMPLATES)
def _looking_for(template: str, stand_ins: tuple[tuple[str, str], ...]) -> jinja2.Template:
    return _environment.from_string(_looks_for(_environment.parse(template), stand_ins))


# What is done to a text with another one that does not become part of it, by the number of arguments that do not.
_LOOKING_METHODS = {
    **dict.fromkeys(("replace", "split", "rsplit", "partition", "rpartition", "startswith", "endswith", "count"), 1),
    **dict.fromkeys(
        ("find", "rfind", "index", "rindex", "strip", "lstrip", "rstrip", "removeprefix", "removesuffix"), 1
    ),
}
_LOOKING_FILTERS = frozenset({"replace", "trim"})


def _looks_for(template: nodes.Template, stand_ins: Sequence[tuple[str, str]]) -> nodes.Template:
    """The template with stand-ins in the texts that it looks for in others. Changes what is passed in."""
    for place in template.find_all((nodes.Compare, nodes.Call, nodes.Filter)):
        for expression in _looked_for(place):
            for const in [expression] if isinstance(expression, nodes.Const) else expression.find_all(nodes.Const):
                if isinstance(const.value, str):
                    const.value = replaced(const.value, stand_ins)
    return template


def _looked_for(place: nodes.Node) -> list[nodes.Node]:
    if isinstance(place, nodes.Compare):
        return [place]
    if isinstance(place, nodes.Filter):
        return list(place.args[:1]) if place.name in _LOOKING_FILTERS else []
    if isinstance(place, nodes.Call) and isinstance(place.node, nodes.Getattr):
        return list(place.args[: _LOOKING_METHODS.get(place.node.attr, 0)])
    return []


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys, default=_listed
    )


def _listed(value: Any) -> list[Any]:
    """`tools | map(attribute="function") | tojson`: Jinja's filters give generators."""
    if isinstance(value, Iterator):
        return list(value)
    raise TypeError(f"{type(value).__name__} is not JSON serializable")


def _raise_exception(message: object = "the template refused the messages") -> None:
    raise TemplateRefusalError(str(message))


def _strftime_now(pattern: str) -> str:
    return datetime.now().astimezone().strftime(pattern)


def _new_environment() -> _ChatEnvironment:
    environment = _ChatEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    del environment.globals["lipsum"]  # random filler text: no template needs it, and it hands out a Python function
    return environment


_environment = _new_environment()


def main() -> None:
    """Serve until stdin ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C in the daemon's terminal is the daemon's to handle
    answer(RenderRequest(template=_WARM_UP, variables={"messages": []}, control_tokens=(), output_bytes=1000, cpu_s=1))
    close_limits(memory_bytes=MEMORY_BYTES)
    _send(RenderReply())
    while (body := framing.read_body(sys.stdin.buffer)) is not None:
        _send(_answer_body(body))


def answer(request: RenderRequest) -> RenderReply:
    """Render one request; every failure becomes an error reply."""
    try:
        variables, marks = mark(request.template, request.variables, request.control_tokens)
        # Before the render, which may change what it is given.
        shadow = shadow_of(request.template, variables, request.control_tokens)
        text = render(request.template, variables, request.output_bytes)
        if shadow is not None:
            text, marks = marked_again(shadow, _rendered_again(request, shadow), text, request.control_tokens, marks)
        return RenderReply(segments=split(text, marks))
    except TemplateRefusalError as refused:
        return RenderReply(error_code=BadRequest.code, error_message=_short(str(refused)))
    except LocalrunError as error:
        return RenderReply(error_code=error.code, error_message=error.message)
    except OutputTooLargeError:
        return _refusal(
            f"the chat template's prompt grew beyond {request.output_bytes} bytes (setting template_output_bytes)"
        )
    except SecurityError as error:
        return _refusal(f"the chat template tried what its sandbox forbids: {_short(str(error))}")
    except TemplateSyntaxError as error:
        return _refusal(f"the chat template is broken at line {error.lineno}: {_short(str(error.message))}")
    except MemoryError:
        return _refusal(f"the chat template needed more than {MEMORY_BYTES / 1e9:.1f} GB of memory")
    except RecursionError:
        return _refusal("the chat template, or the messages it was given, nest too deeply")
    except Exception as error:
        return _refusal(f"the chat template failed: {type(error).__name__}: {_short(str(error))}")


def _rendered_again(request: RenderRequest, shadow: Shadow) -> str:
    """Empty where it cannot be: what the template does then depends on the text."""
    try:
        return _generated(_looking_for(request.template, shadow.stand_ins), shadow.variables, request.output_bytes)
    except Exception:
        return ""


def _answer_body(body: bytes) -> RenderReply:
    try:
        request = framing.decode_to_renderer(body)
    except (MemoryError, RecursionError):
        return RenderReply(error_code=BadRequest.code, error_message="the messages are too large or nest too deeply")
    allow_cpu(request.cpu_s)
    return answer(request)


def _send(reply: RenderReply) -> None:
    try:
        frame = framing.encode(reply)
    except UnicodeEncodeError:
        frame = framing.encode(_refusal("the chat template's prompt is not valid Unicode"))
    sys.stdout.buffer.write(frame)
    sys.stdout.buffer.flush()


def _refusal(message: str) -> RenderReply:
    """The reply for a template that failed or went over a limit."""
    return RenderReply(error_code=BadTemplate.code, error_message=message)


def _short(message: str) -> str:
    shown = message if len(message) <= MAX_MESSAGE_CHARACTERS else message[:MAX_MESSAGE_CHARACTERS] + "..."
    return shown.encode("utf-8", "replace").decode()


if __name__ == "__main__":
    main()
