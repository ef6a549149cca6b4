"""OpenAI's API: `/v1/*`, and beside it llama-server's `/infill`.

Does not: hold any logic; each route's module does.
"""

from __future__ import annotations

from starlette.routing import Route

from localrun.server.http.exchange import route
from localrun.server.openai import infill
from localrun.server.openai import models as openai_models
from localrun.server.openai.chat import chat
from localrun.server.openai.completions import complete
from localrun.server.openai.fim import fill_in
from localrun.server.openai.responses import routes as response_routes
from localrun.server.runtime import Runtime


def routes(runtime: Runtime) -> list[Route]:
    """All routes of this family."""
    return [
        route("/v1/models", runtime, openai_models.list_, methods=["GET"]),
        route("/v1/models/{id:path}", runtime, openai_models.one, methods=["GET"]),
        route("/v1/chat/completions", runtime, chat, methods=["POST"]),
        route("/v1/completions", runtime, complete, methods=["POST"]),
        route("/v1/fim/completions", runtime, fill_in, methods=["POST"]),
        route("/infill", runtime, infill.fill_in, methods=["POST"]),
        *response_routes.routes(runtime),
    ]
