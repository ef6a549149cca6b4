"""Names of models that are mistyped, and those that a shell completes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from localrun.cli import exits
from localrun.cli.arguments import closest
from tests.daemon import running_daemon
from tests.says import says


def test_a_mistyped_model_is_guessed(localrun):
    with running_daemon() as daemon:

        def said(*arguments: str) -> str:
            ended = localrun(*arguments, port=daemon.port)
            assert ended.returncode == exits.MODEL_NOT_FOUND
            return ended.stderr

        assert says(said("show", "tyni"), "model 'tyni' not found; did you mean 'tiny'?\n")
        assert says(said("show", "qwne3:0.6b"), "did you mean 'qwen3:0.6b'? `localrun pull qwen3:0.6b` downloads it")
        assert "qwen3" not in said("rm", "qwne3:0.6b"), "what is not here cannot be removed"
        assert says(said("show", "xyzzy"), "`localrun list`", "`localrun search xyzzy` looks for it")
        assert "`localrun pull qwen2.5:0.5b` gets it if Ollama's library has it" in said("show", "qwen2.5:0.5b")
        assert "`localrun pull" not in said("show", "me/xyzzy")
        assert says(said("show", "./none.gguf"), "there is no file ", "none.gguf\n")


def test_a_mistyped_name_of_the_catalogue_is_guessed_where_nobody_has_it(localrun):
    with running_daemon(HTTPS_PROXY="http://127.0.0.1:9") as daemon:
        ended = localrun("pull", "qwne3:0.6b", port=daemon.port)
    assert ended.returncode == exits.ERROR
    assert says(ended.stderr, "registry.ollama.ai", "did you mean 'qwen3:0.6b'?")


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("smol", "smollm2:135m"),
        ("SMOLLM", "smollm2:135m"),
        ("smolm2", "smollm2:135m"),
        ("zzz", ""),
        ("smollm3", ""),
        ("smollm2:1b", "smollm2:135m"),
    ],
)
def test_the_closest_name(typed: str, meant: str):
    assert closest(typed, ["tiny", "smollm2:135m"]) == meant


def completed(environment: dict[str, str], *words: str) -> list[str]:
    asked = {"_LOCALRUN_COMPLETE": "bash_complete", "COMP_WORDS": " ".join(words), "COMP_CWORD": str(len(words) - 1)}
    command = [sys.executable, "-m", "localrun"]
    ended = subprocess.run(command, env=environment | asked, capture_output=True, text=True, timeout=60, check=False)
    assert ended.stderr == ""
    return [line.removeprefix("plain,") for line in ended.stdout.split()]


def test_a_shell_completes_models_without_a_daemon(environment: dict[str, str], tmp_path: Path):
    assert completed(environment, "localrun", "run", "ti") == ["tiny"]
    assert completed(environment, "localrun", "rm", "no") == []
    assert completed(environment, "localrun", "run", "./my") == ["file,./my"], "the shell's own way"
    assert completed(environment, "localrun", "run", "tiny", "What?", "pho") == ["file,pho"]
    assert "qwen3:8b" in completed(environment, "localrun", "pull", "qwen3")
    assert not (tmp_path / "home" / "state").exists(), "no daemon was started"
