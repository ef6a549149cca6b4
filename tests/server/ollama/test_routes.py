"""/api on a daemon with fake engines: every route, its errors, and what happens in mid-stream."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import httpx2
import pytest

from localrun.models.storage.model import Forecast, keep_forecast
from tests.daemon import N_CTX, Daemon, running_daemon

HELLO = [{"role": "user", "content": "hello"}]
# What the built-in model's ChatML template makes of HELLO, in bytes and control tokens.
N_HELLO = len("<user\nhello>\n<assistant\n")


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    with running_daemon() as running:
        yield running


def lines(answer: httpx2.Response) -> list[dict[str, Any]]:
    assert answer.headers["content-type"] == "application/x-ndjson"
    return [json.loads(line) for line in answer.text.splitlines()]


def chat(daemon: Daemon, **fields: Any) -> httpx2.Response:
    return daemon.post("/api/chat", {"model": "tiny", "messages": HELLO} | fields)


def generate(daemon: Daemon, **fields: Any) -> httpx2.Response:
    return daemon.post("/api/generate", {"model": "tiny", "prompt": "hello"} | fields)


# --- who we are ------------------------------------------------------------------------------------------------------


def test_the_root_says_what_clients_look_for(daemon: Daemon) -> None:
    assert daemon.http.get("/").text == "Ollama is running"
    head = daemon.http.head("/")
    assert (head.status_code, head.text) == (200, "")


def test_the_version_is_three_bare_numbers(daemon: Daemon) -> None:
    answer = daemon.http.get("/api/version").json()
    assert [int(part) for part in answer["version"].split(".")] >= [0, 17, 6]
    assert answer["localrun"]
    assert daemon.http.head("/api/version").status_code == 200


# --- models ----------------------------------------------------------------------------------------------------------


def test_tags_have_every_field_that_strict_clients_parse(daemon: Daemon) -> None:
    row = daemon.http.get("/api/tags").json()["models"][0]
    assert (row["name"], row["model"]) == ("tiny:latest", "tiny:latest")
    assert row["size"] > 1_000_000
    assert len(row["digest"]) == 64
    assert row["modified_at"]
    assert row["capabilities"] == ["completion"]
    details = row["details"]
    assert (details["format"], details["family"], details["families"]) == ("gguf", "llama", ["llama"])
    assert details["parameter_size"].endswith(("K", "M"))
    assert details["quantization_level"]


@pytest.mark.parametrize("body", [{"model": "tiny"}, {"name": "tiny"}, {"model": "tiny:latest"}])
def test_show_answers_from_the_header_alone(daemon: Daemon, body: dict[str, str]) -> None:
    shown = daemon.post("/api/show", body).json()
    assert shown["capabilities"] == ["completion"]
    info = shown["model_info"]
    assert (info["general.architecture"], info["llama.context_length"]) == ("llama", 4096)
    assert info["general.basename"]
    assert info["general.parameter_count"] > 1_000_000
    assert info["tokenizer.ggml.tokens"] is None
    assert "<|im_start|>" in shown["template"]
    assert "num_ctx" in shown["parameters"]
    assert shown["modelfile"].count("FROM ") == 1
    assert shown["details"]["family"] == "llama"
    assert "tensors" not in shown


def test_show_verbose_lists_the_tensors(daemon: Daemon) -> None:
    tensors = daemon.post("/api/show", model="tiny", verbose=True).json()["tensors"]
    assert {"name", "type", "shape"} == set(tensors[0])
    assert any(tensor["name"] == "token_embd.weight" for tensor in tensors)


def test_ps_lists_what_is_loaded_and_until_when(daemon: Daemon) -> None:
    generate(daemon, prompt="", keep_alive=0)
    assert daemon.http.get("/api/ps").json() == {"models": []}
    generate(daemon, prompt="", keep_alive="10m")
    row = daemon.http.get("/api/ps").json()["models"][0]
    assert (row["name"], row["model"], row["context_length"]) == ("tiny:latest", "tiny:latest", N_CTX)
    assert (row["size_vram"], row["details"]["format"]) == (0, "gguf")
    assert row["expires_at"].endswith("Z")
    generate(daemon, prompt="", keep_alive=-1)
    assert daemon.http.get("/api/ps").json()["models"][0]["expires_at"] > "2100", "never"
    chat(daemon, messages=[], keep_alive="5m")


# --- generating ------------------------------------------------------------------------------------------------------


def test_a_chat_streams_by_default(daemon: Daemon) -> None:
    answer = chat(daemon, options={"num_predict": 6, "temperature": 0})
    assert answer.headers["x-localrun-request"].startswith("req_")
    *pieces, last = lines(answer)
    assert all(piece["message"]["role"] == "assistant" and piece["done"] is False for piece in pieces)
    assert all(piece["model"] == "tiny" and piece["created_at"] for piece in [*pieces, last])
    assert (last["done"], last["done_reason"], last["message"]["content"]) == (True, "length", "")
    assert (last["prompt_eval_count"], last["eval_count"]) == (N_HELLO, 6)
    assert last["total_duration"] >= last["prompt_eval_duration"] + last["eval_duration"] - 2
    whole = chat(daemon, stream=False, options={"num_predict": 6, "temperature": 0}).json()
    assert whole["message"]["content"] == "".join(piece["message"]["content"] for piece in pieces)
    assert whole["prompt_eval_cached_count"] == N_HELLO - 1
    assert whole["load_duration"] == 0


def test_the_model_is_named_as_the_client_wrote_it(daemon: Daemon) -> None:
    assert chat(daemon, model="tiny:latest", stream=False, options={"num_predict": 1}).json()["model"] == "tiny:latest"


def test_generate_returns_its_context_and_continues_from_it(daemon: Daemon) -> None:
    first = generate(daemon, stream=False, options={"num_predict": 4, "temperature": 0}).json()
    assert len(first["context"]) == N_HELLO + 4
    second = generate(daemon, prompt="more", context=first["context"], stream=False, options={"num_predict": 2}).json()
    assert second["prompt_eval_count"] == len(first["context"]) + N_HELLO - 1
    assert second["prompt_eval_cached_count"] >= len(first["context"]) - 1
    assert second["context"][: len(first["context"])] == first["context"]


def test_generate_with_system_and_raw(daemon: Daemon) -> None:
    few = {"num_predict": 1}
    plain = generate(daemon, stream=False, options=few).json()["prompt_eval_count"]
    system = generate(daemon, system="be brief", stream=False, options=few).json()["prompt_eval_count"]
    assert system == plain + len("<system\nbe brief>\n")
    raw = generate(daemon, prompt="<|im_start|>x", raw=True, stream=False, options=few).json()
    assert raw["prompt_eval_count"] == 2, "in a raw prompt the text of a control token is the token"
    assert "context" not in raw


def test_a_control_token_in_a_message_is_plain_text(daemon: Daemon) -> None:
    messages = [{"role": "user", "content": "<|im_end|>"}]
    count = chat(daemon, messages=messages, stream=False, options={"num_predict": 1}).json()["prompt_eval_count"]
    assert count == N_HELLO - len("hello") + len("<|im_end|>")


def test_stop_strings_end_a_text_and_are_not_in_it(daemon: Daemon) -> None:
    options = {"num_predict": 60, "temperature": 0}
    text = generate(daemon, prompt="stop", stream=False, options=options).json()["response"]
    stop = text[10:13]
    last = generate(daemon, prompt="stop", stream=False, options=options | {"stop": [stop]}).json()
    assert last["response"] == text[: text.index(stop)]
    assert last["done_reason"] == "stop"


def test_logprobs(daemon: Daemon) -> None:
    answer = generate(daemon, stream=False, logprobs=True, top_logprobs=2, options={"num_predict": 3}).json()
    assert len(answer["logprobs"]) == 3
    assert len(answer["logprobs"][0]["top_logprobs"]) == 2
    streamed = lines(generate(daemon, logprobs=True, options={"num_predict": 3}))
    assert sum(len(line.get("logprobs", ())) for line in streamed) == 3


def test_num_predict_zero_only_reads_the_prompt(daemon: Daemon) -> None:
    answer = generate(daemon, stream=False, options={"num_predict": 0}).json()
    assert (answer["response"], answer["eval_count"], answer["done_reason"]) == ("", 0, "length")


def test_an_answer_ends_where_the_context_does(daemon: Daemon) -> None:
    answer = generate(daemon, raw=True, prompt="x" * (N_CTX - 700), stream=False, options={"num_predict": 600}).json()
    assert answer["prompt_eval_count"] + answer["eval_count"] <= N_CTX
    assert answer["done_reason"] in ("length", "stop")


# --- too long --------------------------------------------------------------------------------------------------------


def test_a_long_chat_loses_its_oldest_messages(daemon: Daemon) -> None:
    messages = [
        {"role": "system", "content": "be brief"},
        *[{"role": role, "content": f"{n} " + "x" * 200} for n in range(10) for role in ("user", "assistant")],
        {"role": "user", "content": "last"},
    ]
    answer = chat(daemon, messages=messages, stream=False, options={"num_predict": 20})
    left_out = int(answer.headers["x-localrun-truncated"])
    assert 2 <= left_out < len(messages) - 2
    assert left_out % 2 == 0, "what is left begins with a user's message"
    kept = [messages[0], *messages[1 + left_out :]]
    again = chat(daemon, messages=kept, stream=False, options={"num_predict": 20})
    assert "x-localrun-truncated" not in again.headers
    assert again.json()["prompt_eval_count"] == answer.json()["prompt_eval_count"] <= N_CTX - 20
    assert again.json()["message"] == answer.json()["message"]


def test_one_message_that_is_too_long_loses_its_middle(daemon: Daemon) -> None:
    messages = [{"role": "user", "content": "x" * 3 * N_CTX}]
    answer = chat(daemon, messages=messages, stream=False, options={"num_predict": 20}).json()
    assert answer["prompt_eval_count"] == N_CTX - 20


def test_a_long_prompt_loses_its_front(daemon: Daemon) -> None:
    prompt = "start" + "x" * 3 * N_CTX + "the end"
    body = {
        "prompt": prompt,
        "raw": True,
        "stream": False,
        "options": {"num_predict": 8, "num_keep": 5, "temperature": 0},
    }
    answer = generate(daemon, **body)
    assert answer.json()["prompt_eval_count"] == N_CTX - 8
    assert int(answer.headers["x-localrun-truncated"]) == len(prompt) - (N_CTX - 8)
    same = generate(daemon, **body | {"prompt": "start" + prompt[-(N_CTX - 8 - 5) :]})
    assert same.json()["response"] == answer.json()["response"]


@pytest.mark.parametrize("stream", [True, False])
def test_without_truncation_too_long_is_an_error_with_both_numbers(daemon: Daemon, stream: bool) -> None:
    answer = generate(daemon, prompt="x" * 5000, raw=True, truncate=False, stream=stream)
    assert (answer.status_code, answer.headers["x-localrun-error"]) == (400, "context_length_exceeded")
    assert "5000" in answer.json()["error"]
    assert str(N_CTX) in answer.json()["error"]
    messages = [{"role": "user", "content": "x" * 5000}]
    assert chat(daemon, messages=messages, truncate=False, stream=stream).status_code == 400


def test_a_smaller_context_never_loads_the_model_again(daemon: Daemon) -> None:
    chat(daemon, stream=False, options={"num_predict": 1})
    for num_ctx in (16, 512.5, N_CTX):
        answer = chat(daemon, stream=False, options={"num_predict": 1, "num_ctx": num_ctx})
        assert answer.json()["load_duration"] == 0
        assert answer.json()["prompt_eval_count"] == N_HELLO


# --- loading ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "empty"), [("/api/generate", {}), ("/api/generate", {"prompt": ""}), ("/api/chat", {})]
)
def test_nothing_to_say_loads_and_unloads(daemon: Daemon, path: str, empty: dict[str, str]) -> None:
    loaded = daemon.post(path, {"model": "tiny"} | empty).json()
    assert (loaded["done"], loaded["done_reason"]) == (True, "load")
    assert [row["name"] for row in daemon.http.get("/api/ps").json()["models"]] == ["tiny:latest"]
    unloaded = daemon.post(path, {"model": "tiny", "keep_alive": 0} | empty).json()
    assert (unloaded["done"], unloaded["done_reason"]) == (True, "unload")
    assert daemon.http.get("/api/ps").json() == {"models": []}
    assert daemon.post(path, {"model": "tiny", "keep_alive": "0"} | empty).status_code == 200


def test_keep_alive_zero_unloads_after_the_answer(daemon: Daemon) -> None:
    assert chat(daemon, stream=False, keep_alive=0, options={"num_predict": 2}).json()["eval_count"] == 2
    deadline_s = time.monotonic() + 30
    while daemon.http.get("/api/ps").json()["models"] and time.monotonic() < deadline_s:
        time.sleep(0.02)
    assert daemon.http.get("/api/ps").json() == {"models": []}


def test_pull_of_what_is_here_succeeds(daemon: Daemon) -> None:
    assert lines(daemon.post("/api/pull", model="tiny")) == [{"status": "success"}]
    assert daemon.post("/api/pull", name="tiny", stream=False).json() == {"status": "success"}


@pytest.mark.parametrize(
    "name", ["../x", "a/b/c/d", "x\0y", "/etc/passwd", "con", "tin\u0443", "", "a" * 300, "./x/../y.gguf"]
)
def test_pull_refuses_what_is_no_name_before_it_begins(daemon: Daemon, name: str) -> None:
    refused = daemon.post("/api/pull", model=name)
    assert (refused.status_code, refused.headers["x-localrun-error"]) == (400, "bad_request")


def test_pull_of_a_file_that_is_not_there(daemon: Daemon) -> None:
    assert daemon.post("/api/pull", model="/no/such/file.gguf").status_code == 404


def test_a_failed_pull_ends_its_stream_with_the_error(daemon: Daemon) -> None:
    name = "127.0.0.1:9/library/nobody-listens"
    first, last = lines(daemon.post("/api/pull", model=name))
    assert first == {"status": "pulling manifest"}
    assert last["code"] == "download_failed"
    assert "127.0.0.1:9 cannot be reached" in last["error"]
    whole = daemon.post("/api/pull", model=name, stream=False)
    assert (whole.status_code, whole.headers["x-localrun-error"]) == (502, "download_failed")
    row = daemon.http.get("/localrun/v1/pulls").json()["pulls"][-1]
    assert (row["model"], row["state"]) == (name, "failed")


def test_pulls_that_are_not_under_way_cannot_be_cancelled(daemon: Daemon) -> None:
    assert daemon.http.delete("/localrun/v1/pulls?model=owner/name").status_code == 404
    assert daemon.http.delete("/localrun/v1/pulls").status_code == 400
    assert daemon.http.delete("/localrun/v1/pulls?model=../x").status_code == 400


def test_the_catalogue_and_the_search_without_a_network(daemon: Daemon) -> None:
    names = [entry["name"] for entry in daemon.http.get("/localrun/v1/catalog").json()["models"]]
    assert "qwen3:0.6b" in names
    found = daemon.http.get("/localrun/v1/catalog?model=qwen3:0.6b-q8_0").json()["models"]
    assert [entry["repo"] for entry in found] == ["unsloth/Qwen3-0.6B-GGUF"]
    assert daemon.http.get("/localrun/v1/catalog?model=nothing").json() == {"models": []}
    everything = daemon.http.get("/localrun/v1/search?query=").json()
    assert [entry["name"] for entry in everything["catalog"]] == names
    assert (everything["hub"], everything["problem"]) == ([], None)
    assert daemon.http.get("/localrun/v1/search?query=x&limit=0").status_code == 400


def test_what_this_build_does_not_do_says_so(daemon: Daemon) -> None:
    answer = daemon.post("/api/push", model="tiny")
    assert (answer.status_code, answer.headers["x-localrun-error"]) == (501, "not_supported")
    assert "not support" in answer.json()["error"]


# --- errors ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/api/chat", "/api/generate", "/api/show"])
@pytest.mark.parametrize(
    ("content", "status", "said"),
    [
        (b"", 400, "missing request body"),
        (b"{", 400, "JSON"),
        (b"[1]", 400, "object"),
        (b'{"model": 5}', 400, "model"),
        (b'{"model": ""}', 400, "model"),
        (b"{}", 400, "model is required"),
        (b'{"model": "tiny", "x": NaN}', 400, "JSON"),
        (b'{"model": ' + b"[" * 10_000 + b"]" * 10_000 + b"}", 400, ""),
        (b'{"model": "no-such-model"}', 404, "no-such-model"),
        (b'{"model": "../../etc/passwd"}', 400, ""),
        (b'{"model": "a\\u0000b"}', 400, ""),
        (b'{"model": "/no/such/file.gguf"}', 404, ""),
    ],
    ids=lambda value: repr(value)[:40],
)
def test_bad_bodies(daemon: Daemon, path: str, content: bytes, status: int, said: str) -> None:
    answer = daemon.http.post(path, content=content, headers={"content-type": "application/json"})
    assert answer.status_code == status
    assert list(answer.json()) == ["error"]
    assert said in answer.json()["error"]
    assert answer.headers["x-localrun-error"]


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"options": {"temperature": "hot"}}, "options.temperature"),
        ({"options": {"top_p": 3}}, "options.top_p"),
        ({"options": {"num_predict": -5}}, "options.num_predict"),
        ({"options": []}, "options"),
        ({"keep_alive": "soon"}, "keep_alive"),
        ({"stream": "yes"}, "stream"),
        ({"top_logprobs": 21}, "top_logprobs"),
        ({"format": "yaml"}, "format"),
        ({"format": ["json"]}, "format"),
        ({"format": {"type": "object", "requred": ["a"]}}, "format"),
        ({"think": True}, "think"),
        ({"think": "very"}, "think"),
        ({"shift": "no"}, "shift"),
    ],
)
def test_bad_fields_are_named(daemon: Daemon, fields: dict[str, Any], field: str) -> None:
    for answer in (chat(daemon, **fields), generate(daemon, **fields)):
        assert answer.status_code == 400
        assert field in answer.json()["error"]


@pytest.mark.parametrize("context", [[258], [10**6], [-1], ["x"], [2**40]])
def test_a_context_of_another_model_is_refused(daemon: Daemon, context: list[Any]) -> None:
    answer = generate(daemon, context=context)
    assert answer.status_code == 400
    assert "context" in answer.json()["error"]


def test_a_lane_that_is_none(daemon: Daemon) -> None:
    body = {"model": "tiny", "messages": HELLO}
    answer = daemon.http.post("/api/chat", json=body, headers={"X-Localrun-Lane": "first"})
    assert answer.status_code == 400
    assert "interactive" in answer.json()["error"]
    for field, wrong in [("lane", "first"), ("latency", "fast"), ("latency", -5), ("deadline_s", 0)]:
        for path in ("/api/chat", "/api/generate"):
            answer = daemon.http.post(path, json=body | {field: wrong})  # also where it only loads the model
            assert answer.status_code == 400
            assert answer.json()["error"].startswith(f"{field}: ")


def test_lane_latency_and_deadline_as_fields(daemon: Daemon) -> None:
    fields = {"lane": "batch", "latency": "throughput", "deadline_s": 600}
    answer = chat(daemon, stream=False, options={"num_predict": 2}, **fields)
    assert answer.json()["eval_count"] == 2
    row = daemon.http.get(f"/localrun/v1/requests/{answer.headers['x-localrun-request']}").json()
    assert row["lane"] == "batch"


def test_a_deadline_that_cannot_be_kept(daemon: Daemon) -> None:
    chat(daemon, stream=False, options={"num_predict": 2})
    answer = daemon.http.post(
        "/api/chat", json={"model": "tiny", "messages": HELLO}, headers={"X-Localrun-Deadline": "0.000001"}
    )
    assert answer.status_code == 429
    assert "deadline" in answer.json()["error"]
    assert int(answer.headers["retry-after"]) >= 1


def test_a_client_that_leaves_frees_its_slot() -> None:
    with running_daemon(LOCALRUN_FAKE_STEP_MS="10") as daemon:
        body = {"model": "tiny", "messages": HELLO, "options": {"num_predict": 1500}}
        with daemon.http.stream("POST", "/api/chat", json=body) as response:
            next(response.iter_lines())
            request_id = response.headers["x-localrun-request"]
        deadline_s = time.monotonic() + 30
        while (row := daemon.http.get(f"/localrun/v1/requests/{request_id}").json())["state"] != "cancelled":
            assert time.monotonic() < deadline_s, row
            time.sleep(0.02)
        assert row["output_tokens"] < 1500


def test_a_cancelled_request_says_so_in_its_last_line() -> None:
    with running_daemon(LOCALRUN_FAKE_STEP_MS="10") as daemon:
        body = {"model": "tiny", "messages": HELLO, "options": {"num_predict": 1500}}
        with daemon.http.stream("POST", "/api/chat", json=body) as response:
            stream = response.iter_lines()
            next(stream)
            daemon.http.delete(f"/localrun/v1/requests/{response.headers['x-localrun-request']}")
            last = [json.loads(line) for line in stream][-1]
        assert (last["done"], last["done_reason"]) == (True, "cancelled")
        assert 0 < last["eval_count"] < 1500


def test_without_resume_an_engine_that_dies_ends_its_streams_and_is_replaced() -> None:
    with running_daemon(LOCALRUN_RESUME="off", LOCALRUN_FAKE_STEP_MS="10") as daemon:
        body = {"model": "tiny", "messages": HELLO, "options": {"num_predict": 1500}}
        with daemon.http.stream("POST", "/api/chat", json=body) as response:
            stream = response.iter_lines()
            next(stream)
            pid = daemon.http.get("/localrun/v1/snapshot").json()["engines"][0]["pid"]
            os.kill(pid, signal.SIGKILL)
            last = [json.loads(line) for line in stream][-1]
        assert last["code"] == "engine_died"
        assert "done" not in last
        assert chat(daemon, stream=False, options={"num_predict": 2}).json()["eval_count"] == 2


def test_the_request_table_shows_who_asked(daemon: Daemon) -> None:
    headers = {"X-Localrun-Client": "my editor", "X-Localrun-Lane": "interactive"}
    body = {"model": "tiny", "messages": HELLO, "stream": False, "options": {"num_predict": 1}}
    request_id = daemon.http.post("/api/chat", json=body, headers=headers).headers["x-localrun-request"]
    row = daemon.http.get(f"/localrun/v1/requests/{request_id}").json()
    assert (row["client"], row["lane"], row["api"], row["state"]) == ("my editor", "interactive", "/api/chat", "done")
    assert (row["prompt_tokens"], row["output_tokens"]) == (N_HELLO, 1)


def test_what_was_planned_is_listed(daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCALRUN_HOME", str(daemon.home))
    (row,) = (row for row in daemon.http.get("/api/tags").json()["models"] if row["name"] == "tiny:latest")
    assert "forecast" not in row
    keep_forecast(row["digest"], Forecast(chats=11, tokens_per_s=9.6, made_at="2026-11-24T02:34:00+00:00"))
    (row,) = (row for row in daemon.http.get("/api/tags").json()["models"] if row["name"] == "tiny:latest")
    assert (row["forecast"]["chats"], row["forecast"]["tokens_per_s"]) == (11, 9.6)
