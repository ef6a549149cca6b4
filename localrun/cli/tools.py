"""Tools in `localrun run --tools`: which there are, asking on the terminal, and answers of several rounds.

A call runs when a person at the terminal allows it, or has before. Without a terminal only the tools that
`--allow-tool` names run. Asking happens outside of the event loop, so that Ctrl-C works at the question as elsewhere.

Does not: run servers itself (`localrun.tools`).
"""

from __future__ import annotations

import asyncio
import base64
import sys
from collections.abc import Callable, Collection
from typing import Any

from localrun import attachments
from localrun.attachments import Kind
from localrun.cli.answer import Answer
from localrun.cli.text import aside
from localrun.client import Client
from localrun.config import folders
from localrun.errors import BadRequest
from localrun.tools import config
from localrun.tools.toolbox import (
    MAX_ROUNDS,
    NOT_RUN,
    REFUSED,
    STOPPED,
    Approval,
    Call,
    End,
    Outcome,
    Permissions,
    Rule,
    Tool,
    Toolbox,
    calls_of,
    result_message,
)
from localrun.visible import inert, shortened, visible

SHOWN_CHARACTERS = 20_000
SHOWN_RESULT_CHARACTERS = 200
_APPROVALS = {"y": Approval.ONCE, "a": Approval.CHAT, "s": Approval.ALWAYS, "n": Approval.NO, "never": Approval.NEVER}
_QUESTION = "Run it? [y]es once, [a]lways in this chat, always and [s]tored, [n]o, never: "


class TerminalTools:
    """The tools of one conversation. `is_asking` says whether a person can be asked; then and only then counts what
    was allowed for good."""

    def __init__(self, toolbox: Toolbox, allowed: Collection[str], *, is_asking: bool) -> None:
        self._toolbox = toolbox
        self._allowed = frozenset(allowed)
        self._is_asking = is_asking
        self._granted: set[str] = set()

    async def look(self) -> None:
        """Starts the servers, and says which are not there. Raises BadRequest for a name of `--allow-tool` that no
        tool has."""
        for problem in await self._toolbox.look(self._toolbox.names):
            aside(problem)
        names = [tool.name for tool in self._toolbox.tools]
        unknown = sorted(self._allowed - set(names))
        if unknown:
            raise BadRequest(f"--allow-tool: there is no tool {unknown[0]!r}; there are {', '.join(names) or 'none'}")

    @property
    def offered(self) -> list[Tool]:
        return self._toolbox.offered()

    def listed(self) -> str:
        """What `/tools` prints."""
        lines = [
            f"{tool.name}  {self._state_of(tool)}  {visible(shortened(' '.join(tool.description.split()), 80))}"
            for tool in self._toolbox.tools
        ]
        lines += [visible(reason) for reason in self._toolbox.failures.values()]
        return "\n".join(lines) or "there are no tools"

    def run(
        self, runner: asyncio.Runner, client: Client, model: str, answer: Answer, said: list[dict[str, Any]]
    ) -> None:
        """Asks for the calls of an answer, one after the other, and runs them. Appends the messages with their results
        to what was said; what Ctrl-C interrupts has a result there, too."""
        calls = calls_of(answer.tool_calls, self.offered)
        for number, call in enumerate(calls):
            try:
                outcome = self._outcome(runner, call)
            except KeyboardInterrupt:
                left = zip(calls[number:], (STOPPED, *(NOT_RUN for _ in calls)), strict=False)
                said += [result_message(one.name, one.id, ended.text) for one, ended in left]
                raise
            aside(_line_of(call, outcome))
            said.append(runner.run(_message(client, model, call, outcome)))

    def may_go_on(self, n_rounds: int) -> bool:
        """After many rounds of calls a person is asked; without one it ends."""
        if n_rounds % MAX_ROUNDS:
            return True
        if not self._is_asking:
            aside(f"stopped: the model called tools in {n_rounds} rounds")
            return False
        asked = f"The model has called tools in {n_rounds} rounds, one after the other. Go on? [y]es, [n]o: "
        return _answered(asked) == "y"

    async def close(self) -> None:
        await self._toolbox.close()

    def _outcome(self, runner: asyncio.Runner, call: Call) -> Outcome:
        if call.tool is not None and not self._may_run(call, call.tool):
            return REFUSED
        return runner.run(self._toolbox.run(call))

    def _may_run(self, call: Call, tool: Tool) -> bool:
        may_run = self._toolbox.may_run(tool, self._granted) if self._is_asking else None
        if may_run is None and tool.name in self._allowed:
            return True
        if may_run is not None or not self._is_asking:
            return bool(may_run)
        approval = self._asked(call, tool)
        if approval is Approval.CHAT:
            self._granted.add(tool.fingerprint)
        elif approval in (Approval.ALWAYS, Approval.NEVER):
            try:
                self._toolbox.store(tool, Rule(approval.value))
            except OSError as error:
                aside(f"it counts for this call only: {error}")
        return approval.may_run

    def _asked(self, call: Call, tool: Tool) -> Approval:
        arguments = shortened(call.shown_arguments, SHOWN_CHARACTERS)
        print(visible(f"{tool.server} · {inert(tool.own_name)} asks to be called with {arguments}"))
        return _APPROVALS.get(_answered(_QUESTION), Approval.NO)

    def _state_of(self, tool: Tool) -> str:
        rule = self._toolbox.rule(tool)
        if rule is Rule.NEVER:
            return "never"
        if tool.name in self._allowed or (self._is_asking and rule is Rule.ALWAYS):
            return "allowed"
        if tool.fingerprint in self._granted:
            return "allowed in this chat"
        return "asks" if self._is_asking else "not allowed"


def terminal_tools(names: str, allowed: Collection[str]) -> TerminalTools:
    """The tools of the servers in a list such as `files,web`, or of all. Raises BadRequest."""
    own = folders()
    path = own.config / "tui.toml"
    servers, problems = config.read(path)
    for problem in problems:
        aside(problem)
    servers = {name: server for name, server in servers.items() if server.enabled}
    if names != config.ALL:
        wanted = [name.strip() for name in names.split(",")]
        for name in wanted:
            if name not in servers:
                raise BadRequest(
                    f"--tools: there is no server {name!r} in {path}; there are {', '.join(servers) or 'none'}. Before "
                    f"a prompt write --tools=all"
                )
        servers = {name: servers[name] for name in wanted}
    if not servers:
        raise BadRequest(f"--tools: no server is configured in {path}; `[mcp.NAME]` with a command or a url is one")
    toolbox = Toolbox(servers, Permissions(own.data / "tool-permissions.json"))
    is_asking = sys.stdin.isatty() and sys.stdout.isatty()
    return TerminalTools(toolbox, allowed, is_asking=is_asking)


def answer_in_rounds(
    tools: TerminalTools | None,
    said: list[dict[str, Any]],
    ask: Callable[[list[dict[str, Any]]], Answer],
    runner: asyncio.Runner,
    client: Client,
    model: str,
) -> Answer:
    """The last answer. Calls and their results are appended to `said`, and stay there whatever is raised. `ask` is
    given the tools."""
    n_rounds = 0
    while True:
        answer = ask([] if tools is None else [tool.as_function for tool in tools.offered])
        if tools is None or not answer.tool_calls:
            return answer
        said.append({"role": "assistant", "content": answer.text, "tool_calls": answer.tool_calls})
        tools.run(runner, client, model, answer, said)
        n_rounds += 1
        if not tools.may_go_on(n_rounds):
            return Answer(request_id=answer.request_id)


async def _message(client: Client, model: str, call: Call, outcome: Outcome) -> dict[str, Any]:
    message = result_message(call.name, call.id, outcome.text)
    if outcome.pictures:
        taken = attachments.taken_kinds((await client.show(model)).get("capabilities") or ())
        if Kind.PICTURE in taken:
            message["images"] = [base64.b64encode(data).decode("ascii") for data in outcome.pictures]
        else:
            message["content"] += f"\n[{len(outcome.pictures)} of this result's pictures are not shown to you]"
    return message


def _line_of(call: Call, outcome: Outcome) -> str:
    name = f"{call.tool.server} · {inert(call.tool.own_name)}" if call.tool else call.name
    ends = {End.DONE: "done", End.FAILED: "failed", End.REFUSED: "not allowed", End.STOPPED: "stopped"}
    result = " ".join(shortened(outcome.text, SHOWN_RESULT_CHARACTERS).split())
    return f"{name} {ends[outcome.end]}" + ("" if outcome.end is End.REFUSED or not result else f": {result}")


def _answered(question: str) -> str:
    """What a person types, in lower case; the end of the input is no answer."""
    try:
        return input(question).strip().lower()
    except EOFError:
        print()
        return ""
