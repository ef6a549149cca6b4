"""What is known and refused, family by family: the fields, and the way out.

Pure data. A test sends what each row shows and expects an error that names its field.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

from localrun.server.http.operation import Family

_MESSAGES = [{"role": "user", "content": "Hi"}]
_CHAT = {"model": "tiny", "messages": _MESSAGES}
_TEXT = {"model": "tiny", "prompt": "Hi"}
_RESPONSE = {"model": "tiny", "input": "Hi"}
# One white pixel.
_PNG = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAIAAACQd1PeAAAADElEQVR4nGP4//8/AAX+Av4N70a4AAAAAElFTkSuQmCC"
_CLAUDE: dict[str, Any] = {"model": "tiny", "max_tokens": 8, "messages": _MESSAGES}


class Refusal(NamedTuple):
    """`body` is an example that is refused by `path`; the error names `named`, where the family's errors do."""

    family: Family
    what: str
    why: str
    path: str
    body: dict[str, Any]
    named: str


_openai = partial(Refusal, Family.OPENAI)
_ollama = partial(Refusal, Family.OLLAMA)
_embedding = partial(Refusal, Family.EMBEDDING)


def _anthropic(what: str, why: str, body: dict[str, Any], named: str) -> Refusal:
    return Refusal(Family.ANTHROPIC, what, why, "/v1/messages", _CLAUDE | body, named)


REFUSALS = (
    _ollama("`images` with pictures or sound", "only with models that have a projector for them (an mmproj file)",
            "/api/generate", _TEXT | {"images": [_PNG]}, "images[0]"),
    _ollama("`images` with an address", "nothing is fetched unless the daemon was started with `--fetch-images on`",
            "/api/generate", _TEXT | {"images": ["https://example.com/a.png"]}, "images[0]"),
    _ollama("`images` with `context` or `suffix`", "token ids do not say what is in a picture; use `/api/chat`",
            "/api/generate", _TEXT | {"images": [_PNG], "suffix": "x"}, "images"),
    _ollama("`system`, `template`, `context` or `think` with `raw` or `suffix`", "these prompts have no template",
            "/api/generate", _TEXT | {"raw": True, "system": "Hi"}, "system"),
    _ollama("`think` with models that do not think", "leave it out, or false", "/api/chat", _CHAT | {"think": True},
            "think"),
    _ollama("`suffix`", "only with models that have FIM tokens", "/api/generate", _TEXT | {"suffix": "x"}, "model"),
    _ollama("`format` with a slip of a keyword of JSON schema", "the error names the keyword that is meant",
            "/api/chat", _CHAT | {"format": {"type": "object", "requred": ["a"]}}, "format"),
    _ollama("`draft_files`, `draft_quantize`, `remote_host` (create)",
            "leave them out; a draft model that is here is named by `draft`",
            "/api/create", {"model": "new", "from": "tiny", "remote_host": "x"}, "remote_host"),
    _ollama("`/api/push`, `/api/experimental/*`", "501: nothing is uploaded, no service elsewhere is used",
            "/api/push", {"model": "tiny"}, "push"),
    _openai("`lora` with an adapter that does not fit the model, is listed twice, or is a model",
            "adapters are for models of one shape; one that is not here is a 404", "/v1/chat/completions",
            _CHAT | {"lora": [{"id": "tiny"}]}, "lora[0]"),
    _openai("`audio`, `modalities` other than text", "answers are text only", "/v1/chat/completions",
            _CHAT | {"modalities": ["audio"]}, "modalities"),
    _openai("parts of content other than text, `image_url`, `input_image` and `input_audio`",
            "files and video are not read", "/v1/chat/completions",
            {"model": "tiny", "messages": [{"role": "user", "content": [{"type": "file"}]}]},
            "messages[0].content[0]"),
    _openai("pictures and sound", "only with models that have a projector for them (an mmproj file)",
            "/v1/responses", {"model": "tiny", "input": [{"role": "user", "content": [
                {"type": "input_image", "image_url": f"data:image/png;base64,{_PNG}"}]}]},
            "input[0].content[0].image_url"),
    _openai("`echo` with `logprobs` and `stream`", "the log-probabilities of a prompt are there as a whole only",
            "/v1/completions", _TEXT | {"echo": True, "logprobs": 1, "stream": True}, "echo"),
    _openai("`suffix` with a prompt of token ids", "it needs the prompt's text", "/v1/completions",
            {"model": "tiny", "prompt": [1, 2], "suffix": "x"}, "suffix"),
    _openai("`best_of` above `n` with `stream`", "the best is known at the end only", "/v1/completions",
            _TEXT | {"best_of": 2, "stream": True}, "best_of"),
    _openai("`tools` of another type than `function`",
            "there is nobody to run them; in responses those that OpenAI runs itself are left out instead",
            "/v1/chat/completions", _CHAT | {"tools": [{"type": "custom", "name": "x"}]}, "tools[0].type"),
    _openai("keywords of JSON schema that nothing can be held to, with `strict`",
            "without `strict` they are left out, and a header says so", "/v1/chat/completions",
            _CHAT | {"response_format": {"type": "json_schema",
                                         "json_schema": {"name": "x", "schema": {"not": {}}, "strict": True}}},
            "response_format.json_schema.schema"),
    _openai("`background` (responses)", "this is no service that runs on; stream instead", "/v1/responses",
            _RESPONSE | {"background": True}, "background"),
    _openai("`conversation` (responses)", "use `previous_response_id`, or send the items", "/v1/responses",
            _RESPONSE | {"conversation": "x"}, "conversation"),
    _openai("`prompt` (responses)", "nothing is stored under a name; send `instructions` and `input`",
            "/v1/responses", _RESPONSE | {"prompt": {"id": "x"}}, "prompt"),
    _openai("`compaction_trigger` as the last item (responses), `/v1/responses/compact`",
            "ask for a summary as for anything else", "/v1/responses",
            {"model": "tiny", "input": [*_MESSAGES, {"type": "compaction_trigger"}]}, "input[1]"),
    _openai("`tool_choice` that forces a call, with a prefix of the answer",
            "what has begun as text cannot be a call", "/v1/chat/completions",
            {"model": "tiny", "messages": [{"role": "assistant", "content": "I", "prefix": True}],
             "tool_choice": "required", "tools": [{"type": "function", "function": {"name": "f"}}]}, "tool_choice"),
    _openai("`chat_template_kwargs` named `messages`, `tools`, `add_generation_prompt` or `*_token`",
            "they are the template's own", "/v1/chat/completions", _CHAT | {"chat_template_kwargs": {"bos_token": ""}},
            "chat_template_kwargs.bos_token"),
    _openai("`suffix`, `/v1/fim/completions`, `/infill`", "only with models that have FIM tokens",
            "/v1/fim/completions", _TEXT, "model"),
    _anthropic("`image` blocks", "only with models that have a projector for them (an mmproj file)",
               {"messages": [{"role": "user", "content": [
                   {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": _PNG}}]}]},
               "messages[0].content[0].source.data"),
    _anthropic("`document` blocks other than text", "send the document's text",
               {"messages": [{"role": "user", "content": [{"type": "document", "source": {}}]}]},
               "messages[0].content[0].source"),
    _anthropic("`container_upload` blocks, and others with content that no model can read", "leave these blocks out",
               {"messages": [{"role": "user", "content": [{"type": "container_upload", "id": "x"}]}]},
               "messages[0].content[0].type"),
    _anthropic("`stop_sequences` beyond 64", "send fewer", {"stop_sequences": [str(number) for number in range(65)]},
               "stop_sequences"),
    _anthropic("a schema of `output_config.format`, or of a tool that must be called, with a slip of a keyword",
               "the error names the keyword",
               {"output_config": {"format": {"type": "json_schema", "schema": {"type": "object", "requred": []}}}},
               "output_config.format.schema"),
    _anthropic("`tool_choice` `any` or `tool`, with a last message of the assistant",
               "what has begun as text cannot be a call",
               {"messages": [*_MESSAGES, {"role": "assistant", "content": "I"}], "tool_choice": {"type": "any"},
                "tools": [{"name": "f", "input_schema": {"type": "object"}}]}, "tool_choice"),
    _anthropic("`thinking.budget_tokens` that is missing, or not below `max_tokens`", "as Anthropic has it",
               {"thinking": {"type": "enabled", "budget_tokens": 8}}, "thinking.budget_tokens"),
    _embedding("`dimensions` above the model's", "Ollama ignores them", "/v1/embeddings",
               {"model": "tiny", "input": "Hi", "dimensions": 99999}, "dimensions"),
    _embedding("Models of another kind", "those made for vectors or ranking do nothing else, and only rerankers rank",
               "/v1/rerank", {"model": "tiny", "query": "Hi", "documents": ["Hi"]}, "model"),
)  # fmt: skip
