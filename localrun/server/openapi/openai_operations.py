"""OpenAI's routes for the document, with those of Mistral and llama-server that fill in the middle.

Pure data. Does not: serve them.
"""

from __future__ import annotations

from localrun.server.openai.chat_body import ChatBody
from localrun.server.openai.completion_body import CompletionBody, FimBody
from localrun.server.openai.infill import InfillBody
from localrun.server.openai.responses.body import ResponsesBody
from localrun.server.openapi import openai_answers as answers
from localrun.server.openapi.operation import SSE, Family, Operation, Stream, path_parameter

_FAMILY = Family.OPENAI
_ASK = [{"role": "user", "content": "What is 3 + 4?"}]
_RESPONSE = path_parameter("id", "The response's id")


def _events(item: object, what: str) -> Stream:
    return Stream(content_type=SSE, item=item, description=what)


_CHUNKS = "With `stream`: server-sent events, each with a chunk as its data; the last one is `[DONE]`."

OPERATIONS = (
    Operation(family=_FAMILY, method="GET", path="/v1/models", summary="The models that are here",
              answer=answers.OpenAIModels),
    Operation(family=_FAMILY, method="GET", path="/v1/models/{id}", summary="One model", answer=answers.OpenAIModel,
              parameters=(path_parameter("id", "The model's name; it may have slashes"),), errors=(400, 404, 422)),
    Operation(
        family=_FAMILY, method="POST", path="/v1/chat/completions", summary="The next message of a conversation",
        body=ChatBody, answer=answers.ChatCompletion, serves=True,
        stream=_events(answers.ChatCompletionChunk, _CHUNKS),
        example={"model": "tiny", "messages": _ASK},
    ),
    Operation(
        family=_FAMILY, method="POST", path="/v1/completions", summary="What follows a text", body=CompletionBody,
        answer=answers.Completion, serves=True, stream=_events(answers.Completion, _CHUNKS),
        example={"model": "tiny", "prompt": "Once upon a time", "max_tokens": 16},
    ),
    Operation(
        family=_FAMILY, method="POST", path="/v1/responses", summary="A response, in OpenAI's newer form",
        body=ResponsesBody, answer=answers.ResponseObject, serves=True,
        stream=_events(answers.ResponseEvent,
                       "With `stream`: server-sent events named by their type, each with its number."),
        example={"model": "tiny", "input": "What is 3 + 4?"},
    ),
    Operation(family=_FAMILY, method="GET", path="/v1/responses/{id}", summary="A response that was kept",
              parameters=(_RESPONSE,), answer=answers.ResponseObject, errors=(404,)),
    Operation(family=_FAMILY, method="DELETE", path="/v1/responses/{id}", summary="Forget a response",
              parameters=(_RESPONSE,), answer=answers.ResponseDeleted, errors=(404,)),
    Operation(family=_FAMILY, method="GET", path="/v1/responses/{id}/input_items", summary="What a response answered",
              parameters=(_RESPONSE,), answer=answers.ResponseItems, errors=(404,)),
    Operation(
        family=_FAMILY, method="POST", path="/v1/fim/completions", summary="Fill in the middle, as Mistral has it",
        body=FimBody, answer=answers.ChatCompletion, serves=True,
        stream=_events(answers.ChatCompletionChunk, _CHUNKS),
        example={"model": "a-model-with-fim-tokens", "prompt": "def add(a, b):\n    ", "suffix": "\n    return c"},
    ),
    Operation(
        family=_FAMILY, method="POST", path="/infill", summary="Fill in the middle, as llama-server has it",
        body=InfillBody, answer=answers.InfillAnswer, serves=True,
        description="Without `model` the one that is loaded answers, if it is one.",
        stream=_events(answers.InfillAnswer,
                       "With `stream`: server-sent events, each with a piece of `content`."),
        example={"model": "a-model-with-fim-tokens", "input_prefix": "def add(a, b):\n    ", "input_suffix": ""},
    ),
)  # fmt: skip
