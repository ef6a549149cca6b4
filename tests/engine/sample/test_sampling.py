from __future__ import annotations

import math

import pytest

from localrun.engine.sample import chain as stages
from localrun.engine.sample.chain import bits_at, native_seed
from localrun.errors import BadRequest
from localrun.wire import Sampling


def chain(**fields: object) -> tuple[stages.Stage, ...]:
    return stages.chain(Sampling(seed=1, **fields), n_ctx=1000)  # type: ignore[arg-type]


def test_neutral_settings_need_a_draw_and_nothing_else():
    assert chain() == (stages.Draw(1),)


@pytest.mark.parametrize("temperature", [0.0, -1.0, 1e-40])
def test_no_temperature_is_greedy_and_makes_truncation_pointless(temperature: float):
    assert chain(temperature=temperature, top_k=40, top_p=0.9, mirostat=2) == (stages.Greedy(),)


def test_all_stages_stand_in_llama_s_order():
    assert chain(
        logit_bias=((5, -math.inf),),
        repeat_penalty=1.1,
        presence_penalty=0.2,
        frequency_penalty=0.3,
        top_k=40,
        typical_p=0.9,
        top_p=0.8,
        min_p=0.1,
        temperature=0.7,
    ) == (
        stages.LogitBias(((5, -math.inf),)),
        stages.Penalties(64, 1.1, 0.3, 0.2),
        stages.TopK(40),
        stages.Typical(0.9),
        stages.TopP(0.8),
        stages.MinP(0.1),
        stages.Temperature(0.7),
        stages.Draw(1),
    )


def test_bias_and_penalties_count_for_greedy_too():
    assert chain(temperature=0, logit_bias=((1, 2.0),), repeat_penalty=1.1) == (
        stages.LogitBias(((1, 2.0),)),
        stages.Penalties(64, 1.1, 0.0, 0.0),
        stages.Greedy(),
    )


def test_mirostat_takes_the_place_of_truncation():
    assert chain(mirostat=2, mirostat_tau=4.0, mirostat_eta=0.2, top_k=40, temperature=0.8) == (
        stages.Mirostat(2, 1, 4.0, 0.2, 0.8),
    )


@pytest.mark.parametrize("temperature", [0.0, 0.5, 1.0])
def test_a_dynamic_temperature_never_comes_so_near_to_0_that_logits_overflow(temperature: float):
    *_, dynamic, _ = chain(temperature=temperature, dynatemp_range=1.0, dynatemp_exponent=2.0)
    assert isinstance(dynamic, stages.Temperature)
    assert dynamic.value - dynamic.range == pytest.approx(0.001)
    assert (dynamic.value + dynamic.range, dynamic.exponent) == pytest.approx((temperature + 1.0, 2.0))


@pytest.mark.parametrize(("asked", "used"), [(64, 64), (-1, 1000), (5000, 1000)])
def test_the_window_of_penalties_ends_with_the_context(asked: int, used: int):
    assert chain(repeat_penalty=1.1, penalty_last_n=asked)[0] == stages.Penalties(used, 1.1, 0.0, 0.0)


def test_a_window_of_nothing_turns_penalties_off():
    assert chain(repeat_penalty=1.1, penalty_last_n=0) == (stages.Draw(1),)


@pytest.mark.parametrize("seed", [-1, 0, 2**32 - 1, 2**63])
def test_every_seed_becomes_one_that_native_code_does_not_take_for_random(seed: int):
    draw = stages.chain(Sampling(seed=seed), n_ctx=10)[-1]
    assert isinstance(draw, stages.Draw)
    assert all(0 <= native_seed(bits_at(draw.seed, position)) < 2**32 - 1 for position in range(1000))


def test_no_seed_draws_one():
    drawn = {stages.chain(Sampling(), n_ctx=10) for _ in range(8)}
    assert len(drawn) == 8


@pytest.mark.parametrize("name", stages._FLOATS)
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_number_that_is_none_is_refused_by_name(name: str, value: float):
    with pytest.raises(BadRequest, match=name) as caught:
        stages.check(Sampling(**{name: value}), n_vocab=100)
    assert caught.value.field == name


@pytest.mark.parametrize("bias", [(-1, 1.0), (100, 1.0), (5, math.nan), (5, math.inf)])
def test_a_bias_that_makes_no_sense_is_refused(bias: tuple[int, float]):
    with pytest.raises(BadRequest, match=str(bias[0])) as caught:
        stages.check(Sampling(logit_bias=((4, 0.5), bias)), n_vocab=100)
    assert caught.value.field == "logit_bias"


def test_a_ban_and_the_last_token_are_fine():
    stages.check(Sampling(logit_bias=((99, -math.inf), (0, -100.0))), n_vocab=100)


def test_every_float_of_a_request_is_checked():
    assert set(stages._FLOATS) == {
        name for name in Sampling.__struct_fields__ if isinstance(getattr(Sampling(), name), float)
    }
