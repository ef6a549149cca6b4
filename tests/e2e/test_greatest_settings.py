"""A daemon with the greatest value of every number in its settings starts, loads a model and answers; a greater one is
refused by name."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest

from localrun.config import ConfigError, Settings, env_name, load
from tests.daemon import running_daemon

# Where a person would notice the greatest at once: no such port, and no such memory.
LEFT_OUT = {"port", "kv_cells"}


def greatest() -> dict[str, Any]:
    """Of the numbers that have a limit, by the variable that sets them."""
    fields = msgspec.inspect.type_info(Settings).fields
    limits = {field.name: getattr(field.type, "le", None) for field in fields if field.name not in LEFT_OUT}
    return {env_name(name): limit for name, limit in limits.items() if limit is not None}


def test_all_of_them_at_once():
    settings = {name: str(value) for name, value in greatest().items()}
    settings[env_name("keep_alive_s")] = "1e308"
    with running_daemon(fake=False, **settings) as daemon:
        answer = daemon.post(
            "/api/chat", model="tiny", messages=[{"role": "user", "content": "hi"}], stream=False,
            options={"num_predict": 2},
        )  # fmt: skip
        assert answer.status_code == 200, answer.text
        assert "Traceback" not in daemon.log


@pytest.mark.parametrize(("name", "value"), sorted(greatest().items()))
def test_more_than_that_is_refused(name: str, value: float):
    above = math.nextafter(value, math.inf) if isinstance(value, float) else value + 1
    with pytest.raises(ConfigError, match=name):
        load(environ={name: str(above)})
