"""GET and POST /lora-adapters, as llama-server has them.

The list has every adapter that has a name, for whatever model. An `id` is a place in it, in the order in which they
came, so it stays as long as no older one goes; names and digests stay as they are. `?model=NAME` leaves those that fit
one model, under the same ids.

llama-server's POST sets scales that count for all who say nothing. Here nothing that one client asks for changes the
answers of the others, so it is refused, with what to do instead.
Does not: load anything.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress

import msgspec

from localrun.errors import BadModelFile, Conflict, NotSupported
from localrun.models.gguf.header import Header
from localrun.models.storage.named_adapter import NamedAdapter
from localrun.models.storage.store import Store
from localrun.server.http.exchange import Exchange, parameter
from localrun.server.runtime import Runtime


class AdapterRow(msgspec.Struct, frozen=True, kw_only=True):
    """An adapter. `scale` is 0: none is in effect unless it is asked for. The first five are llama-server's fields."""

    id: int
    path: str
    scale: float
    task_name: str
    prompt_prefix: str
    name: str
    digest: str
    kind: str
    architecture: str


async def list_adapters(runtime: Runtime, exchange: Exchange) -> None:
    """GET /lora-adapters."""
    visitor, model = exchange.visitor, parameter(exchange, "model")
    header = (await runtime.targets.one(visitor, model)).header if model else None
    rows = await asyncio.to_thread(_rows, runtime.store, header)
    rows = [row for row in rows if visitor.sees_model(row.name)]
    if not visitor.is_admin:  # where files lie is nobody else's business
        rows = [msgspec.structs.replace(row, path=row.name) for row in rows]
    await exchange.answer_facts(rows)


async def change_adapters(_: Runtime, exchange: Exchange) -> None:
    """POST /lora-adapters."""
    await exchange.read_body()
    raise NotSupported(
        "scales for all requests are not supported, for they would change other clients' answers; say them in the "
        "request, as lora or in the model's name (model+adapter=0.5), or create a model with the adapter (ADAPTER in a "
        "Modelfile) and have clients name that"
    )


def _rows(store: Store, header: Header | None) -> list[AdapterRow]:
    """In a thread: hashes files whose digest is not known, once."""
    rows = []
    for place, adapter in enumerate(store.adapters()):
        if header is None or not adapter.misfit(header):
            with suppress(BadModelFile, Conflict):  # gone, or written to, since it was listed
                rows.append(_row(place, adapter))
    return rows


def _row(place: int, adapter: NamedAdapter) -> AdapterRow:
    return AdapterRow(
        id=place,
        path=str(adapter.path),
        scale=0.0,
        task_name=_text(adapter, "adapter.lora.task_name"),
        prompt_prefix=_text(adapter, "adapter.lora.prompt_prefix"),
        name=adapter.name,
        digest=f"sha256:{adapter.sha256}",
        kind=adapter.facts.kind,
        architecture=adapter.facts.architecture,
    )


def _text(adapter: NamedAdapter, key: str) -> str:
    value = adapter.header.metadata.get(key)
    return value if isinstance(value, str) else ""
