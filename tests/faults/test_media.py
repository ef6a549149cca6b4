"""Fault 43: pictures and recordings that are broken, lie about their size, or end what decodes them."""

from __future__ import annotations

import base64
import os
import random
import shutil
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

from localrun.models import builtin
from localrun.models.gguf.reader import read_header
from tests.daemon import Daemon, running_daemon
from tests.faults.postcondition import unharmed
from tests.faults.test_requests import refusal
from tests.projector_file import write_projector
from tests.server.media import making
from tests.server.media.test_decoder import BOMBS, mutated


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    folder = tmp_path_factory.mktemp("models")
    shutil.copy(builtin.model_path(), folder / "eyes.gguf")
    write_projector(folder / "mmproj-eyes.gguf", width=read_header(folder / "eyes.gguf").n_embd)
    with running_daemon(LOCALRUN_MODELS=str(folder)) as running:
        shown(running, making.png())  # from now on there is a worker
        yield running
        assert "Traceback" not in running.log


def shown(daemon: Daemon, data: bytes) -> Any:
    images = [base64.b64encode(data).decode()]
    return daemon.post(
        "/api/generate", model="eyes", prompt="x", images=images, stream=False, options={"num_predict": 2}
    )


def _worker(daemon: Daemon) -> int:
    """The media worker's process."""
    children = psutil.Process(daemon.process.pid).children()
    return next((child.pid for child in children if "localrun.server.media.worker" in child.cmdline()), 0)


def test_fault_43_broken_and_huge_pictures_are_refused_and_harm_nobody(daemon: Daemon) -> None:
    with unharmed(daemon):
        assert shown(daemon, making.png()).status_code == 200
        worker = _worker(daemon)
        for name, data in BOMBS.items():
            answer = shown(daemon, data)
            assert answer.status_code == 200 or refusal(answer).startswith("images[0]: "), name
        chance = random.Random(43)
        with ThreadPoolExecutor(8) as pool:
            for answer in pool.map(lambda data: shown(daemon, data), [mutated(chance) for _ in range(100)]):
                assert answer.status_code == 200 or refusal(answer).startswith("images[0]: ")
        assert _worker(daemon) == worker, "none of them ends it"


def test_fault_43_a_decoder_that_dies_is_replaced(daemon: Daemon) -> None:
    with unharmed(daemon):
        assert shown(daemon, making.png(8, 8)).status_code == 200
        worker = _worker(daemon)
        os.kill(worker, signal.SIGKILL)
        assert shown(daemon, making.png(9, 9)).status_code == 200
        assert _worker(daemon) not in (0, worker)


def test_fault_43_decoded_pictures_go_with_the_daemon(tmp_path: Path) -> None:
    shutil.copy(builtin.model_path(), tmp_path / "eyes.gguf")
    write_projector(tmp_path / "mmproj-eyes.gguf", width=read_header(tmp_path / "eyes.gguf").n_embd)
    with running_daemon(LOCALRUN_MODELS=str(tmp_path)) as killed:
        assert shown(killed, making.png()).status_code == 200
        folder = killed.home / "cache" / "media"
        assert len([path for path in folder.iterdir() if path.is_dir()]) == 1
        killed.stop(signal.SIGKILL)
        home = str(killed.home)
        with running_daemon(LOCALRUN_MODELS=str(tmp_path), LOCALRUN_HOME=home) as after:
            assert list(folder.iterdir()) == []
            assert shown(after, making.png()).status_code == 200
            after.stop()
        assert list(folder.iterdir()) == []
