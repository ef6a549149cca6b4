"""OpenAI's API: `/v1/*`.

Does not: hold any logic; each route's module does.
"""

from __future__ import annotations

from starlette.routing import Route

from localrun.server.http.endpoint import route
from localrun.server.openai import models as openai_models
from localrun.server.openai.chat import chat
from localrun.server.openai.completions import complete
from localrun.server.runtime import Runtime


def routes(runtime: Runtime) -> list[Route]:
    """All routes of this family."""
    return [
        route("/v1/models", runtime, openai_models.list_, methods=["GET"]),
        route("/v1/models/{id:path}", runtime, openai_models.one, methods=["GET"]),
        route("/v1/chat/completions", runtime, chat, methods=["POST"]),
        route("/v1/completions", runtime, complete, methods=["POST"]),
    ]
