"""Tiers in every API, on a daemon with fake engines: which model answers, what it says of that, what is refused."""

from __future__ import annotations

import base64
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from localrun.access.keys import KeyFile
from localrun.models.gguf.reader import read_header
from tests.daemon import N_CTX, Daemon, running_daemon
from tests.projector_file import write_projector
from tests.server.batches.batch_files import begun, chat_line, client_of, encoded, ended, lines_of
from tests.server.media.making import png
from tests.server.openai.test_fim_routes import write_model
from tests.support.synthesis.synthesize import synthesize

SETTINGS = """
[tiers.smart]
small = "tiny"
large = "big"
reasoning_effort = { low = "small", high = "large" }
tools = "large"
schema = "large"
prompt_tokens_over = 300

[tiers.sure]
small = "tiny"
large = "big"
unsure_below = -0.5

[tiers.plain]
small = "tiny"
large = "big"

[tiers.able]
small = "tiny"
large = "seer"

[tiers.fills]
small = "tiny"
large = "code"

[tiers.coder]
small = "code"
large = "big"

[tiers.gone]
small = "tiny"
large = "nothing"
"""
HELLO = [{"role": "user", "content": "hello"}]
LONG = [{"role": "user", "content": "hello " * 60}]
TOOL = {"type": "function", "function": {"name": "look_up", "parameters": {"type": "object", "properties": {}}}}
SCHEMA = {"type": "object", "properties": {}}
THINKS = "{% for m in messages %}{{ m.content }}{% endfor %}<think></think>"


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    home = tmp_path_factory.mktemp("home")
    (home / "config").mkdir()
    (home / "config" / "localrun.toml").write_text(SETTINGS, encoding="utf-8")
    models = home / "data" / "models"
    models.mkdir(parents=True)
    synthesize("tiny", "Q4_0", models / "big.gguf")
    synthesize("tiny", "Q8_0", models / "eyes.gguf")
    write_projector(models / "mmproj-eyes.gguf", width=read_header(models / "eyes.gguf").n_embd)
    write_model(models / "code.gguf")
    with running_daemon(LOCALRUN_HOME=str(home)) as running:
        made = running.post("/api/create", {"model": "seer", "from": "eyes", "template": THINKS, "stream": False})
        assert made.status_code == 200, made.text
        yield running


APIS: dict[str, dict[str, Any]] = {
    "/api/chat": {"messages": HELLO, "options": {"num_predict": 2}},
    "/api/generate": {"prompt": "hello", "options": {"num_predict": 2}},
    "/v1/chat/completions": {"messages": HELLO, "max_tokens": 2},
    "/v1/completions": {"prompt": "hello", "max_tokens": 2},
    "/v1/responses": {"input": "hello", "max_output_tokens": 2},
    "/v1/messages": {"messages": HELLO, "max_tokens": 2},
    "/completion": {"prompt": "hello", "n_predict": 2},
}


def ask(daemon: Daemon, path: str = "/v1/chat/completions", model: str = "smart", **body: Any) -> httpx2.Response:
    answer = daemon.post(path, APIS[path] | {"model": model, "stream": False} | body)
    assert answer.status_code == 200, answer.text
    return answer


def chosen(answer: httpx2.Response) -> tuple[str, str]:
    """The model that answered, and the header without numbers."""
    return answer.json()["model"], re.sub(r"=-?[0-9.]+", "", answer.headers["x-localrun-tier"])


SMALL, LARGE = ("tiny", "small; reason=default"), ("big", "large; reason=")


@pytest.mark.parametrize("path", APIS)
def test_every_api_says_which_model_answered_and_why(path: str, daemon: Daemon) -> None:
    assert chosen(ask(daemon, path)) == SMALL
    field = "prompt" if "prompt" in APIS[path] else "input" if "input" in APIS[path] else "messages"
    long = {field: LONG if field == "messages" else LONG[0]["content"]}
    assert chosen(ask(daemon, path, **long)) == ("big", "large; reason=length; prompt_tokens")
    assert chosen(ask(daemon, path, model="SMART:latest")) == SMALL
    assert "x-localrun-tier" not in ask(daemon, path, model="tiny").headers


@pytest.mark.parametrize("path", APIS)
def test_streams_say_so_too(path: str, daemon: Daemon) -> None:
    answer = daemon.post(path, APIS[path] | {"model": "smart", "stream": True})
    assert answer.headers["x-localrun-tier"] == "small; reason=default"
    assert '"model":"tiny"' in answer.text
    assert '"smart"' not in answer.text


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({"tools": [TOOL]}, ("big", "large; reason=tools")),
        ({"tools": [TOOL], "tool_choice": "none"}, SMALL),
        ({"tools": [TOOL], "reasoning_effort": "low"}, ("tiny", "small; reason=reasoning_effort")),
        ({"reasoning_effort": "low"}, ("tiny", "small; reason=reasoning_effort")),
        ({"reasoning_effort": "none"}, SMALL),
        ({"response_format": {"type": "json_object"}}, ("big", "large; reason=schema")),
        ({"tools": [TOOL], "response_format": {"type": "json_object"}}, ("big", "large; reason=tools")),
        ({"messages": LONG, "reasoning_effort": "low"}, ("tiny", "small; reason=reasoning_effort")),
        # What cannot fit the small model goes to the large one whatever the rules say; 2,048 tokens are the context.
        (
            {"messages": [{"role": "user", "content": "hello " * 300}], "reasoning_effort": "low"},
            ("big", "large; reason=context; prompt_tokens"),
        ),
    ],
)
def test_the_first_rule_that_says_something_counts(body: Any, expected: tuple[str, str], daemon: Daemon) -> None:
    assert chosen(ask(daemon, **body)) == expected


def test_the_effort_in_the_words_of_each_api(daemon: Daemon) -> None:
    low = ("tiny", "small; reason=reasoning_effort")
    assert chosen(ask(daemon, "/api/chat", think="low")) == low
    assert chosen(ask(daemon, "/v1/responses", reasoning={"effort": "low"})) == low
    assert chosen(ask(daemon, "/v1/messages", output_config={"effort": "low"})) == low
    # The rule takes the effort with it: these models know none.
    assert chosen(ask(daemon, reasoning_effort="high")) == ("big", "large; reason=reasoning_effort")


def test_schemas_of_other_apis(daemon: Daemon) -> None:
    asked = {"/api/chat": "format", "/v1/completions": "json_schema", "/completion": "json_schema"}
    for path, body in ((path, {field: SCHEMA}) for path, field in asked.items()):
        assert chosen(ask(daemon, path, **body)) == ("big", "large; reason=schema")


def test_a_prompt_that_is_too_long_for_the_small_model_goes_to_the_large_one(daemon: Daemon) -> None:
    model, why = chosen(ask(daemon, model="plain", messages=[{"role": "user", "content": "hello " * 260}]))
    assert (model, why) == ("big", "large; reason=context; prompt_tokens")


def test_what_only_the_large_model_can_take_goes_to_it(daemon: Daemon) -> None:
    picture = "data:image/png;base64," + base64.b64encode(png()).decode()
    seen = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": picture}}]}]
    assert chosen(ask(daemon, model="able", messages=seen)) == ("seer", "large; reason=media")
    assert chosen(ask(daemon, model="able", reasoning_effort="high")) == ("seer", "large; reason=thinking")
    raw = {"prompt_string": "<__media__>", "multimodal_data": [picture]}
    assert chosen(ask(daemon, "/completion", model="able", prompt=raw)) == ("seer", "large; reason=media")
    refused = daemon.post("/v1/chat/completions", model="plain", messages=seen)
    assert refused.status_code == 400
    assert "'big' does not support images" in refused.text


FILLS: dict[str, dict[str, Any]] = {
    "/infill": {"input_prefix": "def f(", "input_suffix": "return x", "n_predict": 2},
    "/v1/completions": {"prompt": "def f(", "suffix": "return x", "max_tokens": 2},
    "/v1/fim/completions": {"prompt": "def f(", "suffix": "return x", "max_tokens": 2},
    "/api/generate": {"prompt": "def f(", "suffix": "return x", "options": {"num_predict": 2}},
}


@pytest.mark.parametrize("path", FILLS)
def test_filling_in_goes_to_a_model_that_can(path: str, daemon: Daemon) -> None:
    def answer(model: str) -> httpx2.Response:
        return daemon.post(path, FILLS[path] | {"model": model, "stream": False})

    assert chosen(answer("fills")) == ("code", "large; reason=fim")
    assert chosen(answer("coder")) == ("code", "small; reason=default")
    refused = answer("plain")
    assert (refused.status_code, "cannot fill in the middle" in refused.text) == (400, True)


def test_other_files_count_when_an_answer_is_to_be_filled_in(daemon: Daemon) -> None:
    body = FILLS["/infill"] | {"input_extra": [{"filename": "a.py", "text": "x" * N_CTX}]}
    refused = daemon.post("/infill", body | {"model": "coder"})
    assert refused.headers["x-localrun-tier"].startswith("large; reason=context; prompt_tokens=")


def test_a_draft_model_that_is_the_small_one_is_for_the_large_one(daemon: Daemon) -> None:
    assert chosen(ask(daemon, model="plain", draft="tiny")) == SMALL
    refused = daemon.post("/v1/completions", model="plain", prompt="hello " * 300, draft="tiny")
    assert "draft: 'tiny' cannot draft for 'big'" in refused.text


def test_how_sure_the_small_model_is_decides_and_is_counted(daemon: Daemon) -> None:
    before = metric(daemon, 'localrun_tier_probe_tokens_total{name="sure"}')
    found = set[str]()
    for number in range(12):
        answer = ask(daemon, model="sure", messages=[{"role": "user", "content": f"question {number}"}])
        size, why, mean, n_tokens = re.fullmatch(
            r"(\w+); reason=(\w+); mean_logprob=(-[0-9.]+); probe_tokens=(\d+)", answer.headers["x-localrun-tier"]
        ).groups()  # type: ignore[union-attr]
        is_sure = float(mean) >= -0.5
        assert (size, why) == (("small", "sure") if is_sure else ("large", "unsure"))
        assert answer.json()["model"] == ("tiny" if is_sure else "big")
        assert int(n_tokens) <= 32
        before += int(n_tokens)
        found.add(why)
        again = ask(daemon, model="sure", messages=[{"role": "user", "content": f"question {number}"}])
        assert again.headers["x-localrun-tier"] == answer.headers["x-localrun-tier"]
        before += int(n_tokens)
    assert found == {"sure", "unsure"}
    assert metric(daemon, 'localrun_tier_probe_tokens_total{name="sure"}') == before


def metric(daemon: Daemon, name: str) -> float:
    page = daemon.http.get("/metrics").text
    return next((float(line.split()[-1]) for line in page.splitlines() if line.startswith(name)), 0.0)


def test_metrics_and_the_rows_of_requests(daemon: Daemon) -> None:
    name = 'localrun_tier_requests_total{name="smart",reason="tools",size="large"}'
    before = metric(daemon, name)
    answer = ask(daemon, tools=[TOOL])
    assert metric(daemon, name) == before + 1
    row = daemon.http.get(f"/localrun/v1/requests/{answer.headers['x-localrun-request']}").json()
    assert (row["model"], row["tier"]) == ("big", "smart: large, tools")


def test_counting_is_for_the_model_that_would_answer_and_probes_nothing(daemon: Daemon) -> None:
    count = daemon.post("/v1/messages/count_tokens", model="smart", messages=LONG)
    assert count.headers["x-localrun-tier"].startswith("large; reason=length")
    before = metric(daemon, 'localrun_tier_probe_tokens_total{name="sure"}')
    count = daemon.post("/v1/messages/count_tokens", model="sure", messages=HELLO)
    assert count.headers["x-localrun-tier"] == "small; reason=default"
    assert metric(daemon, 'localrun_tier_probe_tokens_total{name="sure"}') == before


def test_lists_have_tiers_with_what_the_large_model_is(daemon: Daemon) -> None:
    tags = daemon.http.get("/api/tags").json()
    rows = {row["name"].removesuffix(":latest"): row for row in tags["models"]}
    assert rows["smart"]["tier"]["prompt_tokens_over"] == 300
    assert rows["smart"]["source"] == "tier"
    assert rows["smart"]["details"] == rows["big"]["details"]
    assert "tier" not in rows["big"]
    (unusable,) = tags["unusable"]
    assert '[tiers."gone"]' in unusable["path"]
    assert "localrun pull nothing" in unusable["problem"]
    models = {row["id"]: row for row in daemon.http.get("/v1/models").json()["data"]}
    assert models["smart"]["tier"]["tools"] == "large"
    assert "gone" not in models
    assert daemon.http.get("/v1/models/smart").json() == models["smart"]
    of_lm_studio = {row["id"]: row for row in daemon.http.get("/api/v0/models").json()["data"]}
    assert of_lm_studio["smart"] == of_lm_studio["big"] | {"id": "smart"}
    assert "gone" not in of_lm_studio
    assert daemon.http.get("/api/v0/models/smart").json() == of_lm_studio["smart"]
    assert daemon.http.get("/api/v0/models/gone").status_code == 404
    shown = daemon.post("/api/show", model="smart").json()
    assert shown["localrun"]["tier"] == {"name": "smart", **rows["smart"]["tier"]}


def test_loading_and_unloading_a_tier_is_of_both_models(daemon: Daemon) -> None:
    def loaded() -> set[str]:
        return {row["name"].removesuffix(":latest") for row in daemon.http.get("/api/ps").json()["models"]}

    for name in ("tiny", "big", "seer", "code"):
        daemon.post("/api/generate", model=name, keep_alive=0)
    answer = daemon.post("/api/generate", model="plain").json()
    assert (answer["done_reason"], loaded()) == ("load", {"tiny", "big"})
    answer = daemon.post("/api/chat", model="plain", keep_alive=0).json()
    assert (answer["done_reason"], loaded()) == ("unload", set())
    # A request that unloads its model afterwards does not do so before it has answered.
    assert chosen(ask(daemon, "/api/chat", keep_alive=0, options={"num_predict": 2})) == SMALL


@pytest.mark.parametrize("path", APIS)
def test_a_model_that_is_not_here_is_named_with_what_to_do(path: str, daemon: Daemon) -> None:
    refused = daemon.post(path, APIS[path] | {"model": "gone"})
    assert refused.status_code == 404
    for said in ("the large model of the tier 'gone', 'nothing'", "localrun pull nothing", "change `large` in"):
        assert said in refused.text


@pytest.mark.parametrize(
    ("path", "body", "said"),
    [
        ("/v1/embeddings", {"model": "smart", "input": "x"}, "'smart' is a tier, which only answers with text"),
        ("/api/embed", {"model": "smart", "input": "x"}, "name a model, such as 'tiny' or 'big'"),
        ("/v1/rerank", {"model": "smart", "query": "x", "documents": ["y"]}, "is a tier"),
        ("/v1/chat/completions", {"model": "smart+style", "messages": HELLO}, "adapters are made for one model"),
        ("/v1/chat/completions", {"model": "smart", "messages": HELLO, "lora": [{"id": "x"}]}, "lora: 'smart'"),
        ("/v1/completions", {"model": "smart", "prompt": [1, 2]}, "prompt: 'smart' is a tier, and token ids"),
        ("/completion", {"model": "smart", "prompt": [1, 2]}, "prompt: 'smart' is a tier, and token ids"),
        ("/completion", {"model": "smart", "prompt": ["x", [1]]}, "prompt: 'smart' is a tier, and token ids"),
        ("/completion", {"model": "smart", "prompt": "x", "lora": [{"id": "x"}]}, "lora: 'smart'"),
        ("/v1/completions", {"model": "tiny", "prompt": "x", "draft": "smart"}, "draft: 'smart' is a tier"),
        ("/tokenize", {"model": "smart", "content": "x"}, "name a model, such as 'tiny' or 'big'"),
        ("/api/generate", {"model": "smart", "prompt": "x", "context": [1]}, "context: 'smart' is a tier"),
        ("/api/copy", {"source": "tiny", "destination": "smart"}, "'smart' is a tier of"),
        ("/api/create", {"model": "smart", "from": "tiny", "stream": False}, "remove the table [tiers.smart]"),
        ("/api/create", {"model": "own", "from": "smart", "stream": False}, "'smart' is a tier of"),
        ("/api/pull", {"model": "smart"}, "'smart' is a tier of"),
    ],
)
def test_what_takes_one_model_refuses_a_tier(path: str, body: Any, said: str, daemon: Daemon) -> None:
    refused = daemon.post(path, body)
    assert (refused.status_code, said in refused.text) == (400, True), refused.text
    for route in ("/localrun/v1/fit", "/props", "/tokenizer_info", "/lora-adapters"):
        assert daemon.http.get(f"{route}?model=smart").status_code == 400


def test_a_key_that_may_not_use_both_models_of_a_tier_hears_of_neither(tmp_path: Path) -> None:
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "localrun.toml").write_text(SETTINGS, encoding="utf-8")
    (tmp_path / "data" / "models").mkdir(parents=True)
    synthesize("tiny", "Q4_0", tmp_path / "data" / "models" / "big.gguf")
    file = KeyFile(tmp_path / "data")
    name_only = {"x-api-key": file.create("name-only", models=("plain", "x")).text}
    both = {"x-api-key": file.create("both", models=("tiny", "big")).text}
    asked: list[tuple[str, dict[str, Any]]] = [
        ("/v1/chat/completions", {"model": "plain", "messages": HELLO}),
        ("/v1/chat/completions", {"model": "plain+style", "messages": HELLO}),
        ("/v1/completions", {"model": "plain+style", "prompt": "hello"}),
        ("/v1/messages", {"model": "plain", "messages": HELLO, "max_tokens": 2}),
        ("/v1/completions", {"model": "plain", "prompt": [1]}), ("/completion", {"model": "plain", "prompt": [1]}),
        ("/api/generate", {"model": "plain", "prompt": "x", "context": [1]}), ("/infill", {"model": "plain"}),
        ("/api/generate", {"model": "plain"}), ("/api/generate", {"model": "plain+style"}),
        ("/api/generate", {"model": "plain", "keep_alive": 0}),
        ("/api/show", {"model": "plain"}), ("/api/show", {"model": "plain+style"}),
        ("/v1/embeddings", {"model": "plain", "input": "hello"}), ("/tokenize", {"model": "plain", "content": "hello"}),
        ("/api/copy", {"source": "plain", "destination": "x"}), ("/api/pull", {"model": "plain", "stream": False}),
        ("/api/create", {"model": "plain", "from": "x", "stream": False}),
        ("/api/create", {"model": "x", "from": "plain", "stream": False}),
    ]  # fmt: skip
    with running_daemon(LOCALRUN_HOME=str(tmp_path)) as daemon:
        for path, body in asked:
            refused = daemon.http.post(path, json=body, headers=name_only)
            assert refused.status_code == 404, (path, body, refused.text)
            assert not re.search("tiny|big|toml", refused.text), (path, body, refused.text)
        for route in ("/props?model=plain", "/tokenizer_info?model=plain", "/lora-adapters?model=plain",
                      "/v1/models/plain", "/api/v0/models/plain"):  # fmt: skip
            refused = daemon.http.get(route, headers=name_only)
            assert (refused.status_code, re.search("tiny|big|toml", refused.text)) == (404, None)
        loaded = daemon.http.post("/api/generate", json={"model": "plain"}, headers=both)
        assert loaded.json()["done_reason"] == "load"


def test_a_batch_may_name_a_tier(daemon: Daemon) -> None:
    client = client_of(daemon)
    lines = [chat_line(f"r{n}", model="smart") for n in range(3)]
    lines.append(chat_line("tools", model="smart", tools=[TOOL]))
    batch = ended(client, begun(client, encoded(lines)))
    found = lines_of(client, batch.output_file_id)
    assert [line["response"]["body"]["model"] for line in found] == ["tiny"] * 3 + ["big"]
    gone = ended(client, begun(client, encoded([chat_line("one", model="gone")])))
    assert gone.errors is not None
    (error,) = gone.errors.data or ()
    assert error.code == "model_not_found"
    assert (error.message or "").startswith("the model 'nothing' of the tier 'gone' is not here")
