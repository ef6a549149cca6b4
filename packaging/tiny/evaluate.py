"""Measures the held-out scores of a model through an OpenAI-compatible URL, greedy:
`python -m tiny.evaluate --url http://127.0.0.1:11434 --model tiny`.

Each case is a conversation: the model's own replies stay in it. `--parallel` conversations run at once, so the daemon
batches them. Exit code 1 when a required score is missed.

Does not: start a daemon, or measure perplexity (`train` does, on the trained weights).
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from urllib.request import Request, urlopen

from tiny.held_out import SKILLS, Case, Reply, Skill, cases

Message = dict[str, str]
Ask = Callable[[list[Message]], Reply]

REPLY_TOKENS = 300
TIMEOUT_S = 120.0


def over_http(url: str, model: str, seed: int = 0) -> Ask:
    """Asks `url`/v1/chat/completions at temperature 0. Raises `urllib.error.HTTPError` when it refuses."""

    def ask(messages: list[Message]) -> Reply:
        body = {"model": model, "messages": messages, "temperature": 0, "max_tokens": REPLY_TOKENS, "seed": seed}
        request = Request(
            f"{url.rstrip('/')}/v1/chat/completions",
            data=json.dumps(body).encode(),
            headers={"Content-Type": "application/json"},
        )
        with urlopen(request, timeout=TIMEOUT_S) as response:
            answer = json.load(response)
        choice = answer["choices"][0]
        return Reply(choice["message"]["content"], answer["usage"]["completion_tokens"], choice["finish_reason"])

    return ask


def last_reply(ask: Ask, case: Case) -> Reply:
    """Plays the conversation of `case` and returns its last reply."""
    messages: list[Message] = []
    reply = Reply("", 0, "")
    for turn in case.turns:
        messages.append({"role": "user", "content": turn})
        reply = ask(messages)
        messages.append({"role": "assistant", "content": reply.text})
    return reply


def score(ask: Ask, skill: Skill, n_cases: int, n_parallel: int, show_failures: bool = False) -> float:
    """Share of right answers of `skill`."""
    tried = cases(skill, n_cases)
    with ThreadPoolExecutor(n_parallel) as pool:
        replies = list(pool.map(lambda case: last_reply(ask, case), tried))
    failed = [(case, reply) for case, reply in zip(tried, replies, strict=True) if not case.is_right(reply)]
    if show_failures:
        for case, reply in failed:
            print(f"  failed: {case.turns!r} -> {reply.text!r} ({reply.finish_reason})")
    return 1 - len(failed) / n_cases


def main() -> None:
    """Prints one line for each skill."""
    parser = argparse.ArgumentParser(prog="python -m tiny.evaluate", description=__doc__)
    parser.add_argument("--url", default="http://127.0.0.1:11434")
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--cases", type=int, default=300, help="cases for each skill")
    parser.add_argument("--parallel", type=int, default=1, help="conversations at once")
    parser.add_argument("--show-failures", action="store_true")
    arguments = parser.parse_args()
    ask = over_http(arguments.url, arguments.model)
    missed = False
    for skill in SKILLS:
        share = score(ask, skill, arguments.cases, arguments.parallel, arguments.show_failures)
        required = "" if skill.required is None else f"  (required {skill.required:.0%})"
        print(f"{skill.name:36} {share:7.2%} of {arguments.cases}{required}", flush=True)
        missed = missed or (skill.required is not None and share < skill.required)
    sys.exit(1 if missed else 0)


if __name__ == "__main__":
    main()
