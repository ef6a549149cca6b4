"""`localrun run`: one prompt, or a conversation."""

from __future__ import annotations

import asyncio
import os
import signal
import stat
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import click
import msgspec

from localrun import attachments
from localrun.attachments import Attachment
from localrun.cli import answer as answers
from localrun.cli.answer import Answer, Stats
from localrun.cli.arguments import complete_file, complete_here, with_settings
from localrun.cli.daemon import ask, ensure_daemon, for_daemon
from localrun.cli.pull import pull_missing
from localrun.cli.repl import Question, Session, converse, format_of, message_of, parse_options, think_of
from localrun.cli.text import tell
from localrun.cli.tools import TerminalTools, answer_in_rounds, terminal_tools
from localrun.client import Client
from localrun.config import Settings
from localrun.errors import BadRequest, Cancelled, ModelNotFound
from localrun.last_model import BUILT_IN, first_model, kept_at, last_model
from localrun.visible import visible_json


class _Run(click.Command):
    """`--think` alone means true, and never takes the next word: that is the model or the prompt."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        end = args.index("--") if "--" in args else len(args)
        plain = ["--think=true" if word == "--think" else word for word in args[:end]]
        return super().parse_args(ctx, [*plain, *args[end:]])


@click.command("run", cls=_Run)
@click.argument("model", required=False, shell_complete=complete_here)
@click.argument("words", nargs=-1, metavar="[PROMPT] [FILE]...", shell_complete=complete_file)
@click.option("--system", default="", metavar="TEXT", help="System message.")
@click.option(
    "--option", "assignments", multiple=True, metavar="NAME=VALUE",
    help="Set an option, such as temperature=0 or num_predict=100. Repeatable.",
)  # fmt: skip
@click.option(
    "--tools",
    "servers",
    is_flag=False,
    flag_value="all",
    metavar="[NAME,...]",
    help="Offer the model the tools of these servers of tui.toml, or of all; you are asked before each call.",
)
@click.option(
    "--allow-tool",
    "allowed",
    multiple=True,
    metavar="SERVER__TOOL",
    help="Let this tool run without asking; without a terminal no other does. Repeatable.",
)
@click.option("--format", "answer_format", metavar="json|SCHEMA", help="json, or a JSON schema: a file or its text.")
@click.option(
    "--think", metavar="[=true|false|low|medium|high]", help="Whether the model thinks before it answers, and how much."
)
@click.option("--keepalive", metavar="DURATION", help="How long the model stays loaded: 5m, 1h, -1 for ever.")
@click.option("--nowordwrap", is_flag=True, help="Do not wrap lines at words.")
@click.option(
    "--hidethinking",
    is_flag=True,
    help="Hide the model's thinking. It is always hidden; this is for scripts made for Ollama.",
)
@click.option("--verbose", is_flag=True, help="Print a table of counts, times and rates to stderr.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object with the text and the metrics.")
@with_settings
def run_command(
    model: str | None,
    words: tuple[str, ...],
    system: str,
    assignments: tuple[str, ...],
    servers: str | None,
    allowed: tuple[str, ...],
    answer_format: str | None,
    think: str | None,
    keepalive: str | None,
    nowordwrap: bool,
    hidethinking: bool,
    verbose: bool,
    as_json: bool,
    settings: Settings,
) -> None:
    """Chat with MODEL, or send it one PROMPT and print the answer.

    MODEL is a name from `localrun list` or the path of a GGUF file. Without it the model that you used last answers,
    or else the latest one that is here; it may be left out before a PROMPT of several words.

    Each FILE goes with the prompt: a picture (PNG, JPEG, GIF, WebP, BMP) or sound (WAV, MP3, FLAC, OGG) if the model
    takes it, or a text. So do pictures and sounds whose paths are in PROMPT, if the model takes them. Piped text is
    appended to PROMPT, or used as the prompt; a piped picture or sound is attached. Without any of these, a chat opens
    in the terminal.
    """
    try:
        options = parse_options(assignments)
    except BadRequest as error:
        raise click.UsageError(error.message) from None
    stats = Stats.VERBOSE if verbose else Stats.BRIEF
    try:
        more: dict[str, Any] = {"answer_format": format_of(answer_format), "think": think_of(think)}
    except BadRequest as error:
        raise click.UsageError(f"--{error.message}") from None
    more["keep_alive"] = keepalive
    if model is not None and _is_prompt(model):
        words, model = (model, *words), None
    session = Session(model=for_daemon(model or ""), system=system, options=options, more=more, stats=stats)
    session.wraps = not nowordwrap
    if allowed and servers is None:
        raise click.UsageError("--allow-tool needs --tools")
    try:
        tools = None if servers is None else terminal_tools(servers, allowed)
    except BadRequest as error:
        raise click.UsageError(error.message) from None
    question = _whole_question(words)
    if any(question):
        _choose(settings, session)
        _with_model(settings, session, lambda: _one_answer(ensure_daemon(settings), session, question, as_json, tools))
    elif as_json:
        raise click.UsageError("--json needs a PROMPT or piped input")
    elif not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise click.UsageError("without a terminal, give a PROMPT or pipe one in")
    else:
        _choose(settings, session)
        _with_model(settings, session, lambda: converse(partial(ensure_daemon, settings), session, tools))


def _is_prompt(word: str) -> bool:
    """What stands where the model does: names have no spaces, and files are told by their paths."""
    return len(word.split()) > 1 and not os.path.isabs(for_daemon(word))


def _choose(settings: Settings, session: Session) -> None:
    """The model that was used last, if none was named; what else is chosen is said."""
    if session.model:
        return
    url = ensure_daemon(settings)
    last = last_model(kept_at(url))
    session.model = ask(url, lambda client: first_model(client, last))
    said = []
    if last and session.model != last:
        said.append(f"{last}, which was used last, is no longer here; {session.model} answers")
    if session.model == BUILT_IN:
        said.append(f"{BUILT_IN} is a toy; `localrun pull qwen3.5:4b` brings a real model")
    if said:
        tell("note", "; ".join(said))


def _with_model(settings: Settings, session: Session, action: Callable[[], None]) -> None:
    """Do it; if the model is not here but can be pulled, pull it and do it then. A signal that ends it leaves the
    terminal as it was, and the lines of a conversation kept."""
    for name in ("SIGTERM", "SIGHUP", "SIGQUIT"):
        number = getattr(signal, name, None)
        if number is not None and signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, lambda number, _: sys.exit(128 + number))
    try:
        action()
    except ModelNotFound as error:  # with a reason, another program has it and says why it cannot be used
        if error.reason or not pull_missing(session.model, settings):
            raise
        action()


def _whole_question(words: tuple[str, ...]) -> Question:
    """The prompt and the files among the words, with what is piped in after them. Raises BadRequest for a file that
    cannot be attached."""
    files: list[Attachment] = []
    texts: list[str] = []
    for word in words:
        path = _file(word, is_alone=len(words) == 1)
        if path is not None:
            files.append(attachments.read(path))
        elif attachments.is_meant_as_file(word, is_alone=len(words) == 1):
            attachments.read(attachments.path_of(word))  # says what is wrong with it
        else:
            texts.append(word)
    data, piped = _piped(), ""
    kind = attachments.media_kind(data)
    if kind is not None:
        files.append(attachments.of_bytes(f"the piped {kind}", data))
    else:
        piped = _as_text(data)
    return Question(" ".join(texts), tuple(files), piped)


def _file(word: str, *, is_alone: bool) -> Path | None:
    """The file that a word is. A word that stands alone is the prompt, unless it is a picture or a sound."""
    path = attachments.path_of(word)
    is_one = attachments.is_media(path) if is_alone else attachments.is_file(path)
    return path if is_one else None


def _piped() -> bytes:
    """What a pipe or a file on stdin holds. Other things that are not terminals (a service's null device, a socket)
    hold no prompt, and reading them might wait for ever."""
    if sys.stdin is None or sys.stdin.closed:
        return b""
    mode = os.fstat(sys.stdin.fileno()).st_mode
    if not (stat.S_ISFIFO(mode) or stat.S_ISREG(mode)):
        return b""
    return sys.stdin.buffer.read()


def _as_text(data: bytes) -> str:
    try:
        return data.decode().strip()
    except UnicodeDecodeError:
        raise click.UsageError("the piped input is not UTF-8 text, a picture or sound") from None


def _one_answer(
    base_url: str, session: Session, question: Question, as_json: bool, tools: TerminalTools | None
) -> None:
    with asyncio.Runner() as runner:
        client = Client(base_url, name="localrun run")
        try:
            if tools is not None:
                runner.run(tools.look())
            messages = session.messages(runner.run(message_of(client, session.model, question)))

            def ask(offered: list[dict[str, Any]]) -> Answer:
                answer = Answer()
                pieces = session.answer(client, messages, offered)
                if as_json:
                    runner.run(answers.receive(pieces, answer))
                else:
                    runner.run(answers.show(pieces, answer, session.stats, client, wraps=session.wraps))
                return answer

            answer = answer_in_rounds(tools, messages, ask, runner, client, session.model)
        finally:
            if tools is not None:
                runner.run(tools.close())
            runner.run(client.__aexit__(None, None, None))
    if answer.done_reason == "cancelled":
        raise Cancelled("the request was cancelled before the answer was complete")
    if not as_json:
        return
    metrics = answer.metrics
    rates = {
        "prefill_tokens_per_s": None if metrics is None else answers.prefill_rate(metrics),
        "decode_tokens_per_s": None if metrics is None else answers.decode_rate(metrics),
    }
    value = {"model": session.model, **msgspec.structs.asdict(answer), **rates}
    print(visible_json(msgspec.json.encode(value).decode()))
