"""This machine's part of Ray, held by the process that began it: `ray start`, and its end.

`Node` runs it as a child and watches it in a thread. The child is this module, which runs Ray's own command, and ends
with its standard input, so that nothing of Ray outlives a holder that was killed. A node that lost its head, which
Ray's processes end of at last, joins again as soon as there is one. The token is asked for at every port, whatever it
listens on (`settings.environment`).

Does not: import Ray into the holder (the child does).
"""

from __future__ import annotations

import json
import logging
import os
import platform
import signal
import socket
import subprocess
import sys
import threading
import time
import types
from collections.abc import Mapping
from types import MappingProxyType

from localrun import __version__
from localrun.cluster import settings
from localrun.cluster.settings import Membership
from localrun.errors import Unavailable
from localrun.processes import HIDDEN, last_words

START_TIMEOUT_S = 120.0
END_GRACE_S = 15.0
JOIN_AGAIN_S = 2.0
# Tokens do not pass Ray, nor files: its store of objects is as small as Ray takes it.
OBJECT_STORE_BYTES = 80_000_000
# What the command prints when its processes are up.
_UP = "Ray runtime started"
# And when a busy machine did not start them within its half minute.
_SLOW = "timed out during startup"
N_LINES = 40
# Where KubeRay asks whether a node is well.
AGENT_PORT = 52365
# Before what a person is told, of a head that this machine cannot join or of a failed start; Ray's words are around it.
MARK = "localrun says: "
HEAD_TIMEOUT_S = 10.0
# Of each node, so that who joins sees with whom.
VERSION_LABEL = "localrun"

_log = logging.getLogger(__name__)


class Node:
    """`with Node(member):` is while this machine is in the cluster. `labels` are what it says of itself.
    Raises Unavailable, or OSError, where it cannot."""

    def __init__(self, member: Membership, labels: Mapping[str, str] = MappingProxyType({})) -> None:
        self._member, self._labels = member, labels
        self._process: subprocess.Popen[str] | None = None
        self._is_up, self._is_ending = threading.Event(), threading.Event()
        self._lines: list[str] = []
        self._thread = threading.Thread(target=self._run, name="cluster-node", daemon=True)

    def __enter__(self) -> Node:
        settings.clear_temp_folder(anew=True)
        self._thread.start()
        try:
            self._await_start()
        except BaseException:
            self.end()
            raise
        return self

    def __exit__(self, *_of_error: object) -> None:
        self.end()

    def _await_start(self) -> None:
        until_s = time.monotonic() + START_TIMEOUT_S
        while not self._is_up.wait(0.1):
            if time.monotonic() > until_s or not self._thread.is_alive():
                ours = [line.removeprefix(MARK) for line in self._lines if line.startswith(MARK)]
                raise Unavailable(
                    ours[0] if ours else f"Ray does not start here{last_words(chr(10).join(self._lines))}"
                )

    def end(self) -> None:
        """Returns when Ray's processes are gone."""
        self._is_ending.set()
        process = self._process
        if process is not None and process.poll() is None:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(END_GRACE_S)
            except subprocess.TimeoutExpired:
                process.kill()
        if self._thread.is_alive():
            self._thread.join(END_GRACE_S)
        settings.clear_temp_folder(anew=False)

    def wait(self) -> None:
        """Until it ends, or is given up."""
        self._thread.join()

    # --- in the thread -------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._is_ending.is_set():
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__, *_arguments(self._member, self._labels)], stdin=subprocess.PIPE,
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", start_new_session=True,
                env=settings.environment(self._member), **HIDDEN,
            )  # fmt: skip
            self._lines = []
            with self._process as process:
                assert process.stdout is not None
                for line in process.stdout:
                    self._take(line.rstrip())
            was_slow = any(_SLOW in line for line in self._lines)
            if self._is_ending.is_set() or not (self._is_up.is_set() or was_slow):
                return
            _log.warning("this node's part of Ray ended%s; it is started again", last_words("\n".join(self._lines)))
            self._is_ending.wait(JOIN_AGAIN_S)

    def _take(self, line: str) -> None:
        _log.debug("ray: %s", line)
        self._lines = [*self._lines[-N_LINES:], line]
        if _UP in line:
            self._is_up.set()


def _arguments(member: Membership, labels: Mapping[str, str] = MappingProxyType({})) -> list[str]:
    arguments = [
        "start", "--block", f"--node-ip-address={member.address}", f"--node-name={member.node}",
        f"--object-store-memory={OBJECT_STORE_BYTES}", "--disable-usage-stats",
        f"--dashboard-agent-listen-port={AGENT_PORT if member.is_kuberay else 0}",
        f"--temp-dir={settings.temp_folder()}",
        f"--labels={','.join(f'{key}={value}' for key, value in {VERSION_LABEL: _label(), **labels}.items())}",
        "--min-worker-port=0", "--max-worker-port=0",  # any
    ]  # fmt: skip
    if not member.is_head:
        return [*arguments, f"--address={member.head}"]
    with socket.create_server((member.address, 0)) as free:
        client_port = free.getsockname()[1]
    return [
        *arguments, "--head", f"--port={member.head.partition(':')[2]}", f"--ray-client-server-port={client_port}",
        f"--include-dashboard={str(member.is_kuberay).lower()}", f"--dashboard-host={member.address}",
    ]  # fmt: skip


def _label() -> str:
    """This version of localrun, as labels can be."""
    return __version__.replace("+", ".")


def _check_head(head: str) -> None:
    """Before anything of this node is started. Raises Unavailable for a head that it cannot join."""
    from ray import __version__ as ray_version
    from ray._raylet import GcsClient
    from ray.exceptions import AuthenticationError, RpcError

    host, _, port = head.rpartition(":")
    try:
        socket.create_connection((host, int(port)), HEAD_TIMEOUT_S).close()
        client = GcsClient(address=head)
        told = json.loads(client.internal_kv_get(b"CLUSTER_METADATA", namespace=b"cluster") or b"{}")
        heads = [node for node in client.get_all_node_info(timeout=HEAD_TIMEOUT_S).values() if node.is_head_node]
    except OSError as error:
        raise Unavailable(f"nobody answers at {head} ({error}): is the head up, and its port open?") from None
    except AuthenticationError:
        raise Unavailable(f"this token is not that of the cluster of {head}; copy the head's file again") from None
    except RpcError as error:
        raise Unavailable(f"what answers at {head} is no head of a cluster with this token: {error}") from None
    python, label = platform.python_version(), _label()
    at_head = {
        "localrun": (
            next((node.labels[VERSION_LABEL] for node in heads if VERSION_LABEL in node.labels), label),
            label,
        ),
        "Ray": (told.get("ray_version", ray_version), ray_version),
        # The last part may differ (`settings.environment`).
        "Python": tuple(one.rpartition(".")[0] for one in (told.get("python_version", python), python)),
    }
    for name, (theirs, ours) in at_head.items():
        if theirs != ours:
            raise Unavailable(
                f"the cluster of {head} runs on {name} {theirs}, and this machine has {ours}: install that"
            )


def _end_with_stdin() -> None:
    while os.read(0, 4096):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


def main() -> None:
    """Ray's command, which ends its processes when it is told to end."""
    from ray.scripts import scripts

    threading.Thread(target=_end_with_stdin, daemon=True).start()
    heads = [argument.partition("=")[2] for argument in sys.argv if argument.startswith("--address=")]
    try:
        for head in heads:
            _check_head(head)
    except Unavailable as error:
        sys.exit(f"{MARK}{error.message}")
    # On loopback Ray is told that there is one machine alone (`settings.environment`), and would let nobody join.
    constants = {**vars(scripts.ray_constants), "ENABLE_RAY_CLUSTER": True}
    scripts.ray_constants = types.SimpleNamespace(**constants)
    scripts.main()


if __name__ == "__main__":
    main()
