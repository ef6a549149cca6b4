from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from localrun.bench.arrivals import Limits
from localrun.plan import report
from localrun.plan.calibration import Calibration, Check, fitted
from localrun.plan.costs import WaitCosts
from localrun.plan.search import Point, Search, WhatIf, what_if
from tests.plan.made import costs, layout, setup
from tests.plan.test_search import alike

MADE = Calibration(
    made_at="2026-11-24T02:34:00+00:00", machine="made", model="m", build="b", layout=layout(), costs=costs(),
    median_error=0.04, worst_error=0.13, others=0.0,
)  # fmt: skip


@pytest.fixture(scope="module")
def search() -> Search:
    return Search(alike(200, 20), Limits())


@pytest.fixture(scope="module")
def carried(search: Search) -> Point:
    return search.carries(setup())


@pytest.fixture(scope="module")
def found(carried: Point) -> WhatIf:
    return what_if(Search(alike(200, 20), Limits()), setup(), carried)


def test_the_rate_that_is_carried_is_marked(search: Search, carried: Point) -> None:
    header, *lines = report.points_table(search.points, carried, search.limits)
    assert header.split()[:2] == ["users", "requests/s"]
    assert len(lines) <= 6
    (marked,) = (line for line in lines if line.startswith(">"))
    assert f"{carried.rate_per_s:.3g}" in marked
    assert any("below 95%" in line for line in lines)


def test_what_breaks_first_comes_with_what_one_change_brings(found: WhatIf, carried: Point) -> None:
    text = "\n".join(report.what_if_lines(found, carried))
    assert text.startswith("what breaks first: ")
    assert f"{report.amount(carried)} -> " in text
    assert "(simulated)" in text
    assert sum(carried.spent.values()) == pytest.approx(1)
    assert "%" in report.where_time_goes(carried)[0]


def test_what_could_not_be_answered_is_said(carried: Point) -> None:
    assert "answered" not in "\n".join(report.where_time_goes(carried))
    point = msgspec.structs.replace(carried, n_failed=2, problem="the prompt has 5000 tokens")
    assert report.where_time_goes(point)[-1] == "  2 requests could not be answered: the prompt has 5000 tokens"


def test_where_no_setting_helps_it_says_what_was_tried(found: WhatIf, carried: Point) -> None:
    found = msgspec.structs.replace(found, best=None)
    (line,) = (line for line in report.what_if_lines(found, carried) if line.startswith("no change"))
    assert line == "no change of a setting carries more; tried: " + ", ".join(each.words for each in found.settings)


def test_a_calibration_says_whether_it_was_checked() -> None:
    assert "never checked" in report.basis_lines(MADE)[-1]
    check = Check(at="", workload="chat", rate_per_s=0.5, errors={"ttft_p95_s": 0.114, "tokens_per_s": -0.02}, others=0)
    said = report.basis_lines(msgspec.structs.replace(MADE, checks=(check,), others=0.9))
    assert "ttft p95 +11%, throughput -2%" in said[-1]
    assert "other programs took 0.9 processors" in said[1]


@pytest.mark.parametrize(("value", "text"), [(0.1234, "0.12"), (1.26, "1.3"), (35.4, "35"), (3512.0, "3500"), (0, "0")])
def test_rooflines_have_two_digits(value: float, text: str) -> None:
    assert report.two_digits(value) == text


def test_a_roofline_never_comes_without_a_band(carried: Point) -> None:
    text = report.band(carried, carried, carried)  # as if nothing were uncertain
    assert carried.users is not None
    low, high = report.two_digits(0.65 * carried.users), report.two_digits(1.35 * carried.users)
    assert text == f"{low} to {high} users (roofline)"


def test_costs_are_fitted_from_what_an_engine_says() -> None:
    from localrun.plan.calibration import _Line

    lines = [_Line("streams", n, 100 * n, 0.004 + 0.001 * n, 0.05) for n in (1, 4)]
    lines += [_Line(phase, n, 0, 0.001 * n, 0.1) for phase in ("background", "beside") for n in (8, 64)]
    for n_rows, batch_s in ((512, 0.8), (128, 0.2)):
        lines += [_Line("waits", n_rows, 0, batch_s, 0.1, (0.002, 0.01 * batch_s, 0.02))]
        lines += [_Line("batch", n_rows, 0, 1.2 * batch_s, 0.1)]
    lines += [_Line("copy", 1, 256, 0.002, 0.1), _Line("copy", 1, 2048, 0.016, 0.1)]
    lines += [_Line("save", 1, 256, 0.003, 0.1), _Line("save", 1, 2048, 0.1, 0.1)]
    found, median_error, _ = fitted(lines, layout())
    assert median_error == pytest.approx(0, abs=1e-6)
    assert found.cold == pytest.approx(1.2)
    assert found.waits == WaitCosts((0.2, 0.8), ((0.002, 0.002, 0.02), (0.002, 0.008, 0.02)))
    assert found.copy_token_s * 1792 == pytest.approx(0.014)
    assert found.save_token_s * 1792 == pytest.approx(0.097)
    assert found.sigma == 0.05


@pytest.mark.parametrize(("rate", "per_million"), [(10_000.0, "0.278"), (1_000.0, "2.78")])
def test_an_hour_has_3600_seconds(carried: Point, rate: float, per_million: str) -> None:
    """10 an hour at 10,000 tokens/s: 10 / (10,000 * 3,600) * 10**6."""
    lines = report.cost_lines(msgspec.structs.replace(carried, tokens_per_s=rate), 10.0, watts=None)
    assert lines[0].startswith(f"costs 10 an hour; {per_million} per million tokens")


def test_prompts_and_answers_together_cost_what_the_hour_costs(carried: Point) -> None:
    point = msgspec.structs.replace(carried, tokens_per_s=100.0, prompt_tokens_per_s=1000.0)
    _, apart, energy = report.cost_lines(point, 7.2, watts=720.0)
    read, written = (float(word) for word in apart.split() if word[0].isdigit())
    assert read * 1000 * 3600 / 1e6 + written * 100 * 3600 / 1e6 == pytest.approx(7.2, rel=0.01)
    assert energy.split()[0] == "2"  # 0.72 kW for 10,000 s


def test_the_curve_is_drawn_with_its_knee(search: Search, carried: Point, tmp_path: Path) -> None:
    text = "\n".join(report.chart(search.points, carried))
    assert "first token p95" in text
    assert "requests per second" in text
    assert report.chart(search.points[:1], carried) == []
    pytest.importorskip("matplotlib")
    report.plot(tmp_path / "curve.png", search.points, carried, "made")
    assert (tmp_path / "curve.png").read_bytes()[:4] == b"\x89PNG"
