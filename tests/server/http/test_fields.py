"""How a request samples: defaults, the model's parameters below it, bounds."""

from __future__ import annotations

import json
import math
from types import SimpleNamespace
from typing import Any, cast

import pytest

from localrun.errors import BadModelFile, BadRequest
from localrun.models.store import Model
from localrun.server.http import bodies
from localrun.server.http.fields import ModelDefaults, defaults_of
from localrun.server.openai.chat import ChatBody
from localrun.wire import Sampling

N_VOCAB = 1000
NONE = ModelDefaults()


def chat(**fields: Any) -> ChatBody:
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], **fields}
    return bodies.decode(json.dumps(body).encode(), ChatBody)


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
        ("n", 0), ("n", 17), ("n", 10**9), ("n", "2"), ("max_tokens", -1), ("max_tokens", 0), ("max_tokens", 2**31),
        ("max_completion_tokens", -5), ("temperature", -1), ("temperature", "x"), ("top_p", 1.5),
        ("presence_penalty", 2.1), ("frequency_penalty", -2.1), ("stop", ["x"] * 17), ("stop", [None]),
        ("seed", 2**63), ("top_logprobs", 21), ("top_logprobs", -1), ("logit_bias", {"1": 101}), ("logit_bias", [1]),
        ("logit_bias", {str(n): 0 for n in range(1025)}), ("repeat_penalty", 0), ("mirostat", 5), ("stream", "yes"),
        ("messages", "hi"), ("messages", [{"content": "hi"}]), ("stream_options", {"include_usage": 1}),
        ("reasoning_effort", "some"), ("tools", [{"function": {"name": 1}}]), ("parallel_tool_calls", 1),
    ],
)  # fmt: skip
def test_what_is_out_of_range_is_named(field: str, value: Any) -> None:
    with pytest.raises(BadRequest, match=field) as caught:
        chat(**{field: value})
    assert (caught.value.field or "").startswith(field)


@pytest.mark.parametrize("token", ["x", "-1", "1000", "1.0", "", "９", "9" * 30])
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
