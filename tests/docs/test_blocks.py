"""Every block of code in the README and in the documentation runs as it is written, or is read by what reads it.

Commands and Python run against a daemon with the built-in model, under the names that the pages use, and a hub on
loopback. `NOT_RUN` has the lines that cannot run here, and why.
"""

from __future__ import annotations

import json
import os
import re
import struct
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import yaml

from localrun import config
from localrun.models import builtin, catalog, modelfile
from localrun.models.name import ModelName
from localrun.tui import preferences
from tests.daemon import Daemon, running_daemon
from tests.engine.native.media import make_pair
from tests.hub.repository import Repository
from tests.hub.server import Hub
from tests.lora_file import write_lora
from tests.server.media import making
from tests.support.synthesis.synthesize import synthesize

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "localrun" / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.glob("*.md"))]
LABELS = {"sh", "python", "json", "yaml", "toml", "lua", "modelfile", "text"}
# How a line begins that does not run here, and why not.
NOT_RUN = {
    "git clone ADDRESS": "the address is the reader's",
    "packaging/install.sh": "make smoke installs, and tests/packaging runs the plan",
    "localrun service": "tests/service has a service manager",
    "localrun doctor": "it says what this machine lacks; tests/doctor",
    "python3 -m localrun.native_build": "it compiles for minutes; make smoke",
    "uv tool install": "installs for the user; test_pages.py compares the line",
    "docker build": "there is no Docker in the tests",
    "localrun cluster": "needs Ray and other machines; make test-cluster",
    "localrun serve": "does not end; the daemon of the test is one",
    "localrun --host studio.local": "there is no other machine; tests/e2e has two daemons",
    "export LOCALRUN_API_KEY": "belongs to the line after it",
    "localrun run qwen3:4b --tools": "needs a server of tools; tests/cli/test_run_tools.py",
    'localrun run qwen3:4b "What is on my list?" --tools': "the same",
    "aider": "make test-clients sends what it sends",
    "claude": "make test-clients runs it",
    "llm": "make test-clients runs it",
    "open-webui": "make test-clients sends what it sends",
}


class Block(NamedTuple):
    """`label` is the word behind the fence."""

    label: str
    text: str


def blocks(page: Path, *labels: str) -> list[Block]:
    found = re.findall(r"^```(.*)\n((?:.*\n)*?)```$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return [Block(*each) for each in found if not labels or each[0] in labels]


def lines_to_run(text: str) -> str:
    """A script without the lines that do not run here, each with those that go on with it."""
    kept, is_out = [], False
    for line in text.splitlines():
        is_out = is_out if kept and kept[-1].endswith("\\") else any(line.startswith(start) for start in NOT_RUN)
        kept.append(":" if is_out else line)
    return "\n".join(kept)


def with_runs() -> list[Path]:
    return [page for page in PAGES if any(_does_something(block) for block in blocks(page, "sh", "python"))]


def _does_something(block: Block) -> bool:
    lines = [line for line in lines_to_run(block.text).splitlines() if line != ":" and not line.startswith("export ")]
    return any(line and not line.startswith(("make ", "#")) for line in lines)


class Reader(NamedTuple):
    """`folder` has the files that the pages name, the daemon every model."""

    daemon: Daemon
    folder: Path


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reader]:
    folder = tmp_path_factory.mktemp("reader")
    models = folder / "models"
    models.mkdir()
    pair = make_pair(models, "gemma3", image=64)
    pair.projector.rename(models / "mmproj-gemma3.gguf")
    synthesize("tiny", "F16", models / "big-f16.gguf")
    (models / "long.gguf").write_bytes(trained_for(131_072))
    (folder / "photo.jpg").write_bytes(making.encoded(making.noise(64, 48), "JPEG"))
    (folder / "my-model-Q4_K_M.gguf").symlink_to(builtin.model_path())
    (folder / "Modelfile").write_text(blocks(DOCS / "modelfile.md", "modelfile")[0].text)
    (folder / "questions.jsonl").write_text(blocks(DOCS / "serving.md", "json")[0].text)
    (folder / ".venv").symlink_to(Path(sys.prefix))
    write_lora(builtin.model_path(), folder / "terse.gguf")
    with (
        Hub(*repositories(folder)) as hub,
        running_daemon(fake=False, LOCALRUN_MODELS=str(models), HF_ENDPOINT=hub.endpoint) as daemon,
    ):
        for source, copy in (("gemma3", "gemma3:4b"), *(("long", f"qwen3:{size}") for size in ("0.6b", "4b", "8b"))):
            assert daemon.post("/api/copy", source=source, destination=copy).status_code == 200
        yield Reader(daemon, folder)
        assert "Traceback" not in daemon.log


def repositories(folder: Path) -> Iterator[Repository]:
    """What the pages pull."""
    for name in ("qwen3:0.6b", "qwen3.5:4b"):
        found = catalog.find(ModelName.parse(name))
        assert found is not None
        content = builtin.model_path().read_bytes()
        yield Repository(found.entry.repo, {f"model-{quant}.gguf": content for quant in found.entry.quants})
    lora = write_lora(builtin.model_path(), folder / "style-lora.gguf", seed=1)
    yield Repository("owner/style-lora", {lora.name: lora.read_bytes()})


def trained_for(n_tokens: int) -> bytes:
    """The built-in model, which says that it can take more."""
    key = b"llama.context_length" + struct.pack("<I", 4)
    content = builtin.model_path().read_bytes()
    assert content.count(key) == 1
    place = content.index(key) + len(key)
    return content[:place] + struct.pack("<I", n_tokens) + content[place + 4 :]


@pytest.mark.slow
@pytest.mark.parametrize("page", with_runs(), ids=lambda page: page.name)
def test_the_commands_of_a_page_run(page: Path, reader: Reader, tmp_path: Path):
    # Once there is a key, the programs of the other pages would need one.
    home = tmp_path if page.name == "sharing.md" else reader.daemon.home
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("LOCALRUN_", "HF_"))}
    environment |= {"LOCALRUN_HOME": str(home), "LOCALRUN_PORT": str(reader.daemon.port), "NO_COLOR": "1"}
    environment |= {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "OLLAMA_MODELS": str(tmp_path)}
    for label, text in blocks(page, "sh", "python"):
        there = text.replace("http://127.0.0.1:11434", reader.daemon.url)
        script = "set -e\n" + re.sub("^make .*", ":", lines_to_run(there), flags=re.MULTILINE)
        command = ["sh", "-c", script] if label == "sh" else [sys.executable, "-c", there]
        ran = subprocess.run(
            command, cwd=reader.folder, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True,
            timeout=240, check=False,
        )  # fmt: skip
        assert ran.returncode == 0, f"{text}\n{ran.stdout[-2000:]}\n{ran.stderr[-2000:]}"
        assert '"error":' not in ran.stdout, ran.stdout


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_block_says_what_it_is_and_is_that(page: Path, tmp_path: Path):
    targets = set(re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    for label, text in blocks(page):
        assert label in LABELS, f"what is this? {text[:80]}"
        if label == "sh":
            assert set(re.findall(r"^make ([a-z0-9-]+)", text, re.MULTILINE)) <= targets
            subprocess.run(["sh", "-n", "-c", text], check=True)
        elif label == "json":
            for value in [text] if text.startswith(("{\n", "[\n")) else text.splitlines():
                json.loads(value)
        elif label == "yaml":
            yaml.safe_load(text)
        elif label == "modelfile":
            assert modelfile.parse(text)
        elif label == "lua":  # there is none in the tests
            assert text.count("{") == text.count("}")
            assert text.count("(") == text.count(")")
        elif label == "toml":
            tomllib.loads(text)


@pytest.mark.parametrize("name", ["settings.md", "serving.md"])
def test_a_settings_file_is_taken(name: str, tmp_path: Path):
    (tmp_path / "config").mkdir()
    for _, text in blocks(DOCS / name, "toml"):
        (tmp_path / "config" / "localrun.toml").write_text(text)
        assert config.load(environ={"LOCALRUN_HOME": str(tmp_path)}) != config.Settings()


@pytest.mark.parametrize("name", ["chat.md", "media-and-tools.md"])
def test_a_file_of_preferences_is_taken(name: str, tmp_path: Path):
    for _, text in blocks(DOCS / name, "toml"):
        (tmp_path / "tui.toml").write_text(text)
        loaded = preferences.load(tmp_path / "tui.toml")
        assert loaded.problems == ()
        assert loaded != preferences.load(tmp_path / "none.toml")


def test_each_line_that_is_left_out_is_on_a_page():
    lines = [line for page in PAGES for block in blocks(page, "sh") for line in block.text.splitlines()]
    for start in NOT_RUN:
        assert any(line.startswith(start) for line in lines), start
