"""The daemon's own routes for the document.

Pure data. Does not: serve them.
"""

from __future__ import annotations

from typing import Any

from localrun.server.native.models import DEFAULT_LIMIT, MAX_LIMIT, MAX_QUERY_CHARS, GarbageBody
from localrun.server.native.routes import DEFAULT_HZ, MAX_HZ, MIN_HZ
from localrun.server.openapi import other_answers as answers
from localrun.server.openapi.operation import SSE, Family, Operation, Parameter, Stream, path_parameter
from localrun.snapshot import CacheCleared, CacheReport, LogLine, RequestRow, Snapshot

_FAMILY = Family.NATIVE
_ID = path_parameter("id", "The request's id, as answers have it in `X-Localrun-Request`")


def _model(description: str, *, is_required: bool = False) -> Parameter:
    """Empty is as if it were left out."""
    schema: dict[str, Any] = {"type": "string"} | ({"minLength": 1} if is_required else {})
    return Parameter(name="model", schema=schema, description=description, is_required=is_required)


_HZ: dict[str, Any] = {"type": "number", "minimum": MIN_HZ, "maximum": MAX_HZ}
_LIMIT: dict[str, Any] = {"type": "integer", "minimum": 1, "maximum": MAX_LIMIT}
_QUERY: dict[str, Any] = {"type": "string", "maxLength": MAX_QUERY_CHARS}

OPERATIONS = (
    Operation(family=_FAMILY, method="GET", path="/health", summary="Is the daemon up", answer=answers.Health,
              errors=(503,), description="503 while it is shutting down."),
    Operation(family=_FAMILY, method="GET", path="/localrun/v1/snapshot", summary="Everything at this moment",
              answer=Snapshot),
    Operation(
        family=_FAMILY, method="GET", path="/localrun/v1/events", summary="Snapshots as they come",
        parameters=(Parameter(name="hz", schema=_HZ | {"default": DEFAULT_HZ},
                              description="Snapshots a second"),),
        stream=Stream(content_type=SSE, item=Snapshot, description="Events named `snapshot`, until the client leaves."),
        errors=(400,),
    ),
    Operation(family=_FAMILY, method="GET", path="/localrun/v1/requests", summary="The requests of all clients",
              answer=answers.Requests),
    Operation(family=_FAMILY, method="GET", path="/localrun/v1/requests/{id}", summary="One request",
              parameters=(_ID,), answer=RequestRow, errors=(404,)),
    Operation(family=_FAMILY, method="DELETE", path="/localrun/v1/requests/{id}", summary="Cancel a request",
              parameters=(_ID,), answer=answers.CancelledRequest, errors=(404, 409)),
    Operation(family=_FAMILY, method="GET", path="/localrun/v1/cache", summary="What is kept of prompts",
              answer=CacheReport),
    Operation(
        family=_FAMILY, method="DELETE", path="/localrun/v1/cache", summary="Forget what is kept of prompts",
        parameters=(_model("Of this model alone"),
                    Parameter(name="tier", schema={"type": "string", "enum": ["ram", "disk", ""]},
                              description="In memory or on disk alone")),
        answer=CacheCleared, errors=(400, 404, 422),
    ),
    Operation(
        family=_FAMILY, method="GET", path="/localrun/v1/logs", summary="The daemon's log",
        parameters=(
            Parameter(name="since", schema={"type": "integer", "minimum": 0, "maximum": 10**18 - 1},
                      description="Lines after this number"),
            Parameter(name="follow", schema={"type": "string", "enum": ["0", "1"], "default": "1"},
                      description="0 ends after the lines there are"),
        ),
        stream=Stream(content_type=SSE, item=LogLine, description="Events named `log`, one for each line."),
        errors=(400,),
    ),
    Operation(family=_FAMILY, method="GET", path="/localrun/v1/fit", summary="How a model would be opened here",
              parameters=(_model("The model's name", is_required=True),), answer=answers.FitAnswer,
              errors=(400, 404, 422)),
    Operation(family=_FAMILY, method="GET", path="/localrun/v1/pulls", summary="Downloads", answer=answers.Pulls),
    Operation(family=_FAMILY, method="DELETE", path="/localrun/v1/pulls", summary="Cancel a download",
              parameters=(_model("The model's name, as it was asked for", is_required=True),),
              answer=answers.CancelledPull, errors=(400, 404)),
    Operation(family=_FAMILY, method="GET", path="/localrun/v1/catalog", summary="Models to pull by a short name",
              parameters=(_model("This entry alone"),), answer=answers.CatalogAnswer, errors=(400,)),
    Operation(
        family=_FAMILY, method="GET", path="/localrun/v1/search", summary="Models in the catalogue and on the hub",
        parameters=(Parameter(name="query", schema=_QUERY, description="Words; without any, the whole catalogue"),
                    Parameter(name="limit", schema=_LIMIT | {"default": DEFAULT_LIMIT},
                              description="Most repositories of the hub")),
        answer=answers.SearchAnswer, errors=(400,),
    ),
    Operation(family=_FAMILY, method="POST", path="/localrun/v1/gc", summary="Delete files that no model needs",
              body=GarbageBody, is_body_required=False, answer=answers.Collected, errors=(503,),
              example={"min_age_s": 3600}),
    Operation(family=_FAMILY, method="POST", path="/localrun/v1/shutdown", summary="End the daemon",
              answer=answers.Stopping, description="Running requests get a moment to end."),
    Operation(family=_FAMILY, method="GET", path="/metrics", summary="Metrics for Prometheus", answer=str,
              answer_content_type="text/plain"),
    Operation(family=_FAMILY, method="GET", path="/openapi.json", summary="This document", answer=dict[str, Any]),
    Operation(family=_FAMILY, method="GET", path="/docs", summary="This document for people", answer=str,
              answer_content_type="text/html"),
    Operation(family=_FAMILY, method="GET", path="/docs/editors/{name}", summary="How to set up an editor", answer=str,
              answer_content_type="text/html", parameters=(path_parameter("name", "As `/docs` lists them"),),
              errors=(404,)),
)  # fmt: skip
