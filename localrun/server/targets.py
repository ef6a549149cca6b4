"""What a model's name in a request stands for, and whether who asks may use that.

A name is that of a model, of a model with adapters (`model+style=0.5`), or of a tier: two models, of which one answers
(`routing.py`). Who may use both models of a tier may use the tier, whatever its name.

Servers with one model need no name, and their clients send none, or `gpt-4o`. Then these answer, in this order:

1. the setting `default_model`, where text is wanted; with it, names of hosted models stand for no name
2. of the loaded models that can do it, the one that answered last
3. the one that was loaded last, if it is still here; also after a restart
4. the only one that is here, or the only one besides the built-in model, or the built-in one

Only models that whoever asks may use. Where no model is made for embeddings, one that generates makes them.

Invariant: who may not use what a name stands for hears nothing of it but ModelNotFound; that comes before all else.
Does not: load a model, or choose between the two of a tier.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from localrun.config import Settings, Size, Tier, folders
from localrun.errors import BadRequest, LocalrunError, ModelNotFound, NotFound
from localrun.last_model import BUILT_IN, last_model
from localrun.models import adapters
from localrun.models.adapters import AdaptedModel
from localrun.models.name import split_adapters
from localrun.models.storage.model import Model
from localrun.models.storage.store import Store
from localrun.server.engines.resident import Resident, ResidentState, Use, pooling_for
from localrun.server.jobs.job import Asker, JobRequest
from localrun.server.prompting.profile import capabilities
from localrun.snapshot import EngineRow

# The names that OpenAI, Anthropic and Google give to their models.
_HOSTED = re.compile(
    r"(?:gpt-[34567]|gpt-image|chatgpt-|o[134](?:-|$)|codex-|claude-|gemini-|(?:text-)?(?:davinci|babbage|curie|ada)\b"
    r"|text-embedding-)",
    re.IGNORECASE,
)
_MAX_SUGGESTED = 3


class Target(NamedTuple):
    """What a name stands for. `name` is as answers have it, `adapted` the model with the adapters of the name; of a
    `tier` the large one."""

    name: str
    adapted: AdaptedModel
    tier: Tier | None = None

    @property
    def model(self) -> Model:
        return self.adapted.model

    @property
    def parent(self) -> str:
        """The model's own name, where the name has adapters besides."""
        return self.model.name if self.tier is None and self.adapted.adapters is not None else ""


@dataclass(frozen=True)
class Targets:
    """See the module. `residents` are the models that are loaded, `elsewhere` rows of engines on other machines."""

    settings: Settings
    store: Store
    residents: Callable[[], list[Resident]]
    elsewhere: Callable[[], list[EngineRow]]

    def names(self, name: str) -> tuple[str, ...]:
        """The models that a name stands for: of a tier the small one, which sees every request, and the large one."""
        tier = self.settings.tier(name)
        return (name,) if tier is None else tier.models

    # --- whether it may be used; none of these reads the disk ----------------------------------------------------

    def can_see(self, who: Asker, name: str) -> bool:
        """Whether somebody may use the model, or both models of the tier, with this name."""
        tier = self._tier(name)
        return all(map(who.may_use_model, (name,) if tier is None else tier.models))

    def tier(self, who: Asker, name: str) -> Tier | None:
        """The tier that has the name; None for a model's. Raises BadRequest for a tier with adapters: they are made for
        one model."""
        self._check_seen(who, name)
        tier = self._tier(name)
        if tier is not None and "+" in name:
            raise BadRequest(
                f"'{tier.name}' is a tier, and adapters are made for one model; name '{tier.small}' or "
                f"'{tier.large}', or write the adapter into {tier.source}",
                field="model",
            )
        return tier

    def check_one(self, who: Asker, name: str, *, draft: str = "") -> None:
        """Raises BadRequest for a tier's name, where one model is to answer, or to draft."""
        if not who.may_use_model(name):
            raise ModelNotFound(name[:200])
        tier = self._tier(name)
        if tier is not None:
            self._check_seen(who, name)
            raise BadRequest(
                f"'{tier.name}' is a tier, which only answers with text; here name a model, such as '{tier.small}' or "
                f"'{tier.large}'",
                field="model",
            )
        if draft and self.settings.tier(draft) is not None:
            raise BadRequest.of(
                "draft", f"'{draft}' is a tier, and one model drafts; name that one, or leave draft out"
            )

    def check_own(self, who: Asker, name: str, field: str = "model") -> None:
        """Raises BadRequest for a tier's name, where that of a model is meant that is here, or is to be."""
        self._check_seen(who, name)
        tier = self.settings.tier(name)
        if tier is not None:
            raise BadRequest(
                f"'{tier.name}' is a tier of {tier.file}; use the name of a model, such as '{tier.small}' or "
                f"'{tier.large}', or remove the table [tiers.{tier.name}]",
                field=field,
            )

    def _tier(self, name: str) -> Tier | None:
        return self.settings.tier(split_adapters(name).model) if self.settings.tiers else None

    def _check_seen(self, who: Asker, name: str) -> None:
        if not self.can_see(who, name):
            raise ModelNotFound(name[:200])

    # --- what it is; in a thread, for these read the store -------------------------------------------------------

    def find(self, who: Asker, name: str) -> Target:
        """Raises as `tier`, what `adapters.resolve` raises, and NotFound for a tier that lacks a model."""
        tier = self.tier(who, name)
        return Target(name, adapters.resolve(self.store, name)) if tier is None else self.of_tier(tier)

    async def one(self, who: Asker, name: str) -> Model:
        """A model by its own name. Raises as `check_one`, and what the store raises."""
        self.check_one(who, name)
        return await asyncio.to_thread(self.store.resolve, name)

    async def adapted(self, ask: JobRequest) -> AdaptedModel:
        """The model to borrow, and the adapters that are to be in effect.

        Raises what `adapters.resolve` raises for the names, and BadRequest for adapters where there is no text to
        generate.
        """
        found = await asyncio.to_thread(
            adapters.resolve, self.store, ask.model, ask.lora, settings=self.settings, sees=ask.may_use_model
        )
        if found.adapters is not None and ask.use is not Use.TEXT:
            raise BadRequest(
                f"adapters are for requests that generate text; ask for '{found.model.name}' alone",
                field="lora" if ask.lora else "model",
            )
        return found

    def visible(self, who: Asker) -> list[Target]:
        """All models that somebody may use, the tiers that can answer, and models with an adapter: one each, for more
        could be in any number."""
        alone, adapted = adapters.models_and_pairs(self.store)
        found = [Target(model.name, AdaptedModel(model)) for model in alone]
        for tier in self.settings.tiers:
            with suppress(LocalrunError):
                found.append(self.of_tier(tier))
        found += [Target(f"{model.name}+{adapter.name}", AdaptedModel(model, ())) for model, adapter in adapted]
        return [target for target in found if self.can_see(who, target.name)]

    def of_tier(self, tier: Tier) -> Target:
        """Raises NotFound for a tier that lacks a model."""
        self._of_size(tier, "small")
        return Target(tier.name, self._of_size(tier, "large"), tier)

    def models_of(self, tier: Tier) -> tuple[Model, Model]:
        """The small and the large one. Raises NotFound for one that is not here."""
        return self._of_size(tier, "small").model, self._of_size(tier, "large").model

    def _of_size(self, tier: Tier, size: Size) -> AdaptedModel:
        name = tier.small if size == "small" else tier.large
        try:
            return adapters.resolve(self.store, name)
        except ModelNotFound:
            raise NotFound(
                f"the {size} model of the tier '{tier.name}', '{name}', is not here; pull it with `localrun pull "
                f"{name}`, or change `{size}` in {tier.source}",
                field="model",
            ) from None

    def here(self, name: str) -> Model | None:
        """The model without its adapters; None where loading it says what is wrong with it."""
        with suppress(LocalrunError):
            return self.store.resolve(split_adapters(name).model)
        return None

    def missing(self, who: Asker, name: str) -> str | None:
        """The model that is not here, of those that a name stands for; the name itself for who may not use it."""
        if not all(map(who.may_use_model, self.names(name))):
            return name
        for each in self.names(name):
            try:
                adapters.resolve(self.store, each)
            except LocalrunError:
                return each
        return None

    # --- where none is named -------------------------------------------------------------------------------------

    async def named(self, who: Asker, asked: str, use: Use = Use.TEXT, *, fills_in: bool = False) -> str:
        """The name of the model that is to answer; with `fills_in` one that can fill in the middle. Raises BadRequest
        where none can be told from the others."""
        default = self.settings.default_model
        if asked and not (default and _HOSTED.match(asked) and not await asyncio.to_thread(self._is_known, asked)):
            return asked
        if default and use is Use.TEXT and not fills_in:
            return default
        loaded = [
            one
            for one in self.residents()
            if one.use is use and one.state is not ResidentState.STOPPING and who.may_use_model(one.model.name)
        ]
        if fills_in:
            loaded = [one for one in loaded if "insert" in capabilities(one.model)]
        if loaded:
            return max(loaded, key=lambda one: one.last_used_s).model.name
        return await asyncio.to_thread(self._of_those_here, who, use, fills_in=fills_in)

    def _is_known(self, name: str) -> bool:
        return self.here(name) is not None or self.settings.tier(name) is not None

    def _of_those_here(self, who: Asker, use: Use, *, fills_in: bool) -> str:
        here = [model for model in self.store.list() if who.may_use_model(model.name)]
        able = [each for each in here if _is_for(each, use) and not (fills_in and "insert" not in capabilities(each))]
        if not able and use is Use.EMBED:
            able = [model for model in here if _is_for(model, Use.TEXT)]
        names = [model.name for model in able]
        running = {row.model for row in self.elsewhere()}.intersection(names)
        if len(running) == 1:
            return running.pop()
        last = last_model(last_loaded_file(use))
        with suppress(ValueError):
            return names[names.index(last)]
        others = [name for name in names if name.removesuffix(":latest") != BUILT_IN]
        if len(others or names) == 1:
            return (others or names)[0]
        raise BadRequest(f"model is required: {_why(others, use, fills_in=fills_in)}", field="model")


def last_loaded_file(use: Use) -> Path:
    """Where the name of the model is kept that was loaded last for this."""
    return folders().state / f"last-loaded-{use}"


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
