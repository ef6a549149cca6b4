"""The command table, help that imports nothing, and errors as one line with a code."""

from __future__ import annotations

import errno
import importlib
import os
import shlex
import subprocess
import sys
from contextlib import suppress

import click
import pytest

from localrun import __version__, errors
from localrun.cli import exits
from localrun.cli.root import COMMANDS, EXAMPLES, GROUPS, cli, run
from localrun.config import folders
from tests.says import says


def test_help_names_every_command_and_exit_code(capsys):
    assert run(["--help"]) == 0
    shown = capsys.readouterr().out
    for group, commands in GROUPS.items():
        assert not group or f"\n{group}:\n" in shown
        for name, (_, help_line) in commands.items():
            assert (f"  {name} " in shown and help_line in shown) == bool(group)
    for code, meaning in exits.MEANINGS.items():
        assert f"{code:<5}{meaning}" in shown


def test_help_imports_no_command_and_nothing_heavy():
    code = "import sys; from localrun.cli.root import run; run(['--help']); print(*sys.modules, file=sys.stderr)"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = set(ended.stderr.split())
    assert "localrun.cli.root" in loaded
    commands = {f"localrun.cli.{module}" for module, _ in COMMANDS.values()}
    heavy = {"rich", "textual", "httpx2", "starlette", "uvicorn", "numpy", "msgspec", "platformdirs", "asyncio"}
    assert loaded & (commands | heavy) == set()


@pytest.mark.parametrize("name", list(COMMANDS))
def test_the_table_is_true(name):
    command = getattr(importlib.import_module(f"localrun.cli.{COMMANDS[name][0]}"), f"{name}_command")
    assert isinstance(command, click.Command)
    assert command.name == name


@pytest.mark.parametrize("name", list(EXAMPLES))
def test_examples_are_commands_with_their_options(name, capsys):
    assert run([name, "--help"] if name else ["--help"]) == 0
    shown = capsys.readouterr().out
    for example in EXAMPLES[name]:
        assert example in shown
        words = shlex.split(example, comments=True)
        arguments = words[words.index("localrun") + 1 :]
        if set(arguments) & {"|", ">"}:
            arguments = arguments[: min(arguments.index(each) for each in ("|", ">") if each in arguments)]
        command, context = cli, cli.make_context("localrun", arguments)
        with suppress(click.BadParameter):  # a file that is not here
            while isinstance(command, click.Group) and (rest := [*context._protected_args, *context.args]):
                said, command, rest = command.resolve_command(context, rest)
                context = command.make_context(said, rest, parent=context)


@pytest.mark.parametrize("name", list(COMMANDS))
def test_every_command_has_help(name, capsys):
    assert run([name, "--help"]) == 0
    assert f"localrun {name}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["walk"], "there is no command 'walk'; `localrun --help` lists the commands"),
        (["show"], "Missing argument 'MODEL'"),
        (["list", "--nonsense"], "--nonsense"),
        (["ps", "--port", "many"], "'many' is not a valid integer"),
        (["ps", "--port", "99999"], "--port"),
        (["--port", "0", "list"], "port 0"),
        (["stop"], "--daemon"),
        (["stop", "tiny", "--daemon"], "--daemon"),
        (["run", "tiny", "hi", "--option", "warmth=1"], "temperature"),
        (["run", "tiny", "hi", "--option", "seed=x"], "whole number"),
    ],
)
def test_wrong_use_is_one_line_and_code_2(arguments, words, capsys, environment):
    assert run(arguments) == exits.USAGE
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("error: ")
    assert printed.err.count("\n") == 1
    assert words in printed.err


def test_a_group_without_a_command_shows_its_help(capsys, environment):
    assert run(["batch"]) == exits.USAGE
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("Usage: localrun batch ")
    assert "error" not in printed.err


def test_a_wrong_environment_variable_is_named(capsys, environment, monkeypatch):
    monkeypatch.setenv("LOCALRUN_SLOTS", "many")
    assert run(["ps"]) == exits.USAGE
    said = capsys.readouterr().err
    assert "LOCALRUN_SLOTS" in said
    assert "--help" not in said, "no command's help says more about a variable"


def test_the_interface_needs_a_terminal(localrun):
    ended = localrun()
    assert ended.returncode == exits.USAGE
    assert "needs a terminal" in ended.stderr
    assert "localrun run" in ended.stderr


def test_an_unforeseen_error_is_one_line_unless_debugging(capsys, environment, monkeypatch):
    def fail(settings: object) -> str:
        raise RuntimeError("boom")

    monkeypatch.setattr("localrun.cli.running.require_daemon", fail)
    assert run(["ps"]) == exits.ERROR
    assert says(capsys.readouterr().err, "error: RuntimeError: boom", "LOCALRUN_DEBUG=1")
    monkeypatch.setenv("LOCALRUN_DEBUG", "1")
    with pytest.raises(RuntimeError):
        run(["ps"])


@pytest.mark.skipif(sys.platform == "win32", reason="POSIX users")
@pytest.mark.parametrize(
    ("home", "is_known", "wanted"), [(None, False, "/"), ("", False, "/"), ("", True, "/own"), ("/a", False, "/a")]
)
def test_a_user_of_a_container_needs_neither_a_name_nor_a_home(home, is_known, wanted):
    code = """if True:
        import pathlib, pwd, sys, types
        import localrun.cli.root as root
        from localrun.__main__ import main

        def found(uid):
            if len(sys.argv) < 2:
                raise KeyError(uid)
            return types.SimpleNamespace(pw_dir=sys.argv[1])

        pwd.getpwuid = found
        root.run = lambda arguments: print(pathlib.Path.home()) or 0
        main()
    """
    environ = {name: value for name, value in os.environ.items() if name != "HOME"}
    ended = subprocess.run(
        [sys.executable, "-c", code, *(["/own"] if is_known else [])], capture_output=True, text=True, check=True,
        env=environ if home is None else {**environ, "HOME": home},
    )  # fmt: skip
    assert ended.stdout.strip() == wanted


@pytest.mark.parametrize("part", ["state", "state's parent"])
def test_a_folder_that_cannot_be_written_can_be_another(capsys, environment, monkeypatch, part):
    refused = folders().state if part == "state" else folders().state.parent

    def fail(settings: object) -> str:
        raise OSError(errno.EROFS, "Read-only file system", str(refused))

    monkeypatch.setattr("localrun.cli.running.require_daemon", fail)
    assert run(["ps"]) == exits.ERROR
    wanted = f"error: {refused}: Read-only file system; LOCALRUN_HOME can name a folder that can be written"
    assert " ".join(capsys.readouterr().err.split()) == wanted


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (PermissionError(13, "Permission denied", "/data/state"), "/data/state: Permission denied"),
        (
            OSError(28, "No space left on device"),
            "the disk is full; make room (localrun rm, localrun gc) and try again",
        ),
        (OSError("what a library says"), "what a library says"),
    ],
)
def test_an_error_of_the_system_is_told_without_its_number(capsys, environment, monkeypatch, error, words):
    def fail(settings: object) -> str:
        raise error

    monkeypatch.setattr("localrun.cli.running.require_daemon", fail)
    assert run(["ps"]) == exits.ERROR
    assert capsys.readouterr().err == f"error: {words}\n"


def test_version_option(capsys):
    assert run(["--version"]) == 0
    assert capsys.readouterr().out == f"localrun {__version__}\n"


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (errors.PortBusy("x"), 3),
        (errors.DaemonUnreachable("x"), 4),
        (errors.ModelNotFound("x"), 5),
        (errors.NotFound("x"), 1),
        (errors.CannotFit("x"), 1),
        (errors.LocalrunError("x"), 1),
    ],
)
def test_codes(error, code):
    assert exits.code_of(error) == code
    assert code in exits.MEANINGS


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--host", "a b", "list"], "host is "),
        (["list", "--host", "ftp://127.0.0.1"], "host is "),
        (["--host", "[::1]:x", "ps"], "'x' is not a port; use a number from 1 to 65535"),
    ],
)
def test_a_malformed_host_is_a_usage_error_that_names_the_option(arguments, problem, capsys):
    assert run(arguments) == exits.USAGE
    assert capsys.readouterr().err.startswith(f"error: --host: {problem}")


@pytest.mark.parametrize(
    ("typed", "meant"), [("lst", "list"), ("pul", "pull"), ("PS", "ps"), ("serv", "serve"), ("stopp", "stop")]
)
def test_a_slip_of_the_finger_is_told_the_command(localrun, typed, meant):
    ended = localrun(typed)
    assert ended.returncode == exits.USAGE
    assert f"there is no command '{typed}'; did you mean '{meant}'?" in ended.stderr


@pytest.mark.parametrize(("typed", "meant"), [("ls", "list"), ("delete", "rm"), ("download", "pull"), ("log", "logs")])
def test_the_words_of_others_are_understood(localrun, typed, meant):
    shown = localrun(typed, "--help").stdout.partition("\n")[2]
    assert shown == localrun(meant, "--help").stdout.partition("\n")[2]


def test_help_is_a_word_as_well(localrun):
    assert localrun("help").stdout.strip() == localrun("--help").stdout.strip()
    assert localrun("help", "ps").stdout == localrun("ps", "--help").stdout


def test_short_names_of_help_and_version_are_as_in_ollama(localrun):
    assert localrun("-h").stdout == localrun("--help").stdout
    assert localrun("list", "-h").stdout == localrun("list", "--help").stdout
    assert localrun("-v").stdout == localrun("--version").stdout


@pytest.mark.parametrize("n_columns", [30, 45])
def test_help_fits_a_narrow_terminal(
    n_columns: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setenv("COLUMNS", str(n_columns))
    assert run(["gc", "--help"]) == exits.OK
    shown = capsys.readouterr().out.splitlines()
    assert max(map(len, shown)) < n_columns
    assert "--all" in " ".join(shown)
