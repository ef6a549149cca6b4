"""Faults 44 to 46: what goes wrong while a batch runs. Whatever it is, each line has one result in the end."""

from __future__ import annotations

import os
import random
import signal
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import openai
import pytest
from openai import OpenAI
from openai.types import Batch

from tests.daemon import Daemon, running_daemon
from tests.faults.injection import Injected
from tests.faults.postcondition import unharmed
from tests.faults.test_engine import engine_pids
from tests.faults.test_store import in_a_namespace, on_a_disk
from tests.server.batches.batch_files import begun, chat_line, client_of, encoded, ended, lines_of, until

N_LINES = 60


def n_done(client: OpenAI, batch: Batch) -> int:
    counts = client.batches.retrieve(batch.id).request_counts
    assert counts is not None
    return counts.completed + counts.failed


def waits_for(daemon: Daemon) -> str:
    (row,) = daemon.http.get("/localrun/v1/snapshot").json()["batches"]
    return str(row["waits_for"])


def results_of(client: OpenAI, batch: Batch) -> dict[str, dict[str, Any]]:
    """By custom_id; each has one, and the counts are those of the results."""
    output, errors = lines_of(client, batch.output_file_id), lines_of(client, batch.error_file_id)
    found = {line["custom_id"]: line for line in output + errors}
    assert batch.request_counts is not None
    assert len(found) == len(output) + len(errors) == batch.request_counts.total
    assert len(output) == batch.request_counts.completed
    assert batch.usage is not None
    used = sum(line["response"]["body"]["usage"]["completion_tokens"] for line in output)
    assert batch.usage.output_tokens == used
    return found


def served(daemon: Daemon) -> Daemon:
    """After a first batch: from its results on SQLite keeps one more descriptor, and uses it again and again."""
    with client_of(daemon) as client:
        assert ended(client, begun(client, encoded([chat_line("first")]))).status == "completed"
    return daemon


@in_a_namespace
@pytest.mark.parametrize("n_before", [5, N_LINES - 5], ids=["lines", "results"])
def test_fault_44_a_batch_waits_while_the_disk_is_full_and_goes_on_afterwards(tmp_path: Path, n_before: int) -> None:
    faults = Injected(
        tmp_path, localrun__models__storage__blobs__RESERVE_BYTES=0, localrun__server__batches__runner___MAX_HOLD_S=0.5
    )
    disk = tmp_path / "disk"
    disk.mkdir()
    environment = {"LOCALRUN_HOME": str(disk / "home"), "LOCALRUN_FAKE_STEP_MS": "10"} | faults.environment
    with (
        running_daemon(within=on_a_disk("size=16m", disk), **environment) as daemon,
        unharmed(served(daemon)),
        client_of(daemon) as client,
    ):
        filler = Path(f"/proc/{daemon.process.pid}/root{disk}/filler")
        batch = begun(client, encoded([chat_line(f"r{n}", n_tokens=8) for n in range(N_LINES)]))
        until(lambda: n_done(client, batch) >= n_before)
        with filler.open("wb", buffering=0) as file, suppress(OSError):
            while file.write(bytes(4096)):
                pass
        until(lambda: "full" in waits_for(daemon))
        refused = daemon.http.post("/v1/files", files={"file": ("a", bytes(100))}, data={"purpose": "batch"})
        assert (refused.status_code, refused.json()["error"]["code"]) == (507, "disk_full")
        assert daemon.post("/v1/completions", model="tiny", prompt="hello", max_tokens=2).status_code == 200
        assert client.batches.retrieve(batch.id).status in ("in_progress", "finalizing")
        filler.unlink()
        batch = ended(client, batch)
        found = results_of(client, batch)
        assert (batch.status, {line["response"]["status_code"] for line in found.values()}) == ("completed", {200})
        assert "batches wait" in daemon.log


def test_fault_45_kills_of_engines_and_of_the_daemon_in_the_middle_of_a_batch(tmp_path: Path) -> None:
    home = {"LOCALRUN_HOME": str(tmp_path), "LOCALRUN_FAKE_STEP_MS": "5"}
    asked = [chat_line(f"r{n}", n_tokens=40, ignore_eos=True, temperature=0) for n in range(N_LINES)]
    with running_daemon(**home) as daemon:
        client = client_of(daemon)
        batch = begun(client, encoded(asked))
        for n_before in (5, 12):
            until(lambda n_before=n_before: n_done(client, batch) >= n_before and engine_pids(daemon))
            os.kill(engine_pids(daemon)["tiny"], signal.SIGKILL)
        until(lambda: n_done(client, batch) >= 20)
        daemon.process.kill()
        daemon.process.wait()
    with running_daemon(**home) as daemon:
        client = client_of(daemon)
        assert n_done(client, batch) >= 20
        until(lambda: n_done(client, batch) >= 30 and engine_pids(daemon))
        os.kill(engine_pids(daemon)["tiny"], signal.SIGKILL)
        batch = ended(client, batch)
        assert batch.status == "completed"
        found = results_of(client, batch)
        for line in random.Random(1).sample(asked, 5):
            same = daemon.post(line["url"], line["body"]).json()["choices"][0]["message"]
            assert found[line["custom_id"]]["response"]["body"]["choices"][0]["message"] == same


def test_fault_46_a_batch_that_expires_or_is_cancelled_while_lines_stream_holds_nothing() -> None:
    with running_daemon(LOCALRUN_FAKE_STEP_MS="5") as daemon, unharmed(served(daemon)), client_of(daemon) as client:
        endless = encoded([chat_line(f"r{n}", n_tokens=1500, ignore_eos=True) for n in range(8)])
        batch = ended(client, begun(client, endless, window="1s"))
        assert batch.status == "expired"
        assert {line["error"]["code"] for line in results_of(client, batch).values()} == {"batch_expired"}
        statuses = Counter[str]()
        for _ in range(20):
            batch = begun(client, encoded([chat_line(f"r{n}", n_tokens=3, ignore_eos=True) for n in range(6)]))
            n_before = random.randrange(7)
            until(lambda batch=batch, n_before=n_before: n_done(client, batch) >= n_before)
            with suppress(openai.ConflictError):  # it has ended
                client.batches.cancel(batch.id)
            batch = ended(client, batch)
            results_of(client, batch)
            statuses[batch.status] += 1
        assert set(statuses) <= {"cancelled", "completed"}
        assert statuses["cancelled"]
