"""`echo` with `logprobs`: what evaluations read, with real weights. The numbers are held to bare calls in
`tests/engine/native/test_scores.py`."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.daemon import Daemon, running_daemon

PROMPT = "Once upon a time there was a fox who lived beside a slow river. " * 6


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    with running_daemon("--speculation", "off", "--kv-cells", "8192", fake=False) as running:
        yield running


def scored(daemon: Daemon, prompt: Any, **fields: Any) -> dict[str, Any]:
    body = {"model": "tiny", "prompt": prompt, "echo": True, "logprobs": 1, "max_tokens": 0, "temperature": 0} | fields
    answer = daemon.post("/v1/completions", body)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def ids_of(daemon: Daemon, text: str) -> list[int]:
    return list(daemon.post("/tokenize", model="tiny", content=text, add_special=True).json()["tokens"])


def test_a_text_and_its_ids_are_the_same_prompt(daemon: Daemon) -> None:
    by_text, by_ids = scored(daemon, PROMPT), scored(daemon, ids_of(daemon, PROMPT))
    assert by_text["choices"] == by_ids["choices"]
    (choice,) = by_text["choices"]
    logprobs, n_prompt = choice["logprobs"], by_text["usage"]["prompt_tokens"]
    assert choice["text"] == PROMPT == "".join(logprobs["tokens"])
    assert {len(logprobs[name]) for name in logprobs} == {n_prompt}
    assert logprobs["token_logprobs"][0] is None
    assert logprobs["top_logprobs"][0] is None
    assert all(logprob <= 0 for logprob in logprobs["token_logprobs"][1:])
    assert [choice["text"][at] for at in logprobs["text_offset"]] == [token[0] for token in logprobs["tokens"]]
    assert by_text["usage"]["completion_tokens"] == 0
    assert by_text["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


def test_the_answer_comes_after_the_prompt(daemon: Daemon) -> None:
    plain = daemon.post("/v1/completions", model="tiny", prompt=PROMPT, max_tokens=5, temperature=0, logprobs=1).json()
    (choice,) = scored(daemon, PROMPT, max_tokens=5)["choices"]
    (expected,) = plain["choices"]
    assert choice["text"] == PROMPT + expected["text"]
    assert choice["logprobs"]["tokens"][-5:] == expected["logprobs"]["tokens"]
    assert choice["logprobs"]["token_logprobs"][-5:] == pytest.approx(expected["logprobs"]["token_logprobs"], abs=0.02)
    # What was drawn greedily and is then a prompt has the same probability.
    again = scored(daemon, ids_of(daemon, choice["text"]))["choices"][0]["logprobs"]
    assert again["token_logprobs"][1:] == pytest.approx(choice["logprobs"]["token_logprobs"][1:], abs=0.02)


def test_several_prompts_and_answers(daemon: Daemon) -> None:
    prompts = [ids_of(daemon, PROMPT[:length]) for length in (20, 90, 200)]
    together = scored(daemon, prompts, max_tokens=1, n=2)["choices"]
    assert [choice["index"] for choice in together] == list(range(6))
    for at, prompt in enumerate(prompts):
        alone = scored(daemon, prompt, max_tokens=1)["choices"][0]["logprobs"]
        for choice in together[2 * at : 2 * at + 2]:
            assert choice["logprobs"]["tokens"] == alone["tokens"]
            assert choice["logprobs"]["token_logprobs"][1:] == pytest.approx(alone["token_logprobs"][1:], abs=0.02)


def test_what_ends_an_answer_has_a_score_too(daemon: Daemon) -> None:
    """Evaluations ask for one token and leave the last score out, for it is not the prompt's."""
    messages = [{"role": "user", "content": "Hi"}]
    prompt = daemon.post("/apply-template", model="tiny", messages=messages).json()["prompt"]
    said = daemon.post("/completion", model="tiny", prompt=prompt, temperature=0, return_tokens=True).json()
    assert said["stop_type"] == "eos"
    whole = ids_of(daemon, prompt) + said["tokens"]
    (choice,) = scored(daemon, whole, max_tokens=1)["choices"]
    assert (choice["finish_reason"], choice["text"]) == ("stop", prompt + said["content"])
    assert choice["logprobs"]["tokens"][len(whole) :] == ["<|im_end|>"]
    *_, last = zip(choice["logprobs"]["token_logprobs"], choice["logprobs"]["top_logprobs"], strict=True)
    assert last[0] == max(last[1].values())


def test_echo_without_logprobs_takes_ids_too(daemon: Daemon) -> None:
    body = {"model": "tiny", "prompt": ids_of(daemon, "Once upon"), "echo": True, "max_tokens": 2}
    assert daemon.post("/v1/completions", body).json()["choices"][0]["text"].startswith("Once upon")


@pytest.mark.parametrize(
    ("fields", "named"), [({"stream": True}, "echo"), ({"echo": False}, "max_tokens"), ({"suffix": "x"}, "echo")]
)
def test_what_cannot_be_is_refused_by_its_name(daemon: Daemon, fields: dict[str, Any], named: str) -> None:
    body = {"model": "tiny", "prompt": PROMPT, "echo": True, "logprobs": 1, "max_tokens": 0} | fields
    answer = daemon.post("/v1/completions", body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == named


def test_an_engine_that_dies_in_the_middle_changes_nothing(daemon: Daemon) -> None:
    prompt = ids_of(daemon, PROMPT * 6)
    expected = scored(daemon, prompt)["choices"][0]["logprobs"]
    answers: list[dict[str, Any]] = []
    asking = threading.Thread(target=lambda: answers.append(scored(daemon, prompt)))
    asking.start()
    while not (rows := [row for row in _rows(daemon) if row["computed_tokens"] > 100]):
        assert asking.is_alive(), "it was over before anything was computed"
        time.sleep(0.005)
    assert rows
    (engine,) = daemon.http.get("/localrun/v1/snapshot").json()["engines"]
    os.kill(engine["pid"], signal.SIGKILL)
    asking.join()
    assert daemon.log.count("resumes after") == 1
    logprobs = answers[0]["choices"][0]["logprobs"]
    assert logprobs["tokens"] == expected["tokens"]
    assert logprobs["token_logprobs"][1:] == pytest.approx(expected["token_logprobs"][1:], abs=0.02)


def _rows(daemon: Daemon) -> list[dict[str, Any]]:
    rows = daemon.http.get("/localrun/v1/requests").json()["requests"]
    return [row for row in rows if row["state"] == "prefill"]
