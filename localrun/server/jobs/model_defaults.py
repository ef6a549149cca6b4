"""A model's own parameters (of its Modelfile or its registry), as defaults below what a request says.

Pure. Does not: read manifests (the store does), or know a default of its own.
"""

from __future__ import annotations

import msgspec

from localrun.errors import BadModelFile
from localrun.models.store import Model
from localrun.server.http import fields


class ModelDefaults(msgspec.Struct, frozen=True, kw_only=True):
    """Ollama's names, as manifests keep them. None where the model says nothing."""

    temperature: fields.Temperature | None = None
    top_k: fields.TopK | None = None
    top_p: fields.Probability | None = None
    min_p: fields.Probability | None = None
    typical_p: fields.TypicalP | None = None
    repeat_last_n: fields.LastN | None = None
    repeat_penalty: fields.RepeatPenalty | None = None
    presence_penalty: fields.AdditivePenalty | None = None
    frequency_penalty: fields.AdditivePenalty | None = None
    mirostat: fields.MirostatVersion | None = None
    mirostat_tau: fields.MirostatTau | None = None
    mirostat_eta: fields.Probability | None = None
    seed: fields.Seed | None = None
    stop: fields.Stop | None = None
    num_predict: int | None = None

    def n_predict(self, asked: int | None) -> int:
        """Tokens to generate at most; -1 until the context is full."""
        wanted = asked if asked is not None else self.num_predict
        return -1 if wanted is None or wanted < 0 else wanted


def defaults_of(model: Model) -> ModelDefaults:
    """Raises BadModelFile naming a parameter that is none."""
    try:
        # Registries and Modelfiles write numbers in several ways ("40", 40.0).
        return msgspec.convert(model.parameters, ModelDefaults, strict=False)
    except msgspec.ValidationError as error:
        raise BadModelFile(f"a parameter of model '{model.name}' is out of range: {error}", field="model") from None
