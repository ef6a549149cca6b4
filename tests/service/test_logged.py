"""The way in of the Windows task, which works everywhere: environment and log from a file, in one process."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest


@pytest.mark.skipif(sys.platform == "win32", reason="signals")
def test_it_is_the_daemon_with_the_files_environment_and_log(tmp_path: Path):
    log = tmp_path / "state" / "service.log"
    start = tmp_path / "start.json"
    environment = {"LOCALRUN_HOME": str(tmp_path / "home"), "LOCALRUN_FAKE_ENGINE": "1", "LOCALRUN_PORT": "0"}
    start.write_text(json.dumps({"arguments": ["serve"], "environment": environment, "log": str(log)}))
    clean = {name: value for name, value in os.environ.items() if not name.startswith("LOCALRUN_")}
    process = subprocess.Popen([sys.executable, "-P", "-m", "localrun.service.logged", str(start)], env=clean)
    try:
        deadline_s = time.monotonic() + 60
        while not (log.is_file() and "localrun is listening on" in log.read_text()):
            assert process.poll() is None
            assert time.monotonic() < deadline_s
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=60) == 0
    finally:
        process.kill()
        process.wait()
    assert "stopping" in log.read_text()


def test_a_command_line_that_fails_leaves_its_reason_in_the_log(tmp_path: Path):
    log = tmp_path / "service.log"
    start = tmp_path / "start.json"
    start.write_text(json.dumps({"arguments": ["serve", "--host", "0.0.0.0"], "environment": {}, "log": str(log)}))
    ended = subprocess.run([sys.executable, "-P", "-m", "localrun.service.logged", str(start)], check=False, timeout=60)
    assert ended.returncode == 2
    assert "only loopback addresses" in log.read_text()
