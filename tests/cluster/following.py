"""What the cluster of this home is like, a line of JSON every second: `python -m tests.cluster.following`."""

from __future__ import annotations

import msgspec

from localrun.cluster import reports

if __name__ == "__main__":
    for report in reports.ask(reports.Follow()):
        print(msgspec.json.encode(report).decode(), flush=True)
