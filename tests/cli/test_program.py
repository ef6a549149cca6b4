"""`localrun version`: ours, and that of the daemon that is running, which may be an older one."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from localrun import __version__
from localrun.cli import exits
from localrun.cli.root import cli


def test_with_and_without_a_daemon(localrun, daemon):
    assert localrun("version", port=daemon.port).stdout == f"localrun {__version__}\ndaemon 9.8.7\n"
    daemon.shutdown()
    daemon.server_close()
    assert localrun("version", port=daemon.port).stdout == f"localrun {__version__}\nno daemon is running\n"
    assert json.loads(localrun("version", "--json", port=daemon.port).stdout)["daemon"] is None


def test_ctrl_c_while_the_program_is_being_loaded_leaves_no_traceback():
    script = """if True:
        import sys
        from localrun.__main__ import main
        class Interrupted:
            def find_spec(self, name, *_):
                if name == "click":
                    raise KeyboardInterrupt
        sys.meta_path.insert(0, Interrupted())
        main()
    """
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (exits.INTERRUPTED, "")


BASH = shutil.which("bash")


def script(shell: str) -> str:
    result = CliRunner().invoke(cli, ["completion", shell])
    assert result.exit_code == 0
    return result.stdout


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_script_asks_the_command_itself(shell: str):
    text = script(shell)
    assert "_LOCALRUN_COMPLETE" in text
    assert f"{shell}_complete" in text


def test_an_unknown_shell_is_refused_with_those_that_are_known():
    result = CliRunner().invoke(cli, ["completion", "tcsh"])
    assert result.exit_code == 2
    assert "'bash', 'zsh', 'fish'" in result.output


@pytest.mark.skipif(BASH is None, reason="bash is not installed")
def test_tab_in_bash_completes_commands_and_options(tmp_path: Path):
    program = tmp_path / "localrun"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m localrun "$@"\n')
    program.chmod(0o755)
    (tmp_path / "completion").write_text(script("bash"))
    asked = (
        f"source {tmp_path}/completion\n"
        "ask() { COMP_WORDS=(localrun \"$@\"); COMP_CWORD=$#; COMPREPLY=(); _localrun_completion localrun; "
        'echo "${COMPREPLY[@]}"; }\n'
        "ask compl\nask serve --kv-c\nask completion f\n"
    )  # fmt: skip
    assert BASH is not None
    environ = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    ran = subprocess.run([BASH, "-c", asked], env=environ, capture_output=True, text=True, timeout=60)
    assert ran.stdout.splitlines() == ["completion", "--kv-cells", "fish"]


@pytest.mark.skipif(BASH is None, reason="needs bash")
def test_closed_streams_end_in_no_traceback(tmp_path: Path):
    assert BASH is not None
    environ = {**os.environ, "LOCALRUN_HOME": str(tmp_path)}
    asked = f"{sys.executable} -m localrun list --port 0 <&- >&-"
    ran = subprocess.run([BASH, "-c", asked], env=environ, capture_output=True, text=True, timeout=60)
    assert ran.returncode == exits.USAGE
    assert ran.stderr.startswith("error: port 0")
    assert subprocess.run([BASH, "-c", f"{asked} 2>&-"], env=environ, timeout=60).returncode == exits.USAGE
