"""The engine process: its pipes, threads, signals and exit codes, on the fake backend unless a test says otherwise."""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from msgspec.structs import replace

from localrun import framing, wire
from localrun.engine import process
from localrun.engine.engine import Engine, Limits
from localrun.engine.pipes import LONG_CHARACTERS, Inbox, Outbox, TokenizerThreads, run_steps
from localrun.engine.process import spare_time
from localrun.wire import (
    Cancel,
    Count,
    Counted,
    Finish,
    Media,
    MediaKind,
    Open,
    OpenFailed,
    Ready,
    Sampling,
    Segment,
    Step,
    Submit,
)  # fmt: skip
from tests.engine.harness import Harness, expected_output
from tests.engine.memory_disk import MemoryDisk
from tests.fakes import ENGINE
from tests.fakes.backend import FakeBackend

OPEN = Open(
    model_path="none",
    n_slots=4,
    n_kv_cells=512,
    n_batch=64,
    n_threads=1,
    n_gpu_layers=0,
    kv_type="f16",
    target_itl_s=0.0,
    ram_cache_bytes=1 << 20,
    max_queue=64,
)
PATIENCE_S = 60
LONG = "x" * LONG_CHARACTERS
GREEDY = Sampling(temperature=0)
# An engine whose main thread, or whose reader, meets a bug while it runs.
BROKEN_STEP = """
import sys
from localrun.engine import engine
from tests.fakes.process import main
def step(self, should_abort):
    raise RuntimeError("a bug in the step")
engine.Engine.step = step
sys.exit(main())
"""
BROKEN_READER = """
import sys
from localrun import wire
from localrun.engine import process
from tests.fakes.process import main
process.take = lambda *arguments: 1 / 0
sys.exit(main())
"""


class Child:
    """An engine process and the frames that it sends."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self.process = process

    def send(self, *messages: object) -> None:
        assert self.process.stdin is not None
        for message in messages:
            self.process.stdin.write(framing.encode(message))
        self.process.stdin.flush()

    def receive(self) -> object:
        assert self.process.stdout is not None
        body = framing.read_body(self.process.stdout)  # type: ignore[arg-type]
        return None if body is None else framing.decode_from_engine(body)

    def finals(self, count: int) -> dict[int, wire.Delta]:
        """The last deltas of `count` requests."""
        found: dict[int, wire.Delta] = {}
        while len(found) < count:
            message = self.receive()
            assert isinstance(message, Step)
            found.update({delta.id: delta for delta in message.deltas if delta.finish})
        return found

    def exit_code(self) -> int:
        return self.process.wait(PATIENCE_S)

    def errors(self) -> str:
        assert self.process.stderr is not None
        return self.process.stderr.read().decode()


@contextmanager
def child(*arguments: str, **environ: str) -> Iterator[Child]:
    running = subprocess.Popen(
        [sys.executable, *arguments] if arguments else ENGINE,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, **environ},
    )
    try:
        yield Child(running)
    finally:
        running.kill()
        running.wait()
        for pipe in (running.stdin, running.stdout, running.stderr):
            assert pipe is not None
            with suppress(BrokenPipeError):
                pipe.close()


def submit(request_id: int, text: str = "hello", n_predict: int = 8) -> Submit:
    return Submit(id=request_id, segments=(Segment(text),), sampling=GREEDY, n_predict=n_predict, ignore_eos=True)


def test_an_engine_opens_serves_and_leaves_when_its_stdin_closes():
    with child() as engine:
        engine.send(OPEN)
        ready = engine.receive()
        assert isinstance(ready, Ready)
        assert (ready.n_ctx, ready.n_slots, ready.backend) == (512, 4, "fake")
        engine.send(submit(1), submit(2, "other"), Count(id=9, segments=(Segment("abc"),)))
        counted = None
        finals: dict[int, wire.Delta] = {}
        tokens: list[int] = []
        while counted is None or len(finals) < 2:
            message = engine.receive()
            if isinstance(message, Counted):
                counted = message
            elif isinstance(message, Step):
                finals.update({delta.id: delta for delta in message.deltas if delta.finish})
                tokens += [token for delta in message.deltas if delta.id == 1 for token in delta.tokens]
        assert counted == Counted(id=9, tokens=(97, 98, 99))
        assert tokens == expected_output(list(b"hello"), 8)
        assert {delta.finish for delta in finals.values()} == {Finish.LENGTH}
        engine.process.stdin.close()
        assert engine.exit_code() == 0
        assert engine.errors() == ""


def test_cancel_and_refusals_come_back_as_last_deltas():
    with child() as engine:
        engine.send(OPEN, submit(1, n_predict=400), Cancel(1), submit(2, "x" * 600), submit(3, ""))
        assert isinstance(engine.receive(), Ready)
        finals = engine.finals(3)
        assert finals[1].finish is Finish.CANCELLED
        assert finals[2].error_code == "context_length_exceeded"
        assert "600" in finals[2].error_message
        assert "512" in finals[2].error_message
        assert finals[3].error_code == "bad_request"


@pytest.mark.parametrize("is_busy", [False, True])
def test_sigterm_ends_an_engine_and_sigint_does_not(is_busy: bool):
    with child(LOCALRUN_FAKE_STEP_MS="20") as engine:
        engine.send(OPEN)
        assert isinstance(engine.receive(), Ready)
        if is_busy:
            engine.send(submit(1, n_predict=400))
            assert isinstance(engine.receive(), Step)
        engine.process.send_signal(signal.SIGINT)
        engine.send(submit(2, n_predict=1))
        engine.finals(1)
        engine.process.send_signal(signal.SIGTERM)
        assert engine.exit_code() == 0


def test_an_engine_leaves_in_the_middle_of_its_work_when_the_daemon_is_gone():
    with child(LOCALRUN_FAKE_STEP_MS="300") as engine:  # twice as long as anybody waits, in all
        engine.send(OPEN, *(submit(request_id, n_predict=450) for request_id in range(4)))
        assert isinstance(engine.receive(), Ready)
        engine.process.stdin.close()
        engine.process.stdout.close()
        assert engine.exit_code() == 0


@pytest.mark.parametrize(
    "sent", [b"", b"\xff\xff\xff\xff", b"\x03\x00\x00\x00abc", b"\x10\x00\x00\x00half", framing.encode(Cancel(1))]
)
def test_what_is_not_an_open_frame_ends_the_process_as_a_broken_pipe(sent: bytes):
    with child() as engine:
        engine.process.stdin.write(sent)
        engine.process.stdin.close()
        assert engine.exit_code() == 2
        assert "Traceback" not in engine.errors()


def test_a_broken_frame_later_on_ends_the_process_as_a_broken_pipe():
    with child() as engine:
        engine.send(OPEN)
        assert isinstance(engine.receive(), Ready)
        engine.process.stdin.write(b"\xff\xff\xff\xff")
        engine.process.stdin.flush()
        assert engine.exit_code() == 2
        assert "4294967295 bytes" in engine.errors()


@pytest.mark.parametrize(
    ("program", "trace"),
    [(BROKEN_STEP, "a bug in the step"), (BROKEN_READER, "ZeroDivisionError")],
    ids=["main thread", "reader"],
)
def test_a_bug_ends_the_process_with_an_error_and_a_traceback(program: str, trace: str):
    with child("-c", program) as engine:
        engine.send(OPEN)
        assert isinstance(engine.receive(), Ready)
        engine.send(submit(1))
        assert engine.exit_code() == 1
        errors = engine.errors()
        assert trace in errors
        assert "Traceback" in errors
        assert "Fatal Python error" not in errors


def test_a_library_that_prints_breaks_no_frame():
    program = (
        "import os, sys\nfrom tests.fakes import backend, process\n"
        "class Loud(backend.FakeBackend):\n"
        "    def decode(self, n_rows):\n"
        "        print('noise'); os.write(1, b'more noise'); super().decode(n_rows)\n"
        "process.FakeBackend = Loud\nsys.exit(process.main())"
    )
    with child("-c", program) as engine:
        engine.send(OPEN, submit(1))
        assert isinstance(engine.receive(), Ready)
        assert engine.finals(1)[1].finish is Finish.LENGTH
        engine.process.stdin.close()
        assert engine.exit_code() == 0
        assert "more noise" in engine.errors()


@pytest.mark.skipif(sys.platform != "linux", reason="Linux alone lists a process's threads in a folder")
def test_what_an_engine_imports_starts_no_threads():
    program = "import localrun.engine.process, os; print(len(os.listdir('/proc/self/task')))"
    others = {name: value for name, value in os.environ.items() if name != "OPENBLAS_NUM_THREADS"}
    done = subprocess.run([sys.executable, "-c", program], env=others, stdout=subprocess.PIPE, check=True, timeout=120)
    assert done.stdout == b"1\n"


def test_more_slots_than_rows_asked_for_still_serve_everybody():
    with child() as engine:
        engine.send(replace(OPEN, n_slots=40, n_batch=32))
        assert isinstance(engine.receive(), Ready)
        engine.send(*(submit(request_id, f"{request_id} is my number", n_predict=6) for request_id in range(48)))
        assert {delta.finish for delta in engine.finals(48).values()} == {Finish.LENGTH}


@pytest.mark.parametrize(("kv_type", "code"), [("f16", "bad_model_file"), ("q7_9", "engine_failed")])
def test_what_cannot_be_opened_is_answered(tiny_gguf: Path, tmp_path: Path, kv_type: str, code: str):
    bad = tmp_path / "bad.gguf"
    bad.write_bytes(b"GGUF is only how it begins")
    with child("-m", "localrun.engine.process") as engine:
        path = bad if kv_type == "f16" else tiny_gguf
        engine.send(replace(OPEN, model_path=str(path), kv_type=kv_type))
        failed = engine.receive()
        assert isinstance(failed, OpenFailed)
        assert failed.code == code
        assert engine.exit_code() == 1


def test_why_a_file_cannot_be_loaded_is_said_as_llama_cpp_says_it(tiny_gguf: Path, tmp_path: Path):
    bad = tmp_path / "bad.gguf"
    bad.write_bytes(tiny_gguf.read_bytes().replace(b"blk.1.ffn_up.weight", b"blk.1.ffn_xx.weight"))
    with child("-m", "localrun.engine.process") as engine:
        engine.send(replace(OPEN, model_path=str(bad)))
        failed = engine.receive()
        assert isinstance(failed, OpenFailed)
        assert "blk.1.ffn_up.weight" in failed.message


def test_a_real_model_serves_over_the_pipe(tiny_gguf: Path):
    with child("-m", "localrun.engine.process") as engine:
        engine.send(replace(OPEN, model_path=str(tiny_gguf)))
        ready = engine.receive()
        assert isinstance(ready, Ready)
        assert "<|im_end|>" in ready.control_tokens
        engine.send(*(submit(request_id, f"{request_id} foxes", n_predict=5) for request_id in range(6)))
        finals = engine.finals(6)
        assert {delta.usage.n_output for delta in finals.values()} == {5}
        engine.process.stdin.close()
        assert engine.exit_code() == 0


@pytest.mark.parametrize("pooling", [None, wire.Pooling.MEAN])
@pytest.mark.parametrize("n_megabytes", [2, 48])
def test_a_model_is_not_freed_while_a_text_is_read(tiny_gguf: Path, pooling: wire.Pooling | None, n_megabytes: int):
    """The shorter text is read to its end; the longer one would keep the process longer than the daemon waits."""
    with child("-m", "localrun.engine.process") as engine:
        engine.send(replace(OPEN, model_path=str(tiny_gguf), pooling=pooling))
        assert isinstance(engine.receive(), Ready)
        text = Segment("lorem ipsum, " * (n_megabytes * 1024 * 1024 // 13), trusted=False)
        engine.send(Count(id=1, segments=(text,)), Count(id=2, segments=(Segment("a"),)))
        counted = engine.receive()
        assert isinstance(counted, Counted)
        assert counted.id == 2, "the long text is being read"
        engine.process.send_signal(signal.SIGTERM)
        assert engine.exit_code() == 0
        assert engine.receive() is None


# --- in this process -----------------------------------------------------------------------------------------------


class Sent(queue.SimpleQueue[object]):
    """What would go to the daemon."""


class Reader:
    """What the reader thread does with messages, for an engine that this thread steps."""

    def __init__(self, backend: FakeBackend) -> None:
        self.backend = backend
        self.inbox, self.sent = process.Inbox(), Sent()
        self.engine = Engine(backend, Limits(2, 8, 0.0, 0), time.monotonic, ring=self.inbox.ring)
        self.tokenizing, self.prompts = TokenizerThreads(max_texts=8), process.PromptTokenizer(backend)

    def take(self, *messages: wire.ToEngine) -> None:
        for message in messages:
            process.take(message, self.prompts, self.tokenizing, self.inbox, self.sent)

    def finals(self, count: int) -> dict[int, wire.Delta]:
        found: dict[int, wire.Delta] = {}
        while len(found) < count:
            assert self.inbox.drain(self.engine, PATIENCE_S if self.engine.is_idle else self.engine.wait_s)
            step = self.engine.step()
            found.update({delta.id: delta for delta in (step.deltas if step else ()) if delta.finish})
        return found

    def counted(self) -> Counted:
        answer = self.sent.get(timeout=PATIENCE_S)
        assert isinstance(answer, Counted)
        return answer


@pytest.fixture
def reader() -> Iterator[Reader]:
    reader = Reader(Unreadable(n_cells=256, n_seqs=8, n_batch=64))
    yield reader
    reader.backend.may_read.set()
    assert reader.tokenizing.close(PATIENCE_S)


class Unreadable(FakeBackend):
    """Cannot tokenize one text, and takes as long as it is told to for long ones."""

    def __init__(self, **options: int) -> None:
        super().__init__(**options)
        self.may_read, self.is_reading = threading.Event(), threading.Event()
        self.n_long = 0

    def tokenize(self, text: str, *, parse_special: bool) -> list[int]:
        if text == "poison":
            raise OverflowError("a text of a kind that nobody thought of")
        if len(text) >= LONG_CHARACTERS:
            self.n_long += 1
            self.is_reading.set()
            self.may_read.wait()
            text = text[:100]
        return super().tokenize(text, parse_special=parse_special)


def test_pictures_go_from_the_pipe_to_an_answer():
    picture = Segment("", media=Media(MediaKind.IMAGE, "/no/file", b"digest", width=96, height=80))
    segments = (Segment("look: "), picture, Segment("?"))
    opened = replace(OPEN, projector_path="/projector.gguf")
    with child() as engine:
        engine.send(opened)
        ready = engine.receive()
        assert isinstance(ready, Ready)
        assert (ready.media, ready.audio_rate_hz) == ((MediaKind.IMAGE, MediaKind.AUDIO), 16_000)
        engine.send(Count(id=1, segments=segments))
        counted = engine.receive()
        assert isinstance(counted, Counted)
        assert len(counted.tokens) == len("look: <>?") + 30
        engine.send(Submit(id=2, segments=segments, n_predict=3, ignore_eos=True))
        final = engine.finals(1)[2]
        assert final.usage is not None
        assert (final.finish, final.usage.n_prompt, final.usage.n_media) == (Finish.LENGTH, 39, 30)
        engine.send(Submit(id=3, tokens=(1, -5, 2)))
        assert "not in the vocabulary" in (engine.finals(1)[3].error_message or "")
    with child() as engine:
        engine.send(OPEN)
        engine.receive()
        engine.send(Submit(id=2, segments=segments), Count(id=3, segments=segments))
        answers = [engine.receive(), engine.receive()]
        said = [one.error if isinstance(one, Counted) else one.deltas[0].error_message for one in answers]
        assert all("takes text only" in one for one in said)


def test_a_text_that_cannot_be_tokenized_fails_its_own_request_only(reader: Reader):
    reader.take(submit(1, "poison"), submit(2, "fine"), Count(id=3, segments=(Segment("poison"),)))
    finals = reader.finals(2)
    assert finals[1].error_code == "engine_failed"
    assert "nobody thought of" in finals[1].error_message
    assert finals[2].finish is Finish.LENGTH
    counted = reader.counted()
    assert counted.id == 3
    assert "nobody thought of" in counted.error
    assert counted.error_code == "engine_failed"


def test_only_requests_of_a_higher_lane_than_the_lowest_hurry(reader: Reader):
    reader.take(replace(submit(1), lane=wire.Lane.BATCH))
    assert reader.finals(1).keys() == {1}
    assert not reader.inbox.should_abort()
    reader.take(submit(2))
    given_up_at_s = time.monotonic() + PATIENCE_S
    while not reader.inbox.should_abort():
        assert time.monotonic() < given_up_at_s
        time.sleep(0.001)
    assert reader.finals(1).keys() == {2}
    assert not reader.inbox.should_abort()


def test_a_cancel_overtakes_the_long_prompt_that_is_being_read_and_ends_it(reader: Reader):
    reader.take(submit(1, LONG))
    assert reader.backend.is_reading.wait(PATIENCE_S)
    reader.take(Cancel(1))
    (final,) = reader.finals(1).values()
    assert (final.id, final.finish, final.error_code) == (1, Finish.CANCELLED, None)
    reader.backend.may_read.set()
    reader.take(submit(2))
    assert reader.finals(1)[2].finish is Finish.LENGTH
    assert reader.engine.totals.prompt_tokens == len("hello"), "nothing of the cancelled one came later"


def test_a_cancel_ends_what_waits_behind_a_long_prompt(reader: Reader):
    reader.take(submit(1, LONG), submit(2), Cancel(2), Cancel(7))
    assert reader.finals(1)[2].finish is Finish.CANCELLED


def test_short_prompts_and_counts_pass_a_long_one_but_for_those_of_its_client(reader: Reader):
    reader.take(submit(1, LONG), submit(2), replace(submit(3), client="another"), Count(id=9, segments=(Segment("a"),)))
    assert reader.finals(1).keys() == {3}
    assert reader.counted().tokens == (97,)
    reader.backend.may_read.set()
    assert reader.finals(2).keys() == {1, 2}


def test_a_long_prediction_is_a_long_text_and_read_only_for_drafts(reader: Reader):
    long = replace(submit(1), prediction=LONG)
    reader.take(long, replace(submit(2), client="another"))
    assert reader.finals(1).keys() == {2}, "a short prompt passes it"
    reader.take(replace(long, id=3, client="a third", speculates=False))
    assert reader.finals(1).keys() == {3}
    reader.backend.may_read.set()
    assert reader.finals(1).keys() == {1}


def test_tokens_are_checked_where_prompts_are_read(reader: Reader):
    prompts = [(5, 999, 6), (5, -1), (5,), ()]
    reader.take(*(Submit(id=at, tokens=tokens, n_predict=1) for at, tokens in enumerate(prompts)))
    finals = reader.finals(4)
    assert "token 999" in finals[0].error_message
    assert "token -1" in finals[1].error_message
    assert finals[2].finish is Finish.LENGTH
    assert "empty" in finals[3].error_message


def test_more_prompts_than_could_ever_wait_are_refused_before_they_are_read(reader: Reader):
    reader.take(submit(0, LONG), *(submit(at) for at in range(1, 9)), Count(id=20, segments=(Segment("a"),)))
    assert reader.finals(1)[8].error_code == "queue_full"
    refused = reader.counted()
    assert "wait" in refused.error
    assert (refused.error_code, refused.retry_after_s) == ("queue_full", 1.0)


def test_the_answer_to_a_count_is_a_frame_however_long_the_text(reader: Reader, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(wire, "MAX_COUNTED_TOKENS", 6)
    reader.take(Count(id=1, segments=(Segment("abcdefgh"),)))
    assert bytes(reader.counted().tokens) == b"abcfgh"
    reader.take(Count(id=1, segments=(Segment("abcdef"),)))
    assert bytes(reader.counted().tokens) == b"abcdef"


def test_the_longest_answer_to_a_count_fits_into_a_frame():
    assert len(framing.encode(Counted(id=1, tokens=(2**31 - 1,) * 1000))) * wire.MAX_COUNTED_TOKENS // 1000 < (
        framing.MAX_FRAME_BYTES
    )


def test_the_inbox_runs_everything_in_order_and_then_says_whether_to_go_on():
    engine = Engine(FakeBackend(n_cells=256, n_seqs=8, n_batch=64), Limits(2, 8, 0.0, 0), time.monotonic)
    inbox, ran = process.Inbox(), []
    inbox.put(lambda _: ran.append(1))
    inbox.put(lambda _: ran.append(2))
    assert inbox.drain(engine, None)
    assert inbox.drain(engine)
    inbox.put(lambda _: inbox.leave(2))
    inbox.put(lambda _: ran.append(3))
    assert not inbox.drain(engine, None)
    assert ran == [1, 2, 3]
    inbox.leave(0)
    assert inbox.exit_code == 2, "the first reason to leave is the one that counts"


def test_who_rings_ends_a_wait():
    engine = Engine(FakeBackend(n_cells=256, n_seqs=8, n_batch=64), Limits(2, 8, 0.0, 0), time.monotonic)
    inbox = process.Inbox()
    inbox.ring()
    assert inbox.drain(engine, None)
    assert not inbox.has_work


def test_an_engine_that_waits_for_a_grammar_sleeps():
    inbox, n_steps = process.Inbox(), 0
    backend = FakeBackend(n_cells=256, n_seqs=8, n_batch=64)
    engine = Engine(backend, Limits(2, 8, 0.0, 0), time.monotonic, ring=inbox.ring)
    grammar = wire.Grammar(wire.GrammarKind.GBNF, 'root ::= "yes" | "no"')
    engine.submit(wire.Submit(id=1, sampling=wire.Sampling(temperature=0), n_predict=5, grammar=grammar), [*b"hello"])
    final = None
    while final is None:
        assert inbox.drain(engine, engine.wait_s)
        step = engine.step()
        n_steps += 1
        final = next((delta for delta in (step.deltas if step else ()) if delta.finish), None)
    assert final.error_message is None
    assert n_steps < 20, "compiling takes some tenths of a second, and nobody looks every few milliseconds"
    engine.close()


def test_an_idle_engine_writes_what_a_slow_disk_could_not_take():
    disk = MemoryDisk()
    disk.is_behind = True
    run = Harness(n_cells=512, n_slots=2, n_batch=64, disk=disk)
    run.submit(1, [97] * 100, n_predict=2)
    inbox: Inbox[Engine] = Inbox()
    spare, pauses = spare_time(run.engine, None), []

    def catch_up(is_idle: bool) -> float | None:
        pause_s = spare(is_idle)
        if is_idle:
            pauses.append(pause_s)
            disk.is_behind = len(pauses) < 2
            if pause_s is None:
                inbox.leave(0)
        return pause_s

    reader, writer = os.pipe()
    run_steps(run.engine, inbox, Outbox(writer, lambda error: None), catch_up)
    os.close(reader)
    os.close(writer)
    assert len(pauses) > 2
    assert disk.records


def test_what_several_answers_have_in_common_is_read_once(reader: Reader):
    reader.backend.may_read.set()
    first = replace(submit(1), prediction=LONG)
    reader.take(first, *(replace(first, id=number) for number in range(2, 9)))
    finals = reader.finals(8)
    assert reader.backend.n_long == 1
    assert all(final.finish is Finish.LENGTH for final in finals.values())
    reader.take(replace(first, id=9, client="another"))
    reader.finals(1)
    assert reader.backend.n_long == 2, "another client is not told by the time that it takes"
    reader.take(replace(first, id=10, client="another", segments=(Segment("something else"),)))
    assert reader.finals(1)[10].usage.n_prompt == len("something else")
    assert reader.backend.n_long == 3
