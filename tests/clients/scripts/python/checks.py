"""Runs the `check_*` functions of a client's script and prints a JSON line for each. Standard library only.

`URL` is a daemon with real weights, `FAKE_URL` one whose engines write what a prompt tells them (`says`).
"""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import time
import traceback
import unittest
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

URL = os.environ["LOCALRUN_TEST_URL"]
FAKE_URL = os.environ["LOCALRUN_TEST_FAKE_URL"]
# A PNG for the model `gemma3` and a WAV for `ultravox`, in base64. Both models are at `URL`.
PICTURE, SOUND = os.environ["LOCALRUN_TEST_PICTURE"], os.environ["LOCALRUN_TEST_SOUND"]
PICTURE_URI = f"data:image/png;base64,{PICTURE}"
QUESTION = "Hello! Who are you?"
SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "London"]}, "warm": {"type": "boolean"}},
    "required": ["city", "warm"],
    "additionalProperties": False,
}
_IDLE_TIMEOUT_S = 20.0


def says(text: str) -> str:
    """A prompt to which the fake engines reply with `text`."""
    return f"Please. SAY[[{text}]]"


def says_call(name: str, arguments: dict[str, Any]) -> str:
    """A prompt to which they reply with a call, in the format of the model `caller`."""
    return says(f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>")


def long_reply() -> str:
    """A prompt with a reply that takes many seconds."""
    return says("word " * 2000)


def assert_cancelled(url: str) -> None:
    """Returns when the daemon works on nothing and its last request was cancelled. Fails if that takes long."""
    end_s = time.monotonic() + _IDLE_TIMEOUT_S
    while True:
        rows = _requests(url)
        if all(row["state"] in ("done", "cancelled", "failed") for row in rows):
            break
        assert time.monotonic() < end_s, "the request goes on"
        time.sleep(0.05)
    assert rows[-1]["state"] == "cancelled", rows[-1]


def _requests(url: str) -> list[dict[str, Any]]:
    with urllib.request.urlopen(f"{url}/localrun/v1/requests", timeout=10) as answer:
        found: list[dict[str, Any]] = json.load(answer)["requests"]
    return found


@contextmanager
def raises(kind: type[BaseException]) -> Iterator[list[Any]]:
    """The exception is the list's only entry afterwards."""
    caught: list[Any] = []
    try:
        yield caught
    except kind as error:
        caught.append(error)
    assert caught, f"{kind.__name__} was not raised"


def run(script: dict[str, Any]) -> None:
    """Every check of the script, in its order, each once."""
    for name, check in script.items():
        if not name.startswith("check_"):
            continue
        error = None
        try:
            if inspect.iscoroutinefunction(check):
                asyncio.run(check())
            else:
                check()
        except unittest.SkipTest as why:
            error = f"skipped: {why}"
        except Exception:
            error = traceback.format_exc()
        print(json.dumps({"check": name.removeprefix("check_"), "error": error}), flush=True)
