"""When the daemon has the kernels probed, and what it does with the verdict. The probe is a child that writes one."""

from __future__ import annotations

import asyncio
import logging
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from localrun.hardware import kernels
from localrun.hardware.kernels import Fault, Verdict
from localrun.models.gguf.reader import read_header
from localrun.server.engines import kernels as of_daemon
from localrun.server.engines.kernels import Kernels
from tests.server.waiting import until

FAULTY = Verdict(is_probed=True, quick_types=("Q4_0",), faults=(Fault("Q4_0", "attention", "crash (SIGSEGV)"),))


@pytest.fixture(autouse=True)
def quick_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(of_daemon, "QUIET_S", 0.05)
    monkeypatch.setattr(of_daemon, "LOOK_EVERY_S", 0.01)


def writing(folder: Path, verdict: Verdict, mark: Path) -> list[str]:
    """A probe that comes to this verdict, keeps it if it can, says it, and leaves a mark."""
    program = (
        "import contextlib, sys; from pathlib import Path; import msgspec; from localrun.hardware import kernels\n"
        "verdict = msgspec.json.decode(sys.argv[2], type=kernels.Verdict)\n"
        "with contextlib.suppress(OSError):\n"
        "    kernels.keep(Path(sys.argv[1]), kernels.present_pair(), verdict)\n"
        "print(sys.argv[2])\n"
        "open(sys.argv[3], 'a').write('probed ')"
    )
    return [sys.executable, "-c", program, str(folder), msgspec.json.encode(verdict).decode(), str(mark)]


async def test_it_is_probed_once_in_a_quiet_moment(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder, mark, found = tmp_path / "kernels", tmp_path / "mark", []
    is_quiet = False
    command = writing(folder, FAULTY, mark)
    watching = Kernels(folder, is_quiet=lambda: is_quiet, on_found=found.append, command=command)
    watching.start()
    await asyncio.sleep(0.3)
    assert not mark.exists(), "somebody is waiting for an answer"
    is_quiet = True
    with caplog.at_level(logging.WARNING):
        await until(lambda: bool(found))
    assert found == [FAULTY]
    assert any("Q4_0" in line and "attention" in line and "SIGSEGV" in line for line in caplog.messages)
    await watching.stop()
    again = Kernels(folder, is_quiet=lambda: True, on_found=found.append, command=command)
    probing = again.start()
    assert probing is not None
    await probing
    await again.stop()
    assert mark.read_text() == "probed "


async def test_a_daemon_that_is_never_quiet_probes_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(of_daemon, "LONGEST_WAIT_S", 0.2)
    found: list[Verdict] = []
    command = writing(tmp_path / "kernels", FAULTY, tmp_path / "mark")
    watching = Kernels(tmp_path / "kernels", is_quiet=lambda: False, on_found=found.append, command=command)
    watching.start()
    await until(lambda: bool(found))
    await watching.stop()


async def test_a_probe_that_fails_is_a_line_in_the_log_and_forbids_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, models_dir: Path
) -> None:
    command = [sys.executable, "-c", "import sys; sys.exit('it cannot be: no memory')"]
    watching = Kernels(tmp_path, is_quiet=lambda: True, on_found=lambda verdict: pytest.fail("found"), command=command)
    probing = watching.start()
    assert probing is not None
    with caplog.at_level(logging.WARNING):
        await probing
    assert any("it cannot be: no memory" in line for line in caplog.messages)
    assert await watching.allow_quick(read_header(models_dir / "alpha.gguf"))
    await watching.stop()


async def test_stopping_ends_a_probe_that_runs(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    command = [sys.executable, "-c", f"open({str(mark)!r}, 'w'); import time; time.sleep(600)"]
    watching = Kernels(tmp_path, is_quiet=lambda: True, on_found=lambda verdict: None, command=command)
    watching.start()
    await until(mark.exists)
    await asyncio.wait_for(watching.stop(), 20)


async def test_what_cannot_be_kept_counts_until_the_daemon_ends(
    tmp_path: Path, models_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder, found = tmp_path / "a file", []
    folder.write_text("where the folder should be")
    header = read_header(models_dir / "alpha.gguf")
    weight_type = min({tensor.type_name for tensor in header.tensors} - {"F32"})
    fault = Fault(weight_type, "attention", "crash (SIGSEGV)")
    faulty = Verdict(is_probed=True, quick_types=(weight_type,), faults=(fault,))
    watching = Kernels(
        folder, is_quiet=lambda: True, on_found=found.append, command=writing(folder, faulty, tmp_path / "mark")
    )
    assert await watching.allow_quick(header)
    watching.start()
    with caplog.at_level(logging.WARNING):
        await until(lambda: bool(found))
    assert "cannot be kept" in caplog.text
    assert not await watching.allow_quick(header)
    await watching.stop()

    sound = Verdict(is_probed=True, quick_types=(weight_type,))
    command = writing(folder, sound, tmp_path / "another")
    unprobed = Kernels(folder, is_quiet=lambda: True, on_found=found.append, command=command)
    assert await unprobed.allow_quick(header)
    await unprobed.learn(header, "was killed by SIGSEGV", "alpha")
    assert not await unprobed.allow_quick(header)
    probing = unprobed.start()
    assert probing is not None
    await probing
    assert (tmp_path / "another").exists()
    assert not await unprobed.allow_quick(header), "a probe that finds nothing does not forget the crash"


async def test_what_an_engine_told_counts_for_the_next_load(tmp_path: Path, models_dir: Path) -> None:
    header = read_header(models_dir / "alpha.gguf")
    knowing = Kernels(tmp_path, is_quiet=lambda: True, on_found=lambda verdict: None)
    assert await knowing.allow_quick(header)
    await knowing.learn(header, "was killed by SIGSEGV", "alpha")
    assert not await knowing.allow_quick(header)
    pair = kernels.present_pair()
    assert pair is not None
    assert not kernels.read(tmp_path, pair).is_probed, "the probe is still to come"


async def test_fake_engines_are_asked_nothing(models_dir: Path) -> None:
    knowing = Kernels(None, is_quiet=lambda: True, on_found=lambda verdict: None, command=["/none"])
    knowing.start()
    assert await knowing.allow_quick(read_header(models_dir / "alpha.gguf"))
    await knowing.stop()


async def test_a_model_that_runs_with_wrong_kernels_is_unloaded_when_it_is_idle(supervising: Any) -> None:
    async with supervising() as (supervisor, watch):
        busy = await supervisor.acquire("alpha", None)
        idle = await supervisor.acquire("beta", None)
        idle.release()
        supervisor._on_kernels_found(FAULTY)
        await until(lambda: watch.ended == ["beta"])
        assert [row.model for row in supervisor.loaded()] == ["alpha"], "it still answers somebody"
        busy.release()
        await until(lambda: watch.ended == ["beta", "alpha"])
