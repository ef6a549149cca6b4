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

_Predict = Annotated[float, Meta(ge=-2, le=fields.MAX_TOKENS)]
_Keep = Annotated[float, Meta(ge=-1, le=fields.MAX_TOKENS)]
_Count = Annotated[float, Meta(ge=0, le=fields.MAX_TOKENS)]
# Of Ollama's `api/types.go`, whatever the model.
_DEFAULT = Sampling(temperature=0.8, top_k=40, top_p=0.9)


class Options(fields.Parameters, frozen=True, kw_only=True):
    """`options`. None means Ollama's default; unknown names are ignored."""

    num_predict: _Predict | None = None
    num_keep: _Keep | None = None
    num_ctx: _Count | None = None
    num_batch: _Count | None = None
    num_gpu: _Keep | None = None
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
        return 4 if self.num_keep is None else int(self.num_keep)

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
        """With Ollama's defaults."""
        return fields.sampling((self,), _DEFAULT)
