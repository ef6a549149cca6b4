"""POST /api/create: a new model from an existing one, from a file where it lies, or from uploaded blobs.

The name points to the new model from one moment to the next, at the end; until then, and after any failure, it means
what it meant before. Blobs that the request names are held meanwhile, so that nobody cleans them up.

Does not: know the format of manifests (models/creation.py, naming.py), or quantize (quantizer.py).
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator
from contextlib import aclosing
from datetime import UTC, datetime

from localrun.errors import BadRequest, BadTemplate
from localrun.models import creation, naming
from localrun.models.creation import Base, Changes
from localrun.models.manifest import StoredFile
from localrun.models.store import Store
from localrun.server.http import bodies
from localrun.server.http.exchange import Exchange
from localrun.server.ollama import statuses
from localrun.server.ollama.create_body import CreateBody, Order, order_of
from localrun.server.ollama.level import OLLAMA_API_LEVEL
from localrun.server.ollama.statuses import Status
from localrun.server.runtime import Runtime

_VERSION = re.compile(r"v?(\d{1,6})\.(\d{1,6})(?:\.(\d{1,6}))?")
_DIGEST = re.compile(r"@?(sha256[:-][0-9A-Fa-f]{64})")


async def create(runtime: Runtime, exchange: Exchange) -> None:
    """The route's handler."""
    body = await bodies.read(exchange, CreateBody)
    async with exchange.while_connected():
        await statuses.send(exchange, _steps(runtime, body), stream=body.stream is not False)


async def _steps(runtime: Runtime, body: CreateBody) -> AsyncGenerator[Status, None]:
    store = runtime.store
    order = order_of(body)
    check_requires(order.requires)
    await asyncio.to_thread(naming.check_free, store, order.name)
    if order.template:
        await check_template(runtime, order.template)
    said = (order.base, *order.adapters, *order.files.values())
    with store.blobs.held([match[1] for text in said if (match := _DIGEST.fullmatch(text))]):
        base = await asyncio.to_thread(_base, store, order)
        adapters = await asyncio.to_thread(_adapters, store, base, order)
        yield {"status": "reading model metadata"}
        quantized = None
        if order.quantize:
            async with aclosing(_quantized(runtime, base, order.quantize)) as steps:
                async for step in steps:
                    if isinstance(step, StoredFile):
                        quantized = step
                    else:
                        yield step
        changes = Changes(
            parameters=order.parameters,
            system=order.system,
            template=order.template,
            messages=order.messages,
            licence_text=order.licence_text,
            requires=order.requires or None,
            adapters=adapters,
        )
        made = creation.assemble(base, changes, now=datetime.now(UTC), quantized=quantized)
        # Its blob belongs to nobody until the manifest is there.
        with store.blobs.held([file.digest for file in made.files if file.digest]):
            for file in made.files:
                yield {"status": f"using existing layer {file.digest or store.path_of(file)}"}
            yield {"status": "writing manifest"}
            await asyncio.to_thread(naming.point, store, order.name, made)
    yield {"status": "success"}


async def _quantized(runtime: Runtime, base: Base, name: str) -> AsyncGenerator[Status | StoredFile, None]:
    creation.check_quantizable(base.header, base.name)
    number = creation.quantization_number(name)
    said = f"quantizing {base.header.quantization} model to {creation.canonical_quantization(name)}"
    size_bytes = base.header.size_bytes
    expected_bytes = creation.quantized_bytes(base.header, name)
    async with aclosing(runtime.quantizer.quantize(base.path, number, expected_bytes=expected_bytes)) as steps:
        async for step in steps:
            # Bytes of the source, since clients' progress bars expect bytes; what is counted are tensors.
            done = size_bytes * step.n_done // step.n_total if step.n_total else 0
            yield {"status": said, "digest": said, "total": size_bytes, "completed": done}
            if step.result is not None:
                yield step.result


def check_requires(requires: str) -> None:
    """Raises BadRequest when a model needs a newer Ollama than the one whose API this is."""
    if not requires:
        return
    wanted, here = _VERSION.fullmatch(requires.strip()), _VERSION.fullmatch(OLLAMA_API_LEVEL)
    if wanted is None or here is None:
        raise BadRequest(f"requires: '{requires[:40]}' is no version; write it as 0.14.0", field="requires")
    if _numbers(wanted) > _numbers(here):
        raise BadRequest(
            f"requires: the model asks for Ollama {requires}, and this localrun does what {OLLAMA_API_LEVEL} does; "
            f"update localrun, or leave REQUIRES out",
            field="requires",
        )


async def check_template(runtime: Runtime, template: str) -> None:
    """Raises BadTemplate for a template that is broken. One that only refuses this conversation is a good one."""
    variables = {
        "messages": [{"role": "user", "content": "Hello"}],
        "add_generation_prompt": True,
        "bos_token": "",
        "eos_token": "",
        "tools": None,
    }
    try:
        await runtime.renderer.render(template, variables, ())
    except BadTemplate:
        raise
    except BadRequest:
        return


def _base(store: Store, order: Order) -> Base:
    if order.files:
        return creation.base_of_files(store, order.files)
    return creation.base_of(store, order.base, order.folder)


def _adapters(store: Store, base: Base, order: Order) -> tuple[StoredFile, ...]:
    return tuple(creation.adapter(store, base, text, order.folder) for text in order.adapters)


def _numbers(version: re.Match[str]) -> tuple[int, ...]:
    return tuple(int(part or 0) for part in version.groups())
