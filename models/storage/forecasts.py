"""What `localrun plan` found out about a model on this machine, in a line: for whoever lists models."""

from __future__ import annotations

from pathlib import Path

import msgspec

from localrun import config, stored

FOLDER = "forecasts"


class Forecast(msgspec.Struct, frozen=True, kw_only=True):
    """So many chats at once, each with so many tokens per second; `made_at` is when that was found out."""

    chats: int
    tokens_per_s: float
    made_at: str


def keep(digest: str, forecast: Forecast) -> None:
    """Of the model with this digest. Raises OSError."""
    stored.write(_path(digest), forecast)


def kept(digest: str) -> Forecast | None:
    return stored.read(_path(digest), _decoder)


def _path(digest: str) -> Path:
    return config.folders().data / FOLDER / f"{digest.removeprefix('sha256:')}.json"


_decoder = msgspec.json.Decoder(Forecast)
