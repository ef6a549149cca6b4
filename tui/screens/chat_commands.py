"""What the slash commands of the chat do.

A command takes its text out of the prompt, also where it cannot be carried out and says why; ↑ brings it back. What is
no command stays there, and is not sent.

Does not: parse them (`slash.py`).
"""

from __future__ import annotations

import asyncio
import sqlite3
import unicodedata
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING

from localrun import attachments
from localrun.errors import LocalrunError
from localrun.tui import slash
from localrun.tui.conversation import Conversation
from localrun.tui.files import code_blocks, in_clipboard, model_file, to_json, to_markdown
from localrun.tui.history import Message
from localrun.tui.media import MediaFiles
from localrun.tui.screens.tools import ToolsScreen
from localrun.tui.short_text import line
from localrun.tui.slash import Slash

if TYPE_CHECKING:
    from localrun.tui.screens.chat import ChatScreen

_NAME_CHARACTERS = 40
_Action = Callable[["ChatScreen", str], Awaitable[str | None]]


class _RefusedError(Exception):
    """The command makes no sense here; the message says why."""


async def carry_out(screen: ChatScreen, command: Slash) -> None:
    """Does what was asked, or says why not."""
    action = _ACTIONS.get(command.name)
    if action is None:
        screen.notify(
            line(f"/{command.name} is not a command, and was not sent. Begin with // to ask it all the same."),
            severity="warning", markup=False,
        )  # fmt: skip
        return
    if slash.parse(screen.prompt.text.strip()) == command:
        screen.prompt.take()
    try:
        said = await action(screen, command.argument)
    except KeyError:
        screen.notify("This chat was deleted in another window.", severity="warning")
        return
    except (_RefusedError, LocalrunError, OSError, sqlite3.Error) as error:
        screen.notify(line(str(error)), severity="warning", markup=False)
        return
    if said:
        screen.notify(line(said), markup=False)


async def _title(screen: ChatScreen, argument: str) -> str:
    chat_id = screen.view.conversation.chat_id
    if not argument:
        raise _RefusedError("/title needs the new name")
    if chat_id is None:
        raise _RefusedError("a chat gets a name with its first message")
    screen.session.history.rename(chat_id, argument)
    return f"This chat is now “{argument}”."


async def _model(screen: ChatScreen, argument: str) -> str | None:
    if not argument:
        await screen.app.run_action("show('models')")
        return None
    model = str(model_file(argument) or argument.removesuffix(":latest"))
    await screen.session.daemon.show(model)  # a name that is none is refused here, not with the next question
    screen.view.conversation.configure(model=model)
    screen.session.model = model
    await screen.show_model(model)
    return f"{model} answers in this chat from now on."


async def _system(screen: ChatScreen, argument: str) -> str:
    screen.view.conversation.configure(system=argument)
    return "The next answers follow this system prompt." if argument else "This chat has no system prompt now."


async def _set(screen: ChatScreen, argument: str) -> str:
    conversation = screen.view.conversation
    name, _, text = argument.partition(" ")
    if not text:
        shown = ", ".join(f"{name} {value}" for name, value in conversation.model_parameters.items())
        return shown or "No parameter is set; the model's own are used. Example: /set temperature 0.2"
    try:  # what the daemon would refuse is refused here, not with the next question
        value = slash.option(name, text, await screen.session.daemon.options())
    except ValueError as error:
        raise _RefusedError(str(error)) from None
    conversation.configure(parameters={**conversation.parameters, name: value})
    return f"{name} is {text} from the next answer on."


async def _unset(screen: ChatScreen, argument: str) -> str:
    conversation = screen.view.conversation
    if argument not in conversation.model_parameters:
        raise _RefusedError(f"{argument or 'nothing'} is not set in this chat")
    conversation.configure(parameters={k: v for k, v in conversation.parameters.items() if k != argument})
    return f"{argument} is the model's own again."


async def _think(screen: ChatScreen, argument: str) -> str:
    if argument not in slash.THINK_LEVELS:
        raise _RefusedError(f"/think takes one of {', '.join(slash.THINK_LEVELS)}")
    conversation = screen.view.conversation
    conversation.configure(parameters={**conversation.parameters, "think": slash.THINK_LEVELS[argument]})
    return f"Thinking is {argument} from the next answer on."


async def _tools(screen: ChatScreen, argument: str) -> str | None:
    toolbox, conversation = screen.session.toolbox, screen.view.conversation
    if toolbox is None:
        raise _RefusedError("no server of tools is configured; the documentation's media-and-tools.md says how")
    if argument in ("on", "off"):
        conversation.set_tools(is_on=argument == "on")
        return f"Tools are {argument} in this chat from the next answer on."
    if argument:
        raise _RefusedError("/tools takes on or off, or nothing")
    await screen.app.push_screen(ToolsScreen(screen.session, toolbox, conversation))
    if conversation.tools.is_on is False:
        return "Tools are off in this chat; /tools on switches them on."
    if conversation.tools.is_on is None and "tools" not in await screen.session.capabilities(conversation.model):
        return f"{conversation.model} does not say that it can call tools; /tools on offers them all the same."
    return None


async def _retry(screen: ChatScreen, argument: str) -> None:
    await screen.retry(_last_question(screen))


async def _edit(screen: ChatScreen, argument: str) -> None:
    await screen.edit(_last_question(screen))


def _last_question(screen: ChatScreen) -> Message:
    question = screen.last_question()
    if question is None:
        raise _RefusedError("nothing was asked yet")
    return question


async def _branch(screen: ChatScreen, argument: str) -> str:
    conversation = screen.view.conversation
    if conversation.chat_id is None:
        raise _RefusedError("there is nothing to branch from yet")
    last = conversation.messages[-1].id if conversation.messages else 0
    forked = screen.session.history.fork(conversation.chat_id, last, now_s=screen.session.clock())
    await screen.open_chat(forked.id)
    return "This is a copy; the other chat stays as it was."


async def _attach(screen: ChatScreen, argument: str) -> None:
    if not argument:
        raise _RefusedError("/attach needs a file")
    await screen.attach(attachments.named(argument))


async def _paste(screen: ChatScreen, argument: str) -> None:
    await screen.attach_files([await asyncio.to_thread(in_clipboard)])


async def _detach(screen: ChatScreen, argument: str) -> None:
    try:
        screen.detach(argument)
    except KeyError:
        raise _RefusedError(f"{argument or 'nothing'} is not attached") from None


async def _code(screen: ChatScreen, argument: str) -> None:
    blocks = code_blocks(screen.view.conversation.last_answer() or "")
    screen.copy(blocks[-1] if blocks else None, "code block")


async def _export(screen: ChatScreen, argument: str) -> str:
    if not screen.view.conversation.messages:
        raise _RefusedError("there is nothing to export yet")
    conversation = screen.view.conversation
    path = await asyncio.to_thread(_write, conversation, conversation.title, argument, screen.session.history.files)
    return f"Written to {path}"


def _write(conversation: Conversation, title: str, argument: str, files: MediaFiles) -> Path:
    """The new file; one that is there already is never overwritten. In a thread, for its pictures. Raises OSError."""
    model, system, messages = conversation.model, conversation.system, list(conversation.messages)
    name = "".join(each if unicodedata.category(each)[0] in "LMN" else "-" for each in title).strip("-").lower()
    path = Path(argument or f"{name[:_NAME_CHARACTERS] or 'chat'}.md").expanduser().absolute()
    if path.suffix == ".json":
        text = to_json(title, model, system, conversation.model_parameters, messages, files.get)
    else:
        text = to_markdown(title, model, system, messages)
    with path.open("x", encoding="utf-8") as file:
        file.write(text)
    return path


def _key(action: str) -> _Action:
    """As the key that does the same."""

    async def press(screen: ChatScreen, argument: str) -> None:
        await screen.run_action(action)

    return press


_ACTIONS: dict[str, _Action] = {
    "new": _key("new"),
    "chats": lambda screen, words: screen.action_chats(words),
    "title": _title,
    "model": _model,
    "system": _system,
    "set": _set,
    "unset": _unset,
    "think": _think,
    "tools": _tools,
    "retry": _retry,
    "edit": _edit,
    "branch": _branch,
    "beside": _key("beside"),
    "attach": _attach,
    "paste": _paste,
    "detach": _detach,
    "copy": _key("copy"),
    "code": _code,
    "export": _export,
    "editor": _key("editor"),
    "help": _key("app.help"),
    "quit": _key("app.quit"),
}
