"""What a request says besides its content, whichever API it came by: how to sample, who asks, how to be served.

The bounds keep values inside what the engine's samplers are defined for; they are wider than any useful setting. A
field that clients send as null when it is unset is `| None` in the body that uses it. Where a request says nothing
about sampling, the model's own parameters count (`ModelDefaults`), and then the API's defaults.

The client's name is what people see in the request table and what fairness is counted by; it proves nothing. Lane,
latency, deadline and speculation may come as headers or as fields of the body; the body's count where both are given,
because the headers are what a client is set up with once. `keep_alive` comes in every spelling that Ollama's clients
use: a number of seconds, or a text with a number or a duration of Go's form ("5m", "1h30m", "-1s", "300ms"); negative
is for ever, 0 is unload at once.
Does not: know the model; what only the model can tell (is this token id in its vocabulary) is asked by the routes.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
from msgspec import Meta
from starlette.types import Scope

from localrun.config import (
    MAX_ADAPTERS,
    MAX_DURATION_CHARACTERS,
    MAX_SCALE,
    NOTHING_ASKED,
    ConfigError,
    LoadSettings,
    duration_s,
    latency_target_s,
)
from localrun.errors import BadModelFile, BadRequest
from localrun.models.adapters import AdapterChoice
from localrun.models.name import MAX_PATH_BYTES
from localrun.models.storage.model import Model
from localrun.server.engines.resident import Use
from localrun.server.http.access import OWNER, Caller
from localrun.server.http.exchange import Exchange
from localrun.server.jobs.job import JobRequest
from localrun.wire import Lane, Sampling

# Programs for stories stop at the name of each character.
MAX_STOPS = 64
MAX_LOGIT_BIASES = 1024
MAX_BIASED_CHARACTERS = 1_000
_TOKEN_ID = re.compile("-?[0-9]+")
_MOST_DIGITS = 10
MAX_CHOICES = 16
MAX_TOP_LOGPROBS = 20
# On the routes of llama-server, which has no limit.
MAX_N_PROBS = 100
MAX_BREAKERS = 16
# Above any context length; what is larger than the context is cut to it, so no loop or allocation follows this number.
MAX_TOKENS = 2**31 - 1
MAX_CLIENT_CHARACTERS = 64
MAX_DEADLINE_S = 86_400.0

# A null is no name, as an empty one is; `targets.py` finds a name in its place before anything reads it.
if TYPE_CHECKING:
    ModelName = str
else:
    ModelName = str | None

Temperature = Annotated[float, Meta(ge=0.0, le=100.0)]
Probability = Annotated[float, Meta(ge=0.0, le=1.0)]
TypicalP = Annotated[float, Meta(gt=0.0, le=1.0)]
RepeatPenalty = Annotated[float, Meta(gt=0.0, le=100.0)]
AdditivePenalty = Annotated[float, Meta(ge=-100.0, le=100.0)]
MirostatTau = Annotated[float, Meta(ge=0.0, le=100.0)]

# -1 stands for off (top_k), for the whole context (last_n), and for a random one (seed).
TopK = Annotated[int, Meta(ge=-1, le=MAX_TOKENS)]
LastN = Annotated[int, Meta(ge=-1, le=MAX_TOKENS)]
WholeCount = Annotated[int, Meta(ge=0, le=MAX_TOKENS)]
Seed = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
MirostatVersion = Annotated[int, Meta(ge=0, le=2)]

StopString = Annotated[str, Meta(max_length=1024)]
Stop = StopString | Annotated[list[StopString], Meta(max_length=MAX_STOPS)]
Bias = Annotated[float, Meta(ge=-100.0, le=100.0)]
TopLogprobs = Annotated[int, Meta(ge=0, le=MAX_TOP_LOGPROBS)]
NProbs = Annotated[int, Meta(ge=0, le=MAX_N_PROBS)]
TokenId = Annotated[int, Meta(ge=0, le=MAX_TOKENS)]
DraftName = Annotated[str, Meta(max_length=MAX_PATH_BYTES)]

DryMultiplier = Annotated[float, Meta(ge=0.0, le=100.0)]
DryBase = Annotated[float, Meta(ge=1.0, le=100.0)]
# llama.cpp cuts longer ones.
# Without a pattern that forbids NUL, which `_breakers` does: msgspec 0.22 frees a pattern of such a union twice, and
# now and then a process crashes at its end.
Breaker = Annotated[str, Meta(min_length=1, max_length=40)]
Breakers = Breaker | Annotated[list[Breaker], Meta(max_length=MAX_BREAKERS)]
TopNSigma = Annotated[float, Meta(ge=-1.0, le=100.0)]
DynaTemp = Annotated[float, Meta(ge=0.0, le=100.0)]

# Which texts, `speculates` says itself.
Speculation = bool | Annotated[str, Meta(extra_json_schema={"enum": ["on", "off"]})]


class LoraEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One of `lora`. `id` is a name, a path, a digest, or a place in `GET /lora-adapters`, which is all that
    llama-server has."""

    id: Annotated[int, Meta(ge=0, le=MAX_TOKENS)] | Annotated[str, Meta(min_length=1, max_length=MAX_PATH_BYTES)]
    scale: Annotated[float, Meta(ge=-MAX_SCALE, le=MAX_SCALE)] = 1.0


class ServiceFields(msgspec.Struct, frozen=True, kw_only=True):
    """How a request wants to be served: localrun's own fields, at the top level of every API's body. `job_request_of`
    reads them, beside the headers that say the same."""

    lane: str | None = None
    latency: str | float | None = None
    deadline_s: float | None = None
    keep_alive: float | str | None = None
    speculation: Speculation | None = None
    draft: DraftName | None = None


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
    dry_multiplier: DryMultiplier | None = None
    dry_base: DryBase | None = None
    dry_allowed_length: Annotated[float, Meta(ge=0, le=MAX_TOKENS)] | None = None
    dry_penalty_last_n: Annotated[float, Meta(ge=-1, le=MAX_TOKENS)] | None = None
    dry_sequence_breakers: Breakers | None = None
    top_n_sigma: TopNSigma | None = None
    xtc_probability: Probability | None = None
    xtc_threshold: Probability | None = None
    dynatemp_range: DynaTemp | None = None
    dynatemp_exponent: DynaTemp | None = None
    stop: Stop | None = None


class ModelDefaults(Parameters, frozen=True, kw_only=True):
    """A model's own parameters (of its Modelfile or its registry), as defaults below what a request says."""

    top_k: TopK | None = None
    repeat_last_n: LastN | None = None
    mirostat: MirostatVersion | None = None
    seed: Seed | None = None
    dry_allowed_length: WholeCount | None = None
    dry_penalty_last_n: LastN | None = None
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
# With -1 the answer ends when the model ends it.
# Some clients write every number as a double.
AnswerLimit = Annotated[float, Meta(ge=-1, le=MAX_TOKENS)]
_Penalty = Annotated[float, Meta(ge=-2.0, le=2.0)]
# Of token ids and, as llama-server has it, of texts; as an object or as pairs, and false for a ban.
_LogitBias = (
    Annotated[dict[str, Bias | bool], Meta(max_length=MAX_LOGIT_BIASES)]
    | Annotated[list[tuple[int | str, Bias | bool]], Meta(max_length=MAX_LOGIT_BIASES)]
)


_NOT_DONE = ("min_tokens", "stop_token_ids", "include_stop_str_in_output", "bad_words", "allowed_token_ids")
NO_TEXTS: Mapping[str, Sequence[int]] = {}


class SamplingFields(Parameters, frozen=True, kw_only=True):
    """What the bodies of `/v1` have in common: OpenAI's fields, with the extras of llama-server and vLLM, and those of
    `ServiceFields`. None means the model's parameter, or OpenAI's default: temperature 1, everything else neutral."""

    presence_penalty: _Penalty | None = None
    frequency_penalty: _Penalty | None = None
    logit_bias: _LogitBias | None = None
    ignore_eos: bool | None = None
    cache_prompt: bool | None = None
    top_k: TopK | None = None
    repetition_penalty: RepeatPenalty | None = None
    repeat_last_n: LastN | None = None
    mirostat: MirostatVersion | None = None
    seed: Seed | None = None
    dry_allowed_length: WholeCount | None = None
    dry_penalty_last_n: LastN | None = None
    lane: str | None = None
    latency: str | float | None = None
    deadline_s: float | None = None
    keep_alive: float | str | None = None
    speculation: Speculation | None = None
    draft: DraftName | None = None
    lora: Annotated[list[LoraEntry], Meta(max_length=MAX_ADAPTERS)] | None = None
    # vLLM's and SGLang's, which are not done here: an answer says so.
    min_tokens: Any = None
    stop_token_ids: Any = None
    include_stop_str_in_output: Any = None
    bad_words: Any = None
    allowed_token_ids: Any = None

    def passed_over(self) -> list[str]:
        """The fields that ask for something and have no effect."""
        return [name for name in _NOT_DONE if getattr(self, name)]

    def stop_strings(self, defaults: ModelDefaults) -> tuple[str, ...]:
        """The request's stop strings, else the model's."""
        return stop_strings(self.stop if self.stop is not None else defaults.stop)

    def biased_texts(self) -> list[str]:
        """Those of `logit_bias`. Raises BadRequest for one that is too long."""
        return [key for key, _ in _bias_pairs(self.logit_bias) if isinstance(key, str)]

    def sampling(
        self, n_vocab: int, defaults: ModelDefaults, tokens_of: Mapping[str, Sequence[int]] = NO_TEXTS
    ) -> Sampling:
        """With the tokens of each of `biased_texts`. Raises BadRequest for a biased token outside the vocabulary, and
        for too many of them."""
        biases = _biases(_bias_pairs(self.logit_bias), n_vocab, tokens_of)
        said = sampling((self, defaults), Sampling(logit_bias=biases))
        if self.repeat_penalty is None and self.repetition_penalty is not None:
            said = msgspec.structs.replace(said, repeat_penalty=self.repetition_penalty)
        return said


# The engine's names for what a person calls otherwise; and what it wants as whole numbers.
_ENGINE_NAMES = {name: name for name in Parameters.__struct_fields__ if name != "stop"} | {
    "repeat_last_n": "penalty_last_n"
}
_WHOLE = frozenset(("top_k", "repeat_last_n", "mirostat", "seed", "dry_allowed_length", "dry_penalty_last_n"))


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
    if "dry_sequence_breakers" in said:
        said["dry_sequence_breakers"] = _breakers(said["dry_sequence_breakers"])
    if said.get("seed") == -1:  # the other spelling of random
        said["seed"] = None
    return msgspec.structs.replace(default, **said)


def _breakers(said: str | list[str]) -> tuple[str, ...]:
    texts = _texts(said)
    if any("\0" in text for text in texts):
        raise BadRequest.of("dry_sequence_breakers", "there is a NUL character in a text; leave it out")
    return texts


def stop_strings(stop: str | list[str] | None) -> tuple[str, ...]:
    """The stop strings of a request; an empty one would match everywhere and is left out."""
    return () if stop is None else _texts(stop)


def _texts(texts: str | list[str]) -> tuple[str, ...]:
    return tuple(text for text in ([texts] if isinstance(texts, str) else texts) if text)


def _bias_pairs(asked: _LogitBias | None) -> list[tuple[int | str, float]]:
    """With token ids as numbers, and -inf for a ban."""
    pairs: list[tuple[int | str, float]] = []
    for key, value in asked.items() if isinstance(asked, dict) else asked or ():
        if value is True:
            raise BadRequest.of("logit_bias", "a number from -100 to 100, or false to ban")
        # An object's keys cannot but be texts.
        if isinstance(asked, dict) and isinstance(key, str) and _TOKEN_ID.fullmatch(key):
            key = int(key) if len(key) <= _MOST_DIGITS else MAX_TOKENS
        if isinstance(key, str) and not 0 < len(key) <= MAX_BIASED_CHARACTERS:
            raise BadRequest.of("logit_bias", f"a text has {len(key)} characters; send 1 to {MAX_BIASED_CHARACTERS}")
        # -100 means a ban in OpenAI's API.
        pairs.append((key, -math.inf if value is False or value <= -100 else float(value)))
    return pairs


def _biases(
    pairs: Sequence[tuple[int | str, float]], n_vocab: int, tokens_of: Mapping[str, Sequence[int]]
) -> tuple[tuple[int, float], ...]:
    found: list[tuple[int, float]] = []
    for key, bias in pairs:
        if isinstance(key, int) and not 0 <= key < n_vocab:
            raise BadRequest.of("logit_bias", f"{key} is not a token of this model, which has {n_vocab}")
        found += [(token, bias) for token in ((key,) if isinstance(key, int) else tokens_of[key])]
    check_biases(len(found))
    return tuple(found)


def check_biases(n_tokens: int) -> None:
    """Raises BadRequest for more than there may be."""
    if n_tokens > MAX_LOGIT_BIASES:
        raise BadRequest.of("logit_bias", f"{n_tokens} tokens; {MAX_LOGIT_BIASES} are the most")


_NOT_PRINTABLE = re.compile(r"[^\x20-\x7e]+", re.ASCII)
_MAX_QUOTED = 40


def job_request_of(
    exchange: Exchange,
    model: str,
    wanted: ServiceFields | SamplingFields,
    *,
    use: Use = Use.TEXT,
    load: LoadSettings = NOTHING_ASKED,
) -> JobRequest:
    """What to ask the runtime for, taken from the quota of whoever asks. Raises BadRequest for a lane, a latency, a
    deadline, a duration or a switch that is none, and what `Caller.begin` raises."""
    client_id, trace_id = ids_of(exchange.scope)
    ask = JobRequest(
        model=model,
        api=exchange.path,
        client=client(exchange),
        lane=lane(exchange, wanted.lane),
        target_itl_s=target_itl_s(exchange, wanted.latency),
        deadline_s=deadline_s(exchange, wanted.deadline_s),
        keep_alive_s=keep_alive_s(wanted.keep_alive),
        speculates=speculates(exchange, wanted.speculation),
        draft=wanted.draft or "",
        lora=_lora(wanted) if isinstance(wanted, SamplingFields) else (),
        use=use,
        load=load,
        tier=exchange.tier,
        client_id=client_id,
        trace_id=trace_id,
        records=exchange.account.records,
    )
    return ask if exchange.caller is OWNER else of_caller(ask, exchange.caller)


def of_caller(ask: JobRequest, caller: Caller) -> JobRequest:
    """The same, of somebody with a key. `keep_alive` of one that may not unload models has no effect. Raises what
    `Caller.begin` raises, and ModelNotFound for a draft model that it may not use."""
    lane = caller.begin(ask.model, ask.lane)
    if ask.draft:
        caller.check_model(ask.draft)
    return msgspec.structs.replace(
        ask,
        lane=lane,
        keep_alive_s=ask.keep_alive_s if caller.may_change else None,
        key="" if caller.key is None else caller.name,
        namespace=caller.namespace,
        meter=caller,
    )


def _lora(fields: SamplingFields) -> tuple[AdapterChoice, ...]:
    return tuple(AdapterChoice(entry.id, entry.scale, f"lora[{at}]") for at, entry in enumerate(fields.lora or ()))


def lane(exchange: Exchange, field: str | None = None) -> Lane:
    """`lane` or `X-Localrun-Lane`, else the default lane."""
    where, text = _where(exchange, "lane", field, "X-Localrun-Lane")
    name = text.strip().lower()
    if not name:
        return Lane.DEFAULT
    if name not in set(Lane):
        raise BadRequest.of(where, f"{name[:_MAX_QUOTED]!r} is not a lane; use {', '.join(Lane)}")
    return Lane(name)


def target_itl_s(exchange: Exchange, field: str | float | None = None) -> float | None:
    """`latency` or `X-Localrun-Latency`, a mode or a number of milliseconds, as seconds; 0 is no limit, None is the
    daemon's setting."""
    where, text = _where(exchange, "latency", field, "X-Localrun-Latency")
    name = text.strip().lower()
    if not name:
        return None
    try:
        return latency_target_s(name[:_MAX_QUOTED])
    except ConfigError as error:
        raise BadRequest.of(where, f"{error}") from None


def deadline_s(exchange: Exchange, field: float | None = None) -> float | None:
    """`deadline_s` or `X-Localrun-Deadline`: seconds from the request's arrival; None without one."""
    where, text = _where(exchange, "deadline_s", field, "X-Localrun-Deadline")
    if not text.strip():
        return None
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds <= MAX_DEADLINE_S:
        raise BadRequest.of(
            where, f"{text[:_MAX_QUOTED]!r} is not a deadline; use a number of seconds up to {MAX_DEADLINE_S:.0f}"
        )
    return seconds


_SWITCH = {"on": True, "true": True, "off": False, "false": False}


def speculates(exchange: Exchange, field: Speculation | None = None) -> bool | None:
    """`speculation` or `X-Localrun-Speculation`; None is the setting of the model."""
    where, text = _where(exchange, "speculation", field, "X-Localrun-Speculation")
    name = text.strip().lower()
    if (name or field is not None) and name not in _SWITCH:
        raise BadRequest.of(where, f"{name[:_MAX_QUOTED]!r} is not known; use on or off")
    return _SWITCH.get(name)


def _where(exchange: Exchange, name: str, field: str | float | None, header: str) -> tuple[str, str]:
    """What was said, and by which name."""
    if field is not None:
        return name, str(field)
    return header, exchange.header(header.lower().encode("ascii"))


def client(exchange: Exchange) -> str:
    """`X-Localrun-Client`, else the product in the User-Agent, else the peer's address."""
    named = _printable(exchange.header(b"x-localrun-client"))
    if named:
        return named
    product = _printable(exchange.header(b"user-agent")).partition(" ")[0].partition("/")[0]
    if product:
        return product
    peer = exchange.scope.get("client")
    return str(peer[0]) if peer else ""


def _printable(text: str) -> str:
    return _NOT_PRINTABLE.sub(" ", text).strip()[:MAX_CLIENT_CHARACTERS]


# What a gateway calls the request, if that can stand in a log: nothing that would have to be quoted.
_CLIENT_ID = re.compile(r"[A-Za-z0-9._:/+=@~-]{1,128}")
_CLIENT_ID_HEADERS = (b"x-request-id", b"x-client-request-id")
# Version, trace, parent and flags.
_TRACEPARENT = re.compile(r"[0-9a-f]{2}-(?!0{32})([0-9a-f]{32})-[0-9a-f]{16}-[0-9a-f]{2}.*", re.ASCII)


def ids_of(scope: Scope) -> tuple[str, str]:
    """The client's own id of the request, and the id of the trace that it belongs to (W3C's `traceparent`); empty where
    there is none, or none that could be shown."""
    client_id = trace_id = ""
    for name, value in scope["headers"]:
        if name in _CLIENT_ID_HEADERS and not client_id:
            found = _CLIENT_ID.fullmatch(value.decode("latin-1"))
            client_id = found[0] if found else ""
        elif name == b"traceparent" and not trace_id:
            parts = _TRACEPARENT.fullmatch(value.decode("latin-1"))
            trace_id = parts[1] if parts else ""
    return client_id, trace_id


def keep_alive_s(value: float | str | None) -> float | None:
    """Seconds; -1.0 for ever; None for the daemon's own setting. Raises BadRequest for anything else."""
    if value is None or value == "":
        return None
    parsed = duration_s(value) if isinstance(value, str) else float(value)
    if parsed is None or not math.isfinite(parsed):
        raise BadRequest.of(
            "keep_alive",
            f"{str(value)[:MAX_DURATION_CHARACTERS]!r} is not a duration; use seconds, or a text such as "
            f"'5m', '1h30m' or '-1'",
        )
    return -1.0 if parsed < 0 else parsed
