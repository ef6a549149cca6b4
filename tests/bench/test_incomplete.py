"""A run in which requests were lost is no success, unless that was its purpose."""

from __future__ import annotations

import pytest

from localrun.bench.workloads import WORKLOADS
from localrun.cli import exits
from localrun.cli.root import run
from tests.bench.conftest import Asked, FakeServer, Reply


def test_requests_that_did_not_complete_are_an_error(server: FakeServer, capsys: pytest.CaptureFixture[str]) -> None:
    def reply(asked: Asked) -> Reply:
        is_refused = len(server.asked) > 3
        return Reply(status=429) if is_refused else Reply([(0.0, "x")] * asked.body["max_tokens"])

    server.reply = reply
    command = ["bench", "decode", "--streams", "4", "--url", server.url, "--model", "m"]
    assert run(command) == exits.ERROR
    said = capsys.readouterr()
    assert "completion_ratio" in said.out
    assert "not all requests of decode completed" in said.err


def test_refusals_are_what_overload_is_for() -> None:
    assert [name for name, workload in WORKLOADS.items() if workload.overloads] == ["overload"]
