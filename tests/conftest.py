"""Which tests run, and in which order; and kernels that are right on this processor, for all tests that open a model
themselves."""

from __future__ import annotations

import gc
import importlib.util
import os
import signal
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import httpcore2
import pytest
from hypothesis import settings

from localrun.doctor.kernel_probe import TIMEOUT_S, ProbeFailed, probe
from localrun.hardware.kernels import Verdict
from localrun.models.gguf.reader import read_header
from localrun.models.memory import memory_kind
from tests.depth import DEPTH

# A busy machine may stop any example for a second; what is slow shows in the durations. What a run finds, the next one
# of the same code finds again; `make test-deep` draws others each time.
settings.register_profile("localrun", deadline=None, derandomize=DEPTH == 1)
settings.load_profile("localrun")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--clients", action="store_true", help="run the suites of real clients; installs each of them")


def pytest_configure() -> None:
    """Programs in a shell's background are deaf to Ctrl-C and Ctrl-\\, and below `nohup` to a hangup. Children inherit
    that, and tests send all three."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if sys.platform != "win32":
        for number in (signal.SIGQUIT, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not (config.getoption("--clients") or os.environ.get("LOCALRUN_TEST_CLIENTS") == "1"):
        _skip(items, "clients", "installs packages: give --clients or LOCALRUN_TEST_CLIENTS=1")
    if importlib.util.find_spec("ray") is None:
        _skip(items, "cluster", "Ray is not installed: make test-cluster")
    if DEPTH == 1:
        _skip(items, "deep", "says in large what others say in small: make test-deep")
    # Each of several processes takes one file after the other. Files with slow tests first, and those of the terminal
    # interface, which are the longest of the others, or one process would be left alone with such a file at the end.
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: (item.path not in slow, "tui" not in item.path.parts))


def pytest_make_parametrize_id(val: object, argname: str) -> str | None:
    """A text of megabytes would stand in its test's name, which goes to other processes and into their environment."""
    return f"{argname} of {len(val)}" if isinstance(val, str | bytes) and len(val) > 200 else None


def _skip(items: list[pytest.Item], marker: str, reason: str) -> None:
    for item in items:
        if item.get_closest_marker(marker):
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(autouse=True, scope="session")
def authorities() -> Iterator[None]:
    """Clients of tests read all certificates of the system once: for each of them it would take 16 ms."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(httpcore2, "default_ssl_context", cache(httpcore2.default_ssl_context))
        yield


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    """What was collected stays until the end: no garbage collection needs to look through it again. Those of what tests
    leave would take a sixth of the processor's time if they came as often as usual."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 20, 50)


@cache
def _verdict() -> Verdict | ProbeFailed:
    """One that failed is remembered, too. LOCALRUN_TEST_PATIENCE is for emulators: so many times the usual limit."""
    try:
        return probe(timeout_s=TIMEOUT_S * float(os.environ.get("LOCALRUN_TEST_PATIENCE", "1")))
    except ProbeFailed as error:
        return error


@pytest.fixture(scope="session")
def sound_kernels() -> Iterator[None]:
    """Models that tests open by themselves do without quick kernels that crash or compute nonsense here, as they would
    in the daemon. Where all are right, and that is found out by the first model, this changes nothing."""
    from localrun.engine.native import embedder as embedding
    from localrun.engine.native import llama
    from localrun.engine.native.model import load_model

    def load(path: str, n_gpu_layers: int, *, use_extra_bufts: bool = True, with_heads: bool = False) -> Any:
        header = read_header(Path(path))
        types = {tensor.type_name for tensor in header.tensors}
        verdict = _verdict()
        if isinstance(verdict, ProbeFailed):
            raise verdict
        is_right = verdict.allows_quick(types, memory_kind(header))
        return load_model(path, n_gpu_layers, use_extra_bufts=use_extra_bufts and is_right, with_heads=with_heads)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(llama, "load_model", load)
        patch.setattr(embedding, "load_model", load)
        yield
