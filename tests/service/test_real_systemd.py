"""The service under the user's own systemd, started for the test in namespaces that end with it.

Needs root (for the namespaces), systemd's binary and a writable cgroup; left out elsewhere.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

SYSTEMD = Path("/lib/systemd/systemd")

# Takes the port of the daemon, and says so by a file.
SOMEBODY = """
import os, socket, time
from pathlib import Path
taken = socket.create_server(("127.0.0.1", int(os.environ["LOCALRUN_PORT"])))
Path(__file__).with_name("taken").touch()
time.sleep(60)
"""

# $1 is a folder of the test's, $2 the interpreter, $3 systemd. Prints lines `key=value`.
SCRIPT = """
set -u
python=$2
mount -t tmpfs none /run && mkdir -p /run/systemd/system /run/user/0 && chmod 700 /run/user/0 || exit 77
groups() { find /sys/fs/cgroup -type d -name init.scope | sort; }
groups >"$1/groups"
"$3" --user --log-target=null & manager=$!
for _ in $(seq 100); do systemctl --user is-system-running >/dev/null 2>&1 && break; sleep 0.1; done
systemctl --user show --property=Version >/dev/null 2>&1 || exit 77
localrun() { "$python" -P -m localrun "$@"; }
property() { systemctl --user show localrun.service --property="$1" --value; }
localrun service install >"$1/log" 2>&1 || { echo "install=$?"; exit 1; }
echo "status_text=$(property StatusText)"
first=$(property MainPID)
echo "no_new_privileges=$(sed -n 's/^NoNewPrivs:[[:space:]]*//p' /proc/$first/status)"
echo "seccomp=$(sed -n 's/^Seccomp:[[:space:]]*//p' /proc/$first/status)"
echo "answer=$(localrun run tiny 'What is 3 + 4?' --option temperature=0 </dev/null)"
kill -9 "$first"
for _ in $(seq 300); do localrun service status >/dev/null && break; sleep 0.1; done
echo "restarts=$(property NRestarts)"
localrun stop --daemon >/dev/null
for _ in $(seq 100); do [ "$(property ActiveState)" = inactive ] && break; sleep 0.1; done
echo "after_stop=$(property ActiveState)"
"$python" "$1/somebody.py" & other=$!
while [ ! -e "$1/taken" ]; do sleep 0.1; done
systemctl --user start localrun.service 2>/dev/null
sleep 3
echo "port_taken=$(property ActiveState) $(property ExecMainStatus) $(property NRestarts)"
kill $other
localrun service uninstall >/dev/null; echo "uninstall=$?"
kill $manager; wait $manager
groups | comm -13 "$1/groups" - | xargs -r rmdir
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32" or not SYSTEMD.exists() or os.getuid() != 0, reason="see the module")
def test_the_service_lives_as_systemd_says(tmp_path: Path):
    unshare, bash = shutil.which("unshare"), shutil.which("bash")
    if unshare is None or bash is None or shutil.which("systemctl") is None:
        pytest.skip("needs unshare, bash and systemctl")
    with socket.create_server(("127.0.0.1", 0)) as found:
        port = found.getsockname()[1]
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("LOCALRUN_", "HF_", "XDG_"))}
    environ |= {"HOME": str(tmp_path), "XDG_RUNTIME_DIR": "/run/user/0", "LOCALRUN_PORT": str(port)}
    (tmp_path / "somebody.py").write_text(SOMEBODY)
    ran = subprocess.run(
        [unshare, "--mount", "--pid", "--fork", "--mount-proc", "--kill-child", bash, "-c", SCRIPT, "bash",
         str(tmp_path), sys.executable, str(SYSTEMD)],
        env=environ, capture_output=True, text=True, check=False, timeout=180,
        start_new_session=True,
    )  # fmt: skip
    if ran.returncode == 77 or not ran.stdout:
        pytest.skip(f"no systemd can be started here: {ran.stderr.strip()[-200:]}")
    log = (tmp_path / "log").read_text()
    said = dict(line.partition("=")[::2] for line in ran.stdout.splitlines())
    assert "install" not in said, log
    assert said == {
        "status_text": f"listening on http://127.0.0.1:{port}",
        "no_new_privileges": "1",
        "seccomp": "2",
        "answer": said["answer"],
        "restarts": "1",
        "after_stop": "inactive",
        # Status 3: the port is taken, which starting again would not change.
        "port_taken": "failed 3 0",
        "uninstall": "0",
    }
    assert "7" in said["answer"]
    assert not (tmp_path / ".config/systemd/user/localrun.service").exists()
