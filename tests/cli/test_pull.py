"""`localrun pull`, `localrun search`, and `localrun run` of a model that is not here, against a real daemon."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import hf_hub_download

from localrun.access import certificate
from localrun.cli import exits
from localrun.cli.pull import PullMeter
from localrun.client import PullPiece
from localrun.models import builtin
from localrun.models.gguf.reader import read_header
from tests.daemon import Daemon, running_daemon
from tests.hub.repository import Repository
from tests.hub.server import Hub
from tests.hub.socks import socks_proxy
from tests.projector_file import write_projector
from tests.registry import Layer, Registry

pytestmark = pytest.mark.skipif(not builtin.model_path().is_file(), reason="the built-in model's file is not there")

GGUF = builtin.model_path().read_bytes() if builtin.model_path().is_file() else b""


@pytest.fixture(scope="module")
def hub() -> Iterator[Hub]:
    with Hub(
        Repository("unsloth/Qwen3-0.6B-GGUF", {"Qwen3-0.6B-Q4_K_M.gguf": GGUF}),
        Repository("o/spaces-GGUF", {"My Model (v2) Q4_K_M.gguf": GGUF}),
    ) as running:
        yield running


@pytest.fixture(scope="module")
def real_daemon(tmp_path_factory: pytest.TempPathFactory, hub: Hub) -> Iterator[Daemon]:
    folder = tmp_path_factory.mktemp("hf")
    with running_daemon(HF_ENDPOINT=hub.endpoint, HF_HOME=str(folder)) as running:
        yield running


@pytest.fixture
def registry() -> Iterator[Registry]:
    with Registry() as running:
        yield running


def test_pull_without_a_terminal(localrun, real_daemon: Daemon, registry: Registry):
    name = registry.add("library/fox", Layer("model", GGUF))
    ended = localrun("pull", name, port=real_daemon.port)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout == f"{name} is ready; chat with it: `localrun run {name}`\n"
    said = ended.stderr.splitlines()
    assert said[0] == "pulling manifest"
    assert said[-1] == "success"
    percents = [int(found[1]) for line in said if (found := re.match(r" *(\d+)%", line))]
    assert percents == sorted(percents)
    assert percents[-1] == 100


def test_a_pull_without_the_projector_and_then_with_it(
    localrun, real_daemon: Daemon, registry: Registry, tmp_path: Path
):
    width = read_header(builtin.model_path()).n_embd
    projector = write_projector(tmp_path / "mmproj.gguf", width=width).read_bytes()
    name = registry.add("library/owl", Layer("model", GGUF), Layer("projector", projector))
    assert localrun("pull", name, "--projector", "none", port=real_daemon.port).returncode == 0
    assert (
        "none: library/owl:latest (projector) was left out as asked"
        in localrun("show", name, port=real_daemon.port).stdout
    )
    assert localrun("pull", name, port=real_daemon.port).returncode == 0
    shown = localrun("show", name, port=real_daemon.port).stdout
    assert re.search(r"takes +vision\n +type +gemma3 F32", shown), shown
    assert "the projector sha256-" in localrun("show", name, "--fit", port=real_daemon.port).stdout
    refused = localrun("pull", name, "--projector", "F16", port=real_daemon.port)
    assert (refused.returncode, "projector: a model of a registry" in refused.stderr) == (1, True), refused.stderr


def test_a_file_with_blanks_in_its_name(localrun, real_daemon: Daemon):
    name = "o/spaces-GGUF:My Model (v2) Q4_K_M.gguf"
    ended = localrun("pull", name, port=real_daemon.port)
    assert ended.stdout == f"{name} is ready; chat with it: `localrun run '{name}'`\n", ended.stderr


def test_an_interrupted_pull_says_how_to_go_on_and_does(localrun, environment, real_daemon: Daemon, registry: Registry):
    name = registry.add("library/cut", Layer("model", GGUF + b"\0" * 64))
    registry.bytes_per_s = 1_000_000
    variables = environment | {"LOCALRUN_PORT": str(real_daemon.port)}
    pulling = subprocess.Popen(
        [sys.executable, "-m", "localrun", "pull", name], env=variables, stderr=subprocess.PIPE, text=True
    )
    deadline_s = time.monotonic() + 30
    while registry.content_bytes < 2_000_000:
        assert time.monotonic() < deadline_s
        time.sleep(0.02)
    registry.bytes_per_s = 50_000  # the rest takes a minute
    pulling.send_signal(signal.SIGINT)
    _, said = pulling.communicate(timeout=60)
    assert pulling.returncode == exits.INTERRUPTED
    sent_bytes = registry.content_bytes
    assert f"`localrun pull {name}`" in said
    registry.bytes_per_s = None
    assert localrun("pull", name, port=real_daemon.port).returncode == 0
    assert registry.content_bytes - sent_bytes < len(GGUF)


@pytest.mark.skipif(os.name == "nt", reason="needs a pseudo-terminal")
def test_a_terminal_gets_one_line_that_moves(environment, real_daemon: Daemon, registry: Registry):
    import pty

    name = registry.add("library/bar", Layer("model", GGUF + b"\0" * 128))
    registry.bytes_per_s = 8_000_000
    ours, theirs = pty.openpty()
    pulling = subprocess.Popen(
        [sys.executable, "-m", "localrun", "pull", name], stderr=theirs, stdout=subprocess.DEVNULL,
        env=environment | {"LOCALRUN_PORT": str(real_daemon.port)},
    )  # fmt: skip
    os.close(theirs)
    shown = b""
    while True:
        try:
            shown += os.read(ours, 65536)
        except OSError:
            break
    os.close(ours)
    assert pulling.wait(timeout=30) == 0
    bars = [int(percent) for percent in re.findall(r"(\d+)% \[", shown.decode())]
    assert len(bars) > 3
    assert bars == sorted(bars)
    assert bars[-1] == 100
    assert "\r\x1b[2K" in shown.decode()


def test_rm_keeps_a_file_that_another_program_downloaded(localrun, hub: Hub, tmp_path: Path):
    repo, file = "unsloth/Qwen3-0.6B-GGUF", "Qwen3-0.6B-Q4_K_M.gguf"
    path = Path(hf_hub_download(repo, file, endpoint=hub.endpoint, cache_dir=tmp_path / "hub", token=False))
    with running_daemon(HF_ENDPOINT=hub.endpoint, HF_HOME=str(tmp_path)) as daemon:
        for name in ("qwen3:0.6b", repo):
            assert localrun("pull", name, port=daemon.port).returncode == 0
        for name in ("qwen3:0.6b", repo):
            ended = localrun("rm", name, port=daemon.port)
            assert ended.returncode == 0, ended.stderr
        assert "stays: it was in the Hugging Face cache before" in ended.stdout
    assert path.read_bytes() == GGUF


def test_a_catalogue_name_that_is_not_here_is_pulled_and_run(localrun, real_daemon: Daemon):
    ended = localrun("run", "qwen3:0.6b", "hi", "--option", "num_predict=2", port=real_daemon.port)
    assert ended.returncode == 0, ended.stderr
    assert "qwen3:0.6b" in ended.stderr.splitlines()[0]
    assert "pulling manifest" in ended.stderr.splitlines()
    again = localrun("run", "qwen3:0.6b", "hi", "--option", "num_predict=2", port=real_daemon.port)
    assert (again.returncode, "pulling" in again.stderr) == (0, False)
    assert again.stderr.startswith("note: the answer is cut off")


def test_run_gets_a_name_that_only_ollama_s_library_has(localrun, registry: Registry, tmp_path: Path):
    registry.add("library/fox", Layer("model", GGUF))
    own = certificate.kept(tmp_path, ["registry.ollama.ai"])
    registry.socket = certificate.context(own).wrap_socket(registry.socket, server_side=True)
    with socks_proxy() as proxy:
        proxy.elsewhere["registry.ollama.ai"] = registry.server_address
        with running_daemon(ALL_PROXY=f"socks5h://{proxy.address}", SSL_CERT_FILE=str(own.certificate)) as daemon:
            ended = localrun("run", "fox", "hi", "--option", "num_predict=2", port=daemon.port)
            assert (ended.returncode, ended.stdout != "") == (0, True), ended.stderr
            slip = localrun("run", "fxo", "hi", port=daemon.port)
    assert "/v2/library/fxo/manifests/latest" in registry.requests
    assert slip.returncode == exits.MODEL_NOT_FOUND
    assert slip.stderr.splitlines()[-1] == "error: model 'fxo' not found; did you mean 'fox'?"


@pytest.mark.parametrize(("name", "guess"), [("no-such-model", ""), ("tyni", "; did you mean 'tiny'?")])
def test_a_name_that_nobody_has_and_no_network(localrun, name: str, guess: str):
    with running_daemon(HTTPS_PROXY="http://127.0.0.1:9") as daemon:
        ended = localrun("run", name, "hi", port=daemon.port)
    assert ended.returncode == exits.ERROR
    assert ended.stderr.splitlines()[-1].startswith("error: registry.ollama.ai cannot be reached")
    assert ended.stderr.endswith(f"pull again{guess}\n")


def test_failures_are_one_line_and_a_code(localrun, real_daemon: Daemon, registry: Registry):
    missing = localrun("pull", f"{registry.host}/library/nothing", port=real_daemon.port)
    assert missing.returncode == exits.MODEL_NOT_FOUND
    assert missing.stderr.splitlines()[-1].startswith("error: ")
    assert localrun("pull", "a/b/c/d", port=real_daemon.port).returncode == exits.ERROR


def test_search(localrun, real_daemon: Daemon):
    ended = localrun("search", "qwen3-0.6b", port=real_daemon.port)
    assert ended.returncode == 0, ended.stderr
    first, second = ended.stdout.split("\n\n")
    assert first.splitlines()[0].split() == ["NAME", "SIZE", "CONTEXT", "MEMORY", "LICENCE", "FOR"]
    assert first.splitlines()[1].startswith("qwen3:0.6b")
    assert second.splitlines()[0].split() == ["REPOSITORY", "DOWNLOADS", "LIKES", "UPDATED", "LICENCE"]
    found = json.loads(localrun("search", "--json", port=real_daemon.port).stdout)
    assert found["hub"] == []
    assert len(found["catalog"]) >= 20


MB = 1_000_000


def piece(completed: int, total: int = 100 * MB, digest: str = "sha256:a") -> PullPiece:
    return PullPiece(status="pulling a", digest=digest, total=total, completed=completed)


def test_bytes_rate_and_time_left():
    meter = PullMeter()
    for second in range(5):
        meter.add(piece(second * 10 * MB), float(second))
    assert meter.line(4.0) == " 40% [#########...............] 40 MB / 100 MB  10 MB/s  6 s left"
    meter.add(piece(100 * MB), 5.0)
    assert meter.line(5.0) == "100% [########################] 100 MB / 100 MB"


def test_what_was_there_before_is_not_speed():
    meter = PullMeter()
    meter.add(piece(0), 0.0)
    meter.add(piece(90 * MB), 0.0)
    assert meter.bytes_per_s(0.0) is None
    meter.add(piece(91 * MB), 1.0)
    assert meter.percent == 91


def test_nothing_goes_backwards():
    meter = PullMeter()
    seen = []
    for completed in (5, 3, 0, 50, 40, 200, 100):
        meter.add(piece(completed * MB), 1.0)
        seen.append(meter.done_bytes)
    assert seen == sorted(seen)
    assert seen[-1] == 100 * MB


def test_files_are_summed_and_statuses_change_nothing():
    meter = PullMeter()
    meter.add(PullPiece(status="pulling manifest"), 0.0)
    assert (meter.total_bytes, meter.percent) == (0, 0)
    meter.add(piece(100 * MB), 0.0)
    meter.add(piece(0, 300 * MB, "sha256:b"), 0.0)
    meter.add(PullPiece(status="pulling README", total=100 * MB), 0.0)
    assert (meter.total_bytes, meter.done_bytes, meter.percent) == (500 * MB, 100 * MB, 20)


def test_a_stalled_download_has_no_time_left():
    meter = PullMeter()
    meter.add(piece(10 * MB), 0.0)
    meter.add(piece(10 * MB), 5.0)
    assert meter.line(5.0).endswith("10 MB / 100 MB  0 B/s")
