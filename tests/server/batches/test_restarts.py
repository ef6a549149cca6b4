"""What is left of batches when the daemon ends, in any way, and begins again."""

from __future__ import annotations

import sqlite3
from collections import Counter
from pathlib import Path

from openai import OpenAI

from tests.daemon import Daemon, running_daemon
from tests.faults.injection import Injected
from tests.server.batches.batch_files import begun, chat_line, client_of, encoded, ended, lines_of, until

N_LINES = 240


def n_done(client: OpenAI, batch_id: str) -> int:
    counts = client.batches.retrieve(batch_id).request_counts
    assert counts is not None
    return counts.completed + counts.failed


def end_after(daemon: Daemon, batch_id: str, n_lines: int, signal_number: int) -> int:
    """Ends the daemon once so many lines are done. How many there were."""
    client = client_of(daemon)
    until(lambda: n_done(client, batch_id) >= n_lines)
    seen = n_done(client, batch_id)
    daemon.process.send_signal(signal_number)
    daemon.process.wait(timeout=60)
    return seen


def test_after_kills_and_a_stop_every_line_has_one_result_and_nothing_is_counted_twice(tmp_path: Path):
    home = {"LOCALRUN_HOME": str(tmp_path), "LOCALRUN_FAKE_STEP_MS": "5"}
    with running_daemon(**home) as daemon:
        lines = [chat_line(f"r{n}", temperature=-1 if n % 10 == 3 else 0) for n in range(N_LINES)]
        batch = begun(client_of(daemon), encoded(lines))
        seen = end_after(daemon, batch.id, 20, 9)
    for goal, signal_number in ((80, 9), (140, 15)):
        with running_daemon(**home) as daemon:
            assert n_done(client_of(daemon), batch.id) >= seen  # nothing is lost
            seen = end_after(daemon, batch.id, goal, signal_number)
    with running_daemon(**home) as daemon:
        client = client_of(daemon)
        batch = ended(client, batch)
        output, errors = lines_of(client, batch.output_file_id), lines_of(client, batch.error_file_id)
    n_bad = sum(n % 10 == 3 for n in range(N_LINES))
    assert batch.request_counts is not None
    assert batch.request_counts.model_dump() == {"completed": N_LINES - n_bad, "failed": n_bad, "total": N_LINES}
    assert (len(output), len(errors)) == (N_LINES - n_bad, n_bad)
    assert Counter(line["custom_id"] for line in output + errors) == {f"r{n}": 1 for n in range(N_LINES)}
    used = [line["response"]["body"]["usage"] for line in output]
    assert batch.usage is not None
    assert batch.usage.input_tokens == sum(usage["prompt_tokens"] for usage in used)
    assert batch.usage.output_tokens == sum(usage["completion_tokens"] for usage in used)


def test_a_cancel_before_a_kill_holds_after_it(tmp_path: Path):
    home = {"LOCALRUN_HOME": str(tmp_path), "LOCALRUN_FAKE_STEP_MS": "20"}
    with running_daemon(**home) as daemon:
        client = client_of(daemon)
        batch = begun(client, encoded([chat_line(f"r{n}") for n in range(100)]))
        until(lambda: n_done(client, batch.id) >= 1)
        client.batches.cancel(batch.id)
        daemon.process.kill()
    with running_daemon(**home) as daemon:
        client = client_of(daemon)
        batch = ended(client, batch)
        assert batch.status == "cancelled"
        assert len(lines_of(client, batch.output_file_id) + lines_of(client, batch.error_file_id)) == 100


def test_a_damaged_database_is_put_aside_and_the_daemon_goes_on(tmp_path: Path):
    folder = tmp_path / "data" / "batches"
    folder.mkdir(parents=True)
    (folder / "batches.db").write_bytes(b"this is no database" * 1000)
    with running_daemon(LOCALRUN_HOME=str(tmp_path)) as daemon:
        client = client_of(daemon)
        assert ended(client, begun(client, encoded([chat_line("a")]))).status == "completed"
        assert (tmp_path / "data" / "batches.unreadable-1" / "batches.db").is_file()


def test_a_newer_database_is_left_alone_and_these_routes_say_so(tmp_path: Path):
    folder = tmp_path / "data" / "batches"
    folder.mkdir(parents=True)
    with sqlite3.connect(folder / "batches.db") as db:
        db.execute("PRAGMA user_version=99")
    db.close()
    with running_daemon(LOCALRUN_HOME=str(tmp_path)) as daemon:
        refused = daemon.http.get("/v1/batches")
        assert refused.status_code == 503
        assert "newer" in refused.json()["error"]["message"]
        assert daemon.http.get("/health").status_code == 200


def test_two_daemons_do_not_run_the_same_lines(tmp_path: Path):
    home = {"LOCALRUN_HOME": str(tmp_path)}
    with running_daemon(**home) as first:
        client_of(first).batches.list()
        with running_daemon(**home) as second:
            refused = second.http.get("/v1/batches")
            assert refused.status_code == 503
            assert "another daemon" in refused.json()["error"]["message"]
            first.stop()
            until(lambda: second.http.get("/v1/batches").status_code == 200)


def test_a_daemon_that_could_not_open_the_folder_tries_again_by_itself(tmp_path: Path):
    faults = Injected(tmp_path, localrun__server__batches__service___RETRY_S=0.1)
    home = {"LOCALRUN_HOME": str(tmp_path / "home"), "LOCALRUN_FAKE_STEP_MS": "20"}
    with running_daemon(**home) as first:
        # So many that there are some left when the second one is up, which takes a second or more.
        begun(client_of(first), encoded([chat_line(f"r{n}") for n in range(400)]))
        with running_daemon(**home | faults.environment) as second:
            until(lambda: "batches do not go on: another daemon" in second.log)
            first.process.kill()
            ended_well = 'localrun_batches_ended_total{status="completed"} 1.0'
            until(lambda: ended_well in second.http.get("/metrics").text)


def test_an_input_that_is_gone_and_a_model_that_was_removed_are_errors_of_their_lines(tmp_path: Path):
    with running_daemon(LOCALRUN_HOME=str(tmp_path), LOCALRUN_FAKE_STEP_MS="20") as daemon:
        client = client_of(daemon)
        daemon.post("/api/copy", source="tiny", destination="mine")
        batch = begun(client, encoded([chat_line(f"r{n}", model="mine") for n in range(60)]))
        until(lambda: n_done(client, batch.id) >= 2)
        daemon.http.request("DELETE", "/api/delete", json={"model": "mine"})
        batch = ended(client, batch)
        statuses = Counter(line["response"]["status_code"] for line in lines_of(client, batch.error_file_id))
        assert batch.status == "completed"
        assert set(statuses) <= {404}
        batch = begun(client, encoded([chat_line(f"r{n}") for n in range(60)]))
        until(lambda: n_done(client, batch.id) >= 2)
        (tmp_path / "data" / "batches" / "blobs" / batch.input_file_id).unlink()
        batch = ended(client, batch)
        output, errors = lines_of(client, batch.output_file_id), lines_of(client, batch.error_file_id)
        assert len(output) + len(errors) == 60
        assert {line["response"]["status_code"] for line in errors} == {404}


def test_ten_thousand_lines_are_checked_run_and_cancelled(tmp_path: Path):
    with running_daemon(LOCALRUN_HOME=str(tmp_path), LOCALRUN_FAKE_STEP_MS="20") as daemon:
        client = client_of(daemon)
        small = begun(client, encoded([chat_line("a")]))
        ended(client, small)
        batch = begun(client, encoded([chat_line(f"r{n}") for n in range(10_000)]))
        until(lambda: n_done(client, batch.id) >= 1)
        assert [one.id for one in client.batches.list(limit=2)] == [batch.id, small.id]
        counts = client.batches.retrieve(batch.id).request_counts
        assert counts is not None
        assert counts.total == 10_000
        client.batches.cancel(batch.id)
        batch = ended(client, batch)
        kept = lines_of(client, batch.output_file_id) + lines_of(client, batch.error_file_id)
        assert len({line["custom_id"] for line in kept}) == 10_000
