"""The template worker: `python -m localrun.server.templates.worker`, a process that renders chat templates.

A template comes with a model file from anywhere and is a program. It runs here, apart from the daemon, in Jinja's
sandbox, one at a time, and the daemon kills the process when a render takes too long. Where the system has resource
limits the worker also bounds its own memory and processor time, and cannot open a file or a socket, write a core dump
or (unless it runs as root, whom no such limit binds) start a process: the limits are set once everything is imported,
so even a way out of the sandbox finds nothing to open. Its environment is what Python needs, without anybody's secrets.

Frames are those of `frames.py`: requests on stdin, replies on stdout. Ends when stdin ends. Imports nothing of
the daemon but `errors`, `wire` and the modules of this package.
"""

from __future__ import annotations

import math
import signal
import sys

from jinja2.exceptions import SecurityError, TemplateSyntaxError

from localrun import framing
from localrun.errors import BadRequest, LocalrunError
from localrun.server.templates import environment as template_environment
from localrun.server.templates import marks as template_marks
from localrun.server.templates.frames import RenderReply, RenderRequest, decode_request, refusal

if sys.platform != "win32":  # which has no resource limits; the daemon's time cap and the output cap remain
    import resource

MEMORY_BYTES = 1024 * 1024 * 1024
MAX_MESSAGE_CHARACTERS = 500

# Rendered once before the limits close: it makes Python import the codecs, the time zone and the traceback code that
# Jinja would otherwise load at first use.
_WARM_UP = "{{ '\\u00e9' | upper }}{{ strftime_now('%Y-%m-%d %Z') }}{{ messages | tojson }}{{ missing.attribute }}"


def main() -> None:
    """Serve until stdin ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C in the daemon's terminal is the daemon's to handle
    answer(RenderRequest(template=_WARM_UP, variables={"messages": []}, control_tokens=(), output_bytes=1000, cpu_s=1))
    _close_limits()
    _send(RenderReply())
    while (body := framing.read_body(sys.stdin.buffer)) is not None:
        _send(_answer_body(body))


def answer(request: RenderRequest) -> RenderReply:
    """Render one request; every failure becomes an error reply."""
    try:
        variables, marks = template_marks.mark(request.template, request.variables, request.control_tokens)
        text = template_environment.render(request.template, variables, request.output_bytes)
        return RenderReply(segments=template_marks.split(text, marks))
    except template_environment.TemplateRefusalError as refused:
        return RenderReply(error_code=BadRequest.code, error_message=_short(str(refused)))
    except LocalrunError as error:
        return RenderReply(error_code=error.code, error_message=error.message)
    except template_environment.OutputTooLargeError:
        return refusal(
            f"the chat template's prompt grew beyond {request.output_bytes} bytes (setting template_output_bytes)"
        )
    except SecurityError as error:
        return refusal(f"the chat template tried what its sandbox forbids: {_short(str(error))}")
    except TemplateSyntaxError as error:
        return refusal(f"the chat template is broken at line {error.lineno}: {_short(str(error.message))}")
    except MemoryError:
        return refusal(f"the chat template needed more than {MEMORY_BYTES / 1e9:.1f} GB of memory")
    except RecursionError:
        return refusal("the chat template, or the messages it was given, nest too deeply")
    except Exception as error:
        return refusal(f"the chat template failed: {type(error).__name__}: {_short(str(error))}")


def _answer_body(body: bytes) -> RenderReply:
    try:
        request = decode_request(body)
    except (MemoryError, RecursionError):
        return RenderReply(error_code=BadRequest.code, error_message="the messages are too large or nest too deeply")
    _allow_cpu(request.cpu_s)
    return answer(request)


def _send(reply: RenderReply) -> None:
    try:
        frame = framing.encode(reply)
    except UnicodeEncodeError:
        frame = framing.encode(refusal("the chat template's prompt is not valid Unicode"))
    sys.stdout.buffer.write(frame)
    sys.stdout.buffer.flush()


def _short(message: str) -> str:
    shown = message if len(message) <= MAX_MESSAGE_CHARACTERS else message[:MAX_MESSAGE_CHARACTERS] + "..."
    return shown.encode("utf-8", "replace").decode()


def _close_limits() -> None:
    """Bound memory and forbid new descriptors, processes, file writes and core dumps, for good. A limit that a system
    does not know, or does not let us lower, is left."""
    if sys.platform == "win32":
        return
    limits = {"RLIMIT_AS": MEMORY_BYTES, "RLIMIT_NOFILE": 0, "RLIMIT_NPROC": 0, "RLIMIT_FSIZE": 0, "RLIMIT_CORE": 0}
    for name, value in limits.items():
        kind = getattr(resource, name, None)
        if kind is not None:
            try:
                resource.setrlimit(kind, (value, value))
            except (ValueError, OSError):
                continue


def _allow_cpu(cpu_s: int) -> None:
    """Let this render use `cpu_s` seconds from now; beyond them the system ends the process."""
    if sys.platform == "win32":
        return
    used = resource.getrusage(resource.RUSAGE_SELF)
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (math.ceil(used.ru_utime + used.ru_stime) + cpu_s, hard))


if __name__ == "__main__":
    main()
