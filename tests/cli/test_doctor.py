"""`localrun doctor` as a whole: its lines, its JSON, its exit code, and what it leaves alone."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from localrun import __version__, config
from localrun.cli import exits
from localrun.hardware import kernels
from localrun.hardware.kernels import Verdict


@pytest.fixture
def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as found:
        return int(found.getsockname()[1])


@pytest.fixture(autouse=True)
def quiet_surroundings(environment: dict[str, str], tmp_path: Path) -> None:
    """Neither this machine's proxies nor its Hugging Face cache."""
    for name in [name for name in environment if name.lower().endswith("_proxy") or name.startswith("HF_")]:
        del environment[name]
    environment["HF_HOME"] = str(tmp_path / "huggingface")


@pytest.fixture
def known_kernels(environment: dict[str, str]) -> None:
    """They were probed before, which takes two seconds."""
    pair = kernels.present_pair()
    if pair is not None:
        kernels.keep(kernels.folder(config.folders(environment).cache), pair, Verdict(is_probed=True))


CHECKS = {
    *("python", "packages", "settings", "daemon", "llama.cpp", "media", "cpu", "gpu", "memory", "disk", "folders"),
    *("models", "digests", "cache", "kernels", "network", "threads"),
}


def test_every_check_has_a_line_and_an_object(localrun, free_port, tmp_path: Path):
    shown = localrun("doctor", "--deep", port=free_port)
    lines = shown.stdout.splitlines()
    found = {match[2] for line in lines if (match := re.match(r"(ok|warn|fail) +(\S+) +\S", line))}
    assert found == CHECKS
    assert re.fullmatch(r"\d+ ok, \d+ to look at, \d+ failed", lines[-1])
    report = json.loads(localrun("doctor", "--json", "--deep", port=free_port).stdout)
    assert {finding["check"] for finding in report["findings"]} == CHECKS
    assert report["localrun"] == __version__
    assert all(finding.get("remedy") for finding in report["findings"] if finding["level"] != "ok")
    # It only looks.
    assert not (tmp_path / "home").exists()


def level_of(report: dict, check: str) -> str:
    return next(finding["level"] for finding in report["findings"] if finding["check"] == check)


def test_a_failure_is_exit_code_1(localrun, known_kernels, environment, free_port, tmp_path: Path):
    config = tmp_path / "home" / "config"
    config.mkdir(parents=True)
    (config / "localrun.toml").write_text("slotz = 3\n")
    failed = localrun("doctor", "--json", port=free_port)
    assert failed.returncode == exits.ERROR
    report = json.loads(failed.stdout)
    assert report["ok"] is False
    assert level_of(report, "settings") == "fail"
    assert "slotz" in next(each["text"] for each in report["findings"] if each["check"] == "settings")


def test_a_daemon_of_another_version_is_a_warning(localrun, known_kernels, daemon):
    report = json.loads(localrun("doctor", "--json", port=daemon.port).stdout)
    assert level_of(report, "daemon") == "warn"


def test_somebody_else_on_the_port_is_a_failure(localrun, known_kernels, daemon):
    daemon.health = (404, {}, {})
    daemon.root = b"Ollama is running"
    failed = localrun("doctor", port=daemon.port)
    assert failed.returncode == exits.ERROR
    line = next(line for line in failed.stdout.splitlines() if line.split()[1:2] == ["daemon"])
    assert line.startswith("fail ")
    assert str(daemon.port) in line
    assert "Ollama" in line


def test_the_command_line_never_loads_llama_cpp(known_kernels, environment, free_port):
    program = (
        "import sys; from localrun.cli.root import run; run(['doctor', '--json', '--port', sys.argv[1]]);"
        "print('LOADED', *sorted(name.split('.')[0] for name in sys.modules))"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program, str(free_port)], env=environment, capture_output=True, text=True, check=True
    )
    loaded = set(ended.stdout.rpartition("LOADED")[2].split())
    assert "localrun" in loaded
    assert "llama_cpp" not in loaded
