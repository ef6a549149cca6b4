"""Request bodies: strict JSON into one struct per route.

JSON here is what the standard says and no more: no NaN or Infinity, no number that a double cannot hold, no lone
surrogates, no duplicate keys (two parsers that pick different ones are a way past a check), no nesting beyond what the
parser's stack holds. Unknown fields are ignored, since clients send fields of every server they know; known fields of
the wrong type or out of range are refused with the field's name and its limit.

Does not: bound a body's size (`limits.py` does), or know any API's fields.
"""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any, TypeVar

import msgspec

from localrun.errors import BadRequest
from localrun.server.http.exchange import Exchange

Body = TypeVar("Body")

# From here on the values of a body may be so many that the event loop had better not wait until they are looked at.
LARGE_BYTES = 256 * 1024
# The next key or brace of a JSON text, and what comes before: not more of it at once than takes a millisecond.
_TEXT = r'(?:[^"\\]++|\\.)*+'
_PART = re.compile(rf'(?:[^"{{}}]{{1,1024}}+|"{_TEXT}"(?!\s*+:)){{0,64}}+(?:"({_TEXT})"\s*+:|([{{}}]))?+')

_AT = re.compile(r" - at `(?P<kind>key in )?\$(?P<path>[^`]*)`$")
_MISSING = re.compile(r"Object missing required field `(?P<field>[^`]*)`")


async def read(exchange: Exchange, type_: type[Body]) -> Body:
    """The body of a request. Raises as `decode` and `Exchange.read_body` do."""
    body = await exchange.read_body()
    if len(body) < LARGE_BYTES:
        return decode(body, type_)
    return await asyncio.to_thread(decode, body, type_)


def decode(body: bytes, type_: type[Body]) -> Body:
    """The body as `type_`. Raises BadRequest, naming the field where there is one."""
    if not body.strip():
        raise BadRequest("missing request body; send a JSON object")
    try:
        value = msgspec.json.decode(body, type=type_)
        if len(body) < LARGE_BYTES:
            json.loads(body, object_pairs_hook=_refuse_duplicates)
        else:
            _walk(body.decode())
    except msgspec.ValidationError as error:
        raise _out_of_shape(str(error)) from None
    except ValueError as error:  # msgspec.DecodeError, UnicodeDecodeError, an integer of thousands of digits
        raise BadRequest(f"the body is not valid JSON: {error}") from None
    except RecursionError:
        raise BadRequest("the body is nested too deeply") from None
    return value


def _refuse_duplicates(pairs: list[tuple[str, Any]]) -> None:
    """Keeps nothing: only the keys of one object matter here."""
    keys = {key for key, _ in pairs}
    if len(keys) == len(pairs):
        return
    seen: set[str] = set()
    for key, _ in pairs:
        if key in seen:
            raise _twice(key)
        seen.add(key)


def _twice(key: str) -> BadRequest:
    return BadRequest(f"the key {key[:80]!r} occurs twice in one object", field=key[:80])


def _walk(text: str) -> None:
    """As parsing `text`, which is JSON, with `_refuse_duplicates`, but never long without letting other threads run:
    Python's parser holds them up until the last value, seconds for a large body of many."""
    inside: list[set[str]] = []
    for part in _PART.finditer(text):
        key, brace = part.groups()
        if brace == "{":
            inside.append(set())
        elif brace == "}":
            inside.pop()
        elif key is not None:
            key = json.loads(f'"{key}"') if "\\" in key else key
            if key in inside[-1]:
                raise _twice(key)
            inside[-1].add(key)


def _out_of_shape(message: str) -> BadRequest:
    """msgspec says "Expected `int` >= 1 - at `$.options.top_k`"; a person reads the field first."""
    at = _AT.search(message)
    path = at["path"].lstrip(".") if at else ""
    said = message[: at.start()] if at else message
    missing = _MISSING.fullmatch(said)
    if missing:
        field = f"{path}.{missing['field']}" if path else missing["field"]
        return BadRequest(f"{field} is required", field=field)
    said = said[:1].lower() + said[1:]
    if not path:
        return BadRequest(f"the body is not as expected: {said}")
    return BadRequest(f"{path}: {said}", field=path)
