"""What Llama 3 writes behind `<|python_tag|>`: a JSON call, a call of a built-in tool, or code.

Pure.
"""

from __future__ import annotations

from localrun.server.replies import json_calls, python_calls
from localrun.server.replies.reply import Reply
from localrun.server.replies.source import MalformedError, Read

# What clients call the tool that runs code.
_CODE_TOOLS = ("python", "code_interpreter", "ipython")


def read_python_tag(reply: Reply) -> Read[None]:
    """`{"name": ...}`, `brave_search.call(query="...")`, or the code for a tool that takes code."""
    source = reply.source
    yield from source.skip_space()
    start = source.at
    if (yield from source.next_character()) == "{":
        yield from json_calls.reader(())(reply)
        return
    while (yield from source.wait()):
        pass
    text = source.text[start:]
    code_tool = next((name for name in _CODE_TOOLS if name in reply.schemas), None)
    try:
        calls = python_calls.parse_calls(text.strip(), reply.schemas)
    except MalformedError:
        calls = []
    if calls and (code_tool is None or all(name.removesuffix(".call") in reply.schemas for name, _ in calls)):
        for name, arguments in calls:
            reply.call(name.removesuffix(".call"), arguments)
    elif code_tool is not None:
        reply.call(code_tool, {"code": text})
    else:
        raise MalformedError
    source.at = len(source.text)
