"""`localrun version`: ours, and that of the daemon that is running, which may be an older one."""

from __future__ import annotations

import json

from localrun import __version__


def test_with_and_without_a_daemon(localrun, daemon):
    assert localrun("version", port=daemon.port).stdout == f"localrun {__version__}\ndaemon 9.8.7\n"
    daemon.shutdown()
    daemon.server_close()
    assert localrun("version", port=daemon.port).stdout == f"localrun {__version__}\nno daemon is running\n"
    assert json.loads(localrun("version", "--json", port=daemon.port).stdout)["daemon"] is None
