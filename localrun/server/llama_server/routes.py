"""llama-server's own routes, with its fields and the shapes of its answers.

A llama-server has one model, and its clients name none. Here `model`, in the body or the query, chooses; without it
`targets.py` does.
"""

from __future__ import annotations

from starlette.routing import Route

from localrun.server.http.exchange import route
from localrun.server.llama_server.completion import complete
from localrun.server.llama_server.infill import complete_infill
from localrun.server.llama_server.models import load, unload
from localrun.server.llama_server.props import keep_slot, list_slots, show_props
from localrun.server.llama_server.tokens import apply_template, detokenize, tokenize, tokenizer_info
from localrun.server.runtime import Runtime


def routes(runtime: Runtime) -> list[Route]:
    """All routes of this family."""
    return [
        route("/completion", runtime, complete, methods=["POST"]),
        route("/completions", runtime, complete, methods=["POST"]),
        route("/infill", runtime, complete_infill, methods=["POST"]),
        route("/tokenize", runtime, tokenize, methods=["POST"]),
        route("/detokenize", runtime, detokenize, methods=["POST"]),
        route("/tokenizer_info", runtime, tokenizer_info, methods=["GET"]),
        route("/apply-template", runtime, apply_template, methods=["POST"]),
        route("/models/load", runtime, load, methods=["POST"]),
        route("/models/unload", runtime, unload, methods=["POST"]),
        route("/props", runtime, show_props, methods=["GET"]),
        route("/slots", runtime, list_slots, methods=["GET"]),
        route("/slots/{id}", runtime, keep_slot, methods=["POST"]),
    ]
