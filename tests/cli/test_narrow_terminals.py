"""Lists in narrow terminals: all that people copy is whole."""

from __future__ import annotations

import json

import pytest

from localrun.access.keys import KeyFile
from localrun.cli import text
from tests.daemon import Daemon, running_daemon
from tests.server.batches.batch_files import begun, chat_line, encoded, ended

MODEL = "a-model-with-a-long-name:and-a-long-tag-q4_k_m"


@pytest.fixture(scope="module")
def long_names():
    from openai import OpenAI

    with running_daemon() as daemon:
        key = KeyFile(daemon.home / "data").create("a-key-of-thirty-two-characters.-", admin=True).text
        headers = {"authorization": f"Bearer {key}"}
        daemon.http.post("/api/copy", json={"source": "tiny", "destination": MODEL}, headers=headers)
        with OpenAI(base_url=f"{daemon.url}/v1", api_key=key, max_retries=0) as client:
            ended(client, begun(client, encoded([chat_line("a", model=MODEL)])))
        yield daemon, key


@pytest.mark.parametrize(
    ("command", "n_columns"),
    [
        *((command, n_columns) for command in (("list",), ("ps",), ("batch", "list")) for n_columns in (60, 80)),
        (("usage",), 80),
        (("usage", "--by", "model"), 80),
    ],
)
def test_a_list_fits_and_its_names_are_whole(
    localrun,
    environment: dict[str, str],
    long_names: tuple[Daemon, str],
    monkeypatch: pytest.MonkeyPatch,
    command: tuple[str, ...],
    n_columns: int,
):
    daemon, key = long_names
    environment["LOCALRUN_API_KEY"] = key
    whole = localrun(*command, port=daemon.port).stdout
    monkeypatch.setattr(text, "terminal_columns", lambda: n_columns)
    narrow = localrun(*command, port=daemon.port).stdout
    assert max(map(len, narrow.splitlines())) <= n_columns < max(map(len, whole.splitlines())) or narrow == whole
    first = [line.split()[0] for line in whole.splitlines() if line]
    assert [line.split()[0] for line in narrow.splitlines() if line] == first
    rows = json.loads(localrun(*command, "--json", port=daemon.port).stdout)
    assert rows
