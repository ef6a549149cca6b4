"""How much memory an engine will need for a model and its projector, from their headers alone.

Pure arithmetic. Weights, KV cache and recurrent states follow from the tensors and dimensions exactly, as far as the
architecture is known here (`model_memory`); a layer of one that is not counts as one that keeps everything, which is
never too little. The compute buffers are a formula, fitted to what llama.cpp reserves with flash attention: exact for
the llama architecture with an f16 cache, up to a tenth high with a quantized one and for models with windows or states.
What the process itself takes was measured. README.md has the estimates beside the memory of real engines.

An engine that computes embeddings differs in three ways: every row is an output, so there is a row of logits for each
(llama.cpp keeps the place for them also where a model has none); an encoder has no KV cache; and what it reads at once
is a whole text, not a piece of one.

Not modelled, and therefore too high: layers that share a KV cache, and compressed attention (MLA). Not modelled, and
therefore too low: activations of mixtures of experts that are wider than the stated feed-forward width, attention
without flash attention. The prefix cache in memory has a limit of its own and is not counted.
"""

from __future__ import annotations

import platform
from typing import Final, NamedTuple

from localrun.errors import BadRequest
from localrun.models.gguf import projectors
from localrun.models.gguf.header import ENCODERS, MAX_WIDTH, Header, TensorInfo
from localrun.models.gguf.tables import BY_NAME, GgmlType

_F32_BYTES = 4

# --- what each layer keeps of a sequence --------------------------------------------------------------------------

# One state per sequence and nothing else.
_RECURRENT = {"mamba", "mamba2", "rwkv6", "rwkv6qwen2", "rwkv7", "arwkv7"}
# States in some layers, marked by having no key heads, and attention in the others.
_HYBRID_BY_HEADS = {
    *("jamba", "granitehybrid", "lfm2", "lfm2moe", "nemotron_h", "nemotron_h_moe", "plamo2", "kimi-linear")
}
# States in all but every n-th layer; the number is what files that do not state it mean.
_HYBRID_BY_INTERVAL = {"qwen3next": 4, "qwen35": 4, "qwen35moe": 4}
# The engine asks for so many snapshots of the states of these, to take rejected drafts off again, as far as they take
# no more than that for all sequences.
_WITH_SNAPSHOTS = {"bailingmoe3", "lfm2", "lfm2moe", "nemotron_h", "nemotron_h_moe", "qwen35", "qwen35moe"}
SNAPSHOTS: Final = 3
SNAPSHOTS_BYTES: Final = 512 << 20
# Both in every layer.
_HYBRID_THROUGHOUT = {"falcon-h1"}
# Every n-th layer sees everything, the others a window, unless the file says which do.
_WINDOW_PATTERNS = {
    "afmoe": 4, "cohere2": 4, "exaone4": 4, "exaone-moe": 4, "gemma2": 2, "gemma3": 6, "gemma3n": 5, "gpt-oss": 2,
    "olmo2": 4, "plamo3": 8,
}  # fmt: skip


class LayerMemory(NamedTuple):
    """One layer: `n_heads_kv` heads of keys and values, none if 0, of a window or of everything; perhaps a state."""

    n_heads_kv: int
    is_windowed: bool
    has_state: bool


class ModelMemory(NamedTuple):
    """All layers. `state_elements` is the size of one state; `n_window` 0 means that every layer sees everything."""

    layers: tuple[LayerMemory, ...]
    n_window: int
    state_elements: int

    @property
    def is_shareable(self) -> bool:
        """Whether a prefix can be shared between sequences: nothing is forgotten or mixed up on the way."""
        return not self.n_window and not any(layer.has_state for layer in self.layers)


def model_memory(header: Header, *, n_kv_cells: int) -> ModelMemory:
    """What `header`'s model keeps with a pool of `n_kv_cells`; a window that no sequence can outgrow is none."""
    with_state = _layers_with_state(header)
    windowed = _windowed_layers(header)
    n_window = _size(header, "attention.sliding_window")
    if not any(windowed) or any(with_state) or n_window >= min(n_kv_cells, header.n_ctx_train):
        n_window = 0
    is_only_states = header.architecture in _RECURRENT
    layers = tuple(
        LayerMemory(
            n_heads_kv=0 if is_only_states or (has_state and header.architecture in _HYBRID_BY_INTERVAL) else n_heads,
            is_windowed=is_windowed and n_window > 0,
            has_state=has_state,
        )
        for n_heads, is_windowed, has_state in zip(header.heads_kv_per_layer, windowed, with_state, strict=True)
    )
    return ModelMemory(layers, n_window, _state_elements(header) if any(with_state) else 0)


def memory_kind(header: Header) -> str:
    """`attention`, `window`, `recurrent` or `hybrid`: what the engine calls the memory of such a model."""
    if header.architecture in _RECURRENT:
        return "recurrent"
    if any(_layers_with_state(header)):
        return "hybrid"
    return "window" if any(_windowed_layers(header)) else "attention"


def _layers_with_state(header: Header) -> list[bool]:
    layers = range(header.n_layers)
    if header.architecture in _RECURRENT | _HYBRID_THROUGHOUT:
        return [True for _ in layers]
    if header.architecture in _HYBRID_BY_HEADS:
        return [n_heads == 0 for n_heads in header.heads_kv_per_layer]
    if header.architecture in _HYBRID_BY_INTERVAL:
        every = _size(header, "full_attention_interval") or _HYBRID_BY_INTERVAL[header.architecture]
        # Those that only draft come last, and attend.
        n_trunk = header.n_layers - _size(header, "nextn_predict_layers")
        return [layer < n_trunk and (layer + 1) % every != 0 for layer in layers]
    return [False for _ in layers]


def _windowed_layers(header: Header) -> list[bool]:
    if not _size(header, "attention.sliding_window"):
        return [False] * header.n_layers
    stated = header.metadata.get(f"{header.architecture}.attention.sliding_window_pattern")
    if isinstance(stated, tuple) and len(stated) >= header.n_layers:
        return [bool(is_windowed) for is_windowed in stated[: header.n_layers]]
    known = _WINDOW_PATTERNS.get(header.architecture, 1)
    every = (stated if isinstance(stated, int) and stated > 0 else known) if known > 1 else 1
    return [(layer + 1) % every != 0 for layer in range(header.n_layers)]


def _state_elements(header: Header) -> int:
    """Numbers (f32) in the state of one layer and sequence: `n_embd_r` and `n_embd_s` of llama-hparams.cpp."""
    if head_size := _size(header, "wkv.head_size"):
        return header.n_embd * ((_size(header, "token_shift_count") or 2) + head_size)
    if n_columns := _size(header, "shortconv.l_cache"):
        return header.n_embd * (n_columns - 1)
    n_conv = max(0, _size(header, "ssm.conv_kernel") - 1)
    if head_dim := _size(header, "kda.head_dim"):
        return header.n_heads * head_dim * (3 * (n_conv or 3) + head_dim)
    n_inner, n_state = _size(header, "ssm.inner_size"), _size(header, "ssm.state_size")
    return n_conv * (n_inner + 2 * _size(header, "ssm.group_count") * n_state) + n_state * n_inner


def _size(header: Header, key: str) -> int:
    """A number of the file, 0 where it states none or nonsense."""
    value = header.count(key)
    return value if 0 <= value <= MAX_WIDTH else 0


# --- the buffers in which llama.cpp computes a step ---------------------------------------------------------------

_MASK_ELEMENT_BYTES = 2


class Graph(NamedTuple):
    """`n_rows` of a step at most, `n_columns` of the attention masks together, `n_sequences` with a row of logits."""

    n_rows: int
    n_columns: int
    n_sequences: int


def compute_bytes(header: Header, memory: ModelMemory, graph: Graph) -> int:
    """On a CPU: the larger of the graph's peaks, in a layer and at the end, where each sequence has a row of logits
    besides the last hidden states; and the rows of logits that are handed out."""
    logits_bytes = graph.n_sequences * header.n_vocab * _F32_BYTES
    rows_bytes = (_even_rows(graph) + graph.n_sequences) * header.n_embd * _F32_BYTES
    return max(_layer_bytes(header, memory, graph), logits_bytes + rows_bytes) + logits_bytes


def _on_device(needed: MemoryEstimate, header: Header, memory: ModelMemory, graph: Graph) -> MemoryEstimate:
    """The estimate for where the likeliest tokens are found on a device: logits of all rows that may want some, and
    beside them padded ones to choose from. The host has place for the logits, the ids and what was drawn of each
    sequence, four numbers for each entry of the vocabulary (`output_reserve` in llama-context.cpp). Measured as the
    rest."""
    n_outputs = min(graph.n_sequences + DRAFT_ROWS, graph.n_rows)
    end_bytes = n_outputs * header.n_vocab * 2 * _F32_BYTES
    end_bytes += 2 * (_even_rows(graph) + n_outputs) * header.n_embd * _F32_BYTES
    layer_bytes = _layer_bytes(header, memory, graph)
    return needed._replace(
        compute_bytes=max(layer_bytes, end_bytes),
        layers_compute_bytes=layer_bytes,
        output_bytes=graph.n_sequences * header.n_vocab * 4 * _F32_BYTES,
    )


def _even_rows(graph: Graph) -> int:
    """The graph is reserved for rows that are shared evenly among all sequences."""
    return -(-graph.n_rows // graph.n_sequences) * graph.n_sequences


def _layer_bytes(header: Header, memory: ModelMemory, graph: Graph) -> int:
    """The peak in a layer: the attention mask (f16), and per row three vectors of the feed-forward width and four of
    the model's width, with the queries besides where windows are mixed in; or the activations of a recurrent layer. As
    measured, see the module's text.
    """
    n_rows = _even_rows(graph)
    # A model without attention has no mask.
    has_mask = any(layer.n_heads_kv for layer in memory.layers)
    mask_bytes = n_rows * graph.n_columns * _MASK_ELEMENT_BYTES if has_mask else 0
    queries = header.n_heads * header.head_dim_k if memory.n_window else 0
    layer_width = 3 * header.n_ff + 4 * header.n_embd + queries
    peak_bytes = max(n_rows * layer_width, _recurrent_elements(header, memory, n_rows, graph.n_sequences)) * _F32_BYTES
    return mask_bytes + peak_bytes


def _recurrent_elements(header: Header, memory: ModelMemory, n_rows: int, n_sequences: int) -> int:
    """Activations in a layer with a state: some vectors of its inner width per row, and its states in and out."""
    n_inner, n_state = header.count("ssm.inner_size"), header.count("ssm.state_size")
    n_mixed = n_inner + 2 * header.count("ssm.group_count") * n_state
    if not memory.state_elements or not n_inner:
        return 0
    is_selective = header.count("ssm.group_count") == 0
    per_row = 6 * n_inner + header.count("ssm.time_step_rank") + 2 * n_state if is_selective else 3 * n_mixed + n_inner
    return n_rows * (per_row + header.n_embd) + 2 * n_sequences * memory.state_elements


# --- weights that llama.cpp copies into another order at load, for the CPU's vector instructions ------------------

# The copy is private memory. The mapped original is not read again: it stays in the page cache, and counts as resident,
# until the system wants the pages back. The types are those of `ggml_repack_get_optimal_repack_type` in
# ggml-cpu/repack.cpp, for processors of the last ten years: AVX2, or Arm's dot product. One without these instructions
# copies nothing, and the estimate is too high.
_X86_TYPES = frozenset({"Q4_0", "Q4_K", "IQ4_NL", "MXFP4"})
_ARM_TYPES = _X86_TYPES | {"Q5_K", "Q6_K", "Q8_0", "Q1_0"}
_TYPES = {"x86_64": _X86_TYPES, "amd64": _X86_TYPES, "arm64": _ARM_TYPES, "aarch64": _ARM_TYPES}
# Rows are interleaved by eight.
_ROWS = 8


def repacked_bytes(header: Header, machine: str = platform.machine()) -> int:
    """Bytes of copied tensors whose originals stay mapped, on a `machine` as `platform` names it; 0 for an unknown one.

    What lies behind the last tensor that is not copied is unmapped (`unmap_fragment` in llama-mmap.cpp).
    """
    types = _TYPES.get(machine.lower(), frozenset())
    mapped_bytes = passed_bytes = 0
    for tensor in header.tensors:
        if _is_copied(tensor, types):
            passed_bytes += tensor.size_bytes
        else:
            mapped_bytes = passed_bytes
    return mapped_bytes


def copied_output_bytes(header: Header, machine: str = platform.machine()) -> int:
    """Of embeddings that are the output's weights, too: where their type has quick kernels, these are a copy."""
    tensors = {tensor.name: tensor for tensor in header.tensors}
    tied = tensors.get("token_embd.weight")
    if tied is None or "output.weight" in tensors or header.architecture in ENCODERS:
        return 0
    return tied.size_bytes * _is_copied(tied._replace(name="output.weight"), _TYPES.get(machine.lower(), frozenset()))


def _is_copied(tensor: TensorInfo, types: frozenset[str]) -> bool:
    """Embeddings are looked up by row and stay as they are."""
    is_matrix = len(tensor.shape) > 1 and tensor.shape[1] % _ROWS == 0
    return tensor.type_name in types and is_matrix and not tensor.name.startswith("token_embd")


# --- an engine for text -------------------------------------------------------------------------------------------

# A unified pool has more sequence ids than slots, for prefixes that wait in the cache.
SPARE_SEQUENCES: Final = 64
MAX_SEQUENCES: Final = 256
# Rows of drafts in a step at most that have logits; as the engine has it.
DRAFT_ROWS: Final = 64
# Sequences at least of the pool beside the streams, besides its spare one; as the engine has it.
POOLED_SEQUENCES: Final = 4
# Rows of a draft model's step at most; as the engine has it.
MOST_DRAFT_ROWS: Final = 512
# Python, numpy, llama.cpp and the heap of an engine that has served, measured on Linux; and per entry of the vocabulary
# what llama.cpp's tables of tokens and merges take.
PROCESS_BYTES: Final = 56 * 1024 * 1024
VOCABULARY_ENTRY_BYTES: Final = 200

# llama_context rounds n_ctx up to this many cells, and llama_kv_cache_iswa the cells of windows.
_CELL_STEP = 256
# Copies of a stream through which a long prompt goes from the background to its slot: one buffer. As measured.
_TRANSFERS = 1

KV_TYPES: Final = {"f16": "F16", "q8_0": "Q8_0", "q4_0": "Q4_0"}


class MemoryEstimate(NamedTuple):
    """Bytes. Weights are mapped from the file, so the system can drop them under pressure; the rest it cannot.

    `compute_bytes` is for the device that has the output; one that has other layers takes `layers_compute_bytes` where
    that is known, and the host `output_bytes`. `staging_bytes` is for long prompts in the background and requests that
    are longer than a stream: cells and buffers that no GPU engine has. `process_bytes` is what an engine takes whatever
    it runs, and its vocabulary. `repacked_bytes` of the weights are copied at load: the copy is counted among the
    weights, and the original, which nobody reads again, only in `resident_bytes`. `adapter_bytes`, `projector_bytes`,
    and `draft`, what the draft model takes of the engine, are left to whoever knows the adapters, the projector and the
    draft model: they are files of their own.
    """

    weights_bytes: int
    kv_bytes: int
    compute_bytes: int
    staging_bytes: int = 0
    process_bytes: int = 0
    repacked_bytes: int = 0
    adapter_bytes: int = 0
    projector_bytes: int = 0
    draft: MemoryEstimate | None = None
    layers_compute_bytes: int = 0
    output_bytes: int = 0

    @property
    def draft_bytes(self) -> int:
        return 0 if self.draft is None else self.draft.total_bytes

    @property
    def total_bytes(self) -> int:
        parts_bytes = self.adapter_bytes + self.projector_bytes + self.draft_bytes
        loaded_bytes = self.weights_bytes + parts_bytes + self.kv_bytes
        return loaded_bytes + self.compute_bytes + self.output_bytes + self.staging_bytes + self.process_bytes

    @property
    def resident_bytes(self) -> int:
        """What the system shows for the process while nobody else wants the memory."""
        return self.total_bytes + self.repacked_bytes + (0 if self.draft is None else self.draft.repacked_bytes)


def estimate(
    header: Header, *, n_kv_cells: int, n_slots: int, n_ubatch: int, kv_type: str, is_on_gpu: bool = False
) -> MemoryEstimate:
    """Memory of one engine with `n_slots` slots, a pool of `n_kv_cells`, and steps of at most `n_ubatch` rows.

    `kv_type` is f16, q8_0 or q4_0. On a GPU there is one pool, and tokens are chosen there; on a CPU every slot has a
    stream of cells, all of the same whole steps, and there is a pool of as many cells beside them, unless the model
    computes long contexts differently. Raises BadRequest for another type.
    """
    if kv_type not in KV_TYPES:
        raise BadRequest(f"unknown KV cache type '{kv_type}'; use one of {', '.join(KV_TYPES)}", field="kv_type")
    n_cells = _whole(n_kv_cells, _CELL_STEP)
    memory = model_memory(header, n_kv_cells=n_cells)
    pool = _pool(header, memory, n_cells, n_slots, n_ubatch, BY_NAME[KV_TYPES[kv_type]], is_on_gpu)
    if is_on_gpu or not memory.is_shareable or n_slots == 1:
        return pool
    n_streams_cells = n_slots * _whole(n_cells // n_slots, _CELL_STEP)
    if _changes_positions(header, n_streams_cells):
        return pool
    pool = _pool(header, memory, n_streams_cells, n_slots, n_ubatch, BY_NAME[KV_TYPES[kv_type]], is_on_gpu)
    return _streams(header, memory, pool, n_streams_cells, n_slots, n_ubatch)


def _changes_positions(header: Header, n_cells: int) -> bool:
    """Whether a context of so many cells embeds positions in another way than shorter ones (LongRoPE). Then there are
    no streams, for the pool beside them would be such a context."""
    has_factors = any("rope_factors_long" in tensor.name for tensor in header.tensors)
    return has_factors and n_cells > (header.count("rope.scaling.original_context_length") or header.n_ctx_train)


def draft_estimate(header: Header, *, n_kv_cells: int, n_slots: int, n_ubatch: int, kv_type: str) -> MemoryEstimate:
    """What a draft model takes besides in the engine of a model with these slots and cells: its weights, as many cells
    of its own size, a sequence for each slot, and its vocabulary. Layers with a window keep all cells, too, so that
    what was not chosen can be removed. `kv_type` as in `estimate`, which was asked before.
    """
    n_cells = _whole(n_kv_cells, _CELL_STEP)
    memory = model_memory(header, n_kv_cells=n_cells)
    n_columns = n_cells * (2 if memory.n_window else 1)
    memory = memory._replace(layers=tuple(layer._replace(is_windowed=False) for layer in memory.layers))
    n_rows = min(n_ubatch, MOST_DRAFT_ROWS)
    return MemoryEstimate(
        weights_bytes=header.weights_bytes + copied_output_bytes(header),
        kv_bytes=sum(_layers_kv_bytes(header, memory, n_cells, n_slots, n_rows, BY_NAME[KV_TYPES[kv_type]])),
        compute_bytes=compute_bytes(header, memory, Graph(n_rows, n_columns, n_slots)),
        process_bytes=VOCABULARY_ENTRY_BYTES * header.n_vocab,
        repacked_bytes=repacked_bytes(header),
    )


def process_bytes(header: Header) -> int:
    """What an engine takes whatever it runs, and its vocabulary."""
    return PROCESS_BYTES + VOCABULARY_ENTRY_BYTES * header.n_vocab


def layers_kv_bytes(header: Header, *, n_kv_cells: int, n_slots: int, n_ubatch: int, kv_type: str) -> list[int]:
    """The `kv_bytes` of the estimate for one pool, layer by layer."""
    n_cells = _whole(n_kv_cells, _CELL_STEP)
    memory = model_memory(header, n_kv_cells=n_cells)
    return _layers_kv_bytes(header, memory, n_cells, n_slots, n_ubatch, BY_NAME[KV_TYPES[kv_type]])


def _pool(
    header: Header, memory: ModelMemory, n_cells: int, n_slots: int, n_ubatch: int, kv_type: GgmlType, is_on_gpu: bool
) -> MemoryEstimate:
    """One pool of cells. Where nothing can be shared there is a sequence per slot, and each costs a window or state."""
    n_sequences, n_window_cells = _sequences(memory, n_cells, n_slots, n_ubatch)
    n_columns = n_cells + (n_window_cells if memory.n_window else 0)
    graph = Graph(n_ubatch, n_columns, n_sequences)
    needed = MemoryEstimate(
        weights_bytes=header.weights_bytes + (0 if is_on_gpu else copied_output_bytes(header)),
        kv_bytes=sum(_layers_kv_bytes(header, memory, n_cells, n_slots, n_ubatch, kv_type)),
        compute_bytes=0 if is_on_gpu else compute_bytes(header, memory, graph),
        process_bytes=process_bytes(header),
        repacked_bytes=repacked_bytes(header),
    )
    return _on_device(needed, header, memory, graph) if is_on_gpu else needed


def _streams(
    header: Header, memory: ModelMemory, pool: MemoryEstimate, n_cells: int, n_slots: int, n_ubatch: int
) -> MemoryEstimate:
    """The same cells as a stream for every slot, and a pool of as many beside them."""
    n_stream_cells = n_cells // n_slots
    beside = Graph(n_ubatch, n_cells, max(POOLED_SEQUENCES, n_slots) + 1)
    stream_bytes = pool.kv_bytes // n_slots
    return pool._replace(
        compute_bytes=compute_bytes(header, memory, Graph(n_ubatch, n_stream_cells, n_slots)),
        staging_bytes=pool.kv_bytes + _TRANSFERS * stream_bytes + compute_bytes(header, memory, beside),
    )


def _sequences(memory: ModelMemory, n_cells: int, n_slots: int, n_ubatch: int) -> tuple[int, int]:
    """Sequences that one pool is opened for, and the cells of a layer with a window."""
    n_sequences = min(n_slots + SPARE_SEQUENCES, MAX_SEQUENCES) if memory.is_shareable else n_slots
    return n_sequences, min(n_cells, _whole(memory.n_window * n_sequences + n_ubatch, _CELL_STEP))


def _layers_kv_bytes(
    header: Header, memory: ModelMemory, n_cells: int, n_slots: int, n_ubatch: int, kv_type: GgmlType
) -> list[int]:
    """For each layer one row of keys and one of values per cell, or a state per sequence, with its snapshots."""
    n_sequences, n_window_cells = _sequences(memory, n_cells, n_slots, n_ubatch)
    layer_states_bytes = n_sequences * memory.state_elements * _F32_BYTES
    states_bytes = layer_states_bytes * sum(layer.has_state for layer in memory.layers)
    n_snapshots = 0
    if header.architecture in _WITH_SNAPSHOTS and states_bytes:
        n_snapshots = min(SNAPSHOTS, SNAPSHOTS_BYTES // states_bytes)
    sizes = []
    for layer in memory.layers:
        size_bytes = layer_states_bytes * (1 + n_snapshots) if layer.has_state else 0
        for head_dim in (header.head_dim_k, header.head_dim_v):
            n_blocks = -(-layer.n_heads_kv * head_dim // kv_type.block_elements)
            size_bytes += n_blocks * kv_type.block_bytes * (n_window_cells if layer.is_windowed else n_cells)
        sizes.append(size_bytes)
    return sizes


def _whole(count: int, step: int) -> int:
    """`count` rounded up to whole steps."""
    return -(-count // step) * step


# --- an engine for embeddings -------------------------------------------------------------------------------------

# Tokens of one input: where a text is computed in one piece its memory grows with the square, and where it is not the
# KV cache does. Ollama's default batch for embeddings is the former.
MOST_WHOLE_TOKENS: Final = 2_048
MOST_TOKENS: Final = 8_192
# Inputs of one step where each has a state of its own; as the engine has it.
STATEFUL_SEQUENCES: Final = 8

# A mask in f32, and a copy in f16 for flash attention.
_EMBEDDING_MASK_BYTES = 6


def most_embedding_tokens(header: Header, n_cells: int = 0) -> int:
    """The longest input that an engine is opened for; `n_cells` asks for another limit than the usual one."""
    usual = MOST_WHOLE_TOKENS if header.is_bidirectional else MOST_TOKENS
    return min(header.n_ctx_train, n_cells or usual)


def embedding_estimate(header: Header, *, n_tokens: int, n_rows: int, kv_type: str) -> MemoryEstimate:
    """Memory of one engine whose inputs have up to `n_tokens`, in steps of `n_rows`."""
    n_rows = max(n_rows, n_tokens) if header.is_bidirectional else n_rows
    n_cells = 0 if header.architecture in ENCODERS else n_tokens + n_rows
    row_bytes = (3 * header.n_ff + 6 * header.n_embd + 2 * header.n_vocab) * _F32_BYTES
    if header.architecture in ENCODERS:
        row_bytes -= header.n_vocab * _F32_BYTES  # they compute no logits
    mask_bytes = n_rows * max(n_rows, n_cells) * _EMBEDDING_MASK_BYTES
    return MemoryEstimate(
        weights_bytes=header.weights_bytes + copied_output_bytes(header),
        kv_bytes=_embedding_kv_bytes(header, n_cells, kv_type),
        compute_bytes=mask_bytes + n_rows * row_bytes,
        process_bytes=process_bytes(header),
    )


def _embedding_kv_bytes(header: Header, n_cells: int, kv_type: str) -> int:
    if not n_cells:
        return 0
    row_type = BY_NAME[kv_type.upper()]
    memory = model_memory(header, n_kv_cells=n_cells)
    n_elements = sum(layer.n_heads_kv for layer in memory.layers) * (header.head_dim_k + header.head_dim_v)
    n_states = STATEFUL_SEQUENCES * sum(layer.has_state for layer in memory.layers)
    cell_bytes = -(-n_elements // row_type.block_elements) * row_type.block_bytes
    return cell_bytes * n_cells + n_states * memory.state_elements * _F32_BYTES


# --- a projector --------------------------------------------------------------------------------------------------

# libmtmd reads the weights into buffers of its own, so they are never mapped. Besides it takes a buffer to compute in,
# which grows with the largest picture that it was given and stays as large, and copies of the picture in floating-point
# numbers. The rows that it makes are kept in the engine's memory for prefixes (the setting `ram_cache_bytes`), and are
# not counted here. Not modelled: attention without flash attention, which takes the square of the patches, and towers
# that are no stack of layers (Gemma 3n).
_F16_BYTES = 2
_COLOURS = 3
# Copies of a picture, or of all of its tiles, at the size at which it is computed, while it is; and what libmtmd takes
# besides: as measured.
_IMAGE_COPIES = 2
_REST_BYTES = 4 * 1024 * 1024
# Spectra of the longest piece of audio, and the threads that make them: as measured.
_SPECTRA_BYTES = 12 * 1024 * 1024
# A window of thirty seconds, as most towers have it.
_AUDIO_POSITIONS = 1_500
# What the largest of the common towers (4,096 tokens of four patches) make of a photo. Some would take several times as
# many, for pictures that hardly anybody sends.
MOST_PATCHES: Final = 16_384

# Tokens of one picture at most, for towers that compute pictures of any size; the others state it in their files.
_MOST_TOKENS = {
    **dict.fromkeys(("qwen2vl_merger", "qwen2.5vl_merger", "qwen3vl_merger", "ling3vl", "glm4v", "kimik25"), 4_096),
    **dict.fromkeys(("muse-glimmer", "youtuvl", "hunyuanvl", "glm5v", "mimovl", "exaone4_5"), 4_096),
    **dict.fromkeys(("pixtral", "kimivl"), 1_024),
    **dict.fromkeys(("gemma4v", "gemma4uv"), 1_120),
    "minimax_m3": 576, "deepseek4v": 384, "lfm2": 256,
}  # fmt: skip
# Tiles of one picture at most, for towers that cut it into tiles and do not state it.
_MOST_TILES = {"internvl": 13, "resampler": 10, "minicpmv4_6": 10, "llama4": 17, "deepseekocr": 10, "deepseekocr2": 7}
# Patches of a side that make one token, where the file does not say it.
_MERGED = {"gemma4v": 3, "gemma4uv": 3, "gemma3": 4, "pixtral": 1, "kimivl": 2, "lfm2": 2}
_USUAL_MERGED = 2


class ProjectorMemory(NamedTuple):
    """Bytes."""

    weights_bytes: int
    compute_bytes: int

    @property
    def total_bytes(self) -> int:
        return self.weights_bytes + self.compute_bytes


def projector_memory(header: Header) -> ProjectorMemory:
    """Of a projector that computes the largest picture, or the longest piece of audio, that it takes at once."""
    needed = [_compute_bytes(header, encoder) for encoder in projectors.encoders(header.metadata)]
    return ProjectorMemory(header.weights_bytes, sum(needed))


def _compute_bytes(header: Header, encoder: str) -> int:
    """The widest point of a layer (the feed-forward's activations, what goes in and what goes around, or the vectors of
    attention), and the activations once more in F16, for a product with weights of that type."""
    n_positions = _AUDIO_POSITIONS if encoder == projectors.AUDIO else most_patches(header)
    n_embd, n_ff = (_number(header, key, encoder) for key in ("embedding_length", "feed_forward_length"))
    layer_bytes = n_positions * (max(n_ff + 3 * n_embd, 5 * n_embd) * _F32_BYTES + n_ff * _F16_BYTES)
    if encoder == projectors.AUDIO:
        return layer_bytes + _SPECTRA_BYTES + _REST_BYTES
    image_bytes = n_positions * _number(header, "patch_size") ** 2 * _COLOURS * _F32_BYTES
    return layer_bytes + image_bytes * _IMAGE_COPIES * _most_tiles(header) + _REST_BYTES


def _number(header: Header, key: str, encoder: str = projectors.VISION) -> int:
    return projectors.number(header.metadata, encoder, key)


def _most_tiles(header: Header) -> int:
    """1 for a tower that computes a picture as a whole."""
    name = projectors.type_of(header.metadata, projectors.VISION)
    if stated := _number(header, "preproc_max_tiles"):
        return stated + 1
    whole, tile = _number(header, "preproc_image_size"), _number(header, "image_size")
    if name == "idefics3" and tile:
        return (whole // tile) ** 2 + 1
    return _MOST_TILES.get(name, 1)


def most_patches(header: Header) -> int:
    """Of the largest picture that is computed at once, at most `MOST_PATCHES`."""
    name = projectors.type_of(header.metadata, projectors.VISION)
    patch = max(1, _number(header, "patch_size"))
    stated = _number(header, "spatial_merge_size") or _number(header, "projector.scale_factor")
    merged = stated or _MERGED.get(name, _USUAL_MERGED)
    if pixels := _number(header, "image_max_pixels"):
        patches = pixels // patch**2
    elif name in _MOST_TOKENS:
        patches = _MOST_TOKENS[name] * merged**2
    else:
        patches = (_number(header, "image_size") // patch) ** 2
    return max(1, min(patches, MOST_PATCHES))
