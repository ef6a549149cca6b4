"""What a model file says about itself: metadata, tensors, the dimensions derived from them, and what it is for (text,
embeddings, or ranking).

Pure and immutable, but for the texts of a few tokens, which are read from the file again when they are asked for. Made
by `reader.read_header`, which has checked everything that the properties rely on: none of them raises, and dimensions
are within the limits named in `dimension_problem`.

Does not: hold the vocabulary (hundreds of thousands of texts) or any weights. Whoever asks for texts of tokens keeps
them: to find some is a walk over all (some milliseconds per hundred thousand).
"""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property, wraps
from pathlib import Path
from typing import Final, NamedTuple
from weakref import WeakKeyDictionary

from localrun.models.gguf.bounded_reader import BoundedReader, open_model_file
from localrun.models.gguf.tables import FILE_TYPES

# Real vocabularies have at most some thousand (reserved ones included), each a few dozen bytes long.
MAX_CONTROL_TOKENS: Final = 16_384
MAX_TOKEN_BYTES: Final = 512

# LLAMA_TOKEN_TYPE_CONTROL in llama.h.
_CONTROL = 3


class ArraySummary(NamedTuple):
    """An array (or a very long text, as type "u8") whose `length` elements were left in the file at `offset`."""

    type: str
    length: int
    offset: int


def read_control_tokens(path: Path, tokens: ArraySummary, token_types: ArraySummary) -> tuple[str, ...]:
    """Texts of the tokens whose type is control, in id order; empty texts are left out.

    Raises BadModelFile when there are more than the limits above, and when the file is gone or was changed in place.
    """
    with open_model_file(path) as reader:
        reader.seek(token_types.offset, "the token types")
        raw_types = reader.take(4 * min(tokens.length, token_types.length), "the token types")
        wanted = [index for index, (kind,) in enumerate(struct.iter_unpack("<i", raw_types)) if kind == _CONTROL]
        if len(wanted) > MAX_CONTROL_TOKENS:
            reader.fail(f"has {len(wanted)} control tokens; the limit is {MAX_CONTROL_TOKENS}")
        texts = _texts(reader, tokens, wanted)
    return tuple(text for text in texts if text)


def read_token(path: Path, tokens: ArraySummary, index: int) -> str:
    """The text of one token. Raises BadModelFile as `read_control_tokens` does."""
    with open_model_file(path) as reader:
        return _texts(reader, tokens, [index])[0]


def _texts(reader: BoundedReader, tokens: ArraySummary, indexes: list[int]) -> list[str]:
    """The texts at ascending `indexes`."""
    reader.seek(tokens.offset, "the tokens")
    texts = []
    next_index = 0
    for index in indexes:
        reader.skip_strings(index - next_index, "the tokens")
        next_index = index + 1
        length = reader.u64("a token's length")
        if length > MAX_TOKEN_BYTES:
            reader.fail(f"has a special token of {length} bytes; the limit is {MAX_TOKEN_BYTES}")
        texts.append(reader.take(length, "a token").decode("utf-8", errors="replace"))
    return texts


# LLAMA_MAX_LAYERS in llama-hparams.h; llama.cpp aborts beyond it.
MAX_LAYERS = 512
MAX_WIDTH = 1 << 24
MAX_CONTEXT_TOKENS = (1 << 31) - 1

MEAN, CLS, LAST, RANK = "mean", "cls", "last", "rank"
# enum llama_pooling_type; 0 is none.
_POOLINGS = {1: MEAN, 2: CLS, 3: LAST, 4: RANK}
# Either makes scores; llama.cpp returns parts of a hidden state where both are missing.
RANKING_HEADS: Final = frozenset({"cls.weight", "cls.output.weight"})
# Architectures that llama.cpp runs without a KV cache, a whole text at once.
ENCODERS: Final = frozenset(
    {
        *("bert", "nomic-bert", "nomic-bert-moe", "neo-bert", "jina-bert-v2", "jina-bert-v3", "modern-bert"),
        *("eurobert", "gemma-embedding", "t5encoder"),
    }
)

# Set in general.file_type when the converter guessed it (LLAMA_FTYPE_GUESSED).
_GUESSED_FLAG = 1024


Scalar = bool | int | float | str
Value = Scalar | tuple[Scalar, ...] | ArraySummary

# What `general.sampling.*` says, which llama.cpp's converter takes from a repository's generation_config.json: the name
# that Ollama's options have for it, its type, and the limits of requests.
_RECOMMENDED = {
    "temp": ("temperature", float, 0.0, 100.0),
    "top_k": ("top_k", int, -1, 2**31 - 1),
    "top_p": ("top_p", float, 0.0, 1.0),
    "min_p": ("min_p", float, 0.0, 1.0),
    "xtc_probability": ("xtc_probability", float, 0.0, 1.0),
    "xtc_threshold": ("xtc_threshold", float, 0.0, 1.0),
    "penalty_last_n": ("repeat_last_n", int, -1, 2**31 - 1),
    "penalty_repeat": ("repeat_penalty", float, 0.01, 100.0),
    "mirostat": ("mirostat", int, 0, 2),
    "mirostat_tau": ("mirostat_tau", float, 0.0, 100.0),
    "mirostat_eta": ("mirostat_eta", float, 0.0, 1.0),
}


class FileKind(StrEnum):
    """What a GGUF file is, by its header; texts that are none of these are other parts of models."""

    MODEL = "model"
    PROJECTOR = "projector"
    ADAPTER = "adapter"
    CONTROL_VECTOR = "control vector"


# The parts that change what a model says, and are named like models.
ADAPTERS: Final = frozenset({FileKind.ADAPTER, FileKind.CONTROL_VECTOR})

# Files say what they are by a type, but these by their architecture.
_KIND_BY_ARCHITECTURE = {"clip": FileKind.PROJECTOR, "controlvector": FileKind.CONTROL_VECTOR}


def kind_of(metadata: Mapping[str, Value]) -> str:
    """One of `Kind`, or what the file calls itself."""
    by_architecture = _KIND_BY_ARCHITECTURE.get(str(metadata.get("general.architecture")))
    return by_architecture or str(metadata.get("general.type", FileKind.MODEL))


class TensorInfo(NamedTuple):
    """`shape` in GGML's order, row length first. `offset` counts from the start of the tensor's own file."""

    name: str
    shape: tuple[int, ...]
    type_name: str
    offset: int
    size_bytes: int

    @property
    def n_elements(self) -> int:
        product = 1
        for dimension in self.shape:
            product *= dimension
        return product


@dataclass(frozen=True, kw_only=True, eq=False)
class Header:
    """`data_offset` is where the weights begin; everything before it is the header's own bytes.

    A model that is split over several files has their paths in `shard_paths`, `path` first, `size_bytes` of all
    together and the tensors of all; metadata and `data_offset` are those of the first.
    """

    path: Path
    size_bytes: int
    version: int
    architecture: str
    metadata: dict[str, Value]
    tensors: tuple[TensorInfo, ...]
    data_offset: int
    shard_paths: tuple[Path, ...] = ()

    @property
    def kind(self) -> str:
        return kind_of(self.metadata)

    @property
    def name(self) -> str:
        """`general.name`, else the file's name without its ending."""
        return self.text("general.name") or self.path.stem

    @property
    def n_ctx_train(self) -> int:
        return self.count("context_length")

    @property
    def n_layers(self) -> int:
        return self.count("block_count")

    @property
    def n_embd(self) -> int:
        return self.count("embedding_length")

    @property
    def n_heads(self) -> int:
        """Query heads of the layer that has most; 0 for a model without attention."""
        return max(self.heads_per_layer, default=0)

    @property
    def n_heads_kv(self) -> int:
        """Key and value heads of the layer that has most; 0 for a model without attention."""
        return max(self.heads_kv_per_layer, default=0)

    @property
    def heads_per_layer(self) -> tuple[int, ...]:
        return self.per_layer("attention.head_count") or (0,) * self.n_layers

    @property
    def heads_kv_per_layer(self) -> tuple[int, ...]:
        """Key and value heads of each layer. Layers without attention (recurrent ones) have 0."""
        return self.per_layer("attention.head_count_kv") or self.heads_per_layer

    @property
    def head_dim_k(self) -> int:
        return self.count("attention.key_length") or self._default_head_dim

    @property
    def head_dim_v(self) -> int:
        return self.count("attention.value_length") or self._default_head_dim

    @property
    def n_ff(self) -> int:
        """Feed-forward width of the widest layer; 0 when the file does not say."""
        return max(self.per_layer("feed_forward_length") or (0,))

    @property
    def n_vocab(self) -> int:
        tokens = self.metadata.get("tokenizer.ggml.tokens")
        if isinstance(tokens, ArraySummary):
            return tokens.length
        return self.count("vocab_size")

    @cached_property
    def n_params(self) -> int:
        """Weights in all tensors together."""
        return sum(tensor.n_elements for tensor in self.tensors)

    @cached_property
    def weights_bytes(self) -> int:
        """Bytes of all tensors together, without padding."""
        return sum(tensor.size_bytes for tensor in self.tensors)

    @cached_property
    def sampling(self) -> dict[str, int | float]:
        """How its makers want it to be sampled, by Ollama's names of options. What makes no sense is left out."""
        said: dict[str, int | float] = {}
        for key, (name, kind, least, most) in _RECOMMENDED.items():
            value = self.metadata.get(f"general.sampling.{key}")
            if isinstance(value, (int, float)) and least <= value <= most:
                # 0.95 has become 0.949999988 in 32 bits.
                said[name] = int(value) if kind is int else float(f"{value:.7g}")
        return said

    @property
    def chat_template(self) -> str | None:
        return self._template("tokenizer.chat_template")

    @property
    def tool_template(self) -> str | None:
        """The chat template for conversations with tools, where the file has one apart."""
        return self._template("tokenizer.chat_template.tool_use")

    def _template(self, key: str) -> str | None:
        template = self.text(key)
        # Without a brace it prints the same whatever was said: the name of a template ("chatml"), which is none.
        return template if "{" in template else None

    @cached_property
    def quantization(self) -> str:
        """What people call it, e.g. "Q4_K_M": by `general.file_type`, else the type that holds most weights."""
        file_type = self.metadata.get("general.file_type")
        if isinstance(file_type, int) and file_type & ~_GUESSED_FLAG in FILE_TYPES:
            return FILE_TYPES[file_type & ~_GUESSED_FLAG]
        weights: Counter[str] = Counter()
        for tensor in self.tensors:
            weights[tensor.type_name] += tensor.n_elements
        return weights.most_common(1)[0][0] if weights else "unknown"

    @property
    def is_bidirectional(self) -> bool:
        """Whether a token sees the tokens after it, so that a text must be computed in one piece."""
        return self.architecture in ENCODERS or self.metadata.get(f"{self.architecture}.attention.causal") is False

    @cached_property
    def pooling(self) -> str:
        """How it makes one vector of a text's tokens: `MEAN`, `CLS`, `LAST` or `RANK`, as llama.cpp names them.

        Where the file says nothing, a model that reads in both directions takes the mean, and one that reads from left
        to right its last token, which alone has seen the whole text.
        """
        stated = _POOLINGS.get(self.count("pooling_type"))
        return stated or (MEAN if self.is_bidirectional else LAST)

    @cached_property
    def lacks_ranking_head(self) -> bool:
        """Whether it was made to rank and converted without what makes scores of hidden states."""
        return self.pooling == RANK and RANKING_HEADS.isdisjoint(tensor.name for tensor in self.tensors)

    @cached_property
    def generates(self) -> bool:
        """Whether it continues a text. A file that names a pooling was made for vectors, whatever its architecture."""
        return not self.is_bidirectional and self.count("pooling_type") not in _POOLINGS

    def control_tokens(self) -> tuple[str, ...]:
        """Texts of the tokens that the file marks as control, in id order. Reads the file.

        Raises BadModelFile as `read_control_tokens` does.
        """
        tokens = self.metadata.get("tokenizer.ggml.tokens")
        types = self.metadata.get("tokenizer.ggml.token_type")
        if not isinstance(tokens, ArraySummary) or not isinstance(types, ArraySummary):
            return ()
        if tokens.type != "str" or types.type not in ("i32", "u32"):
            return ()
        return read_control_tokens(self.path, tokens, types)

    @property
    def _default_head_dim(self) -> int:
        return self.n_embd // self.n_heads if self.n_heads else 0

    def text(self, key: str) -> str:
        """The text under a whole key; empty when there is none."""
        value = self.metadata.get(key)
        return value if isinstance(value, str) else ""

    def count(self, key: str) -> int:
        """The whole number under the architecture's own `key`; 0 when there is none."""
        value = self.metadata.get(f"{self.architecture}.{key}")
        return value if isinstance(value, int) else 0

    def per_layer(self, key: str) -> tuple[int, ...]:
        """One number per layer, from a scalar for all or from an array; empty when the file has neither."""
        value = self.metadata.get(f"{self.architecture}.{key}")
        if isinstance(value, ArraySummary):
            return ()
        if isinstance(value, tuple):
            return tuple(int(count) for count in value[: self.n_layers])
        return (value,) * self.n_layers if isinstance(value, int) else ()


def dimension_problem(architecture: str, metadata: dict[str, Value]) -> str | None:
    """What is wrong with the dimensions in `metadata`, as the end of a sentence; None when nothing is.

    Context length, layer count and width must be there, as llama.cpp requires them of every language model. All that
    the memory estimate multiplies must be a whole number within limits; per-layer arrays must cover every layer.
    """
    for key, limit in (
        ("context_length", MAX_CONTEXT_TOKENS),
        ("block_count", MAX_LAYERS),
        ("embedding_length", MAX_WIDTH),
    ):
        full_key = f"{architecture}.{key}"
        if full_key not in metadata:
            return f"'{full_key}' is missing"
        if not _is_count(metadata[full_key], 1, limit):
            return f"'{full_key}' is {_shown(metadata[full_key])}, not a number from 1 to {limit}"
    n_layers = metadata[f"{architecture}.block_count"]
    # A number of rotated dimensions that is none keeps llama.cpp busy for ever.
    for key in ("attention.key_length", "attention.value_length", "rope.dimension_count", "vocab_size"):
        full_key = f"{architecture}.{key}"
        if not _is_count(metadata.get(full_key, 0), 0, MAX_WIDTH):
            return f"'{full_key}' is {_shown(metadata[full_key])}, not a number up to {MAX_WIDTH}"
    for key in ("attention.head_count", "attention.head_count_kv", "feed_forward_length"):
        full_key = f"{architecture}.{key}"
        value = metadata.get(full_key, 0)
        counts = value if isinstance(value, tuple) and not isinstance(value, ArraySummary) else (value,)
        if not all(_is_count(count, 0, MAX_WIDTH) for count in counts):
            return f"'{full_key}' is {_shown(value)}, not numbers up to {MAX_WIDTH}"
        if isinstance(value, tuple) and isinstance(n_layers, int) and len(counts) < n_layers:
            return f"'{full_key}' has {len(counts)} entries for {n_layers} layers"
    return None


def _is_count(value: Value, least: int, most: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most


def _shown(value: Value) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def special_token_text(header: Header, key: str) -> str:
    """The text of the token whose id is the metadata entry `key` ("tokenizer.ggml.eos_token_id").

    Empty when the file names no such token. Raises BadModelFile when the file is gone or was changed in place.
    """
    token = header.metadata.get(key)
    tokens = header.metadata.get("tokenizer.ggml.tokens")
    if not isinstance(token, int) or not isinstance(tokens, ArraySummary) or tokens.type != "str":
        return ""
    return read_token(header.path, tokens, token) if 0 <= token < tokens.length else ""


def once_for_each_pair(find: Callable[[Header, Header], str]) -> Callable[[Header, Header], str]:
    """What is found out about two files, remembered while both headers live: as long as the store knows the files."""
    known: WeakKeyDictionary[Header, WeakKeyDictionary[Header, str]] = WeakKeyDictionary()

    @wraps(find)
    def found(one: Header, other: Header) -> str:
        pairs = known.setdefault(one, WeakKeyDictionary())
        if other not in pairs:
            pairs[other] = find(one, other)
        return pairs[other]

    return found
