"""Who asks for what: workloads as TOML, the requests that they make, and sending those to a real daemon.

A workload describes people: kinds of them (`Source`), how long they read before they ask again, what their prompts have
in common, how long prompts and answers are. Sessions come in units of time in which one request arrives, so that one
list of them serves every rate: what differs between two runs is then the machine, and not the dice.

A prompt is a list of parts, (name, tokens); equal names at equal places are equal tokens. The answer to it is the part
that is called like its last one, with ANSWER behind.
"""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import Callable, Sequence
from importlib import resources
from itertools import accumulate
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import msgspec

from localrun.bench.results import Options, StreamRecord, Target
from localrun.bench.streams import CLIENT, Endpoint, PromptForm, arrivals_s, numbers, post_stream
from localrun.config import latency_target_s
from localrun.errors import BadRequest
from localrun.wire import Lane

ANSWER = ".answer"
DEFAULT = "chat"
# The 95th percentile of the normal distribution.
_Z95 = 1.6449
_MOST_TOKENS = 1_000_000
# Each turn repeats those before it.
MOST_TURNS = 1000

Positive = Annotated[float, msgspec.Meta(gt=0, le=1e6)]
NonNegative = Annotated[float, msgspec.Meta(ge=0, le=1e6)]
Part = tuple[str, int]


class Lognormal(msgspec.Struct, frozen=True, tag_field="kind", tag="lognormal", forbid_unknown_fields=True):
    """Most are near the median, a few much larger: 95 of 100 below `p95`, none above `most`."""

    median: Positive
    p95: Positive
    most: Positive = 1e6

    def __post_init__(self) -> None:
        if self.p95 < self.median:
            raise ValueError(f"p95 is {self.p95:g}, below the median, {self.median:g}")

    def draw(self, chance: random.Random) -> float:
        sigma = max(0.0, math.log(self.p95 / self.median) / _Z95)
        return min(self.most, chance.lognormvariate(math.log(self.median), sigma))


class Uniform(msgspec.Struct, frozen=True, tag_field="kind", tag="uniform", forbid_unknown_fields=True):
    """Any number between the two."""

    least: NonNegative
    most: Positive

    def __post_init__(self) -> None:
        if self.least > self.most:
            raise ValueError(f"least is {self.least:g}, above most, {self.most:g}")

    def draw(self, chance: random.Random) -> float:
        return chance.uniform(self.least, self.most)


class Geometric(msgspec.Struct, frozen=True, tag_field="kind", tag="geometric", forbid_unknown_fields=True):
    """1 or more; whoever comes so far goes on with the same probability."""

    mean: Annotated[float, msgspec.Meta(ge=1, le=1000)]

    def draw(self, chance: random.Random) -> float:
        return 1.0 if self.mean == 1 else 1.0 + math.floor(math.log(1 - chance.random()) / math.log(1 - 1 / self.mean))


class Histogram(msgspec.Struct, frozen=True, tag_field="kind", tag="histogram", forbid_unknown_fields=True):
    """Between two neighbouring edges with the weight of that place."""

    edges: tuple[NonNegative, ...]
    weights: tuple[NonNegative, ...]

    def __post_init__(self) -> None:
        if len(self.edges) != len(self.weights) + 1 or list(self.edges) != sorted(self.edges) or not any(self.weights):
            raise ValueError("a histogram has ascending edges, one more than it has weights, which are not all 0")

    def draw(self, chance: random.Random) -> float:
        (at,) = chance.choices(range(len(self.weights)), self.weights)
        return chance.uniform(self.edges[at], self.edges[at + 1])


Amount = NonNegative | Lognormal | Uniform | Geometric | Histogram


class Prefix(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A beginning that prompts have in common: all of a source, or all of a group. Groups are chosen with a probability
    that falls as 1 / rank ** skew."""

    name: str
    tokens: Annotated[int, msgspec.Meta(ge=1, le=_MOST_TOKENS)]
    groups: Annotated[int, msgspec.Meta(ge=1, le=100_000)] = 1
    skew: NonNegative = 0.0

    def draw(self, chance: random.Random) -> Part:
        if self.groups == 1:
            return self.name, self.tokens
        weights = list(accumulate(rank**-self.skew for rank in range(1, self.groups + 1)))
        (group,) = chance.choices(range(self.groups), cum_weights=weights)
        return f"{self.name}/{group}", self.tokens


class Source(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A kind of user, who makes `weight` of the requests. `burstiness` 1 is a Poisson process of sessions. `repeats`
    is how much of an answer is text of its prompt again, token by token: that can be drafted."""

    name: str
    prompt_tokens: Amount
    output_tokens: Amount
    weight: Positive = 1.0
    think_s: Amount = 30.0
    turns: Amount = 1.0
    prefix: tuple[Prefix, ...] = ()
    burstiness: Positive = 1.0
    lane: Lane = Lane.DEFAULT
    latency: str = ""
    repeats: Annotated[float, msgspec.Meta(ge=0, lt=1)] = 0.0


class Limits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What counts as good, for `share` of the requests; the words are those of `localrun bench chat`."""

    ttft_limit_s: Positive = Options.ttft_limit_s
    itl_limit_s: Positive = Options.itl_limit_s
    share: Annotated[float, msgspec.Meta(gt=0, lt=1)] = 0.95


class Turn(NamedTuple):
    """A request, `think_s` after the answer to the one before it. `target_itl_s` None is the engine's own."""

    parts: tuple[Part, ...]
    n_output: int
    think_s: float = 0.0
    client: str = ""
    lane: Lane = Lane.DEFAULT
    target_itl_s: float | None = None
    repeats: float = 0.0

    @property
    def n_prompt(self) -> int:
        return sum(n_tokens for _, n_tokens in self.parts)


class Session(NamedTuple):
    """Turns, the first of which arrives at `at`, in units of time in which one request arrives."""

    at: float
    turns: tuple[Turn, ...]


class Workload(NamedTuple):
    """`sessions(n_requests, seed)` has about so many requests, by time. `think_s` is the mean, None where nobody knows
    who the users are. `own_rate_per_s` is that of a trace."""

    name: str
    summary: str
    limits: Limits
    sessions: Callable[[int, int], list[Session]]
    think_s: float | None
    own_rate_per_s: float | None = None


class WorkloadFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    source: Annotated[tuple[Source, ...], msgspec.Meta(min_length=1)]
    name: str = ""
    summary: str = ""
    promise: Limits = Limits()

    def workload(self, name: str) -> Workload:
        chance = random.Random(0)
        total = sum(source.weight for source in self.source)
        thinking = [source.weight * _mean(source.think_s, chance) for source in self.source]
        return Workload(self.name or name, self.summary, self.promise, self._sessions, sum(thinking) / total)

    def with_burstiness(self, burstiness: float) -> WorkloadFile:
        """The same people, who come in bursts, or evenly."""
        sources = tuple(msgspec.structs.replace(source, burstiness=burstiness) for source in self.source)
        return msgspec.structs.replace(self, source=sources)

    def _sessions(self, n_requests: int, seed: int) -> list[Session]:
        total = sum(source.weight for source in self.source)
        found: list[Session] = []
        for number, source in enumerate(self.source):
            n_turns = _mean(source.turns, random.Random(0))
            times = arrivals_s(
                rate_per_s=source.weight / total / n_turns,
                seconds=float(n_requests),
                burstiness=source.burstiness,
                seed=seed + number,
            )
            chance = random.Random(f"{seed}/{source.name}")
            found += [_session(source, at, f"{source.name}{index}", chance) for index, at in enumerate(times)]
        return sorted(found, key=lambda session: session.at)


def _session(source: Source, at: float, name: str, chance: random.Random) -> Session:
    target_itl_s = latency_target_s(source.latency) if source.latency else None
    parts = [prefix.draw(chance) for prefix in source.prefix]
    turns = []
    for number in range(max(1, min(MOST_TURNS, round(_drawn(source.turns, chance))))):
        parts.append((f"{name}/{number}", _whole(source.prompt_tokens, chance)))
        n_output = _whole(source.output_tokens, chance)
        think_s = _drawn(source.think_s, chance) if number else 0.0
        turns.append(Turn(tuple(parts), n_output, think_s, name, source.lane, target_itl_s, source.repeats))
        parts.append((f"{name}/{number}{ANSWER}", n_output))
    return Session(at, tuple(turns))


def _drawn(amount: Amount, chance: random.Random) -> float:
    return float(amount) if isinstance(amount, int | float) else amount.draw(chance)


def _whole(amount: Amount, chance: random.Random) -> int:
    return max(1, min(_MOST_TOKENS, round(_drawn(amount, chance))))


def _mean(amount: Amount, chance: random.Random) -> float:
    if isinstance(amount, int | float):
        return float(amount)
    return sum(amount.draw(chance) for _ in range(2000)) / 2000


def built_in_files() -> dict[str, WorkloadFile]:
    """Those that come with it, by name."""
    text = resources.files("localrun.bench").joinpath("arrivals.toml").read_bytes()
    return msgspec.toml.decode(text, type=dict[str, WorkloadFile])


def built_in() -> dict[str, Workload]:
    """The same, ready to be asked for sessions."""
    return {name: file.workload(name) for name, file in built_in_files().items()}


def of_toml(path: Path) -> Workload:
    """Raises BadRequest, which names the file and the field."""
    try:
        return _checked(msgspec.toml.decode(path.read_bytes(), type=WorkloadFile)).workload(path.stem)
    except (msgspec.DecodeError, ValueError) as error:  # of TOML, of a field, of a latency
        raise BadRequest(f"{path}: {error}", field="workload") from None


def _checked(file: WorkloadFile) -> WorkloadFile:
    """Raises ValueError for a latency that is none, and for conversations without an end."""
    for source in file.source:
        if _mean(source.turns, random.Random(0)) > MOST_TURNS:
            raise ValueError(f"source {source.name}: turns are at most {MOST_TURNS} of a session")
        if source.latency:
            latency_target_s(source.latency)
    return file


# --- the same requests against a real daemon, through the load generator ---
#
# Answers are as long as in a simulation. A later turn repeats what was asked, but in place of the model's answer it
# says something else of the same length, and so does a simulation of it (`as_sent`). What was said is known afterwards
# (`Sent.texts`), so that a simulation drafts what the daemon drafted.

_SAID = ".said"


def as_sent(sessions: Sequence[Session]) -> list[Session]:
    """The sessions, with answers in prompts that are not the model's own."""
    return [
        session._replace(
            turns=tuple(
                turn._replace(parts=tuple((name.replace(ANSWER, _SAID), n_tokens) for name, n_tokens in turn.parts))
                for turn in session.turns
            )
        )
        for session in sessions
    ]


class Sent(NamedTuple):
    """What came of requests, by when they were to be sent, and with drafts the tokens of all parts and answers."""

    records: list[StreamRecord]
    texts: dict[str, list[int]]


def send(
    target: Target, sessions: Sequence[Session], rate_per_s: float, seed: int, *, speculates: bool = False
) -> Sent:
    """Let them arrive, and wait for all answers. Raises DaemonUnreachable, and LocalrunError for a target that refuses
    the first small request."""
    return asyncio.run(_send(target, sessions, rate_per_s, seed, speculates=speculates))


async def _send(target: Target, sessions: Sequence[Session], rate_per_s: float, seed: int, *, speculates: bool) -> Sent:
    endpoint = Endpoint(target, Options(seed=seed))
    await endpoint.connect()
    texts = {
        name: numbers(seed, name, n_tokens)
        for session in sessions
        for turn in session.turns
        for name, n_tokens in turn.parts
    }
    start_s = time.perf_counter()

    async def talk(session: Session) -> None:
        at_s = start_s + session.at / rate_per_s
        for turn in session.turns:
            await asyncio.sleep(max(0.0, at_s + turn.think_s - time.perf_counter()))
            prompt = endpoint.wording.prompt([number for name, _ in turn.parts for number in texts[name]])
            body: dict[str, Any] = {"prompt": prompt, "max_tokens": turn.n_output, "temperature": 0, "ignore_eos": True}
            body |= {"lane": turn.lane, "speculation": speculates}
            if turn.target_itl_s:
                body["latency"] = 1000 * turn.target_itl_s
            name = turn.parts[-1][0] + ANSWER
            record = await endpoint.ask(body, group=name, client=turn.client or CLIENT)
            record.intended_at_s = at_s + turn.think_s
            at_s = record.ended_at_s or time.perf_counter()

    await asyncio.gather(*map(talk, sessions))
    records = sorted(endpoint.records, key=lambda record: record.intended_at_s)
    if not speculates or endpoint.wording is PromptForm.TEXT:
        return Sent(records, {})
    known = {name: [int(token) for token in endpoint.wording.prompt(of)] for name, of in texts.items()}
    return Sent(records, known | {record.group: await _tokens(target, record) for record in records})


async def _tokens(target: Target, record: StreamRecord) -> list[int]:
    """Of an answer: as many as it had."""
    read = bytearray()
    body = msgspec.json.encode({"content": record.text, "model": target.model})
    await post_stream(f"{target.base_url}/tokenize", body, lambda data, _now_s: read.extend(data))
    return msgspec.json.decode(bytes(read), type=dict[str, list[int]])["tokens"][: record.n_output]
