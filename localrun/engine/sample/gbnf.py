"""GBNF, llama.cpp's notation for grammars, as lark: a function, and a program for long texts.

The translation is the grammar library's, and pure Python: for two thousand rules it takes 3.4 s, with the interpreter's
lock. So anything long is translated in a process of its own.

Owner: a thread of the compiler, or the process.
"""

from __future__ import annotations

import subprocess
import sys

from llguidance.gbnf_to_lark import GbnfToLarkError, gbnf_to_lark

from localrun.errors import BadRequest

# This much takes less than a process needs to start.
_SHORT_CHARACTERS = 4_000
_LIMIT_S = 10.0
_FAILED = 3


def to_lark(text: str) -> str:
    """Raises BadRequest for a text that is no grammar, or one that takes too long."""
    if len(text) <= _SHORT_CHARACTERS:
        return _translate(text)
    command = [sys.executable, "-P", "-m", "localrun.engine.sample.gbnf"]
    try:
        done = subprocess.run(command, input=text.encode(), capture_output=True, timeout=_LIMIT_S, check=False)
    except subprocess.TimeoutExpired as error:
        raise BadRequest(f"the GBNF grammar takes more than {_LIMIT_S:.0f} s to read; use fewer rules") from error
    if done.returncode == _FAILED:
        raise BadRequest(done.stdout.decode("utf-8", "replace"))
    if done.returncode != 0:
        raise RuntimeError(f"the translator ended with {done.returncode}: {done.stderr[-500:]!r}")
    return done.stdout.decode()


def _translate(text: str) -> str:
    try:
        return gbnf_to_lark(text)
    except GbnfToLarkError as error:
        raise BadRequest(f"the GBNF grammar is not valid: {error}") from error
    except RecursionError as error:
        raise BadRequest("the GBNF grammar is nested too deeply") from error
    except Exception as error:
        raise BadRequest(f"the GBNF grammar cannot be read: {error}") from error


def main() -> int:
    """The program: GBNF from stdin, lark to stdout; exit code 3 and a message there if it is none."""
    text = sys.stdin.buffer.read().decode()
    try:
        output, code = _translate(text), 0
    except BadRequest as error:
        output, code = error.message, _FAILED
    sys.stdout.buffer.write(output.encode("utf-8", "replace"))
    return code


if __name__ == "__main__":
    sys.exit(main())
