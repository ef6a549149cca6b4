"""`options` of `/api/generate` and `/api/chat`, as sampling parameters.

Options that decide how Ollama loads a model are checked for their type and otherwise ignored: the daemon's settings
decide, and a loaded model is never loaded again for a request.

Does not: know the model, but for its parameters, which are defaults below a request's options.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from localrun.errors import BadModelFile
from localrun.models.store import Model
from localrun.server.http import fields
from localrun.wire import Sampling

# Ollama reads every JSON number as a double and cuts it for its integer options; clients rely on it (8192.0, 1.25 * n).
_LastN = Annotated[float, Meta(ge=-1, le=fields.MAX_TOKENS)]
_Predict = Annotated[float, Meta(ge=-2, le=fields.MAX_TOKENS)]
_Count = Annotated[float, Meta(ge=0, le=fields.MAX_TOKENS)]
_Version = Annotated[float, Meta(ge=0, le=2)]
_Seed = fields.Seed | Annotated[float, Meta(ge=-(2.0**53), le=2.0**53)]


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """`options`. None means Ollama's default; unknown names are ignored."""

    temperature: fields.Temperature | None = None
    top_k: _LastN | None = None
    top_p: fields.Probability | None = None
    min_p: fields.Probability | None = None
    typical_p: fields.TypicalP | None = None
    repeat_last_n: _LastN | None = None
    repeat_penalty: fields.RepeatPenalty | None = None
    presence_penalty: fields.AdditivePenalty | None = None
    frequency_penalty: fields.AdditivePenalty | None = None
    mirostat: _Version | None = None
    mirostat_tau: fields.MirostatTau | None = None
    mirostat_eta: fields.Probability | None = None
    seed: _Seed | None = None
    num_predict: _Predict | None = None
    num_keep: _LastN | None = None
    stop: fields.Stop | None = None
    num_ctx: _Count | None = None
    num_batch: _Count | None = None
    num_gpu: _LastN | None = None
    main_gpu: _Count | None = None
    num_thread: _Count | None = None
    draft_num_predict: _Count | None = None
    use_mmap: bool | None = None

    @property
    def n_predict(self) -> int:
        """Tokens to generate at most; -1 until the context is full."""
        return -1 if self.num_predict is None or self.num_predict < 0 else int(self.num_predict)

    @property
    def n_keep(self) -> int:
        """Tokens at the start of a prompt that truncation keeps; -1 is all that may be kept."""
        return int(_or(self.num_keep, 4))

    @property
    def stop_strings(self) -> tuple[str, ...]:
        return fields.stop_strings(self.stop)

    def over(self, model: Model) -> Options:
        """These options, and the model's own parameters where they say nothing. Raises BadModelFile naming one that is
        out of range."""
        if not model.parameters:
            return self
        try:
            # Registries write numbers in several ways ("40", 40.0).
            own = msgspec.convert(model.parameters, Options, strict=False)
        except msgspec.ValidationError as error:
            raise BadModelFile(f"a parameter of model '{model.name}' is out of range: {error}") from None
        missing = {name: getattr(own, name) for name in self.__struct_fields__ if getattr(self, name) is None}
        return msgspec.structs.replace(self, **missing)

    def sampling(self) -> Sampling:
        """With the defaults of Ollama's `api/types.go`, whatever the model."""
        return Sampling(
            temperature=_or(self.temperature, 0.8),
            top_k=max(0, int(_or(self.top_k, 40))),
            top_p=_or(self.top_p, 0.9),
            min_p=_or(self.min_p, 0.0),
            typical_p=_or(self.typical_p, 1.0),
            repeat_penalty=_or(self.repeat_penalty, 1.0),
            presence_penalty=_or(self.presence_penalty, 0.0),
            frequency_penalty=_or(self.frequency_penalty, 0.0),
            penalty_last_n=int(_or(self.repeat_last_n, 64)),
            mirostat=int(_or(self.mirostat, 0)),
            mirostat_tau=_or(self.mirostat_tau, 5.0),
            mirostat_eta=_or(self.mirostat_eta, 0.1),
            seed=None if self.seed is None else fields.seed_or_random(int(self.seed)),
        )


def _or(value: float | None, default: float) -> float:
    return default if value is None else value
