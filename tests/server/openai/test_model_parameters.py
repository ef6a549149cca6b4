"""What a model brings of its own (parameters, a system prompt, first messages) counts where a request says nothing."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from localrun.models import builtin
from localrun.models.storage import manifest
from localrun.models.storage.manifest import Manifest, Message, Place, Role, Source, StoredFile
from tests.daemon import Daemon, running_daemon

HELLO = [{"role": "user", "content": "hello"}]
SYSTEM = "You are Ada."


def own(name: str, **fields: Any) -> Manifest:
    path = builtin.model_path()
    file = StoredFile(role=Role.MODEL, place=Place.FILE, size_bytes=path.stat().st_size, path=str(path))
    return Manifest(name=name, files=(file,), created_at=datetime.now(UTC), source=Source(kind="create"), **fields)


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    if not builtin.model_path().is_file():
        pytest.skip("the built-in model's file is not there")
    folder: Path = tmp_path_factory.mktemp("models")
    manifest.write(folder, "short", own("short", parameters={"num_predict": 3, "stop": ["e"], "seed": 1}))
    manifest.write(folder, "ada", own("ada", system=SYSTEM, messages=(Message("user", "a"), Message("assistant", "b"))))
    with running_daemon(LOCALRUN_MODELS=str(folder)) as running:
        yield running


def chat(daemon: Daemon, model: str, **fields: Any) -> dict[str, Any]:
    answer = daemon.post("/v1/chat/completions", {"model": model, "messages": HELLO} | fields)
    assert answer.status_code == 200, answer.text
    parsed: dict[str, Any] = answer.json()
    return parsed


def respond(daemon: Daemon, model: str, **fields: Any) -> dict[str, Any]:
    answer = daemon.post("/v1/responses", {"model": model, "input": "hello", "max_output_tokens": 2} | fields)
    parsed: dict[str, Any] = answer.json()
    return parsed


def test_a_model_s_limits_are_below_the_request_s(daemon: Daemon) -> None:
    fields: dict[str, Any] = {"ignore_eos": True, "stop": ["no such text"]}
    assert chat(daemon, "short", **fields)["usage"]["completion_tokens"] == 3
    assert chat(daemon, "short", **fields, max_tokens=7)["usage"]["completion_tokens"] == 7
    answer = daemon.post("/v1/completions", {"model": "short", "prompt": "x", **fields}).json()
    assert answer["usage"]["completion_tokens"] == 3


def test_a_model_s_stop_strings_and_seed(daemon: Daemon) -> None:
    fields: dict[str, Any] = {"ignore_eos": True, "max_tokens": 200}
    text = chat(daemon, "short", **fields)["choices"][0]["message"]["content"]
    assert "e" not in text
    whole = chat(daemon, "short", **fields, stop=["no such text"])["choices"][0]["message"]["content"]
    assert whole.startswith(text)
    assert whole == chat(daemon, "short", **fields, stop=["no such text"])["choices"][0]["message"]["content"]


def test_a_model_s_system_prompt_and_first_messages(daemon: Daemon) -> None:
    def n_prompt(model: str, *messages: dict[str, str]) -> int:
        return int(chat(daemon, model, messages=[*messages, *HELLO], max_tokens=1)["usage"]["prompt_tokens"])

    first = ({"role": "user", "content": "a"}, {"role": "assistant", "content": "b"})
    system = {"role": "system", "content": SYSTEM}
    assert n_prompt("ada") == n_prompt("tiny", system, *first)
    mine = {"role": "system", "content": "Be brief."}
    assert n_prompt("ada", mine) == n_prompt("tiny", mine, *first)


def test_responses_have_them_too(daemon: Daemon) -> None:
    plain, ada = respond(daemon, "tiny"), respond(daemon, "ada")
    assert ada["usage"]["input_tokens"] > plain["usage"]["input_tokens"] + len(SYSTEM)
    assert (
        respond(daemon, "short", max_output_tokens=None, ignore_eos=True, stop=["no such text"])["usage"][
            "output_tokens"
        ]
        == 3
    )
