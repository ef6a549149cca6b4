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
