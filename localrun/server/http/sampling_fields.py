"""What the bodies of `/v1` have in common: how to sample, where to stop, and how to be served.

OpenAI's fields, with the extras of llama-server and vLLM. Where a request says nothing, the model's own parameters
count, and then OpenAI's defaults: temperature 1, everything else neutral.

Does not: know the model; what only the model can tell (is this token id in its vocabulary) is asked by the routes.
"""

from __future__ import annotations

import math
from typing import Annotated, TypeVar

from msgspec import Meta

from localrun.errors import BadRequest
from localrun.server.http import fields
from localrun.server.jobs.model_defaults import ModelDefaults
from localrun.wire import Sampling

MaxTokens = Annotated[int, Meta(ge=1, le=fields.MAX_TOKENS)]
_Penalty = Annotated[float, Meta(ge=-2.0, le=2.0)]
_LogitBias = Annotated[dict[str, fields.Bias], Meta(max_length=fields.MAX_LOGIT_BIASES)]


class SamplingFields(fields.ServiceFields, frozen=True, kw_only=True):
    """What every route takes. None means the model's parameter, or OpenAI's default."""

    stop: fields.Stop | None = None
    seed: fields.Seed | None = None
    temperature: fields.Temperature | None = None
    top_p: fields.Probability | None = None
    presence_penalty: _Penalty | None = None
    frequency_penalty: _Penalty | None = None
    logit_bias: _LogitBias | None = None
    # Not OpenAI's; as llama-server and vLLM name them.
    ignore_eos: bool | None = None
    top_k: fields.TopK | None = None
    min_p: fields.Probability | None = None
    typical_p: fields.TypicalP | None = None
    repeat_penalty: fields.RepeatPenalty | None = None
    repetition_penalty: fields.RepeatPenalty | None = None
    repeat_last_n: fields.LastN | None = None
    mirostat: fields.MirostatVersion | None = None
    mirostat_tau: fields.MirostatTau | None = None
    mirostat_eta: fields.Probability | None = None
    keep_alive: float | str | None = None

    def stop_strings(self, defaults: ModelDefaults) -> tuple[str, ...]:
        """The request's stop strings, else the model's."""
        return fields.stop_strings(self.stop if self.stop is not None else defaults.stop)

    def sampling(self, n_vocab: int, defaults: ModelDefaults) -> Sampling:
        """Raises BadRequest for a biased token outside the vocabulary."""
        repeat_penalty = self.repeat_penalty if self.repeat_penalty is not None else self.repetition_penalty
        seed = self.seed if self.seed is not None else defaults.seed
        return Sampling(
            temperature=_first(self.temperature, defaults.temperature, 1.0),
            top_k=max(0, _first(self.top_k, defaults.top_k, 0)),
            top_p=_first(self.top_p, defaults.top_p, 1.0),
            min_p=_first(self.min_p, defaults.min_p, 0.0),
            typical_p=_first(self.typical_p, defaults.typical_p, 1.0),
            repeat_penalty=_first(repeat_penalty, defaults.repeat_penalty, 1.0),
            presence_penalty=_first(self.presence_penalty, defaults.presence_penalty, 0.0),
            frequency_penalty=_first(self.frequency_penalty, defaults.frequency_penalty, 0.0),
            penalty_last_n=_first(self.repeat_last_n, defaults.repeat_last_n, 64),
            mirostat=_first(self.mirostat, defaults.mirostat, 0),
            mirostat_tau=_first(self.mirostat_tau, defaults.mirostat_tau, 5.0),
            mirostat_eta=_first(self.mirostat_eta, defaults.mirostat_eta, 0.1),
            seed=fields.seed_or_random(seed),
            logit_bias=_biases(self.logit_bias or {}, n_vocab),
        )


_Number = TypeVar("_Number", int, float)


def _first(asked: _Number | None, model_s: _Number | None, default: _Number) -> _Number:
    if asked is not None:
        return asked
    return default if model_s is None else model_s


def _biases(biases: dict[str, float], n_vocab: int) -> tuple[tuple[int, float], ...]:
    result = []
    for name, bias in biases.items():
        token = int(name) if name.isascii() and name.isdigit() and len(name) <= 10 else -1
        if not 0 <= token < n_vocab:
            raise BadRequest(
                f"logit_bias: {name[:40]!r} is not a token of this model; keys are token ids below {n_vocab}",
                field="logit_bias",
            )
        # -100 means a ban in OpenAI's API.
        result.append((token, -math.inf if bias <= -100 else bias))
    return tuple(result)
