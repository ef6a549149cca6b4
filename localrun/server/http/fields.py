"""Request fields that several APIs share: what a number may be, how to be served, how to sample.

The bounds keep values inside what the engine's samplers are defined for; they are wider than any useful setting. A
field that clients send as null when it is unset is `| None` in the body that uses it. Where a request says nothing
about sampling, the model's own parameters count (`ModelDefaults`), and then the API's defaults.
Does not: know the model; what only the model can tell (is this token id in its vocabulary) is asked by the routes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from localrun.errors import BadModelFile, BadRequest
from localrun.models.store import Model
from localrun.wire import Sampling

MAX_STOPS = 16
MAX_LOGIT_BIASES = 1024
MAX_CHOICES = 16
MAX_TOP_LOGPROBS = 20
# Above any context length; what is larger than the context is cut to it, so no loop or allocation follows this number.
MAX_TOKENS = 2**31 - 1

Temperature = Annotated[float, Meta(ge=0.0, le=100.0)]
Probability = Annotated[float, Meta(ge=0.0, le=1.0)]
TypicalP = Annotated[float, Meta(gt=0.0, le=1.0)]
RepeatPenalty = Annotated[float, Meta(gt=0.0, le=100.0)]
AdditivePenalty = Annotated[float, Meta(ge=-100.0, le=100.0)]
MirostatTau = Annotated[float, Meta(ge=0.0, le=100.0)]

# -1 stands for off (top_k), for the whole context (last_n), and for a random one (seed).
TopK = Annotated[int, Meta(ge=-1, le=MAX_TOKENS)]
LastN = Annotated[int, Meta(ge=-1, le=MAX_TOKENS)]
Seed = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
MirostatVersion = Annotated[int, Meta(ge=0, le=2)]

StopString = Annotated[str, Meta(max_length=1024)]
Stop = StopString | Annotated[list[StopString], Meta(max_length=MAX_STOPS)]
Bias = Annotated[float, Meta(ge=-100.0, le=100.0)]
TopLogprobs = Annotated[int, Meta(ge=0, le=MAX_TOP_LOGPROBS)]
TokenId = Annotated[int, Meta(ge=0, le=MAX_TOKENS)]


class ServiceFields(msgspec.Struct, frozen=True, kw_only=True):
    """How a request wants to be served: localrun's own fields, at the top level of every API's body. `caller.py` reads
    them, beside the headers that say the same."""

    lane: str | None = None
    latency: str | float | None = None
    deadline_s: float | None = None
    keep_alive: float | str | None = None


class Parameters(msgspec.Struct, frozen=True, kw_only=True):
    """How to sample, by the names that Ollama, llama-server and vLLM share. None where nothing is said.

    Whole numbers may come as floats: Ollama reads every JSON number as a double and cuts it for its integer options;
    clients rely on it (8192.0, 1.25 * n).
    """

    temperature: Temperature | None = None
    top_k: Annotated[float, Meta(ge=-1, le=MAX_TOKENS)] | None = None
    top_p: Probability | None = None
    min_p: Probability | None = None
    typical_p: TypicalP | None = None
    repeat_last_n: Annotated[float, Meta(ge=-1, le=MAX_TOKENS)] | None = None
    repeat_penalty: RepeatPenalty | None = None
    presence_penalty: AdditivePenalty | None = None
    frequency_penalty: AdditivePenalty | None = None
    mirostat: Annotated[float, Meta(ge=0, le=2)] | None = None
    mirostat_tau: MirostatTau | None = None
    mirostat_eta: Probability | None = None
    seed: Seed | Annotated[float, Meta(ge=-(2.0**53), le=2.0**53)] | None = None
    stop: Stop | None = None


class ModelDefaults(Parameters, frozen=True, kw_only=True):
    """A model's own parameters (of its Modelfile or its registry), as defaults below what a request says."""

    top_k: TopK | None = None
    repeat_last_n: LastN | None = None
    mirostat: MirostatVersion | None = None
    seed: Seed | None = None
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


MaxTokens = Annotated[int, Meta(ge=1, le=MAX_TOKENS)]
_Penalty = Annotated[float, Meta(ge=-2.0, le=2.0)]
_LogitBias = Annotated[dict[str, Bias], Meta(max_length=MAX_LOGIT_BIASES)]


class SamplingFields(Parameters, frozen=True, kw_only=True):
    """What the bodies of `/v1` have in common: OpenAI's fields, with the extras of llama-server and vLLM, and those of
    `ServiceFields`. None means the model's parameter, or OpenAI's default: temperature 1, everything else neutral."""

    presence_penalty: _Penalty | None = None
    frequency_penalty: _Penalty | None = None
    logit_bias: _LogitBias | None = None
    ignore_eos: bool | None = None
    top_k: TopK | None = None
    repetition_penalty: RepeatPenalty | None = None
    repeat_last_n: LastN | None = None
    mirostat: MirostatVersion | None = None
    seed: Seed | None = None
    lane: str | None = None
    latency: str | float | None = None
    deadline_s: float | None = None
    keep_alive: float | str | None = None

    def stop_strings(self, defaults: ModelDefaults) -> tuple[str, ...]:
        """The request's stop strings, else the model's."""
        return stop_strings(self.stop if self.stop is not None else defaults.stop)

    def sampling(self, n_vocab: int, defaults: ModelDefaults) -> Sampling:
        """Raises BadRequest for a biased token outside the vocabulary."""
        biases = _biases(self.logit_bias, n_vocab) if self.logit_bias else ()
        said = sampling((self, defaults), Sampling(logit_bias=biases))
        if self.repeat_penalty is None and self.repetition_penalty is not None:
            said = msgspec.structs.replace(said, repeat_penalty=self.repetition_penalty)
        return said


# The engine's names for what a person calls otherwise; and what it wants as whole numbers.
_ENGINE_NAMES = {name: name for name in Parameters.__struct_fields__ if name != "stop"} | {
    "repeat_last_n": "penalty_last_n"
}
_WHOLE = frozenset(("top_k", "repeat_last_n", "mirostat", "seed"))


def sampling(sources: Sequence[Parameters], default: Sampling) -> Sampling:
    """What the first of `sources` says that says something, parameter by parameter; else `default`."""
    said: dict[str, Any] = {}
    for name, engine_name in _ENGINE_NAMES.items():
        for source in sources:
            value = getattr(source, name)
            if value is not None:
                said[engine_name] = int(value) if name in _WHOLE else value
                break
    if said.get("top_k") == -1:
        said["top_k"] = 0
    if said.get("seed") == -1:  # the other spelling of random
        said["seed"] = None
    return msgspec.structs.replace(default, **said)


def stop_strings(stop: str | list[str] | None) -> tuple[str, ...]:
    """The stop strings of a request; an empty one would match everywhere and is left out."""
    if stop is None:
        return ()
    return tuple(text for text in ([stop] if isinstance(stop, str) else stop) if text)


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
