"""Every sampling field of `/v1`, by its effect on the built-in model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from localrun.models import builtin
from tests.daemon import Daemon, running_daemon

PROMPT = "Once upon a time"
GREEDY = {"temperature": 0}
WARM = {"temperature": 1.5, "seed": 1}


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    if not builtin.model_path().is_file():
        pytest.skip("the built-in model's file is not there")
    with running_daemon(fake=False) as running:
        yield running


def choice(daemon: Daemon, **fields: Any) -> dict[str, Any]:
    body = {"model": "tiny", "prompt": PROMPT, "max_tokens": 24, "ignore_eos": True} | fields
    answer = daemon.post("/v1/completions", body)
    assert answer.status_code == 200, answer.text
    first: dict[str, Any] = answer.json()["choices"][0]
    return first


def text(daemon: Daemon, **fields: Any) -> str:
    return str(choice(daemon, **fields)["text"])


def test_temperature_and_seed(daemon: Daemon) -> None:
    assert text(daemon, **GREEDY) == text(daemon, **GREEDY)
    assert text(daemon, **WARM) == text(daemon, **WARM)
    assert len({text(daemon, temperature=1.5, seed=seed) for seed in range(4)}) > 1


@pytest.mark.parametrize("fields", [{"top_k": 1}, {"top_p": 0.0001}, {"min_p": 1.0}])
def test_cutting_down_to_the_most_probable_is_greedy(daemon: Daemon, fields: dict[str, Any]) -> None:
    assert text(daemon, **WARM, **fields) == text(daemon, **GREEDY)


@pytest.mark.parametrize(
    "fields",
    [
        {"presence_penalty": 2}, {"frequency_penalty": 2}, {"repeat_penalty": 2.0}, {"repetition_penalty": 2.0},
        {"repeat_penalty": 2.0, "repeat_last_n": -1},
    ],
)  # fmt: skip
def test_penalties_change_what_repeats(daemon: Daemon, fields: dict[str, Any]) -> None:
    common = GREEDY | {"max_tokens": 60}
    assert text(daemon, **common | fields) != text(daemon, **common)
    assert text(daemon, **common | fields | {"repeat_last_n": 0}) == text(daemon, **common), "nothing is looked at"


@pytest.mark.parametrize("fields", [{"typical_p": 0.2}, {"mirostat": 1}, {"mirostat": 2, "mirostat_tau": 0.5}])
def test_other_ways_to_draw(daemon: Daemon, fields: dict[str, Any]) -> None:
    assert len({text(daemon, temperature=1.5, seed=seed) for seed in range(4)}) > 1
    drawn = [text(daemon, temperature=1.5, seed=seed, **fields) for seed in range(4)]
    assert drawn != [text(daemon, temperature=1.5, seed=seed) for seed in range(4)]
    assert drawn[0] == text(daemon, temperature=1.5, seed=0, **fields)


def test_mirostat_s_speed_matters(daemon: Daemon) -> None:
    fast = [text(daemon, temperature=1.5, seed=seed, mirostat=2, mirostat_eta=1.0) for seed in range(4)]
    slow = [text(daemon, temperature=1.5, seed=seed, mirostat=2, mirostat_eta=0.001) for seed in range(4)]
    assert fast != slow


def test_logit_bias_forces_and_bans(daemon: Daemon) -> None:
    forced = {text(daemon, **GREEDY, max_tokens=1, logit_bias={str(token): 100}) for token in range(300, 310)}
    assert len(forced) > 5, "each of them gives its own token"
    one = text(daemon, **GREEDY, max_tokens=1, logit_bias={"305": 100})
    assert text(daemon, **GREEDY, max_tokens=3, logit_bias={"305": 100}) == one * 3
    both = {"305": 100, "306": 50}
    assert text(daemon, **GREEDY, max_tokens=1, logit_bias=both) == one
    other = text(daemon, **GREEDY, max_tokens=1, logit_bias=both | {"305": -100})
    assert other == text(daemon, **GREEDY, max_tokens=1, logit_bias={"306": 100}) != one


def test_stop_and_max_tokens(daemon: Daemon) -> None:
    whole = text(daemon, **GREEDY)
    stopped = choice(daemon, **GREEDY, stop=[whole[10:14]])
    assert (stopped["text"], stopped["finish_reason"]) == (whole[: whole.index(whole[10:14])], "stop")
    short = choice(daemon, **GREEDY, max_tokens=3, logprobs=0)
    assert (len(short["logprobs"]["tokens"]), short["finish_reason"]) == (3, "length")


def test_token_ids_are_the_prompt_that_they_spell(daemon: Daemon) -> None:
    body = {"model": "tiny", "prompt": PROMPT, "max_tokens": 8, **GREEDY}
    usage = daemon.post("/v1/completions", body).json()["usage"]
    ids = daemon.post("/v1/completions", body | {"prompt": [300] * usage["prompt_tokens"]}).json()["usage"]
    assert ids["prompt_tokens"] == usage["prompt_tokens"]
