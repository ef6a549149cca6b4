"""Messages between the daemon and its processes: the engines, the template worker and the media worker.

They go as frames (`framing.py`) over the process's stdin and stdout, and order is kept in both directions. `Step`
carries the news of every sequence of one step in one frame, so the cost of the pipe is per step and not per token.

All `*_at_s` values are `time.monotonic()` of the machine, which daemon and engine share; a difference is meaningful
between the two processes on Linux, macOS and Windows.

Does not: validate user input (routes do), or know about HTTP.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any

import msgspec

# Five bytes each at most, so that the answer to a body full of one-letter tokens stays a frame. No context is as long.
MAX_COUNTED_TOKENS = 8 * 1024 * 1024


class Lane(StrEnum):
    """Who goes first when there is not enough for all."""

    INTERACTIVE = "interactive"
    DEFAULT = "default"
    BATCH = "batch"


class Phase(StrEnum):
    """Where a request stands inside the engine."""

    QUEUED = "queued"
    PREFILL = "prefill"
    DECODE = "decode"
    DONE = "done"


class Finish(StrEnum):
    """Why a request ended."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    ERROR = "error"


class Sampling(msgspec.Struct, frozen=True, kw_only=True):
    """Parameters of one request's sampler chain. Defaults are neutral; each API family sets its own.

    `temperature` 0 is greedy. `seed` None draws a random one. `penalty_last_n` 0 turns penalties off, -1 means the
    whole context. `mirostat` 0, 1 or 2. `logit_bias` pairs are (token id, bias); -inf bans a token. `dry_multiplier` 0,
    `xtc_probability` 0, `top_n_sigma` up to 0 and `dynatemp_range` 0 are off; `dry_penalty_last_n` is as
    `penalty_last_n`.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0
    repeat_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    penalty_last_n: int = 64
    mirostat: int = 0
    mirostat_tau: float = 5.0
    mirostat_eta: float = 0.1
    seed: int | None = None
    logit_bias: tuple[tuple[int, float], ...] = ()
    dry_multiplier: float = 0.0
    dry_base: float = 1.75
    dry_allowed_length: int = 2
    dry_penalty_last_n: int = 64
    dry_sequence_breakers: tuple[str, ...] = ("\n", ":", '"', "*")
    top_n_sigma: float = -1.0
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1
    dynatemp_range: float = 0.0
    dynatemp_exponent: float = 1.0


class GrammarKind(StrEnum):
    """The language of a grammar's text."""

    JSON_SCHEMA = "json_schema"
    GBNF = "gbnf"
    LARK = "lark"
    REGEX = "regex"


# The `$comment` of a JSON schema of which nothing may be left out.
STRICT_COMMENT = "strict"


class Grammar(msgspec.Struct, frozen=True, array_like=True):
    """What an answer must match. With `triggers` it is free until one of these texts was produced, and must match from
    right after it on; unless it `has_mentions`, which are triggers in mid-sentence, and open nothing. The prompt ends
    with what is `begun` of it, a text that must match as well."""

    kind: GrammarKind
    text: str
    triggers: tuple[str, ...] = ()
    begun: str = ""
    has_mentions: bool = False


class Pooling(StrEnum):
    """How the vectors of a text's tokens become one: their mean, the first one's, the last one's; or the scores of a
    reranker's head."""

    MEAN = "mean"
    CLS = "cls"
    LAST = "last"
    RANK = "rank"


class MediaKind(StrEnum):
    """What a model with a projector takes besides text."""

    IMAGE = "image"
    AUDIO = "audio"


class Media(msgspec.Struct, frozen=True, array_like=True):
    """A decoded picture or recording. `path` is a private file of the daemon's with its bytes, which exists as long as
    the request: `width` x `height` pixels of three bytes (RGB), row by row, or `n_samples` little-endian float32 values
    of one channel at the rate that the projector wants. `digest` is the SHA-256 of those bytes, the kind and the size.
    """

    kind: MediaKind
    path: str
    digest: bytes
    width: int = 0
    height: int = 0
    n_samples: int = 0


class Segment(msgspec.Struct, frozen=True, array_like=True):
    """A piece of a prompt: text, or `tokens` or `media` in its place; the media came by the request's `field`. Only in
    a trusted segment does the text of a control token become that token."""

    text: str
    trusted: bool = True
    media: Media | None = None
    field: str = ""
    tokens: tuple[int, ...] = ()


class Adapter(msgspec.Struct, frozen=True, array_like=True):
    """A LoRA or a control vector that is in effect with this strength. `path` is its file, `digest` the file's SHA-256,
    which is what computed states depend on."""

    path: str
    digest: bytes
    scale: float = 1.0


# --- daemon -> engine ---------------------------------------------------------------------------------------------


class Open(msgspec.Struct, frozen=True, kw_only=True, tag="open"):
    """First frame: load this model. Answered by `Ready` or `OpenFailed`.

    `n_gpu_layers` -1 means as many as fit, by `n_layers`, `weights_bytes` and `kv_bytes` of the file's header.
    `kv_type` is a GGML type name (f16, q8_0). `n_threads` 0 means as many as were measured to be good, which
    is kept in `threads_file`, or one for each fast core. `model` is its name.
    `disk_cache_bytes` is for what all models keep in `kv_folder` together; without a folder nothing is kept on disk.
    `adapters` are in effect for every request that does not name its own. Without `use_extra_bufts` no weights are laid
    out anew for the quickest kernels.
    With `pooling` the engine takes `Embed` and nothing generates; without, it takes `Submit`.
    `speculates` is whether requests draft that do not say so themselves, and `draft_model_path` a smaller model that
    drafts for them. `projector_path` is the file that makes rows of pictures or sound (mmproj).
    One request may use as many tokens as the model was trained for, or `n_ctx` if that is more. `rope` says how
    positions are embedded (`native.context.Rope`); 0 and "" are the model's own way. `later_shards` are the other files
    of a model whose first one is `model_path`.
    """

    model_path: str
    n_slots: int
    n_kv_cells: int
    n_batch: int
    n_threads: int
    n_gpu_layers: int
    kv_type: str
    target_itl_s: float
    ram_cache_bytes: int
    max_queue: int
    log_level: str = "info"
    n_layers: int = 0
    weights_bytes: int = 0
    kv_bytes: int = 0
    model: str = ""
    disk_cache_bytes: int = 0
    kv_folder: str = ""
    pooling: Pooling | None = None
    adapters: tuple[Adapter, ...] = ()
    threads_file: str = ""
    use_extra_bufts: bool = True
    speculates: bool = True
    draft_model_path: str = ""
    projector_path: str = ""
    n_ctx: int = 0
    rope: tuple[float, float, str, int] = (0.0, 0.0, "", 0)
    later_shards: tuple[str, ...] = ()


class DraftSource(StrEnum):
    """Where drafts come from, tokens that are verified several at a time: what is in the conversation, or in the
    client's `prediction`; what the grammar forces; the model's own heads for more tokens; a smaller model."""

    LOOKUP = "lookup"
    PREDICTION = "prediction"
    GRAMMAR = "grammar"
    MTP = "mtp"
    DRAFT_MODEL = "draft_model"


class DraftCounts(msgspec.Struct, frozen=True, array_like=True):
    """Of one source: how many drafts it made, of how many tokens, and how many of these the model chose, too.
    `seconds` is what making them took."""

    source: DraftSource
    n_drafts: int
    n_drafted: int
    n_accepted: int
    seconds: float = 0.0


class Resume(msgspec.Struct, frozen=True, array_like=True):
    """What another engine had said to a request when it died: the tokens of the answer so far, and what `Usage` and
    Mirostat (`Delta.mu`) need to go on. Without `started_at_s` it had waited. An `Embed` names only the inputs that are
    left, and `n_cached` are the tokens of the others."""

    output: tuple[int, ...] = ()
    n_cached: int = 0
    started_at_s: float | None = None
    first_token_at_s: float | None = None
    last_token_at_s: float | None = None
    mu: float | None = None


class Submit(msgspec.Struct, frozen=True, kw_only=True, tag="submit"):
    """A new request. `tokens` is used instead of `segments` when given. `n_predict` -1 means until the context is full.

    `n_probs` asks for the log-probabilities of that many alternatives for every token; 0 with `logprobs` true gives the
    chosen token's alone. `target_itl_s` is how long a step may hold this stream up; None is the engine's own target, 0
    no limit. A request whose first token is expected later than `deadline_s` from now is refused at once.
    With `show_control` the names of control tokens are part of the text; without, they are left out.
    With `resume` the engine says only what comes after that, and neither a full queue nor a deadline refuses it.
    `speculates` None is what the engine was opened with. `prediction` is a text that much of the answer is expected to
    be like. `draft_model_path` is a smaller model that drafts for this request instead of the engine's own. `adapters`
    None are those that the engine was opened with, and none of them is in effect for a request that names others. With
    `scores_prompt` the log-probabilities of the prompt's tokens are said as well, with `n_probs` alternatives.
    Requests of different `namespace` share nothing that was computed; one without `caches` begins with nothing that is
    cached, and nothing of it is kept.
    """

    id: int
    segments: tuple[Segment, ...] = ()
    tokens: tuple[int, ...] | None = None
    sampling: Sampling = Sampling()
    n_predict: int = -1
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    logprobs: bool = False
    n_probs: int = 0
    client: str = ""
    lane: Lane = Lane.DEFAULT
    target_itl_s: float | None = None
    deadline_s: float | None = None
    arrived_at_s: float = 0.0
    grammar: Grammar | None = None
    show_control: bool = False
    resume: Resume | None = None
    speculates: bool | None = None
    prediction: str = ""
    draft_model_path: str = ""
    adapters: tuple[Adapter, ...] | None = None
    namespace: bytes = b""
    caches: bool = True
    scores_prompt: bool = False


class Mixed(msgspec.Struct, frozen=True):
    """An input in segments, some of which may be pictures or sound. It is never cut."""

    segments: tuple[Segment, ...]


class Embed(msgspec.Struct, frozen=True, kw_only=True, tag="embed"):
    """One vector for each of `inputs`: a text, token ids that are taken as they are, or text with media.

    With `query` the inputs are documents, and what comes back is how well each of them answers it. With `truncate` an
    input that is too long loses its end; without, it fails the request. Vectors keep their first `dimensions` numbers,
    all if 0. The rest is as in `Submit`.
    """

    id: int
    inputs: tuple[str | tuple[int, ...] | Mixed, ...]
    query: str | None = None
    truncate: bool = False
    dimensions: int = 0
    client: str = ""
    lane: Lane = Lane.DEFAULT
    deadline_s: float | None = None
    arrived_at_s: float = 0.0
    resume: Resume | None = None


class Cancel(msgspec.Struct, frozen=True, tag="cancel"):
    id: int


class Count(msgspec.Struct, frozen=True, kw_only=True, tag="count"):
    """Tokenize only, as a prompt unless `is_prompt` is off: then no BOS is put in front. Answered by `Counted` with the
    same id, and the bytes of each token if `wants_pieces`. Served beside the step loop, never inside it."""

    id: int
    segments: tuple[Segment, ...]
    is_prompt: bool = True
    wants_pieces: bool = False


class ClearCache(msgspec.Struct, frozen=True, kw_only=True, tag="clear_cache"):
    """Forget the prefixes kept in cells and memory, on disk, or both. Done between two steps; answered by `Cleared`."""

    id: int
    ram: bool
    disk: bool


ToEngine = Open | Submit | Embed | Cancel | Count | ClearCache


# --- engine -> daemon ---------------------------------------------------------------------------------------------


class Ready(msgspec.Struct, frozen=True, kw_only=True, tag="ready"):
    """The model is loaded. `n_ctx` is the most tokens one request may use (prompt and output together), or one input
    of an `Embed`, whose vectors have `n_embd` numbers. Besides `n_kv_cells` there are `n_pool_cells` for long requests
    where the others have streams of their own. `media` is what the projector takes, sound at `audio_rate_hz`
    samples a second."""

    n_ctx: int
    n_ctx_train: int
    n_vocab: int
    n_slots: int
    n_kv_cells: int
    n_threads: int
    n_gpu_layers: int
    model_size_bytes: int
    kv_size_bytes: int
    load_s: float
    backend: str
    control_tokens: tuple[str, ...] = ()
    eog_tokens: tuple[int, ...] = ()
    n_embd: int = 0
    media: tuple[MediaKind, ...] = ()
    audio_rate_hz: int = 0
    n_pool_cells: int = 0


class OpenFailed(msgspec.Struct, frozen=True, kw_only=True, tag="open_failed"):
    """`code` is one of `errors.py`."""

    code: str
    message: str


class Counted(msgspec.Struct, frozen=True, kw_only=True, tag="counted"):
    """Of a text with more than `MAX_COUNTED_TOKENS` the first and the last half of so many. `error` says why there are
    none at all, `error_code` is one of `errors.py`; `retry_after_s` as in `Delta`. `pieces` are what the tokens stand
    for, control tokens by their names."""

    id: int
    tokens: tuple[int, ...] = ()
    pieces: tuple[bytes, ...] = ()
    error: str | None = None
    error_code: str = ""
    retry_after_s: float | None = None


class Cleared(msgspec.Struct, frozen=True, kw_only=True, tag="cleared"):
    """What `ClearCache` freed, of segments in memory and of the model's folder on disk."""

    id: int
    ram_bytes: int
    disk_bytes: int


class TokenLogprob(msgspec.Struct, frozen=True, array_like=True):
    token: int
    piece: bytes
    logprob: float


class ChosenLogprob(msgspec.Struct, frozen=True, array_like=True):
    """The chosen token with its alternatives, best first. Natural logarithm of the model's own distribution,
    before temperature and penalties."""

    token: int
    piece: bytes
    logprob: float
    top: tuple[TokenLogprob, ...]


class Usage(msgspec.Struct, frozen=True, array_like=True):
    """Final counts and times of one request. `n_prompt` includes `n_cached`, the prompt tokens that were not computed.

    `queued_s`: submit to slot, with the model loaded. `prefill_s`: slot to first sampled token. `decode_s`: first to
    last sampled token. `drafts` has an entry for each source that drafted. `speedup` is how many times as fast the
    answer was as without drafts, by what its steps and others would have taken; 1 without drafts. `n_media` of the
    prompt's tokens are rows of pictures or sound.
    """

    n_prompt: int
    n_cached: int
    n_output: int
    queued_s: float
    prefill_s: float
    decode_s: float
    drafts: tuple[DraftCounts, ...] = ()
    speedup: float = 1.0
    n_media: int = 0


class Vector(msgspec.Struct, frozen=True, array_like=True):
    """What became of `Embed.inputs[index]`: little-endian float32 `values`, of length 1 unless they are scores. It had
    `n_tokens` tokens after `n_cut` were left out."""

    index: int
    values: bytes
    n_tokens: int
    n_cut: int = 0


class Scores(msgspec.Struct, frozen=True, array_like=True):
    """Log-probabilities of a prompt's tokens, each after those before it, from token `first` on. Token 0 has none, and
    0 stands for it. After an engine died those of a prompt begin anew."""

    first: int
    tokens: tuple[ChosenLogprob, ...]


class Delta(msgspec.Struct, array_like=True):
    """What one step did for one request. `text` never splits a UTF-8 character and never contains a stop string.

    `tokens` are the newly sampled ids (an end-of-generation token is not among them); `text` may lag behind while a
    possible stop string or a partial character is held back. `finish` is set in the last delta only, with `usage`;
    `error_code`/`error_message` then say why if it is `Finish.ERROR`, and `retry_after_s` when asking again may help.
    `stop_text` is the stop string that matched. `vectors` are those of the inputs that an `Embed` is done with. `mu` is
    Mirostat's after the last of the tokens. Of `n_drafted` tokens so far `n_accepted` are part of the answer. `notices`
    say what of the grammar was left out.
    """

    id: int
    phase: Phase
    n_computed: int
    n_output: int
    text: str = ""
    tokens: list[int] = []
    logprobs: list[ChosenLogprob] | None = None
    finish: Finish | None = None
    stop_text: str | None = None
    usage: Usage | None = None
    error_code: str | None = None
    error_message: str | None = None
    retry_after_s: float | None = None
    vectors: list[Vector] | None = None
    mu: float | None = None
    n_drafted: int = 0
    n_accepted: int = 0
    scores: Scores | None = None
    notices: tuple[str, ...] = ()


class MediaCounts(msgspec.Struct, frozen=True, array_like=True):
    """Pictures and sound, since the engine started: `n_encoded` chunks were made into rows, in `encode_s` seconds with
    pauses, and `n_reused` had their rows from an earlier time. `n_tokens` rows were computed; those that the prefix
    cache had are not among them. Rows kept for later take `kept_bytes` now."""

    n_encoded: int = 0
    n_reused: int = 0
    n_tokens: int = 0
    encode_s: float = 0.0
    kept_bytes: int = 0


class StepStats(msgspec.Struct, frozen=True, array_like=True):
    """The engine's state after a step, filled in by `Totals.stats` of `engine/report.py`. Totals count since the engine
    started. What `snapshot.EngineRow` has by the same name is shown there.

    `ram_entries` and `disk_entries` are saved segments of prefixes. `ram_restored_tokens_total` and
    `disk_restored_tokens_total` are prompt tokens that were copied from there instead of being computed. `n_draft_rows`
    are verified drafts, beside `n_prefill_rows` and `n_decode_rows`, one for each stream; `drafts` and `media` are
    totals. `step_s` is the time from the native call to its tokens, without the other work of a step (`LongStep`). Rows
    that the background computed since the step before took `background_s`, and `step` is still that of before if
    nothing else was computed. What is new comes last, with a default.
    """

    step: int
    step_s: float
    n_prefill_rows: int
    n_decode_rows: int
    n_running: int
    n_queued: int
    kv_cells_used: int
    kv_cells_shared: int
    cached_sequences: int
    ram_cache_bytes: int
    prefill_tokens_total: int
    decode_tokens_total: int
    prompt_tokens_total: int
    cached_tokens_total: int
    preemptions_total: int
    ram_entries: int = 0
    disk_cache_bytes: int = 0
    disk_entries: int = 0
    ram_restored_tokens_total: int = 0
    disk_restored_tokens_total: int = 0
    n_draft_rows: int = 0
    drafts: tuple[DraftCounts, ...] = ()
    media: MediaCounts = MediaCounts()
    background_s: float = 0.0


class Started(msgspec.Struct, frozen=True, array_like=True):
    """A request got a slot: its prompt length, what the cache gave, where it runs, and when that was for the first
    time."""

    id: int
    slot: int
    n_prompt: int
    n_cached: int
    at_s: float = 0.0


class KvRun(msgspec.Struct, frozen=True, array_like=True):
    """Neighbouring KV cells of one request (0: of a prefix that is kept for later). Shared ones have more holders."""

    start: int
    n_cells: int
    request_id: int
    is_shared: bool


class LongStep(msgspec.Struct, frozen=True, array_like=True):
    """The longest step of its minute so far. `seconds` and `cpu_s`, processor time, are those of the engine's main
    thread, from the first message that it took after the step before until this step's news. `parts` of them are named
    as `StepTimes` of `engine/report.py` says. The prompt's rows include what the background computed."""

    seconds: float
    cpu_s: float
    n_prefill_rows: int
    n_decode_rows: int
    n_draft_rows: int
    n_running: int
    parts: dict[str, float]


class Step(msgspec.Struct, frozen=True, kw_only=True, tag="step"):
    """The news of one step. Also sent without any row computed, to report an end or a refusal while idle.

    `sent_at_s` is when the engine handed it to its writer. `queue` lists waiting request ids, next first, and `waits_s`
    the seconds from then until each is expected to have its first token; without it, as long as nothing is known.
    `kv_map` comes now and then: the used cells, where split streams lie one after the other. `long_step` comes when a
    step has taken longer than any other of its minute.
    """

    sent_at_s: float
    deltas: list[Delta]
    stats: StepStats
    started: list[Started] = []
    queue: list[int] | None = None
    waits_s: list[float] | None = None
    kv_map: list[KvRun] | None = None
    long_step: LongStep | None = None


FromEngine = Ready | OpenFailed | Counted | Cleared | Step


# --- daemon <-> template worker -----------------------------------------------------------------------------------


class RenderRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Render `template` with `variables`. `cpu_s` is the processor time after which the worker ends itself, should the
    daemon not be there to kill it."""

    template: str
    variables: dict[str, Any]
    control_tokens: tuple[str, ...]
    output_bytes: int
    cpu_s: int


class RenderReply(msgspec.Struct, frozen=True, kw_only=True):
    """The prompt, or an error as in `errors.by_code`. One follows each request, in order; one without segments and
    without an error is also the worker's first frame, which says that it is ready."""

    segments: tuple[Segment, ...] = ()
    error_code: str | None = None
    error_message: str = ""


# --- daemon <-> media worker --------------------------------------------------------------------------------------


class DecodeRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Decode the picture or the sound of `format` that the input file holds, `size_bytes` long, into the output file,
    as `Media` says. A picture becomes at most `max_side` pixels wide and high, unless that is 0; sound comes at
    `audio_rate_hz`. `cpu_s` as in `RenderRequest`."""

    kind: MediaKind
    format: str
    size_bytes: int
    cpu_s: int
    max_side: int = 0
    audio_rate_hz: int = 0


class DecodeReply(msgspec.Struct, frozen=True, kw_only=True):
    """What is in the output file now, or an error as in `errors.by_code`. One follows each request; one without
    anything is also the worker's first frame, which says that it is ready."""

    digest: bytes = b""
    width: int = 0
    height: int = 0
    n_samples: int = 0
    error_code: str | None = None
    error_message: str = ""


# --- engine <-> grammar worker ------------------------------------------------------------------------------------


class GrammarCheck(msgspec.Struct, frozen=True, kw_only=True):
    """Compile a grammar whose literals name these control tokens. `cpu_s` as in `RenderRequest`."""

    grammar: Grammar
    control_names: tuple[str, ...]
    cpu_s: int


class GrammarChecked(msgspec.Struct, frozen=True, kw_only=True):
    """The grammar as an engine is to compile it; or what is wrong with it. `notices` say what was left out of it. One
    follows each request; one without anything is also the worker's first frame, which says that it is ready."""

    grammar: Grammar | None = None
    notices: tuple[str, ...] = ()
    error_message: str = ""
