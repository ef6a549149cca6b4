"""Which projector (mmproj) belongs to a model: among the files of a repository, or of a folder.

Pure. File names are all that says it. A projector has the word `mmproj` in its name; what else is in it, besides its
type and words like `model`, is the name of the model that it was made for:

1. A projector with a name belongs to the models whose names have all its words; of several the one with most words is
   taken. `mmproj-gemma-3-4b-F16` is for `gemma-3-4b-it-Q4_K_M`, not for `gemma-3-12b-it-Q4_K_M`.
2. One without a name (`mmproj-F16`, `mmproj-model-f16`) belongs to the models of its repository, the nearest folder
   first; in a folder it belongs to all models if they are one model in several types, else to none.
3. One with another name belongs to the model if there is only one, since somebody put them together.
4. Of several types F16 is taken, which is what projectors are made and tested in, else BF16, Q8_0, one whose name says
   no type, F32, and others; then the smallest.

Whether it fits is found out from its header (gguf/projectors.py), not here.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import PurePosixPath
from typing import Final, NamedTuple

from localrun.errors import NotFound
from localrun.models.gguf.ggml_types import QUANT_ALIASES
from localrun.models.gguf.reader import shard_of
from localrun.models.quant_choice import RemoteFile, quant_of, without_quant

SUFFIX = ".gguf"
# What a person says who wants none.
NONE: Final = "none"

_PROJECTOR = re.compile(r"(.*[-_.])?mmproj([-_.].*)?", re.IGNORECASE)
_QUALITY = ("F16", "BF16", "Q8_0", "", "F32")
_NO_NAME = frozenset(
    {*("mmproj", "model", "models", "ggml", "gguf", "text", "vision", "audio", "encoder", "projector"),
     *("ud", "imatrix", "imat", "i1", "clip", "siglip", "proj")}
)  # fmt: skip


def is_projector(name: str) -> bool:
    """Whether a GGUF file of this name is a projector, by the customs of the hub."""
    return name.lower().endswith(SUFFIX) and _PROJECTOR.fullmatch(name[: -len(SUFFIX)]) is not None


def of_repository(model: str, files: Sequence[RemoteFile], *, wanted: str = "") -> RemoteFile | None:
    """The projector for the model whose (first) file is `model`; None where there is none.

    `wanted` is "" for the rule above, "none", or the name or the type of one. Raises NotFound for one that is not
    there, naming those that are.
    """
    there = [file for file in files if is_projector(_name(file.path))]
    if wanted.lower() == NONE:
        return None
    if wanted:
        there = _wanted(there, wanted)
    ranked = _ranked(model, there, [file.path for file in files], is_repository=True)
    return ranked[0] if ranked else (there[0] if wanted else None)


def in_folder(model: str, names: Iterable[str]) -> str | None:
    files = [RemoteFile(name, 0) for name in names]
    projectors = [file for file in files if is_projector(file.path)]
    ranked = _ranked(model, projectors, [file.path for file in files], is_repository=False)
    return ranked[0].path if ranked else None


def _wanted(there: Sequence[RemoteFile], wanted: str) -> list[RemoteFile]:
    quant = QUANT_ALIASES.get(wanted.upper(), wanted.upper())
    named = [file for file in there if wanted.lower() in (file.path.lower(), _name(file.path).lower())]
    named = named or [file for file in there if quant_of(file.path) == quant]
    if not named:
        has = f"it has {', '.join(file.path for file in there[:20])}" if there else "it has none"
        raise NotFound(f"the repository has no projector '{wanted[:100]}'; {has}", field="projector")
    return named


class _Rank(NamedTuple):
    """Lower is better."""

    relation: int
    n_words_short: int
    distance: int
    quality: int
    size_bytes: int
    path: str


def _ranked(
    model: str, projectors: Sequence[RemoteFile], paths: Iterable[str], *, is_repository: bool
) -> list[RemoteFile]:
    """Those that may belong to the model, best first."""
    if not projectors:
        return []
    models = [path for path in paths if path.lower().endswith(SUFFIX) and not is_projector(_name(path))]
    is_only_one = len({_words(path) for path in models}) <= 1
    ranks = []
    for file in projectors:
        own = _words(file.path)
        if own and own <= _words(model):
            relation = 0
        elif not own and (is_repository or is_only_one):
            relation = 1
        elif is_only_one:
            relation = 2
        else:
            continue
        quant = quant_of(_name(file.path))
        quality = _QUALITY.index(quant) if quant in _QUALITY else len(_QUALITY)
        n_words = len(own) if relation == 0 else 0
        ranks.append(
            (_Rank(relation, -n_words, _distance(model, file.path), quality, file.size_bytes, file.path), file)
        )
    return [file for _, file in sorted(ranks)]


def _distance(model: str, projector: str) -> int:
    """0 in the same folder, 1 in one above it, 2 elsewhere."""
    own, its = PurePosixPath(model).parent, PurePosixPath(projector).parent
    return 0 if own == its else 1 if its in own.parents else 2


def _words(path: str) -> frozenset[str]:
    """What a file's name says besides a type, the number of a shard, and that it is a model or a projector."""
    name = _name(path)
    shard = shard_of(name)
    stem = shard.stem if shard else name[: -len(SUFFIX)]
    return frozenset(re.split(r"[-_. ]+", without_quant(stem).lower())) - _NO_NAME - {""}


def _name(path: str) -> str:
    return path.rpartition("/")[2]
