"""What requests of all APIs say: how to sample and with which bounds, the client, lane, latency and deadline."""

from __future__ import annotations

import json
import math
from types import SimpleNamespace
from typing import Any, cast

import pytest

from localrun.config import latency_target_s
from localrun.errors import BadModelFile, BadRequest
from localrun.models.storage.model import Model
from localrun.server.http import fields
from localrun.server.http.exchange import Exchange, decode_body
from localrun.server.http.failures import Shape
from localrun.server.http.fields import ModelDefaults, ServiceFields, defaults_of, keep_alive_s
from localrun.server.openai.chat import ChatBody
from localrun.wire import Lane, Sampling

N_VOCAB = 1000
NONE = ModelDefaults()


def chat(**fields: Any) -> ChatBody:
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], **fields}
    return decode_body(json.dumps(body).encode(), ChatBody)


def sampling(defaults: ModelDefaults = NONE, **fields: Any) -> Sampling:
    return chat(**fields).sampling(N_VOCAB, defaults)


def test_openai_s_defaults() -> None:
    made = sampling()
    assert (made.temperature, made.top_p, made.top_k, made.min_p) == (1.0, 1.0, 0, 0.0)
    assert (made.presence_penalty, made.frequency_penalty, made.repeat_penalty) == (0.0, 0.0, 1.0)
    assert (chat().n_choices, chat().stop_strings(NONE), chat().include_usage) == (1, (), False)


def test_parameters_of_all_dialects() -> None:
    made = sampling(
        temperature=0.5, top_p=0.9, presence_penalty=1, frequency_penalty=-1, seed=7, logit_bias={"5": -100, "6": 2},
        top_k=-1, min_p=0.1, typical_p=0.8, repetition_penalty=1.2, repeat_last_n=128, mirostat=1,
    )  # fmt: skip
    assert (made.temperature, made.top_p, made.seed) == (0.5, 0.9, 7)
    assert (made.presence_penalty, made.frequency_penalty) == (1.0, -1.0)
    assert (made.top_k, made.min_p, made.typical_p) == (0, 0.1, 0.8)
    assert (made.repeat_penalty, made.penalty_last_n, made.mirostat) == (1.2, 128, 1)
    assert made.logit_bias == ((5, -math.inf), (6, 2.0))


def test_a_text_of_digits_is_a_token_id_as_a_key_only() -> None:
    """Pairs have numbers for ids, so what is quoted there is text, as with llama-server."""
    assert chat(logit_bias=[["7", 1], [7, 1]]).biased_texts() == ["7"]
    assert chat(logit_bias={"7": 1}).biased_texts() == []


def test_the_model_s_parameters_are_below_the_request_s() -> None:
    model = ModelDefaults(temperature=0.3, top_k=20, seed=5, repeat_penalty=1.3, stop=["END", "STOP"])
    made = sampling(model)
    assert (made.temperature, made.top_k, made.seed, made.repeat_penalty) == (0.3, 20, 5, 1.3)
    made = sampling(model, temperature=0, top_k=0, seed=6, repeat_penalty=1)
    assert (made.temperature, made.top_k, made.seed, made.repeat_penalty) == (0.0, 0, 6, 1.0)
    assert chat().stop_strings(model) == ("END", "STOP")
    assert chat(stop="x").stop_strings(model) == ("x",)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n", 0), ("n", 17), ("n", 10**9), ("n", "2"), ("max_tokens", -2), ("max_tokens", 2**31),
        ("max_completion_tokens", -5), ("temperature", -1), ("temperature", "x"), ("top_p", 1.5),
        ("presence_penalty", 2.1), ("frequency_penalty", -2.1), ("stop", ["x"] * 65), ("stop", [None]),
        ("seed", 2**63), ("top_logprobs", 21), ("top_logprobs", -1), ("logit_bias", {"1": 101}), ("logit_bias", [1]),
        ("logit_bias", {str(n): 0 for n in range(1025)}), ("repeat_penalty", 0), ("mirostat", 5), ("stream", "yes"),
        ("messages", "hi"), ("messages", [{"content": "hi"}]), ("stream_options", {"include_usage": 1}),
        ("reasoning_effort", "a lot"), ("tools", [{"function": {"name": 1}}]), ("parallel_tool_calls", 1),
    ],
)  # fmt: skip
def test_what_is_out_of_range_is_named(field: str, value: Any) -> None:
    with pytest.raises(BadRequest, match=field) as caught:
        chat(**{field: value})
    assert (caught.value.field or "").startswith(field)


@pytest.mark.parametrize("token", ["-1", "1000", "", "9" * 30])
def test_a_biased_token_must_be_in_the_vocabulary(token: str) -> None:
    with pytest.raises(BadRequest, match="logit_bias"):
        sampling(logit_bias={token: 1})


def of(**parameters: Any) -> ModelDefaults:
    return defaults_of(cast(Model, SimpleNamespace(name="m", parameters=parameters)))


def test_numbers_in_every_spelling() -> None:
    made = of(temperature="0.5", top_k=40.0, num_predict="12", stop=["a"], num_ctx=8192)
    assert (made.temperature, made.top_k, made.stop) == (0.5, 40, ["a"])
    assert made.n_predict(None) == 12


def test_the_request_s_limit_counts_and_a_negative_one_is_none() -> None:
    assert of(num_predict=12).n_predict(3) == 3
    assert of().n_predict(None) == -1
    assert of(num_predict=-2).n_predict(None) == -1


def test_a_parameter_out_of_range_names_the_model_and_itself() -> None:
    with pytest.raises(BadModelFile, match=r"'m'.*temperature"):
        of(temperature=-1)


def exchange(**headers: str) -> Exchange:
    raw = [(name.replace("_", "-").encode(), value.encode("latin-1")) for name, value in headers.items()]
    scope: dict[str, Any] = {"type": "http", "path": "/api/chat", "headers": raw, "client": ("127.0.0.1", 50000)}
    return Exchange(scope, None, None, Shape.OLLAMA)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("headers", "name"),
    [
        ({}, "127.0.0.1"),
        ({"user_agent": "ollama-python/0.6.3 (x86_64 linux) Python/3.11"}, "ollama-python"),
        ({"user_agent": "OpenAI/Python 3.52.0"}, "OpenAI"),
        ({"user_agent": "curl/8.5.0", "x_localrun_client": "my editor"}, "my editor"),
        ({"user_agent": "\x01\x02"}, "127.0.0.1"),
        ({"x_localrun_client": "a\x00b\x1b[31mc\xe9"}, "a b [31mc"),
        ({"x_localrun_client": "x" * 500}, "x" * 64),
    ],
)
def test_the_client_s_name(headers: dict[str, str], name: str) -> None:
    assert fields.client(exchange(**headers)) == name


def test_lanes() -> None:
    assert fields.lane(exchange()) is Lane.DEFAULT
    assert fields.lane(exchange(x_localrun_lane="Interactive ")) is Lane.INTERACTIVE
    with pytest.raises(BadRequest, match=r"X-Localrun-Lane.*interactive, default, batch"):
        fields.lane(exchange(x_localrun_lane="first"))


def test_what_is_asked_of_the_runtime() -> None:
    ask = fields.job_request_of(
        exchange(x_localrun_client="me", x_localrun_lane="batch"), "tiny", ServiceFields(keep_alive=5)
    )
    assert (ask.model, ask.api, ask.client, ask.lane, ask.keep_alive_s) == ("tiny", "/api/chat", "me", Lane.BATCH, 5)


def test_a_lane_in_the_body_counts_before_the_header() -> None:
    asked = exchange(x_localrun_lane="batch")
    assert fields.lane(asked, "interactive") is Lane.INTERACTIVE
    with pytest.raises(BadRequest, match=r"^lane: 'first'.*interactive, default, batch") as caught:
        fields.lane(asked, "first")
    assert caught.value.field == "lane"


@pytest.mark.parametrize(
    ("said", "seconds"),
    [("throughput", 0.8), (" Throughput", 0.8), ("40", 0.04), (40, 0.04), (12.5, 0.0125), ("", None)],
)
def test_latency(said: str | float, seconds: float | None) -> None:
    assert fields.target_itl_s(exchange(), said) == seconds
    assert fields.target_itl_s(exchange(x_localrun_latency=str(said))) == seconds


def test_modes_are_the_setting_s() -> None:
    for mode in ("interactive", "balanced"):
        assert fields.target_itl_s(exchange(), mode) == latency_target_s(mode) > 0
    assert fields.target_itl_s(exchange()) is None


@pytest.mark.parametrize("said", ["fast", "-1", "0", "nan", "inf", "1e9", "x" * 1000])
def test_a_latency_that_is_none(said: str) -> None:
    with pytest.raises(BadRequest, match=r"^latency: .*interactive, balanced, throughput.*milliseconds") as caught:
        fields.target_itl_s(exchange(), said)
    assert caught.value.field == "latency"
    assert len(caught.value.message) < 200
    with pytest.raises(BadRequest, match=r"^X-Localrun-Latency: "):
        fields.target_itl_s(exchange(x_localrun_latency=said))


def test_deadlines() -> None:
    assert fields.deadline_s(exchange()) is None
    assert fields.deadline_s(exchange(x_localrun_deadline="2.5")) == 2.5
    assert fields.deadline_s(exchange(x_localrun_deadline="2.5"), 4) == 4.0
    for wrong in (0.0, -1.0, 1e9):
        with pytest.raises(BadRequest, match=r"^deadline_s: .*86400"):
            fields.deadline_s(exchange(), wrong)
    for text in ("soon", "nan", "inf", "0"):
        with pytest.raises(BadRequest, match=r"^X-Localrun-Deadline: "):
            fields.deadline_s(exchange(x_localrun_deadline=text))


def test_what_the_body_asks_for_is_asked_of_the_runtime() -> None:
    said = ServiceFields(lane="batch", latency=30, deadline_s=9)
    ask = fields.job_request_of(exchange(), "tiny", said)
    assert (ask.lane, ask.target_itl_s, ask.deadline_s) == (Lane.BATCH, 0.03, 9.0)


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        (None, None), ("", None), (300, 300.0), (1.5, 1.5), (0, 0.0), (-1, -1.0), (-7.5, -1.0),
        ("5m", 300.0), ("1h30m", 5400.0), ("300ms", 0.3), ("1.5h", 5400.0), (".5s", 0.5), ("0", 0.0), ("0s", 0.0),
        ("-1", -1.0), ("-1m", -1.0), ("300", 300.0), ("+2s", 2.0), (" 10s ", 10.0), ("24h", 86400.0),
    ],
)  # fmt: skip
def test_spellings(value: float | str | None, seconds: float | None) -> None:
    assert keep_alive_s(value) == (None if seconds is None else pytest.approx(seconds))


@pytest.mark.parametrize(
    "value", ["five minutes", "5 m", "5d", "m", "--1", "1h-30m", "5m!", "nan", "inf", "1e3", "9" * 400, "５m"]
)
def test_what_is_no_duration_names_the_field(value: str) -> None:
    with pytest.raises(BadRequest, match="keep_alive") as caught:
        keep_alive_s(value)
    assert caught.value.field == "keep_alive"
