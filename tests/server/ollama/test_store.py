"""The routes that change the store (create, blobs, copy, delete, push, gc), on a daemon with fake engines."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import signal
import socket
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx2
import psutil
import pytest
from starlette.applications import Starlette

from localrun.config import in_short
from localrun.models.gguf.reader import read_header
from localrun.models.storage.blobs import RESERVE_BYTES, _exact
from localrun.server.http.exchange import PIECE_BYTES
from localrun.server.openapi.operations import routes
from tests.daemon import Daemon, running_daemon
from tests.lora_file import write_lora
from tests.models.handmade import VALID
from tests.says import says
from tests.support.synthesis.synthesize import synthesize


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("store")


@pytest.fixture(scope="module")
def f16(folder: Path) -> Path:
    synthesize("tiny", "F16", folder / "f16.gguf")
    return folder / "f16.gguf"


@pytest.fixture(scope="module")
def daemon(folder: Path, f16: Path) -> Iterator[Daemon]:
    """Bodies of JSON may have 64 KiB; the files that are uploaded here have more."""
    foreign = folder / "foreign"
    foreign.mkdir()
    shutil.copyfile(f16, foreign / "theirs.gguf")
    (foreign / "broken.gguf").write_bytes(b"GGUF nonsense")
    environment = {"LOCALRUN_MAX_BODY_BYTES": "65536", "LOCALRUN_MODEL_DIRS": str(foreign)}
    with running_daemon(LOCALRUN_MODELS=str(folder / "models"), **environment) as running:
        yield running


def names(daemon: Daemon) -> list[str]:
    return [in_short(row["name"]) for row in daemon.http.get("/api/tags").json()["models"]]


def lines(answer: httpx2.Response) -> list[dict[str, Any]]:
    assert answer.status_code == 200, answer.text
    return [json.loads(line) for line in answer.text.splitlines()]


def delete(daemon: Daemon, name: str) -> httpx2.Response:
    return daemon.http.request("DELETE", "/api/delete", json={"model": name})


def digest_of(path: Path) -> str:
    return f"sha256:{hashlib.sha256(path.read_bytes()).hexdigest()}"


def left_over(folder: Path) -> list[str]:
    return [path.name for path in (folder / "models").rglob("*.localrun-temp")]


# --- blobs ------------------------------------------------------------------------------------------------------------


def test_a_file_is_uploaded_once(daemon: Daemon, folder: Path, f16: Path) -> None:
    digest = digest_of(f16)
    assert daemon.http.head(f"/api/blobs/{digest}").status_code == 404
    for content_type in ({}, {"content-type": "application/octet-stream"}, {"content-type": "application/json"}):
        answer = daemon.http.post(f"/api/blobs/{digest}", content=f16.read_bytes(), headers=content_type)
        assert answer.status_code in (200, 201), answer.text
    assert daemon.http.post(f"/api/blobs/{digest}", content=f16.read_bytes()).status_code == 200
    assert daemon.http.head(f"/api/blobs/{digest}").status_code == 200
    stored = folder / "models" / "blobs" / digest.replace(":", "-")
    assert stored.read_bytes() == f16.read_bytes()


def test_pieces_of_unknown_length(daemon: Daemon) -> None:
    content = bytes(range(256)) * 4096
    digest = f"sha256:{hashlib.sha256(content).hexdigest()}"
    pieces = (content[at : at + 100_000] for at in range(0, len(content), 100_000))
    assert daemon.http.post(f"/api/blobs/{digest}", content=pieces).status_code == 201


def test_the_wrong_content_is_refused_and_leaves_nothing(daemon: Daemon, folder: Path) -> None:
    wrong = "sha256:" + "0" * 64
    answer = daemon.http.post(f"/api/blobs/{wrong}", content=b"something else")
    assert answer.status_code == 400
    assert "has the digest" in answer.json()["error"]
    assert daemon.http.head(f"/api/blobs/{wrong}").status_code == 404
    assert left_over(folder) == []


@pytest.mark.parametrize("digest", ["sha256:short", "..%2f..%2fetc%2fpasswd", "md5:" + "0" * 32])
def test_what_is_no_digest(digest: str, daemon: Daemon) -> None:
    assert daemon.http.head(f"/api/blobs/{digest}").status_code in (400, 404)
    assert daemon.http.post(f"/api/blobs/{digest}", content=b"x").status_code in (400, 404)


def test_an_upload_that_breaks_off_leaves_nothing(daemon: Daemon, folder: Path) -> None:
    digest = "sha256:" + "1" * 64
    with socket.create_connection(("127.0.0.1", daemon.port)) as client:
        head = f"POST /api/blobs/{digest} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 3000000\r\n\r\n"
        client.sendall(head.encode() + b"x" * 2_000_000)
        deadline_s = time.monotonic() + 30
        while not left_over(folder) and time.monotonic() < deadline_s:
            time.sleep(0.01)
        assert left_over(folder)
    while left_over(folder) and time.monotonic() < deadline_s:
        time.sleep(0.01)
    assert left_over(folder) == []


def test_a_web_page_cannot_upload_a_form(daemon: Daemon) -> None:
    digest = "sha256:" + "2" * 64
    headers = {"origin": "http://localhost:3000", "content-type": "text/plain"}
    assert daemon.http.post(f"/api/blobs/{digest}", content=b"x", headers=headers).status_code == 415
    assert daemon.http.post("/api/create", content=b"x" * 70_000).status_code == 413


# --- create -----------------------------------------------------------------------------------------------------------


def test_a_model_of_another_takes_effect(daemon: Daemon) -> None:
    made = daemon.post(
        "/api/create",
        {"model": "fox", "from": "tiny", "system": "SYS", "parameters": {"num_predict": 3, "stop": "zzz"},
         "messages": [{"role": "user", "content": "U"}, {"role": "assistant", "content": "A"}]},
    )  # fmt: skip
    statuses = [line["status"] for line in lines(made)]
    assert (statuses[0], statuses[-2:]) == ("reading model metadata", ["writing manifest", "success"])
    hello = [{"role": "user", "content": "hello"}]
    plain = daemon.post("/api/chat", model="tiny", messages=hello, stream=False, options={"num_predict": 3}).json()
    own = daemon.post("/api/chat", model="fox", messages=hello, stream=False).json()
    assert own["eval_count"] <= 3
    n_more = len("<system\nSYS>\n<user\nU>\n<assistant\nA>\n")
    assert own["prompt_eval_count"] == plain["prompt_eval_count"] + n_more
    told = daemon.post(
        "/api/chat", model="fox", stream=False, options={"num_predict": 1},
        messages=[{"role": "system", "content": "other"}, *hello],
    ).json()  # fmt: skip
    assert told["prompt_eval_count"] == own["prompt_eval_count"] + len("other") - len("SYS")
    assert told["eval_count"] == 1
    generated = daemon.post("/api/generate", model="fox", prompt="hello", stream=False).json()
    assert generated["prompt_eval_count"] == own["prompt_eval_count"]


def test_a_template_of_ones_own(daemon: Daemon) -> None:
    template = "{% for m in messages %}[{{ m.content }}]{% endfor %}"
    daemon.post("/api/create", {"model": "bare", "from": "tiny", "template": template, "stream": False})
    answer = daemon.post(
        "/api/chat", model="bare", messages=[{"role": "user", "content": "hello"}], stream=False
    ).json()
    assert answer["prompt_eval_count"] == len("[hello]")
    assert daemon.post("/api/show", model="bare").json()["template"] == template


def test_names_that_share_files_share_an_engine(daemon: Daemon) -> None:
    daemon.post("/api/copy", source="tiny", destination="again")
    daemon.post("/api/generate", model="tiny", keep_alive="5m")
    daemon.post("/api/generate", model="again", keep_alive="5m")
    assert [row["name"] for row in daemon.http.get("/api/ps").json()["models"]] == ["tiny:latest"]
    rows = daemon.http.get("/api/tags").json()["models"]
    loaded = {row["name"]: row["loaded_as"] for row in rows if row["loaded"]}
    assert (loaded["tiny:latest"], loaded["again:latest"]) == ("tiny:latest", "tiny:latest")
    assert daemon.post("/api/generate", model="again", prompt="hi", stream=False).json()["model"] == "again"


def test_an_adapter_is_a_model_of_its_own(daemon: Daemon, folder: Path, f16: Path) -> None:
    lora = write_lora(f16, folder / "lora.gguf")
    daemon.http.post(f"/api/blobs/{digest_of(lora)}", content=lora.read_bytes())
    body = {"model": "tuned", "from": str(f16), "adapters": {"lora.gguf": digest_of(lora)}, "stream": False}
    assert daemon.post("/api/create", body).json() == {"status": "success"}
    shown = daemon.post("/api/show", model="tuned").json()
    assert shown["localrun"]["adapters"] == [str(folder / "models" / "blobs" / digest_of(lora).replace(":", "-"))]
    assert "ADAPTER " in shown["modelfile"]


def test_a_modelfile_is_read_with_its_lines(daemon: Daemon, f16: Path) -> None:
    def create(text: str) -> httpx2.Response:
        body = {"model": "mf", "modelfile": text, "modelfile_folder": str(f16.parent), "stream": False}
        return daemon.post("/api/create", body)

    text = 'FROM ./f16.gguf\nPARAMETER stop "a"\nPARAMETER stop "b"\nPARAMETER top_k 7\nSYSTEM Be brief.\nLICENSE MIT\n'
    assert create(text + "REQUIRES 0.14.0\n").json() == {"status": "success"}
    shown = daemon.post("/api/show", model="mf").json()
    assert (shown["system"], shown["license"], shown["requires"]) == ("Be brief.", "MIT", "0.14.0")
    assert [line.split() for line in shown["parameters"].splitlines()[1:]] == [
        ["stop", '"a"'], ["stop", '"b"'], ["top_k", "7"],
    ]  # fmt: skip
    again = daemon.post("/api/create", {"model": "mf2", "modelfile": shown["modelfile"], "stream": False})
    assert again.json() == {"status": "success"}
    assert daemon.post("/api/show", model="mf2").json()["parameters"] == shown["parameters"]
    for wrong, message in (
        ("FROM ./f16.gguf\nPARAMETER top_p 7", "line 2 of the Modelfile: parameters.top_p: expected"),
        ("FROM ./f16.gguf\n\nPARAMETER heat 7", "line 3 of the Modelfile: 'heat' is no parameter; they are"),
        (
            "FROM ./f16.gguf\nPARAMETER Temprature 7",
            "line 2 of the Modelfile: 'temprature' is no parameter; did you mean 'temperature'?",
        ),
        ("FORM ./f16.gguf", "line 1 of the Modelfile: 'FORM' is no instruction; did you mean 'FROM'?"),
        ("FROM ./f16.gguf\nREQUIRES 99.1", "the model asks for Ollama 99.1"),
        ("FROM ./nothing.gguf", "there is no file"),
    ):
        answer = create(wrong)
        assert answer.status_code in (400, 404)
        assert message in answer.json()["error"]
    assert daemon.post("/api/show", model="mf").json()["system"] == "Be brief."


OLLAMAS = 'FROM tiny\nTEMPLATE """{{ .Prompt }}"""\nRENDERER qwen3-coder\nPARSER qwen3-coder\nPARAMETER top_k 7\n'


@pytest.mark.parametrize(
    "body",
    [
        {"modelfile": OLLAMAS},
        {"from": "tiny", "template": "{{ .Prompt }}", "renderer": "qwen3-coder", "parser": "qwen3-coder",
         "parameters": {"top_k": 7}},
    ],
    ids=["as a Modelfile", "as fields"],
)  # fmt: skip
def test_what_ollama_itself_writes_makes_a_model(daemon: Daemon, body: dict[str, Any]) -> None:
    told = lines(daemon.post("/api/create", {"model": "from-ollama"} | body))
    left_out = [line["status"] for line in told if line["status"].startswith("leaving out ")]
    assert len(left_out) == 1
    for what in ("renderer", "parser", "go template"):
        assert what in left_out[0].lower()
    assert told[-1] == {"status": "success"}
    shown = daemon.post("/api/show", model="from-ollama").json()
    assert ["top_k", "7"] in [line.split() for line in shown["parameters"].splitlines()]
    assert shown["template"] == daemon.post("/api/show", model="tiny").json()["template"]


@pytest.mark.parametrize(
    ("go", "said", "kept"),
    [
        ("{{ .Prompt }}", ("the Go template: nothing reads it", "that of ChatML is used: a guess"), ""),
        ("[INST] {{ .Prompt }} [/INST]", ("the Go template: that of Mistral is used, as its marks say",), "[INST]"),
    ],
)
def test_it_is_said_which_template_stands_in_for_go_s(
    daemon: Daemon, folder: Path, go: str, said: tuple[str, ...], kept: str
) -> None:
    (folder / "bare.gguf").write_bytes(VALID)
    body = {"model": "bare", "from": str(folder / "bare.gguf"), "template": go}
    statuses = [json.loads(line)["status"] for line in daemon.post("/api/create", body).text.splitlines()]
    assert says("\n".join(statuses), *said)
    assert ("is used: a guess" in str(statuses)) == (not kept)
    shown = daemon.post("/api/show", model="bare").json()
    assert kept in shown["template"]
    assert bool(shown["template"]) == bool(kept)
    assert len(shown["localrun"]["notes"]) == (not kept)


def test_a_context_beyond_the_model_s_is_cut_and_said(daemon: Daemon) -> None:
    made = daemon.post("/api/create", model="long", **{"from": "tiny"}, parameters={"num_ctx": 999_999})
    assert "num_ctx 999999 is more than the model's context, and 4096 is used" in made.text
    shown = daemon.post("/api/show", model="long").json()["localrun"]
    assert shown["load"]["num_ctx"] == 4096
    assert says(str(shown["notes"]), "num_ctx 999999", "4096 is used")
    for name, ignored in (("tiny", "num_ctx 8192 is more than the model's context, and 4096 is used"), ("long", "")):
        body = {"model": name, "prompt": "x", "stream": False, "options": {"num_ctx": 8192} if ignored else {}}
        answer = daemon.post("/api/generate", body)
        assert answer.status_code == 200
        assert answer.headers.get("x-localrun-ignored", "").startswith(ignored)


@pytest.mark.parametrize(
    "template",
    [
        "{% for t in tools %}{{ t }}{% endfor %}{% for m in messages %}{{ m.content }}{% endfor %}",
        "{{ 'Functions: ' + functions + datetime }}{% for m in messages %}{{ m.content }}{% endfor %}",
    ],
    ids=["goes through tools that are not there", "has names of its own for the tools and the time"],
)
def test_templates_of_real_models_are_taken(daemon: Daemon, template: str) -> None:
    made = daemon.post("/api/create", model="templated", **{"from": "tiny"}, template=template, stream=False)
    assert made.json() == {"status": "success"}
    body = {"model": "templated", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
    assert daemon.post("/v1/chat/completions", body).status_code == 200


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("copy", {"source": "", "destination": "x"}, "source: the model name is empty"),
        ("copy", {"source": "tiny", "destination": "a b"}, "destination: the model name 'a b' is neither"),
        ("create", {"model": "x", "from": "a b"}, "from: the model name 'a b' is neither"),
        ("create", {"model": "x", "from": "tiny", "parameters": {"top_k": "few"}}, "parameters: top_k is 'few'"),
        ("create", {"model": "x", "from": "tiny", "parameters": {"heat": 7}}, "parameters: 'heat' is no parameter"),
        ("create", {"model": "x", "from": "tiny", "parameters": {"top_p": 7}}, "parameters.top_p: expected"),
        ("create", {"model": "x", "from": "tiny", "draft": "a b"}, "draft: the model name 'a b' is neither"),
    ],
)
def test_a_wrong_value_is_told_of_the_field_that_it_came_in(
    daemon: Daemon, path: str, body: dict[str, Any], message: str
) -> None:
    answer = daemon.post(f"/api/{path}", body)
    assert answer.status_code == 400
    assert answer.json()["error"].startswith(message)


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        ({}, 400, "from: give either"),
        ({"from": "127.0.0.1:9/nobody/nothing", "stream": False}, 502, "127.0.0.1:9 cannot be reached"),
        ({"from": "tiny", "model": "tiny"}, 400, "built-in"),
        ({"from": "tiny", "model": "../x"}, 400, "model name"),
        ({"from": "tiny", "model": "x.gguf"}, 400, "path"),
        ({"from": "tiny", "template": "{% if %}"}, 422, "template is broken"),
        ({"from": "tiny", "parameters": {"temperature": "hot"}}, 400, "not a number"),
        ({"from": "tiny", "parameters": {"rope_frequency_scale": "nan"}}, 400, "not a number"),
        ({"modelfile": "FROM tiny\nPARAMETER temperature inf"}, 400, "line 2.*not a number"),
        ({"from": "tiny", "parameters": {"num_thread": 1000}}, 400, "num_thread: expected `int` <= 512"),
        ({"from": "tiny", "messages": [{"role": "dog", "content": ""}]}, 400, r"messages\[0\].role"),
        ({"from": "tiny", "quantize": "q9"}, 400, "is not one of Q8_0"),
        ({"files": {"a.gguf": "sha256:" + "0" * 64}}, 404, "upload it first"),
        ({"files": {"a.safetensors": "sha256:" + "0" * 64}}, 400, "convert it to GGUF"),
        ({"from": "tiny", "adapters": {"../a": "sha256:" + "0" * 64}}, 400, "climbs out"),
    ],
)
def test_refusals_change_nothing(body: dict[str, Any], status: int, message: str, daemon: Daemon) -> None:
    before = names(daemon)
    answer = daemon.post("/api/create", {"model": "refused"} | body)
    assert answer.status_code == status, answer.text
    assert re.search(message, answer.json()["error"])
    assert names(daemon) == before


def test_quantizing_tells_how_it_goes(daemon: Daemon, folder: Path, f16: Path) -> None:
    body = {"model": "small", "from": str(f16), "quantize": "q8_0"}
    told = lines(daemon.post("/api/create", body))
    counts = [line["completed"] for line in told if line["status"] == "quantizing F16 model to Q8_0"]
    assert len(counts) > 10
    assert counts == sorted(counts)
    assert counts[-1] == told[1]["total"] == f16.stat().st_size
    shown = daemon.post("/api/show", model="small").json()
    assert shown["details"]["quantization_level"] == "Q8_0"
    assert Path(shown["localrun"]["path"]).parent == folder / "models" / "blobs"
    assert read_header(Path(shown["localrun"]["path"])).size_bytes < f16.stat().st_size
    twice = daemon.post("/api/create", {"model": "smaller", "from": "small", "quantize": "q4_0"})
    assert json.loads(twice.text.splitlines()[-1])["error"].startswith("quantize: 'small' is Q8_0 already")
    assert delete(daemon, "small").json()["freed_bytes"] > 0
    assert left_over(folder) == []


def test_a_client_that_leaves_ends_the_quantizer(daemon: Daemon, folder: Path, f16: Path) -> None:
    body = {"model": "left", "from": str(f16), "quantize": "q2_k"}
    with daemon.http.stream("POST", "/api/create", json=body) as answer:
        next(line for line in answer.iter_lines() if "quantizing" in line)

    def is_quantizing() -> bool:
        for child in psutil.Process(daemon.process.pid).children():
            with suppress(psutil.Error):  # it ended meanwhile
                if "quantize" in child.cmdline():
                    return True
        return False

    deadline_s = time.monotonic() + 30
    while (left_over(folder) or is_quantizing()) and time.monotonic() < deadline_s:
        time.sleep(0.02)
    assert left_over(folder) == []
    assert not is_quantizing()
    delete(daemon, "left")


def test_a_disk_that_is_too_small_is_known_before_the_upload(daemon: Daemon) -> None:
    digest = "sha256:" + "3" * 64
    with socket.create_connection(("127.0.0.1", daemon.port)) as client:
        head = f"POST /api/blobs/{digest} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {10**16}\r\n\r\n"
        client.sendall(head.encode())
        answer = client.recv(4096).decode()
    assert answer.startswith("HTTP/1.1 507")
    assert "disk_full" in answer


# --- copy, delete, push, tags, show, gc -------------------------------------------------------------------------------


def test_delete_unloads_first_and_says_what_it_freed(daemon: Daemon, folder: Path, f16: Path) -> None:
    shutil.copyfile(f16, folder / "models" / "own.gguf")
    assert daemon.post("/api/generate", model="own", keep_alive=-1).json()["done_reason"] == "load"
    answer = delete(daemon, "own")
    assert answer.json()["freed_bytes"] == f16.stat().st_size
    assert answer.json()["deleted"] == [str(folder / "models" / "own.gguf")]
    assert "own:latest" not in [row["name"] for row in daemon.http.get("/api/ps").json()["models"]]
    assert delete(daemon, "own").status_code == 404


def test_what_cannot_be_deleted(daemon: Daemon, f16: Path) -> None:
    daemon.post("/api/generate", model="tiny", keep_alive=-1)
    for name, message in (("tiny", "is built in"), ("theirs", "model_dirs"), (str(f16), "only reads")):
        answer = delete(daemon, name)
        assert answer.status_code == 400
        assert message in answer.json()["error"]
    # A refusal unloads nothing.
    assert "tiny:latest" in [row["name"] for row in daemon.http.get("/api/ps").json()["models"]]


def test_copies(daemon: Daemon) -> None:
    assert daemon.post("/api/copy", source="tiny", destination="me/copy").status_code == 200
    assert "me/copy" in names(daemon)
    assert daemon.post("/api/copy", source="nothing", destination="x").status_code == 404
    assert daemon.post("/api/copy", source="tiny", destination="a/../b").status_code == 400
    assert daemon.post("/api/copy", source="tiny").status_code == 400
    assert delete(daemon, "me/copy").json()["kept"][0]["reason"] == "it is built in"


def test_push_says_what_to_do_instead(daemon: Daemon) -> None:
    answer = daemon.post("/api/push", model="tiny")
    assert answer.status_code == 501
    assert "not supported" in answer.json()["error"]


def test_tags_tell_what_cannot_be_used(daemon: Daemon, folder: Path) -> None:
    answer = daemon.http.get("/api/tags").json()
    (theirs,) = [row for row in answer["models"] if row["name"] == "theirs:latest"]
    assert theirs["source"] == str(folder / "foreign")
    assert theirs["loaded"] is False
    assert [file["path"] for file in answer["unusable"]] == [str(folder / "foreign" / "broken.gguf")]


def test_show_has_tensor_types_and_memory(daemon: Daemon, f16: Path) -> None:
    shown = daemon.post("/api/show", model="theirs", verbose=True).json()["localrun"]
    header = read_header(f16)
    assert {row["type"]: row["tensors"] for row in shown["tensor_types"]} == {
        kind: sum(tensor.type_name == kind for tensor in header.tensors) for kind in ("F16", "F32")
    }
    contexts = [row["context"] for row in shown["memory"]]
    assert contexts == sorted(set(contexts))
    assert contexts[-1] == header.n_ctx_train
    assert all(row["total"] >= row["weights"] + row["kv_cache"] for row in shown["memory"])


def test_garbage_goes_on_demand(daemon: Daemon, folder: Path) -> None:
    content = b"never named"
    digest = f"sha256:{hashlib.sha256(content).hexdigest()}"
    daemon.http.post(f"/api/blobs/{digest}", content=content)
    assert daemon.post("/localrun/v1/gc", {}).json()["kept_blobs"] >= 1
    collected = daemon.post("/localrun/v1/gc", min_age_s=0).json()
    assert str(folder / "models" / "blobs" / digest.replace(":", "-")) in collected["deleted"]
    assert daemon.http.head(f"/api/blobs/{digest}").status_code == 404
    assert daemon.post("/localrun/v1/gc", min_age_s=-1).status_code == 400


def test_a_daemon_that_is_killed_while_it_quantizes(folder: Path, f16: Path) -> None:
    models = folder / "killed"
    environment = {"LOCALRUN_MODELS": str(models)}
    with running_daemon(**environment) as running:
        body = {"model": "small", "from": str(f16), "quantize": "q4_k_m"}
        with running.http.stream("POST", "/api/create", json=body) as answer:
            for line in answer.iter_lines():
                if "quantizing" in line:
                    running.stop(signal.SIGKILL)
                    break
    with running_daemon(**environment) as running:
        assert names(running) == ["tiny"]
        deadline_s = time.monotonic() + 30
        while list(models.rglob("*.localrun-temp")) and time.monotonic() < deadline_s:
            running.post("/localrun/v1/gc", min_age_s=0)
            time.sleep(0.05)
        assert [path for path in models.rglob("*") if path.is_file()] == []


N_FREE_PIECES = 3


@pytest.mark.parametrize("announced", [True, False])
async def test_the_reserve_is_kept_whether_or_not_the_length_is_announced(
    running: Any, monkeypatch: pytest.MonkeyPatch, announced: bool
) -> None:
    n_sent = 0

    async def pieces() -> AsyncIterator[bytes]:
        nonlocal n_sent
        for _ in range(20):
            n_sent += 1
            yield bytes(PIECE_BYTES)

    async with running() as runtime:
        folder = runtime.store.blobs.folder

        def disk_usage(_: object) -> SimpleNamespace:
            used_bytes = sum(file.stat().st_size for file in folder.iterdir())
            return SimpleNamespace(free=RESERVE_BYTES + N_FREE_PIECES * PIECE_BYTES - used_bytes)

        monkeypatch.setattr(shutil, "disk_usage", disk_usage)
        digest = hashlib.sha256(bytes(20 * PIECE_BYTES)).hexdigest()
        headers = {"content-length": str(20 * PIECE_BYTES)} if announced else {}
        transport = httpx2.ASGITransport(app=Starlette(routes=routes(runtime)))
        async with httpx2.AsyncClient(base_url="http://localhost", transport=transport) as client:
            answer = await client.post(f"/api/blobs/sha256:{digest}", content=pieces(), headers=headers)
        assert answer.status_code == 507
        assert "LOCALRUN_MODELS" in answer.json()["error"]
        assert n_sent == (0 if announced else N_FREE_PIECES + 1)
        assert list(folder.iterdir()) == []


@pytest.mark.parametrize(
    ("n_bytes", "shown"),
    [(0, "0 bytes"), (12_345, "12345 bytes"), (4_194_304, "4.194 MB"), (1_230_000_000, "1.230 GB")],
)
def test_the_room_for_a_small_file_is_told_exactly(n_bytes: int, shown: str) -> None:
    assert _exact(n_bytes) == shown
