"""Is every answer the one that its request gets alone? Streams at once on a device, round after round.

    python -m tests.devices.rounds --rounds 250                    two RPC devices on loopback, built when needed
    python -m tests.devices.rounds --backend libggml-vulkan.so     a backend's library beside the installed build
    python -m tests.devices.rounds --built                         the installed build's own devices
    python -m tests.devices.rounds --stages 1                      as llama.cpp would have it: the control

Requests are greedy or take one of a few likeliest tokens, because only such are sampled on the device. It prints how
many answers differ, and where the first of them do. Batches of other shapes round otherwise: where a greedy answer goes
on with a token that is as likely as the best one but for `CLOSE`, that is said, too, and no difference.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import sys
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.daemon import Daemon, running_daemon
from tests.devices import rpc

SYSTEM = "You tell short stories to small children who like animals and the sea. Keep them simple and kind."
TOPICS = ("a cat", "the sea", "a red boat", "two friends", "a lost dog", "the moon", "a small troll", "the rain")
# Of log-probabilities. Another stream's token is off by some units.
CLOSE = 0.01
MANNERS: tuple[Mapping[str, Any], ...] = ({"temperature": 0}, {"temperature": 0.9, "top_k": 40, "seed": 7})


def ask(daemon: Daemon, topic: int, n_tokens: int, manner: Mapping[str, Any], **more: Any) -> str:
    """One answer; every topic's has another length, so that streams come and go."""
    body = {
        "model": "tiny",
        "messages": [
            {"role": "system", "content": SYSTEM},
            {"role": "user", "content": f"Tell me a story about {TOPICS[topic]}."},
        ],
        "max_tokens": n_tokens + 5 * topic,
        **manner,
        **more,
    }
    response = daemon.http.post("/v1/chat/completions", json=body, timeout=900)
    if response.status_code != 200:
        return f"{response.status_code} {response.text}"
    choice = response.json()["choices"][0]
    if "logprobs" in more:
        return json.dumps(choice["logprobs"]["content"])
    text: str = choice["message"]["content"]
    return text


def is_close_call(daemon: Daemon, text: str, topic: int, n_tokens: int, **more: Any) -> bool:
    """Whether a greedy answer leaves the one that its request gets alone where two tokens are as good as equal."""
    passed = ""
    for token in json.loads(ask(daemon, topic, n_tokens, MANNERS[0], logprobs=True, top_logprobs=5, **more)):
        if not text.startswith(passed + token["token"]):
            others = [each for each in token["top_logprobs"] if text.startswith(passed + each["token"])]
            return any(token["logprob"] - each["logprob"] < CLOSE for each in others)
        passed += token["token"]
    return False


@dataclass
class Outcome:
    """`n_answers` compared, how many close calls went the other way, and a line for each that was another one."""

    n_answers: int = 0
    n_close_calls: int = 0
    wrong: list[str] = field(default_factory=list)


def run(daemon: Daemon, *, n_rounds: int, n_streams: int, n_tokens: int = 24, seed: int = 1, **more: Any) -> Outcome:
    """Every request alone, twice so that it is in the cache; then rounds of some of them at once."""
    chance, outcome = random.Random(seed), Outcome()
    kinds = [(topic, manner) for topic in range(len(TOPICS)) for manner in range(len(MANNERS))]
    alone = {}
    for kind in (*kinds, *kinds):
        alone[kind] = ask(daemon, kind[0], n_tokens, MANNERS[kind[1]], **more)
    with ThreadPoolExecutor(n_streams) as pool:
        for number in range(n_rounds):
            chosen = chance.sample(kinds, n_streams)

            def answer(kind: tuple[int, int], delay_s: float) -> str:
                time.sleep(delay_s)
                return ask(daemon, kind[0], n_tokens, MANNERS[kind[1]], **more)

            delays_s = [chance.random() * 0.1 for _ in chosen]
            for kind, text in zip(chosen, pool.map(answer, chosen, delays_s), strict=True):
                outcome.n_answers += 1
                if text == alone[kind]:
                    continue
                if MANNERS[kind[1]] is MANNERS[0] and is_close_call(daemon, text, kind[0], n_tokens, **more):
                    outcome.n_close_calls += 1
                else:
                    outcome.wrong.append(f"round {number}, {TOPICS[kind[0]]}: {text!r} instead of {alone[kind]!r}")
    return outcome


@contextlib.contextmanager
def _environment(backend: Path | None, *, is_built: bool) -> Iterator[dict[str, str]]:
    if is_built:
        folders = [str(rpc.SITE), os.environ.get("PYTHONPATH")]
        yield {"PYTHONPATH": os.pathsep.join(folder for folder in folders if folder)}
    elif backend is None:
        with rpc.devices(2) as environment:
            yield environment
    else:
        with rpc.beside_installed(backend) as environment:
            yield environment | {"LOCALRUN_TEST_BACKEND": str(backend.resolve())}


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.devices.rounds", description=__doc__)
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--seed", type=int, default=1)
    devices = parser.add_mutually_exclusive_group()
    devices.add_argument("--backend", type=Path)
    devices.add_argument("--built", action="store_true")
    parser.add_argument("--speculation", default="on", choices=("on", "off"))
    parser.add_argument("--stages", type=int, choices=(1, 2), default=2)
    given = parser.parse_args(arguments)
    with _environment(given.backend, is_built=given.built) as environment:
        environment |= {"LOCALRUN_TEST_STAGES": str(given.stages), "LOCALRUN_SPECULATION": given.speculation}
        with running_daemon("--slots", str(given.streams), fake=False, **environment) as daemon:
            outcome = run(
                daemon, n_rounds=given.rounds, n_streams=given.streams, n_tokens=given.tokens, seed=given.seed
            )
            deaths = daemon.log.count("engine_died") + daemon.log.count(" died")
    print("\n".join(outcome.wrong[:5]))
    print(f"{outcome.n_close_calls} answers went another way where two tokens are as good as equal")
    print(f"{len(outcome.wrong)} of {outcome.n_answers} answers differ; {deaths} lines of the log speak of deaths")
    return bool(outcome.wrong)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
