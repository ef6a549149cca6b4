"""The bridge, with fake engines for whatever it deploys."""

from __future__ import annotations

from localrun.cluster.bridge import main
from tests.cluster.fake_app import FakeEngine

if __name__ == "__main__":
    main(FakeEngine)
