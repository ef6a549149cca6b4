"""What one key learns of the machine and of others: every route that answers a GET, and what is said of models that it
may not use."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import anthropic
import httpx2
import openai
import pytest

from localrun.access.keys import KeyFile
from localrun.models import builtin
from localrun.models.gguf.reader import read_header
from localrun.server.http.path_redaction import hide, redact_paths, redact_paths_in
from localrun.server.jobs.registry import MAX_ENDED
from tests.daemon import Daemon, running_daemon
from tests.lora_file import write_lora
from tests.projector_file import write_projector
from tests.registry import Layer, Registry
from tests.server.batches.batch_files import begun, chat_line, encoded, ended

SETTINGS = """
[tiers.shared]
small = "tiny"
large = "fox"

[tiers.closed]
small = "tiny"
large = "secret"

[models.fox]
draft = "secret"
"""
PROMPT = "the-neighbour-s-words"
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
MODELS = ("tiny", "fox", "tuned", "style", "shared", "damaged", "tiny+style")


class Place(NamedTuple):
    """A daemon, a key that may use all models, and what of another key's there is: ids and words."""

    daemon: Daemon
    home: Path
    headers: dict[str, str]
    narrow: dict[str, str]
    of_others: list[str]
    ids: list[str]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    home = tmp_path_factory.mktemp("home of somebody")
    (home / "config").mkdir()
    (home / "config" / "localrun.toml").write_text(SETTINGS, encoding="utf-8")
    models, loras = home / "data" / "models", home / "loras"
    for folder in (models, loras):
        folder.mkdir(parents=True)
    for name in ("fox", "secret"):
        shutil.copy(builtin.model_path(), models / f"{name}.gguf")
    write_projector(models / "mmproj-fox.gguf", width=read_header(builtin.model_path()).n_embd)
    (models / "damaged.gguf").write_bytes(b"GGUF" + bytes(60))
    (home / "lm").mkdir()
    with running_daemon(LOCALRUN_HOME=str(home), LOCALRUN_MODEL_DIRS=str(home / "lm")) as daemon:
        for name, seed in (("style", 1), ("hidden", 2)):
            path = write_lora(builtin.model_path(), loras / f"{name}.gguf", seed=seed)
            _made(daemon, name, f"FROM {path}")
        _made(daemon, "tuned", "FROM tiny\nADAPTER style")
        _made(daemon, "made", "FROM secret\nSYSTEM Be brief.")
        keys = KeyFile(home / "data")
        texts = {
            "neighbour": keys.create("neighbour").text,
            "mine": keys.create("mine").text,
            "narrow": keys.create("narrow", models=("tiny", "fox", "style")).text,
        }
        mine, narrow = ({"authorization": f"Bearer {texts[name]}"} for name in ("mine", "narrow"))
        ids = _things_of(daemon, texts["neighbour"], PROMPT)
        # The one who looks has things of its own, so that lists are not empty.
        _things_of(daemon, texts["mine"], "words of my own")
        yield Place(daemon, home, mine, narrow, [*ids, "neighbour", PROMPT], ids)


def _made(daemon: Daemon, name: str, modelfile: str) -> None:
    answer = daemon.post("/api/create", model=name, modelfile=modelfile, stream=False)
    assert answer.json() == {"status": "success"}, answer.text


def _things_of(daemon: Daemon, key: str, words: str) -> list[str]:
    """The ids of a request, a response, files and batches of a key."""
    chat = CHAT | {"messages": [{"role": "user", "content": words}]}
    with openai.OpenAI(base_url=f"{daemon.url}/v1", api_key=key, max_retries=0) as client:
        response = client.responses.create(model="tiny", input=words, max_output_tokens=4)
        lines = [chat_line(words, messages=chat["messages"]), chat_line("two", n=-1)]
        batch = ended(client, begun(client, encoded(lines), metadata={"note": words}))
    with anthropic.Anthropic(base_url=daemon.url, api_key=key, max_retries=0) as of_anthropic:
        messages = of_anthropic.messages.batches.create(requests=[{"custom_id": "one", "params": chat}])  # type: ignore[typeddict-item]
    headers = {"authorization": f"Bearer {key}", "x-localrun-client": words}
    request = daemon.http.post("/v1/chat/completions", json=chat, headers=headers).headers["x-localrun-request"]
    files = [batch.input_file_id, batch.output_file_id, batch.error_file_id]
    return [name for name in (response.id, batch.id, messages.id, request, *files) if name]


def _looked_at(place: Place, path: str) -> str:
    """The first kilobytes of an answer with its status; those of a stream that does not end as well."""
    with place.daemon.http.stream("GET", path, headers=place.headers) as answer:
        if answer.headers.get("content-type", "").startswith("text/event-stream"):
            return str(answer.status_code) + next(answer.iter_text())
        return str(answer.status_code) + answer.read().decode(errors="replace")


def _paths(place: Place) -> list[str]:
    """Every route that answers a GET, with all that could stand in it."""
    document = place.daemon.http.get("/openapi.json", headers=place.headers).json()
    found = []
    for template, operations in document["paths"].items():
        if "get" not in operations:
            continue
        names = re.findall(r"{[^}]+}", template)
        named = [template.replace(names[0], each) for each in (*place.ids, *MODELS)] if names else [template]
        found += named
        if not names:
            found += [f"{template}?model={model}" for model in MODELS]
            found += [f"{template}?by=model", f"{template}?query=tiny", f"{template}?digest=x"]
    return found


def test_no_route_tells_a_key_where_files_lie_or_what_others_do(place: Place) -> None:
    paths = _paths(place)
    assert len(paths) > 150
    assert {"/api/tags", "/localrun/v1/cache", "/v1/models/fox", "/props?model=fox", "/metrics"} <= set(paths)
    told = {path: _looked_at(place, path) for path in paths}
    assert sum(body.startswith("200") for body in told.values()) > 50
    hidden = [str(place.home), place.home.name, *place.of_others]
    leaks = [(path, word) for path, body in told.items() for word in hidden if word in body and word not in path]
    assert leaks == []


def test_neither_do_answers_about_models_and_errors(place: Place) -> None:
    asked: list[tuple[str, str, Any]] = [
        *(("POST", "/api/show", {"model": model, "verbose": True}) for model in MODELS),
        *(("POST", path, {"model": "damaged", "messages": CHAT["messages"], "prompt": "a", "input": "a"})
          for path in ("/v1/chat/completions", "/api/chat", "/v1/messages", "/completion", "/v1/responses",
                       "/api/embed", "/v1/completions", "/api/generate", "/tokenize", "/apply-template")),
        ("POST", "/api/create", {"model": "new", "from": "damaged"}),
        ("POST", "/api/create", {"model": "new", "from": "damaged", "stream": False}),
        ("POST", "/localrun/v1/gc", {}),
        ("POST", "/api/copy", {"source": "damaged", "destination": "other"}),
        ("DELETE", "/api/delete", {"model": "damaged"}),
    ]  # fmt: skip
    for method, path, body in asked:
        answer = place.daemon.http.request(method, path, json=body, headers=place.headers)
        assert place.home.name not in answer.text, (path, body, answer.text)


def test_shown_models_have_names_in_place_of_paths(place: Place) -> None:
    shown = place.daemon.http.post("/api/show", json={"model": "fox"}, headers=place.headers).json()
    assert "FROM fox\n" in shown["modelfile"]
    assert shown["localrun"]["path"] == "fox"
    assert shown["localrun"]["projector"]["path"] == "mmproj-fox.gguf"
    assert place.daemon.http.get("/localrun/v1/cache", headers=place.headers).json()["disk_folder"] == "kv"


def test_who_runs_the_daemon_is_told_where_files_lie(place: Place) -> None:
    keys = KeyFile(place.home / "data")
    admin = {"authorization": f"Bearer {keys.create('admin', admin=True).text}"}
    shown = place.daemon.http.post("/api/show", json={"model": "fox"}, headers=admin).json()
    assert shown["localrun"]["path"] == str(place.home / "data" / "models" / "fox.gguf")
    assert f"FROM {place.home}" in shown["modelfile"].replace('"', "")
    cache = place.daemon.http.get("/localrun/v1/cache", headers=admin).json()
    assert cache["disk_folder"].startswith(str(place.home))


PAIRS = [
    ("secret", "absent"), ("tiny+secret", "tiny+absent"), ("tiny+hidden", "tiny+absent"),
    ("tiny+style+hidden", "tiny+style+absent"), ("secret+style", "absent+style"), ("closed", "absent"),
    ("closed+style", "absent+style"), ("SECRET:latest", "ABSENT:latest"), ("tiny+hidden=0.5", "tiny+absent=0.5"),
]  # fmt: skip
ASKS: list[tuple[str, str, dict[str, Any]]] = [
    ("POST", "/v1/chat/completions", {"messages": CHAT["messages"]}),
    ("POST", "/v1/completions", {"prompt": "a"}), ("POST", "/v1/responses", {"input": "a"}),
    ("POST", "/v1/messages", {"messages": CHAT["messages"], "max_tokens": 1}),
    ("POST", "/v1/messages/count_tokens", {"messages": CHAT["messages"]}),
    ("POST", "/v1/embeddings", {"input": "a"}), ("POST", "/v1/rerank", {"query": "a", "documents": ["b"]}),
    ("POST", "/v1/fim/completions", {"prompt": "a"}), ("POST", "/infill", {"input_prefix": "a", "input_suffix": "b"}),
    ("POST", "/api/chat", {"messages": CHAT["messages"]}), ("POST", "/api/chat", {"messages": []}),
    ("POST", "/api/generate", {"prompt": "a"}), ("POST", "/api/generate", {"keep_alive": 0}),
    ("POST", "/api/embed", {"input": "a"}), ("POST", "/api/show", {}), ("POST", "/api/pull", {}),
    ("DELETE", "/api/delete", {}), ("POST", "/api/create", {"from": "tiny"}),
    ("POST", "/api/v0/chat/completions", {"messages": CHAT["messages"]}), ("POST", "/completion", {"prompt": "a"}),
    ("POST", "/tokenize", {"content": "a"}), ("POST", "/detokenize", {"tokens": [1]}),
    ("POST", "/apply-template", {"messages": CHAT["messages"]}),
]  # fmt: skip
GETS = ("/v1/models/{}", "/api/v0/models/{}", "/props?model={}", "/slots?model={}", "/tokenizer_info?model={}",
        "/lora-adapters?model={}", "/localrun/v1/fit?model={}")  # fmt: skip


def _told(place: Place, answer: httpx2.Response, name: str) -> tuple[Any, ...]:
    """All of it but the name and what is new each time."""
    text = re.sub(r"(req|resp|msg)_\w+", "id", answer.text).replace(name, "NAME")
    kept = {key: value for key, value in answer.headers.items() if not re.search("date|request|length", key)}
    return answer.status_code, text, kept


@pytest.mark.parametrize(("there", "absent"), PAIRS)
def test_a_model_that_a_key_may_not_use_is_told_of_as_one_that_is_not_here(
    place: Place, there: str, absent: str
) -> None:
    http, headers = place.daemon.http, place.narrow
    for method, path, body in ASKS:
        told = [
            _told(place, http.request(method, path, json=body | {"model": name}, headers=headers), name)
            for name in (there, absent)
        ]
        assert told[0] == told[1], (path, body)
        assert told[0][0] == 404, (path, told)
    for path in GETS:
        there_path, absent_path = (path.format(name.replace("+", "%2B")) for name in (there, absent))
        told = [
            _told(place, http.get(one, headers=headers), name)
            for one, name in ((there_path, there), (absent_path, absent))
        ]
        assert told[0] == told[1], path


def test_nor_is_what_the_cache_has_of_one(place: Place) -> None:
    http = place.daemon.http
    assert http.post("/v1/chat/completions", json=CHAT | {"model": "secret"}, headers=place.headers).status_code == 200
    of_all, of_narrow = (
        {row["model"] for row in http.get("/localrun/v1/cache", headers=headers).json()["models"]}
        for headers in (place.headers, place.narrow)
    )
    assert {"secret", "tiny"} <= of_all
    assert of_narrow == of_all - {"secret"}


@pytest.mark.parametrize(("path", "field"), [("/api/pull", "model"), ("/api/create", "from")])
def test_who_is_in_the_machine_s_network_is_not_told(place: Place, path: str, field: str) -> None:
    with Registry() as registry:
        there = registry.add("acme/fox", Layer("model", builtin.model_path().read_bytes()))
        port = there.partition("/")[0].rpartition(":")[2]
        names = [there, "127.0.0.1:9/acme/fox:latest", f"localhost:{port}/acme/fox:latest", "10.0.0.1/acme/fox:latest"]
        told = set()
        for name in names:
            body = {"model": "fox2", "insecure": True, "stream": False, field: name}
            answer = place.daemon.http.post(path, json=body, headers=place.headers)
            told.add((answer.status_code, answer.text.replace(name.partition("/")[0].partition(":")[0], "")))
        assert len(told) == 1
        assert told.pop()[0] == 502
        assert registry.asked_for("/") == 0
        key = KeyFile(place.home / "data").create(field, admin=True).text
        admin = {"authorization": f"Bearer {key}"}
        body = {"model": "fox2", "stream": False, field: there}
        assert place.daemon.http.post(path, json=body, headers=admin).json() == {"status": "success"}


def test_what_stays_of_a_deleted_model_is_named_without_its_folder(place: Place) -> None:
    for method, path, body in (("POST", "/api/create", {"from": "tiny", "system": "Be brief.", "stream": False}),
                               ("DELETE", "/api/delete", {})):  # fmt: skip
        answer = place.daemon.http.request(method, path, json=body | {"model": "gone"}, headers=place.headers)
    assert answer.json()["kept"] == [{"path": builtin.model_path().name, "reason": "it is built in"}]


def test_nor_is_one_found_by_other_fields(place: Place) -> None:
    http, headers = place.daemon.http, place.narrow
    adapters = place.daemon.http.get("/lora-adapters", headers=place.headers).json()
    hidden = next(row for row in adapters if row["name"] == "hidden")
    pairs: list[tuple[Any, Any, dict[str, Any], dict[str, Any]]] = []
    for one, other in (("hidden", "absent"), ("secret", "absent"), (hidden["id"], 7),
                       (hidden["digest"], "sha256:" + "0" * 64)):  # fmt: skip
        pairs.append((one, other, {"lora": [{"id": one}]}, {"lora": [{"id": other}]}))
    pairs.append(("secret", "absent", {"draft": "secret"}, {"draft": "absent"}))
    for one, other, *bodies in pairs:
        told = [
            _told(place, http.post("/v1/chat/completions", json=CHAT | body, headers=headers), str(name))
            for name, body in zip((one, other), bodies, strict=True)
        ]
        assert told[0] == told[1]
        assert told[0][0] == 404
    for field in ("from", "draft"):
        told = []
        for name in ("secret", "absent"):
            body = {"model": "fox2", "from": "tiny", "stream": False} | {field: name}
            told.append(_told(place, http.post("/api/create", json=body, headers=headers), name))
        assert told[0] == told[1]
    # What was asked for by the same key is in its own list of requests.
    text = KeyFile(place.home / "data").create("narrow-too", models=("tiny", "fox", "style", "made")).text
    headers = {"authorization": f"Bearer {text}"}
    for name in ("secret", "closed", "hidden"):
        for path in ("/v1/models", "/api/tags", "/api/v0/models", "/lora-adapters", "/localrun/v1/snapshot", "/api/ps",
                     "/localrun/v1/cache", "/localrun/v1/pulls", "/slots", "/localrun/v1/fit?model=fox"):  # fmt: skip
            assert name not in http.get(path, headers=headers).text, (name, path)
        for model in ("fox", "made"):
            assert name not in http.post("/api/show", json={"model": model}, headers=headers).text


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("/home/somebody/models/fox.gguf", "fox.gguf"),
        ("/home/some body/models/my fox.gguf", "my fox.gguf"),
        ("C:\\Users\\somebody\\fox.gguf", "fox.gguf"),
        ("'/home/some body/fox.gguf' is damaged: no magic", "'fox.gguf' is damaged: no magic"),
        ("/mnt/models/fox.gguf: it is cut short (8 bytes)", "fox.gguf: it is cut short (8 bytes)"),
        ("~/models/fox.gguf cannot be read; see /v1/files/ID", "fox.gguf cannot be read; see /v1/files/ID"),
        ("GET /v1/models or DELETE /localrun/v1/cache, and/or 1/2", None),
        ("hf.co/owner/repo:Q4_0 and https://example.org/a/b", None),
        ("/lora-adapters", None),
        ("</think>a</think></tool>", None),
        ("\"$ref\": '#/$defs/a/b' leads nowhere, and '/x/y' is no tool", None),
        ("/foo/bar and ^/a/b/c$ and 2026/11/23, or ~3/4 of text/event-stream", None),
        ("copied /mnt/a/b to hf.co/owner/repo", "copied b to hf.co/owner/repo"),
        ("file /mnt/my models/x y/fox.gguf: no magic", "file fox.gguf: no magic"),
        ('"/home/some body\'s/fox.gguf" is damaged', '"fox.gguf" is damaged'),
        ("C:\\Users\\some body\\fox.gguf: no magic", "fox.gguf: no magic"),
        ("see:/home/somebody/fox.gguf, file:///home/somebody/fox.gguf", "see:fox.gguf, file://fox.gguf"),
        ("\\\\server\\share\\fox.gguf", "fox.gguf"),
        ("/our disk/some models/fox.gguf is not here", "fox.gguf is not here"),
    ],
)
def test_paths_in_texts(text: str, shown: str | None) -> None:
    hide([Path("/our disk")])
    assert redact_paths(text) == (text if shown is None else shown)
    assert redact_paths_in({"a": [text], "template": text, "n": 1}) == {
        "a": [text if shown is None else shown], "template": text, "n": 1,
    }  # fmt: skip


def test_one_keys_requests_push_no_row_of_anothers_out() -> None:
    with running_daemon() as daemon:
        keys = {name: KeyFile(daemon.home / "data").create(name).text for name in ("ida", "zed")}
        headers = {name: {"authorization": f"Bearer {text}"} for name, text in keys.items()}
        for name in ("ida", *["zed"] * (MAX_ENDED + 5)):
            body = {"model": "tiny", "prompt": "hi", "max_tokens": 1}
            assert daemon.http.post("/v1/completions", json=body, headers=headers[name]).status_code == 200
        n_rows = {
            name: len(daemon.http.get("/localrun/v1/requests", headers=sent).json()["requests"])
            for name, sent in headers.items()
        }
        assert n_rows == {"ida": 1, "zed": MAX_ENDED - 1}


def test_without_keys_everything_is_told(tmp_path: Path) -> None:
    with running_daemon() as daemon:
        shown = daemon.post("/api/show", model="tiny").json()
        assert shown["localrun"]["path"] == str(builtin.model_path())
        assert str(daemon.home) in json.dumps(daemon.http.get("/localrun/v1/cache").json())
