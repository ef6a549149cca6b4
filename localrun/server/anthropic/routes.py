"""Anthropic's routes.

Does not: hold any logic; each route's module does.
"""

from __future__ import annotations

from starlette.routing import Route

from localrun.server.anthropic.count_tokens import count_tokens
from localrun.server.anthropic.messages import create
from localrun.server.http.exchange import route
from localrun.server.runtime import Runtime


def routes(runtime: Runtime) -> list[Route]:
    """All routes of this family."""
    return [
        route("/v1/messages", runtime, create, methods=["POST"]),
        route("/v1/messages/count_tokens", runtime, count_tokens, methods=["POST"]),
    ]
