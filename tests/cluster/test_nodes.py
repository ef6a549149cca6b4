"""Ray's part of a machine, held by a process: a program that stands for Ray's command."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import msgspec
import psutil
import pytest

from localrun.cluster import nodes, settings
from localrun.cluster.nodes import Node
from localrun.errors import Unavailable
from tests.cluster.test_settings import MEMBER, TOKEN


@pytest.fixture
def ray(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a module that stands for Ray's command. `ray / "said"` has a line for each start."""
    settings.keep(MEMBER, TOKEN)
    folder = tmp_path / "ray"
    (folder / "scripts").mkdir(parents=True)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{Path(__file__).parents[2]}")
    monkeypatch.setattr(nodes, "JOIN_AGAIN_S", 0.01)
    monkeypatch.chdir(tmp_path)
    return folder


def says(folder: Path, program: str) -> None:
    for name in ("__init__.py", "scripts/__init__.py"):
        (folder / name).touch()
    body = f"open({str(folder / 'said')!r}, 'a').write(repr((os.getpid(), sys.argv)) + chr(10))\n{program}"
    (folder / "scripts" / "scripts.py").write_text(
        "import os, sys, time, types\n"
        "ray_constants = types.SimpleNamespace(ENABLE_RAY_CLUSTER=False)\n"
        f"def main():\n{textwrap.indent(body, '    ')}\n"
    )


def starts(folder: Path) -> list[tuple[int, list[str]]]:
    return [eval(line) for line in (folder / "said").read_text().splitlines()]


UP = "print('Ray runtime started.', flush=True)\n"


@pytest.mark.parametrize("is_kuberay", [False, True])
def test_the_dashboard_is_for_the_operator_alone(ray: Path, is_kuberay: bool):
    says(ray, f"{UP}sys.stdin.read()")
    head = msgspec.structs.replace(MEMBER, is_head=True, is_kuberay=is_kuberay)
    with Node(head):
        pass
    ((_, argv),) = starts(ray)
    assert {f"--include-dashboard={str(is_kuberay).lower()}", f"--dashboard-host={MEMBER.address}"} <= set(argv)
    assert (f"--dashboard-agent-listen-port={nodes.AGENT_PORT}" in argv) is is_kuberay


def test_a_node_is_up_when_ray_says_so_and_gone_at_the_end(ray: Path):
    says(ray, f"{UP}time.sleep(600)")
    with Node(MEMBER):
        ((pid, argv),) = starts(ray)
        assert psutil.pid_exists(pid)
        assert settings.temp_folder().parent.stat().st_mode & 0o777 == 0o700
        assert "--address=127.0.0.1:11433" in argv
        assert "--node-ip-address=127.0.0.2" in argv
    assert not psutil.pid_exists(pid)


def test_what_keeps_ray_from_starting_is_said(ray: Path):
    says(ray, "sys.exit('the port is taken')")
    with pytest.raises(Unavailable, match="the port is taken"), Node(MEMBER):
        pass


def test_a_busy_machine_gets_another_try(ray: Path):
    slow = "sys.exit('The current node timed out during startup. ')"
    says(ray, f"if not os.path.exists('once'):\n    open('once', 'w')\n    {slow}\n{UP}time.sleep(600)")
    with Node(MEMBER):
        assert len(starts(ray)) == 2


def test_a_node_that_lost_its_head_joins_again(ray: Path):
    says(ray, f"{UP}time.sleep(0.05)")
    with Node(MEMBER):
        for _ in range(600):
            if len(starts(ray)) > 2:
                break
            subprocess.run([sys.executable, "-c", "import time; time.sleep(0.05)"], check=True)
        assert len(starts(ray)) > 2


def test_nothing_of_ray_outlives_a_holder_that_is_killed(ray: Path, tmp_path: Path):
    says(ray, f"{UP}time.sleep(600)")
    program = (
        "import os, signal\n"
        "from localrun.cluster import settings\n"
        "from localrun.cluster.nodes import Node\n"
        "settings.forget()\n"
        "member = settings.Membership(head='127.0.0.1:1', address='127.0.0.1', node='n', is_head=True)\n"
        "settings.keep(member, settings.own_token())\n"
        "Node(member).__enter__()\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    settings.forget()
    subprocess.run([sys.executable, "-c", program], check=False, timeout=60)
    ((pid, argv),) = starts(ray)
    assert "--head" in argv
    psutil.wait_procs([psutil.Process(pid)] if psutil.pid_exists(pid) else [], timeout=20)
    assert not psutil.pid_exists(pid)


def test_a_head_shows_no_dashboard_and_keeps_its_files_together():
    argv = nodes._arguments(settings.Membership(head="127.0.0.1:7001", address="127.0.0.1", node="n", is_head=True))
    assert "--include-dashboard=false" in argv
    assert "--port=7001" in argv
    assert f"--temp-dir={settings.temp_folder()}" in argv
    assert len(str(settings.temp_folder())) < 48
