"""Load settings: which source counts, the longest request, and what a model cannot be loaded with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from localrun.config import KV_TYPES, NOTHING_ASKED, ROPE_SCALINGS, LoadSettings, ModelTable, Settings
from localrun.errors import BadRequest
from localrun.models.fit import MAX_CTX, check_load, context_limit, settled_load, too_long
from localrun.models.gguf.header import Header
from localrun.models.modelfile import load_settings, normalized_parameters
from tests.says import says

FIELDS = LoadSettings.__struct_fields__
loads = st.builds(
    LoadSettings,
    num_ctx=st.none() | st.sampled_from([0, 1, 4096, 8192, 131_072, MAX_CTX]),
    slots=st.none() | st.integers(1, 256),
    kv_cells=st.none() | st.integers(0, 100_000),
    kv_type=st.none() | st.sampled_from(KV_TYPES),
    threads=st.none() | st.integers(0, 512),
    gpu_layers=st.none() | st.integers(-1, 99),
    batch_tokens=st.none() | st.integers(32, 16_384),
    speculation=st.none() | st.sampled_from(["on", "off"]),
    draft=st.none() | st.sampled_from(["", "small"]),
    rope_scaling=st.none() | st.sampled_from(ROPE_SCALINGS),
    rope_frequency_base=st.none() | st.floats(0, 1e12),
    rope_frequency_scale=st.none() | st.floats(0, 1),
    yarn_orig_ctx=st.none() | st.sampled_from([0, 2048, MAX_CTX]),
)


def header(**metadata: Any) -> Header:
    shape = {"context_length": 4096, "block_count": 4, "embedding_length": 256, "attention.head_count": 4}
    shape |= {key.replace("__", "."): value for key, value in metadata.items()}
    return Header(
        path=Path("m.gguf"), size_bytes=0, version=3, architecture="llama", tensors=(), data_offset=0,
        metadata={f"llama.{key}": value for key, value in shape.items()},
    )  # fmt: skip


# --- which source counts ------------------------------------------------------------------------------------------


@given(sources=st.lists(loads, min_size=1, max_size=4))
def test_of_each_field_the_first_source_counts_that_says_something(sources: list[LoadSettings]) -> None:
    merged = sources[0]
    for source in sources[1:]:
        merged = merged.over(source)
    for field in FIELDS:
        said = [value for source in sources if (value := getattr(source, field)) is not None]
        assert getattr(merged, field) == (said[0] if said else None)


@given(one=loads, two=loads, three=loads)
def test_the_order_of_merging_does_not_matter(one: LoadSettings, two: LoadSettings, three: LoadSettings) -> None:
    assert one.over(two).over(three) == one.over(two.over(three))
    assert one.over(NOTHING_ASKED) == NOTHING_ASKED.over(one) == one.over(one) == one


@given(said=loads)
def test_settings_for_a_model_differ_in_what_was_said_alone(said: LoadSettings) -> None:
    settings = Settings(slots=7, kv_type="q4_0").with_load(said)
    for field in Settings.__struct_fields__:
        value = getattr(said, field, None)
        assert getattr(settings, field) == (
            getattr(Settings(slots=7, kv_type="q4_0"), field) if value is None else value
        )


def test_the_longest_pattern_counts_and_no_other() -> None:
    by_pattern = {
        "*": LoadSettings(slots=1, threads=1), "qwen3*": LoadSettings(slots=2), "QWEN3:8?": LoadSettings(slots=3),
        "qwen3:*b": LoadSettings(slots=4), "*/big.gguf": LoadSettings(slots=5),
    }  # fmt: skip
    settings = Settings(models=tuple(ModelTable(*item) for item in by_pattern.items()))
    found = {name: settings.of_model(name) for name in ("tiny", "qwen3", "Qwen3:8b", "qwen3:14b", "/x/big.gguf")}
    assert [said.slots for said in found.values()] == [1, 2, 3, 4, 5]
    assert found["qwen3"].threads is None
    assert Settings().of_model("tiny") == NOTHING_ASKED


def test_parameters_of_a_model_say_it_by_ollamas_names() -> None:
    said = {"num_ctx": 8192.0, "num_gpu": "12", "num_thread": 3, "kv_type": "Q8_0", "rope_frequency_base": "1e6"}
    kept = normalized_parameters(said | {"temperature": 1, "slots": 2, "num_batch": 7})
    assert load_settings(kept) == LoadSettings(
        num_ctx=8192, gpu_layers=12, threads=3, kv_type="q8_0", rope_frequency_base=1e6, slots=2
    )


# --- what it comes to -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("metadata", "said", "limit"),
    [
        ({}, {}, 4096),
        ({}, {"rope_frequency_base": 1e6}, 4096),
        ({}, {"rope_frequency_scale": 0.5}, 8192),
        ({}, {"rope_frequency_scale": 0.5, "rope_scaling": "none"}, 4096),
        ({}, {"rope_frequency_scale": 1.0}, 4096),
        ({}, {"rope_frequency_scale": 0.25, "yarn_orig_ctx": 2048}, 8192),
        ({}, {"rope_frequency_scale": 5e-324}, MAX_CTX),
        ({"rope__scaling__factor": 4.0}, {"rope_frequency_scale": 0.125}, 8192),
        ({"rope__scaling__factor": 4.0, "rope__scaling__original_context_length": 1024}, {}, 4096),
        ({"rope__scaling__original_context_length": 1024}, {"rope_frequency_scale": 0.125}, 8192),
    ],
)
def test_the_longest_request(metadata: dict[str, Any], said: dict[str, Any], limit: int) -> None:
    asked = LoadSettings(**said)
    assert context_limit(header(**metadata), asked) == limit
    assert settled_load(header(**metadata), LoadSettings(num_ctx=MAX_CTX, **said)).num_ctx == limit


@given(said=loads)
def test_what_is_settled_stays_so(said: LoadSettings) -> None:
    model = header(rope__freq_base=10_000.0)
    once = settled_load(model, said)
    assert settled_load(model, once) == once
    assert once.num_ctx is None or 0 < once.num_ctx <= context_limit(model, said)


def test_what_the_file_says_itself_is_not_asked_for() -> None:
    model = header(rope__freq_base=500_000.0, rope__scaling__factor=4.0)
    same = LoadSettings(rope_frequency_base=500_000.0, rope_frequency_scale=0.25, gpu_layers=-1, num_ctx=0)
    assert settled_load(model, same) == NOTHING_ASKED
    assert settled_load(model, LoadSettings(gpu_layers=999)).gpu_layers == 5


@pytest.mark.parametrize(
    ("said", "parts"),
    [
        ({"kv_type": "q8_0"}, ("kv_type", "blocks of 32", "80", "use f16")),
        ({"rope_frequency_base": 0.5}, ("rope_frequency_base is 0.5", "1 or more", "0")),
        ({"rope_frequency_scale": 1e-9}, ("rope_frequency_scale is 1e-09", "0.000976")),
    ],
)
def test_what_cannot_be_is_refused(said: dict[str, Any], parts: tuple[str, ...]) -> None:
    narrow = header(attention__key_length=80, attention__value_length=80)
    with pytest.raises(BadRequest) as caught:
        check_load(narrow, LoadSettings(**said), "m")
    assert all(part in caught.value.message for part in parts), caught.value.message
    check_load(narrow, LoadSettings(kv_type="auto"), "m")
    check_load(narrow, LoadSettings(kv_type="f16", rope_frequency_base=0.0), "m")


def test_too_long_a_context_names_the_trained_one_and_the_way_out() -> None:
    said = too_long(header(), LoadSettings(num_ctx=32_768))
    assert says(said, "num_ctx 32768", "4096 is used", "trained for 4096", "rope_frequency_scale 0.125")
    assert too_long(header(), LoadSettings(num_ctx=32_768, rope_frequency_scale=0.125)) == ""
