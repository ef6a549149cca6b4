"""The agents that people run, from npm, one prompt each against a daemon: `make test-clients`.

The engine is a fake one that writes what a prompt tells it, with room for the system prompts and tools that they send.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.clients import environments
from tests.daemon import Daemon, running_daemon

pytestmark = pytest.mark.clients
TIMEOUT_S = 300
PROMPT = "SAY[[as quiet as the sea]]"


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    with running_daemon("--slots", "2", "--kv-cells", "200000", LOCALRUN_FAKE_SCRIPTS="1") as running:
        yield running
        assert "Traceback" not in running.log, running.log[-4000:]


@pytest.fixture(scope="module")
def programs() -> Path:
    if not environments.has_node():
        pytest.skip("node and npm are not installed")
    return environments.node_folder_of("agents") / "node_modules"


def program(programs: Path, pattern: str) -> Path:
    """The file for this machine. A package's own script would link it, and none of those is run."""
    return sorted(programs.glob(pattern))[0]


def said(program: Path, *arguments: str, home: Path, **environment: str) -> str:
    """What it prints. Its home and its folder are empty ones, and nothing points it elsewhere."""
    work = home / "work"
    work.mkdir()
    own = {name: value for name, value in os.environ.items() if name in ("PATH", "LANG", "TMPDIR")}
    own |= {"HOME": str(home), "XDG_CONFIG_HOME": str(home / "config"), "XDG_DATA_HOME": str(home / "data")}
    ran = subprocess.run(
        [str(program), *arguments], cwd=work, env=own | environment, stdin=subprocess.DEVNULL, capture_output=True,
        text=True, timeout=TIMEOUT_S, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, f"{ran.stdout[-3000:]}\n{ran.stderr[-3000:]}"
    return ran.stdout


def test_codex(daemon: Daemon, programs: Path, tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text(
        f'model = "tiny"\nmodel_provider = "localrun"\n[model_providers.localrun]\nname = "localrun"\n'
        f'base_url = "http://127.0.0.1:{daemon.port}/v1"\nwire_api = "responses"\n'
    )
    answer = said(
        programs / ".bin/codex", "exec", "--skip-git-repo-check", PROMPT, home=tmp_path, CODEX_HOME=str(tmp_path)
    )
    assert "as quiet as the sea" in answer
    assert "ignored tools[" in daemon.log, "what the model cannot call is said"


def test_claude_code(daemon: Daemon, programs: Path, tmp_path: Path) -> None:
    answer = said(
        program(programs, "@anthropic-ai/claude-code-*/claude*"), "--print", "--model", "tiny", PROMPT, home=tmp_path,
        ANTHROPIC_BASE_URL=f"http://127.0.0.1:{daemon.port}", ANTHROPIC_AUTH_TOKEN="none", ANTHROPIC_API_KEY="",
        ANTHROPIC_SMALL_FAST_MODEL="tiny", ANTHROPIC_DEFAULT_HAIKU_MODEL="tiny",
        CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC="1",
    )  # fmt: skip
    assert "as quiet as the sea" in answer


def test_opencode(daemon: Daemon, programs: Path, tmp_path: Path) -> None:
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "options": {"baseURL": f"http://127.0.0.1:{daemon.port}/v1"},
        "models": {"tiny": {}},
    }
    config = tmp_path / "config" / "opencode"
    config.mkdir(parents=True)
    (config / "opencode.json").write_text(json.dumps({"provider": {"localrun": provider}, "autoupdate": False}))
    answer = said(
        program(programs, "opencode-[!a]*/bin/opencode*"), "run", "--model", "localrun/tiny", PROMPT, home=tmp_path
    )
    assert "as quiet as the sea" in answer
