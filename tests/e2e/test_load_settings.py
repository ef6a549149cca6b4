"""Load settings on real engines: what a request, a Modelfile and the settings file ask for is what the engine has."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.daemon import Daemon, running_daemon

SETTINGS = """
[models."from-file*"]
kv_type = "q4_0"
slots = 3
"""


@pytest.fixture(scope="module")
def daemon(other_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """Two slots that share 1,024 cells; the model was trained for 4,096 tokens."""
    home = tmp_path_factory.mktemp("home")
    (home / "config").mkdir()
    (home / "config" / "localrun.toml").write_text(SETTINGS, encoding="utf-8")
    (home / "models").mkdir()
    (home / "models" / "other.gguf").symlink_to(other_model)
    environment = {"LOCALRUN_HOME": str(home), "LOCALRUN_MODELS": str(home / "models")}
    with running_daemon("--slots", "2", "--kv-cells", "1024", fake=False, **environment) as running:
        yield running


@pytest.fixture(autouse=True)
def unloaded(daemon: Daemon) -> None:
    for row in engines(daemon):
        daemon.post("/api/generate", model=row["model"], keep_alive=0)


def engines(daemon: Daemon) -> list[dict[str, Any]]:
    rows = daemon.http.get("/localrun/v1/snapshot").json()["engines"]
    return [row for row in rows if row["state"] == "ready"]


def pids(daemon: Daemon) -> set[int]:
    return {row["pid"] for row in engines(daemon)}


def generate(daemon: Daemon, prompt: str = "Once", model: str = "other", **options: Any) -> dict[str, Any]:
    answer = daemon.post(
        "/api/generate", model=model, prompt=prompt, raw=True, stream=False, logprobs=True, truncate=False,
        options={"temperature": 0, "num_predict": 4} | options,
    )  # fmt: skip
    found: dict[str, Any] = answer.json()
    assert answer.status_code == 200, found
    return found


def test_one_engine_serves_small_contexts_and_a_larger_one_all(daemon: Daemon) -> None:
    generate(daemon)
    (first,) = pids(daemon)
    for num_ctx in (16, 700, 1024):
        generate(daemon, num_ctx=num_ctx)
        assert pids(daemon) == {first}
    # More than a slot's share of the cells, and than all that there were.
    long = generate(daemon, "a long prompt " * 500, num_ctx=3000)
    assert long["prompt_eval_count"] > 1024
    (second,) = pids(daemon) - {first}
    for num_ctx in (16, 2000, 3000):
        generate(daemon, num_ctx=num_ctx)
    assert engines(daemon)[-1]["pid"] == second
    assert engines(daemon)[-1]["load"] == {"num_ctx": 3000}


def test_two_clients_with_different_contexts_cost_two_loads_and_no_answer(daemon: Daemon) -> None:
    n_loads_before = daemon.log.count("loaded other in")

    def client(num_ctx: int) -> list[int]:
        return [generate(daemon, num_ctx=num_ctx, num_predict=100)["eval_count"] for _ in range(6)]

    with ThreadPoolExecutor(2) as pool:
        counts = list(pool.map(client, (500, 3000)))
    assert all(count > 0 for counts_of_one in counts for count in counts_of_one)
    assert daemon.log.count("loaded other in") - n_loads_before <= 2


def test_a_type_and_a_rope_of_its_own(daemon: Daemon) -> None:
    plain = generate(daemon)
    small = generate(daemon, kv_type="q8_0")
    other = generate(daemon, rope_frequency_base=1_000_000)
    again = generate(daemon)
    assert sorted(row["kv_type"] for row in engines(daemon)) == ["f16", "f16", "q8_0"]
    assert plain["logprobs"] == again["logprobs"]
    assert plain["logprobs"] != other["logprobs"]
    assert small["eval_count"] == 4


def test_a_context_beyond_the_trained_one(daemon: Daemon) -> None:
    prompt = "a long prompt " * 1500
    answer = daemon.post("/api/generate", model="other", prompt=prompt, raw=True, stream=False, truncate=False,
                         options={"num_predict": 4, "num_ctx": 8000})  # fmt: skip
    assert answer.status_code == 400
    assert "4096" in answer.json()["error"]
    assert generate(daemon, prompt, num_ctx=8000, rope_frequency_scale=0.5)["prompt_eval_count"] > 4096


MODELFILE = """
FROM other
PARAMETER num_ctx 8192
PARAMETER kv_type q8_0
PARAMETER slots 3
PARAMETER num_thread 1
PARAMETER rope_frequency_scale 0.5
PARAMETER rope_scaling yarn
"""


def create(daemon: Daemon, name: str, text: str) -> Any:
    return daemon.post("/api/create", model=name, modelfile=text, stream=False)


def test_a_modelfile_says_how_its_model_is_loaded(daemon: Daemon) -> None:
    assert create(daemon, "long", MODELFILE).status_code == 200
    generate(daemon, model="long")
    (row,) = engines(daemon)
    assert (row["slots"], row["kv_type"], row["n_ctx"], row["kv_cells"] >= 8192) == (3, "q8_0", 8192, True)
    shown = daemon.post("/api/show", model="long").json()
    assert 'kv_type                        "q8_0"' in shown["parameters"]
    assert shown["localrun"]["load"] == row["load"]
    assert create(daemon, "again", shown["modelfile"]).status_code == 200
    assert daemon.post("/api/show", model="again").json()["parameters"] == shown["parameters"]


def test_the_fit_is_that_of_the_settings(daemon: Daemon) -> None:
    assert create(daemon, "long", MODELFILE).status_code == 200
    plain, long = (daemon.http.get("/localrun/v1/fit", params={"model": name}).json() for name in ("other", "long"))
    assert (long["context"], long["kv_type"], long["slots"]) == (8192, "q8_0", 3)
    assert (plain["context"], plain["kv_type"], plain["slots"]) == (1024, "f16", 2)
    assert long["load"]["num_ctx"] == 8192


def test_the_settings_file_says_how_models_are_loaded(daemon: Daemon) -> None:
    assert create(daemon, "from-file", "FROM other").status_code == 200
    generate(daemon, model="from-file")
    (row,) = engines(daemon)
    assert (row["kv_type"], row["slots"]) == ("q4_0", 3)
    generate(daemon, model="other")
    assert pids(daemon) == {row["pid"]}, "it serves the other name as well"


@pytest.mark.parametrize(
    ("parameter", "parts"),
    [
        ("kv_type q5_0", ("line 2", "kv_type", "q8_0")),
        ("slots 300", ("line 2", "slots", "256")),
        ("rope_frequency_scale 2", ("line 2", "rope_frequency_scale", "1")),
    ],
)
def test_what_cannot_be_is_refused_when_the_model_is_created(
    daemon: Daemon, parameter: str, parts: tuple[str, ...]
) -> None:
    answer = create(daemon, "wrong", f"FROM other\nPARAMETER {parameter}\n")
    assert answer.status_code == 400
    assert all(part in answer.json()["error"] for part in parts), answer.json()


def test_a_context_beyond_the_trained_one_is_cut_and_said(daemon: Daemon) -> None:
    assert create(daemon, "wide", "FROM other\nPARAMETER num_ctx 8192\n").status_code == 200
    (note,) = daemon.post("/api/show", model="wide").json()["localrun"]["notes"]
    assert all(part in note for part in ("num_ctx 8192", "4096 is used", "rope_frequency_scale 0.5"))


def test_parameters_of_the_api(daemon: Daemon) -> None:
    parameters = {"num_ctx": 2048.0, "kv_type": "q8_0", "num_gpu": 0}
    answer = daemon.post("/api/create", {"model": "by-api", "from": "other", "parameters": parameters, "stream": False})
    assert answer.status_code == 200
    generate(daemon, model="by-api")
    assert engines(daemon)[0]["n_ctx"] >= 2048
    wrong = daemon.post("/api/create", {"model": "x", "from": "other", "parameters": {"kv_type": "f99"}})
    assert "kv_type" in wrong.json()["error"]


@pytest.mark.parametrize(
    "least",
    [
        {"--batch-tokens": "32"},
        {"--batch-tokens": "32", "--slots": "1"},
        {"--batch-tokens": "64", "--slots": "2", "--kv-cells": "512"},
        {"--slots": "1", "--threads": "1"},
    ],
    ids=lambda least: " ".join(f"{name} {value}" for name, value in least.items()),
)
def test_the_least_values_of_settings_work(least: dict[str, str]) -> None:
    """Also a prompt beyond a slot's share, for which the slots' cells become one pool."""
    options = [word for pair in least.items() for word in pair]
    with running_daemon(*options, fake=False) as running:
        body = {"model": "tiny", "prompt": "Once upon a time " * 60, "max_tokens": 4, "temperature": 0}
        with ThreadPoolExecutor(3) as pool:
            answers = list(pool.map(lambda _: running.post("/v1/completions", body), range(3)))
        assert [answer.status_code for answer in answers] == [200] * 3
        assert "killed by" not in running.log
