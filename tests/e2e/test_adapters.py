"""Adapters by name through a daemon with a real engine: which one takes effect, and that one engine serves them all."""

from __future__ import annotations

import base64
import json
import math
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from localrun.config import in_short
from localrun.models import builtin
from tests.daemon import Daemon, running_daemon
from tests.lora_file import write_lora, write_vector
from tests.server.media import making


@pytest.fixture(scope="module")
def adapted(daemon: Daemon, tmp_path_factory: pytest.TempPathFactory) -> Daemon:
    """With `style`, a LoRA, and `happy`, a control vector, for the built-in model, of which `tuned` has `style`."""
    folder = tmp_path_factory.mktemp("adapters")
    for path in (write_lora(builtin.model_path(), folder / "style.gguf", seed=1),
                 write_vector(builtin.model_path(), folder / "happy.gguf", strength=8.0)):  # fmt: skip
        create(daemon, path.stem, f"FROM {path}")
    create(daemon, "tuned", "FROM tiny\nADAPTER style")
    return daemon


def create(daemon: Daemon, name: str, modelfile: str) -> None:
    answer = daemon.post("/api/create", model=name, modelfile=modelfile, stream=False)
    assert answer.json() == {"status": "success"}, answer.text


def answer(daemon: Daemon, model: str, **more: Any) -> str:
    body = {"model": model, "prompt": "Tell me a story about", "max_tokens": 12, "temperature": 0, "ignore_eos": True}
    said = daemon.post("/v1/completions", body | more)
    assert said.status_code == 200, said.text
    text: str = said.json()["choices"][0]["text"]
    return text


NAMES = ("tiny", "tiny+style", "tiny+happy", "tiny+style+happy", "tiny+style=-1")


def test_each_set_says_its_own(adapted: Daemon) -> None:
    said = {name: answer(adapted, name) for name in NAMES}
    assert len(set(said.values())) == len(NAMES)
    # What is cached of one set is not taken for another's, whatever way it is asked for.
    assert {name: answer(adapted, name) for name in reversed(NAMES)} == said
    assert answer(adapted, "tiny+style=0+happy") == said["tiny+happy"]
    assert answer(adapted, "tiny", lora=[{"id": "style"}, {"id": "happy", "scale": 1.0}]) == said["tiny+style+happy"]
    assert answer(adapted, "tiny+style", lora=[{"id": "style", "scale": -1}]) == said["tiny+style=-1"]
    assert [row["name"] for row in adapted.http.get("/api/ps").json()["models"]] == ["tiny:latest"]
    assert answer(adapted, "tuned") == said["tiny+style"]
    assert answer(adapted, "tuned", lora=[{"id": "style", "scale": 0}]) == said["tiny"]
    assert {row["name"] for row in adapted.http.get("/api/ps").json()["models"]} == {"tiny:latest", "tuned:latest"}


def test_sets_at_the_same_time(adapted: Daemon) -> None:
    with ThreadPoolExecutor(len(NAMES)) as pool:
        texts = list(pool.map(lambda name: answer(adapted, name, max_tokens=40), NAMES * 2))
    assert all(texts)
    assert len(set(texts[: len(NAMES)])) == len(NAMES)


def test_a_file_that_is_gone_is_the_request_s_error(adapted: Daemon, tmp_path: Path) -> None:
    path = write_lora(builtin.model_path(), tmp_path / "gone.gguf", seed=5)
    create(adapted, "gone", f"FROM {path}")
    path.unlink()
    refused = adapted.post("/v1/completions", model="tiny+gone", prompt="Hello")
    assert refused.status_code == 422
    assert "is gone" in refused.json()["error"]["message"]
    assert answer(adapted, "tiny")


def whole_answer(daemon: Daemon, model: str) -> str:
    """What `streamed_while_removed` is to say: the second answer, of which the prompt is cached too, and without
    drafts, so that both are computed in the same batches and rounded alike."""
    return [answer(daemon, model, max_tokens=200, speculation=False) for _ in range(2)][1]


def streamed_while_removed(daemon: Daemon, model: str, *, removed: str) -> str:
    """As `whole_answer`, but streamed, and after the first token something is removed."""
    body = {"model": model, "prompt": "Tell me a story about", "max_tokens": 200, "temperature": 0}
    body |= {"ignore_eos": True, "speculation": False, "stream": True}
    texts: list[str] = []
    with daemon.http.stream("POST", "/v1/completions", json=body) as stream:
        lines = (line.removeprefix("data: ") for line in stream.iter_lines() if line.startswith("data: {"))
        texts.append(json.loads(next(lines))["choices"][0]["text"])
        assert daemon.http.request("DELETE", "/api/delete", json={"model": removed}).status_code == 200
        for line in lines:
            texts += [choice["text"] for choice in json.loads(line)["choices"]]
    return "".join(texts)


def test_a_stream_keeps_the_adapter_that_is_removed_meanwhile(adapted: Daemon, tmp_path: Path) -> None:
    path = write_lora(builtin.model_path(), tmp_path / "leaving.gguf", seed=6)
    create(adapted, "leaving", f"FROM {path}")
    whole = whole_answer(adapted, "tiny+leaving")
    assert streamed_while_removed(adapted, "tiny+leaving", removed="leaving") == whole
    assert adapted.post("/v1/completions", model="tiny+leaving", prompt="Hello").status_code == 404
    assert answer(adapted, "tiny")


def test_a_file_that_is_replaced_under_its_name_is_another_adapter(adapted: Daemon, tmp_path: Path) -> None:
    path = write_lora(builtin.model_path(), tmp_path / "changing.gguf", seed=7)
    create(adapted, "changing", f"FROM {path}")
    before = answer(adapted, "tiny+changing")
    write_lora(builtin.model_path(), tmp_path / "next.gguf", seed=8).replace(path)
    after = answer(adapted, "tiny+changing")
    assert after not in (before, answer(adapted, "tiny"))
    write_lora(builtin.model_path(), tmp_path / "next.gguf", seed=7).replace(path)
    assert answer(adapted, "tiny+changing") == before


def test_numbers_that_are_none_are_refused_where_they_come_in(adapted: Daemon, tmp_path: Path) -> None:
    path = write_lora(builtin.model_path(), tmp_path / "spoiled.gguf", strength=math.nan)
    refused = adapted.post("/api/create", model="spoiled", modelfile=f"FROM {path}", stream=False)
    assert "NaN or infinite numbers" in refused.json()["error"]
    by_path = adapted.post("/v1/completions", model="tiny", prompt="Hello", lora=[{"id": str(path)}])
    assert by_path.status_code in (404, 422), by_path.text


def test_a_picture_for_a_model_with_an_adapter_is_refused_as_for_the_model_alone(adapted: Daemon) -> None:
    picture = base64.b64encode(making.png(64, 48)).decode()
    texts = []
    for name in ("tiny", "tiny+style"):
        said = adapted.post("/api/chat", model=name, messages=[{"role": "user", "content": "?", "images": [picture]}])
        assert said.status_code == 400
        texts.append(said.json()["error"])
    assert texts[0] == texts[1]


def test_a_base_that_is_removed_leaves_its_stream_and_the_adapter(adapted: Daemon) -> None:
    create(adapted, "mine", "FROM tiny\nPARAMETER num_ctx 2048")
    whole = whole_answer(adapted, "mine+style")
    assert streamed_while_removed(adapted, "mine+style", removed="mine") == whole
    assert adapted.post("/v1/completions", model="mine+style", prompt="Hello").status_code == 404
    ids = {row["id"] for row in adapted.http.get("/v1/models").json()["data"]}
    assert {"tiny", "tiny+style"} <= ids
    assert not any(name.startswith("mine") for name in ids)


def test_an_adapter_with_drafts_and_a_grammar_says_what_it_says_without_drafts(adapted: Daemon) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "string", "maxLength": 20}},
              "required": ["a", "b"], "additionalProperties": False}  # fmt: skip
    said = []
    for more in ({"speculation": "off"}, {}):
        body = {"model": "tiny+style", "prompt": "JSON:", "stream": False, "format": schema,
                "options": {"temperature": 0, "num_predict": 60} | more}  # fmt: skip
        reply = adapted.post("/api/generate", body)
        assert reply.status_code == 200, reply.text
        said.append(reply.json()["response"])
    assert said[0] == said[1]


TABLES = """
[models."with-style"]
adapters = ["style"]

[models."half*"]
adapters = ["./style.gguf=0.5"]

[models."happy"]
adapters = ["{vector}"]

[models."wrong"]
adapters = ["nothing"]
"""


def test_adapters_of_the_settings_file(tmp_path: Path) -> None:
    """As those of a Modelfile; one file with other strengths is other answers, also from the cache of prompts."""
    (tmp_path / "config").mkdir()
    style = write_lora(builtin.model_path(), tmp_path / "config" / "style.gguf", seed=1, strength=0.002)
    vector = write_vector(builtin.model_path(), tmp_path / "happy-vector.gguf", strength=8.0)
    settings = tmp_path / "config" / "localrun.toml"
    settings.write_text(TABLES.format(vector=vector), encoding="utf-8")
    names = ("tiny", "with-style", "half-style", "happy")
    options = ("--slots", "2", "--kv-cells", "1024", "--max-models", "0")
    for _ in range(2):  # the second daemon has the disk cache of the first one
        with running_daemon(*options, fake=False, LOCALRUN_HOME=str(tmp_path)) as daemon:
            create(daemon, "style", f"FROM {style}")
            for name in (*names[1:], "wrong"):
                create(daemon, name, "FROM tiny")
            said = {name: answer(daemon, name) for name in names}
            assert len(set(said.values())) == len(names)
            assert {name: answer(daemon, name) for name in reversed(names)} == said
            assert answer(daemon, "tiny+style") == said["with-style"]
            assert answer(daemon, "tiny+style=0.5") == said["half-style"]
            assert answer(daemon, "half-style", lora=[{"id": "style"}]) == said["with-style"]
            refused = daemon.post("/v1/completions", model="wrong", prompt="Hello")
            assert refused.status_code == 422
            assert f"{settings}: [models.\"wrong\"]: adapters has 'nothing'" in refused.json()["error"]["message"]
            shown = {name: daemon.post("/api/show", model=name).json() for name in ("half-style", "wrong")}
            assert shown["half-style"]["localrun"]["adapters"] == [str(style)]
            assert shown["half-style"]["localrun"]["load"] == {"adapters": ["./style.gguf=0.5"]}
            assert "ADAPTER" not in shown["half-style"]["modelfile"]
            assert "'nothing' not found" in shown["wrong"]["localrun"]["no_adapters"]
            fit = {name: daemon.http.get("/localrun/v1/fit", params={"model": name}) for name in (*names, "wrong")}
            rests = [fit[name].json()["total_bytes"] for name in ("tiny", "half-style")]
            assert rests[1] - rests[0] == style.stat().st_size
            assert fit["wrong"].status_code == 422
            loaded = {in_short(row["name"]) for row in daemon.http.get("/api/tags").json()["models"] if row["loaded"]}
            assert loaded == set(names)
            removed = daemon.http.request("DELETE", "/api/delete", json={"model": "style"})
            (note,) = removed.json()["notes"]
            assert note.startswith(f"requests to 'with-style' are refused from now on: {settings}: [models.")
