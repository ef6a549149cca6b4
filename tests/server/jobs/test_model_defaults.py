"""A model's own parameters."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from localrun.errors import BadModelFile
from localrun.models.store import Model
from localrun.server.jobs.model_defaults import ModelDefaults, defaults_of


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
