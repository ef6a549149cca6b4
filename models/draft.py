"""Which model may draft for another: a smaller one whose tokens are the other's.

A draft model guesses the tokens that follow, and the model verifies them several at a time. So a token's number must
mean the same text to both. As in llama.cpp (`common_speculative_are_compatible`), the tokenizers are of one type with
the same tokens for beginning and end, the sizes differ by at most `MAX_DIFFERENCE`, and all tokens that both have mean
the same, but for the first `N_FREE`, which some converters name differently.

Used by the daemon's threads. Reads the vocabularies of both files, once for each pair.
Does not: fetch a model that is not here, or say what one costs (memory.py).
"""

from __future__ import annotations

from bisect import bisect_right
from typing import Final

from localrun.errors import BadRequest, LocalrunError, ModelNotFound
from localrun.models.gguf.bounded_reader import BoundedReader, open_model_file
from localrun.models.gguf.header import ArraySummary, Header, once_for_each_pair, read_token
from localrun.models.memory import memory_kind
from localrun.models.name import Kind, ModelName
from localrun.models.storage.model import Model
from localrun.models.storage.store import Store

MAX_DIFFERENCE: Final = 128
N_FREE: Final = 5

_TOKENS = "tokenizer.ggml.tokens"
_PREFIX = "draft: "  # the field of a request
_CHUNK_BYTES = 256 * 1024
_MAX_SHOWN = 40


def find(store: Store, name: str, *, model: str, target: Header) -> Model:
    """The model that `name` means, if it can draft for `model` with the header `target`.

    Raises BadRequest for a name that is none, for a model that is not here, cannot be read or is of another kind or
    vocabulary, and for the model itself.
    """
    try:
        found = store.resolve(name)
        found.check_here()
    except ModelNotFound:
        is_path = ModelName.parse(name).kind is Kind.PATH
        way_out = "give the path of a GGUF file that is there" if is_path else f"get it first (localrun pull {name})"
        raise _refused(f"'{name}' is not here; {way_out}") from None
    except LocalrunError as error:
        raise _refused(error.message) from None
    if found.header.path.resolve() == target.path.resolve():
        raise _refused(f"'{name}' is '{model}' itself; name a smaller model of the same family, or leave draft out")
    if not found.header.generates:
        raise _refused(f"'{name}' is made for embeddings or ranking; name a model that generates text")
    if memory_kind(found.header) in ("recurrent", "hybrid"):
        raise _refused(f"'{name}' has recurrent layers, which cannot take back a wrong guess; name a model without")
    if problem := vocabulary_problem(target, found.header):
        raise _refused(
            f"'{name}' cannot draft for '{model}': {problem}; name a model of the same family, or leave draft out"
        )
    return found


def problem_of(error: LocalrunError) -> str:
    """What is wrong with a draft model, where it was not a request that named it."""
    return error.message.removeprefix(_PREFIX)


@once_for_each_pair
def vocabulary_problem(target: Header, draft: Header) -> str:
    """Why the tokens of `draft` are not those of `target`, as a clause; "" if they are. Raises BadModelFile for a file
    that is gone or was changed in place."""
    theirs, ours = target.metadata.get(_TOKENS), draft.metadata.get(_TOKENS)
    if not (_is_vocabulary(theirs) and _is_vocabulary(ours)):
        return "one of them has no vocabulary"
    assert isinstance(theirs, ArraySummary)
    assert isinstance(ours, ArraySummary)
    for key, what in (
        ("model", "type of tokenizer"),
        ("bos_token_id", "token for the beginning"),
        ("eos_token_id", "token for the end"),
    ):
        wanted, has = (header.metadata.get(f"tokenizer.ggml.{key}") for header in (target, draft))
        if wanted != has:
            return f"its {what} is {_shown(has)}, the other's {_shown(wanted)}"
    if abs(theirs.length - ours.length) > MAX_DIFFERENCE:
        return (
            f"its vocabulary has {ours.length} tokens, the other's {theirs.length}, and they may differ by "
            f"{MAX_DIFFERENCE}"
        )
    with open_model_file(target.path) as first, open_model_file(draft.path) as second:
        token = _first_difference((first, theirs), (second, ours))
    if token is None:
        return ""
    wanted, has = read_token(target.path, theirs, token), read_token(draft.path, ours, token)
    return f"its token {token} is {_shown(has)}, the other's {_shown(wanted)}"


def _first_difference(one: tuple[BoundedReader, ArraySummary], two: tuple[BoundedReader, ArraySummary]) -> int | None:
    """The first token whose text differs. The texts stand one behind the other, each after its length: as long as the
    bytes are the same, so are the texts."""
    n_compared = max(0, min(one[1].length, two[1].length) - N_FREE)
    n_bytes = _length(*one, n_compared)
    for reader, tokens in (one, two):
        reader.seek(tokens.offset, "the tokens")
        reader.skip_strings(N_FREE, "the tokens")
    done = 0
    while done < n_bytes:
        n_chunk = min(_CHUNK_BYTES, n_bytes - done)
        first, second = (_up_to(reader, n_chunk) for reader, _ in (one, two))
        if first != second:
            done += next((at for at, pair in enumerate(zip(first, second, strict=False)) if pair[0] != pair[1]),
                         min(len(first), len(second)))  # fmt: skip
            return N_FREE + bisect_right(range(n_compared), done, key=lambda count: _length(*one, count)) - 1
        done += n_chunk
    return None


def _up_to(reader: BoundedReader, n_bytes: int) -> bytes:
    """So many bytes, or what is left: one vocabulary may be shorter than the other and end its file."""
    return reader.take(min(n_bytes, reader.size_bytes - reader.position), "the tokens")


def _length(reader: BoundedReader, tokens: ArraySummary, count: int) -> int:
    """Bytes of `count` texts after the first `N_FREE`."""
    reader.seek(tokens.offset, "the tokens")
    reader.skip_strings(N_FREE, "the tokens")
    began = reader.position
    reader.skip_strings(count, "the tokens")
    return reader.position - began


def _is_vocabulary(tokens: object) -> bool:
    return isinstance(tokens, ArraySummary) and tokens.type == "str" and tokens.length > N_FREE


def _shown(value: object) -> str:
    return "not stated" if value is None else repr(value)[:_MAX_SHOWN]


def _refused(problem: str) -> BadRequest:
    return BadRequest(f"{_PREFIX}{problem}", field="draft")
