"""The conversation at a terminal: `localrun run MODEL` without a prompt. Its messages and settings, and slash commands.

Reads lines with the terminal's line editing and a history file where Python has readline. Ctrl-C stops an answer, not
the conversation. One event loop and one connection serve the whole conversation.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import sys
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from localrun import attachments, config
from localrun.attachments import MAX_MEDIA, MAX_MEDIA_BYTES, Attachment, Kind
from localrun.cli.answer import Answer, Stats, show
from localrun.cli.daemon import for_daemon
from localrun.cli.models import model_card, model_parameters
from localrun.cli.text import aside, obeys_sequences, say, tell, wrapped
from localrun.cli.tools import TerminalTools, answer_in_rounds
from localrun.client import ChatPiece, Client
from localrun.errors import BadRequest, DaemonUnreachable, LocalrunError, meant
from localrun.last_model import kept_at, remember_model
from localrun.visible import visible, with_lines_once

HISTORY_LINES = 1000
_QUOTES = '"""'
_VALUES = re.compile(r'"([^"]+)"|(\S+)')
_BLANK_LINES = re.compile(r"\A(?:[^\S\n]*\n)+")

# The options of a request that may be set by name, as `--option NAME=VALUE` and `/set parameter NAME VALUE`. The daemon
# checks their ranges.
KINDS: dict[str, type] = {
    "temperature": float,
    "top_k": int,
    "top_p": float,
    "min_p": float,
    "typical_p": float,
    "repeat_penalty": float,
    "repeat_last_n": int,
    "presence_penalty": float,
    "frequency_penalty": float,
    "mirostat": int,
    "mirostat_tau": float,
    "mirostat_eta": float,
    "dry_multiplier": float,
    "dry_base": float,
    "dry_allowed_length": int,
    "dry_penalty_last_n": int,
    "dry_sequence_breakers": list,
    "top_n_sigma": float,
    "xtc_probability": float,
    "xtc_threshold": float,
    "dynatemp_range": float,
    "dynatemp_exponent": float,
    "seed": int,
    "num_predict": int,
    "num_ctx": int,
    "num_keep": int,
    "num_gpu": int,
    "kv_type": str,
    "rope_scaling": str,
    "rope_frequency_base": float,
    "rope_frequency_scale": float,
    "yarn_orig_ctx": int,
    "stop": list,
    "speculation": str,
}


def set_option(options: dict[str, Any], name: str, text: str) -> None:
    """Put the value that `text` spells into `options`; another `stop` is added to those before.

    Raises BadRequest naming the known options, or the type that the option has.
    """
    kind = KINDS.get(name)
    if kind is None:
        way_out = meant(name, KINDS) or f"the options are {', '.join(KINDS)}"
        raise BadRequest(f"unknown option {name!r}; {way_out}")
    if kind is list:
        options[name] = [*options.get(name, []), text]
        return
    try:
        options[name] = kind(text)
    except ValueError:
        wanted = "a whole number" if kind is int else "a number"
        raise BadRequest(f"{name} is {text!r}, which is not {wanted}") from None


def parse_options(assignments: Iterable[str]) -> dict[str, Any]:
    """Options from texts like `temperature=0.5`. Raises BadRequest."""
    options: dict[str, Any] = {}
    for assignment in assignments:
        name, equals, text = assignment.partition("=")
        if not equals:
            raise BadRequest(f"{assignment!r} is not an option; write NAME=VALUE")
        set_option(options, name.strip(), text)
    return options


def format_of(asked: str | None) -> str | dict[str, Any] | None:
    """`json`, a JSON schema's text, or the file that has it. Raises BadRequest."""
    if asked is None or asked == "json":
        return asked
    text = asked
    if not asked.lstrip().startswith("{"):
        try:
            text = Path(asked).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            why = "it is not UTF-8" if isinstance(error, UnicodeDecodeError) else error.strerror
            raise BadRequest(f"format: use json, a JSON schema or a file with one; {asked!r}: {why}") from None
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except msgspec.DecodeError as error:
        raise BadRequest(f"format: {asked[:60]!r} is no JSON schema: {error}") from None


def think_of(asked: str | None) -> bool | str | None:
    """Raises BadRequest."""
    if asked in (None, "low", "medium", "high"):
        return asked
    if asked not in ("true", "false"):
        raise BadRequest(f"think: use true, false, low, medium or high, not {asked[:40]!r}")
    return asked == "true"


HELP = """\
/set parameter NAME VALUE   set an option, such as temperature or num_predict; stop takes several values
/set system TEXT            set the system message
/set format json|SCHEMA     json, or a JSON schema: a file or its text
/set noformat               answer in any form again
/set think [LEVEL]          true, false, low, medium or high, for models that can think
/set nothink                do not think
/set wordwrap               wrap words at the end of a line (the default)
/set nowordwrap             let the terminal break lines where it likes
/set history                keep the lines typed from here on for later conversations (the default)
/set nohistory              do not keep them
/set verbose                print a table of counts and times after each answer
/set quiet                  print nothing about speed
/set brief                  print one line about speed (the default)
/show info                  information about the model
/show license               the model's license
/show modelfile             a Modelfile that creates the same model
/show parameters            the options set here, and the model's own
/show system                the system message
/show template              the model's chat template
/load NAME                  go on with another model, and a new conversation
/save NAME                  make a model of this one with the conversation and what is set here
/tools                      the tools that the model is offered, and what was allowed
/clear                      forget the conversation
/bye or /quit               quit (also Ctrl-D)
/? or /help                 this text"""
MORE_HELP = (
    'A paste is one message; """ starts and ends one of several lines, Alt+Enter begins a line. Ctrl-C stops an '
    "answer. The path of a picture or a sound in a message (terminals write it when a file is dropped on them) sends "
    "the file with it."
)


# What is set by a word alone, and what is said then.
_SWITCHES = {
    "noformat": "answers have any form",
    "nothink": "thinking is false",
    "wordwrap": "words are wrapped",
    "nowordwrap": "words are not wrapped",
    "history": "lines are kept for later conversations",
    "nohistory": "lines are not kept",
}
_SETTINGS = ("parameter NAME VALUE", "system TEXT", "format json|SCHEMA", "think [LEVEL]", *_SWITCHES, *Stats)


class Question(NamedTuple):
    """What a person asks, and the files that go with it. `piped` comes after it; paths in that are no files."""

    text: str
    files: tuple[Attachment, ...] = ()
    piped: str = ""


class Session(msgspec.Struct, kw_only=True):
    """`history` holds the turns so far, without the system message. `more` are other arguments of `Client.chat`; words
    of answers are wrapped if it `wraps`."""

    model: str
    system: str = ""
    options: dict[str, Any] = {}
    more: dict[str, Any] = {}
    stats: Stats = Stats.BRIEF
    wraps: bool = True
    history: list[dict[str, Any]] = []

    def messages(self, question: dict[str, Any]) -> list[dict[str, Any]]:
        """The conversation to send for the next answer to a user's message."""
        system = [{"role": "system", "content": self.system}] if self.system else []
        return [*system, *self.history, question]

    async def answer(
        self, client: Client, messages: list[dict[str, Any]], tools: list[dict[str, Any]]
    ) -> AsyncGenerator[ChatPiece, None]:
        """What the model says to these messages. Once it begins to, it is the model that was used last."""
        chat = client.chat(self.model, messages, options=self.options, tools=tools, **self.more)
        is_begun = False
        async with contextlib.aclosing(chat) as pieces:
            async for piece in pieces:
                if not is_begun:
                    is_begun = True
                    remember_model(kept_at(client.base_url), self.model)
                yield piece

    def remember(self, question: dict[str, Any], answer: str, between: Iterable[dict[str, Any]] = ()) -> None:
        """Add a turn, with calls of tools and their results between question and answer. One whose answer was stopped
        before its first word is not part of the conversation."""
        said = [*between, *([{"role": "assistant", "content": answer}] if answer else [])]
        self.history += [question, *said] if said else []

    def leave_out(self, question: dict[str, Any]) -> int:
        """Take the oldest pictures and sounds out of the history that a request with this question cannot carry
        besides: how many."""
        media = [(message, image) for message in (*self.history, question) for image in message.get("images", ())]
        n_over = len(media) - attachments.n_carried([len(image) * 3 // 4 for _, image in media])
        for message, _ in media[:n_over]:
            del message["images"][0]
        return n_over

    def set(self, arguments: str) -> str:
        """Do `/set ARGUMENTS`; what to tell the user. Raises BadRequest."""
        what, _, rest = arguments.partition(" ")
        rest = rest.strip()
        if what in tuple(Stats):
            self.stats = Stats(what)
            return f"stats are {what}"
        if what == "system" and rest:
            self.system = rest
            return "the system message is set"
        if what == "parameter":
            name, _, text = rest.partition(" ")
            if KINDS.get(name) is list and text.strip():
                self.options[name] = [quoted or bare for quoted, bare in _VALUES.findall(text)]
                return f"{name} is {self.options[name]}"
            if name and text.strip():
                set_option(self.options, name, text.strip())
                return f"{name} is {self.options[name]}"
        if what == "format" and rest:
            self.more["answer_format"] = format_of(rest)
            return "answers have this form"
        if what == "think":
            self.more["think"] = think_of(rest or "true")
            return f"thinking is {rest or 'true'}"
        if what in _SWITCHES and not rest:
            return self._switch(what)
        raise BadRequest(f"write /set {', /set '.join(_SETTINGS)}; /? says what they do")

    def _switch(self, what: str) -> str:
        if what == "noformat":
            self.more["answer_format"] = None
        elif what == "nothink":
            self.more["think"] = False
        elif what in ("wordwrap", "nowordwrap"):
            self.wraps = what == "wordwrap"
        else:
            _keep_lines(what == "history")
        return _SWITCHES[what]

    def clear(self) -> str:
        """Do `/clear`; what to tell the user."""
        self.history.clear()
        return "the conversation was cleared"


def converse(connect: Callable[[], str], session: Session, tools: TerminalTools | None = None) -> None:
    """Talk until /bye or Ctrl-D. `connect` gives the URL of a daemon, started if need be.

    A model that does not exist is raised before the first message; later errors are shown. A daemon that is gone (one
    in the background ends when nobody uses it) is started again, and the conversation goes on. Ctrl-C ends what a
    message has begun, servers that are started among it, and never the conversation.
    """
    with _line_history(), asyncio.Runner() as runner:
        client = Client(connect(), name="localrun run")
        try:
            shown = runner.run(client.show(session.model))
            if tools is not None:
                runner.run(tools.look())
            say(f"Chatting with {session.model}. /? lists the commands, /bye quits.")
            for note in (shown.get("localrun") or {}).get("notes", ()):
                aside(note)
            while (message := _read_message()) is not None and message not in ("/bye", "/exit", "/quit"):
                try:
                    _handle(runner, client, session, message, tools)
                except DaemonUnreachable as error:
                    tell("error", error.message)
                    runner.run(client.__aexit__(None, None, None))
                    client = Client(connect(), name="localrun run")
                    aside("the daemon is running again and the conversation is kept; send the message again")
                except LocalrunError as error:
                    tell("error", error.message)
                except KeyboardInterrupt:
                    print()
        finally:
            if tools is not None:
                runner.run(tools.close())
            runner.run(client.__aexit__(None, None, None))


def _handle(
    runner: asyncio.Runner, client: Client, session: Session, message: Question | str, tools: TerminalTools | None
) -> None:
    if message == "/tools":
        print("no tools; start with --tools" if tools is None else tools.listed())
        return
    if isinstance(message, str):
        print(runner.run(_command(client, session, message)))
        return
    question = runner.run(message_of(client, session.model, message))
    n_left_out = session.leave_out(question)
    if n_left_out:
        aside(
            f"the {n_left_out} oldest pictures and sounds are no longer sent: a request carries {MAX_MEDIA}, of "
            f"{MAX_MEDIA_BYTES // 10**6} MB together"
        )
    if tools is not None:
        runner.run(tools.look())

    said: list[dict[str, Any]] = []
    answer = Answer()

    def ask(offered: list[dict[str, Any]]) -> Answer:
        answer = Answer()
        messages = [*session.messages(question), *said]
        pieces = session.answer(client, messages, offered)
        # The runner cancels the coroutine on Ctrl-C, which closes the stream, and raises only afterwards.
        try:
            runner.run(show(pieces, answer, session.stats, client, wraps=session.wraps))
        except KeyboardInterrupt:
            answer.tool_calls = []
            if not answer.text:
                print()
        return answer

    try:
        answer = answer_in_rounds(tools, said, ask, runner, client, session.model)
    finally:
        session.remember(question, answer.text, said)


async def message_of(client: Client, model: str, question: Question) -> dict[str, Any]:
    """The question as `/api/chat` takes it, with its files and those whose paths are in its text. The paths stay
    text for a model that takes neither, and stderr says so. Raises BadRequest for a file that cannot be sent."""
    found = attachments.find(question.text)
    if not found.paths and all(file.kind is Kind.TEXT for file in question.files):
        return attachments.user_message(_whole(question.text, question.piped), question.files)
    taken = attachments.taken_kinds((await client.show(model)).get("capabilities") or ())
    text, files = found.text, list(question.files)
    if found.paths and taken == {Kind.TEXT}:
        aside(f"{model} cannot see pictures or hear sound; {found.paths[0].name} is only text to it")
        text = question.text
    else:
        files += map(attachments.read, found.paths)
    for file in files:
        attachments.check_kind(model, taken, file.kind, file.name)
    attachments.check_amount([len(file.data) for file in files if file.kind is not Kind.TEXT])
    return attachments.user_message(_whole(text, question.piped), files)


def _whole(*parts: str) -> str:
    return "\n\n".join(part for part in parts if part)


async def _command(client: Client, session: Session, line: str) -> str:
    """Do a slash command; what to tell the user. Raises BadRequest for one that does not exist."""
    name, _, arguments = line.partition(" ")
    match name, arguments.strip():
        case (("/?" | "/help"), _):
            return f"{wrapped(HELP, indent=28)}\n{wrapped(MORE_HELP)}"
        case "/clear", "":
            return session.clear()
        case "/set", given:
            return session.set(given)
        case "/show", "system":
            return visible(session.system) or "no system message is set"
        case "/show", "info":
            return model_card(await client.show(session.model))
        case "/show", "parameters":
            return model_parameters(await client.show(session.model), session.options)
        case "/show", "template":
            return visible((await client.show(session.model)).get("template") or "the model has no template")
        case "/show", ("license" | "modelfile") as what:
            return visible((await client.show(session.model)).get(what) or f"the model has no {what}")
        case "/show", _:
            raise BadRequest("write /show info, license, modelfile, parameters, system or template")
        case "/load", model if model:
            await client.show(for_daemon(model))
            session.model = for_daemon(model)
            return f"{model} answers from now on; {session.clear()}"
        case "/save", model if model:
            return await _save(client, session, model)
        case (("/load" | "/save"), _):
            raise BadRequest(f"write {name} NAME")
    known = [word for word in HELP.split() if word.startswith("/")]
    raise BadRequest(f"unknown command {name}; {meant(name, known) or '/? lists the commands'}")


async def _save(client: Client, session: Session, name: str) -> str:
    """Make a model that goes on from here; what to tell the user. Raises what the daemon refuses."""
    said = [{"role": turn["role"], "content": turn["content"]} for turn in session.history if _is_text(turn)]
    body: dict[str, Any] = {"model": name, "from": session.model, "parameters": session.options}
    if session.system:
        body["system"] = session.system
    if said:
        body["messages"] = [*((await client.show(session.model)).get("messages") or ()), *said]
    async with contextlib.aclosing(client.create(body)) as statuses:
        async for _ in statuses:
            pass
    n_left_out = len(session.history) - len(said)
    left_out = f", without the {n_left_out} messages with pictures, sounds or tools" if n_left_out else ""
    return f"created the model {name}{left_out}; /load {name} goes on with it"


def _is_text(turn: dict[str, Any]) -> bool:
    """Models have no other turns."""
    return turn["role"] != "tool" and not turn.get("images") and not turn.get("tool_calls")


def _read_message() -> Question | str | None:
    """What is typed or pasted before Enter, or the lines between triple quotes as one: a question, or a command's text;
    None at the end of input."""
    while True:
        try:
            text = _typed(">>> ")
            is_command = _is_command(text)
            before, quotes, rest = text.partition(_QUOTES)
            # With text behind quotes that close, all of them are the message's own.
            is_open = _ends(rest) or rest.count(_QUOTES) % 2 == 0
            if quotes and is_open and (is_command or not before.strip()):
                while not _ends(rest):
                    rest += "\n" + _typed("... ")
                text = before + rest.rstrip().removesuffix(_QUOTES)
            if text.strip():
                return text.strip() if is_command else Question(_BLANK_LINES.sub("", with_lines_once(text)).rstrip())
        except EOFError:
            print()
            return None
        except KeyboardInterrupt:
            print("\n(Ctrl-D or /bye quits)")


class _Continued(Exception):
    """The process was stopped, as by Ctrl-Z, and goes on."""


def _typed(prompt: str) -> str:
    """What `input` gives. While the process was stopped the shell gave the terminal its own modes, and readline sets
    those that it needs only where it begins: so it begins again, with what was typed so far."""
    if sys.platform == "win32" or "readline" not in sys.modules:
        return input(prompt)
    import readline

    def go_on(*_: object) -> None:
        signal.signal(signal.SIGCONT, signal.SIG_IGN)  # shells may say it twice, and nobody listens then
        raise _Continued

    typed, before = "", signal.getsignal(signal.SIGCONT)
    readline.set_startup_hook(lambda: readline.insert_text(typed))
    try:
        while True:
            try:
                signal.signal(signal.SIGCONT, go_on)
                return input(prompt)
            except _Continued:
                typed = readline.get_line_buffer()
    finally:
        signal.signal(signal.SIGCONT, before)
        readline.set_startup_hook(None)


def _is_command(text: str) -> bool:
    """Else it is a path, of a dropped file perhaps."""
    return text.lstrip().startswith("/") and "/" not in text.split()[0][1:]


def _ends(text: str) -> bool:
    """Whether a message that opened with quotes ends here: with quotes, but not with those of a docstring in it."""
    return text.rstrip().endswith(_QUOTES) and text.count(_QUOTES) % 2 == 1


def _keep_lines(is_kept: bool) -> None:
    with contextlib.suppress(ImportError):
        import readline

        readline.set_auto_history(is_kept)


@contextlib.contextmanager
def _line_history() -> Iterator[None]:
    """Line editing with the lines of earlier conversations, which are kept in the state folder, readable to the user
    alone."""
    try:
        import readline
    except ImportError:
        yield
        return
    if obeys_sequences(sys.stdout) and "libedit" not in (readline.__doc__ or ""):
        readline.parse_and_bind("set enable-bracketed-paste on")  # so that a paste of several lines is one message
        # What terminals report late, and ends of pastes that were lost.
        readline.parse_and_bind(r'"\e[": skip-csi-sequence')
        readline.parse_and_bind(r'"\e\C-m": "\C-v\C-j"')  # Alt+Enter begins a line; else it changes to vi's keys
    path = config.folders().state / "history"
    _make_private(path)
    readline.set_history_length(HISTORY_LINES)
    with contextlib.suppress(OSError):
        readline.read_history_file(path)
    n_before = readline.get_current_history_length()
    for index in range(n_before):  # an entry of several lines is one of the file's, too
        if "\r" in (entry := readline.get_history_item(index + 1) or ""):
            readline.replace_history_item(index, entry.replace("\r", "\n"))
    try:
        yield
    finally:
        own = range(n_before + 1, readline.get_current_history_length() + 1)
        typed = [readline.get_history_item(number) for number in own]
        with contextlib.suppress(OSError):
            readline.clear_history()
            readline.read_history_file(path)  # another conversation may have added its own meanwhile
            for line in typed:
                readline.add_history(line.replace("\n", "\r"))
            readline.write_history_file(path)


def _make_private(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        path.touch(mode=0o600)
        os.chmod(path, 0o600)
