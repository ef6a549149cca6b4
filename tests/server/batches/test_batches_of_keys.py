"""Files and batches of API keys: whose they are, what their lines may do, and what they cost the key."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import msgspec
import openai
import pytest
from openai import OpenAI

from localrun.access import keys
from localrun.access.keys import REQUESTS, TOKENS, KeyFile, Limit
from tests.daemon import Daemon, running_daemon
from tests.server.batches.batch_files import begun, chat_line, client_of, encoded, ended, lines_of, until


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    with running_daemon(LOCALRUN_FAKE_STEP_MS="5") as running:
        yield running


def client_with(daemon: Daemon, name: str, **rules: object) -> OpenAI:
    text = KeyFile(daemon.home / "data").create(name, **rules).text
    return client_of(daemon, text)


def used(daemon: Daemon, name: str) -> dict[str, int]:
    key = keys.local_key(daemon.home / "state", daemon.port)
    answer = daemon.http.get("/localrun/v1/usage", headers={"authorization": f"Bearer {key}"}).json()
    return next((row for row in answer["rows"] if row["name"] == name), {})


def test_nobody_sees_anothers_files_and_batches_and_each_pays_for_its_own(daemon: Daemon):
    zed, ida = client_with(daemon, "zed"), client_with(daemon, "ida")
    batch = ended(zed, begun(zed, encoded([chat_line(f"r{n}") for n in range(6)])))
    assert batch.output_file_id is not None
    assert len(lines_of(zed, batch.output_file_id)) == 6
    assert list(ida.files.list()) == list(ida.batches.list()) == []
    with pytest.raises(openai.NotFoundError):
        ida.batches.retrieve(batch.id)
    with pytest.raises(openai.NotFoundError):
        ida.files.content(batch.output_file_id)
    assert batch.usage is not None
    row = used(daemon, "zed")
    assert (row["requests"], row["output_tokens"]) == (6, batch.usage.output_tokens)
    assert used(daemon, "ida").get("requests", 0) == 0


def test_a_model_that_the_key_may_not_use_is_one_that_is_not_here(daemon: Daemon):
    client = client_with(daemon, "picky", models=("nothing*",))
    errors = []
    for model in ("tiny", "tony", "/etc/passwd"):
        batch = ended(client, begun(client, encoded([chat_line("one", model=model)])))
        assert (batch.status, batch.output_file_id, batch.error_file_id) == ("failed", None, None)
        assert batch.errors is not None
        (error,) = batch.errors.data or []
        errors.append((error.code, (error.message or "").replace(model, "it")))
    assert {code for code, _ in errors} == {"model_not_found"}
    assert len(set(errors)) == 1


def test_a_key_with_one_request_at_once_computes_its_lines_one_after_the_other(daemon: Daemon):
    """Each begins when the one before has ended: with a pause after each refusal, `ended` would lose its patience."""
    client = client_with(daemon, "single", n_concurrent=1)
    counts = ended(client, begun(client, encoded([chat_line(f"r{n}") for n in range(15)]))).request_counts
    assert counts is not None
    assert (counts.completed, counts.failed) == (15, 0)


def test_a_key_that_is_revoked_ends_its_lines_with_errors_and_no_others(daemon: Daemon):
    gone, stays = client_with(daemon, "gone"), client_with(daemon, "stays")
    long = encoded([chat_line(f"r{n}", n_tokens=40) for n in range(40)])
    batch, other = begun(gone, long), begun(stays, encoded([chat_line(f"s{n}") for n in range(8)]))
    until(lambda: bool((gone.batches.retrieve(batch.id).request_counts or batch).completed))  # type: ignore[union-attr]
    KeyFile(daemon.home / "data").revoke("gone")
    counts = ended(stays, other).request_counts
    assert counts is not None
    assert (counts.completed, counts.failed) == (8, 0)
    with pytest.raises(openai.AuthenticationError):
        gone.batches.retrieve(batch.id)


def test_a_key_over_its_limit_waits_and_others_go_on(daemon: Daemon, tmp_path: Path):
    slow = client_with(daemon, "slow", limits=(Limit(REQUESTS, 2, 3600.0),))
    quick = client_with(daemon, "quick")
    batch = begun(slow, encoded([chat_line(f"r{n}") for n in range(4)]))
    until(lambda: (found := slow.batches.retrieve(batch.id).request_counts) is not None and found.completed == 2)
    other = ended(quick, begun(quick, encoded([chat_line(f"q{n}") for n in range(6)])))
    assert other.request_counts is not None
    assert (other.request_counts.completed, other.request_counts.failed) == (6, 0)
    held = slow.batches.retrieve(batch.id)
    assert held.request_counts is not None
    assert (held.status, held.request_counts.completed, held.request_counts.failed) == ("in_progress", 2, 0)
    shown = [
        daemon.http.get("/localrun/v1/snapshot", headers={"x-api-key": one.api_key}).json()["batches"]
        for one in (slow, quick)
    ]
    found = [[(row["id"], row["key"], row["succeeded"]) for row in rows] for rows in shown]
    assert found == [[(batch.id, "slow", 2)], []]
    assert "the key 'slow' has used its requests" in shown[0][0]["waits_for"]
    assert slow.batches.cancel(batch.id).status in ("cancelling", "cancelled")


def test_lines_that_are_given_up_for_others_cost_once():
    year_s = 365 * 86400.0
    with running_daemon(LOCALRUN_FAKE_STEP_MS="20") as daemon:
        limits = (Limit(REQUESTS, 1000, year_s), Limit(TOKENS, 1_000_000, year_s))
        client, other = client_with(daemon, "patient", limits=limits), client_with(daemon, "other")
        lines = [chat_line(f"r{n}", n_tokens=100, ignore_eos=True) for n in range(6)]
        batch = begun(client, encoded(lines))

        def states() -> list[str]:
            listed = daemon.http.get("/localrun/v1/requests", headers={"x-api-key": client.api_key}).json()
            return [row["state"] for row in listed["requests"]]

        until(lambda: states().count("decode") > 1)
        other.chat.completions.create(**chat_line("x")["body"])
        until(lambda: "cancelled" in states())
        batch = ended(client, batch)
        assert batch.usage is not None
        row = used(daemon, "patient")
        assert row["requests"] == 6
        assert row["prompt_tokens"] + row["output_tokens"] == batch.usage.total_tokens
        left = client.models.with_raw_response.list().headers
        assert left["x-ratelimit-remaining-requests"] == "994"
        assert 0 <= batch.usage.total_tokens - (1_000_000 - int(left["x-ratelimit-remaining-tokens"])) <= 20


def test_what_lines_used_that_are_written_down_while_the_daemon_stops_is_counted(tmp_path: Path):
    n_lines = 30
    home = {"LOCALRUN_HOME": str(tmp_path), "LOCALRUN_FAKE_STEP_MS": "20"}
    with running_daemon(**home) as daemon:
        client, other = client_with(daemon, "yan"), client_with(daemon, "other")
        batch = begun(client, encoded([chat_line(f"r{n}") for n in range(n_lines)]))
        until(lambda: bool((client.batches.retrieve(batch.id).request_counts or batch).completed))  # type: ignore[union-attr]
        with closing(sqlite3.connect(tmp_path / "data" / "batches" / "batches.db", isolation_level=None)) as another:
            another.execute("begin immediate")  # as a backup does

            def computing() -> set[str]:
                listed = daemon.http.get("/localrun/v1/requests", headers={"x-api-key": client.api_key}).json()
                return {row["state"] for row in listed["requests"]} - {"done"}

            until(lambda: not computing())
            other.chat.completions.create(**chat_line("x")["body"])
            time.sleep(0.6)  # lines are given up for it meanwhile, at each look
            daemon.process.terminate()
            time.sleep(0.5)  # and all of them now
            another.execute("rollback")
        daemon.process.wait(timeout=60)
    with running_daemon(**home) as daemon:
        batch = ended(client_of(daemon, client.api_key), batch)
        assert batch.usage is not None
        row = used(daemon, "yan")
        assert (row["requests"], row["output_tokens"]) == (n_lines, batch.usage.output_tokens)


def upload(client: OpenAI, n_bytes: int, purpose: str = "user_data") -> str:
    return client.files.create(file=("a.bin", bytes(n_bytes)), purpose=purpose).id  # type: ignore[arg-type]


def test_a_key_keeps_as_many_bytes_as_it_may_and_more_when_some_are_deleted(tmp_path: Path):
    with running_daemon(LOCALRUN_HOME=str(tmp_path), LOCALRUN_KEY_STORAGE="5000") as daemon:
        file = KeyFile(tmp_path / "data")
        texts = {
            "usual": file.create("usual").text,
            "large": file.create("large", storage_bytes=20_000).text,
            "any": file.create("any", storage_bytes=keys.NO_LIMIT).text,
        }
        usual, large, anything = (client_of(daemon, text) for text in texts.values())
        first = upload(usual, 3000)
        with pytest.raises(openai.APIStatusError) as refused:
            upload(usual, 2001)
        error = refused.value
        assert (error.status_code, error.code) == (413, "storage_limit_exceeded")
        assert error.type == "invalid_request_error"
        for part in ("3000 bytes", "2001 bytes more", "5000 bytes", "DELETE /v1/files/ID", "--storage SIZE"):
            assert part in error.message
        assert len(list(usual.files.list())) == 1
        upload(usual, 2000)
        for client, n_bytes in ((large, 20_000), (anything, 30_000)):
            upload(client, n_bytes)
        with pytest.raises(openai.APIStatusError, match="of files and batches here; its limit is"):
            upload(usual, 1)
        usual.files.delete(first)
        upload(usual, 3000)
    with running_daemon(LOCALRUN_HOME=str(tmp_path), LOCALRUN_KEY_STORAGE="5000") as daemon:
        usual = client_of(daemon, texts["usual"])
        with pytest.raises(openai.APIStatusError, match="of files and batches here; its limit is"):
            upload(usual, 1)
        file.change("usual", lambda key: msgspec.structs.replace(key, storage_bytes=5001))
        upload(usual, 1)
        assert sum(one.bytes for one in usual.files.list()) == 5001


def test_a_batch_that_runs_keeps_its_results_and_the_next_one_waits_for_room(tmp_path: Path):
    with running_daemon(LOCALRUN_HOME=str(tmp_path)) as daemon:
        lines = encoded([chat_line(f"r{n}") for n in range(6)])
        key = KeyFile(tmp_path / "data").create("zed", storage_bytes=len(lines) + 10)
        client = client_of(daemon, key.text)
        batch = ended(client, begun(client, lines))
        assert (batch.status, len(lines_of(client, batch.output_file_id))) == ("completed", 6)
        assert sum(one.bytes for one in client.files.list()) > len(lines) + 10
        again = {"input_file_id": batch.input_file_id, "endpoint": "/v1/chat/completions", "completion_window": "24h"}
        with pytest.raises(openai.APIStatusError, match="of files and batches here; its limit is"):
            client.batches.create(**again)  # type: ignore[arg-type]
        headers = {"x-api-key": key.text}
        params = {"model": "tiny", "max_tokens": 1, "messages": [{"role": "user", "content": "a"}]}
        asked = {"requests": [{"custom_id": "a", "params": params}]}
        refused = daemon.http.post("/v1/messages/batches", json=asked, headers=headers)
        assert (refused.status_code, refused.json()["error"]["type"]) == (413, "request_too_large")
        assert batch.output_file_id is not None
        client.files.delete(batch.output_file_id)
        assert ended(client, client.batches.create(**again)).status == "completed"  # type: ignore[arg-type]


def test_batches_that_are_no_files_count_as_well_until_they_are_deleted(tmp_path: Path):
    with running_daemon(LOCALRUN_HOME=str(tmp_path)) as daemon:
        key = KeyFile(tmp_path / "data").create("zed", storage_bytes=300)
        headers = {"x-api-key": key.text}
        params = {"model": "tiny", "max_tokens": 1, "messages": [{"role": "user", "content": "a" * 50}]}
        asked = {"requests": [{"custom_id": "a", "params": params}]}
        made = daemon.http.post("/v1/messages/batches", json=asked, headers=headers).json()
        path = f"/v1/messages/batches/{made['id']}"
        until(lambda: daemon.http.get(path, headers=headers).json()["processing_status"] == "ended")
        refused = daemon.http.post("/v1/messages/batches", json=asked, headers=headers)
        assert (refused.status_code, refused.headers["x-localrun-error"]) == (413, "storage_limit_exceeded")
        assert daemon.http.get(f"{path}/results", headers=headers).status_code == 200
        assert daemon.http.delete(path, headers=headers).status_code == 200
        assert daemon.http.post("/v1/messages/batches", json=asked, headers=headers).status_code == 200
