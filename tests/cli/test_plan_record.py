"""`localrun plan record` against a daemon: what comes is taken down without a word of it, and can be planned with."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from localrun.cli.bench.plan_words import apart
from localrun.plan.replica import simulate
from localrun.plan.traces import BLOCK_TOKENS, named, write
from localrun.server.metering import traffic
from localrun.snapshot import TrafficRow
from tests.daemon import Daemon, running_daemon
from tests.plan.made import setup

SYSTEM = "The harbour master keeps a ledger of every ship, its captain, its cargo and the berth that it was given. " * 4
QUESTIONS = ("Which ships came on Monday?", "Whose cargo is salt?", "Which ships came on Monday?")
# Three clients have the beginning in common, the system prompt, and no two of them more.
OTHERS = {"another": "Salt, whose is it?", "third": "How deep is the harbour?", "fourth": "Name a captain.",
          "fifth": "Berths, how many?"}  # fmt: skip


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    with running_daemon(LOCALRUN_FAKE_ENDLESS="1", LOCALRUN_KV_CELLS="8192") as running:
        yield running


@contextmanager
def recording(daemon: Daemon, out: Path, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """One that has begun."""
    environment = os.environ | {"LOCALRUN_HOME": str(daemon.home), "LOCALRUN_PORT": str(daemon.port)}
    with subprocess.Popen(
        [sys.executable, "-m", "localrun", "plan", "record", "--out", str(out), *arguments],
        env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        try:
            assert process.stderr is not None
            assert "recording for" in process.stderr.readline()
            yield process
        finally:
            process.kill()


def ask(daemon: Daemon, *said: str, client: str = "") -> dict[str, Any]:
    """The usage, and what was answered. What is said alternates between user and model."""
    messages = [{"role": "system", "content": SYSTEM}]
    messages += [{"role": "assistant" if at % 2 else "user", "content": text} for at, text in enumerate(said)]
    body = {"model": "tiny", "messages": messages, "max_tokens": 40, "temperature": 0}
    answer = daemon.http.post("/v1/chat/completions", json=body, headers={"user-agent": client or "somebody"}).json()
    return {**answer["usage"], "text": answer["choices"][0]["message"]["content"]}


@pytest.fixture(scope="module")
def recorded(daemon: Daemon, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    """The file, and what the daemon said of the requests."""
    out = tmp_path_factory.mktemp("recorded") / "traffic.jsonl"
    with recording(daemon, out) as process:
        answers = [ask(daemon, question) for question in QUESTIONS]
        answers.append(ask(daemon, QUESTIONS[0], answers[0]["text"], "And on Tuesday?"))
        answers += [ask(daemon, question, client=name) for name, question in OTHERS.items()]
        assert process.stderr is not None
        while f"{len(answers)} so far" not in process.stderr.readline():
            assert process.poll() is None
        process.send_signal(signal.SIGINT)
        said, problem = process.communicate(timeout=60)
    assert process.returncode == 0, problem
    assert f"{len(answers)} requests recorded" in said
    return out, answers


def test_what_is_cached_in_the_simulation_is_what_was_cached(
    recorded: tuple[Path, list[dict[str, Any]]],
) -> None:
    out, answers = recorded
    workload = named(str(out))
    assert workload.own_rate_per_s is not None
    outcome = simulate(setup(slots=4, n_cells=8192), workload.sessions(10, 1), workload.own_rate_per_s)
    assert [each.n_prompt for each in outcome.records] == [answer["prompt_tokens"] for answer in answers]
    assert [each.n_output for each in outcome.records] == [answer["completion_tokens"] for answer in answers]
    cached = [answer["prompt_tokens_details"]["cached_tokens"] for answer in answers]
    assert min(cached[1:]) > len(SYSTEM)
    for simulated, real in zip(outcome.records, cached, strict=True):
        assert real - BLOCK_TOKENS < simulated.n_cached <= real


def test_a_conversation_goes_on_from_its_answer(recorded: tuple[Path, list[dict[str, Any]]]) -> None:
    first, _, _, last, *others = (json.loads(line) for line in recorded[0].read_text().splitlines())
    assert [name for name, _ in last["prompt"]] == ["p0", "p0.answer", "p3"]
    assert [each["client"] for each in (first, last, *others)] == ["c0", "c0", "c1", "c2", "c3", "c4"]
    assert first["at_s"] == 0


def test_no_text_and_no_digest_of_it_is_in_the_file(recorded: tuple[Path, list[dict[str, Any]]]) -> None:
    out, answers = recorded
    written = out.read_text()
    assert {key for line in written.splitlines() for key in json.loads(line)} == {
        "at_s", "prompt", "output_tokens", "client", "lane",
    }  # fmt: skip
    names = {name for line in written.splitlines() for name, _ in json.loads(line)["prompt"]}
    assert names - {"p2"} == {"p0", "p0.answer", "p1", "p3", "p4", "p5", "p6", "p7"}
    texts = [
        SYSTEM,
        SYSTEM[:64],
        *QUESTIONS,
        "somebody",
        *OTHERS,
        *OTHERS.values(),
        *(answer["text"] for answer in answers),
    ]
    for text in texts:
        assert text not in written
        for make in (hashlib.sha256, hashlib.sha1, hashlib.md5, hashlib.blake2b):
            digest = make(text.encode()).hexdigest()
            assert digest[:12] not in written
    assert sys.platform == "win32" or out.stat().st_mode & 0o077 == 0


def test_a_salt_is_drawn_for_each_listener(daemon: Daemon) -> None:
    digests = []
    for _ in range(2):
        with daemon.http.stream("GET", "/localrun/v1/traffic") as stream:
            ask(daemon, "What is the harbour's name?")
            data = next(line for line in stream.iter_lines() if line.startswith("data:"))
        digests.append(json.loads(data.removeprefix("data:")))
    assert digests[0]["blocks"]
    assert not set(digests[0]["blocks"]) & set(digests[1]["blocks"])
    assert digests[0]["client"] != digests[1]["client"]
    assert "harbour" not in json.dumps(digests)


def test_nothing_came_and_a_file_that_is_there(daemon: Daemon, tmp_path: Path) -> None:
    with recording(daemon, tmp_path / "none.jsonl", "--minutes", "0.01") as process:
        _, said = process.communicate(timeout=60)
    assert process.returncode != 0
    assert "no request came and ended meanwhile" in said
    assert not (tmp_path / "none.jsonl").exists()
    (tmp_path / "old.jsonl").write_text("mine")
    environment = os.environ | {"LOCALRUN_HOME": str(daemon.home), "LOCALRUN_PORT": str(daemon.port)}
    command = [sys.executable, "-m", "localrun", "plan", "record", "--out", str(tmp_path / "old.jsonl")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert "is there already; name a new file with --out" in " ".join(done.stderr.split())
    assert (tmp_path / "old.jsonl").read_text() == "mine"


def refused(daemon: Daemon, *arguments: str) -> str:
    environment = os.environ | {"LOCALRUN_HOME": str(daemon.home), "LOCALRUN_PORT": str(daemon.port)}
    command = [sys.executable, "-m", "localrun", "plan", "record", "--minutes", "1", *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    return " ".join(done.stderr.split())


def test_what_cannot_be_recorded_is_said_at_once(daemon: Daemon, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    inside = tmp_path / "file" / "traffic.jsonl"
    assert f"--out {inside}: its folder cannot be made" in refused(daemon, "--out", str(inside))
    assert "a recording is written to a file" in refused(daemon, "--out", "-")
    unknown = refused(daemon, "--out", str(tmp_path / "new.jsonl"), "--model", "nosuch")
    assert "model 'nosuch' not found" in unknown
    with recording(daemon, tmp_path / "one.jsonl"):
        assert "is there already" in refused(daemon, "--out", str(tmp_path / "one.jsonl"))
    assert not (tmp_path / "new.jsonl").exists()


def test_other_models_are_left_out_and_counted(daemon: Daemon, tmp_path: Path) -> None:
    daemon.http.post("/api/copy", json={"source": "tiny", "destination": "other"}).raise_for_status()
    with recording(daemon, tmp_path / "other.jsonl", "--model", "other", "--minutes", "0.03") as process:
        ask(daemon, "Is anybody there?")
        _, said = process.communicate(timeout=60)
    assert "nothing was written; for other models than other there were 1 for tiny" in " ".join(said.split())
    assert not (tmp_path / "other.jsonl").exists()


def row(at_s: float, client: str, *blocks: str) -> TrafficRow:
    return TrafficRow(
        at_s=at_s, model="tiny", client=client, lane="default", target_itl_s=None, prompt_tokens=16 * len(blocks),
        cached_tokens=0, output_tokens=1, blocks=list(blocks),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("clients", "shared_tokens"),
    [(("victim", "guesser"), 0), (("victim", "guesser", "third"), 32), (("victim", "victim"), 48)],
)
def test_a_right_guess_looks_like_a_wrong_one(tmp_path: Path, clients: tuple[str, ...], shared_tokens: int) -> None:
    """The first two of the blocks are of a system prompt, the third has a PIN, which the second client guesses."""
    victim, guesser, *third = clients
    rows = [row(0, victim, "s1", "s2", "4711"), row(1, guesser, "s1", "s2", "4711"), row(2, guesser, "s1", "s2", "0")]
    rows += [row(3, each, "s1", "s2", "else") for each in third]
    write(tmp_path / "traffic.jsonl", apart(rows))
    first, guess, *_ = (json.loads(line)["prompt"] for line in (tmp_path / "traffic.jsonl").read_text().splitlines())
    known = {name for name, _ in first}
    assert sum(n for name, n in guess if name in known) == shared_tokens


def test_blocks_are_as_long_as_the_daemon_says() -> None:
    assert traffic.BLOCK_TOKENS == BLOCK_TOKENS
