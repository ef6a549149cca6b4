"""What a tier saves: the same mix of requests to the tier, to its small model alone and to its large one alone.

Requests are sent one at a time, so a request's seconds are what the machine computed for it, with the tier's counting
and probing. Each of the three gets prompts of its own: what one has computed is not in the cache for the next. Greedy
answers of a fixed length, except where a schema ends them, make the work of the two models comparable.

Does not: judge answers. A small model's may be worse, and nothing here says by how much.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from localrun.client import Connection
from localrun.errors import DaemonUnreachable, LocalrunError, NotFound

N_OUTPUT = 48
_N_ASKED = 3  # the tier and its two models
LONG_WORDS = 900
_WORDS = "river stone market window garden letter winter engine mirror basket candle forest harbour ladder meadow"
_QUESTIONS = (
    "What is the capital of France?",
    "Name three colours of the rainbow.",
    "How many days does a week have?",
    "Say good morning in Spanish.",
    "What is seven times six?",
    "Which planet is called the red planet?",
    "Prove that there are infinitely many primes.",
    "Why did the Bretton Woods system end?",
)
_TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather in a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
_SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 20}, "people": {"type": "integer", "maximum": 99}},
    "required": ["city", "people"],
    "additionalProperties": False,
}


class TierAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """One request. `asked` is the model or the tier that it named; `rule` says by which rule of the tier it was this
    `model`, `probe_tokens` how many tokens that took. `problem` is the refusal of one that was not answered."""

    kind: str
    asked: str
    model: str = ""
    rule: str = ""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    probe_tokens: int = 0
    seconds: float = 0.0
    problem: str = ""


class TierRun(msgspec.Struct, frozen=True, kw_only=True):
    tier: dict[str, Any]
    answers: list[TierAnswer]

    def of(self, asked: str) -> list[TierAnswer]:
        """Only of those that all three answered, or they could not be compared."""
        failed = {index // _N_ASKED for index, answer in enumerate(self.answers) if answer.problem}
        whole = [answer for index, answer in enumerate(self.answers) if index // _N_ASKED not in failed]
        return [answer for answer in whole if answer.asked == asked]

    @property
    def problems(self) -> list[str]:
        return [f"{each.asked}, {each.kind}: {each.problem}" for each in self.answers if each.problem]


def mix(tier: dict[str, Any], n_times: int, chosen: random.Random) -> Iterator[tuple[str, dict[str, Any]]]:
    """(kind, body without a model): short questions for the most part, some with all that rules look at. Efforts are
    only for tiers that have a rule for them: others leave them to models that may know none."""
    efforts, words = tier.get("reasoning_effort", {}), _WORDS.split()
    for _ in range(n_times):
        # In front, so that no prompt begins as another did.
        mark = " ".join(chosen.choices(words, k=6))
        for question in _QUESTIONS:
            yield "short", _asked(f"{mark}. {question}")
        text = " ".join(chosen.choices(words, k=LONG_WORDS))
        yield "long", _asked(f"{mark}. Which word is the most frequent here? {text}")
        yield "tools", _asked(f"{mark}. How is the weather in Lisbon?", tools=[_TOOL])
        form = {"type": "json_schema", "json_schema": {"name": "city", "schema": _SCHEMA}}
        yield "schema", _asked(f"{mark}. Describe Lisbon.", response_format=form, ignore_eos=False)
        for effort in efforts:
            yield f"effort {effort}", _asked(f"{mark}. Explain how tides work.", reasoning_effort=effort)


def _asked(content: str, **fields: Any) -> dict[str, Any]:
    body = {"messages": [{"role": "user", "content": content}], "max_tokens": N_OUTPUT, "temperature": 0}
    return body | {"ignore_eos": True} | fields


def measure(base_url: str, name: str, n_times: int, seed: int, on_answer: Callable[[TierAnswer], None]) -> TierRun:
    """Everything. Raises what the daemon says, and NotFound for a name that is no tier of its settings file."""
    return asyncio.run(_measured(base_url, name, n_times, seed, on_answer))


async def _measured(
    base_url: str, name: str, n_times: int, seed: int, on_answer: Callable[[TierAnswer], None]
) -> TierRun:
    daemon = Connection(base_url, name="localrun bench")
    try:
        shown = await daemon.json("POST", "/api/show", {"model": name})
        tier = shown.get("localrun", {}).get("tier")
        if tier is None:
            raise NotFound(f"'{name}' is a model and no tier; tiers are tables of localrun.toml, such as [tiers.smart]")
        await daemon.call("POST", "/api/generate", {"model": name}, is_patient=True)  # loads both
        chosen = random.Random(seed)
        answers: list[TierAnswer] = []
        # In turn, so that whatever else happens on the machine happens to all three.
        requests = [list(mix(tier, n_times, chosen)) for _ in range(_N_ASKED)]
        for each in zip(*requests, strict=True):
            for asked, (kind, body) in zip((tier["name"], tier["small"], tier["large"]), each, strict=True):
                if asked != tier["name"]:
                    body = {field: value for field, value in body.items() if field != "reasoning_effort"}
                answers.append(await _one(daemon, kind, asked, body))
                on_answer(answers[-1])
        return TierRun(tier=tier, answers=answers)
    finally:
        await daemon.close()


async def _one(daemon: Connection, kind: str, asked: str, body: dict[str, Any]) -> TierAnswer:
    began_s = time.perf_counter()
    try:
        async with daemon.stream("POST", "/v1/chat/completions", {"model": asked, **body}) as response:
            answer = msgspec.json.decode(await response.aread(), type=dict[str, Any])
    except DaemonUnreachable:
        raise
    except LocalrunError as error:
        return TierAnswer(kind=kind, asked=asked, problem=error.message)
    seconds = time.perf_counter() - began_s
    why = response.headers.get("x-localrun-tier", "")
    facts = dict(fact.partition("=")[::2] for fact in why.split("; ")[1:])
    usage = answer["usage"]
    return TierAnswer(
        kind=kind,
        asked=asked,
        model=answer["model"],
        rule=facts.get("reason", ""),
        prompt_tokens=usage["prompt_tokens"],
        cached_tokens=usage["prompt_tokens_details"]["cached_tokens"],
        output_tokens=usage["completion_tokens"],
        probe_tokens=int(facts.get("probe_tokens", "0")),
        seconds=seconds,
    )


SHARE_HEADER = ("REQUESTS", "NUMBER", "SMALL", "LARGE", "RULES")
COST_HEADER = ("ASKED", "REQUESTS", "SHARE", "PROMPT", "CACHED", "OUTPUT", "PROBE", "SECONDS", "OF LARGE")


def share_rows(run: TierRun) -> list[tuple[str, ...]]:
    """Per kind of request: which model answered, and by which rules."""
    rows = list[tuple[str, ...]]()
    answers = run.of(run.tier["name"])
    for kind in dict.fromkeys(answer.kind for answer in answers):
        its = [answer for answer in answers if answer.kind == kind]
        n_small = sum(answer.model == run.tier["small"] for answer in its)
        rules = ", ".join(f"{rule} {count}" for rule, count in Counter(answer.rule for answer in its).most_common())
        rows.append((kind, str(len(its)), str(n_small), str(len(its) - n_small), rules))
    return rows


def cost_rows(run: TierRun, price_per_hour: float | None = None) -> list[tuple[str, ...]]:
    """The tier, its two models' parts of that, and each model alone: tokens and seconds, with the price of the seconds
    if an hour has one."""
    name, small, large = (run.tier[field] for field in ("name", "small", "large"))
    all_large_s = sum(answer.seconds for answer in run.of(large))
    of_tier = run.of(name)
    parts = [
        (name, of_tier),
        ("  by small", [answer for answer in of_tier if answer.model == small]),
        ("  by large", [answer for answer in of_tier if answer.model == large]),
        ("small alone", run.of(small)),
        ("large alone", run.of(large)),
    ]
    rows = list[tuple[str, ...]]()
    for asked, answers in parts:
        seconds = sum(answer.seconds for answer in answers)
        row = (
            asked,
            str(len(answers)),
            f"{len(answers) / len(of_tier):.0%}",
            *(str(sum(getattr(answer, f"{count}_tokens") for answer in answers)) for count in _COUNTS),
            f"{seconds:.2f}",
            f"{seconds / all_large_s:.0%}" if all_large_s else "-",
        )
        rows.append(row if price_per_hour is None else (*row, f"{seconds / 3600 * price_per_hour:.6f}"))
    return rows


_COUNTS = ("prompt", "cached", "output", "probe")
