"""The conversation at a terminal: `localrun run MODEL` without a prompt.

Reads lines with the terminal's line editing and a history file where Python has readline. Ctrl-C stops an answer, not
the conversation. One event loop and one connection serve the whole conversation.

Does not: know what the slash commands change (`session.py` does).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from localrun import config
from localrun.cli.answer import Answer, show
from localrun.cli.model_card import model_card, model_parameters
from localrun.cli.session import HELP, Session
from localrun.cli.visible import for_stdout, visible
from localrun.client import Client
from localrun.errors import BadRequest, DaemonUnreachable, LocalrunError

HISTORY_LINES = 1000
_QUOTES = '"""'


def converse(connect: Callable[[], str], session: Session) -> None:
    """Talk until /bye or Ctrl-D. `connect` gives the URL of a daemon, started if need be.

    A model that does not exist is raised before the first message; later errors are shown. A daemon that is gone (one
    in the background ends when nobody uses it) is started again, and the conversation goes on.
    """
    with _line_history(), asyncio.Runner() as runner:
        client = runner.run(_opened(connect()))
        try:
            runner.run(client.show(session.model))
            print(f"Talking to {session.model}. /? lists the commands, /bye leaves.")
            while (message := _read_message()) is not None and message not in ("/bye", "/exit"):
                try:
                    _handle(runner, client, session, message)
                except DaemonUnreachable as error:
                    print(f"error: {visible(error.message)}", file=sys.stderr)
                    runner.run(client.__aexit__(None, None, None))
                    client = runner.run(_opened(connect()))
                    print("(the daemon runs again and the conversation is kept; send the message again)")
                except LocalrunError as error:
                    print(f"error: {visible(error.message)}", file=sys.stderr)
        finally:
            runner.run(client.__aexit__(None, None, None))


def _handle(runner: asyncio.Runner, client: Client, session: Session, message: str) -> None:
    if message.startswith("/"):
        print(runner.run(_command(client, session, message)))
        return
    answer = Answer()
    # The runner cancels the coroutine on Ctrl-C, which closes the stream, and raises only afterwards.
    with contextlib.suppress(KeyboardInterrupt):
        runner.run(
            show(client.chat(session.model, session.messages(message), options=session.options), answer, session.stats)
        )
    session.remember(message, answer.text)


async def _opened(base_url: str) -> Client:
    return await Client(base_url, name="localrun run").__aenter__()


async def _command(client: Client, session: Session, line: str) -> str:
    """Do a slash command; what to tell the user. Raises BadRequest for one that does not exist."""
    name, _, arguments = line.partition(" ")
    match name, arguments.strip():
        case (("/?" | "/help"), _):
            return HELP
        case "/clear", "":
            return session.clear()
        case "/set", given:
            return session.set(given)
        case "/show", "system":
            return session.system or "no system message is set"
        case "/show", "info":
            return model_card(await client.show(session.model))
        case "/show", "parameters":
            return model_parameters(await client.show(session.model), session.options)
        case "/show", "template":
            return for_stdout((await client.show(session.model)).get("template") or "the model brings no template")
        case "/show", _:
            raise BadRequest("write /show info, /show parameters, /show system or /show template")
    raise BadRequest(f"there is no command {name}; /? lists the commands")


def _read_message() -> str | None:
    """The next line, or the lines between triple quotes as one; None at the end of input."""
    while True:
        try:
            line = input(">>> ").strip()
            before, quotes, rest = line.partition(_QUOTES)
            if not quotes or (before and not before.startswith("/")):
                if line:
                    return line
                continue
            lines = [rest]
            while _QUOTES not in lines[-1]:
                lines.append(input("... "))
            lines[-1] = lines[-1].partition(_QUOTES)[0]
            return (before + "\n".join(lines)).strip()
        except EOFError:
            print()
            return None
        except KeyboardInterrupt:
            print("\n(Ctrl-D or /bye leaves)")


@contextlib.contextmanager
def _line_history() -> Iterator[None]:
    """Line editing with the lines of earlier conversations, which are kept in the state folder, readable to the user
    alone."""
    try:
        import readline
    except ImportError:
        yield
        return
    path = config.folders().state / "history"
    _make_private(path)
    readline.set_history_length(HISTORY_LINES)
    with contextlib.suppress(OSError):
        readline.read_history_file(path)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            readline.write_history_file(path)


def _make_private(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        path.touch(mode=0o600)
        os.chmod(path, 0o600)
