"""What drafts gain, from an answer that repeats its prompt to one in which nothing can be foreseen.

`edit`: a Python file with one name changed. `list`: a list again. `json`: records, in the form of a schema. `prose`: a
story at temperature 1, where drafts must cost nothing. The texts are made from a seed and not stored, so that no server
has seen that of another round. All are plain ASCII.

Every number of streams has prompts of its own, which are computed before anything is measured, so that the times are of
the answers. A server that takes a request's wish for no drafts (`Target.can_switch`) answers all of them four times:
with drafts, twice without, and with drafts again, so that a machine that becomes slower or faster in the meantime does
so for both.
"""

from __future__ import annotations

import asyncio
import random
import re
import tomllib
from collections.abc import Callable, Sequence
from functools import cache
from importlib import resources
from typing import NamedTuple

import msgspec

from localrun.bench.metrics import percentile, wall_s
from localrun.bench.results import Metrics, Options, StreamRecord, Workload
from localrun.bench.session import WorkloadResult, define
from localrun.bench.streams import Endpoint, Fields


class _Material(msgspec.Struct, frozen=True):
    """What `texts.toml` has. Functions and tasks are formats: two nouns or three, an adjective, a city and a number."""

    nouns: list[str]
    adjectives: list[str]
    cities: list[str]
    tasks: list[str]
    functions: list[str]


@cache
def _material() -> _Material:
    content = resources.files("localrun.bench.workloads").joinpath("texts.toml").read_text(encoding="utf-8")
    return msgspec.convert(tomllib.loads(content), _Material)


class SourceFile(NamedTuple):
    """`head` is what comes before the first definition; `names` are those of the definitions."""

    head: str
    text: str
    names: list[str]


def source_file(chosen: random.Random) -> SourceFile:
    """A Python file of some 160 lines in which no definition is like another: small models lose their way among those
    that are."""
    of = _material()
    nouns = chosen.sample(of.nouns, 3 * len(of.functions))
    head = f'"""The {chosen.choice(of.adjectives)} {nouns[0]} report."""\n\nimport os\nimport re\n'
    parts, names = [head], []
    for function in chosen.sample(of.functions, len(of.functions)):
        words = {"noun": nouns.pop(), "other": nouns.pop(), "third": nouns.pop()}
        parts.append(function.format(**words, adjective=chosen.choice(of.adjectives), n=chosen.randrange(2, 90)))
        names += _DEFINED.findall(parts[-1])[:1]
    return SourceFile(head, "\n\n".join(parts), names)


_DEFINED = re.compile(r"^(?:async )?(?:def|class) (\w+)", re.MULTILINE)


def listing(chosen: random.Random) -> str:
    """Things to do, one a line, in sentences of which no two are alike, for the same reason."""
    of = _material()
    nouns = chosen.sample(of.nouns, 2 * len(of.tasks))
    lines = []
    for task in chosen.sample(of.tasks, len(of.tasks)):
        words = {
            "adjective": chosen.choice(of.adjectives),
            "city": chosen.choice(of.cities),
            "n": chosen.randrange(2, 90),
        }
        lines.append(f"- {task.format(noun=nouns.pop(), other=nouns.pop(), **words)}\n")
    return "".join(lines)


def records(chosen: random.Random) -> tuple[str, dict[str, object]]:
    """Records as lines of text, and the schema of a list of as many objects."""
    of = _material()
    lines = [
        f"{noun}: {chosen.choice(of.adjectives)}, {chosen.randrange(10, 990)} pieces, from {chosen.choice(of.cities)}\n"
        for noun in chosen.sample(of.nouns, N_RECORDS)
    ]
    text: dict[str, object] = {"type": "string", "maxLength": 16}
    fields = {"name": text, "kind": text, "pieces": {"type": "integer", "minimum": 0, "maximum": 999}, "city": text}
    one = {"type": "object", "properties": fields, "required": list(fields), "additionalProperties": False}
    return "".join(lines), {"type": "array", "items": one, "minItems": N_RECORDS, "maxItems": N_RECORDS}


N_RECORDS = 8


def topic(chosen: random.Random) -> str:
    """What a story may be about."""
    of = _material()
    first, second = chosen.sample(of.nouns, 2)
    return f"a {chosen.choice(of.adjectives)} {first} and a {second} in {chosen.choice(of.cities)}"


STREAMS = (1, 2, 4, 8)
N_OUTPUT = 160
# One token may be part of a character, and an answer without text has failed.
N_WARM_UP = 4
DRAFTING = (True, False, False, True)
# So many words before one say what it was the last time. Fewer meet by chance.
N_CONTEXT_WORDS = 3


class SourcedRequest(NamedTuple):
    """`source` is what an answer may repeat."""

    body: Fields
    source: str


def _greedy(prompt: str, source: str) -> SourcedRequest:
    """A prompt that the answer goes on with, because small models follow no instruction."""
    return SourcedRequest({"prompt": prompt, "max_tokens": N_OUTPUT, "temperature": 0, "ignore_eos": True}, source)


def _edit(chosen: random.Random) -> SourcedRequest:
    file = source_file(chosen)
    old, new = chosen.choice(file.names), f"new_{chosen.randrange(1000)}"
    renamed = f"report.py after `{old}` was renamed to `{new}`:\n```python\n{file.head}"
    return _greedy(f"report.py:\n```python\n{file.text}```\n\n{renamed}", file.text)


def _list(chosen: random.Random) -> SourcedRequest:
    text = listing(chosen)
    first = text.splitlines(keepends=True)[0]
    return _greedy(f"The list:\n{text}\nThe same list again:\n{first}", text)


def _json(chosen: random.Random) -> SourcedRequest:
    # Not by chat, where llama-server ends an answer with an error that is not what it expects of JSON.
    text, schema = records(chosen)
    body = {
        "prompt": f"Records:\n\n{text}\nThe same records as JSON:\n\n",
        "max_tokens": N_OUTPUT,
        "temperature": 0,
        "json_schema": schema,
    }
    return SourcedRequest(body, text)


def _prose(chosen: random.Random) -> SourcedRequest:
    text = f"Write a long story about {topic(chosen)}."
    body = {
        "messages": [{"role": "user", "content": text}],
        "max_tokens": N_OUTPUT,
        # Spelled out, because servers have different defaults.
        "temperature": 1.0,
        "top_k": 40,
        "top_p": 0.95,
        "min_p": 0.0,
        "seed": chosen.randrange(2**31),
        "ignore_eos": True,
    }
    return SourcedRequest(body, text)


def _workload(name: str, summary: str, make: Callable[[random.Random], SourcedRequest]) -> Workload:
    async def measure(endpoint: Endpoint, options: Options) -> WorkloadResult:
        measured = WorkloadResult({}, {"n_output": N_OUTPUT, "streams": list(options.streams or STREAMS)})
        for n_streams in options.streams or STREAMS:
            wishes = [make(random.Random(f"{options.seed}/{name} {n_streams} {index}")) for index in range(n_streams)]
            measured.metrics |= await _level(endpoint, f"c{n_streams}", wishes)
        return measured

    headline = ("c*_gain_ratio", "c*_acceptance_ratio", "c*_tokens_per_s", "c*_repeated_ratio")
    return define(name, summary, headline, measure)


async def _level(endpoint: Endpoint, group: str, wishes: Sequence[SourcedRequest]) -> Metrics:
    """All wishes at once, as often as the target can do without drafts and with them."""
    short = {"max_tokens": N_WARM_UP}
    await asyncio.gather(*(endpoint.ask({**wish.body, **short}, group=f"{group}_warm-up") for wish in wishes))
    drafting: list[list[StreamRecord]] = []
    plain: list[list[StreamRecord]] = []
    for drafts in DRAFTING if endpoint.target.can_switch else (True,):
        name, field = (group, {}) if drafts else (f"{group}_plain", {"speculation": False})
        answers = await asyncio.gather(*(endpoint.ask({**wish.body, **field}, group=name) for wish in wishes))
        (drafting if drafts else plain).append(answers)
    if not all(record.is_complete for answers in drafting + plain for record in answers):
        return {}
    metrics = _rates(group, drafting) | _drafts(group, drafting)
    texts = [(wish.source, record.text) for wish, record in zip(wishes, drafting[0], strict=True)]
    metrics[f"{group}_repeated_ratio"] = sum(repeated(*pair) for pair in texts) / len(texts)
    if plain:
        metrics |= _rates(f"{group}_plain", plain)
        metrics[f"{group}_gain_ratio"] = metrics[f"{group}_tokens_per_s"] / metrics[f"{group}_plain_tokens_per_s"]
        same = [one.text == other.text for one, other in zip(drafting[0], plain[0], strict=True)]
        metrics[f"{group}_same_text_ratio"] = sum(same) / len(same)
    return metrics


def _rates(group: str, runs: Sequence[Sequence[StreamRecord]]) -> Metrics:
    """Of all streams together from the sending to the last text, and of the median stream after its first text."""
    n_tokens = sum(record.n_output for answers in runs for record in answers)
    metrics = {f"{group}_tokens_per_s": n_tokens / sum(wall_s(answers) for answers in runs)}
    tpots = [record.tpot_s for answers in runs for record in answers]
    each = [1 / tpot for tpot in tpots if tpot]
    return metrics | ({f"{group}_request_p50_tokens_per_s": percentile(each, 50)} if each else {})


def _drafts(group: str, runs: Sequence[Sequence[StreamRecord]]) -> Metrics:
    """How much of what was drafted is part of the answers, and how much of the answers was drafted."""
    answers = [record for each in runs for record in each]
    n_drafted = sum(record.n_drafted for record in answers)
    n_accepted = sum(record.n_accepted for record in answers)
    metrics: Metrics = {f"{group}_drafted_share": n_accepted / sum(record.n_output for record in answers)}
    return metrics | ({f"{group}_acceptance_ratio": n_accepted / n_drafted} if n_drafted else {})


def repeated(source: str, answer: str) -> float:
    """The share of the answer's words and marks that follow the three before them as they did the last time, in the
    source or in the answer: what is to be had by looking back."""
    before, after = _words(source), _words(answer)
    followers: dict[tuple[str, ...], str] = {}
    n_repeated = 0
    words = before + after
    for at in range(N_CONTEXT_WORDS, len(words)):
        context = tuple(words[at - N_CONTEXT_WORDS : at])
        n_repeated += at >= len(before) and followers.get(context) == words[at]
        followers[context] = words[at]
    return n_repeated / len(after) if after else 0.0


def _words(text: str) -> list[str]:
    return re.findall(r"[A-Za-z]+|[0-9]|\s+|.", text)


EDIT = _workload("edit", "a Python file with one name changed: with and without drafts", _edit)
LIST = _workload("list", "a list again: with and without drafts", _list)
JSON = _workload("json", "records as JSON, in the form of a schema: with and without drafts", _json)
PROSE = _workload("prose", "stories at temperature 1: with and without drafts, which must cost nothing", _prose)
