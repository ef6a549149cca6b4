"""The bridge, with fake engines for whatever it deploys, and less patience before it scales."""

from __future__ import annotations

from localrun.cluster import description
from localrun.cluster.on_ray.bridge import main
from tests.cluster.fake_app import FakeEngine

if __name__ == "__main__":
    description.UP_AFTER_S, description.DOWN_AFTER_S, description.TARGET_WAIT_S = 2.0, 4.0, 0.2
    main(FakeEngine)
