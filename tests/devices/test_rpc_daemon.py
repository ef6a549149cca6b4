"""A daemon whose models lie on two devices: each answer is the one that its request gets alone.

The devices are llama.cpp's RPC servers on loopback: another memory, other buffers and, where localrun is concerned, the
paths of GPUs. Without a compiler or llama.cpp's source there are none, and these tests are skipped.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from localrun.models import builtin
from tests.daemon import Daemon, running_daemon
from tests.depth import DEPTH
from tests.devices import rounds, rpc
from tests.lora_file import write_lora

pytestmark = pytest.mark.slow
N_STREAMS = 4


@pytest.fixture(scope="module")
def devices_exist() -> None:
    try:
        rpc.library()
    except rpc.CannotBuild as reason:
        pytest.skip(str(reason))


@pytest.fixture(scope="module")
def on_two_devices(devices_exist: None) -> Iterator[dict[str, str]]:
    with rpc.devices(2) as environment:
        yield environment


def daemon_on(devices: dict[str, str], **more: str) -> Any:
    return running_daemon("--slots", str(N_STREAMS), fake=False, **devices, **more)


@pytest.mark.parametrize("speculation", ["on", "off"])
def test_no_answer_has_a_token_of_another_one(on_two_devices: dict[str, str], speculation: str) -> None:
    with daemon_on(on_two_devices, LOCALRUN_SPECULATION=speculation) as daemon:
        outcome = rounds.run(daemon, n_rounds=10 * DEPTH, n_streams=N_STREAMS, n_tokens=16)
        [loaded] = daemon.http.get("/api/ps").json()["models"]
    assert loaded["size_vram"] > 0
    assert outcome.n_answers == 10 * DEPTH * N_STREAMS
    assert outcome.wrong == []


def test_the_rounds_find_what_they_look_for(on_two_devices: dict[str, str]) -> None:
    """With one stage of sampling, llama.cpp loses what it found: then answers do have tokens of others."""
    with daemon_on(on_two_devices, LOCALRUN_SPECULATION="off", LOCALRUN_TEST_STAGES="1") as daemon:
        outcome = rounds.run(daemon, n_rounds=8, n_streams=N_STREAMS, n_tokens=16)
    assert len(outcome.wrong) > 2


@pytest.mark.parametrize(("fallback", "how"), [("off", "crash"), ("off", "gone"), ("on", "crash"), ("on", "gone")])
def test_a_lost_device_is_named_and_the_cpu_goes_on_where_it_may(devices_exist: None, fallback: str, how: str) -> None:
    """In the middle of a stream. The model's file is as good as before, and nobody says otherwise."""
    messages = [{"role": "user", "content": "Tell me a story about the sea."}]
    body = {"model": "tiny", "messages": messages, "max_tokens": 100, "temperature": 0}
    # Where nothing is compared, so long that no machine says all of it before the device is lost.
    streamed_body = body | {"stream": True} | ({"max_tokens": 3000, "ignore_eos": True} if fallback == "off" else {})
    more = {"LOCALRUN_CPU_FALLBACK": fallback, "LOCALRUN_SPECULATION": "off", "LOCALRUN_TEST_LOST": how}
    with rpc.devices(1) as environment, daemon_on(environment, **more) as daemon:
        whole = text(daemon.post("/v1/chat/completions", body).json())
        with daemon.http.stream("POST", "/v1/chat/completions", json=streamed_body, timeout=600) as response:
            lines = response.iter_lines()
            said = [next(lines) for _ in range(8)]
            rpc.lose(environment)
            said += lines
        after = daemon.post("/v1/chat/completions", body)
        options = {"num_gpu": 0, "num_predict": 100, "temperature": 0}
        on_cpu = daemon.post("/api/chat", model="tiny", messages=messages, stream=False, options=options)
        log = daemon.log
        verdicts = [path.read_text() for path in (daemon.home / "cache" / "kernels").glob("*.json")]
    assert not any('"how"' in verdict for verdict in verdicts), "the CPU's kernels are not to blame"
    assert "without the quick kernels" not in log
    assert on_cpu.json()["message"]["content"] == whole
    assert "damaged" not in log
    if fallback == "on":
        streamed = "".join(event["choices"][0]["delta"].get("content", "") for event in events(said))
        assert streamed == text(after.json()) == whole
        assert "tiny is loaded for the CPU: 127.0.0.1:" in log
        return
    assert after.status_code == 503
    for error in (events(said)[-1]["error"], after.json()["error"]):
        assert error["code"] == "device_lost"
        assert "127.0.0.1:" in error["message"]
        assert "num_gpu 0" in error["message"]
        assert ("SIGABRT" if how == "crash" else "does not find any GPU") in error["message"]


def text(answer: Any) -> str:
    content: str = answer["choices"][0]["message"]["content"]
    return content


def events(lines: list[str]) -> list[Any]:
    return [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]


SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "kind": {"enum": ["cat", "dog"]}},
    "required": ["name", "kind"],
}
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "few": {"temperature": 0.8, "top_k": 40, "seed": 3},
    "all": {"temperature": 1.0, "top_k": 0, "seed": 4},
    "log-probabilities": {"temperature": 0, "logprobs": 2},
    "a schema": {"temperature": 0, "response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}},
    "penalties": {"temperature": 0, "repeat_penalty": 1.2},
    "an adapter": {"temperature": 0, "model": "tiny+style"},
    "an adapter, drawn": {"temperature": 0.8, "top_k": 20, "seed": 5, "model": "tiny+style"},
}


def complete(daemon: Daemon, kind: str) -> Any:
    """The text and what was asked for besides; every kind's has another length."""
    number = list(KINDS).index(kind)
    body = {"model": "tiny", "prompt": f"Tell me about {rounds.TOPICS[number]}.", "max_tokens": 16 + 4 * number}
    response = daemon.http.post("/v1/completions", json=body | KINDS[kind], timeout=600)
    assert response.status_code == 200, response.text
    [choice] = response.json()["choices"]
    return choice["text"], (choice["logprobs"] or {}).get("tokens")


def test_requests_of_all_kinds_run_together_as_they_run_alone(on_two_devices: dict[str, str], tmp_path: Path) -> None:
    lora = write_lora(builtin.model_path(), tmp_path / "style.gguf", seed=1, strength=5e-4)
    with daemon_on(on_two_devices) as daemon:
        made = daemon.post("/api/create", model="style", modelfile=f"FROM {lora}", stream=False)
        assert made.json() == {"status": "success"}
        alone = {kind: complete(daemon, kind) for kind in KINDS}
        assert json.loads(alone["a schema"][0])["kind"] in ("cat", "dog")
        with ThreadPoolExecutor(len(KINDS)) as pool:
            for _ in range(3 * DEPTH):
                together = dict(zip(KINDS, pool.map(lambda kind: complete(daemon, kind), KINDS), strict=True))
                assert together == alone


def test_a_saved_state_goes_back_to_the_device(on_two_devices: dict[str, str]) -> None:
    body = {
        "model": "tiny",
        "messages": [{"role": "user", "content": "Once there was a boat that went over the sea. " * 25}],
        "temperature": 0,
        "max_tokens": 24,
    }

    def ask(daemon: Daemon) -> tuple[str, int]:
        answer = daemon.post("/v1/chat/completions", body).json()
        return answer["choices"][0]["message"]["content"], answer["usage"]["prompt_tokens_details"]["cached_tokens"]

    with daemon_on(on_two_devices) as daemon:
        first, n_first = ask(daemon)
        again, n_again = ask(daemon)
        assert daemon.post("/api/generate", model="tiny", keep_alive=0).status_code == 200
        restarted, n_restarted = ask(daemon)
    assert (n_first, n_again > 200, n_restarted > 200) == (0, True, True)
    assert first == again == restarted
