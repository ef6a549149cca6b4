"""`localrun run`: one prompt, or a conversation."""

from __future__ import annotations

import asyncio
import os
import stat
import sys
from collections.abc import Callable
from functools import partial

import click
import msgspec

from localrun.cli import answer as answers
from localrun.cli.answer import Answer, Stats
from localrun.cli.daemon import ensure_daemon, for_daemon, with_settings
from localrun.cli.pull import pull_missing
from localrun.cli.repl import Session, converse, parse_options
from localrun.client import Client
from localrun.config import Settings
from localrun.errors import BadRequest, Cancelled, ModelNotFound


@click.command("run")
@click.argument("model")
@click.argument("prompt", required=False)
@click.option("--system", default="", metavar="TEXT", help="System message.")
@click.option(
    "--option", "assignments", multiple=True, metavar="NAME=VALUE",
    help="Set an option, such as temperature=0 or num_predict=100. Repeatable.",
)  # fmt: skip
@click.option("--verbose", is_flag=True, help="Print a table of counts, times and rates to stderr.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object with the text and the metrics.")
@with_settings
def run_command(
    model: str,
    prompt: str | None,
    system: str,
    assignments: tuple[str, ...],
    verbose: bool,
    as_json: bool,
    settings: Settings,
) -> None:
    """Chat with MODEL, or send it one PROMPT and print the answer.

    MODEL is a name from `localrun list` or the path of a GGUF file. Piped input is appended to PROMPT, or used as the
    prompt. Without either, a chat opens in the terminal.
    """
    try:
        options = parse_options(assignments)
    except BadRequest as error:
        raise click.UsageError(error.message) from None
    stats = Stats.VERBOSE if verbose else Stats.BRIEF
    session = Session(model=for_daemon(model), system=system, options=options, stats=stats)
    text = _whole_prompt(prompt)
    if text is not None:
        _with_model(
            settings, session, lambda: asyncio.run(_one_answer(ensure_daemon(settings), session, text, as_json))
        )
    elif as_json:
        raise click.UsageError("--json needs a PROMPT or piped input")
    elif not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise click.UsageError("without a terminal, give a PROMPT or pipe one in")
    else:
        _with_model(settings, session, lambda: converse(partial(ensure_daemon, settings), session))


def _with_model(settings: Settings, session: Session, action: Callable[[], None]) -> None:
    """Do it; if the model is not here but can be pulled, pull it and do it then."""
    try:
        action()
    except ModelNotFound:
        if not pull_missing(ensure_daemon(settings), session.model):
            raise
        action()


def _whole_prompt(prompt: str | None) -> str | None:
    """The prompt with what is piped in after it; None when there is neither."""
    piped = _piped_text()
    if not piped:
        return prompt or None
    return f"{prompt}\n\n{piped}" if prompt else piped


def _piped_text() -> str:
    """What a pipe or a file on stdin holds. Other things that are not terminals (a service's null device, a socket)
    hold no prompt, and reading them might wait for ever."""
    if sys.stdin is None or sys.stdin.closed:
        return ""
    mode = os.fstat(sys.stdin.fileno()).st_mode
    if not (stat.S_ISFIFO(mode) or stat.S_ISREG(mode)):
        return ""
    try:
        return sys.stdin.buffer.read().decode().strip()
    except UnicodeDecodeError:
        raise click.UsageError("the piped input is not UTF-8 text") from None


async def _one_answer(base_url: str, session: Session, prompt: str, as_json: bool) -> None:
    answer = Answer()
    async with Client(base_url, name="localrun run") as client:
        pieces = client.chat(session.model, session.messages(prompt), options=session.options)
        if as_json:
            await answers.receive(pieces, answer)
        else:
            await answers.show(pieces, answer, session.stats, client)
    if answer.done_reason == "cancelled":
        raise Cancelled("the request was cancelled before the answer was complete")
    if not as_json:
        return
    metrics = answer.metrics
    rates = {
        "prefill_tokens_per_s": None if metrics is None else answers.prefill_rate(metrics),
        "decode_tokens_per_s": None if metrics is None else answers.decode_rate(metrics),
    }
    print(msgspec.json.encode({"model": session.model, **msgspec.structs.asdict(answer), **rates}).decode())
