"""Whose a file or a batch is, and on whose behalf its lines run. Without API keys everything is everybody's."""

from __future__ import annotations

from typing import Any

from localrun.server.http.exchange import Exchange


def owner_of(_: Exchange) -> str:
    """Who asks: others do not see what is this one's. Empty without keys."""
    return ""


def visitor_of(_: str) -> dict[str, Any]:
    """What the scope of a line's request says besides, so that it is charged to this owner and held to its limits."""
    return {}
