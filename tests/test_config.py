from __future__ import annotations

import os
import re
import sys
import typing
from pathlib import Path

import pytest
import settings_page
from hypothesis import given, settings
from hypothesis import strategies as st

from localrun import config
from localrun.config import (
    ConfigError,
    LoadSettings,
    ModelTable,
    Settings,
    env_name,
    folders,
    latency_target_s,
    load,
    models_folder,
)
from tests.depth import DEPTH

FIELDS = config.FIELDS


@pytest.fixture
def home(tmp_path: Path) -> dict[str, str]:
    """An environment whose configuration folder is `tmp_path/config`."""
    (tmp_path / "config").mkdir()
    return {"LOCALRUN_HOME": str(tmp_path)}


def write(home: dict[str, str], text: str) -> Path:
    path = Path(home["LOCALRUN_HOME"]) / "config" / "localrun.toml"
    path.write_text(text, encoding="utf-8")
    return path


def test_a_settings_file_that_cannot_be_read_is_not_taken_for_none(home: dict[str, str]):
    path = write(home, "")
    path.unlink()
    path.symlink_to(path.name)
    with pytest.raises(ConfigError, match=f"{re.escape(str(path))}: "):
        load(environ=home)
    path.unlink()
    path.mkdir()
    with pytest.raises(ConfigError, match=f"{re.escape(str(path))}: "):
        load(environ=home)


@pytest.mark.skipif(sys.platform == "win32", reason="has no such files")
def test_a_settings_file_that_never_ends_is_not_read(home: dict[str, str]):
    path = write(home, "")
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(ConfigError, match=f"{re.escape(str(path))}: .*not a regular file"):
        load(environ=home)
    path.unlink()
    path.symlink_to("/dev/zero")
    with pytest.raises(ConfigError, match=f"{re.escape(str(path))}: .*not a regular file"):
        load(environ=home)
    path.unlink()
    path.symlink_to(os.devnull)
    assert load(environ=home) == Settings()


# --- where a value comes from --------------------------------------------------------------------------------------


def test_without_sources_everything_is_a_default(home: dict[str, str]):
    assert load(environ=home) == Settings()


def test_each_source_overrides_the_one_before_it(home: dict[str, str]):
    write(home, "slots = 2\nport = 2000\nthreads = 2\n")
    home |= {"LOCALRUN_PORT": "3000", "LOCALRUN_THREADS": "3"}
    settings = load({"threads": 4}, home)
    assert (settings.max_queue, settings.slots, settings.port, settings.threads) == (256, 2, 3000, 4)


def test_what_kubernetes_says_of_a_service_of_this_name_is_no_port(home: dict[str, str]):
    write(home, "port = 2000\n")
    told = {"LOCALRUN_PORT": "tcp://10.96.0.7:11434", "LOCALRUN_PORT_11434_TCP": "tcp://10.96.0.7:11434"}
    told |= {"LOCALRUN_SERVICE_HOST": "10.96.0.7", "LOCALRUN_SERVICE_PORT": "11434"}
    assert load(environ=home | told) == Settings(port=2000)
    assert config.slips(told) == {}


def test_a_settings_file_may_begin_with_a_byte_order_mark(home: dict[str, str]):
    """As PowerShell and older editors on Windows write it."""
    write(home, "\ufeffport = 2000\r\nslots = 2\r\n")
    assert load(environ=home) == Settings(port=2000, slots=2)


def test_a_flag_that_was_not_given_overrides_nothing(home: dict[str, str]):
    assert load({"slots": None}, home | {"LOCALRUN_SLOTS": "5"}).slots == 5
    assert load(None, home | {"LOCALRUN_SLOTS": "5"}).slots == 5


def test_a_flag_of_zero_counts(home: dict[str, str]):
    assert load({"port": 0}, home).port == 0


@pytest.mark.parametrize("text", ["", "  "])
def test_an_empty_variable_is_as_good_as_none(home: dict[str, str], text: str):
    assert load(environ=home | {"LOCALRUN_SLOTS": text}).slots == Settings().slots


def test_every_field_can_be_set_in_the_file_and_in_the_environment(home: dict[str, str]):
    wanted = {
        "kv_type": "q8_0",
        "latency": "250",
        "log_level": "debug",
        "host": "::1",
        "cpu_fallback": "on",
        "resume": "off",
        "speculation": "off",
        "projectors": "off",
        "fetch_images": "on",
        "strict_schemas": "on",
        "loopback_needs_key": "off",
        "announce": "on",
    }
    hints = typing.get_type_hints(Settings)
    values = {
        field: wanted.get(field, "text") if hints[field] is str else hints[field](getattr(Settings(), field) + 1)
        for field in FIELDS
    }
    write(home, "\n".join(f"{name} = {value!r}" for name, value in values.items()))
    assert load(environ=home) == Settings(**values)
    write(home, "")
    from_environment = load(environ=home | {env_name(field): str(value) for field, value in values.items()})
    assert from_environment == Settings(**values)


# --- names ---------------------------------------------------------------------------------------------------------


def test_environment_names_that_scripts_rely_on():
    assert {name: env_name(name) for name in ("host", "port", "slots", "kv_cells", "threads", "latency")} == {
        name: f"LOCALRUN_{name.upper()}" for name in ("host", "port", "slots", "kv_cells", "threads", "latency")
    }
    assert env_name("ram_cache_bytes") == "LOCALRUN_RAM_CACHE"
    assert env_name("disk_cache_bytes") == "LOCALRUN_DISK_CACHE"
    assert env_name("models_dir") == "LOCALRUN_MODELS"


def test_environment_names_are_all_different_and_none_is_the_home():
    names = [env_name(field) for field in FIELDS]
    assert len(set(names)) == len(names)
    assert "LOCALRUN_HOME" not in names


def test_every_field_is_documented_once_and_no_other():
    assert tuple(config.help_texts()) == FIELDS
    assert all(text and text == text.strip() and not text.endswith(".") for text in config.help_texts().values())


def test_every_number_has_its_unit_in_its_name_or_counts_something():
    counted = {"port", "slots", "kv_cells", "threads", "gpu_layers", "batch_tokens", "max_queue", "max_models"}
    hints = typing.get_type_hints(Settings)
    for field in FIELDS:
        assert hints[field] is str or field in counted or field.endswith(("_s", "_bytes")), field


def test_tables_of_models(home: dict[str, str]):
    path = write(
        home, 'slots = 4\n[models."qwen3*"]\nnum_ctx = 65536\nkv_type = "q8_0"\nrope_frequency_base = 1000000\n'
    )
    settings = load(environ=home)
    assert settings.slots == 4
    said = LoadSettings(num_ctx=65536, kv_type="q8_0", rope_frequency_base=1e6)
    assert settings.models == (ModelTable("qwen3*", said, path),)
    assert settings.of_model("qwen3:8b") == said


def test_of_tables_that_match_the_longest_counts_alone_and_of_two_as_long_the_first(home: dict[str, str]):
    write(
        home,
        """
        [models."*"]
        slots = 1
        adapters = ["style"]
        [models."qwen3*"]
        slots = 2
        [models."*3:8b"]
        slots = 3
        [models."[[a"]
        slots = 4
    """,
    )
    settings = load(environ=home)
    assert settings.of_model("other") == LoadSettings(slots=1, adapters=("style",))
    assert settings.of_model("QWEN3:8b") == LoadSettings(slots=2)
    assert settings.of_model("[[a") == LoadSettings(slots=4)
    assert Settings().table_of("other") is None


@pytest.mark.parametrize(
    ("text", "name", "scale"),
    [
        ("style", "style", 1.0),
        ("owner/repo:x.gguf", "owner/repo:x.gguf", 1.0),
        ("style:latest=-0.5", "style:latest", -0.5),
        ("/a=b.gguf", "/a=b.gguf", 1.0),
        ("/a=b.gguf=.25", "/a=b.gguf", 0.25),
    ],
)
def test_the_strength_of_an_adapter(text: str, name: str, scale: float):
    assert config.split_scale(text) == (name, scale)


TIER = "[tiers.smart]\nsmall = 'a'\nlarge = 'b'\n"


def test_tables_of_tiers(home: dict[str, str]):
    rules = "reasoning_effort = { low = 'small' }\ntools = 'large'\nunsure_below = -1\n"
    write(home, f"{TIER}{rules}[models.a]\nslots = 1")
    settings = load(environ=home)
    tier = settings.tier("SMART:latest")
    assert tier is not None
    assert tier.rules == {
        "small": "a", "large": "b", "reasoning_effort": {"low": "small"}, "tools": "large", "unsure_below": -1.0,
    }  # fmt: skip
    assert settings.tier("a") is None
    assert Settings().tier("smart") is None


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("tiers = 1", ("tiers is 1", "[tiers.NAME]")),
        ("[tiers]\nsmart = 1", ('[tiers."smart"] is 1', "not a table")),
        ("[tiers.'a b']\nsmall = 'a'", ("[tiers.'a b']", "cannot be a model's name")),
        ("[tiers.smart]\nsmall = 'a'", ('[tiers."smart"]', "large has to be the name of a model")),
        ("[tiers.smart]\nsmall = ''\nlarge = 'b'", ("small has to be the name",)),
        ("[tiers.smart]\nsmall = 'a'\nlarge = 'A:latest'", ("small and large are both 'a'",)),
        (TIER + "huge = 1", ("unknown setting 'huge'", "prompt_tokens_over")),
        (TIER + "tools = 'medium'", ("tools is 'medium'", "; use small or large")),
        (TIER + "prompt_tokens_over = 0", ("prompt_tokens_over is 0", ">= 1")),
        (TIER + "unsure_below = 0.5", ("unsure_below is 0.5", "<= 0")),
        (TIER + "unsure_below = -inf", ("not a finite number",)),
        (TIER + "reasoning_effort = { huge = 'small' }", ("reasoning_effort is", "; use none, minimal, low,")),
        (TIER + "[tiers.SMART]\nsmall = 'a'\nlarge = 'b'", ("[tiers.'SMART']", "twice")),
        ("[tiers.smart]\nsmall = 'smart'\nlarge = 'b'", ("small is 'smart', which is a tier itself",)),
        ("[tiers.smart]\nsmall = 'smart+x'\nlarge = 'b'", ("small is 'smart+x', which is a tier",)),
        ("[tiers.x]\nsmall='a'\nlarge='y'\n[tiers.y]\nsmall='a'\nlarge='x'", ('[tiers."x"]', "large is 'y'")),
    ],
)  # fmt: skip
def test_a_bad_tier_is_refused_by_its_table(home: dict[str, str], text: str, parts: tuple[str, ...]):
    path = write(home, text)
    with pytest.raises(ConfigError) as caught:
        load(environ=home)
    assert all(part in str(caught.value) for part in (str(path), *parts)), str(caught.value)


def test_every_setting_of_a_model_is_documented():
    assert set(config.TIER_HELP) | {"name", "file"} == set(config.Tier.__struct_fields__)
    assert list(settings_page.LOAD_HELP) == list(LoadSettings.__struct_fields__)


# --- what is refused, and how --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "parts"),
    [
        ({"port": 70000}, ("--port", "65535")),
        ({"slots": 0}, ("--slots", "1")),
        ({"kv_cells": -1}, ("--kv-cells", "0")),
        ({"slots": "many"}, ("--slots", "int")),
        ({"latency": "fast"}, ("'fast'", "interactive", "milliseconds")),
        ({"latency": "0"}, ("'0'",)),
        ({"latency": "nan"}, ("'nan'",)),
        ({"latency": "60001"}, ("60000",)),
        ({"kv_type": "f99"}, ("kv_type", "'f99'", "q8_0")),
        ({"log_level": "loud"}, ("log_level", "'loud'", "warning")),
    ],
)
def test_a_bad_flag_is_refused_by_name_with_the_limit(
    home: dict[str, str], flags: dict[str, object], parts: tuple[str, ...]
):
    with pytest.raises(ConfigError) as caught:
        load(flags, home)
    assert all(part in str(caught.value) for part in parts), str(caught.value)


@pytest.mark.parametrize(
    ("name", "value", "parts"),
    [
        ("LOCALRUN_SLOTS", "many", ("'many'", "int")),
        ("LOCALRUN_SLOTS", "257", ("256",)),
        ("LOCALRUN_KEEP_ALIVE_S", "soon", ("'soon'", "float")),
        ("LOCALRUN_RAM_CACHE", "-5", ("ram_cache_bytes",)),
        ("LOCALRUN_LATENCY", "fast", ("'fast'",)),
    ],
)
def test_a_bad_variable_is_refused_by_its_name(home: dict[str, str], name: str, value: str, parts: tuple[str, ...]):
    with pytest.raises(ConfigError) as caught:
        load(environ=home | {name: value})
    assert all(part in str(caught.value) for part in (name, *parts)), str(caught.value)


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("slots = ", ("at end of document",)),
        ("slots = 'two'", ("slots", "int")),
        ("slots = 0", ("slots", "1")),
        ("slots = true", ("slots",)),
        ("slot = 3", ("'slot'", "slots")),
        ("[server]\nslots = 3", ("'server'",)),
        ("host = '\udcff'", ()),
        ("latency = 'fast'", ("'fast'",)),
        ("kv_type = 'f99'", ("'f99'",)),
        ("models = 3", ("models is 3", '[models."PATTERN"]')),
        ("[models]\nqwen3 = 4096", ('[models."qwen3"] is 4096', '[models."PATTERN"]')),
        ("[models.qwen3]\nnum_ctx = -1", ('[models."qwen3"]', "num_ctx is -1", ">= 0")),
        ("[models.qwen3]\nslots = 257", ('[models."qwen3"]', "slots is 257", "256")),
        ("[models.qwen3]\nkv_type = 'f99'", ('[models."qwen3"]', "kv_type", "'f99'", "q4_0")),
        ("[models.qwen3]\nrope_scaling = 'su'", ('[models."qwen3"]', "rope_scaling", "'su'", "yarn")),
        ("[models.qwen3]\nrope_frequency_base = inf", ('[models."qwen3"]', "rope_frequency_base")),
        ("[models.qwen3]\nnum_gpu = 1", ('[models."qwen3"]', "'num_gpu'", "gpu_layers")),
        ("[models.qwen3.5]\nslots = 1", ('[models."qwen3"]', "'5' is a table", '[models."qwen3.5"]')),
        ("[models.'']\nslots = 1", ("[models.'']", "empty", "* is for all models")),
        (f"[models.{'x' * 4097}]\nslots = 1", ("[models.'xxx", "4096 characters")),
        ('[models."a\\u001b[31m"]\nslots = 1', ("[models.'a\\x1b[31m']", "control character")),
        ('[models."a"]\n"b\\n" = 1', ('[models."a"]', "'b\\n'")),
        ('[models."a"]\ndraft = "b\\u0000"', ('[models."a"]', "draft is 'b\\x00'", "control character")),
        ("[models.a]\nslots = 0x" + "f" * 9000, ('[models."a"]', "slots is a huge int")),
        ("[models.a]\nrope_frequency_base = 0x" + "f" * 900, ('[models."a"]', "rope_frequency_base")),
        ("[models.a]\nkv_cells = 4294967296", ('[models."a"]', "kv_cells is 4294967296", "2147483647")),
        ("slots = " + "9" * 9000, ("4300",)),
        ("slots = " + "[" * 9000, ("too deeply",)),
        ("[models.a]\nadapters = 'style'", ('[models."a"]', "adapters is 'style'", "array")),
        ("[models.a]\nadapters = ['x', 3]", ('[models."a"]', "adapters is ['x', 3]", "str")),
        ("[models.a]\nadapters = ['']", ('[models."a"]', "adapters is", "'' is empty")),
        ("[models.a]\nadapters = ['=1']", ('[models."a"]', "adapters is", "'=1'", "style=0.5")),
        ('[models.a]\nadapters = ["b\\u001b"]', ('[models."a"]', "adapters is ['b\\x1b']", "control character")),
        ("[models.a]\nadapters = ['b=1e9']", ('[models."a"]', "'b=1e9'", "from -100 to 100")),
        ("[models.a]\nadapters = ['b=100.1']", ('[models."a"]', "'b=100.1'", "from -100 to 100")),
        ("[models.a]\nadapters = ['b', 'b=2']", ('[models."a"]', "'b' appears twice")),
        (f"[models.a]\nadapters = {list('abcdefghi')}", ('[models."a"]', "9 adapters", "the limit is 8")),
        (f"[models.a]\nadapters = ['{'x=' * 4000}']", ('[models."a"]', "adapters is", "...")),
    ],
)
def test_a_bad_file_is_refused_by_its_path(home: dict[str, str], text: str, parts: tuple[str, ...]):
    path = write(home, "")
    path.write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(ConfigError) as caught:
        load(environ=home)
    assert all(part in str(caught.value) for part in (str(path), *parts)), str(caught.value)


_TEXTS = st.text(max_size=20) | st.sampled_from(
    ["", "f16", "on", "a=0.5", "a=1e5", "a=nan", "=", "\x1b[31m", "x" * 9000]
)
_VALUES = st.recursive(
    _TEXTS | st.integers() | st.floats() | st.booleans() | st.dates() | st.sampled_from([2**63, 10**30]),
    lambda some: st.lists(some, max_size=10) | st.dictionaries(_TEXTS, some, max_size=3),
    max_leaves=12,
)


@settings(max_examples=300 * DEPTH)
@given(pattern=_TEXTS, field=st.sampled_from(LoadSettings.__struct_fields__) | _TEXTS, value=_VALUES | st.lists(_TEXTS))
def test_whatever_a_table_has_is_taken_or_refused_by_its_name(pattern: str, field: str, value: object):
    path = Path("/x/localrun.toml")
    try:
        tables = config._model_tables({pattern: {field: value}}, path)
    except ConfigError as error:
        text = str(error)
        assert text.startswith(f"{path}: [models.")
        assert "is for no model" in text or f'[models."{pattern}"]: ' in text
        assert "is for no model" in text or field in text or repr(field)[:100] in text
        assert len(text) < 1500 + len(pattern)
        assert not config._CONTROL.search(text)
    else:
        assert isinstance(Settings(models=tables).of_model("qwen3:8b"), LoadSettings)


def test_a_number_that_is_none_is_refused(home: dict[str, str]):
    for name in ("LOCALRUN_KEEP_ALIVE_S", "LOCALRUN_TEMPLATE_TIMEOUT_S", "LOCALRUN_LOAD_TIMEOUT_S"):
        for text in ("nan", "inf"):
            with pytest.raises(ConfigError, match=name):
                load(environ=home | {name: text})


# --- what settings mean --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("latency", "seconds"),
    [("interactive", 0.045), ("balanced", 0.14), ("throughput", 0.8), ("250", 0.25), ("0.5", 0.0005)],
)
def test_a_latency_is_a_mode_or_milliseconds(latency: str, seconds: float):
    assert latency_target_s(latency) == pytest.approx(seconds)
    assert Settings(latency=latency).target_itl_s == pytest.approx(seconds)


def test_one_home_holds_all_folders(tmp_path: Path):
    found = folders({"LOCALRUN_HOME": str(tmp_path)})
    assert {path.parent for path in (found.data, found.cache, found.config, found.state)} == {tmp_path}
    assert not list(tmp_path.iterdir()), "nothing is created"


def test_a_home_may_be_relative_or_under_the_user_s_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.chdir(tmp_path)
    assert folders({"LOCALRUN_HOME": "here"}).data == tmp_path / "here" / "data"
    assert folders({"LOCALRUN_HOME": "~/there"}).data == Path.home() / "there" / "data"


def test_without_a_home_the_platform_decides():
    assert "localrun" in str(folders({}).data)


def test_models_live_in_the_data_folder_unless_told_otherwise(tmp_path: Path):
    environ = {"LOCALRUN_HOME": str(tmp_path)}
    assert models_folder(Settings(), environ) == tmp_path / "data" / "models"
    assert models_folder(Settings(models_dir="/srv/models"), environ) == Path("/srv/models")
    assert models_folder(load(environ=environ | {"LOCALRUN_MODELS": "~/gguf"}), environ) == Path.home() / "gguf"


def test_settings_cannot_change_after_they_were_read():
    with pytest.raises(AttributeError):
        Settings().port = 1  # type: ignore[misc]


def test_the_module_names_no_setting_that_does_not_exist():
    named = set(re.findall(r"`(\w+)` -> ", config.__doc__ or ""))
    assert named <= set(FIELDS)


@pytest.mark.parametrize(
    "host", ["a b", "", "http://x", "x:1", "[::1]", "a/b", "a..b", "x" * 64, "fe80::1%eth0", "\xe4", "x\n"]
)
def test_what_cannot_be_a_host_is_refused_with_its_source(host: str) -> None:
    with pytest.raises(ConfigError, match=r"^--host: host is .*use a host name or an IP address"):
        load({"host": host}, {})


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "::1", "my_box-2.home.arpa", "host.docker.internal"])
def test_names_and_addresses_are_hosts(host: str) -> None:
    assert load({"host": host}, {}).host == host


@pytest.mark.parametrize(
    ("name", "listed"),
    [("tiny", "tiny:latest"), ("Owner/Repo:Q4_0", "hf.co/owner/repo:q4_0"), ("registry.ollama.ai/me/own", "me/own:*")],
)
def test_a_table_means_a_model_by_the_name_that_lists_have(name: str, listed: str):
    table = ModelTable(listed, LoadSettings(num_ctx=7))
    assert Settings(models=(table,)).of_model(name).num_ctx == 7
    assert Settings(models=(table,)).of_model("other:8b").num_ctx is None


def test_a_variable_that_is_no_setting_is_known_by_the_one_that_it_seems_to_mean():
    names = ("KEEP_ALIVE", "KV_TYPES", "HOME", "API_KEY", "PORT", "TEST_DEPTH", "FAKE_STEP_MS")
    found = config.slips({f"LOCALRUN_{name}": "1" for name in names} | {"KEEP_ALIVE_S": "1"})
    assert found == {"LOCALRUN_KEEP_ALIVE": "LOCALRUN_KEEP_ALIVE_S", "LOCALRUN_KV_TYPES": "LOCALRUN_KV_TYPE"}
