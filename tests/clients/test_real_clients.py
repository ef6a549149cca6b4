"""Real clients, each in an environment of its own, against a real daemon: `make test-clients`.

Each script of `scripts/` is run once with the addresses of the daemons and prints a JSON line for every check of it;
each check is a test here. Skipped unless asked for, since it installs packages (see `environments`).
"""

from __future__ import annotations

import base64
import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.clients import environments
from tests.clients.environments import BROWSERS
from tests.clients.real_daemons import real_daemons
from tests.server.media import making

SCRIPTS = Path(__file__).parent / "scripts"
SCRIPT_TIMEOUT_S = 900
PICTURE = base64.b64encode(making.png(64, 48)).decode()
SOUND = base64.b64encode(making.wave(making.tone(8000))).decode()
_CHECK = {"python": r"^(?:async )?def check_(\w+)\(", "node": r'^check\("([\w-]+)"'}
_SUFFIX = {"python": "py", "node": "mjs"}

pytestmark = pytest.mark.clients


def cases() -> Iterator[Any]:
    for kind, pattern in _CHECK.items():
        for script in sorted((SCRIPTS / kind).glob("with_*")):
            client = script.stem.removeprefix("with_").replace("_", "-")
            for check in re.findall(pattern, script.read_text(encoding="utf-8"), re.MULTILINE):
                for name in [f"chat-page-{browser}" for browser in BROWSERS] if client == "chat-page" else [client]:
                    yield pytest.param(kind, name, check, id=f"{kind}-{name}-{check}")


@pytest.fixture(scope="module")
def addresses(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    with real_daemons(tmp_path_factory.mktemp("models")) as (real, fake):
        yield real.url, fake.url
        for daemon in (real, fake):
            assert "Traceback" not in daemon.log, daemon.log[-4000:]


@pytest.mark.parametrize(("kind", "client", "check"), cases())
def test_client(kind: str, client: str, check: str, addresses: tuple[str, str]) -> None:
    errors, failure = results(kind, client, *addresses)
    assert not failure, failure
    assert check in errors, "the script ended before this check"
    assert errors[check] is None, errors[check]


@cache
def results(kind: str, client: str, url: str, fake_url: str) -> tuple[dict[str, str | None], str]:
    """What went wrong in each check of a client's script, and in the script as a whole."""
    own: dict[str, str] = {}
    if client.startswith("chat-page"):
        client, browser = "chat-page", client.rpartition("-")[2]
        own = {"LOCALRUN_TEST_BROWSER": browser, "LOCALRUN_TEST_BROWSER_PATH": environments.browser(browser) or ""}
        if not own["LOCALRUN_TEST_BROWSER_PATH"]:
            pytest.skip(f"{browser} or its driver is not installed")
    command, folder = (_python if kind == "python" else _node)(client)
    # Whatever points a client elsewhere is left out: accounts, proxies, other servers.
    inherited = {name: value for name, value in os.environ.items() if name in ("PATH", "LANG", "SYSTEMROOT", "TMPDIR")}
    own |= {"LOCALRUN_TEST_URL": url, "LOCALRUN_TEST_FAKE_URL": fake_url, "HOME": str(folder)}
    own |= {"LOCALRUN_TEST_PICTURE": PICTURE, "LOCALRUN_TEST_SOUND": SOUND}
    done = subprocess.run(
        command, cwd=folder, env=inherited | own, stdin=subprocess.DEVNULL, capture_output=True, text=True,
        timeout=SCRIPT_TIMEOUT_S, check=False,
    )  # fmt: skip
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"check"')]
    failure = f"the script ended with {done.returncode}:\n{done.stderr[-4000:]}" if done.returncode else ""
    return {line["check"]: line["error"] for line in lines}, failure


def _python(client: str) -> tuple[list[str], Path]:
    python = environments.python_of(client)
    home = python.parents[1] / "home"
    home.mkdir(exist_ok=True)
    script = SCRIPTS / "python" / f"with_{client.replace('-', '_')}.py"
    return [str(python), str(script)], home


def _node(client: str) -> tuple[list[str], Path]:
    if not environments.has_node():
        pytest.skip("node and npm are not installed")
    # Modules are looked for beside the script and above it, so the scripts go there.
    home = environments.node_folder_of(client) / "home"
    shutil.copytree(SCRIPTS / "node", home, dirs_exist_ok=True)
    return ["node", f"with_{client.replace('-', '_')}.mjs"], home
