"""`localrun ps`: what is loaded, with each engine's process."""

from __future__ import annotations

import json

from msgspec.structs import replace

from localrun.cli import exits
from localrun.cli.ps import _where
from localrun.snapshot import EngineRow


def test_columns(localrun, daemon):
    header, row = localrun("ps", port=daemon.port).stdout.splitlines()
    assert header.startswith("NAME  PID   STATE")
    assert row.split()[:3] == ["tiny", "4242", "ready"]
    assert row.endswith("never")


def test_it_says_where_the_layers_lie():
    engine = EngineRow(model="m", pid=1, state="ready", layers=32)
    assert _where(engine) == "32 in RAM"
    assert _where(replace(engine, gpu_layers=24)) == "24 on GPU, 8 in RAM"
    assert _where(replace(engine, gpu_layers=33)) == "32 on GPU", "llama.cpp counts the output as one more"
    assert _where(replace(engine, layers=0)) == "-"


def test_json_has_the_pid(localrun, daemon):
    (row,) = json.loads(localrun("ps", "--json", port=daemon.port).stdout)
    assert row["pid"] == 4242


def test_without_a_daemon_none_is_started(localrun, daemon):
    port = daemon.port
    daemon.shutdown()
    daemon.server_close()
    ended = localrun("ps", port=port)
    assert ended.returncode == exits.DAEMON_UNREACHABLE
    assert ended.stderr == f"error: no daemon answers at http://127.0.0.1:{port}; `localrun serve` starts one\n"
