"""Requests that engines died of are remembered for their own client, however many another one has."""

from __future__ import annotations

import pytest

from localrun import wire
from localrun.errors import EngineDied
from localrun.server.engines.faults import MAX_HELD, Quarantine


def message(*tokens: int) -> wire.Submit:
    return wire.Submit(id=1, tokens=tokens)


def test_one_clients_requests_push_out_nobody_elses() -> None:
    quarantine = Quarantine()
    ida, zed = ("ida", "tiny"), ("zed", "tiny")
    quarantine.put(ida, message(1, 1), "req_ida")
    for number in range(2 * MAX_HELD):
        quarantine.put(zed, message(number), f"req_{number}")
    with pytest.raises(EngineDied, match="req_ida"):
        quarantine.check(ida, message(1, 1))
    with pytest.raises(EngineDied, match=f"req_{2 * MAX_HELD - 1}"):
        quarantine.check(zed, message(2 * MAX_HELD - 1))
    quarantine.check(zed, message(0))  # the oldest of whoever has most
    quarantine.check(zed, message(1, 1))
