"""A model file in llama.cpp: its handle and its vocabulary.

Owner: the engine's main thread; `tokenize` alone may run in another, for it only reads.
Does not: make contexts, or know what the model is to be used for.
"""

from __future__ import annotations

import ctypes
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from localrun.engine.native.library import bound, ggml, last_problem, native
from localrun.engine.sample.chain import Dry
from localrun.errors import BadModelFile

# These do not generate a text from left to right.
UNSUPPORTED_KINDS = {"a diffusion": native.llama_model_is_diffusion, "an encoder": native.llama_model_has_encoder}


def load_model(
    path: str,
    n_gpu_layers: int,
    *,
    use_extra_bufts: bool = True,
    with_heads: bool = False,
    devices: Sequence[int] | None = None,
    is_wanted: Callable[[], bool] = lambda: True,
) -> Any:
    """A model handle. The file is mapped into memory, not read; with `use_extra_bufts` weights that have quicker
    kernels in another layout are copied into it. -1 layers are all, on `devices` (ggml's handles) or all that there
    are. `with_heads` is for files that `drafters.has_heads`. Raises BadModelFile, also soon after it is not
    `is_wanted` any more."""
    params = native.llama_model_default_params()
    # Held by this variable while native code has a bare pointer to it.
    goes_on = native.llama_progress_callback(lambda _progress, _data: is_wanted())
    params.progress_callback = goes_on
    params.use_extra_bufts = use_extra_bufts
    params.n_gpu_layers = n_gpu_layers
    if not n_gpu_layers:
        devices = ()  # else llama.cpp opens them all the same, for large batches
    if devices is not None:
        handles = (ctypes.c_void_p * (len(devices) + 1))(*devices, None)
        params.devices = ctypes.addressof(handles)
    params.load_mtp = with_heads
    model = native.llama_model_load_from_file(path.encode(), params)
    if not model:
        raise BadModelFile(f"llama.cpp cannot load {path}: {last_problem()}")
    for kind, is_kind in UNSUPPORTED_KINDS.items():
        if is_kind(model):
            native.llama_model_free(model)
            raise BadModelFile(f"{path} is {kind} model, which localrun does not run yet; choose a decoder-only one")
    return model


class Tensors(NamedTuple):
    """The names of a model's tensors, and its architecture; nothing where a file cannot be read."""

    architecture: str = ""
    names: tuple[str, ...] = ()


def tensors_of(path: str) -> Tensors:
    # Inside, for importing the engine must not load it.
    """Of a model's file, or of all its shards, the first of which is at `path`."""
    from localrun.models.gguf.reader import later_shards

    first, *others = (_tensors_in(str(each)) for each in (path, *later_shards(Path(path))))
    return first._replace(names=(*first.names, *(name for other in others for name in other.names)))


def _tensors_in(path: str) -> Tensors:
    library = ggml()
    for function in _GGUF_FUNCTIONS:
        bound(*function)
    file = library.gguf_init_from_file(path.encode(), _GgufParams(no_alloc=True, context=None))
    if not file:
        return Tensors()
    key = library.gguf_find_key(file, b"general.architecture")
    is_text = key >= 0 and library.gguf_get_kv_type(file, key) == _GGUF_STRING
    architecture = library.gguf_get_val_str(file, key) if is_text else b""
    names = [library.gguf_get_tensor_name(file, index) for index in range(library.gguf_get_n_tensors(file))]
    library.gguf_free(file)
    return Tensors(architecture.decode("utf-8", "replace"), tuple(name.decode("utf-8", "replace") for name in names))


class _GgufParams(ctypes.Structure):
    _fields_ = (("no_alloc", ctypes.c_bool), ("context", ctypes.c_void_p))


_GGUF_STRING = 8
_GGUF_FUNCTIONS: tuple[tuple[Any, ...], ...] = (
    ("gguf_init_from_file", ctypes.c_void_p, ctypes.c_char_p, _GgufParams),
    ("gguf_find_key", ctypes.c_int64, ctypes.c_void_p, ctypes.c_char_p),
    ("gguf_get_kv_type", ctypes.c_int, ctypes.c_void_p, ctypes.c_int64),
    ("gguf_get_val_str", ctypes.c_char_p, ctypes.c_void_p, ctypes.c_int64),
    ("gguf_get_n_tensors", ctypes.c_int64, ctypes.c_void_p),
    ("gguf_get_tensor_name", ctypes.c_char_p, ctypes.c_void_p, ctypes.c_int64),
    ("gguf_free", None, ctypes.c_void_p),
)


_PIECE_BYTES = 64
_PART_CHARACTERS = 16384
# So many DRY stages are kept, to be copied: few clients change their breakers.
_MOST_DRY = 8
# gpt-oss and Solar put these round and into messages, and llama.cpp takes them for words, whoever wrote them. The last
# one ends a message, but no generation: an answer goes on with its next message.
_MESSAGE_END = "<|end|>"
_MARKS = ("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", _MESSAGE_END)


class LlamaVocabulary:
    """Texts and tokens of a native model.

    Owner: the engine's main thread; `tokenize` may run in another, for it only reads, and so may what says so.
    Does not: decide what text may become a control token (`text.py`).
    """

    def __init__(self, model: Any) -> None:
        self._vocab = native.llama_model_get_vocab(model)
        self.n_tokens = int(native.llama_vocab_n_tokens(self._vocab))
        self._check_bytes()
        self.eog_tokens, self._control_texts = self._special_tokens()
        self.control_tokens = tuple(self._control_texts.values())
        marks = _MARKS if native.llama_vocab_type(self._vocab) == native.LLAMA_VOCAB_TYPE_BPE else ()
        self._marks = {
            mark: tokens[0] for mark in marks if len(tokens := self._tokenize_part(mark, parse_special=False)) == 1
        }
        self._in_mark = re.compile(f"(?<=<)(?={'|'.join(re.escape(mark[1:]) for mark in self._marks)})")
        self.message_ends = self.eog_tokens | {token for mark, token in self._marks.items() if mark == _MESSAGE_END}
        self._control_text = re.compile("|".join(map(re.escape, filter(None, self.control_tokens))) or "(?!)")
        adds_bos = bool(native.llama_vocab_get_add_bos(self._vocab))
        bos = int(native.llama_vocab_bos(self._vocab))
        self.bos_token = bos if adds_bos and bos >= 0 else None
        self._pieces: dict[int, bytes] = {}
        self._dry: dict[Dry, Any] = {}
        self._dry_lock = threading.Lock()

    def tokenize(self, text: str, *, parse_special: bool) -> list[int]:
        """See `Backend.tokenize`. Raises BadModelFile for a text that the vocabulary cannot say."""
        if parse_special:
            parts = self._parts(text)
        else:
            parts = iter(self._in_mark.split(text) if any(mark in text for mark in self._marks) else (text,))
        return [token for part in parts for token in self._tokenize_part(part, parse_special=parse_special)]

    def tokenize_whole(self, text: str) -> list[int]:
        """A text with the tokens that the model wants before and after it, as encoders do."""
        return self._tokenize_part(text, parse_special=False, add_special=True)

    def piece(self, token: int) -> bytes:
        piece = self._pieces.get(token)
        if piece is None:
            piece = self._pieces[token] = self._read_piece(token)
        return piece

    def dry(self, stage: Dry) -> Any:
        """A native DRY stage that has seen nothing. Any thread."""
        with self._dry_lock:
            return native.llama_sampler_clone(self._known_dry(stage))

    def learn_dry(self, stage: Dry) -> None:
        """Makes it known what a stage's breakers are in tokens: a look at the whole vocabulary, 10 ms for 49,000
        tokens and 50 for 262,000. Any thread."""
        with self._dry_lock:
            self._known_dry(stage)

    def _known_dry(self, stage: Dry) -> Any:
        known = self._dry.get(stage)
        if known is None:
            while len(self._dry) >= _MOST_DRY:
                native.llama_sampler_free(self._dry.pop(next(iter(self._dry))))
            breakers = [breaker.encode("utf-8", "replace") for breaker in stage.breakers]
            texts = (ctypes.c_char_p * len(breakers))(*breakers)
            known = self._dry[stage] = native.llama_sampler_init_dry(
                self._vocab, stage.multiplier, stage.base, stage.allowed_length, stage.last_n, texts, len(breakers)
            )
        return known

    def control_text(self, token: int) -> str:
        return self._control_texts.get(token, "")

    def _parts(self, text: str) -> Iterator[str]:
        """A long text in pieces that end after a control token.

        llama.cpp takes time by the square of the control tokens in one text: seconds for 50,000, hours for a body.
        """
        start = 0
        while len(text) - start > _PART_CHARACTERS:
            found = self._control_text.search(text, start + _PART_CHARACTERS)
            if found is None:
                break
            yield text[start : found.end()]
            start = found.end()
        yield text[start:]

    def _tokenize_part(self, text: str, *, parse_special: bool, add_special: bool = False) -> list[int]:
        data = text.encode("utf-8", "replace")
        room = len(data) + 8
        buffer = (native.llama_token * room)()
        count = native.llama_tokenize(self._vocab, data, len(data), buffer, room, add_special, parse_special)
        if count < 0:
            room = -count
            buffer = (native.llama_token * room)()
            count = native.llama_tokenize(self._vocab, data, len(data), buffer, room, add_special, parse_special)
        tokens = list(buffer[:count])
        # llama.cpp puts -1 where a vocabulary has no token for a text. A batch must not see it.
        if tokens and not 0 <= min(tokens) <= max(tokens) < self.n_tokens:
            raise BadModelFile("the model's vocabulary has no token for a part of the text; the file is damaged")
        return tokens

    def _read_piece(self, token: int) -> bytes:
        if not 0 <= token < self.n_tokens:
            raise ValueError(f"token {token} is not in the vocabulary of {self.n_tokens}")
        buffer = ctypes.create_string_buffer(_PIECE_BYTES)
        count = native.llama_token_to_piece(self._vocab, token, buffer, _PIECE_BYTES, 0, False)
        if count < 0:
            buffer = ctypes.create_string_buffer(-count)
            count = native.llama_token_to_piece(self._vocab, token, buffer, -count, 0, False)
        return buffer.raw[:count]

    def _check_bytes(self) -> None:
        """Raises BadModelFile for a vocabulary with which llama.cpp aborts at a text: one of SentencePiece says what it
        has no piece for by a token for each byte, and llama.cpp looks for these without asking whether they are there.
        (It does so where a file names another tokenizer than it has.)"""
        if native.llama_vocab_type(self._vocab) != native.LLAMA_VOCAB_TYPE_SPM:
            return
        bytes_by_name = {name: byte for byte in range(256) for name in (b"<0x%02X>" % byte, bytes([byte]))}
        left = set(range(256))
        for token in range(self.n_tokens):
            left.discard(bytes_by_name.get(native.llama_vocab_get_text(self._vocab, token), -1))
            if not left:  # they are among the first hundreds in nearly all files
                return
        raise BadModelFile(
            f"its tokenizer (tokenizer.ggml.model) is SentencePiece's, which needs a token for each byte, and "
            f"{len(left)} are missing, such as <0x{min(left):02X}>; the file is damaged, or names another tokenizer "
            f"than its own. Convert it again"
        )

    def _special_tokens(self) -> tuple[frozenset[int], dict[int, str]]:
        eog, control = [], {}
        for token in range(self.n_tokens):
            if native.llama_vocab_is_eog(self._vocab, token):
                eog.append(token)
            if native.llama_vocab_is_control(self._vocab, token):
                control[token] = native.llama_vocab_get_text(self._vocab, token).decode("utf-8", "replace")
        return frozenset(eog), control
