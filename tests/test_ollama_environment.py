"""What was set up for Ollama by variables: read as Ollama reads it, below everything that was said to localrun."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from localrun.config import FIELDS, ConfigError, LoadSettings, Settings
from localrun.ollama_environment import MEANINGLESS, NAMES, address, load, read, told
from tests.daemon import running_daemon


@pytest.fixture
def home(tmp_path: Path) -> dict[str, str]:
    (tmp_path / "config").mkdir()
    return {"LOCALRUN_HOME": str(tmp_path)}


# The cases of Ollama's own envconfig tests.
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1.2.3.4", ("http", "1.2.3.4", 11434)),
        (":1234", ("http", "", 1234)),
        ("1.2.3.4:1234", ("http", "1.2.3.4", 1234)),
        ("example.com", ("http", "example.com", 11434)),
        ("example.com:1234", ("http", "example.com", 1234)),
        (":0", ("http", "", 0)),
        ("[::]", ("http", "::", 11434)),
        ("::", ("http", "::", 11434)),
        ("::1", ("http", "::1", 11434)),
        ("[::1]:1337", ("http", "::1", 1337)),
        ("1.2.3.4:1234/", ("http", "1.2.3.4", 1234)),
        ("example.com/ollama", ("http", "example.com", 11434)),
        ("http://1.2.3.4", ("http", "1.2.3.4", 80)),
        ("http://1.2.3.4:8080", ("http", "1.2.3.4", 8080)),
        ("https://1.2.3.4", ("https", "1.2.3.4", 443)),
        ("https://example.com:8080/x", ("https", "example.com", 8080)),
    ],
)
def test_a_host_is_read_as_ollama_reads_it(text: str, expected: tuple[str, str, int]):
    assert address(text) == expected


@pytest.mark.parametrize("text", ["1.2.3.4:66000", "1.2.3.4:-1", "localhost:port", f"localhost:{'1' * 5000}"])
def test_a_port_that_is_none_is_refused_by_name(text: str):
    with pytest.raises(ConfigError, match=r"OLLAMA_HOST: .* is not a port; use a number from 1 to 65535"):
        address(text)


@pytest.mark.parametrize(
    ("name", "text", "field", "value"),
    [
        ("OLLAMA_NUM_PARALLEL", "4", "slots", 4),
        ("OLLAMA_NUM_PARALLEL", ' "4" ', "slots", 4),
        ("OLLAMA_MAX_LOADED_MODELS", "2", "max_models", 2),
        ("OLLAMA_MAX_QUEUE", "64", "max_queue", 64),
        ("OLLAMA_KEEP_ALIVE", "90", "keep_alive_s", 90.0),
        ("OLLAMA_KEEP_ALIVE", "1h30m", "keep_alive_s", 5400.0),
        ("OLLAMA_KEEP_ALIVE", "-1", "keep_alive_s", -1.0),
        ("OLLAMA_KEEP_ALIVE", "-30m", "keep_alive_s", -1.0),
        ("OLLAMA_KEEP_ALIVE", "0", "keep_alive_s", 0.0),
        ("OLLAMA_LOAD_TIMEOUT", "10m", "load_timeout_s", 600.0),
        ("OLLAMA_KV_CACHE_TYPE", "Q8_0", "kv_type", "q8_0"),
        ("OLLAMA_ORIGINS", "http://10.0.0.5:3000,https://home.example", "origins",
         "http://10.0.0.5:3000,https://home.example"),
        ("OLLAMA_DEBUG", "1", "log_level", "debug"),
        ("OLLAMA_DEBUG", "yes", "log_level", "debug"),
    ],
)  # fmt: skip
def test_a_variable_that_means_something_is_taken(
    home: dict[str, str], name: str, text: str, field: str, value: object
):
    environ = home | {name: text}
    settings = load(environ=environ, serves=True)
    assert getattr(settings, field) == value
    line = told(settings, environ)
    assert f"{name} ({field})" in line
    assert "not used" not in line


def test_a_context_length_is_every_model_s_that_no_table_names(home: dict[str, str], tmp_path: Path):
    (tmp_path / "config" / "localrun.toml").write_text('[models."qwen*"]\nslots = 2\n')
    environ = home | {"OLLAMA_CONTEXT_LENGTH": "8192"}
    settings = load(environ=environ)
    assert settings.of_model("tiny") == LoadSettings(num_ctx=8192)
    assert settings.of_model("qwen3:4b") == LoadSettings(slots=2)
    assert "OLLAMA_CONTEXT_LENGTH (num_ctx of all models)" in told(settings, environ)


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("OLLAMA_NUM_PARALLEL", "many", "not what it takes"),
        ("OLLAMA_NUM_PARALLEL", "1000", "slots is 1000: Expected `int` <= 256"),
        ("OLLAMA_NUM_PARALLEL", "0", "leaves it to localrun"),
        ("OLLAMA_CONTEXT_LENGTH", "-5", "not what it takes"),
        ("OLLAMA_CONTEXT_LENGTH", "0", "leaves it to localrun"),
        ("OLLAMA_KEEP_ALIVE", "soon", "not what it takes"),
        ("OLLAMA_KV_CACHE_TYPE", "q3_K", "use one of auto, f16, q8_0, q4_0"),
        ("OLLAMA_ORIGINS", "*", "not an origin"),
        ("OLLAMA_ORIGINS", "https://*", "every web page"),
        ("OLLAMA_MODELS", "/nowhere/models", "'/nowhere/models' has no folder 'manifests'"),
        ("OLLAMA_FLASH_ATTENTION", "1", MEANINGLESS["OLLAMA_FLASH_ATTENTION"]),
    ],
)
def test_one_that_cannot_be_used_is_said_and_changes_nothing(home: dict[str, str], name: str, text: str, words: str):
    environ = home | {name: text}
    settings = load(environ=environ, serves=True)
    assert settings == Settings()
    line = told(settings, environ)
    assert line.startswith(f"not used: {name} (")
    assert words in line


def test_of_several_origins_the_good_ones_are_taken(home: dict[str, str]):
    environ = home | {"OLLAMA_ORIGINS": "http://localhost,chrome-extension://*,*"}
    settings = load(environ=environ, serves=True)
    assert settings.origins == "chrome-extension://*"
    assert "OLLAMA_ORIGINS (origins); not used: OLLAMA_ORIGINS ('*' is not an origin" in told(settings, environ)


def test_everything_said_to_localrun_counts_before(home: dict[str, str], tmp_path: Path):
    ollama = {"OLLAMA_HOST": "127.0.0.1:5000", "OLLAMA_NUM_PARALLEL": "2", "OLLAMA_MAX_QUEUE": "5"}
    (tmp_path / "config" / "localrun.toml").write_text("max_queue = 9\n")
    environ = home | ollama | {"LOCALRUN_SLOTS": "3"}
    settings = load({"port": 6000}, environ, serves=True)
    assert (settings.port, settings.slots, settings.max_queue) == (6000, 3, 9)
    line = told(settings, environ)
    assert "OLLAMA_HOST (host)" in line
    assert "OLLAMA_NUM_PARALLEL (localrun's own settings say otherwise)" in line
    assert "OLLAMA_MAX_QUEUE (localrun's own settings say otherwise)" in line


def test_without_any_there_is_nothing_to_say(home: dict[str, str]):
    assert told(Settings(), home | {"OLLAMA_BASE_URL": "http://x", "OLLAMA_HOST": " "}) == ""


@pytest.mark.parametrize(
    ("text", "host"), [("0.0.0.0:8080", "127.0.0.1"), ("[::]:8080", "::1"), (":8080", "127.0.0.1")]
)
def test_where_a_server_listens_everywhere_a_client_connects_to_loopback(text: str, host: str):
    assert read({"OLLAMA_HOST": text}, serves=False).values == {"host": host, "port": 8080}
    assert not read({"OLLAMA_HOST": text}, serves=True).values["host"].startswith(("127", "::1"))


@pytest.mark.parametrize(
    ("text", "words"), [("https://localhost", r"https.*http://"), ("1.2.3.4:66000", r"OLLAMA_HOST.*66000")]
)
def test_an_address_that_cannot_be_meant_is_said_unless_another_is_named(home: dict[str, str], text: str, words: str):
    environ = home | {"OLLAMA_HOST": text}
    with pytest.raises(ConfigError, match=words):
        load(environ=environ)
    assert load({"host": "127.0.0.2"}, environ).host == "127.0.0.2"
    assert load(environ=environ | {"LOCALRUN_HOST": "localhost"}).host == "localhost"


def test_another_machine_is_reached_over_tls_and_may_be_written_so():
    assert read({"OLLAMA_HOST": "https://studio.local:11434"}, serves=False).values == {
        "host": "studio.local",
        "port": 11434,
    }


def test_every_variable_is_one_or_the_other():
    assert not set(NAMES) & set(MEANINGLESS)
    assert {field for name in NAMES for field in read({name: "1"}, serves=True).values} <= {*FIELDS, "models"}


def test_a_daemon_takes_them_and_says_so_once(tmp_path: Path):
    variables = {
        "OLLAMA_NUM_PARALLEL": "3",
        "OLLAMA_KEEP_ALIVE": "2h",
        "OLLAMA_VULKAN": "1",
        "OLLAMA_MODELS": str(tmp_path),
    }
    (tmp_path / "manifests").mkdir()
    with running_daemon(LOCALRUN_SLOTS="", **variables) as daemon:
        daemon.post("/api/generate", model="tiny", prompt="x", options={"num_predict": 1}, stream=False)
        lines = [line for line in daemon.log.splitlines() if "Ollama's variables" in line]
        assert len(lines) == 1
        assert "OLLAMA_KEEP_ALIVE (keep_alive_s), OLLAMA_NUM_PARALLEL (slots), OLLAMA_MODELS" in lines[0]
        assert f"not used: OLLAMA_VULKAN ({MEANINGLESS['OLLAMA_VULKAN']})" in lines[0]
        (engine,) = daemon.http.get("/localrun/v1/snapshot").json()["engines"]
        assert engine["slots"] == 3


def test_a_daemon_that_others_could_reach_does_not_start(tmp_path: Path):
    environ = {"LOCALRUN_HOME": str(tmp_path), "OLLAMA_HOST": "0.0.0.0", "PATH": ""}
    command = [sys.executable, "-m", "localrun", "serve", "--port", "0"]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert "host is '0.0.0.0', which other machines can reach" in done.stderr
    assert "OLLAMA_HOST; --host and LOCALRUN_HOST count before it" in done.stderr
