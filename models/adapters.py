"""Which adapters a request has in effect: those of the model's name, those that it lists besides, and the model's own.

    model+style            the model, with the adapter `style` at its whole strength
    model+style+terse=0.5  and with half of `terse`; negative scales turn an adapter round
    lora: [{"id": 0, "scale": 0.5}, {"id": "terse"}]

A model's own adapters (ADAPTER of its Modelfile, or if there is none those of its table in the settings file) are part
of it and stay in effect; an entry that names one of them changes its scale, and 0 takes it out. An entry of the list
counts over the name. `id` is a name, a path, a digest (`sha256:` and 64 hexadecimal digits), or a place in
`Store.adapters`, whose order is that of their coming: a place stays as long as no older adapter goes.

Every adapter is compared with the model's header (`gguf/adapter_header.py`) before an engine hears of it.

Runs in the daemon's threads: reads headers, and hashes files whose digest nobody knows, once.
Does not: load anything.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import NamedTuple
from weakref import WeakSet

from localrun.config import MAX_ADAPTERS, Settings, split_scale
from localrun.errors import BadModelFile, BadRequest, Conflict, LocalrunError, NotFound
from localrun.models.creation import adapter_file
from localrun.models.gguf.adapter_header import check_finite, misfit
from localrun.models.gguf.header import Header
from localrun.models.name import split_adapters
from localrun.models.storage.model import Evidence, Model, NamedAdapter, OwnAdapter
from localrun.models.storage.store import Store, adapter_not_found

# Pairs of a model and an adapter that a list of models has at most.
MAX_PAIRS = 256

# Files whose numbers are known to be numbers: a header lives as long as the store remembers its file.
_finite: WeakSet[Header] = WeakSet()
_DIGEST = re.compile(r"sha256:([0-9a-f]{64})", re.IGNORECASE)


class AdapterChoice(NamedTuple):
    """An adapter that a request lists; `field` names the entry in errors."""

    id: int | str
    scale: float
    field: str


class InEffect(NamedTuple):
    """A file and its strength. `sha256` is 64 hex digits of its content."""

    path: Path
    sha256: str
    size_bytes: int
    scale: float


class AdaptedModel(NamedTuple):
    """`model` is the one without adapters. `adapters` are all that are to be in effect, its own among them; None where
    nothing was asked for, and it has what it was opened with. `named` are those that were asked for, and `shown` says
    so for people, as in a name: `style`, `terse=0.5`."""

    model: Model
    adapters: tuple[InEffect, ...] | None = None
    named: tuple[NamedAdapter, ...] = ()
    shown: tuple[str, ...] = ()


def opened(store: Store, settings: Settings, model: Model) -> Model:
    """The model with the adapters that it is opened with: its own, or those of its table in the settings file.

    Raises BadModelFile naming the file, the table and the entry of one that is not here, is none, does not fit the
    model or is there twice. It is the model that cannot be used then, and no other.
    """
    table = settings.table_of(model.name)
    texts = None if table is None else model.load.over(table.load).adapters
    if table is None or not texts:
        return model
    found = dict[str, OwnAdapter]()
    for text in texts:
        try:
            name, scale = split_scale(text)
            file, header = adapter_file(store, name, table.file.parent)
            if problem := misfit(header, model.header):
                raise BadModelFile(f"it cannot be used with '{model.name}': it {problem}")
            if header not in _finite:
                check_finite(header)
                _finite.add(header)
            if (sha256 := store.adapter_sha256(file)) in found:
                raise BadModelFile("this adapter appears twice")
        except LocalrunError as error:
            problem = error.message.removeprefix("adapters: ")
            raise BadModelFile(
                f"{table.source}: adapters has '{text}': {problem}; put it right, or take it out of the table and "
                f"start the daemon again",
                field="model",
            ) from None
        found[sha256] = OwnAdapter(file, store.path_of(file), scale)
    return dataclasses.replace(model, adapters=tuple(each for each in found.values() if each.scale))


def refused(store: Store, settings: Settings) -> dict[str, str]:
    """The models that their tables keep from being used, and why. Reads the disk."""
    found = {}
    for model in store.list() if any(table.load.adapters for table in settings.models) else ():
        try:
            opened(store, settings, model)
        except BadModelFile as error:
            found[model.name] = error.message
    return found


def evidence(store: Store, settings: Settings, model: Model) -> Evidence:
    """Of the names in a model's table, to be asked for before `opened`: as `Store.evidence`. Their files have stamps of
    their own."""
    found = Evidence((), ())
    for text in model.load.over(settings.of_model(model.name)).adapters or ():
        with suppress(BadRequest):  # a path
            found = found.joined(store.evidence(split_scale(text)[0]))
    return found


def resolve(
    store: Store,
    name: str,
    wanted: Sequence[AdapterChoice] = (),
    *,
    settings: Settings | None = None,
    sees: Callable[[str], bool] = lambda _: True,
) -> AdaptedModel:
    """What `model+a+b=0.5` and a list of adapters mean together; with `settings` the model is `opened`. For who asks
    there are only those adapters that it `sees`, by their names.

    Raises what the store and `opened` raise for the model; of the adapters NotFound, and BadRequest for one that does
    not fit the model, is asked for twice, and for too many. The field is `model` or the entry's.
    """
    asked = split_adapters(name)
    model = store.resolve(asked.model)
    if settings is not None:
        model = opened(store, settings, model)
    if not asked.adapters and not wanted:
        return AdaptedModel(model)
    by_name = [(_adapter(store, text, "model", sees), scale, "model") for text, scale in asked.adapters]
    listed = [(_listed(store, each, sees), each.scale, each.field) for each in wanted]
    in_effect = {each.sha256: each for each in own(store, model)}
    for group in (by_name, listed):
        seen: set[str] = set()
        for adapter, scale, field in group:
            what = f"the adapter '{adapter.name}'" if field == "model" else f"{field}: the adapter '{adapter.name}'"
            if problem := adapter.misfit(model.header):
                raise BadRequest(f"{what} cannot be used with '{model.name}': it {problem}", field=field)
            if adapter.sha256 in seen:
                raise BadRequest(f"{what} is asked for twice", field=field)
            seen.add(adapter.sha256)
            in_effect[adapter.sha256] = InEffect(adapter.path, adapter.sha256, adapter.size_bytes, scale)
    adapters = tuple(each for each in in_effect.values() if each.scale)
    if len(adapters) > MAX_ADAPTERS:
        raise BadRequest(
            f"{len(adapters)} adapters are asked for, those of the model included; the limit is {MAX_ADAPTERS}",
            field=listed[0][2] if listed else "model",
        )
    named = {adapter.sha256: (adapter, scale) for adapter, scale, _ in (*by_name, *listed)}
    shown = [adapter.name if scale == 1 else f"{adapter.name}={scale:g}" for adapter, scale in named.values()]
    return AdaptedModel(model, adapters, tuple(adapter for adapter, _ in named.values()), tuple(shown))


def models_and_pairs(store: Store) -> tuple[list[Model], list[tuple[Model, NamedAdapter]]]:
    """All models, and those that generate once more with each adapter that fits; at most `MAX_PAIRS` of these."""
    found = list(store.survey())
    models = [each for each in found if isinstance(each, Model)]
    adapters = [each for each in found if isinstance(each, NamedAdapter)]
    fitting = (
        (model, adapter)
        for model in models
        if adapters and model.header.generates
        for adapter in adapters
        if not adapter.misfit(model.header)
    )
    return models, list(islice(fitting, MAX_PAIRS))


def own(store: Store, model: Model) -> list[InEffect]:
    """Those that the model is opened with. Raises BadModelFile."""
    return [InEffect(path, store.adapter_sha256(file), file.size_bytes, scale) for file, path, scale in model.adapters]


def _adapter(store: Store, name: str, field: str, sees: Callable[[str], bool]) -> NamedAdapter:
    if not sees(name):
        raise adapter_not_found(name, field)
    return store.adapter(name, field=field)


def _listed(store: Store, wanted: AdapterChoice, sees: Callable[[str], bool]) -> NamedAdapter:
    if isinstance(wanted.id, int):
        adapters = store.adapters()
        places = [place for place, adapter in enumerate(adapters) if sees(adapter.name)]
        if wanted.id not in places:
            there = f"the last one is {places[-1]}" if places else "there is none"
            raise NotFound.of(wanted.field, f"no adapter has the id {wanted.id}; {there} (GET /lora-adapters)")
        return adapters[wanted.id]
    digest = _DIGEST.fullmatch(wanted.id)
    if digest is None:
        return _adapter(store, wanted.id, wanted.field, sees)
    for adapter in store.adapters():
        with suppress(BadModelFile, Conflict):  # gone, or written to, since it was listed
            if sees(adapter.name) and adapter.sha256 == digest[1].lower():
                return adapter
    raise NotFound.of(wanted.field, f"no adapter has the digest {wanted.id}")
