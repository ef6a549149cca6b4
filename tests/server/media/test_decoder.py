"""Media as the daemon has them decoded: hostile files, limits that hold, and files that live as long as they should."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import errno
import os
import random
import shutil
import signal
import stat
import sys
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy
import psutil
import pytest
from PIL import Image

from localrun.errors import BadRequest, DiskFull, Unavailable
from localrun.server.jobs.job import Job
from localrun.server.media import worker
from localrun.server.media.decoder import DecodedFiles, Key, MediaDecoder, sweep
from localrun.server.prompting.ask import Attached, Attachments
from localrun.wire import DecodeReply, Media, MediaKind
from tests.depth import DEPTH
from tests.server.media import making

BOTH = (MediaKind.IMAGE, MediaKind.AUDIO)


def job(kinds: tuple[MediaKind, ...] = BOTH) -> Any:
    model = SimpleNamespace(name="eyes", projector=None, no_projector="")
    ready = SimpleNamespace(media=kinds, audio_rate_hz=16000)
    return SimpleNamespace(model=model, ready=ready, media={}, held=contextlib.ExitStack())


def sent(*files: bytes, max_side: int = 0) -> tuple[Attached, ...]:
    media = Attachments()
    for index, data in enumerate(files):
        media.add(base64.b64encode(data).decode(), f"images[{index}]", max_side=max_side)
    return media.all()


async def attach(media: MediaDecoder, holder: Any, *files: bytes, **changes: Any) -> list[Media]:
    attached = sent(*files, **changes)
    await media.read(attached)
    decoded: Mapping[str, Media] = await media.attach(cast(Job, holder), attached)
    return [decoded[one.marker] for one in attached]


@pytest.fixture
async def media(tmp_path: Path) -> AsyncIterator[MediaDecoder]:
    made = MediaDecoder(tmp_path / "media")
    await made.start()
    yield made
    await made.stop()
    assert not list((tmp_path / "media").glob("*")) if (tmp_path / "media").exists() else True


def content(path: str) -> bytes:
    return Path(path).read_bytes()


def is_there(path: str) -> bool:
    return Path(path).exists()


def files_in(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()} - {"in", "out"}


async def test_a_picture_and_a_recording_are_files_until_the_job_s_end(media: MediaDecoder) -> None:
    holder = job()
    picture = making.noise()
    tone = making.tone(1000)
    image, sound = await attach(media, holder, making.encoded(picture, "PNG"), making.wave(tone))
    assert (image.kind, image.width, image.height) == (MediaKind.IMAGE, 30, 20)
    assert content(image.path) == picture.tobytes()
    assert (sound.kind, sound.n_samples) == (MediaKind.AUDIO, 1000)
    values = numpy.frombuffer(content(sound.path), "<f4")
    assert (values == numpy.frombuffer(tone, "<i2") / numpy.float32(32768)).all()
    holder.held.close()
    assert is_there(image.path)  # for the next turn


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no modes")
async def test_nobody_else_may_look(media: MediaDecoder) -> None:
    await attach(media, job(), making.png())
    for folder in (media.files.folder, media.files.folder.parent):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700


async def test_the_next_turn_decodes_nothing_again(media: MediaDecoder, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = job(), job()
    (before,) = await attach(media, first, making.png())
    first.held.close()
    monkeypatch.setattr(media, "_ask", None)
    (after,) = await attach(media, second, making.png())
    assert after == before
    assert await attach(media, second, making.png()) == [before]  # once more


async def test_two_requests_with_the_same_new_picture_decode_it_once(media: MediaDecoder) -> None:
    jobs = [job() for _ in range(4)]
    made = await asyncio.gather(*(attach(media, one, making.png(90, 90)) for one in jobs))
    assert len({tuple(each) for each in made}) == 1
    assert len(files_in(media.files.folder)) == 1
    jobs[0].held.close()
    for each in made:
        assert is_there(each[0].path)


async def test_size_and_rate_are_part_of_what_a_file_is(media: MediaDecoder) -> None:
    holder = job()
    data = making.png(1000, 600)
    (large,) = await attach(media, holder, data)
    (small,) = await attach(media, holder, data, max_side=512)
    assert ((large.width, large.height), (small.width, small.height)) == ((1000, 600), (512, 307))
    assert large.digest != small.digest
    holder.ready.audio_rate_hz = 24000
    (slow,) = await attach(media, holder, making.wave(making.tone(8000)))
    assert slow.n_samples == 12000
    assert (await attach(media, holder, making.png(), max_side=512))[0].path.endswith("-0")  # small as it is


async def test_what_the_model_does_not_take(media: MediaDecoder) -> None:
    with pytest.raises(BadRequest, match=r"images\[0\]: 'eyes' does not support images.*\(an mmproj file\)") as caught:
        await attach(media, job(()), making.png())
    assert caught.value.field == "images[0]"
    with pytest.raises(BadRequest, match=r"images\[1\]: 'eyes' takes images, but no sound"):
        await attach(media, job((MediaKind.IMAGE,)), making.png(), making.wave(making.tone()))
    with pytest.raises(BadRequest, match=r"images\[0\]: 'eyes' takes sound, but no images"):
        await attach(media, job((MediaKind.AUDIO,)), making.png())
    missing, broken = job(()), job(())
    missing.model.no_projector = "its projector /x is gone; create the model again"
    with pytest.raises(BadRequest, match=r"'eyes' does not support images: its projector /x is gone; create the"):
        await attach(media, missing, making.png())
    broken.model.projector = Path("/x/mmproj-eyes.gguf")
    with pytest.raises(BadRequest, match=r"sound: it was loaded without its projector mmproj-eyes\.gguf; the daemon's"):
        await attach(media, broken, making.wave(making.tone()))
    assert media.worker.pid is None


async def test_a_broken_file_is_named_by_its_field(media: MediaDecoder) -> None:
    broken = making.png(90, 90)[:-500]
    with pytest.raises(BadRequest, match=r"^images\[1\]: a broken or truncated PNG file") as caught:
        await attach(media, job(), making.png(), broken)
    assert caught.value.field == "images[1]"
    results = await asyncio.gather(*(attach(media, job(), broken) for _ in range(3)), return_exceptions=True)
    assert all(isinstance(each, BadRequest) and each.field == "images[0]" for each in results)


async def test_a_client_that_goes_away_disturbs_nobody(media: MediaDecoder) -> None:
    holder = job()
    await attach(media, holder, making.png())
    for size in range(100, 106):
        going = asyncio.create_task(attach(media, job(), making.png(size * 10, size)))
        staying = asyncio.create_task(attach(media, holder, making.png(size, size)))
        await asyncio.sleep(0.002 * (size - 100))
        going.cancel()
        ((made,),) = await asyncio.gather(staying)
        assert content(made.path) == making.noise(size, size).tobytes()
        with contextlib.suppress(asyncio.CancelledError):
            await going


# --- the worker's limits ----------------------------------------------------------------------------------------------


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
async def test_the_worker_can_open_nothing_and_knows_no_secrets(
    media: MediaDecoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    await attach(media, job(), making.png())
    process = Path(f"/proc/{media.worker.pid}")
    limits = {line[:25].strip(): line[25:].split()[:2] for line in (process / "limits").read_text().splitlines()}
    assert (limits["Max open files"], limits["Max processes"]) == (["0", "0"], ["0", "0"])
    assert limits["Max file size"] == [str(worker.OUTPUT_BYTES)] * 2
    assert limits["Max address space"] == [str(worker.MEMORY_BYTES)] * 2
    assert limits["Max core file size"] == ["0", "0"]
    assert "hf_secret" not in (process / "environ").read_text()


async def test_a_worker_that_dies_is_replaced(media: MediaDecoder) -> None:
    holder = job()
    for size in (5, 6, 7):
        (made,) = await attach(media, holder, making.png(size, size))
        assert content(made.path) == making.noise(size, size).tobytes()
        assert media.worker.pid is not None
        os.kill(media.worker.pid, signal.SIGKILL)


async def test_a_file_that_takes_too_long_is_refused(media: MediaDecoder, monkeypatch: pytest.MonkeyPatch) -> None:
    """That its worker is killed then is tested with templates, whose worker is of the same kind."""
    monkeypatch.setattr(media.worker, "_watched", _raising(TimeoutError()))
    with pytest.raises(BadRequest, match=r"images\[0\]: decoding this PNG file takes longer than 20 s; send a smaller"):
        await attach(media, job(), making.png())
    monkeypatch.undo()
    await attach(media, job(), making.png())


async def test_a_file_that_ends_the_worker_twice_is_refused(
    media: MediaDecoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    await attach(media, job(), making.png())
    monkeypatch.setattr(media.worker, "_watched", _raising(ConnectionError()))
    with pytest.raises(BadRequest, match=r"images\[0\]: this PNG file ended the process that decodes it"):
        await attach(media, job(), making.png(3, 3))
    monkeypatch.undo()
    await attach(media, job(), making.png(3, 3))


def _raising(error: Exception) -> Callable[..., Any]:
    async def fail(*_: object) -> None:
        raise error

    return fail


async def test_stopping_ends_what_is_under_way(tmp_path: Path) -> None:
    media = MediaDecoder(tmp_path / "media")
    await attach(media, job(), making.png())
    pid = media.worker.pid
    waiting = [asyncio.create_task(attach(media, job(), making.png(2000 + n, 2000))) for n in range(3)]
    await asyncio.sleep(0.01)
    await media.stop()
    for result in await asyncio.gather(*waiting, return_exceptions=True):
        assert isinstance(result, list | Unavailable)
    assert pid is not None
    assert not psutil.pid_exists(pid)
    assert not list((tmp_path / "media").iterdir())


# --- hostile files ----------------------------------------------------------------------------------------------------

BOMBS = {
    "PNG 20000 x 20000 of a few bytes": making.png_header(20000, 20000),
    "PNG that says more than it has": making.png_header(6000, 6000, data=b"\0" * 1000),
    "PNG of zeros, as large as allowed": making.encoded(Image.new("RGBA", (16000, 2500)), "PNG", compress_level=1),
    "GIF of 65535 x 65535": making.gif_header(65535, 65535),
    "GIF with a large frame": making.gif_header(8, 8, frame=(65535, 65535)),
    "GIF as large as allowed": making.gif_header(16384, 2441),
    "animated WebP that is huge": making.webp_header(16384, 16384),
    "animated WebP as large as allowed": making.webp_header(16384, 2441),
    "WAV of one sample": making.wave(b"\0\0"),
    "WAV at 1 Hz": making.wave(making.tone(60_000), rate_hz=1),
    "WAV of many channels": making.wave(making.tone(60_000), n_channels=1024),
    "WAV of no channel": making.wave(making.tone(), n_channels=0, bits=16),
    "no bytes": b"",
    "a truncated PNG": making.png(300, 300)[:-1000],
    "a text with a marker": b"<__media__>",
}


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads what the worker has used")
async def test_bombs_are_refused_or_decoded_within_the_memory(media: MediaDecoder) -> None:
    await attach(media, job(), making.png())
    pid = media.worker.pid
    for name, data in BOMBS.items():
        holder = job()
        with contextlib.suppress(BadRequest):
            await attach(media, holder, data)
        holder.held.close()
        assert media.worker.pid == pid, name  # none of these may end it
    status = content(f"/proc/{pid}/status").decode()
    assert int(status.partition("VmHWM:")[2].split()[0]) * 1024 < worker.MEMORY_BYTES


def mutated(chance: random.Random) -> bytes:
    data = bytearray(chance.choice(SEEDS))
    for _ in range(chance.choice((1, 2, 4, 16))):
        at = chance.randrange(len(data)) if chance.random() < 0.5 else chance.randrange(min(80, len(data)))
        how = chance.random()
        if how < 0.6:
            data[at] = chance.choice((0, 1, 0x7F, 0x80, 0xFF, chance.randrange(256)))
        elif how < 0.75:
            data[at : at + 4] = chance.choice((b"\0\0\0\0", b"\xff\xff\xff\xff", b"\x7f\xff\xff\xff", b"\0\0\0\x01"))
        elif how < 0.85:
            del data[at : at + chance.randrange(1, 50)]
        elif how < 0.95:
            data[at:at] = data[at : at + chance.randrange(1, 50)]
        else:
            del data[at:]
        if not data:
            break
    return bytes(data)


SEEDS = [
    *(making.encoded(making.noise(40, 30), name) for name in ("PNG", "JPEG", "GIF", "BMP", "WebP")),
    making.encoded(making.noise(40, 30), "JPEG", progressive=True),
    making.encoded(making.noise(40, 30).convert("CMYK"), "JPEG"),
    making.encoded(making.noise(40, 30).quantize(16), "PNG", transparency=3, bits=4),
    making.encoded(making.noise(40, 30), "WebP", lossless=True),
    making.encoded(making.noise(20, 10), "WebP", save_all=True, append_images=[Image.new("RGB", (20, 10))]),
    making.encoded(making.noise(20, 10), "GIF", save_all=True, append_images=[Image.new("RGB", (20, 10))]),
    making.wave(making.tone(2000)),
    making.wave(making.tone(2000), rate_hz=44100, n_channels=2),
    *(making.sound(name, seconds=0.2) for name in ("FLAC", "OGG", "MP3", "WAVEX")),
    making.sound("OGG", subtype="OPUS", seconds=0.2),
]


async def test_a_thousand_broken_files_end_nothing_but_the_worker(media: MediaDecoder) -> None:
    chance = random.Random(20261123)
    n_decoded = n_refused = 0
    for number in range(1000 * DEPTH):
        holder = job()
        (result,) = await asyncio.gather(attach(media, holder, mutated(chance)), return_exceptions=True)
        if isinstance(result, BadRequest):
            assert result.field == "images[0]", number
            n_refused += 1
        else:
            assert isinstance(result, list), result
            (made,) = result
            size = made.width * made.height * 3 or made.n_samples * 4
            assert len(content(made.path)) == size > 0, number
            n_decoded += 1
        holder.held.close()
    assert min(n_decoded, n_refused) > 100
    await attach(media, job(), making.png())


# --- files ------------------------------------------------------------------------------------------------------------


def _key(number: int) -> Key:
    return Key(bytes([number]) * 32, MediaKind.IMAGE)


def _added(files: DecodedFiles, number: int, size_bytes: int = 100) -> Path:
    files.open()
    files.output_path.write_bytes(b"x" * size_bytes)
    path = files.adopt(_key(number))
    files.add(_key(number), Media(MediaKind.IMAGE, str(path), b"d"), size_bytes)
    return path


def test_what_nobody_uses_goes_the_oldest_first(tmp_path: Path) -> None:
    files = DecodedFiles(tmp_path, keep_bytes=250, max_bytes=1000)
    paths = [_added(files, number) for number in range(4)]
    for number in (0, 1, 2, 3, 0):  # 0 twice, and so used last
        assert files.take(_key(number)) is not None
    for number in (1, 2, 3):
        files.give_back(_key(number))
    files.give_back(_key(0))
    assert [path.exists() for path in paths] == [True, False, True, True]
    files.give_back(_key(0))
    assert [path.exists() for path in paths] == [True, False, False, True]
    assert files.take(_key(1)) is None
    assert files.size_bytes == 200
    files.close()
    assert not list(tmp_path.iterdir())


def test_those_in_use_have_a_limit_and_the_others_make_room(tmp_path: Path) -> None:
    files = DecodedFiles(tmp_path, keep_bytes=10_000, max_bytes=350)
    paths = [_added(files, number) for number in range(3)]
    assert files.take(_key(2))
    files.make_room(200)
    assert [path.exists() for path in paths] == [False, False, True]
    with pytest.raises(Unavailable, match="try again when they have ended"):
        files.make_room(251)
    files.close()


async def test_what_failed_takes_no_room(media: MediaDecoder, monkeypatch: pytest.MonkeyPatch) -> None:
    async def full(_: bytes) -> DecodeReply:
        media.files.output_path.write_bytes(b"x" * 1000)
        assert media.files.input_path.stat().st_size
        return DecodeReply(error_code=DiskFull.code, error_message="the disk is full")

    monkeypatch.setattr(media.worker, "ask", full)
    with pytest.raises(DiskFull):
        await attach(media, job(), making.png())
    assert [path.stat().st_size for path in (media.files.input_path, media.files.output_path)] == [0, 0]


async def test_what_is_kept_for_later_makes_room_on_a_full_disk(
    media: MediaDecoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    await attach(media, job(), making.png())
    await attach(media, (over := job()), making.png(20, 10))
    over.held.close()
    assert len(files_in(media.files.folder)) == 2
    copyfile = shutil.copyfile

    def room_for_two(source: Path, target: Path) -> Path:
        if len(files_in(media.files.folder)) == 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        return copyfile(source, target)

    monkeypatch.setattr("shutil.copyfile", room_for_two)
    await attach(media, job(), making.png(30, 10))
    with pytest.raises(DiskFull):
        await attach(media, job(), making.png(40, 10))


@pytest.mark.parametrize("what", ["the cache folder", "the worker's files", "the decoded file"])
async def test_what_somebody_removes_is_made_again(media: MediaDecoder, what: str) -> None:
    folder = media.files.folder
    async with asyncio.timeout(60):
        (first,) = await attach(media, (holder := job()), making.png())
        size_bytes = media.files.size_bytes
        if what == "the cache folder":
            shutil.rmtree(folder.parent)
        elif what == "the worker's files":
            media.files.input_path.unlink()
            media.files.output_path.unlink()
        else:
            os.unlink(first.path)
        (other,) = await attach(media, job(), making.png(20, 10))
        assert content(other.path)
        (again,) = await attach(media, (later := job()), making.png())
    assert again == first
    assert len(content(again.path)) == first.width * first.height * 3
    assert media.files.size_bytes == size_bytes + 600
    holder.held.close()
    media.files.make_room(media.files._max_bytes - size_bytes - 600)
    assert is_there(again.path)  # for `later`
    later.held.close()
    await media.stop()
    assert not folder.exists()
    assert not list(folder.parent.iterdir())


async def test_a_full_disk_is_said(media: MediaDecoder, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("shutil.copyfile", full)
    with pytest.raises(DiskFull, match="the disk is full"):
        await attach(media, job(), making.png())
    monkeypatch.undo()
    assert files_in(media.files.folder) == set()
    await attach(media, job(), making.png())


def test_what_a_killed_daemon_left_is_removed_and_a_running_one_s_is_not(tmp_path: Path) -> None:
    running, killed = DecodedFiles(tmp_path), DecodedFiles(tmp_path)
    kept = _added(running, 1)
    _added(killed, 1)
    killed._lock.release()
    (tmp_path / "not-ours.txt").write_text("x")
    sweep(tmp_path)
    assert kept.exists()
    assert not killed.folder.exists()
    assert {path.name for path in tmp_path.iterdir()} == {
        running.folder.name, f"{running.folder.name}.lock", "not-ours.txt"
    }  # fmt: skip
    running.close()
    sweep(tmp_path / "nowhere")


async def test_no_more_than_a_few_copies_of_a_large_body_at_once(tmp_path: Path) -> None:
    import tracemalloc

    data = making.encoded(making.noise(2900, 2900), "BMP")
    text = base64.b64encode(data).decode()
    media = Attachments()
    media.add(f"data:image/bmp;base64,{text}", "images[0]")
    holder = job()
    desk = MediaDecoder(tmp_path / "media")
    tracemalloc.start()
    try:
        await desk.read(media.all())
        await desk.attach(cast(Job, holder), media.all())
        left, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
        await desk.stop()
    assert peak < 3 * len(data)
    assert left < 1_000_000
