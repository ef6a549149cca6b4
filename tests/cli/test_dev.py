"""`localrun dev synth` writes a model file."""

from __future__ import annotations

from pathlib import Path

from localrun.cli import exits
from localrun.cli.root import run


def test_synth_writes_a_gguf(tmp_path: Path, capsys):
    out = tmp_path / "model.gguf"
    assert run(["dev", "synth", "tiny", "Q8_0", str(out)]) == exits.OK
    assert out.read_bytes().startswith(b"GGUF")
    assert str(out) in capsys.readouterr().out


def test_synth_to_a_folder_that_does_not_exist(tmp_path: Path, capsys):
    assert run(["dev", "synth", "tiny", "Q8_0", str(tmp_path / "no" / "x.gguf")]) == exits.ERROR
    assert "No such file" in capsys.readouterr().err
