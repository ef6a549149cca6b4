"""Ollama's routes for the document.

Pure data. Does not: serve them.
"""

from __future__ import annotations

from localrun.server.ollama.bodies import ModelBody
from localrun.server.ollama.changes import CopyBody
from localrun.server.ollama.chat_body import ChatBody
from localrun.server.ollama.create_body import CreateBody
from localrun.server.ollama.generate_body import GenerateBody
from localrun.server.ollama.pull import PullBody
from localrun.server.openapi import ollama_answers as answers
from localrun.server.openapi.operation import NDJSON, Family, Operation, Stream, path_parameter

_FAMILY = Family.OLLAMA
_TINY = {"model": "tiny"}
_DIGEST = path_parameter("digest", "`sha256:` and 64 hexadecimal digits", pattern="^sha256[:-][0-9a-f]{64}$")
_TASK = Stream(content_type=NDJSON, item=answers.Status, description="How far it is; a line for each step.")
_NAME = path_parameter("name", "Any name")

OPERATIONS = (
    Operation(
        family=_FAMILY, method="GET", path="/", summary="Is something there", answer=str,
        answer_content_type="text/plain", description="Says `Ollama is running`: editors look for these words.",
    ),
    Operation(family=_FAMILY, method="GET", path="/api/version", summary="The version of the API",
              answer=answers.OllamaVersion),
    Operation(family=_FAMILY, method="GET", path="/api/tags", summary="The models that are here", answer=answers.Tags),
    Operation(family=_FAMILY, method="GET", path="/api/ps", summary="The models that are loaded", answer=answers.Ps),
    Operation(
        family=_FAMILY, method="POST", path="/api/show", summary="All about one model", body=ModelBody,
        answer=answers.Show, errors=(404, 422), example=_TINY, description="Never loads the model.",
    ),
    Operation(
        family=_FAMILY, method="POST", path="/api/chat", summary="The next message of a conversation", body=ChatBody,
        description="Streams unless `stream` is false. Without messages the model is loaded, and with `keep_alive` 0 "
        "unloaded.",
        answer=answers.OllamaChat, serves=True,
        stream=Stream(content_type=NDJSON, item=answers.OllamaChat,
                      description="A line for each piece; the last has `done: true` and the counts."),
        example={"model": "tiny", "messages": [{"role": "user", "content": "What is 3 + 4?"}], "stream": False},
    ),
    Operation(
        family=_FAMILY, method="POST", path="/api/generate", summary="The answer to one prompt", body=GenerateBody,
        description="Streams unless `stream` is false. Without a prompt the model is loaded, and with `keep_alive` 0 "
        "unloaded. With `suffix` the middle is filled in.",
        answer=answers.OllamaGenerate, serves=True,
        stream=Stream(content_type=NDJSON, item=answers.OllamaGenerate,
                      description="A line for each piece; the last has `done: true` and the counts."),
        example={"model": "tiny", "prompt": "Tell me a story about a fox.", "stream": False},
    ),
    Operation(
        family=_FAMILY, method="POST", path="/api/pull", summary="Download a model", body=PullBody,
        description="Streams unless `stream` is false. However many ask for a model, it is fetched once. "
        "`username` and `password` are not read: localrun signs in to no registry.",
        answer=answers.Status, stream=_TASK, errors=(404, 409, 422, 502, 503, 507),
        example={"model": "qwen3:0.6b"},
    ),
    Operation(
        family=_FAMILY, method="POST", path="/api/create", summary="Make a model of another, or of uploaded files",
        body=CreateBody, description="Streams unless `stream` is false.", answer=answers.Status, stream=_TASK,
        errors=(404, 409, 422, 500, 507),
        example={"model": "fox", "from": "tiny", "system": "You tell stories about foxes."},
    ),
    Operation(family=_FAMILY, method="POST", path="/api/copy", summary="A second name for a model", body=CopyBody,
              errors=(404, 409, 422, 507), example={"source": "tiny", "destination": "little"}),
    Operation(family=_FAMILY, method="DELETE", path="/api/delete", summary="Remove a model", body=ModelBody,
              answer=answers.DeletedModel, errors=(404, 409), example={"model": "little"},
              description="Files that another name or program still uses stay."),
    Operation(family=_FAMILY, method="POST", path="/api/push", summary="Not supported: uploading a model",
              is_body_required=False, body=ModelBody, status=501,
              description="Always 501; the message says what to do instead."),
    Operation(family=_FAMILY, method="HEAD", path="/api/blobs/{digest}", summary="Is this uploaded file here",
              parameters=(_DIGEST,), errors=(400, 404)),
    Operation(family=_FAMILY, method="POST", path="/api/blobs/{digest}", summary="Upload a file for create",
              parameters=(_DIGEST,), body=bytes, body_content_type="application/octet-stream", is_body_required=False,
              other_statuses=(201,), errors=(400, 415, 502, 507),
              description="201 when it was new, 200 when it was here already."),
    Operation(family=_FAMILY, method="GET", path="/api/status", summary="Whether models run elsewhere: never",
              answer=answers.ServiceStatus),
    Operation(family=_FAMILY, method="POST", path="/api/me", summary="Who is signed in: nobody", status=401,
              description="Always 401: localrun has no accounts."),
    Operation(family=_FAMILY, method="POST", path="/api/signout", summary="Nothing to sign out of"),
    Operation(family=_FAMILY, method="GET", path="/api/experimental/{name}", status=501, parameters=(_NAME,),
              summary="Not supported: services of ollama.com"),
    Operation(family=_FAMILY, method="POST", path="/api/experimental/{name}", status=501, parameters=(_NAME,),
              summary="Not supported: services of ollama.com"),
)  # fmt: skip
