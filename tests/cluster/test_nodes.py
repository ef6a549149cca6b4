"""Ray's part of a machine, held by a process: a program that stands for Ray's command."""

from __future__ import annotations

import os
import platform
import re
import socket
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import psutil
import pytest

from localrun import __version__
from localrun.cluster import settings
from localrun.cluster.on_ray import nodes
from localrun.cluster.on_ray.nodes import Node
from localrun.cluster.settings import Membership
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
# What answers for Ray at the head, beside a port that is open.
GCS = """
import json, types
class GcsClient:
    def __init__(self, address):
        from ray.exceptions import AuthenticationError, RpcError
        {fails}
    def internal_kv_get(self, key, namespace):
        return json.dumps({told!r}).encode() if {told!r} else None
    def get_all_node_info(self, timeout):
        nodes = (True, {label!r}), (False, "another")
        return {{n: types.SimpleNamespace(is_head_node=is_head, labels=dict(localrun=label) if label else {{}})
                for n, (is_head, label) in enumerate(nodes)}}
"""
HEAD = {"ray_version": "7.7", "python_version": platform.python_version()}


@pytest.mark.parametrize("is_kuberay", [False, True])
def test_the_dashboard_is_for_the_operator_alone(ray: Path, is_kuberay: bool):
    says(ray, f"{UP}sys.stdin.read()")
    head = msgspec.structs.replace(MEMBER, is_head=True, is_kuberay=is_kuberay)
    with Node(head):
        pass
    ((_, argv),) = starts(ray)
    assert {f"--include-dashboard={str(is_kuberay).lower()}", f"--dashboard-host={MEMBER.address}"} <= set(argv)
    assert (f"--dashboard-agent-listen-port={nodes.AGENT_PORT}" in argv) is is_kuberay


@pytest.fixture
def head(ray: Path) -> Iterator[Callable[..., Membership]]:
    """`head(...)`: a member of a cluster whose head says that, where Ray's command is `program`."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def says_so(
            program: str = f"{UP}time.sleep(600)", told: object = HEAD, label: str = __version__, fails: str = ""
        ) -> Membership:
            says(ray, program)
            (ray / "__init__.py").write_text("__version__ = '7.7'")
            (ray / "exceptions.py").write_text(
                "class AuthenticationError(Exception): ...\nclass RpcError(Exception): ...\n"
            )
            (ray / "_raylet.py").write_text(GCS.format(told=told, label=label, fails=fails or "pass"))
            return msgspec.structs.replace(MEMBER, head=f"127.0.0.1:{server.getsockname()[1]}")

        yield says_so


def test_a_node_is_up_when_ray_says_so_and_gone_at_the_end(ray: Path, head):
    member = head()
    with Node(member):
        ((pid, argv),) = starts(ray)
        assert psutil.pid_exists(pid)
        assert settings.temp_folder().parent.stat().st_mode & 0o777 == 0o700
        assert f"--address={member.head}" in argv
        assert "--node-ip-address=127.0.0.2" in argv
    assert not psutil.pid_exists(pid)


def test_what_keeps_ray_from_starting_is_said(head):
    member = head("sys.exit('the port is taken')")
    with pytest.raises(Unavailable, match="the port is taken"), Node(member):
        pass


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ({"label": "0.0.1"}, f"runs on localrun 0.0.1, and this machine has {__version__}"),
        ({"told": HEAD | {"ray_version": "7.6"}}, "runs on Ray 7.6, and this machine has 7.7"),
        ({"told": HEAD | {"python_version": "3.2.9"}}, "runs on Python 3.2, and this machine has 3."),
        ({"fails": "raise AuthenticationError('x')"}, "this token is not that of the cluster of 127.0.0.1"),
        ({"fails": "raise RpcError('timed out')"}, "is no head of a cluster with this token: timed out"),
    ],
)
def test_a_head_that_cannot_be_joined_is_told_apart_before_anything_starts(ray: Path, head, said, message):
    member = head(**said)
    with pytest.raises(Unavailable, match=f"^[^;]*{re.escape(message)}"), Node(member):
        pass
    assert not (ray / "said").exists()


@pytest.mark.parametrize("said", [{}, {"told": None}, {"label": ""}])
def test_a_head_of_the_same_versions_or_that_says_none_is_joined(ray: Path, head, said):
    with Node(head(**said)):
        assert len(starts(ray)) == 1


def test_where_nobody_listens_nobody_is_joined(ray: Path, head):
    member = msgspec.structs.replace(head(), head="127.0.0.1:1")
    with pytest.raises(Unavailable, match=r"^nobody answers at 127\.0\.0\.1:1 .*: is the head up"), Node(member):
        pass
    assert not (ray / "said").exists()


def test_a_busy_machine_gets_another_try(ray: Path, head):
    slow = "sys.exit('The current node timed out during startup. ')"
    with Node(head(f"if not os.path.exists('once'):\n    open('once', 'w')\n    {slow}\n{UP}time.sleep(600)")):
        assert len(starts(ray)) == 2


def test_a_node_that_lost_its_head_joins_again(ray: Path, head):
    with Node(head(f"{UP}time.sleep(0.05)")):
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
        "from localrun.cluster.on_ray.nodes import Node\n"
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
    psutil.wait_procs([psutil.Process(pid)] if psutil.pid_exists(pid) else [], timeout=60)
    assert not psutil.pid_exists(pid)


def test_a_head_shows_no_dashboard_and_keeps_its_files_together():
    argv = nodes._arguments(settings.Membership(head="127.0.0.1:7001", address="127.0.0.1", node="n", is_head=True))
    assert "--include-dashboard=false" in argv
    assert "--port=7001" in argv
    assert f"--temp-dir={settings.temp_folder()}" in argv
    assert len(str(settings.temp_folder())) < 48
