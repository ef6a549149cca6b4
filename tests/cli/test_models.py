"""`localrun list`: columns for people, the daemon's rows for scripts."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from localrun.cli import exits
from localrun.config import in_short
from tests.cli.conftest import MODEL_ROW, SHOWN
from tests.daemon import Daemon, running_daemon
from tests.says import says
from tests.support.synthesis.synthesize import synthesize


def test_columns(localrun, daemon):
    ended = localrun("list", port=daemon.port)
    assert ended.returncode == 0, ended.stderr
    header, row = ended.stdout.splitlines()
    assert header.split() == ["NAME", "ID", "SIZE", "QUANT", "PARAMETERS", "CONTEXT", "MODIFIED", "SOURCE", "LOADED"]
    assert row.startswith("tiny  0123456789ab  9.5 MB  ")
    assert "days ago" in row


def test_list_as_json(localrun, daemon):
    (row,) = json.loads(localrun("list", "--json", port=daemon.port).stdout)
    assert row["name"] == "tiny"
    assert row["size"] == 9_500_000


def test_list_of_the_names_that_begin_like_this(localrun, daemon):
    rows = [MODEL_ROW | {"name": name} for name in ("qwen3:4b", "Qwen3:8b", "tiny")]
    broken = {"path": "/models/broken.gguf", "problem": "it is cut off"}
    daemon.answers["/api/tags"] = {"models": rows, "unusable": [broken]}
    shown = localrun("list", "QWEN", port=daemon.port)
    assert [line.split()[0] for line in shown.stdout.splitlines()] == ["NAME", "qwen3:4b", "Qwen3:8b"]
    assert shown.stderr == ""
    assert "broken.gguf" in localrun("list", port=daemon.port).stderr
    assert json.loads(localrun("list", "none", "--json", port=daemon.port).stdout) == []


def test_card(localrun, daemon):
    shown = localrun("show", "tiny", port=daemon.port).stdout
    assert "context length      4096" in shown
    assert "temperature 0.7" in shown


def test_template_comes_as_it_is_to_a_pipe(localrun, daemon):
    assert localrun("show", "tiny", "--template", port=daemon.port).stdout == "{{ messages }}\x1b[31m\n"


def test_one_part_alone(localrun, daemon):
    licence = "\n".join(f"line {number}" for number in range(9))
    daemon.shown = SHOWN | {"license": licence, "system": "Be kind.", "modelfile": "FROM tiny\n", "tensors": []}
    expected = {
        "license": licence, "system": "Be kind.", "parameters": SHOWN["parameters"], "modelfile": "FROM tiny"
    }  # fmt: skip
    for part, text in expected.items():
        assert localrun("show", "tiny", f"--{part}", port=daemon.port).stdout == f"{text}\n"
    card = localrun("show", "tiny", port=daemon.port).stdout
    assert "line 2\n  ... 6 more lines; --license prints all" in card
    refused = localrun("show", "tiny", "--license", "--system", port=daemon.port)
    assert refused.returncode == exits.USAGE
    assert "--license cannot be combined with other options" in refused.stderr


def test_all_that_is_in_the_file(localrun, daemon):
    daemon.shown = SHOWN | {"tensors": [{"name": "output.weight", "type": "Q8_0", "shape": [192, 512]}]}
    shown = localrun("show", "tiny", "-v", port=daemon.port).stdout
    assert re.search(r"All tensors\n  output.weight +Q8_0 192x512", shown)
    assert re.search(r"llama.embedding_length +192", shown)
    assert ("/api/show", {"model": "tiny", "verbose": True}) in daemon.bodies


def test_show_as_json(localrun, daemon):
    shown = json.loads(localrun("show", "tiny", "--json", port=daemon.port).stdout)
    assert shown["model_info"]["llama.context_length"] == 4096


def test_a_model_that_does_not_exist(localrun, daemon):
    ended = localrun("show", "missing", port=daemon.port)
    assert ended.returncode == exits.MODEL_NOT_FOUND
    assert says(ended.stderr, "error: model 'missing' not found", "`localrun search missing`")


def test_a_file_is_named_by_its_whole_path(localrun, daemon, tmp_path: Path):
    localrun("show", "./m.gguf", port=daemon.port, cwd=tmp_path)
    assert daemon.bodies == [("/api/show", {"model": str(tmp_path / "m.gguf")})]


FIT = {
    "model": "tiny", "fits": True, "slots": 8, "kv_cells": 32768, "kv_type": "f16", "context": 4096, "gpu_layers": 5,
    "layers": 6, "total_bytes": 250_000_000, "resident_bytes": 250_000_000, "process_bytes": 60_000_000,
    "background_bytes": 0, "prefix_cache_bytes": 512_000_000, "idle_bytes": 2_000_000,
    "devices": [
        {
            "name": name, "layers": layers, "weights_bytes": 8_000_000, "kv_bytes": 84_000_000,
            "compute_bytes": 11_000_000, "other_bytes": other, "total_bytes": 103_000_000 + other,
            "usable_bytes": 18_000_000_000, "free_bytes": 20_000_000_000,
        }
        for name, layers, other in (("RAM", 1, 60_000_000), ("Card", 5, 0))
    ],
    "draft": None, "notes": ["5 of 6 layers on the GPU: more do not fit"], "problem": None,
}  # fmt: skip


def test_fit_is_a_table_with_reasons(localrun, daemon):
    daemon.answers["/localrun/v1/fit?model=tiny"] = FIT
    shown = localrun("show", "tiny", "--fit", port=daemon.port).stdout
    assert all(part in shown.split("\n\n")[0] for part in ("tiny", "8 slots", "32768", "f16"))
    header, ram, card = shown.split("\n\n")[1].splitlines()
    assert header.split()[:3] == ["DEVICE", "LAYERS", "WEIGHTS"]
    assert " ".join(ram.split()) == "RAM 1 8.0 MB 84 MB 11 MB 60 MB 163 MB 18 GB 20 GB"
    assert card.startswith("Card    5       8.0 MB")
    assert FIT["notes"][0] in shown
    assert "2.0 MB" in shown.splitlines()[-1] + shown.splitlines()[-2]


def test_fit_as_json(localrun, daemon):
    daemon.answers["/localrun/v1/fit?model=tiny"] = FIT
    assert json.loads(localrun("show", "tiny", "--fit", "--json", port=daemon.port).stdout) == FIT


def test_what_does_not_fit_says_what_would_help(localrun, daemon):
    daemon.answers["/localrun/v1/fit?model=tiny"] = FIT | {"fits": False, "problem": "model 'tiny' needs more"}
    shown = localrun("show", "tiny", "--fit", port=daemon.port).stdout
    assert "does not fit this machine" in shown
    assert "- model 'tiny' needs more" in shown


def test_fit_with_a_draft_model_has_a_line_about_it(localrun, daemon):
    cost = {"weights_bytes": 1_000_000, "kv_bytes": 2_000_000, "compute_bytes": 3_000_000, "other_bytes": 4_000_000}
    draft = {"model": "small", "device": "Card", "total_bytes": 10_000_000} | cost
    daemon.answers["/localrun/v1/fit?model=tiny&draft=small"] = FIT | {"draft": draft}
    shown = localrun("show", "tiny", "--fit", "--draft", "small", port=daemon.port).stdout
    assert "- the draft model small takes 10 MB of other on Card (weights 1.0 MB, KV cache 2.0 MB, the rest" in shown
    assert localrun("show", "tiny", "--draft", "small", port=daemon.port).returncode == exits.USAGE


def test_fit_and_template_are_two_questions(localrun, daemon):
    assert localrun("show", "tiny", "--fit", "--template", port=daemon.port).returncode == exits.USAGE


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    folder = tmp_path_factory.mktemp("models")
    synthesize("tiny", "F16", folder / "big.gguf")
    with running_daemon(LOCALRUN_MODELS=str(folder)) as daemon:
        yield daemon


def names(running: Daemon) -> list[str]:
    return [in_short(row["name"]) for row in running.http.get("/api/tags").json()["models"]]


def test_create_quantize_copy_and_remove(localrun, running, tmp_path):
    modelfile = tmp_path / "Modelfile"
    modelfile.write_text('FROM big\nSYSTEM """Be\nbrief."""\nPARAMETER temperature 0.3\n')
    made = localrun("create", "small", "-f", str(modelfile), "-q", "q8_0", port=running.port)
    assert made.returncode == 0, made.stderr
    assert made.stdout.splitlines()[1] == "quantizing F16 model to Q8_0"
    assert made.stdout.splitlines()[-3:] == ["writing manifest", "success", "chat with it: `localrun run small`"]
    assert "Be\n  brief." in localrun("show", "small", port=running.port).stdout
    text = localrun("show", "small", "--modelfile", port=running.port).stdout
    again = localrun("create", "again", "-f", "-", port=running.port, stdin=text)
    assert again.returncode == 0, again.stderr
    assert localrun("show", "again", "--modelfile", port=running.port).stdout == text
    localrun("rm", "again", port=running.port)
    assert localrun("cp", "small", "other", port=running.port).stdout == "copied 'small' to 'other'\n"
    first = localrun("rm", "small", port=running.port).stdout
    assert first.splitlines()[0] == "deleted the name 'small'"
    assert re.fullmatch(r"  its file \S+ stays: 'other' uses it", first.splitlines()[1])
    last = localrun("rm", "other", port=running.port).stdout
    assert "'other'" in last
    assert "4.0 MB" in last
    assert names(running) == ["tiny", "big"]


def test_names_of_one_file_of_which_one_is_loaded(localrun, running, tmp_path):
    synthesize("tiny", "F16", tmp_path / "fox.gguf")
    assert localrun("create", "one", "--from", "./fox.gguf", port=running.port, cwd=tmp_path).returncode == 0
    shown = json.loads(localrun("show", "one", "--json", port=running.port).stdout)
    assert shown["details"]["parent_model"] == str(tmp_path / "fox.gguf")
    localrun("cp", "one", "two", port=running.port)
    localrun("run", "one", "hi", port=running.port)
    lines = [line.split() for line in localrun("list", port=running.port).stdout.splitlines()]
    assert {line[0]: line[line.index("create") + 1 :] for line in lines if "create" in line} == {
        "one:latest": ["yes"],
        "two:latest": ["as", "one:latest"],
    }
    file = f"  its file {tmp_path / 'fox.gguf'} stays: "
    first, last = (localrun("rm", name, port=running.port).stdout.splitlines() for name in ("one", "two"))
    assert first == ["deleted the name 'one'", f"{file}'two' uses it"]
    assert last[1] == f"{file}it belongs to you or to another program, and localrun deletes nothing but its own files"


def test_rm_removes_the_others_when_a_name_is_not_here(localrun, running):
    localrun("cp", "big", "one", port=running.port)
    localrun("cp", "big", "two", port=running.port)
    ended = localrun("rm", "lost", "one", "tyni", "two", port=running.port)
    assert ended.returncode == exits.MODEL_NOT_FOUND
    assert names(running) == ["tiny", "big"]
    assert [line.split(" stays")[0] for line in ended.stdout.splitlines()][::2] == [
        "deleted the name 'one'", "deleted the name 'two'"
    ]  # fmt: skip
    assert says(ended.stderr, "error: model 'lost' not found", "error: model 'tyni' not found; did you mean 'tiny'?")
    ended = localrun("rm", "tiny", "lost", port=running.port)
    assert ended.returncode == exits.ERROR
    assert says(ended.stderr, "model 'lost' not found", "is built in")


def test_create_from_a_name(localrun, running):
    assert localrun("create", "twin", "--from", "tiny", port=running.port).returncode == 0
    assert "twin" in names(running)
    localrun("rm", "twin", port=running.port)


def test_errors_name_the_line_and_the_way_out(localrun, running, tmp_path):
    modelfile = tmp_path / "Modelfile"
    modelfile.write_text("FROM tiny\n\nPARAMETER top_p 7\n")
    ended = localrun("create", "wrong", "-f", str(modelfile), port=running.port)
    assert ended.returncode == 1
    assert ended.stderr.startswith("error: line 3 of ")
    assert localrun("create", "wrong", "-f", str(tmp_path / "none"), port=running.port).returncode == 2
    assert localrun("create", "wrong", "-f", "x", "--from", "y", port=running.port).returncode == 2
    assert localrun("rm", "nothing", port=running.port).returncode == 5
    for command, message in ((("rm", "tiny"), "is built in"), (("push", "tiny"), "is not supported")):
        ended = localrun(*command, port=running.port)
        assert ended.returncode == 1
        assert message in ended.stderr
    assert "wrong" not in names(running)


def test_gc(localrun, running):
    digest = "sha256:" + hashlib.sha256(b"stray").hexdigest()
    running.http.post(f"/api/blobs/{digest}", content=b"stray")
    assert "--all deletes them" in localrun("gc", port=running.port).stdout
    ended = localrun("gc", "--all", port=running.port).stdout.splitlines()
    assert ended[0].endswith(digest.replace(":", "-"))
    assert ended[-1] == "freed 5 B"


def test_gc_says_that_interrupted_pulls_stay(localrun, running):
    partial = running.home / "huggingface" / "hub" / "models--o--r" / "blobs" / "etag.localrun-partial"
    partial.parent.mkdir(parents=True)
    partial.write_bytes(bytes(40_960))
    assert "of interrupted pulls, which `localrun pull` resumes" in localrun("gc", port=running.port).stdout
    assert partial.exists()
    assert "interrupted" not in localrun("gc", "--all", port=running.port).stdout
    assert not partial.exists()


def test_unusable_files_are_named(localrun, running, tmp_path):
    folder = Path(running.post("/api/show", model="big").json()["localrun"]["path"]).parent
    (folder / "broken.gguf").write_bytes(b"GGUF nonsense")
    ended = localrun("list", port=running.port)
    assert "broken" not in ended.stdout
    assert ended.stderr.startswith("not usable: ")
    localrun("rm", "broken", port=running.port)
    assert localrun("list", port=running.port).stderr == ""


def test_a_modelfile_that_is_not_utf_8_is_named(localrun, tmp_path):
    modelfile = tmp_path / "Latin"
    modelfile.write_bytes(b"FROM tiny\nSYSTEM caf\xe9\n")
    for name, shown in ((str(modelfile), str(modelfile)), ("-", "stdin")):
        ended = localrun("create", "wrong", "-f", name, port=1, stdin=modelfile.read_bytes())
        assert ended.returncode == exits.USAGE
        assert f"error: cannot read the Modelfile: {shown} is not UTF-8" in ended.stderr
    ended = localrun("create", "wrong", "-f", str(tmp_path / "gone"), port=1)
    assert f"cannot read the Modelfile: {tmp_path / 'gone'}: No such file" in " ".join(ended.stderr.split())


def test_a_modelfile_in_utf_16_is_read(localrun, tmp_path, running):
    """Notepad and older PowerShells write it."""
    (tmp_path / "Wide").write_text("FROM tiny\r\nSYSTEM Sei höflich.\r\n", encoding="utf-16")
    assert localrun("create", "wide", "-f", str(tmp_path / "Wide"), port=running.port).returncode == 0
    assert running.post("/api/show", model="wide").json()["system"] == "Sei höflich."
    localrun("rm", "wide", port=running.port)
