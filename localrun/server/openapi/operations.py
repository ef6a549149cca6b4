"""All routes, for the document: Ollama's, OpenAI's with those of Mistral and llama-server that fill in the middle,
Anthropic's, LM Studio's, embeddings and reranking, and the daemon's own.

Pure data. Does not: serve them.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from localrun.access.usage import BY
from localrun.server.anthropic.body import CountBody, MessagesBody
from localrun.server.anthropic.messages import CountedTokens
from localrun.server.batches.anthropic import (
    MessageBatch,
    MessageBatchDeleted,
    MessageBatches,
    MessageBatchesBody,
    MessageBatchResult,
)
from localrun.server.batches.openai import BatchBody, Batches, BatchObject, FileDeleted, FileObject, Files
from localrun.server.embedding.bodies import EmbedBody, EmbeddingsBody, LegacyEmbeddingsBody, RerankBody
from localrun.server.embedding.routes import LegacyEmbedding, Ranking, ScoredText, VectorRow
from localrun.server.llama_server.completion import LlamaCompletionBody
from localrun.server.llama_server.infill import InfillBody
from localrun.server.llama_server.models import Done, NamedModel
from localrun.server.llama_server.props import LlamaProps, LlamaSlot
from localrun.server.llama_server.tokens import (
    DetokenizeBody,
    Detokenized,
    RenderedPrompt,
    TemplateBody,
    TokenizeBody,
    Tokenized,
    TokenizerInfo,
)
from localrun.server.lm_studio.routes import (
    LmStudioChatBody,
    LmStudioCompletionBody,
    LmStudioModel,
    LmStudioModels,
)
from localrun.server.native.models import (
    DEFAULT_LIMIT,
    MAX_LIMIT,
    MAX_QUERY_CHARS,
    CancelledPull,
    CatalogAnswer,
    Collected,
    FitAnswer,
    GarbageBody,
    Pulls,
    SearchAnswer,
)
from localrun.server.native.routes import DEFAULT_HZ, MAX_HZ, MIN_HZ, CancelledRequest, Health, Requests, Stopping
from localrun.server.native.usage import DEFAULT_DAYS, MAX_DAYS
from localrun.server.ollama.bodies import ChatBody as OllamaChatBody
from localrun.server.ollama.bodies import GenerateBody, ModelBody
from localrun.server.ollama.create import CreateBody
from localrun.server.ollama.models import Ps, Show, Tags
from localrun.server.ollama.routes import OllamaVersion, ServiceStatus
from localrun.server.ollama.store import CopyBody, DeletedModel, PullBody
from localrun.server.openai.chat import ChatBody, InputTokens
from localrun.server.openai.completions import CompletionBody, FimBody
from localrun.server.openai.lora import AdapterRow
from localrun.server.openai.responses.body import ResponsesBody
from localrun.server.openai.responses.create import ResponseDeleted, ResponseItems
from localrun.server.openai.routes import OpenAIModel, OpenAIModels
from localrun.server.openapi.answers import (
    AnthropicEvent,
    AnthropicMessage,
    ChatCompletion,
    ChatCompletionChunk,
    Completion,
    Embeddings,
    LlamaCompletion,
    LmStudioChat,
    LmStudioChatChunk,
    LmStudioCompletion,
    OllamaChat,
    OllamaEmbeddings,
    OllamaGenerate,
    ResponseEvent,
    ResponseObject,
    Status,
)
from localrun.server.openapi.operation import NDJSON, SSE, Family, Operation, Parameter, Stream, path_parameter
from localrun.server.web import FILES
from localrun.snapshot import CacheCleared, CacheReport, LogLine, RequestRow, Snapshot, UsageReport

_TINY = {"model": "tiny"}
_DIGEST = path_parameter("digest", "`sha256:` and 64 hexadecimal digits", pattern="^sha256[:-][0-9a-f]{64}$")
_TASK = Stream(content_type=NDJSON, item=Status, description="How far it is; a line for each step.")
_NAME = path_parameter("name", "Any name")

_OLLAMA = (
    Operation(
        method="GET", path="/", summary="Is something there", answer=str,
        answer_content_type="text/plain", description="Says `Ollama is running`: editors look for these words. "
        "A browser, which asks for `text/html`, gets the chat page.",
    ),
    Operation(method="GET", path="/api/version", summary="The version of the API",
              answer=OllamaVersion),
    Operation(method="GET", path="/api/tags", summary="The models and adapters that are here", answer=Tags),
    Operation(method="GET", path="/api/ps", summary="The models that are loaded", answer=Ps),
    Operation(
        method="POST", path="/api/show", summary="All about one model", body=ModelBody,
        answer=Show, errors=(404, 422), example=_TINY,
        description="Never loads the model. Also of an adapter, which has its facts under `localrun`.",
    ),
    Operation(
        method="POST", path="/api/chat", summary="The next message of a conversation", body=OllamaChatBody,
        description="Streams unless `stream` is false. Without messages the model is loaded, and with `keep_alive` 0 "
        "unloaded.",
        answer=OllamaChat, serves=True,
        stream=Stream(content_type=NDJSON, item=OllamaChat,
                      description="A line for each piece; the last has `done: true` and the counts."),
        example={"model": "tiny", "messages": [{"role": "user", "content": "What is 3 + 4?"}], "stream": False},
    ),
    Operation(
        method="POST", path="/api/generate", summary="The answer to one prompt", body=GenerateBody,
        description="Streams unless `stream` is false. Without a prompt the model is loaded, and with `keep_alive` 0 "
        "unloaded. With `suffix` the middle is filled in.",
        answer=OllamaGenerate, serves=True,
        stream=Stream(content_type=NDJSON, item=OllamaGenerate,
                      description="A line for each piece; the last has `done: true` and the counts."),
        example={"model": "tiny", "prompt": "Tell me a story about a fox.", "stream": False},
    ),
    Operation(
        method="POST", path="/api/pull", summary="Download a model", body=PullBody,
        description="Streams unless `stream` is false. However many ask for a model, it is fetched once. "
        "`username` and `password` are not read: localrun signs in to no registry.",
        answer=Status, stream=_TASK, errors=(404, 409, 422, 502, 503, 507),
        example={"model": "qwen3:0.6b"},
    ),
    Operation(
        method="POST", path="/api/create", summary="Make a model of another, or of uploaded files",
        body=CreateBody,
        description="Streams unless `stream` is false. An adapter alone, as `from`, in `files` or in `adapters`, gets "
        "a name of its own.",
        answer=Status, stream=_TASK,
        errors=(404, 409, 422, 500, 507),
        example={"model": "fox", "from": "tiny", "system": "You tell stories about foxes."},
    ),
    Operation(method="POST", path="/api/copy", summary="A second name for a model", body=CopyBody,
              errors=(404, 409, 422, 507), example={"source": "tiny", "destination": "little"}),
    Operation(method="DELETE", path="/api/delete", summary="Remove a model", body=ModelBody,
              answer=DeletedModel, errors=(404, 409), example={"model": "little"},
              description="Files that another name or program still uses stay."),
    Operation(method="POST", path="/api/push", summary="Not supported: uploading a model",
              is_body_required=False, body=ModelBody, status=501,
              description="Always 501; the message says what to do instead."),
    Operation(method="HEAD", path="/api/blobs/{digest}", summary="Is this uploaded file here",
              parameters=(_DIGEST,), errors=(400, 404)),
    Operation(method="POST", path="/api/blobs/{digest}", summary="Upload a file for create",
              parameters=(_DIGEST,), body=bytes, body_content_type="application/octet-stream", is_body_required=False,
              other_statuses=(201,), errors=(400, 415, 502, 507),
              description="201 when it was new, 200 when it was here already."),
    Operation(method="GET", path="/api/status", summary="Whether models run elsewhere: never",
              answer=ServiceStatus),
    Operation(method="POST", path="/api/me", summary="Who is signed in: nobody", status=401,
              description="Always 401: localrun has no accounts."),
    Operation(method="POST", path="/api/signout", summary="Nothing to sign out of"),
    Operation(method="GET", path="/api/experimental/{name}", status=501, parameters=(_NAME,),
              summary="Not supported: services of ollama.com"),
    Operation(method="POST", path="/api/experimental/{name}", status=501, parameters=(_NAME,),
              summary="Not supported: services of ollama.com"),
)  # fmt: skip


_ASK = [{"role": "user", "content": "What is 3 + 4?"}]
_RESPONSE = path_parameter("id", "The response's id")
_FILE = path_parameter("id", "The file's id")
_BATCH = path_parameter("id", "The batch's id")


def _page(after: str, default: int, most: int) -> tuple[Parameter, ...]:
    limit = {"type": "integer", "minimum": 1, "maximum": most, "default": default}
    return (
        Parameter(name=after, description="The page after this one"),
        Parameter(name="limit", schema=limit, description="Most rows"),
    )


def _model(description: str, *, is_required: bool = False) -> Parameter:
    """Empty is as if it were left out."""
    schema: dict[str, Any] = {"type": "string"} | ({"minLength": 1} if is_required else {})
    return Parameter(name="model", schema=schema, description=description, is_required=is_required)


def _events(item: object, what: str) -> Stream:
    return Stream(content_type=SSE, item=item, description=what)


_LOADED = "Without `model` the loaded one that answered last does, else the one that was loaded last, or the only one."
_COUNTS = "By the model's own tokenizer and template. Loads the model; generates nothing."
_CHUNKS = "With `stream`: server-sent events, each with a chunk as its data; the last one is `[DONE]`."

_OPENAI = (
    *(
        Operation(method="GET", path=path, summary="The models that are here",
                  answer=OpenAIModels,
                  description="After the models come those with an adapter that fits, as `model+adapter` with the "
                  "model as `parent`, up to 256.")
        for path in ("/v1/models", "/models")
    ),
    Operation(method="GET", path="/v1/models/{id}", summary="One model", answer=OpenAIModel,
              parameters=(path_parameter("id", "The model's name; it may have slashes"),), errors=(400, 404, 422)),
    Operation(
        method="POST", path="/v1/chat/completions", summary="The next message of a conversation",
        body=ChatBody, answer=ChatCompletion, serves=True,
        stream=_events(ChatCompletionChunk, _CHUNKS),
        example={"model": "tiny", "messages": _ASK},
    ),
    Operation(
        method="POST", path="/v1/chat/completions/input_tokens", summary="How long a chat's prompt would be",
        body=ChatBody, answer=InputTokens, serves=True, description=_COUNTS,
        example={"model": "tiny", "messages": _ASK},
    ),
    Operation(
        method="POST", path="/v1/completions", summary="What follows a text", body=CompletionBody,
        answer=Completion, serves=True, stream=_events(Completion, _CHUNKS),
        example={"model": "tiny", "prompt": "Once upon a time", "max_tokens": 16},
    ),
    Operation(
        method="POST", path="/v1/responses", summary="A response, in OpenAI's newer form",
        body=ResponsesBody, answer=ResponseObject, serves=True,
        stream=_events(ResponseEvent,
                       "With `stream`: server-sent events named by their type, each with its number."),
        example={"model": "tiny", "input": "What is 3 + 4?"},
    ),
    Operation(
        method="POST", path="/v1/responses/input_tokens", summary="How long a response's prompt would be",
        body=ResponsesBody, answer=InputTokens, serves=True, description=_COUNTS,
        example={"model": "tiny", "input": "What is 3 + 4?"},
    ),
    Operation(method="GET", path="/v1/responses/{id}", summary="A response that was kept",
              parameters=(_RESPONSE,), answer=ResponseObject, errors=(404,)),
    Operation(method="DELETE", path="/v1/responses/{id}", summary="Forget a response",
              parameters=(_RESPONSE,), answer=ResponseDeleted, errors=(404,)),
    Operation(method="GET", path="/v1/responses/{id}/input_items", summary="What a response answered",
              parameters=(_RESPONSE,), answer=ResponseItems, errors=(404,)),
    Operation(
        method="POST", path="/v1/fim/completions", summary="Fill in the middle, as Mistral has it",
        body=FimBody, answer=ChatCompletion, serves=True,
        stream=_events(ChatCompletionChunk, _CHUNKS),
        example={"model": "a-model-with-fim-tokens", "prompt": "def add(a, b):\n    ", "suffix": "\n    return c"},
    ),
    Operation(
        method="GET", path="/lora-adapters", summary="The adapters that are here, as llama-server has it",
        answer=list[AdapterRow], parameters=(_model("Those that fit this model, under the same ids"),),
        errors=(400, 404, 422),
        description="LoRA files and control vectors, oldest first. Requests name them in `lora`, or in the model's "
        "name: `model+adapter=0.5`.",
    ),
    Operation(
        method="POST", path="/lora-adapters", status=501, is_body_required=False,
        summary="Not supported: scales for all requests",
        description="Always 501: they would change other clients' answers. Say them in the request.",
    ),
    Operation(
        method="POST", path="/v1/files", summary="Upload a file", body=bytes, body_content_type="multipart/form-data",
        answer=FileObject, errors=(503, 507), is_body_required=False,
        description="A form with `file` and `purpose`, which is `batch` for the requests of a batch, and if it is to "
        "be deleted `expires_after[anchor]` (`created_at`) and `expires_after[seconds]`.",
    ),
    Operation(method="GET", path="/v1/files", summary="The files that are here", answer=Files,
              parameters=(*_page("after", 10_000, 10_000),
                          Parameter(name="order", schema={"type": "string", "enum": ["asc", "desc", ""]},
                                    description="By time; desc without it"),
                          Parameter(name="purpose", description="Those of this purpose alone")),
              errors=(400, 404, 503)),
    Operation(method="GET", path="/v1/files/{id}", summary="One file", parameters=(_FILE,), answer=FileObject,
              errors=(404, 503)),
    Operation(method="DELETE", path="/v1/files/{id}", summary="Delete a file", parameters=(_FILE,),
              answer=FileDeleted, errors=(404, 409, 503)),
    Operation(method="GET", path="/v1/files/{id}/content", summary="What is in a file", parameters=(_FILE,),
              answer=str, answer_content_type="application/octet-stream", errors=(404, 503)),
    Operation(
        method="POST", path="/v1/batches", summary="Compute a file of requests", body=BatchBody, answer=BatchObject,
        errors=(404, 503, 507),
        description="The lines run in the lane batch, beside other requests, and go on after a restart.",
        example={"input_file_id": "file-1", "endpoint": "/v1/chat/completions", "completion_window": "24h"},
    ),
    Operation(method="GET", path="/v1/batches", summary="The batches, newest first", answer=Batches,
              parameters=_page("after", 20, 100), errors=(400, 404, 503)),
    Operation(method="GET", path="/v1/batches/{id}", summary="One batch", parameters=(_BATCH,), answer=BatchObject,
              errors=(404, 503)),
    Operation(method="POST", path="/v1/batches/{id}/cancel", summary="Cancel a batch", parameters=(_BATCH,),
              answer=BatchObject, errors=(404, 409, 503)),
)  # fmt: skip


_LLAMA_PIECES = "With `stream`: server-sent events, each with a piece of `content`; the last one has all facts."
_LLAMA_SERVER = (
    *(
        Operation(
            method="POST", path=path, summary="What follows a text, as llama-server has it",
            body=LlamaCompletionBody, answer=LlamaCompletion | list[LlamaCompletion], serves=True,
            description="A list of prompts gets a list of answers. " + _LOADED,
            stream=_events(LlamaCompletion, _LLAMA_PIECES),
            example={"model": "tiny", "prompt": "Once upon a time", "n_predict": 16},
        )
        for path in ("/completion", "/completions")
    ),
    Operation(
        method="POST", path="/infill", summary="Fill in the middle, as llama-server has it",
        body=InfillBody, answer=LlamaCompletion, serves=True,
        description=_LOADED,
        stream=_events(LlamaCompletion, _LLAMA_PIECES),
        example={"model": "a-model-with-fim-tokens", "input_prefix": "def add(a, b):\n    ", "input_suffix": ""},
    ),
    Operation(method="POST", path="/tokenize", summary="The tokens of a text", body=TokenizeBody, answer=Tokenized,
              serves=True, description=_LOADED, example={"model": "tiny", "content": "A fox.", "with_pieces": True}),
    Operation(method="POST", path="/detokenize", summary="The text of tokens", body=DetokenizeBody,
              answer=Detokenized, serves=True, description=_LOADED, example={"model": "tiny", "tokens": [104, 105]}),
    Operation(method="GET", path="/tokenizer_info", summary="The tokenizer of a model, as vLLM has it",
              answer=TokenizerInfo, parameters=(_model("This model; without it the one that is loaded, if it is one"),),
              errors=(400, 404, 422)),
    Operation(method="POST", path="/apply-template", summary="The prompt that a conversation becomes",
              body=TemplateBody, answer=RenderedPrompt, serves=True, description=_LOADED,
              example={"model": "tiny", "messages": _ASK}),
    Operation(method="POST", path="/models/load", summary="Load a model, as llama-server has it", body=NamedModel,
              answer=Done, serves=True, example={"model": "tiny"},
              description="Answers when it is there. A request for a model loads it as well."),
    Operation(method="POST", path="/models/unload", summary="Unload a model, as llama-server has it", body=NamedModel,
              answer=Done, errors=(404, 422), example={"model": "tiny"},
              description="One in use is unloaded when its requests have ended; 400 for one that is not loaded."),
    Operation(method="GET", path="/props", summary="A model and its defaults", answer=LlamaProps,
              parameters=(_model("This model; without it the one that is loaded, if it is one"),),
              errors=(400, 404, 422)),
    Operation(method="GET", path="/slots", summary="The slots of the models that are loaded", answer=list[LlamaSlot],
              parameters=(_model("Of this model alone"),
                          Parameter(name="fail_on_no_slot", description="Anything: 503 where none is free")),
              errors=(400, 503)),
    Operation(method="POST", path="/slots/{id}", status=501, is_body_required=False,
              parameters=(path_parameter("id", "Any number"),),
              summary="Not supported: saving slots by hand",
              description="Always 501: prefixes are kept by themselves."),
)  # fmt: skip


_LM_STUDIO = (
    Operation(method="GET", path="/api/v0/models", summary="The models that are here, as LM Studio has it",
              answer=LmStudioModels),
    Operation(method="GET", path="/api/v0/models/{id}", summary="One model", answer=LmStudioModel,
              parameters=(path_parameter("id", "The model's name; it may have slashes"),), errors=(400, 404, 422)),
    Operation(
        method="POST", path="/api/v0/chat/completions", summary="The next message of a conversation",
        body=LmStudioChatBody, answer=LmStudioChat, serves=True, stream=_events(LmStudioChatChunk, _CHUNKS),
        example={"model": "tiny", "messages": _ASK, "max_tokens": -1},
    ),
    Operation(
        method="POST", path="/api/v0/completions", summary="What follows a text", body=LmStudioCompletionBody,
        answer=LmStudioCompletion, serves=True, stream=_events(LmStudioCompletion, _CHUNKS),
        example={"model": "tiny", "prompt": "Once upon a time", "max_tokens": 16},
    ),
    Operation(
        method="POST", path="/api/v0/embeddings", summary="Vectors of texts", body=EmbeddingsBody, answer=Embeddings,
        serves=True, example={"model": "tiny", "input": ["A fox.", "A hare."]},
    ),
)  # fmt: skip


_ANTHROPIC = (
    Operation(
        method="POST", path="/v1/messages", summary="The next message of a conversation",
        body=MessagesBody, answer=AnthropicMessage, serves=True,
        stream=Stream(content_type=SSE, item=AnthropicEvent,
                      description="With `stream`: server-sent events named by their type."),
        example={"model": "tiny", "max_tokens": 64, "messages": _ASK},
    ),
    Operation(
        method="POST", path="/v1/messages/count_tokens", summary="How long a prompt would be",
        body=CountBody, answer=CountedTokens, serves=True,
        description=_COUNTS,
        example={"model": "tiny", "messages": _ASK},
    ),
    Operation(
        method="POST", path="/v1/messages/batches", summary="Compute many messages", body=MessageBatchesBody,
        answer=MessageBatch, errors=(503, 507),
        description="They run in the lane batch, beside other requests, and go on after a restart.",
        example={"requests": [{"custom_id": "one", "params": {"model": "tiny", "max_tokens": 64, "messages": _ASK}}]},
    ),
    Operation(method="GET", path="/v1/messages/batches", summary="The batches, newest first", answer=MessageBatches,
              parameters=(*_page("after_id", 20, 1000),
                          Parameter(name="before_id", description="The page before this batch")),
              errors=(400, 404, 503)),
    Operation(method="GET", path="/v1/messages/batches/{id}", summary="One batch", parameters=(_BATCH,),
              answer=MessageBatch, errors=(404, 503)),
    Operation(method="DELETE", path="/v1/messages/batches/{id}", summary="Forget a batch and its results",
              parameters=(_BATCH,), answer=MessageBatchDeleted, errors=(404, 409, 503)),
    Operation(method="GET", path="/v1/messages/batches/{id}/results", summary="The results of a batch",
              parameters=(_BATCH,), errors=(404, 503),
              stream=Stream(content_type="application/x-jsonl", item=MessageBatchResult,
                            description="A line for each request, in any order.")),
    Operation(method="POST", path="/v1/messages/batches/{id}/cancel", summary="Cancel a batch",
              parameters=(_BATCH,), answer=MessageBatch, errors=(404, 409, 503)),
)  # fmt: skip


_RANK = {"model": "a-reranker", "query": "What do foxes eat?", "documents": ["Foxes eat mice.", "It rains."]}

_EMBEDDING = (
    Operation(
        method="POST", path="/v1/embeddings", summary="Vectors of texts, as OpenAI has it",
        body=EmbeddingsBody, answer=Embeddings, serves=True,
        example={"model": "tiny", "input": ["A fox.", "A hare."]},
    ),
    Operation(
        method="POST", path="/embedding", summary="Vectors of texts, as llama-server has it",
        body=EmbeddingsBody, answer=list[VectorRow], serves=True,
        example={"model": "tiny", "content": "A fox."},
    ),
    Operation(
        method="POST", path="/api/embed", summary="Vectors of texts, as Ollama has it", body=EmbedBody,
        answer=OllamaEmbeddings, serves=True, description="Without input the model is loaded.",
        example={"model": "tiny", "input": ["A fox.", "A hare."]},
    ),
    Operation(
        method="POST", path="/api/embeddings", summary="The vector of one text, Ollama's older form",
        body=LegacyEmbeddingsBody, answer=LegacyEmbedding, serves=True,
        example={"model": "tiny", "prompt": "A fox."},
    ),
    *(
        Operation(
            method="POST", path=path, summary="Which documents answer a query best", body=RerankBody,
            answer=Ranking | list[ScoredText], serves=True, example=_RANK,
        )
        for path in ("/v1/rerank", "/v1/reranking", "/rerank", "/reranking", "/v2/rerank")
    ),
)  # fmt: skip


_ID = path_parameter("id", "The request's id, as answers have it in `X-Localrun-Request`")


_HZ: dict[str, Any] = {"type": "number", "minimum": MIN_HZ, "maximum": MAX_HZ}
_LIMIT: dict[str, Any] = {"type": "integer", "minimum": 1, "maximum": MAX_LIMIT}
_DAYS: dict[str, Any] = {"type": "integer", "minimum": 1, "maximum": MAX_DAYS}
_QUERY: dict[str, Any] = {"type": "string", "maxLength": MAX_QUERY_CHARS}

_NATIVE = (
    *(
        Operation(method="GET", path=path, summary="Is the daemon up", answer=Health,
                  errors=(503,), description="503 while it is shutting down.")
        for path in ("/health", "/v1/health")
    ),
    Operation(method="GET", path="/localrun/v1/snapshot", summary="Everything at this moment",
              answer=Snapshot),
    Operation(
        method="GET", path="/localrun/v1/events", summary="Snapshots as they come",
        parameters=(Parameter(name="hz", schema=_HZ | {"default": DEFAULT_HZ},
                              description="Snapshots a second"),),
        stream=Stream(content_type=SSE, item=Snapshot, description="Events named `snapshot`, until the client leaves."),
        errors=(400,),
    ),
    Operation(method="GET", path="/localrun/v1/requests", summary="The requests of all clients",
              answer=Requests),
    Operation(method="GET", path="/localrun/v1/requests/{id}", summary="One request",
              parameters=(_ID,), answer=RequestRow, errors=(404,)),
    Operation(method="DELETE", path="/localrun/v1/requests/{id}", summary="Cancel a request",
              parameters=(_ID,), answer=CancelledRequest, errors=(404, 409)),
    Operation(
        method="GET", path="/localrun/v1/usage", summary="What API keys used", answer=UsageReport, errors=(400, 500),
        description="Of all keys for the daemon's owner and for keys of admins, else of the own one.",
        parameters=(
            Parameter(name="by", schema={"type": "string", "enum": list(BY), "default": "key"},
                      description="What to sum by"),
            Parameter(name="days", schema=_DAYS | {"default": DEFAULT_DAYS}, description="How far back"),
        ),
    ),
    Operation(method="GET", path="/localrun/v1/cache", summary="What is kept of prompts",
              answer=CacheReport),
    Operation(
        method="DELETE", path="/localrun/v1/cache", summary="Forget what is kept of prompts",
        parameters=(_model("Of this model alone"),
                    Parameter(name="tier", schema={"type": "string", "enum": ["ram", "disk", ""]},
                              description="In memory or on disk alone")),
        answer=CacheCleared, errors=(400, 404, 422),
    ),
    Operation(
        method="GET", path="/localrun/v1/logs", summary="The daemon's log",
        parameters=(
            Parameter(name="since", schema={"type": "integer", "minimum": 0, "maximum": 10**18 - 1},
                      description="Lines after this number"),
            Parameter(name="follow", schema={"type": "string", "enum": ["0", "1"], "default": "1"},
                      description="0 ends after the lines there are"),
        ),
        stream=Stream(content_type=SSE, item=LogLine, description="Events named `log`, one for each line."),
        errors=(400,),
    ),
    Operation(method="GET", path="/localrun/v1/fit", summary="How a model would be opened here",
              parameters=(_model("The model's name", is_required=True),
                          Parameter(name="draft", schema={"type": "string"},
                                    description="A draft model instead of its own")),
              answer=FitAnswer, errors=(400, 404, 422)),
    Operation(method="GET", path="/localrun/v1/pulls", summary="Downloads", answer=Pulls),
    Operation(method="DELETE", path="/localrun/v1/pulls", summary="Cancel a download",
              parameters=(_model("The model's name, as it was asked for", is_required=True),),
              answer=CancelledPull, errors=(400, 404)),
    Operation(method="GET", path="/localrun/v1/catalog", summary="Models to pull by a short name",
              parameters=(_model("This entry alone"),), answer=CatalogAnswer, errors=(400,)),
    Operation(
        method="GET", path="/localrun/v1/search", summary="Models in the catalogue and on the hub",
        parameters=(Parameter(name="query", schema=_QUERY, description="Words; without any, the whole catalogue"),
                    Parameter(name="limit", schema=_LIMIT | {"default": DEFAULT_LIMIT},
                              description="Most repositories of the hub")),
        answer=SearchAnswer, errors=(400,),
    ),
    Operation(method="POST", path="/localrun/v1/gc", summary="Delete files that no model needs",
              body=GarbageBody, is_body_required=False, answer=Collected, errors=(503,),
              example={"min_age_s": 3600}),
    Operation(method="POST", path="/localrun/v1/shutdown", summary="End the daemon",
              answer=Stopping, description="Running requests get a moment to end."),
    Operation(method="GET", path="/metrics", summary="Metrics for Prometheus", answer=str,
              answer_content_type="text/plain"),
    Operation(method="GET", path="/openapi.json", summary="This document", answer=dict[str, Any]),
    Operation(method="GET", path="/docs", summary="This document for people", answer=str,
              answer_content_type="text/html"),
    Operation(method="GET", path="/docs/{name}", summary="A page of the documentation", answer=str,
              answer_content_type="text/html", parameters=(path_parameter("name", "As `/docs` lists them"),),
              errors=(404,)),
    *(Operation(method="GET", path=f"/web/{name}", summary="A file of the chat page",
                answer=dict[str, Any] if kind.endswith("+json") else str, answer_content_type=kind)
      for name, kind in FILES.items()),
)  # fmt: skip

OPERATIONS: tuple[Operation, ...] = tuple(
    replace(one, family=family)
    for family, routes in (
        (Family.OLLAMA, _OLLAMA),
        (Family.OPENAI, _OPENAI),
        (Family.ANTHROPIC, _ANTHROPIC),
        (Family.LLAMA_SERVER, _LLAMA_SERVER),
        (Family.LM_STUDIO, _LM_STUDIO),
        (Family.EMBEDDING, _EMBEDDING),
        (Family.NATIVE, _NATIVE),
    )
    for one in routes
)
