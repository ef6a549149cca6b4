"""Which files of a repository make the model that a person asked for: quantization, shards, and projector; and which
projector in a folder is a model's.

Pure. File names are all that a repository says about its quantizations, so they are read as llama.cpp reads them: a
quantization is a part of the name between separators; shards are named `...-00001-of-00003.gguf`; files whose names say
that they are companions are no models: importance matrices and draft heads are left where they are. Draft heads and
adapters are taken from a repository that has nothing else, and every file by its whole name.

The rule without a tag, after the memory that this machine has:

1. `Q8_0` is as good as the full weights for every purpose, so F16, BF16 and F32 are only taken when nothing else is
   there (or asked for).
2. More than 4 bits are worth their time only while they leave room: the best quantization up to Q8_0 that takes at most
   half of the usable memory is taken.
3. If not even Q4_K_M is within that half, Q4_K_M (else the best of 4 bits) is taken as long as it fits at all.
4. Below 4 bits quality falls quickly: the best that fits is taken, and the reason says so.
5. If nothing fits, the smallest is taken, and the reason says that it will not run here as it is.

Does not: ask a network, or know a machine.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import PurePosixPath
from typing import Final, NamedTuple

from localrun.errors import BadRequest, NotFound
from localrun.models.fit import USABLE_RAM, in_gb, rough_bytes
from localrun.models.gguf.reader import shard_of
from localrun.models.gguf.tables import QUANT_ALIASES
from localrun.models.name import as_tag

_COMFORTABLE_FRACTION = 0.5

# Best first. Sorted by measured perplexity of llama.cpp's quantizations, not by size.
QUALITY = (
    "F32", "BF16", "F16", "Q8_K_XL", "Q8_0", "Q6_K_XL", "Q6_K_L", "Q6_K", "Q5_K_XL", "Q5_K_L", "Q5_K_M", "Q5_K_S",
    "Q5_1", "Q5_0", "MXFP4_MOE", "MXFP4", "NVFP4", "Q4_K_XL", "Q4_K_L", "Q4_K_M", "Q4_K_S", "Q4_K", "IQ4_NL", "IQ4_XS",
    "Q4_1", "Q4_0", "Q3_K_XL", "Q3_K_L", "Q3_K_M", "IQ3_M", "Q3_K_S", "IQ3_S", "IQ3_XS", "IQ3_XXS", "Q2_K_XL", "Q2_K_L",
    "Q2_K", "IQ2_M", "Q2_K_S", "IQ2_S", "IQ2_XS", "IQ2_XXS", "Q2_0", "TQ2_0", "TQ1_0", "IQ1_M", "IQ1_S", "Q1_0",
)  # fmt: skip
_RANK = {quant: rank for rank, quant in enumerate(QUALITY)}
_UNQUANTIZED_RANK = _RANK["F16"]
_FOUR_BITS = range(_RANK["MXFP4_MOE"], _RANK["Q4_0"] + 1)

_QUANT = re.compile(
    r"(?:^|[-._/ (])((?:BF16|FP?16|FP?32|Q4_0_[48]_[48]|IQ[1-6]_K(?:SS?|L|T)|I?Q[1-8]_"
    r"(?:[01]|NL|K_(?:XS|S|M|L|XL)|K|XXS|XS|S|M)|TQ[12]_0|MXFP4(?:_MOE)?|NVFP4|I2_S|Q8_KV)(?:_R(?:4|8|16))?)"
    r"(?=[-._/ )]|$)",
    re.IGNORECASE,
)
# Types that llama.cpp wrote for some processors and no longer reads, for it repacks Q4_0 by itself now, and those that
# only ik_llama.cpp and bitnet.cpp read.
_UNREADABLE = re.compile(r"Q4_0_[48]_[48]|IQ[1-6]_K.*|.*_R[0-9]+|I2_S|Q6_0|Q8_KV")
# What is no model: by how the name of the file begins, or by its folder; draft heads, projectors and adapters that are
# nothing else by any word.
_COMPANION = re.compile(
    r"(^|/)(imatrix|mtp|draft|(ggml-)?vocab)(/|[._-][^/]*$)|(^|[/._-])(mmproj|eagle3|dflash|dspark|lora)([/._-]|$)"
    r"|[._-](imatrix|vocab)\.gguf$",
    re.IGNORECASE,
)
# Of these no model is made, also where nothing else is there.
_NO_MODEL = re.compile(r"(^|[/._-])(mmproj|imatrix|vocab)([/._-]|$)", re.IGNORECASE)
# Models that have draft heads or are made to draft have these in their names, and so may draft heads alone.
_DRAFTS = re.compile(r"[/._-](mtp|draft)([/._-]|$)", re.IGNORECASE)
_TORN = re.compile(r"\.gguf[.-](part|split)", re.IGNORECASE)


class RemoteFile(NamedTuple):
    """A file of a repository; `path` is relative to its root."""

    path: str
    size_bytes: int


class Candidate(NamedTuple):
    """One model that a repository offers: a file, or all shards of one in order. `quant` is "" if no name says it."""

    quant: str
    files: tuple[RemoteFile, ...]

    @property
    def size_bytes(self) -> int:
        return sum(file.size_bytes for file in self.files)

    @property
    def may_draft(self) -> bool:
        return _DRAFTS.search(self.files[0].path) is not None

    @property
    def order(self) -> tuple[int, int, str]:
        """Of those of one type the one nearest to the root comes first, then the smallest."""
        path = self.files[0].path
        return path.count("/"), self.size_bytes, path

    @property
    def label(self) -> str:
        return self.quant or self.files[0].path


class QuantChoice(NamedTuple):
    """What to fetch: the model, and its projector. `reason` is a sentence for a person; "" where the name left no
    choice. `left_projector` is the path of one that belongs to the model and is not wanted."""

    quant: str
    files: tuple[RemoteFile, ...]
    reason: str
    projector: RemoteFile | None = None
    left_projector: str = ""


def quant_of(path: str) -> str:
    """The quantization that a file's name says, else its folder's, in capitals; "" if neither does."""
    for text in (path.rpartition("/")[2], path):
        found = _QUANT.findall(text.removesuffix(".gguf"))
        if found:
            name: str = found[-1].upper()
            return QUANT_ALIASES.get(name, name) if name.startswith("FP") else name
    return ""


def without_quant(stem: str) -> str:
    """What a file's name says besides its quantizations."""
    return _QUANT.sub("-", stem)


def is_quant(text: str) -> bool:
    """Whether the text is a quantization and nothing else; also one with Unsloth's `UD-` before it."""
    return _QUANT.fullmatch(text.upper().removeprefix("UD-")) is not None


def candidates(files: Iterable[RemoteFile], *, companions: bool = False) -> list[Candidate]:
    """The models among a repository's files, or their `companions`, best quantization first, what may be draft heads
    last. Left out are sets of shards with gaps, and types that llama.cpp does not read."""
    single: list[Candidate] = []
    shards: dict[tuple[str, int], dict[int, RemoteFile]] = {}
    for file in files:
        if not file.path.lower().endswith(".gguf") or bool(_COMPANION.search(file.path)) is not companions:
            continue
        shard = shard_of(file.path)
        if shard is None:
            single.append(Candidate(quant_of(file.path), (file,)))
        else:
            shards.setdefault((shard.stem, shard.n_files), {})[shard.number] = file
    for (stem, count), parts in shards.items():
        if set(parts) == set(range(1, count + 1)):
            single.append(Candidate(quant_of(stem), tuple(parts[number] for number in sorted(parts))))
    readable = [each for each in single if not _UNREADABLE.fullmatch(each.quant)]
    return sorted(readable, key=lambda each: (each.may_draft, _rank(each.quant), *each.order))


def choose(files: Sequence[RemoteFile], *, tag: str | None, memory_bytes: int, repo: str) -> QuantChoice:
    """The files for `tag`: a quantization, a file's name, or None (also "latest") for the rule above.

    `memory_bytes` is what this machine has in all. Raises NotFound for a tag that the repository does not have, naming
    those it has, and BadRequest for a repository without any model.
    """
    companions = candidates(files, companions=True)
    offered = candidates(files) or [each for each in companions if not _NO_MODEL.search(each.files[0].path)]
    if tag is not None and tag.lower().endswith(".gguf"):
        offered += companions  # by its whole name
    if not offered:
        raise BadRequest(
            _why_none(repo, files)
            or f"'{repo}' has no GGUF model files; look for a GGUF version of it (localrun search)",
            field="model",
        )
    if tag is None or tag.lower() == "latest":
        picked, reason = _by_memory([each for each in offered if each.may_draft == offered[0].may_draft], memory_bytes)
    else:
        picked, reason = _by_tag(offered, tag, repo), ""
    return QuantChoice(picked.quant, picked.files, reason)


def _why_none(repo: str, files: Sequence[RemoteFile]) -> str:
    """What a repository has instead of models, where that can be told; else ""."""
    for file in files:
        shard = shard_of(file.path)
        if shard is not None:
            names = [shard._replace(number=number).name for number in range(1, shard.n_files + 1)]
            if missing := sorted(set(names) - {each.path for each in files}):
                return f"'{repo}' has no whole model: {missing[0]} is missing; look for another GGUF of it"
        if _TORN.search(file.path):
            return (
                f"'{repo}' has parts of GGUF files ({file.path}): download them, join them to one file (cat), and "
                f"put that into the models folder"
            )
        if _UNREADABLE.fullmatch(quant_of(file.path)):
            return f"'{repo}' has only types that llama.cpp cannot read ({file.path}); look for another GGUF of it"
    return ""


def _by_tag(offered: Sequence[Candidate], tag: str, repo: str) -> Candidate:
    wanted = tag.lower()
    for candidate in offered:
        names = {file.path.lower() for file in candidate.files} | {candidate.files[0].path.lower().rpartition("/")[2]}
        if wanted in names | set(map(as_tag, names)):
            return candidate
    quant = QUANT_ALIASES.get(tag.upper(), tag.upper())
    for name in (tag.upper(), quant):
        for candidate in offered:
            if candidate.quant == name:
                return candidate
    # A tag that is a part of one file's name, such as UD-Q4_K_XL, or 4b-instruct where a repository has several models.
    part = re.compile(rf"(^|[-._/]){re.escape(wanted)}([-._/]|$)")
    named = [candidate for candidate in offered if part.search(candidate.files[0].path.lower())]
    if named:  # the one that says the least besides, so that compact is not i-compact
        return min(named, key=lambda each: len(without_quant(each.files[0].path)))
    there = list(dict.fromkeys(candidate.label for candidate in offered))
    more = f" and {len(there) - 20} more" if len(there) > 20 else ""
    raise NotFound(f"'{repo}' has no '{tag}'; it has {', '.join(there[:20])}{more}", field="model")


def _by_memory(offered: Sequence[Candidate], memory_bytes: int) -> tuple[Candidate, str]:
    """The rule of the module's text; `offered` is sorted best first."""
    usable = int(memory_bytes * USABLE_RAM)
    quantized = [each for each in offered if _rank(each.quant) > _UNQUANTIZED_RANK] or list(offered)
    if len(quantized) == 1:
        only = quantized[0]
        return only, f"{_named(only)}: the only one there{'' if _fits(only, usable) else _too_big(only, usable)}"
    # Q8_K_XL keeps many tensors in full: it is larger than Q8_0 without being better.
    quantized = [each for each in quantized if each.quant != "Q8_K_XL"] or quantized
    half = int(usable * _COMFORTABLE_FRACTION)
    comfortable = [each for each in quantized if _rank(each.quant) <= _RANK["Q4_K_M"] and _fits(each, half)]
    if comfortable:
        return comfortable[0], (
            f"{_named(comfortable[0])}: the best that takes at most half of the {in_gb(usable)} of memory that a model "
            f"may use here"
        )
    four_bits = sorted(
        (each for each in quantized if _rank(each.quant) in _FOUR_BITS), key=lambda each: each.quant != "Q4_K_M"
    )
    for each in four_bits:
        if _fits(each, usable):
            return each, (
                f"{_named(each)}: fits the {in_gb(usable)} of memory that a model may use here; more bits would take "
                f"more than half of it, or are not there"
            )
    fitting = [each for each in quantized if _fits(each, usable)]
    if fitting:
        return fitting[0], (
            f"{_named(fitting[0])}: the best that fits the {in_gb(usable)} of memory that a model may use here; there "
            f"are no 4 bits that fit, so expect weaker answers than from a smaller model of 4 bits or more"
        )
    smallest = min(quantized, key=lambda each: each.size_bytes)
    return smallest, f"{_named(smallest)}: the smallest there{_too_big(smallest, usable)}"


def _too_big(candidate: Candidate, usable_bytes: int) -> str:
    return (
        f", but it needs about {in_gb(rough_bytes(candidate.size_bytes))} of memory and a model may use "
        f"{in_gb(usable_bytes)} here; it will be slow or not load"
    )


def _rank(quant: str) -> int:
    """Position in `QUALITY`; a name without a quantization may be anything, and comes last."""
    return _RANK.get(quant, len(QUALITY))


def _fits(candidate: Candidate, memory_bytes: int) -> bool:
    return rough_bytes(candidate.size_bytes) <= memory_bytes


def _named(candidate: Candidate) -> str:
    return f"{candidate.label} ({in_gb(candidate.size_bytes)})"


# --- projectors (mmproj) ---
# A projector has the word `mmproj` in its name; what else is in it, besides its type and words like `model`, is the
# name of the model that it was made for:
#
# 1. A projector with a name belongs to the models whose names have all its words; of several the one with most words is
#    taken. `mmproj-gemma-3-4b-F16` is for `gemma-3-4b-it-Q4_K_M`, not for `gemma-3-12b-it-Q4_K_M`.
# 2. One without a name (`mmproj-F16`, `mmproj-model-f16`) belongs to the models of its repository, the nearest folder
#    first; in a folder it belongs to all models if they are one model in several types, else to none.
# 3. One with another name belongs to the model if there is only one, since somebody put them together.
# 4. Of several types F16 is taken, which is what projectors are made and tested in, else BF16, Q8_0, one whose name
#    says no type, F32, and others; then the smallest.
#
# Whether it fits is found out from its header (gguf/projectors.py), not here.

# What a person says who wants none.
NO_PROJECTOR: Final = "none"

_PROJECTOR = re.compile(r"(.*[-_.])?mmproj([-_.].*)?", re.IGNORECASE)
_QUALITY = ("F16", "BF16", "Q8_0", "", "F32")
_NO_NAME = frozenset(
    {*("mmproj", "model", "models", "ggml", "gguf", "text", "vision", "audio", "encoder", "projector"),
     *("ud", "imatrix", "imat", "i1", "clip", "siglip", "proj")}
)  # fmt: skip


def is_projector(name: str) -> bool:
    """Whether a GGUF file of this name is a projector, by the customs of the hub."""
    return name.lower().endswith(".gguf") and _PROJECTOR.fullmatch(name[: -len(".gguf")]) is not None


def projector_of_repository(model: str, files: Sequence[RemoteFile], *, wanted: str = "") -> RemoteFile | None:
    """The projector for the model whose (first) file is `model`; None where there is none.

    `wanted` is "" for the rule above, "none", or the name or the type of one. Raises NotFound for one that is not
    there, naming those that are.
    """
    there = [file for file in files if is_projector(_name(file.path))]
    if wanted.lower() == NO_PROJECTOR:
        return None
    if wanted:
        there = _wanted(there, wanted)
    ranked = _ranked(model, there, [file.path for file in files], is_repository=True)
    return ranked[0] if ranked else (there[0] if wanted else None)


def projector_in_folder(model: str, names: Iterable[str]) -> str | None:
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
    models = [path for path in paths if path.lower().endswith(".gguf") and not is_projector(_name(path))]
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
    stem = shard.stem if shard else name[: -len(".gguf")]
    return frozenset(re.split(r"[-_. ]+", without_quant(stem).lower())) - _NO_NAME - {""}


def _name(path: str) -> str:
    return path.rpartition("/")[2]
