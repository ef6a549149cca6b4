"""`localrun run`: one shot and piped, as a script uses it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from localrun.cli import exits
from localrun.last_model import remember_model
from tests.says import says


def _sent(daemon) -> dict:
    ((path, body),) = daemon.bodies
    assert path == "/api/chat"
    return body


def test_one_prompt(localrun, daemon):
    ended = localrun("run", "tiny", "hi", port=daemon.port)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "Hello there.\n", "")
    assert _sent(daemon) == {
        "model": "tiny",
        "messages": [{"role": "user", "content": "hi"}],
        "options": {},
        "stream": True,
    }


def test_a_pipe_is_the_prompt_or_comes_after_it(localrun, daemon):
    assert localrun("run", "tiny", stdin="from a pipe\n", port=daemon.port).stdout == "Hello there.\n"
    assert _sent(daemon)["messages"][-1]["content"] == "from a pipe"
    daemon.bodies.clear()
    localrun("run", "tiny", "Summarize:", stdin="größe\n", port=daemon.port)
    assert _sent(daemon)["messages"][-1]["content"] == "Summarize:\n\ngröße"


def test_system_and_options_are_sent(localrun, daemon):
    arguments = ["--system", "Be brief.", "--option", "temperature=0", "--option", "stop=.", "--option", "stop=!"]
    localrun("run", "tiny", "hi", *arguments, port=daemon.port)
    sent = _sent(daemon)
    assert sent["messages"][0] == {"role": "system", "content": "Be brief."}
    assert sent["options"] == {"temperature": 0.0, "stop": [".", "!"]}


def test_verbose_keeps_the_answer_apart_from_the_table(localrun, daemon):
    ended = localrun("run", "tiny", "hi", "--verbose", port=daemon.port)
    assert ended.stdout == "Hello there.\n"
    assert "prompt cached count:  10 token(s)" in ended.stderr
    assert "eval rate:            50.00 tokens/s" in ended.stderr


def test_an_answer_that_is_cut_off_says_so_beside_it(localrun, daemon):
    assert localrun("run", "tiny", "hi", port=daemon.port).stderr == ""
    daemon.done_reason = "length"
    ended = localrun("run", "tiny", "hi", port=daemon.port)
    assert (ended.returncode, ended.stdout) == (0, "Hello there.\n")
    assert "the answer is cut off" in ended.stderr


def test_json_is_one_object(localrun, daemon):
    ended = localrun("run", "tiny", "hi", "--json", port=daemon.port)
    answer = json.loads(ended.stdout)
    assert answer["text"] == "Hello there."
    assert answer["model"] == "tiny"
    assert answer["done_reason"] == "stop"
    assert answer["request_id"] == "req_7"
    assert answer["metrics"]["output_tokens"] == 5
    assert answer["decode_tokens_per_s"] == 50.0
    assert answer["prefill_tokens_per_s"] == 160.0
    assert answer["ttft_s"] > 0


def test_a_file_is_named_by_its_whole_path(localrun, daemon, tmp_path: Path):
    localrun("run", "./m.gguf", "hi", port=daemon.port, cwd=tmp_path)
    assert _sent(daemon)["model"] == str(tmp_path / "m.gguf")


def test_control_characters_reach_a_pipe_untouched(localrun, daemon):
    daemon.words = ["\x1b[1mbold\x1b[0m"]
    assert localrun("run", "tiny", "hi", port=daemon.port).stdout == "\x1b[1mbold\x1b[0m\n"


def test_an_unknown_model_has_its_own_code(localrun, daemon):
    ended = localrun("run", "missing", "hi", port=daemon.port)
    assert (ended.returncode, ended.stdout) == (exits.MODEL_NOT_FOUND, "")
    assert says(ended.stderr, "error: model 'missing' not found", "`localrun search missing`")
    assert localrun("run", "missing", "hi", "--json", port=daemon.port).returncode == exits.MODEL_NOT_FOUND


def test_without_a_prompt_and_without_a_terminal(localrun, daemon):
    for arguments in ([], ["--json"]):
        ended = localrun("run", "tiny", *arguments, port=daemon.port)
        assert ended.returncode == exits.USAGE
        assert "PROMPT" in ended.stderr
    assert localrun("run", "tiny", stdin=" \n", port=daemon.port).returncode == exits.USAGE
    assert daemon.bodies == []


def test_another_program_on_the_port_has_its_own_code(localrun, daemon):
    daemon.health = (404, {}, {})
    ended = localrun("run", "tiny", "hi", port=daemon.port)
    assert ended.returncode == exits.PORT_BUSY
    assert "--port" in ended.stderr


def test_ctrl_c_ends_it_and_the_request(environment, daemon):
    daemon.hold = True
    with subprocess.Popen(
        [sys.executable, "-m", "localrun", "run", "tiny", "hi", "--port", str(daemon.port)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.read(12) == "Hello there."
        process.send_signal(signal.SIGINT)
        _, complaints = process.communicate(timeout=30)
    assert process.returncode == exits.INTERRUPTED
    assert complaints.strip() == ""
    assert daemon.left.wait(30)


def test_a_reader_that_stops_early_is_no_traceback(environment, daemon):
    daemon.words = ["x" * 1000 + "\n"] * 1000
    with subprocess.Popen(
        [sys.executable, "-m", "localrun", "run", "tiny", "hi", "--port", str(daemon.port)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment,
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.stdout.close()
        assert process.stderr is not None
        complaints = process.stderr.read()
        process.wait(30)
    assert complaints == b""


def test_ollama_s_options_are_sent_as_its_fields(localrun, daemon, tmp_path):
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    (tmp_path / "a.schema.json").write_text(json.dumps(schema))
    asked = {
        ("--format", "json"): {"format": "json"},
        ("--format", json.dumps(schema)): {"format": schema},
        ("--format", str(tmp_path / "a.schema.json")): {"format": schema},
        ("--think",): {"think": True},
        ("--think=false",): {"think": False},
        ("--think=high", "--keepalive", "5m"): {"think": "high", "keep_alive": "5m"},
    }
    for options, expected in asked.items():
        daemon.bodies.clear()
        ended = localrun("run", *options, "tiny", "hi", port=daemon.port)
        assert (ended.returncode, ended.stdout) == (0, "Hello there.\n"), ended.stderr
        body = _sent(daemon)
        assert {name: body.get(name) for name in expected} == expected
        assert body["messages"] == [{"role": "user", "content": "hi"}]


def test_ollama_s_options_have_values_that_are_named(localrun, daemon):
    for options, said in (
        (("--format", "nowhere.json"), "'nowhere.json': No such file"), (("--format", "{"), "no JSON schema"),
        (("--think=much",), "use true, false, low, medium or high"),
    ):  # fmt: skip
        ended = localrun("run", *options, "tiny", "hi", port=daemon.port)
        assert (ended.returncode, said in ended.stderr) == (exits.USAGE, True), ended.stderr
    assert daemon.bodies == []


@pytest.mark.skipif(sys.platform in ("win32", "darwin"), reason="these have UTF-8 whatever the locale says")
def test_a_prompt_arrives_whole_in_a_locale_without_utf_8(environment: dict[str, str], daemon, tmp_path: Path):
    locale = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}

    def run(prompt: bytes, *more: bytes) -> subprocess.CompletedProcess[bytes]:
        command = [sys.executable, "-m", "localrun", "run", "tiny", prompt, *more, "--port", str(daemon.port)]
        return subprocess.run(command, env=environment | locale, capture_output=True, check=False, timeout=60)

    path = os.fsencode(tmp_path) + "/schön.txt".encode()
    with open(path, "wb") as file:
        file.write(b"of this file")
    assert run("schöne Grüße".encode(), path).returncode == 0
    content = daemon.chats[-1]["messages"][-1]["content"]
    assert says(content, "schöne Grüße")
    assert says(content, "of this file")
    ended = run(b"sch\xf6n")
    assert ended.returncode == exits.USAGE
    assert b"is neither UTF-8 nor a file" in ended.stderr
    latin = os.fsencode(tmp_path) + b"/sch\xf6n"
    os.mkdir(latin)
    os.rename(path, latin + b"/m.gguf")
    command = [sys.executable, "-m", "localrun", "run", "./m.gguf", "Hi", "--port", str(daemon.port)]
    ended = subprocess.run(command, env=environment, cwd=latin, capture_output=True, check=False, timeout=60)
    assert b"a path is not UTF-8; rename it" in ended.stderr


REAL = {"name": "qwen3:0.6b", "capabilities": ["completion"], "modified_at": "2026-01-01"}
TEXTS = {"messages": [{"role": "user", "content": "hi there"}]}


@pytest.mark.parametrize("arguments", [("hi there",), ("--", "hi there"), ()])
def test_without_a_name_the_model_that_answered_last_does(localrun, daemon, arguments: tuple[str, ...]):
    assert localrun("run", "gemma3:4b", "hi", port=daemon.port).returncode == 0
    assert localrun("run", "tiny", "hi", port=daemon.port).returncode == 0
    ended = localrun("run", *arguments, stdin=None if arguments else "hi there", port=daemon.port)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "Hello there.\n", "")
    assert daemon.chats[-1] == {"model": "gemma3:4b", "options": {}, "stream": True} | TEXTS


def test_a_name_that_answered_nothing_is_not_remembered(localrun, daemon):
    daemon.answers["/api/tags"] = {"models": [REAL]}
    assert localrun("run", "missing", "hi", port=daemon.port).returncode == exits.MODEL_NOT_FOUND
    ended = localrun("run", stdin="hi there", port=daemon.port)
    assert (ended.returncode, ended.stderr, daemon.chats[-1]["model"]) == (0, "", "qwen3:0.6b")


def test_a_last_model_that_is_gone_is_said(localrun, daemon, tmp_path: Path):
    daemon.answers["/api/tags"] = {"models": [REAL]}
    remember_model(tmp_path / "home" / "state" / "last-model", "missing")
    ended = localrun("run", "hi there", port=daemon.port)
    assert (ended.returncode, ended.stdout, daemon.chats[-1]["model"]) == (0, "Hello there.\n", "qwen3:0.6b")
    assert ended.stderr == "note: missing, which was used last, is no longer here; qwen3:0.6b answers\n"
    assert localrun("run", "hi there", port=daemon.port).stderr == "", "the other one is the last one now"


def test_the_toy_answers_where_nothing_else_can_and_says_what_it_is(localrun, daemon):
    ended = localrun("run", "hi there", port=daemon.port)
    assert (ended.returncode, ended.stdout, daemon.chats[-1]["model"]) == (0, "Hello there.\n", "tiny")
    assert ended.stderr == "note: tiny is a toy; `localrun pull qwen3.5:4b` brings a real model\n"


def test_one_word_and_a_path_with_spaces_are_models(localrun, daemon, tmp_path: Path):
    for name in ("hello", "my models/m.gguf", "./my model.gguf"):
        localrun("run", name, stdin="hi", port=daemon.port, cwd=tmp_path)
    names = ["hello", str(tmp_path / "my models/m.gguf"), str(tmp_path / "my model.gguf")]
    assert [chat["model"] for chat in daemon.chats] == names


def test_without_a_name_a_prompt_or_a_terminal_no_daemon_is_started(localrun, tmp_path: Path):
    ended = localrun("run", port=1)
    assert (ended.returncode, ended.stdout) == (exits.USAGE, "")
    assert "PROMPT" in ended.stderr


@pytest.mark.skipif(sys.platform == "win32", reason="pipes there have no such mode")
def test_a_pipe_that_does_not_block_gets_the_whole_answer(environment, daemon):
    import fcntl
    import termios

    daemon.words = ["word " * 1000] * 50
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    command = [sys.executable, "-m", "localrun", "run", "tiny", "hi", "--port", str(daemon.port)]
    with subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=writing) as process:
        os.close(writing)
        n_bytes = n_before = 0
        while process.poll() is None and (n_bytes == 0 or n_bytes != n_before):  # until the pipe is full
            time.sleep(0.2)
            n_before, n_bytes = n_bytes, int.from_bytes(fcntl.ioctl(reading, termios.FIONREAD, b"\0" * 4), "little")
        with open(reading, "rb") as pipe:
            assert len(pipe.read()) == 250_001
    assert process.returncode == 0
