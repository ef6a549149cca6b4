"""Which model answers a request that names none, or one that only a hosted API has.

Servers with one model need no name, and their clients send none, or `gpt-4o`. In this order:

1. the setting `default_model`, where text is wanted; with it, names of hosted models stand for no name
2. of the loaded models that can do it, the one that answered last
3. the one that was loaded last, if it is still here; also after a restart
4. the only one that is here, or the only one besides the built-in model, or the built-in one

Only models that whoever asks may use. Where no model is made for embeddings, one that generates makes them.

Does not: load a model, or answer for a name that is merely wrong.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from contextlib import suppress
from typing import TypeVar

import msgspec

from localrun.errors import BadRequest, LocalrunError
from localrun.last_model import BUILT_IN, last_model
from localrun.models.storage.model import Model
from localrun.server.engines.resident import ResidentState, Use, pooling_for
from localrun.server.http.access import Visitor
from localrun.server.http.exchange import Exchange
from localrun.server.prompting.profile import capabilities
from localrun.server.runtime import Runtime

# The names that OpenAI, Anthropic and Google give to their models.
_HOSTED = re.compile(
    r"(?:gpt-[34567]|gpt-image|chatgpt-|o[134](?:-|$)|codex-|claude-|gemini-|(?:text-)?(?:davinci|babbage|curie|ada)\b"
    r"|text-embedding-)",
    re.IGNORECASE,
)
_MAX_SUGGESTED = 3

Body = TypeVar("Body", bound=msgspec.Struct)


async def named(
    runtime: Runtime, exchange: Exchange, body: Body, use: Use = Use.TEXT, *, fills_in: bool = False
) -> Body:
    """The body with the name of the model that is to answer. Raises as `model_for`."""
    asked = getattr(body, "model", None) or ""
    name = await model_for(runtime, exchange.visitor, asked, use, fills_in=fills_in)
    return body if name == asked else msgspec.structs.replace(body, model=name)


async def model_for(
    runtime: Runtime, visitor: Visitor, asked: str, use: Use = Use.TEXT, *, fills_in: bool = False
) -> str:
    """The name of the model that is to answer; with `fills_in` one that can fill in the middle. Raises BadRequest where
    none can be told from the others."""
    default = runtime.settings.default_model
    if asked and not (default and _HOSTED.match(asked) and not await asyncio.to_thread(_is_here, runtime, asked)):
        return asked
    if default and use is Use.TEXT and not fills_in:
        return default
    loaded = [
        one
        for one in runtime.supervisor.residents()
        if one.use is use and one.state is not ResidentState.STOPPING and visitor.sees_model(one.model.name)
    ]
    if fills_in:
        loaded = [one for one in loaded if "insert" in capabilities(one.model)]
    if loaded:
        return max(loaded, key=lambda one: one.last_used_s).model.name
    return await asyncio.to_thread(_of_those_here, runtime, visitor, use, fills_in=fills_in)


def _is_here(runtime: Runtime, name: str) -> bool:
    try:
        runtime.store.resolve(name)
    except LocalrunError:
        return runtime.settings.tier(name) is not None
    return True


def _of_those_here(runtime: Runtime, visitor: Visitor, use: Use, *, fills_in: bool) -> str:
    here = [model for model in runtime.store.list() if visitor.sees_model(model.name)]
    able = [model for model in here if _is_for(model, use) and not (fills_in and "insert" not in capabilities(model))]
    if not able and use is Use.EMBED:
        able = [model for model in here if _is_for(model, Use.TEXT)]
    names = [model.name for model in able]
    last = last_model(runtime.last_loaded_file(use))
    with suppress(ValueError):
        return names[names.index(last)]
    others = [name for name in names if name.removesuffix(":latest") != BUILT_IN]
    if len(others or names) == 1:
        return (others or names)[0]
    raise BadRequest(f"model is required: {_why(others, use, fills_in=fills_in)}", field="model")


def _why(names: Sequence[str], use: Use, *, fills_in: bool) -> str:
    if not names:
        wanted = "fills in the middle" if fills_in else {Use.RERANK: "ranks documents"}.get(use, "can do this")
        return f"no model that {wanted} is here; pull one"
    some = ", ".join(f"'{name}'" for name in names[:_MAX_SUGGESTED])
    return f"{len(names)} models are here and none is loaded; name one, such as {some}, or set default_model"


def _is_for(model: Model, use: Use) -> bool:
    """Whether it was made for that: any model that generates can be asked for embeddings."""
    try:
        pooling_for(model, use)
    except BadRequest:
        return False
    return use is not Use.EMBED or not model.header.generates
