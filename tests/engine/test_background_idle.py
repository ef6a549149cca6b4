"""The main thread never goes round for nothing beside the background."""

from __future__ import annotations

import pytest

from tests.engine.harness import Harness, expected_output

LONG = [97 + at % 20 for at in range(200)]


@pytest.mark.parametrize("has_short_prompts", [False, True])
@pytest.mark.parametrize(("target_itl_s", "batch_s"), [(0.01, 0.0), (0.026, 0.0), (0.06, 0.04)])
def test_every_step_with_a_finished_batch_computes_something(
    target_itl_s: float, batch_s: float, has_short_prompts: bool, monkeypatch: pytest.MonkeyPatch
):
    """Also those that leave a finished prompt lying because the streams' turn is near."""
    run = Harness(
        n_cells=1024,
        n_slots=4,
        n_batch=64,
        is_split=True,
        n_background_seqs=2,
        background_looks=1,
        target_itl_s=target_itl_s,
    )
    run.submit(0, [65] * 20, n_predict=300)
    while len(run.tokens.get(0, [])) < 3:
        run.step()
    background, n_left_lying = run.engine.background, 0
    is_turn_near = run.engine.scheduler.is_turn_near

    def counted(now_s: float, within_s: float) -> bool:
        nonlocal n_left_lying
        is_near = is_turn_near(now_s, within_s)
        n_left_lying += is_near
        return is_near

    monkeypatch.setattr(run.engine.scheduler, "is_turn_near", counted)
    for request_id in range(1, 13):
        run.submit(request_id, [*[70 + request_id] * 5, *LONG], n_predict=2)
        if has_short_prompts:
            run.submit(100 + request_id, [80 + request_id] * 30, n_predict=2)
        while request_id not in run.finals:
            is_over = background.is_busy and run.backend.worker.n_looks_left <= 1
            n_rows = run.backend.n_rows_computed
            run.now_s += batch_s if is_over else 0.0
            run.step()
            assert not is_over or run.backend.n_rows_computed > n_rows
    assert n_left_lying > 0
    assert run.tokens[12] == expected_output([*[82] * 5, *LONG], 2)
