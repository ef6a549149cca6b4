"""Anthropic's batches, by Anthropic's client, on a real daemon with fake engines."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import anthropic
import pytest
from anthropic import Anthropic

from tests.daemon import Daemon, running_daemon
from tests.server.batches.batch_files import ONCE, until


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    with running_daemon(LOCALRUN_FAKE_STEP_MS="5") as running:
        yield running


@pytest.fixture
def client(daemon: Daemon) -> Anthropic:
    return Anthropic(base_url=daemon.url, api_key="any", max_retries=0, default_headers=ONCE)


def asked(custom_id: str, model: str = "tiny") -> Any:
    messages = [{"role": "user", "content": "hello"}]
    return {"custom_id": custom_id, "params": {"model": model, "max_tokens": 4, "messages": messages}}


def test_every_request_has_a_result(client: Anthropic):
    batch = client.messages.batches.create(requests=[*(asked(f"r{n}") for n in range(9)), asked("none", "nobody")])
    assert (batch.processing_status, batch.request_counts.processing, batch.results_url) == ("in_progress", 10, None)
    until(lambda: client.messages.batches.retrieve(batch.id).processing_status == "ended")
    batch = client.messages.batches.retrieve(batch.id)
    assert (batch.request_counts.succeeded, batch.request_counts.errored, batch.request_counts.processing) == (9, 1, 0)
    results = {one.custom_id: one.result for one in client.messages.batches.results(batch.id)}
    assert Counter(result.type for result in results.values()) == {"succeeded": 9, "errored": 1}
    assert results["r0"].type == "succeeded"
    assert results["r0"].message.usage.output_tokens == 4
    assert results["none"].type == "errored"
    assert results["none"].error.error.type == "not_found_error"
    assert client.messages.batches.delete(batch.id).type == "message_batch_deleted"
    with pytest.raises(anthropic.NotFoundError):
        client.messages.batches.retrieve(batch.id)


def test_a_cancelled_batch_has_results_all_the_same_and_pages_go_both_ways(client: Anthropic):
    batch = client.messages.batches.create(requests=[asked(f"r{n}") for n in range(300)])
    with pytest.raises(anthropic.ConflictError):
        client.messages.batches.delete(batch.id)
    assert client.messages.batches.cancel(batch.id).processing_status == "canceling"
    until(lambda: client.messages.batches.retrieve(batch.id).processing_status == "ended")
    assert len({one.custom_id for one in client.messages.batches.results(batch.id)}) == 300
    more = [client.messages.batches.create(requests=[asked("one")]) for _ in range(3)]
    newest = [one.id for one in reversed(more)]
    assert [one.id for one in client.messages.batches.list(limit=2)][:3] == newest
    page = client.messages.batches.list(limit=2, before_id=newest[2])
    assert ([one.id for one in page.data], page.has_more) == (newest[:2], False)


def test_ids_are_checked(client: Anthropic):
    for requests, field in (([asked("a b")], "requests[0]"), ([asked("a"), asked("a")], "requests[1]")):
        with pytest.raises(anthropic.BadRequestError, match=r"custom_id") as refused:
            client.messages.batches.create(requests=requests)
        assert field in refused.value.message
