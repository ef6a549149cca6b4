"""All routes: Ollama's, OpenAI's with those of Mistral and llama-server that fill in the middle, Anthropic's, LM
Studio's, embeddings and reranking, the daemon's own, and those of the document that all of them are in.

The one place that says of a route who answers it and who may, what it takes and what it answers. The router, the rights
of keys, the limits of bodies and the document are made of these rows. The document is made once, in a thread, when it
is first asked for.
"""

from __future__ import annotations

import asyncio
import re
from dataclasses import replace
from functools import cache, lru_cache
from typing import Any

import msgspec
from starlette.routing import Route, compile_path

from localrun.access.books import BY
from localrun.server import embedding, web
from localrun.server.anthropic import messages as anthropic
from localrun.server.anthropic.body import CountBody, MessagesBody
from localrun.server.batches import routes as batches
from localrun.server.embedding import EmbedBody, EmbeddingsBody, LegacyEmbeddingsBody, RerankBody
from localrun.server.http.access import Right
from localrun.server.http.exchange import Exchange
from localrun.server.http.failures import Headers
from localrun.server.http.operation import NDJSON, SSE, Family, Operation, Parameter, Stream, path_parameter
from localrun.server.llama_server import completion as llama
from localrun.server.llama_server import props, tokens
from localrun.server.native import models as native_models
from localrun.server.native import routes as native
from localrun.server.ollama import chat as ollama
from localrun.server.ollama import create as ollama_create
from localrun.server.ollama import models as ollama_models
from localrun.server.ollama import store as ollama_store
from localrun.server.ollama.bodies import ChatBody as OllamaChatBody
from localrun.server.ollama.bodies import GenerateBody, ModelBody
from localrun.server.openai import chat, completions, lm_studio
from localrun.server.openai import models as openai
from localrun.server.openai.responses import create as responses
from localrun.server.openai.responses.create import ResponsesBody
from localrun.server.openapi import answers, page
from localrun.server.openapi.document import Json, document_of
from localrun.server.runtime import Runtime
from localrun.snapshot import CacheCleared, CacheReport, LogLine, RequestRow, Snapshot, TrafficRow, UsageReport

_TINY = {"model": "tiny"}
_DIGEST = path_parameter("digest", "`sha256:` and 64 hexadecimal digits", pattern="^sha256[:-][0-9a-f]{64}$")
_TASK = Stream(content_type=NDJSON, item=answers.Status, description="How far it is; a line for each step.")
_NAME = path_parameter("name", "Any name")

_OLLAMA = (
    Operation("GET", "/", web.root, Right.OPEN, "Is something there", answer=str,
        answer_content_type="text/plain", description="Says `Ollama is running`: editors look for these words. A "
        "browser, which asks for `text/html`, gets the chat page."),
    Operation("GET", "/api/version", ollama_store.version, Right.USE, "The version of the API",
        answer=ollama_store.OllamaVersion),
    Operation("GET", "/api/tags", ollama_models.tags, Right.USE, "The models and adapters that are here",
        answer=ollama_models.Tags),
    Operation("GET", "/api/ps", ollama_models.ps, Right.USE, "The models that are loaded", answer=ollama_models.Ps),
    Operation("POST", "/api/show", ollama_models.show, Right.USE, "All about one model", body=ModelBody,
        answer=ollama_models.Show, errors=(404, 422), example=_TINY, description="Never loads the model. Also of an "
        "adapter, which has its facts under `localrun`.", is_text=True),
    Operation("POST", "/api/chat", ollama.chat, Right.USE, "The next message of a conversation", body=OllamaChatBody,
        description="Streams unless `stream` is false. Without messages the model is loaded, and with `keep_alive` 0 "
        "unloaded.", answer=answers.OllamaChat, serves=True, stream=Stream(content_type=NDJSON, item=answers.OllamaChat,
        description="A line for each piece; the last has `done: true` and the counts."), example={"model": "tiny",
        "messages": [{"role": "user", "content": "What is 3 + 4?"}], "stream": False}),
    Operation("POST", "/api/generate", ollama.generate, Right.USE, "The answer to one prompt", body=GenerateBody,
        description="Streams unless `stream` is false. Without a prompt the model is loaded, and with `keep_alive` 0 "
        "unloaded. With `suffix` the middle is filled in.", answer=answers.OllamaGenerate, serves=True,
        stream=Stream(content_type=NDJSON, item=answers.OllamaGenerate,
        description="A line for each piece; the last has " "`done: true` and the counts."), example={"model": "tiny",
        "prompt": "Tell me a story about a fox.", "stream": False}),
    Operation("POST", "/api/pull", ollama_store.pull, Right.CHANGE, "Download a model", body=ollama_store.PullBody,
        description="Streams unless `stream` is false. However many ask for a model, it is fetched once. `username` "
        "and `password` are not read: localrun signs in to no registry.", answer=answers.Status, stream=_TASK,
        errors=(404, 409, 422, 502, 503, 507), example={"model": "qwen3:0.6b"}, is_text=True),
    Operation("POST", "/api/create", ollama_create.create, Right.CHANGE,
        "Make a model of another, or of uploaded files", body=ollama_create.CreateBody, description="Streams unless "
        "`stream` is false. An adapter alone, as `from`, in `files` or in `adapters`, gets a name of its own.",
        answer=answers.Status, stream=_TASK, errors=(404, 409, 422, 500, 507), example={"model": "fox", "from": "tiny",
        "system": "You tell stories about foxes."}),
    Operation("POST", "/api/copy", ollama_store.copy, Right.CHANGE, "A second name for a model",
        body=ollama_store.CopyBody, errors=(404, 409, 422, 507), example={"source": "tiny", "destination": "little"},
        is_text=True),
    Operation("DELETE", "/api/delete", ollama_store.delete, Right.CHANGE, "Remove a model", body=ModelBody,
        answer=ollama_store.DeletedModel, errors=(404, 409), example={"model": "little"},
        description="Files that another name or program still uses stay.", is_text=True),
    Operation("POST", "/api/push", ollama_store.push, Right.CHANGE, "Not supported: uploading a model",
        is_body_required=False, body=ModelBody, status=501,
        description="Always 501; the message says what to do instead.", is_text=True),
    Operation("HEAD", "/api/blobs/{digest}", ollama_store.blob, Right.USE, "Is this uploaded file here",
        parameters=(_DIGEST,), errors=(400, 404)),
    Operation("POST", "/api/blobs/{digest}", ollama_store.blob, Right.CHANGE, "Upload a file for create",
        parameters=(_DIGEST,), body=bytes, body_content_type="application/octet-stream", is_body_required=False,
        other_statuses=(201,), errors=(400, 415, 502, 507),
        description="201 when it was new, 200 when it was here already."),
    Operation("GET", "/api/status", ollama_store.status, Right.USE, "Whether models run elsewhere: never",
        answer=ollama_store.ServiceStatus),
    Operation("POST", "/api/me", ollama_store.me, Right.USE, "Who is signed in: nobody", status=401,
        description="Always 401: localrun has no accounts."),
    Operation("POST", "/api/signout", ollama_store.sign_out, Right.USE, "Nothing to sign out of"),
    Operation("GET", "/api/experimental/{name}", ollama_store.experimental, Right.USE,
        "Not supported: services of ollama.com", status=501, parameters=(_NAME,)),
    Operation("POST", "/api/experimental/{name}", ollama_store.experimental, Right.USE,
        "Not supported: services of ollama.com", status=501, parameters=(_NAME,)),
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
    """The query's `model`. An empty one counts as left out, unless it is required."""
    schema: dict[str, Any] = {"type": "string"} | ({"minLength": 1} if is_required else {})
    return Parameter(name="model", schema=schema, description=description, is_required=is_required)


def _events(item: object, what: str) -> Stream:
    return Stream(content_type=SSE, item=item, description=what)


_LOADED = "Without `model` the loaded one that answered last does, else the one that was loaded last, or the only one."
_COUNTS = "By the model's own tokenizer and template. Loads the model; generates nothing."
_CHUNKS = "With `stream`: server-sent events, each with a chunk as its data; the last one is `[DONE]`."

_OPENAI = (
    *(
        Operation("GET", path, openai.list_models, Right.USE, "The models that are here", answer=openai.OpenAIModels,
            description="After the models come those with an adapter that fits, as `model+adapter` with the model as "
            "`parent`, up to 256.")
        for path in ("/v1/models", "/models")
    ),
    Operation("GET", "/v1/models/{id}", openai.one_model, Right.USE, "One model", answer=openai.OpenAIModel,
        parameters=(path_parameter("id", "The model's name; it may have slashes"),), errors=(400, 404, 422),
        has_slashes=True),
    Operation("POST", "/v1/chat/completions", chat.chat, Right.USE, "The next message of a conversation",
        body=chat.ChatBody, answer=answers.ChatCompletion, serves=True, stream=_events(answers.ChatCompletionChunk,
        _CHUNKS), example={"model": "tiny", "messages": _ASK}),
    Operation("POST", "/v1/chat/completions/input_tokens", chat.count_tokens, Right.USE,
        "How long a chat's prompt would be", body=chat.ChatBody, answer=chat.InputTokens, serves=True,
        description=_COUNTS, example={"model": "tiny", "messages": _ASK}),
    Operation("POST", "/v1/completions", completions.complete, Right.USE, "What follows a text",
        body=completions.CompletionBody, answer=answers.Completion, serves=True, stream=_events(answers.Completion,
        _CHUNKS), example={"model": "tiny", "prompt": "Once upon a time", "max_tokens": 16}, is_text=True),
    Operation("POST", "/v1/responses", responses.create, Right.USE, "A response, in OpenAI's newer form",
        body=ResponsesBody, answer=answers.ResponseObject, serves=True, stream=_events(answers.ResponseEvent,
        "With `stream`: server-sent events named by their type, each with its number."),
        example={"model": "tiny", "input": "What is 3 + 4?"}),
    Operation("POST", "/v1/responses/input_tokens", responses.count, Right.USE, "How long a response's prompt would be",
        body=ResponsesBody, answer=chat.InputTokens, serves=True, description=_COUNTS,
        example={"model": "tiny", "input": "What is 3 + 4?"}),
    Operation("POST", "/v1/responses/compact", responses.compact, Right.USE, "Not supported: a shorter conversation",
        status=501, is_body_required=False, description="Always 501: ask for a summary in a response."),
    Operation("GET", "/v1/responses/{id}", responses.read, Right.USE, "A response that was kept",
        parameters=(_RESPONSE,), answer=answers.ResponseObject, errors=(404,)),
    Operation("DELETE", "/v1/responses/{id}", responses.delete, Right.CHANGE, "Forget a response",
        parameters=(_RESPONSE,), answer=responses.ResponseDeleted, errors=(404,)),
    Operation("GET", "/v1/responses/{id}/input_items", responses.input_items, Right.USE, "What a response answered",
        parameters=(_RESPONSE,), answer=responses.ResponseItems, errors=(404,)),
    Operation("POST", "/v1/fim/completions", completions.complete_fim, Right.USE,
        "Fill in the middle, as Mistral has it", body=completions.FimBody, answer=answers.ChatCompletion, serves=True,
        stream=_events(answers.ChatCompletionChunk, _CHUNKS), example={"model": "a-model-with-fim-tokens",
        "prompt": "def add(a, b):\n    ", "suffix": "\n    return c"}, is_text=True),
    Operation("GET", "/lora-adapters", openai.list_adapters, Right.USE,
        "The adapters that are here, as llama-server has it", answer=list[openai.AdapterRow],
        parameters=(_model("Those that fit this model, under the same ids"),), errors=(400, 404, 422),
        description="LoRA files and control vectors, oldest first. Requests name them in `lora`, or in the model's "
        "name: `model+adapter=0.5`."),
    Operation("POST", "/lora-adapters", openai.change_adapters, Right.CHANGE, "Not supported: scales for all requests",
        status=501, is_body_required=False, description="Always 501: they would change other clients' answers. Say "
        "them in the request."),
    Operation("POST", "/v1/files", batches.upload, Right.CHANGE, "Upload a file", body=bytes,
        body_content_type="multipart/form-data", answer=batches.FileObject, errors=(503, 507), is_body_required=False,
        description="A form with `file` and `purpose`, which is `batch` for the requests of a batch, and if it is to "
        "be deleted `expires_after[anchor]` (`created_at`) and `expires_after[seconds]`."),
    Operation("GET", "/v1/files", batches.list_files, Right.USE, "The files that are here", answer=batches.Files,
        parameters=(*_page("after", 10_000, 10_000), Parameter(name="order", schema={"type": "string", "enum": ["asc",
        "desc", ""]}, description="By time; desc without it"), Parameter(name="purpose",
        description="Those of this purpose alone")), errors=(400, 404, 503)),
    Operation("GET", "/v1/files/{id}", batches.one_file, Right.USE, "One file", parameters=(_FILE,),
        answer=batches.FileObject, errors=(404, 503)),
    Operation("DELETE", "/v1/files/{id}", batches.delete_file, Right.CHANGE, "Delete a file", parameters=(_FILE,),
        answer=batches.FileDeleted, errors=(404, 409, 503)),
    Operation("GET", "/v1/files/{id}/content", batches.file_content, Right.USE, "What is in a file",
        parameters=(_FILE,), answer=str, answer_content_type="application/octet-stream", errors=(404, 503)),
    Operation("POST", "/v1/batches", batches.create, Right.USE, "Compute a file of requests", body=batches.BatchBody,
        answer=batches.BatchObject, errors=(404, 503, 507), description="The lines run in the lane batch, beside other "
        "requests, and go on after a restart.", example={"input_file_id": "file-1", "endpoint": "/v1/chat/completions",
        "completion_window": "24h"}, is_text=True),
    Operation("GET", "/v1/batches", batches.list_batches, Right.USE, "The batches, newest first",
        answer=batches.Batches, parameters=_page("after", 20, 100), errors=(400, 404, 503)),
    Operation("GET", "/v1/batches/{id}", batches.one_batch, Right.USE, "One batch", parameters=(_BATCH,),
        answer=batches.BatchObject, errors=(404, 503)),
    Operation("POST", "/v1/batches/{id}/cancel", batches.cancel, Right.USE, "Cancel a batch", parameters=(_BATCH,),
        answer=batches.BatchObject, errors=(404, 409, 503)),
)  # fmt: skip


_LLAMA_PIECES = "With `stream`: server-sent events, each with a piece of `content`; the last one has all facts."
_LLAMA_SERVER = (
    *(
        Operation("POST", path, llama.complete, Right.USE, "What follows a text, as llama-server has it",
            body=llama.LlamaCompletionBody, answer=answers.LlamaCompletion | list[answers.LlamaCompletion], serves=True,
            description="A list of prompts gets a list of answers. " + _LOADED,
            stream=_events(answers.LlamaCompletion, _LLAMA_PIECES), example={"model": "tiny",
            "prompt": "Once upon a time", "n_predict": 16})
        for path in ("/completion", "/completions")
    ),
    Operation("POST", "/infill", llama.complete_infill, Right.USE, "Fill in the middle, as llama-server has it",
        body=llama.InfillBody, answer=answers.LlamaCompletion, serves=True, description=_LOADED,
        stream=_events(answers.LlamaCompletion, _LLAMA_PIECES), example={"model": "a-model-with-fim-tokens",
        "input_prefix": "def add(a, b):\n    ", "input_suffix": ""}),
    Operation("POST", "/tokenize", tokens.tokenize, Right.USE, "The tokens of a text", body=tokens.TokenizeBody,
        answer=tokens.Tokenized, serves=True, description=_LOADED, example={"model": "tiny", "content": "A fox.",
        "with_pieces": True}, is_text=True),
    Operation("POST", "/detokenize", tokens.detokenize, Right.USE, "The text of tokens", body=tokens.DetokenizeBody,
        answer=tokens.Detokenized, serves=True, description=_LOADED, example={"model": "tiny", "tokens": [104, 105]},
        is_text=True),
    Operation("GET", "/tokenizer_info", tokens.tokenizer_info, Right.USE, "The tokenizer of a model, as vLLM has it",
        answer=tokens.TokenizerInfo,
        parameters=(_model("This model; without it the one that is loaded, if it is one"),), errors=(400, 404, 422)),
    Operation("POST", "/apply-template", tokens.apply_template, Right.USE, "The prompt that a conversation becomes",
        body=tokens.TemplateBody, answer=tokens.RenderedPrompt, serves=True, description=_LOADED,
        example={"model": "tiny", "messages": _ASK}),
    Operation("POST", "/models/load", openai.load, Right.USE, "Load a model, as llama-server has it",
        body=openai.NamedModel, answer=openai.Done, serves=True, example={"model": "tiny"},
        description="Answers when it is there. A request for a model loads it as well."),
    Operation("POST", "/models/unload", openai.unload, Right.USE, "Unload a model, as llama-server has it",
        body=openai.NamedModel, answer=openai.Done, errors=(404, 422), example={"model": "tiny"},
        description="One in use is unloaded when its requests have ended; 400 for one that is not loaded."),
    Operation("GET", "/props", props.show_props, Right.USE, "A model and its defaults", answer=props.LlamaProps,
        parameters=(_model("This model; without it the one that is loaded, if it is one"),), errors=(400, 404, 422)),
    Operation("GET", "/slots", props.list_slots, Right.USE, "The slots of the models that are loaded",
        answer=list[props.LlamaSlot], parameters=(_model("Of this model alone"), Parameter(name="fail_on_no_slot",
        description="Anything: 503 where none is free")), errors=(400, 503)),
    Operation("POST", "/slots/{id}", props.keep_slot, Right.USE, "Not supported: saving slots by hand", status=501,
        is_body_required=False, parameters=(path_parameter("id", "Any number"),),
        description="Always 501: prefixes are kept by themselves."),
)  # fmt: skip


_LM_STUDIO = (
    Operation("GET", "/api/v0/models", lm_studio.list_models, Right.USE,
        "The models that are here, as LM Studio has it", answer=lm_studio.LmStudioModels),
    Operation("GET", "/api/v0/models/{id}", lm_studio.one_model, Right.USE, "One model", answer=lm_studio.LmStudioModel,
        parameters=(path_parameter("id", "The model's name; it may have slashes"),), errors=(400, 404, 422),
        has_slashes=True),
    Operation("POST", "/api/v0/chat/completions", lm_studio.chat, Right.USE, "The next message of a conversation",
        body=lm_studio.LmStudioChatBody, answer=answers.LmStudioChat, serves=True,
        stream=_events(answers.LmStudioChatChunk, _CHUNKS), example={"model": "tiny", "messages": _ASK,
        "max_tokens": -1}),
    Operation("POST", "/api/v0/completions", lm_studio.complete, Right.USE, "What follows a text",
        body=lm_studio.LmStudioCompletionBody, answer=answers.LmStudioCompletion, serves=True,
        stream=_events(answers.LmStudioCompletion, _CHUNKS), example={"model": "tiny", "prompt": "Once upon a time",
        "max_tokens": 16}, is_text=True),
    Operation("POST", "/api/v0/embeddings", embedding.embeddings, Right.USE, "Vectors of texts", body=EmbeddingsBody,
        answer=answers.Embeddings, serves=True, example={"model": "tiny", "input": ["A fox.", "A hare."]}),
)  # fmt: skip


_ANTHROPIC = (
    Operation("POST", "/v1/messages", anthropic.create, Right.USE, "The next message of a conversation",
        body=MessagesBody, answer=answers.AnthropicMessage, serves=True, stream=Stream(content_type=SSE,
        item=answers.AnthropicEvent, description="With `stream`: server-sent events named by their type."),
        example={"model": "tiny", "max_tokens": 64, "messages": _ASK}),
    Operation("POST", "/v1/messages/count_tokens", anthropic.count_tokens, Right.USE, "How long a prompt would be",
        body=CountBody, answer=anthropic.CountedTokens, serves=True, description=_COUNTS,
        example={"model": "tiny", "messages": _ASK}),
    Operation("POST", "/v1/messages/batches", batches.create_messages, Right.USE, "Compute many messages",
        body=batches.MessageBatchesBody, answer=batches.MessageBatch, errors=(503, 507),
        description="They run in the lane batch, beside other requests, and go on after a restart.",
        example={"requests": [{"custom_id": "one", "params": {"model": "tiny", "max_tokens": 64, "messages": _ASK}}]}),
    Operation("GET", "/v1/messages/batches", batches.list_message_batches, Right.USE, "The batches, newest first",
        answer=batches.MessageBatches, parameters=(*_page("after_id", 20, 1000), Parameter(name="before_id",
        description="The page before this batch")), errors=(400, 404, 503)),
    Operation("GET", "/v1/messages/batches/{id}", batches.one_message_batch, Right.USE, "One batch",
        parameters=(_BATCH,), answer=batches.MessageBatch, errors=(404, 503)),
    Operation("DELETE", "/v1/messages/batches/{id}", batches.delete_messages, Right.CHANGE,
        "Forget a batch and its results", parameters=(_BATCH,), answer=batches.MessageBatchDeleted,
        errors=(404, 409, 503)),
    Operation("GET", "/v1/messages/batches/{id}/results", batches.message_results, Right.USE, "The results of a batch",
        parameters=(_BATCH,), errors=(404, 503), stream=Stream(content_type="application/x-jsonl",
        item=batches.MessageBatchResult, description="A line for each request, in any order.")),
    Operation("POST", "/v1/messages/batches/{id}/cancel", batches.cancel_messages, Right.USE, "Cancel a batch",
        parameters=(_BATCH,), answer=batches.MessageBatch, errors=(404, 409, 503)),
)  # fmt: skip


_RANK = {"model": "a-reranker", "query": "What do foxes eat?", "documents": ["Foxes eat mice.", "It rains."]}

_EMBEDDING = (
    Operation("POST", "/v1/embeddings", embedding.embeddings, Right.USE, "Vectors of texts, as OpenAI has it",
        body=EmbeddingsBody, answer=answers.Embeddings, serves=True, example={"model": "tiny", "input": ["A fox.",
        "A hare."]}),
    Operation("POST", "/embedding", embedding.embedding, Right.USE, "Vectors of texts, as llama-server has it",
        body=EmbeddingsBody, answer=list[embedding.VectorRow], serves=True,
        example={"model": "tiny", "content": "A fox."}),
    Operation("POST", "/api/embed", embedding.embed, Right.USE, "Vectors of texts, as Ollama has it", body=EmbedBody,
        answer=answers.OllamaEmbeddings, serves=True, description="Without input the model is loaded.",
        example={"model": "tiny", "input": ["A fox.", "A hare."]}),
    Operation("POST", "/api/embeddings", embedding.legacy_embeddings, Right.USE,
        "The vector of one text, Ollama's older form", body=LegacyEmbeddingsBody, answer=embedding.LegacyEmbedding,
        serves=True, example={"model": "tiny", "prompt": "A fox."}, is_text=True),
    *(
        Operation("POST", path, embedding.rerank, Right.USE, "Which documents answer a query best", body=RerankBody,
            answer=embedding.Ranking | list[embedding.ScoredText], serves=True, example=_RANK, is_text=True)
        for path in ("/v1/rerank", "/v1/reranking", "/rerank", "/reranking", "/v2/rerank")
    ),
)  # fmt: skip


_ID = path_parameter("id", "The request's id, as answers have it in `X-Localrun-Request`")


_HZ: dict[str, Any] = {"type": "number", "minimum": native.MIN_HZ, "maximum": native.MAX_HZ}
_LIMIT: dict[str, Any] = {"type": "integer", "minimum": 1, "maximum": native_models.MAX_LIMIT}
_DAYS: dict[str, Any] = {"type": "integer", "minimum": 1, "maximum": native.MAX_DAYS}
_QUERY: dict[str, Any] = {"type": "string", "maxLength": native_models.MAX_QUERY_CHARS}

_NATIVE = (
    *(
        Operation("GET", path, native.health, Right.OPEN, "Is the daemon up", answer=native.Health, errors=(503,),
            description="503 while it is shutting down.")
        for path in ("/health", "/v1/health")
    ),
    Operation("GET", "/localrun/v1/snapshot", native.snapshot, Right.USE, "Everything at this moment", answer=Snapshot),
    Operation("GET", "/localrun/v1/events", native.events, Right.USE, "Snapshots as they come",
        parameters=(Parameter(name="hz", schema=_HZ | {"default": native.DEFAULT_HZ},
        description="Snapshots a second"),), stream=Stream(content_type=SSE, item=Snapshot,
        description="Events named `snapshot`, until the client leaves."), errors=(400,)),
    Operation("GET", "/localrun/v1/requests", native.list_requests, Right.USE, "The requests of all clients",
        answer=native.Requests),
    Operation("GET", "/localrun/v1/requests/{id}", native.one_request, Right.USE, "One request", parameters=(_ID,),
        answer=RequestRow, errors=(404,)),
    Operation("DELETE", "/localrun/v1/requests/{id}", native.cancel_request, Right.CANCEL, "Cancel a request",
        parameters=(_ID,), answer=native.CancelledRequest, errors=(404, 409)),
    Operation("GET", "/localrun/v1/usage", native.usage, Right.USE, "What API keys used", answer=UsageReport,
        errors=(400, 500), description="Of all keys for the daemon's owner and for keys of admins, else of the "
        "own one.", parameters=(Parameter(name="by", schema={"type": "string", "enum": list(BY), "default": "key"},
        description="What to sum by"), Parameter(name="days", schema=_DAYS | {"default": native.DEFAULT_DAYS},
        description="How far back"))),
    Operation("GET", "/localrun/v1/cache", native.cache, Right.USE, "What is kept of prompts", answer=CacheReport),
    Operation("DELETE", "/localrun/v1/cache", native.clear_cache, Right.ADMIN_CHANGE, "Forget what is kept of prompts",
        parameters=(_model("Of this model alone"), Parameter(name="tier", schema={"type": "string", "enum": ["ram",
        "disk", ""]}, description="In memory or on disk alone")), answer=CacheCleared, errors=(400, 404, 422)),
    Operation("GET", "/localrun/v1/logs", native.logs, Right.ADMIN, "The daemon's log",
        parameters=(Parameter(name="since", schema={"type": "integer", "minimum": 0, "maximum": native.MAX_LINE},
        description="Lines after this number"), Parameter(name="follow", schema={"type": "string", "enum": ["0", "1"],
        "default": "1"}, description="0 ends after the lines there are")), stream=Stream(content_type=SSE, item=LogLine,
        description="Events named `log`, one for each line."), errors=(400,)),
    Operation("GET", "/localrun/v1/traffic", native.traffic, Right.ADMIN, "Requests as they end, without their texts",
        stream=Stream(content_type=SSE, item=TrafficRow,
        description="Events named `request`, until the client leaves.")),
    Operation("GET", "/localrun/v1/fit", native_models.explain_fit, Right.USE, "How a model would be opened here",
        parameters=(_model("The model's name", is_required=True), Parameter(name="draft", schema={"type": "string"},
        description="A draft model instead of its own")), answer=native_models.FitAnswer, errors=(400, 404, 422)),
    Operation("GET", "/localrun/v1/pulls", native_models.list_pulls, Right.USE, "Downloads",
        answer=native_models.Pulls),
    Operation("DELETE", "/localrun/v1/pulls", native_models.cancel_pull, Right.CHANGE, "Cancel a download",
        parameters=(_model("The model's name, as it was asked for", is_required=True),),
        answer=native_models.CancelledPull, errors=(400, 404)),
    Operation("GET", "/localrun/v1/catalog", native_models.list_catalog, Right.USE, "Models to pull by a short name",
        parameters=(_model("This entry alone"),), answer=native_models.CatalogAnswer, errors=(400,)),
    Operation("GET", "/localrun/v1/search", native_models.search_models, Right.USE,
        "Models in the catalogue and on the hub", parameters=(Parameter(name="query", schema=_QUERY,
        description="Words; without any, the whole catalogue"), Parameter(name="limit",
        schema=_LIMIT | {"default": native_models.DEFAULT_LIMIT}, description="Most repositories of the hub")),
        answer=native_models.SearchAnswer, errors=(400,)),
    Operation("POST", "/localrun/v1/gc", native_models.collect, Right.CHANGE, "Delete files that no model needs",
        body=native_models.GarbageBody, is_body_required=False, answer=native_models.Collected, errors=(503,),
        example={"min_age_s": 3600}, is_text=True),
    Operation("POST", "/localrun/v1/shutdown", native.shutdown, Right.ADMIN_CHANGE, "End the daemon",
        answer=native.Stopping, description="Running requests get a moment to end."),
    Operation("GET", "/metrics", native.metrics, Right.ADMIN, "Metrics for Prometheus", answer=str,
        answer_content_type="text/plain"),
    *(Operation("GET", f"/web/{name}", web.file, Right.OPEN, "A file of the chat page",
          answer=dict[str, Any] if kind.endswith("+json") else str, answer_content_type=kind)
      for name, kind in web.FILES.items()),
)  # fmt: skip

_HTML: Headers = [
    (b"content-type", b"text/html; charset=utf-8"),
    (b"content-security-policy", page.CONTENT_POLICY),
    (b"referrer-policy", b"no-referrer"),
]
_HOST = re.compile(r"[0-9A-Za-z.:\[\]-]{1,100}", re.ASCII)


async def _openapi(_: Runtime, exchange: Exchange) -> None:
    await exchange.answer(await asyncio.to_thread(_encoded))


async def _docs(_: Runtime, exchange: Exchange) -> None:
    text = await asyncio.to_thread(reference)
    await exchange.answer(_with_address(exchange, text), headers=_HTML)


async def _docs_page(_: Runtime, exchange: Exchange) -> None:
    text = await asyncio.to_thread(page.rendered, exchange.scope["path_params"]["name"])
    await exchange.answer(text.encode("utf-8"), headers=_HTML)


@cache
def document() -> Json:
    """The OpenAPI document of all routes. It is shared, so nobody may change it."""
    return document_of(OPERATIONS)


@cache
def _encoded() -> bytes:
    return msgspec.json.encode(document())


@cache
def reference() -> str:
    return page.reference(document())


def _with_address(exchange: Exchange, text: str) -> bytes:
    """The page with the address by which the client reached it. A Host header that is no plain name does not get into
    a page, though `limits.py` lets in known names only. Links stay below the path where a proxy has put the daemon."""
    host = exchange.header(b"host")
    shown = host if _HOST.fullmatch(host) else "localhost"
    up = "../" if exchange.scope["raw_path"].endswith(b"/") else ""
    text = text.replace('href="/', f'href="{up}')
    return text.replace(page.BASE_URL, f"{exchange.scope['scheme']}://{shown}").encode("utf-8")


_DOCUMENT = (
    Operation("GET", "/openapi.json", _openapi, Right.USE, "This document", answer=dict[str, Any]),
    Operation("GET", "/docs", _docs, Right.USE, "This document for people", answer=str,
        answer_content_type="text/html"),
    Operation("GET", "/docs/{name}", _docs_page, Right.USE, "A page of the documentation", answer=str,
        answer_content_type="text/html", parameters=(path_parameter("name", "As `/docs` lists them"),), errors=(404,)),
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
        (Family.NATIVE, (*_NATIVE, *_DOCUMENT)),
    )
    for one in routes
)
_ALWAYS = {(one.method, one.path): one for one in OPERATIONS if "{" not in one.path}
_OTHERS = [(one, compile_path(one.pattern)[0]) for one in OPERATIONS if "{" in one.path]


def routes(runtime: Runtime) -> list[Route]:
    """All routes, in the order in which the router tries them: first those that wait for a model."""
    return [one.route(runtime) for one in sorted(OPERATIONS, key=lambda one: not one.serves)]


@lru_cache(256)
def find(method: str, path: str) -> Operation | None:
    """The operation that a request asks for, which may be GET's for HEAD; None where no route answers."""
    found = _ALWAYS.get((method, path))
    if found is None:
        found = next((one for one, pattern in _OTHERS if one.method == method and pattern.match(path)), None)
    return find("GET", path) if found is None and method == "HEAD" else found
