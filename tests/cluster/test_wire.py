"""A door's link to an engine elsewhere: frames over TCP, ages for times, and every way that a connection ends."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import shutil
import signal
import struct
import time
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest

from localrun import framing, wire
from localrun.cluster import frames, replica, wire_child
from localrun.cluster.affinity import DIGEST_BYTES
from localrun.cluster.frames import RUNNING_TOKENS, prompt_of
from localrun.cluster.replica import MAX_RECENT, Replica
from localrun.cluster.wire_child import Address, WireChild
from localrun.errors import BadRequest, EngineDied, EngineFailed, LocalrunError, Unauthorized
from localrun.server.engines.link import End, EndKind, EngineLink
from tests.fakes import ENGINE
from tests.server.waiting import until

TOKEN, APP = b"secret", "app 1"
OPEN = wire.Open(
    model_path="none", n_slots=4, n_kv_cells=2048, n_batch=64, n_threads=1, n_gpu_layers=0, kv_type="f16",
    target_itl_s=0.1, ram_cache_bytes=0, max_queue=8,
)  # fmt: skip
HELLO = frames.Hello(protocol=frames.PROTOCOL, version="1", token=TOKEN, app=APP)
PATIENCE_S = 60


class Sink:
    """What a job is to its link."""

    has_begun, has_shown, is_on_trial = True, False, False

    def __init__(self) -> None:
        self.id, self.record = "req_x", self
        self.started: list[wire.Started] = []
        self.deltas: list[wire.Delta] = []
        self.error: LocalrunError | None = None
        self.begun, self.over = asyncio.Event(), asyncio.Event()

    @property
    def text(self) -> str:
        return "".join(delta.text for delta in self.deltas)

    def on_started(self, started: wire.Started) -> None:
        self.started.append(started)

    def on_delta(self, delta: wire.Delta, sent_at_s: float) -> None:
        assert abs(sent_at_s - time.monotonic()) < PATIENCE_S
        self.deltas.append(delta)
        self.begun.set()
        if delta.finish is not None:
            self.over.set()

    def on_engine_gone(self, error: LocalrunError, *, is_blamed: bool, is_alone: bool) -> bool:
        assert self.error is None, "told twice"
        self.error = error
        self.over.set()
        return True

    async def finished(self) -> wire.Delta:
        await asyncio.wait_for(self.over.wait(), PATIENCE_S)
        return self.deltas[-1]


class Lent:
    """An engine without a supervisor: started anew each time that somebody borrows it."""

    def __init__(self) -> None:
        self.links: list[EngineLink] = []
        self.replica = Replica(self.borrow, token=TOKEN, app=APP)

    @property
    def link(self) -> EngineLink:
        return self.links[-1]

    def release(self) -> None:
        pass

    async def borrow(self) -> Lent:
        self.links.append(
            EngineLink(model="m", command=ENGINE, on_step=self.replica.on_step, on_end=self.replica.on_ended)
        )
        await self.link.open(OPEN, PATIENCE_S)
        return self


class Doors:
    """Links to one replica."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.links: list[EngineLink] = []

    async def open(self, hello: frames.Hello = HELLO) -> EngineLink:
        child = partial(WireChild, Address("127.0.0.1", self.port, "node2"), hello)
        link = EngineLink(model="m", command=(), on_step=lambda *_: None, on_end=lambda _: None, new_child=child)
        self.links.append(link)
        await link.open(OPEN, PATIENCE_S)
        return link


@pytest.fixture
async def lent() -> AsyncIterator[Lent]:
    lent = Lent()
    yield lent
    await lent.replica.stop()
    for link in lent.links:
        await link.stop()


@pytest.fixture
async def doors(lent: Lent) -> AsyncIterator[Doors]:
    doors = Doors(await lent.replica.start("127.0.0.1"))
    yield doors
    for link in doors.links:
        await link.stop()


def ask(link: EngineLink, text: str = "once upon", n_predict: int = 20, **fields: object) -> tuple[Sink, int]:
    sink, request_id = Sink(), link.next_id()
    message = wire.Submit(id=request_id, segments=(wire.Segment(text),), n_predict=n_predict, ignore_eos=True,
                          arrived_at_s=time.monotonic())  # fmt: skip
    link.submit(msgspec.structs.replace(message, **fields), sink)
    return sink, request_id


async def test_an_answer_is_that_of_the_engine_beside_it(doors: Doors, lent: Lent) -> None:
    far = await doors.open()
    assert far.ready == lent.link.ready
    assert far.pid is None
    (there, _), (here, _) = ask(far), ask(lent.link)
    last, own = await there.finished(), await here.finished()
    assert there.text == here.text != ""
    assert (last.finish, last.n_output) == (own.finish, own.n_output) == (wire.Finish.LENGTH, 20)
    assert there.started[0].n_prompt == here.started[0].n_prompt
    assert abs(there.started[0].at_s - time.monotonic()) < PATIENCE_S


async def test_two_doors_see_their_own_alone(doors: Doors) -> None:
    """Both begin to count at 1."""
    one, other = await doors.open(), await doors.open()
    (mine, my_id), (yours, your_id) = ask(one, "first"), ask(other, "second thing", 30)
    assert my_id == your_id == 1
    assert (await mine.finished()).n_output == 20
    assert (await yours.finished()).n_output == 30
    assert {delta.id for delta in mine.deltas + yours.deltas} == {1}


async def test_a_step_is_one_frame_however_many_streams(doors: Doors, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[wire.Step] = []
    real = replica._Door._send

    def noted(door: object, message: object) -> None:
        if isinstance(message, wire.Step):
            sent.append(message)
        real(door, message)

    monkeypatch.setattr(replica._Door, "_send", noted)
    link = await doors.open()
    sinks = [ask(link, f"stream {number}", 24)[0] for number in range(4)]
    for sink in sinks:
        await sink.finished()
    n_deltas = sum(len(sink.deltas) for sink in sinks)
    assert len(sent) == len({step.stats.step for step in sent}) < n_deltas / 2


async def test_a_cancelled_request_ends_with_its_last_delta(doors: Doors) -> None:
    link = await doors.open()
    sink, request_id = ask(link, n_predict=1500)
    await asyncio.wait_for(sink.begun.wait(), PATIENCE_S)
    link.cancel(request_id)
    assert (await sink.finished()).finish is wire.Finish.CANCELLED


async def test_a_door_that_leaves_has_its_requests_cancelled(doors: Doors, lent: Lent) -> None:
    link = await doors.open()
    sink, _ = ask(link, n_predict=1500)
    await asyncio.wait_for(sink.begun.wait(), PATIENCE_S)
    link.kill("for a test")
    await asyncio.wait_for(sink.over.wait(), PATIENCE_S)
    async with asyncio.timeout(PATIENCE_S):
        while lent.link.n_requests:  # noqa: ASYNC110 - the engine ends them when it comes to that
            await asyncio.sleep(0.01)


async def test_texts_are_counted_and_the_cache_is_cleared(doors: Doors, lent: Lent) -> None:
    link = await doors.open()
    segments = (wire.Segment("how many tokens"),)
    assert (await link.count(segments)).tokens == (await lent.link.count(segments)).tokens
    assert (await link.clear_cache(ram=True, disk=False)).ram_bytes == 0


@pytest.mark.parametrize(
    ("name", "kind"),
    [("SIGKILL", EndKind.KILLED_BY_OTHERS), ("SIGSEGV", EndKind.CRASHED), ("SIGILL", EndKind.BAD_INSTRUCTION)],
)
async def test_doors_hear_how_the_engine_died_and_find_the_next_one(
    doors: Doors, lent: Lent, name: str, kind: EndKind, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("localrun.server.engines.machine.oom_kills", lambda: 0)
    busy, idle = await doors.open(), await doors.open()
    sink, _ = ask(busy, n_predict=1500)
    await asyncio.wait_for(sink.begun.wait(), PATIENCE_S)
    os.kill(lent.link.pid or 0, getattr(signal, name))
    await asyncio.wait_for(sink.over.wait(), PATIENCE_S)
    assert isinstance(sink.error, EngineDied)
    assert busy.end is not None
    assert (busy.end.kind, name in busy.end.how) == (kind, True)
    async with asyncio.timeout(PATIENCE_S):
        while idle.end != busy.end or len(lent.links) < 2 or not hasattr(lent.link, "ready"):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    again, _ = ask(await doors.open())
    assert (await again.finished()).finish is wire.Finish.LENGTH


async def test_a_resumed_request_goes_on_where_it_was(doors: Doors) -> None:
    link = await doors.open()
    whole, _ = ask(link, n_predict=40, sampling=wire.Sampling(temperature=0))
    await whole.finished()
    tokens = [token for delta in whole.deltas for token in delta.tokens]
    now_s = time.monotonic()
    resume = wire.Resume(output=tuple(tokens[:25]), started_at_s=now_s - 2, first_token_at_s=now_s - 1,
                         last_token_at_s=now_s - 0.5)  # fmt: skip
    rest, _ = ask(link, n_predict=40, sampling=wire.Sampling(temperature=0), resume=resume)
    last = await rest.finished()
    assert [token for delta in rest.deltas for token in delta.tokens] == tokens[25:]
    assert last.usage is not None
    assert 0.5 < last.usage.decode_s < PATIENCE_S, "from the first token, which was a second ago"


@pytest.mark.parametrize(
    ("hello", "error", "text"),
    [
        (msgspec.structs.replace(HELLO, token=b"wrong"), Unauthorized, "token"),
        (msgspec.structs.replace(HELLO, protocol=99), BadRequest, "protocol 99"),
        (msgspec.structs.replace(HELLO, app="app 2"), BadRequest, "something else"),
    ],
)
async def test_who_does_not_belong_here_is_told_why(
    doors: Doors, hello: frames.Hello, error: type[LocalrunError], text: str
) -> None:
    with pytest.raises(error, match=text):
        await doors.open(hello)
    assert (await doors.open()).ready.n_slots == 4


async def test_nobody_there_is_an_engine_that_cannot_be_started(doors: Doors, lent: Lent) -> None:
    await lent.replica.stop()
    with pytest.raises(EngineFailed, match="could not be started"):
        await doors.open()


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("draft models", {"draft_model_path": "/etc/passwd"}),
        ("does not have an adapter", {"adapters": (wire.Adapter("/etc/passwd", b"x"),)}),
        (
            "not sent a picture",
            {"segments": (wire.Segment("", media=wire.Media(wire.MediaKind.IMAGE, "/etc/passwd", b"x")),)},
        ),
    ],
)
async def test_files_of_the_door_are_not_opened(doors: Doors, name: str, fields: dict[str, object]) -> None:
    link = await doors.open()
    sink, _ = ask(link, **fields)
    last = await sink.finished()
    assert (last.finish, last.error_code) == (wire.Finish.ERROR, "bad_request")
    assert name in (last.error_message or "")
    again, _ = ask(link)
    assert (await again.finished()).finish is wire.Finish.LENGTH


# --- pictures and sound -----------------------------------------------------------------------------------------------


class Seen:
    """A door's connection to a replica whose engine is told of pictures."""

    def __init__(self, lent: Lent, doors: Doors, monkeypatch: pytest.MonkeyPatch) -> None:
        self._lent, self._doors = lent, doors
        self.bytes_sent: list[bytes] = []
        self.seen: list[bytes] = []
        send, submit = WireChild._send, EngineLink.submit
        monkeypatch.setattr(WireChild, "_send", lambda child, message: (self._note(message), send(child, message))[1])

        def engine(link: EngineLink, message: wire.Submit, sink: Sink) -> None:
            if link is lent.link:
                self.seen += [Path(media.path).read_bytes() for media in frames.media_of(message)]
                message = msgspec.structs.replace(message, segments=(wire.Segment("x"),))
            submit(link, message, sink)

        monkeypatch.setattr(EngineLink, "submit", engine)

    def _note(self, message: object) -> None:
        if isinstance(message, frames.Bytes):
            self.bytes_sent.append(message.data)

    async def open(self) -> None:
        def new_child(**told: Any) -> WireChild:
            self.child = WireChild(Address("127.0.0.1", self._doors.port, "node2"), HELLO, **told)
            return self.child

        self.link = EngineLink(
            model="m", command=(), on_step=lambda *_: None, on_end=lambda _: None, new_child=new_child
        )
        self._doors.links.append(self.link)
        await self.link.open(OPEN, PATIENCE_S)

    async def ask(self, *media: wire.Media, n_predict: int = 2) -> Sink:
        segments = tuple(wire.Segment("", media=one) for one in media)
        if media:
            await self.child.bring(media)
        sink, _ = ask(self.link, segments=segments, n_predict=n_predict)
        return sink

    @property
    def files(self) -> list[Path]:
        return list(Path(self._lent.replica.media_folder.name).iterdir())


@pytest.fixture
async def seen(lent: Lent, doors: Doors, monkeypatch: pytest.MonkeyPatch) -> Seen:
    seen = Seen(lent, doors, monkeypatch)
    await seen.open()
    return seen


def picture(folder: Path, content: bytes) -> wire.Media:
    path = folder / f"picture-{content[:8].hex()}"
    path.write_bytes(content)
    return wire.Media(wire.MediaKind.IMAGE, str(path), hashlib.sha256(content).digest())


def contents(*media: wire.Media) -> list[bytes]:
    return [Path(one.path).read_bytes() for one in media]


async def test_a_picture_goes_once_and_stays_as_long_as_the_door_is_there(
    seen: Seen, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wire_child, "PIECE_BYTES", 1000)
    one, other, empty = (picture(tmp_path, content) for content in (b"first" * 700, b"other" * 10, b""))
    for media in ((one,), (one, other), (other, one, empty)):
        await (await seen.ask(*media)).finished()
    assert seen.seen == contents(one, one, other, other, one, empty)
    assert [len(data) for data in seen.bytes_sent] == [1000, 1000, 1000, 500, 50, 0]
    assert len(seen.files) == 3
    await seen.link.stop()
    await until(lambda: not seen.files)


async def test_what_is_not_asked_for_again_makes_room(
    seen: Seen, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wire_child, "MEDIA_BYTES", 1000)
    media = [picture(tmp_path, bytes([number]) * 400) for number in range(5)]
    running = await seen.ask(media[0], n_predict=1500)  # its picture stays as long as it runs
    for one in media[1:]:
        await (await seen.ask(one)).finished()
    assert len(seen.files) == 3
    await (await seen.ask(media[0])).finished()
    assert seen.bytes_sent.count(bytes(400)) == 2
    assert seen.seen == contents(*media, media[0])
    # More than is kept, all at once.
    await (await seen.ask(*media)).finished()
    await running.finished()
    await (await seen.ask(media[4])).finished()
    await until(lambda: len(seen.files) <= 2)


async def test_a_picture_that_cannot_be_kept_fails_its_request_alone(seen: Seen, lent: Lent, tmp_path: Path) -> None:
    shutil.rmtree(lent.replica.media_folder.name)
    last = await (await seen.ask(picture(tmp_path, b"first"))).finished()
    assert (last.error_code, last.finish) == ("disk_full", wire.Finish.ERROR)
    assert "a picture or a recording cannot be kept" in (last.error_message or "")
    assert (await (await seen.ask()).finished()).finish is wire.Finish.LENGTH


# --- by hand ----------------------------------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def connected(port: int) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    yield reader, writer
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()


@pytest.mark.parametrize(
    "said",
    [
        b"GET / HTTP/1.1\r\n\r\n" * 8,
        framing.encode(wire.Cancel(1)),
        struct.pack("<I", framing.MAX_FRAME_BYTES + 1),
        struct.pack("<I", 100_000) + b"x" * 9000,
        framing.encode(OPEN),
    ],
)
async def test_a_stranger_is_sent_away(doors: Doors, said: bytes) -> None:
    async with connected(doors.port) as (reader, writer):
        writer.write(said)
        heard = await asyncio.wait_for(reader.read(), PATIENCE_S)
    assert heard == b"" or b"refused" in heard
    assert (await doors.open()).ready.n_slots == 4


async def test_who_says_nothing_is_sent_away(doors: Doors, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replica, "HELLO_TIMEOUT_S", 0.05)
    async with connected(doors.port) as (reader, _):
        assert await asyncio.wait_for(reader.read(), PATIENCE_S) == b""


async def test_a_number_that_runs_is_not_used_again(doors: Doors) -> None:
    link = await doors.open()
    sink, request_id = ask(link, n_predict=1500)
    link._child.write(wire.Submit(id=request_id, n_predict=1))
    await asyncio.wait_for(sink.over.wait(), PATIENCE_S)
    assert isinstance(sink.error, EngineDied)


async def test_a_replica_that_hangs_is_left(doors: Doors, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing closes a connection to a machine without power."""
    monkeypatch.setattr(frames, "BEAT_S", 0.05)
    link = await doors.open()
    sink, _ = ask(link, n_predict=1500)
    monkeypatch.setattr(frames, "SILENCE_S", 0.3)
    monkeypatch.setattr(replica._Door, "_send", lambda *_: None)
    await asyncio.wait_for(sink.over.wait(), PATIENCE_S)
    assert link.was_killed, "nobody is to blame for that"
    assert "has said nothing" in str(link.error)


async def test_a_door_that_hangs_has_its_requests_cancelled(
    doors: Doors, lent: Lent, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(frames, "BEAT_S", 0.05)
    link = await doors.open()
    ask(link, n_predict=1500)
    monkeypatch.setattr(WireChild, "_send", lambda *_: None)
    monkeypatch.setattr(frames, "SILENCE_S", 0.3)
    async with asyncio.timeout(PATIENCE_S):
        while lent.link.n_requests or not lent.replica.link.stats:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def test_what_a_replica_says_that_is_no_frame_ends_it_for_the_door() -> None:
    async def speak(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.closing(writer), contextlib.suppress(OSError):
            writer.write(struct.pack("<I", 3) + b"abc")
            await reader.read()

    server = await asyncio.start_server(speak, "127.0.0.1", 0)
    with pytest.raises(EngineDied, match="broke the protocol"):
        await Doors(server.sockets[0].getsockname()[1]).open()
    server.close()
    await asyncio.sleep(0.05)


# --- two clocks -------------------------------------------------------------------------------------------------------


def test_ages_survive_clocks_that_differ_by_an_hour():
    resume = wire.Resume(started_at_s=90.0, first_token_at_s=95.0)
    submit = wire.Submit(id=1, arrived_at_s=80.0, resume=resume)
    body = framing.encode(frames.aged(submit, 100.0))[4:]
    there = frames.decode_to_replica(body, 3700.0)
    assert isinstance(there, wire.Submit)
    assert (there.arrived_at_s, there.resume) == (3680.0, wire.Resume(started_at_s=3690.0, first_token_at_s=3695.0))

    stats = wire.StepStats(1, 0.0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0)
    step = wire.Step(sent_at_s=3699.5, deltas=[], stats=stats, started=[wire.Started(1, 0, 5, 0, at_s=3699.0)])
    body = framing.encode(frames.aged(step, 3700.0))[4:]
    here = frames.decode_from_replica(body, 100.0)
    assert isinstance(here, wire.Step)
    assert (here.sent_at_s, here.started[0].at_s) == (99.5, 99.0)


@pytest.mark.parametrize(
    "message",
    [
        HELLO, frames.Beat(), wire.Cancel(3), wire.Count(id=1, segments=(wire.Segment("x"),)),
        wire.ClearCache(id=1, ram=True, disk=False), wire.Embed(id=1, inputs=("x",), arrived_at_s=5.0),
    ],
)  # fmt: skip
def test_what_doors_say_comes_as_it_was(message: object):
    assert frames.decode_to_replica(framing.encode(frames.aged(message, 7.0))[4:], 7.0) == message


@pytest.mark.parametrize(
    "message",
    [
        frames.Refused(code="bad_request", message="no"), frames.Ended(end=End(EndKind.CRASHED, "fell")), frames.Beat(),
        wire.Counted(id=1, tokens=(1, 2)), wire.Cleared(id=1, ram_bytes=2, disk_bytes=3),
    ],
)  # fmt: skip
def test_what_replicas_say_comes_as_it_was(message: object):
    assert frames.decode_from_replica(framing.encode(frames.aged(message, 7.0))[4:], 7.0) == message


async def test_a_replica_tells_the_work_of_all_doors_until_there_is_none(doors: Doors, lent: Lent) -> None:
    one, other = await doors.open(), await doors.open()
    (first, _), (second, _) = ask(one, "x" * 1000, 100), ask(other, "y" * 1000, 100)
    await until(lambda: lent.replica.n_requests == 2)
    assert lent.replica.work_tokens >= 2 * RUNNING_TOKENS
    await asyncio.gather(first.finished(), second.finished())
    assert lent.replica.work_tokens == 0
    # What scaling looks at ends with the last answer, too.
    stats = lent.link.stats
    assert stats is not None
    assert (stats.n_running, stats.n_queued, lent.link.longest_wait_s(time.monotonic())) == (0, 0, None)


async def test_a_replica_tells_what_it_computed_last_and_forgets_it_with_its_engine(doors: Doors, lent: Lent) -> None:
    far = await doors.open()
    for number in range(3):
        await ask(far, f"{number}" * 600, 1)[0].finished()
    prompts = [
        prompt_of(wire.Submit(id=1, segments=(wire.Segment(f"{number}" * 600),))) for number in range(MAX_RECENT)
    ]
    assert lent.replica.recent == b"".join(b"".join(prompt) for prompt in prompts[:3])
    for prompt in prompts:
        lent.replica.note(prompt)
    assert lent.replica.recent.endswith(b"".join(prompts[-1]))
    assert len(lent.replica.recent) == MAX_RECENT * DIGEST_BYTES
    assert lent.link.pid is not None
    os.kill(lent.link.pid, signal.SIGKILL)
    await until(lambda: far.error is not None and lent.replica._loan is not None)  # the next engine is there
    assert lent.replica.recent == b""
