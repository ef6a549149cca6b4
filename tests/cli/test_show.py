"""`localrun show`: a card, the template alone, or everything as JSON."""

from __future__ import annotations

import json
from pathlib import Path

from localrun.cli import exits


def test_card(localrun, daemon):
    shown = localrun("show", "tiny", port=daemon.port).stdout
    assert "context length      4096" in shown
    assert "temperature 0.7" in shown


def test_template_comes_as_it_is_to_a_pipe(localrun, daemon):
    assert localrun("show", "tiny", "--template", port=daemon.port).stdout == "{{ messages }}\x1b[31m\n"


def test_json(localrun, daemon):
    shown = json.loads(localrun("show", "tiny", "--json", port=daemon.port).stdout)
    assert shown["model_info"]["llama.context_length"] == 4096


def test_a_model_that_does_not_exist(localrun, daemon):
    ended = localrun("show", "missing", port=daemon.port)
    assert ended.returncode == exits.MODEL_NOT_FOUND
    assert ended.stderr == "error: model 'missing' not found\n"


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
    "notes": ["5 of 6 layers on the GPU: more do not fit"], "problem": None,
}  # fmt: skip


def test_fit_is_a_table_with_reasons(localrun, daemon):
    daemon.answers["/localrun/v1/fit?model=tiny"] = FIT
    shown = localrun("show", "tiny", "--fit", port=daemon.port).stdout
    assert shown.startswith("tiny fits this machine\n  8 slots, 32768 KV cells in f16")
    header, ram, card = shown.split("\n\n")[1].splitlines()
    assert header.split()[:3] == ["DEVICE", "LAYERS", "WEIGHTS"]
    assert " ".join(ram.split()) == "RAM 1 8.0 MB 84 MB 11 MB 60 MB 163 MB 18 GB 20 GB"
    assert card.startswith("Card    5       8.0 MB")
    assert "- 5 of 6 layers on the GPU: more do not fit" in shown
    assert "- 2.0 MB that idle models hold count as free" in shown


def test_fit_as_json(localrun, daemon):
    daemon.answers["/localrun/v1/fit?model=tiny"] = FIT
    assert json.loads(localrun("show", "tiny", "--fit", "--json", port=daemon.port).stdout) == FIT


def test_what_does_not_fit_says_what_would_help(localrun, daemon):
    daemon.answers["/localrun/v1/fit?model=tiny"] = FIT | {"fits": False, "problem": "model 'tiny' needs more"}
    shown = localrun("show", "tiny", "--fit", port=daemon.port).stdout
    assert "does not fit this machine" in shown
    assert "- model 'tiny' needs more" in shown


def test_fit_and_template_are_two_questions(localrun, daemon):
    assert localrun("show", "tiny", "--fit", "--template", port=daemon.port).returncode == exits.USAGE
