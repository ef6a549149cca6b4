"""Models that Ollama and LM Studio keep, by the commands: listed with where they are, run in place, and not deleted."""

from __future__ import annotations

from pathlib import Path

from localrun.cli import exits
from localrun.models import builtin
from tests.daemon import running_daemon
from tests.models.storage.test_other_programs import Ollama


def test_models_of_other_programs_are_listed_run_and_left_alone(localrun, tmp_path: Path):
    content = builtin.model_path().read_bytes()
    ollama = Ollama(tmp_path / "ollama")
    ollama.add("registry.ollama.ai/library/fox/1b", ("model", content))
    ollama.add("hf.co/Owner/Repo/Q4_0", ("model", content))
    ollama.add("registry.ollama.ai/me/own/latest", ("model", content))
    ollama.add("registry.ollama.ai/library/tensors/latest", ("tensor", b"x"))
    folder = tmp_path / "home" / ".lmstudio" / "models" / "owner" / "repo"
    folder.mkdir(parents=True)
    (folder / "Wolf.gguf").write_bytes(content)
    with running_daemon(OLLAMA_MODELS=str(ollama.folder), HOME=str(tmp_path / "home")) as daemon:
        listed = localrun("list", port=daemon.port).stdout
        assert f"Ollama {ollama.folder}" in listed
        assert f"LM Studio {folder}" in listed
        names = ["hf.co/Owner/Repo:Q4_0", "me/own:latest", "fox:1b", "Wolf:latest", "tiny:latest"]
        assert {line.split()[0] for line in listed.splitlines()[1:]} == set(names)
        assert localrun("show", names[0], "--parameters", port=daemon.port).stdout.startswith("num_ctx")
        localrun("run", names[1], "hi", "--option", "num_predict=2", port=daemon.port)
        assert names[1] in localrun("ps", port=daemon.port).stdout
        for command in (("show", "tensors"), ("run", "tensors", "hi"), ("stop", "tensors")):
            refused = localrun(*command, port=daemon.port)
            assert refused.returncode == exits.MODEL_NOT_FOUND
            assert "'tensors' not found: 'tensors' in Ollama's store is made of safetensors" in refused.stderr
        for name, way_out in (("fox:1b", "ollama rm fox:1b"), ("wolf", f"rm {folder / 'Wolf.gguf'}")):
            ran = localrun("run", name, "hi", "--option", "num_predict=2", port=daemon.port)
            assert ran.returncode == 0, ran.stderr
            assert "pulling" not in ran.stderr
            refused = localrun("rm", name, port=daemon.port)
            assert refused.returncode != 0
            assert refused.stderr.strip().endswith(f"type: {way_out}")
        assert localrun("list", port=daemon.port).stdout.count("LM Studio") == 1
    assert (folder / "Wolf.gguf").read_bytes() == content
