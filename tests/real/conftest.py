"""The models of `packages.py` with plain llama.cpp's answers, computed once, and what came of every comparison.

`make test-real` fetches the models and runs this folder with `LOCALRUN_REAL=core`: fifteen of the forty prompts, and
answers of 24 tokens. `make test-real REAL=all` takes all prompts and 48 tokens. Without the variable nothing here runs.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from functools import cached_property
from pathlib import Path

import pytest

from tests.real import packages
from tests.real.plain import Plain
from tests.real.prompts import prompts, rendered
from tests.real.runner import Runner
from tests.real.verdict import ALONE, Verdict, judge

HOW_MUCH = os.environ.get("LOCALRUN_REAL", "")
N_THREADS = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
N_CTX = 4096
N_TOKENS = 48 if HOW_MUCH == "all" else 24
# Eight slots, each with room for the longest prompt and its answer.
N_CELLS = 8 * 1408

_said: list[str] = []


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if HOW_MUCH not in ("core", "all"):
        here = Path(__file__).parent
        for item in items:
            if here in item.path.parents:
                item.add_marker(pytest.mark.skip(reason="needs real models: make test-real"))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for text in _said:
        terminalreporter.write_line(text)


@pytest.fixture(scope="session")
def say() -> Callable[[str], None]:
    """A line for the end of the run."""
    return _said.append


class RealModel:
    """A model file, its prompts, and plain llama.cpp on it."""

    def __init__(self, package: packages.Package) -> None:
        self.name = package.model
        self.path = packages.model_file(package)
        self.is_window = package is packages.GEMMA3
        self.plain = self.open_plain("f16")
        chosen = [prompt for prompt in prompts() if prompt.core or HOW_MUCH == "all"]
        self.prompts = [self.plain.tokenize(rendered(self.name, prompt)) for prompt in chosen]

    def open_plain(self, kv_type: str) -> Plain:
        return Plain(self.path, n_ctx=N_CTX, n_threads=N_THREADS, kv_type=kv_type)

    def run(self, **options: object) -> Runner:
        """An engine with room for all prompts, eight at once."""
        return Runner(self.path, **{"n_threads": N_THREADS, "n_cells": N_CELLS, **options})  # type: ignore[arg-type]

    @cached_property
    def expected(self) -> list[list[int]]:
        """Plain llama.cpp's answers to the prompts."""
        return [self.plain.greedy(prompt, N_TOKENS, ALONE) for prompt in self.prompts]

    def judge(self, mode: str, answers: list[list[int]], *, together: bool = False) -> Verdict:
        """The answers to all prompts."""
        return judge(f"{self.name}, {mode}", self.plain, self.prompts, answers, self.expected, together=together)


@pytest.fixture(scope="session", params=packages.PACKAGES, ids=lambda package: package.model)
def model(request: pytest.FixtureRequest) -> Iterator[RealModel]:
    opened = RealModel(request.param)
    yield opened
    opened.plain.close()
