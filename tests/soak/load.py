"""What clients do for an hour: streams of every API, several answers at once, schemas, cancels, loads, pulls.

Every client is a thread. What it asks for is drawn at random; what it must get was computed before anything was killed.
"""

from __future__ import annotations

import itertools
import json
import random
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import httpx2

from tests.daemon import Daemon

PROMPTS = (
    "Tell me a story about a fox.", "Count from one to twenty.", "What is 3 + 4?", "Once upon a time there was a girl",
    "Repeat after me: tomato, river, lamp.", "A letter to a friend who moved far away, with all that happened since:",
)  # fmt: skip
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 20}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
# The longest answer. A fake step lasts some milliseconds, so that kills meet answers under way.
N_TOKENS = 240


@dataclass
class Books:
    """What was asked, and how it ended. `lost` and `wrong` say what should not have been."""

    ended: Counter[str] = field(default_factory=Counter)
    lost: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def ended_well(self, what: str) -> None:
        with self._lock:
            self.ended[what] += 1

    def ended_badly(self, what: str, why: str) -> None:
        with self._lock:
            self.lost.append(f"{what}: {why}")

    def differs(self, what: str, got: str, wanted: str) -> None:
        at = next((at for at, pair in enumerate(zip(got, wanted, strict=False)) if pair[0] != pair[1]), -1)
        with self._lock:
            self.wrong.append(f"{what}: {len(got)} instead of {len(wanted)} characters, first difference at {at}")


class Lost(Exception):
    """An answer that did not come to its end."""


Ask = Callable[[httpx2.Client, str, int], str]


def openai_chat(http: httpx2.Client, prompt: str, seed: int) -> str:
    body = {
        "model": "tiny", "messages": [{"role": "user", "content": prompt}], "max_tokens": N_TOKENS, "ignore_eos": True,
        "stream": True, "stream_options": {"include_usage": True}, **_sampling(seed),
    }  # fmt: skip
    text, usage, is_done = "", None, False
    for event in _events(http, "/v1/chat/completions", body):
        if event == "[DONE]":
            is_done = True
            continue
        chunk = _parsed(event)
        usage = chunk.get("usage") or usage
        text += "".join(choice["delta"].get("content") or "" for choice in chunk["choices"])
    if not is_done or usage is None or usage["completion_tokens"] != N_TOKENS:
        raise Lost(f"done {is_done}, usage {usage}")
    return text


def openai_several(http: httpx2.Client, prompt: str, seed: int) -> str:
    body = {
        "model": "tiny", "prompt": prompt, "max_tokens": N_TOKENS // 2, "ignore_eos": True, "stream": True, "n": 3,
        **_sampling(seed or 1),
    }  # fmt: skip
    texts = [""] * 3
    finished = set()
    for event in _events(http, "/v1/completions", body):
        if event == "[DONE]":
            continue
        for choice in _parsed(event)["choices"]:
            texts[choice["index"]] += choice["text"]
            if choice["finish_reason"]:
                finished.add(choice["index"])
    if finished != {0, 1, 2}:
        raise Lost(f"of three answers these came to an end: {sorted(finished)}")
    return "\0".join(texts)


def anthropic(http: httpx2.Client, prompt: str, seed: int) -> str:
    body = {
        "model": "tiny", "messages": [{"role": "user", "content": prompt}], "max_tokens": N_TOKENS, "stream": True,
        "temperature": 0,
    }  # fmt: skip
    text, is_done = "", False
    for event in _events(http, "/v1/messages", body):
        chunk = _parsed(event)
        text += chunk.get("delta", {}).get("text", "")
        is_done = is_done or chunk["type"] == "message_stop"
    if not is_done:
        raise Lost("no message_stop")
    return text


def ollama(http: httpx2.Client, prompt: str, seed: int) -> str:
    options = {"num_predict": N_TOKENS, "seed": seed, "temperature": 0.8 if seed else 0, "repeat_penalty": 1.1}
    body = {"model": "tiny", "prompt": prompt, "options": options, "raw": True}
    text, last = "", {}
    with http.stream("POST", "/api/generate", json=body) as response:
        _check(response)
        for line in response.iter_lines():
            last = _parsed(line)
            text += last.get("response", "")
    if not last.get("done"):
        raise Lost("the last line is not done")
    return text


def schema(http: httpx2.Client, prompt: str, seed: int) -> str:
    body = {
        "model": "tiny", "messages": [{"role": "user", "content": prompt}], "max_tokens": N_TOKENS, **_sampling(seed),
        "response_format": {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA}},
    }  # fmt: skip
    answer = http.post("/v1/chat/completions", json=body)
    _check(answer)
    choice = answer.json()["choices"][0]
    if choice["finish_reason"] == "stop":
        json.loads(choice["message"]["content"])
    return str(choice["message"]["content"])


ASKS: tuple[Ask, ...] = (openai_chat, openai_several, anthropic, ollama, schema)
SEEDS = (0, 7)


def wanted(daemon: Daemon) -> dict[tuple[str, str, int], str]:
    """Every answer that will be asked for, while nothing disturbs: by API, prompt and seed."""
    keys = list(itertools.product(ASKS, PROMPTS, SEEDS))
    with _client(daemon) as http, ThreadPoolExecutor(4) as pool:
        texts = pool.map(lambda key: key[0](http, key[1], key[2]), keys)
        return {(ask.__name__, prompt, seed): text for (ask, prompt, seed), text in zip(keys, texts, strict=True)}


def client(
    daemon: Daemon, books: Books, answers: dict[tuple[str, str, int], str], seed: int, stop: threading.Event
) -> None:
    """Asks until `stop`: mostly for whole answers, which are compared; one in five is given up half-way."""
    drawn = random.Random(seed)
    with _client(daemon) as http:
        while not stop.is_set():
            ask, prompt, ask_seed = drawn.choice(ASKS), drawn.choice(PROMPTS), drawn.choice(SEEDS)
            what = f"{ask.__name__}({prompt[:20]!r}, {ask_seed})"
            try:
                if drawn.random() < 0.2:
                    _give_up(http, prompt, drawn.randrange(1, 40))
                    books.ended_well("given up")
                    continue
                got = ask(http, prompt, ask_seed)
            except (Lost, httpx2.HTTPError, KeyError, ValueError) as error:
                books.ended_badly(what, repr(error)[:300])
                continue
            books.ended_well(ask.__name__)
            if got != answers[ask.__name__, prompt, ask_seed]:
                books.differs(what, got, answers[ask.__name__, prompt, ask_seed])


def coming_and_going(daemon: Daemon, books: Books, other: str, pulled: str, stop: threading.Event) -> None:
    """A second model is loaded, asked and unloaded; a third is pulled, asked and removed."""
    with _client(daemon) as http:
        while not stop.wait(5):
            come_and_go(http, books, other, pulled)


def come_and_go(http: httpx2.Client, books: Books, other: str, pulled: str) -> None:
    """Once."""
    for what, path, body in (
        ("loaded", "/api/generate", {"model": other, "prompt": "x", "options": {"num_predict": 5}}),
        ("unloaded", "/api/generate", {"model": other, "keep_alive": 0}),
        ("pulled", "/api/pull", {"model": pulled}),
        ("asked of the pulled one", "/api/generate", {"model": pulled, "prompt": "x", "keep_alive": 0}),
        ("removed", "/api/delete", {"model": pulled}),
    ):
        method = "DELETE" if path == "/api/delete" else "POST"
        answer = http.request(method, path, json=body | {"stream": False})
        if answer.status_code == 200:
            books.ended_well(what)
        else:
            books.ended_badly(what, answer.text[:300])


def _give_up(http: httpx2.Client, prompt: str, n_lines: int) -> None:
    body = {"model": "tiny", "prompt": prompt, "max_tokens": N_TOKENS, "ignore_eos": True, "stream": True}
    with http.stream("POST", "/v1/completions", json=body) as response:
        _check(response)
        for number, _ in enumerate(response.iter_lines()):
            if number == n_lines:
                return


def _client(daemon: Daemon) -> httpx2.Client:
    return httpx2.Client(base_url=daemon.url, timeout=300, trust_env=False)


def _sampling(seed: int) -> dict[str, Any]:
    return {"temperature": 0.9, "top_p": 0.95, "seed": seed} if seed else {"temperature": 0}


def _events(http: httpx2.Client, path: str, body: dict[str, Any]) -> Iterator[str]:
    with http.stream("POST", path, json=body) as response:
        _check(response)
        for line in response.iter_lines():
            if line.startswith("data: "):
                yield line.removeprefix("data: ")


def _parsed(text: str) -> dict[str, Any]:
    chunk: dict[str, Any] = json.loads(text)
    if chunk.get("error"):
        raise Lost(str(chunk["error"])[:300])
    return chunk


def _check(response: httpx2.Response) -> None:
    if response.status_code != 200:
        raise Lost(f"{response.status_code}: {response.read().decode(errors='replace')[:300]}")
