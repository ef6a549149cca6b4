from __future__ import annotations

from pathlib import Path

import pytest

from localrun import config
from localrun.models.storage.model import FORECASTS, Forecast, keep_forecast, kept_forecast

MADE = Forecast(chats=11, tokens_per_s=9.6, made_at="2026-11-24T02:34:00+00:00")


def test_a_forecast_is_of_one_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCALRUN_HOME", str(tmp_path))
    keep_forecast("sha256:" + 64 * "a", MADE)
    assert kept_forecast("sha256:" + 64 * "a") == MADE
    assert kept_forecast("sha256:" + 64 * "b") is None
    (config.folders().data / FORECASTS / f"{64 * 'a'}.json").write_text("{")
    assert kept_forecast("sha256:" + 64 * "a") is None
