"""Machines and workloads for the planner's tests."""

from __future__ import annotations

from typing import Any

from localrun.bench.arrivals import Limits, Session, Turn, Workload
from localrun.plan.backend import Layout
from localrun.plan.costs import Costs, PromptCosts, StreamCosts
from localrun.plan.replica import Setup

FREE = PromptCosts(0.0, 0.0, 0.0)


def layout(**changed: Any) -> Layout:
    return Layout(**{"slots": 4, "n_cells": 16384, "n_ctx_train": 1 << 20, "state_token_bytes": 1024} | changed)


def costs(**changed: Any) -> Costs:
    """A step takes 10 ms, prompts 0.5 ms a row, nothing else anything."""
    usual: dict[str, Any] = {
        "streams": StreamCosts((1, 8), (0.010, 0.012), (1e-6, 1e-6)),
        "background": PromptCosts(0.0, 5e-4, 0.0),
        "beside": PromptCosts(0.001, 5e-4, 0.0),
        "rebuild_s": 0.0,
        "host_s": 0.0,
    }
    return Costs(**usual | changed)


def setup(*, of: Costs | None = None, target_itl_s: float = 0.14, **changed: Any) -> Setup:
    return Setup(layout(**changed), of or costs(), target_itl_s, 64 << 20, 256)


def turn(name: str, n_prompt: int, n_output: int, *, think_s: float = 0.0) -> Turn:
    return Turn(((name, n_prompt),), n_output, think_s)


def workload(sessions: list[Session], limits: Limits | None = None, think_s: float | None = 30.0) -> Workload:
    return Workload("made", "made for a test", limits or Limits(), lambda _n, _seed: sessions, think_s)
