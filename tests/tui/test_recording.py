from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from localrun.errors import DaemonUnreachable
from localrun.snapshot import RequestRow, RequestState
from localrun.tui.daemon import Recorder, Replay, snapshots
from tests.tui.conftest import snapshot_of


def _row(name: str) -> RequestRow:
    return RequestRow(id=name, client="c", api="/api/chat", model="tiny", lane="default", state=RequestState.DECODE)


def _record(path: Path, *times_s: float) -> None:
    recorder = Recorder(path)
    for time_s in times_s:
        recorder.write(snapshot_of(_row(f"at {time_s}"), time_s=time_s))
    recorder.close()


async def test_a_replay_says_what_was_recorded_at_its_own_pace(tmp_path: Path):
    path = tmp_path / "folder" / "one.jsonl"
    _record(path, 10.0, 10.5, 11.5, 500.0)
    pauses_s: list[float] = []

    async def sleep(seconds: float) -> None:
        pauses_s.append(seconds)

    played = Replay(path, speed=2.0, sleep=sleep).events()
    seen = [(await anext(played)).requests[0].id for _ in range(4)]
    with pytest.raises(DaemonUnreachable, match="over"):
        await anext(played)
    assert seen == ["at 10.0", "at 10.5", "at 11.5", "at 500.0"]
    assert pauses_s == [0.0, 0.25, 0.5, 1.5], "a long pause is cut short"


async def test_a_recording_has_no_daemon_behind_it(tmp_path: Path):
    path = tmp_path / "one.jsonl"
    _record(path, 1.0)
    replay = Replay(path)
    with pytest.raises(DaemonUnreachable, match="recording"):
        await replay.cancel("x")
    with pytest.raises(DaemonUnreachable, match="recording"):
        await replay.models()
    with pytest.raises(DaemonUnreachable, match="recording"):
        await anext(replay.chat("tiny", []))


def test_a_line_that_was_cut_off_is_the_end(tmp_path: Path):
    path = tmp_path / "one.jsonl"
    _record(path, 1.0, 2.0)
    path.write_bytes(path.read_bytes()[:-40])
    assert [snapshot.time_s for snapshot in snapshots(path)] == [1.0]


@pytest.mark.parametrize("content", [b"", b"{}\n", b"not json\n", b"\xff\xfe\n"])
def test_another_file_is_said_to_be_none(tmp_path: Path, content: bytes):
    path = tmp_path / "one.jsonl"
    path.write_bytes(content)
    with pytest.raises(DaemonUnreachable, match="not a recording"):
        list(snapshots(path))


def test_nothing_is_overwritten(tmp_path: Path):
    path = tmp_path / "one.jsonl"
    _record(path, 1.0)
    before = path.read_bytes()
    with pytest.raises(FileExistsError):
        Recorder(path)
    assert path.read_bytes() == before
    assert path.stat().st_mode & 0o077 == 0, "it names clients and models"


def test_a_recording_is_what_the_event_stream_sends(tmp_path: Path):
    path = tmp_path / "one.jsonl"
    snapshot = snapshot_of(_row("a"), time_s=3.0)
    recorder = Recorder(path)
    recorder.write(snapshot)
    recorder.close()
    assert path.read_bytes() == msgspec.json.encode(snapshot) + b"\n"
