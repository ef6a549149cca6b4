"""What a service starts, what every service manager can do for it, and what all of them are made with: commands found
on PATH, run without a shell, and the end of a log.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

import msgspec

from localrun import ollama_environment
from localrun.config import FIELDS, Folders, env_name
from localrun.errors import BadRequest
from localrun.processes import SYSTEM_ENCODING, run_text
from localrun.visible import visible

# --- what is started: the daemon's command line, and the environment of the shell that installed it ---
# Settings are taken over from where they were said: flags become flags, variables become the service's variables, and
# the configuration file is read at every start, so that editing it and restarting is enough.

# Where files lie, how downloads go out, and which devices llama.cpp may use. Programs started by a service manager do
# not see what a shell's start-up files set.
_OTHERS = (
    *("LOCALRUN_HOME", "XDG_DATA_HOME", "XDG_CACHE_HOME", "XDG_CONFIG_HOME", "XDG_STATE_HOME"),
    *("HF_HOME", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_ENDPOINT", "HF_HUB_OFFLINE", "HF_TOKEN_PATH"),
    "OLLAMA_MODELS",
    *ollama_environment.NAMES,
    *("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY", "http_proxy", "https_proxy", "all_proxy", "no_proxy"),
    *("SSL_CERT_FILE", "SSL_CERT_DIR"),
    *("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"),
    *("HSA_OVERRIDE_GFX_VERSION", "GGML_VK_VISIBLE_DEVICES", "LD_LIBRARY_PATH", "OMP_NUM_THREADS", "GOMP_SPINCOUNT"),
)
# Paths among them: a service starts in another folder than the shell was in.
_PATHS = frozenset(
    {
        *(
            "LOCALRUN_HOME",
            "LOCALRUN_MODELS",
            "LOCALRUN_MODEL_DIRS",
            "LD_LIBRARY_PATH",
            "SSL_CERT_FILE",
            "SSL_CERT_DIR",
        ),
        *("HF_HOME", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_TOKEN_PATH", "OLLAMA_MODELS"),
    }
)
# Secrets do not belong into a file that service managers show to whoever asks them: tokens, and addresses with a user's
# name or password in them.
_TOKENS = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")
_ADDRESSES = (*("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy", "https_proxy", "all_proxy"), "HF_ENDPOINT")


class ServicePlan(msgspec.Struct, frozen=True, kw_only=True):
    """`command` is the daemon's whole command line, `log` where its output goes where no journal takes it.

    `written` are the folders that the daemon writes to.
    """

    command: tuple[str, ...]
    environment: dict[str, str]
    log: Path
    written: tuple[Path, ...]


def make_plan(
    *,
    python: str,
    flags: Mapping[str, object],
    environ: Mapping[str, str],
    folders: Folders,
    models_folder: Path,
    hub_cache: Path,
    shell_folder: Path,
) -> ServicePlan:
    """The plan of a daemon run by the interpreter `python`. `flags` are those the user gave now; None is not given.

    Paths in variables are relative to `shell_folder`, the folder that the command was given in.

    Raises BadRequest for a value that no service file can hold.
    """
    # -P: the folder that a service manager starts in must not be a place to import from.
    command = [python, "-P", "-m", "localrun", "serve"]
    for field, value in flags.items():
        if value is not None:
            command += ["--" + field.replace("_", "-"), str(value)]
    secrets = left_out(environ)
    environment = {name: environ[name] for name in taken_over() if environ.get(name) and name not in secrets}
    for name in _PATHS & set(environment):
        environment[name] = _absolute(environment[name], shell_folder)
    for name, value in [*environment.items(), *(("the command", word) for word in command)]:
        if any(ord(character) < 32 or ord(character) == 127 for character in value):
            raise BadRequest(
                f"{name} holds a control character, which a service file cannot contain; change it and try again"
            )
    # Listed without those that lie within another one.
    places = (folders.data, folders.cache, folders.config, folders.state, models_folder, hub_cache)
    written = [shell_folder / place for place in places]
    outermost = [path for path in dict.fromkeys(written) if not any(other in path.parents for other in written)]
    return ServicePlan(
        command=tuple(command), environment=environment, log=folders.state / "service.log", written=tuple(outermost)
    )


def _absolute(paths: str, folder: Path) -> str:
    """Each of one or several paths, separated as in PATH; what begins with ~ or $ is somebody else's to expand."""
    each = paths.split(os.pathsep)
    return os.pathsep.join(path if not path or path[0] in "~$" else str(folder / path) for path in each)


def taken_over() -> Sequence[str]:
    """The names of the variables that a service gets from the shell that installs it."""
    return [*(env_name(field) for field in FIELDS), *_OTHERS]


def left_out(environ: Mapping[str, str] = os.environ) -> Mapping[str, str]:
    """The variables that are set and matter, but are secrets, so the service does not get them; and what to do."""
    tokens = [name for name in _TOKENS if environ.get(name)]
    addresses = [name for name in _ADDRESSES if "@" in environ.get(name, "")]
    return dict.fromkeys(tokens, "keep the token in a file (HF_TOKEN_PATH)") | dict.fromkeys(
        addresses, "give it an address without a user's name and password, or set it in the service manager yourself"
    )


# --- commands: systemctl, launchctl, schtasks ---

TIMEOUT_S = 90.0


class CommandResult(NamedTuple):
    """`status` is 127 for a command that is not installed."""

    status: int
    output: str
    problem: str

    @property
    def is_missing(self) -> bool:
        return self.status == 127

    @property
    def said(self) -> str:
        """What it said about a failure, in one line."""
        lines = (self.problem or self.output).split("\n")
        return " ".join(line.strip() for line in lines if line.strip()) or f"it ended with status {self.status}"


def run_command(*command: str, timeout_s: float = TIMEOUT_S) -> CommandResult:
    """Run a command and take what it prints, in English."""
    program = shutil.which(command[0])
    if program is None:
        return CommandResult(127, "", f"{command[0]} is not installed")
    try:
        ended = run_text([program, *command[1:]], timeout_s, encoding=SYSTEM_ENCODING, env=os.environ | {"LC_ALL": "C"})
    except subprocess.TimeoutExpired:
        return CommandResult(124, "", f"{command[0]} did not end within {timeout_s:g} s")
    return CommandResult(ended.returncode, ended.stdout, ended.stderr)


def show_command(*command: str) -> int:
    """Run a command that writes to this terminal; its status, 127 when it is not installed."""
    program = shutil.which(command[0])
    if program is None:
        return 127
    return subprocess.run([program, *command[1:]], stdin=subprocess.DEVNULL, check=False).returncode


# --- their files, and the log that they do not keep ---

FOLLOW_EVERY_S = 0.5


def remove_file(path: Path) -> bool:
    """False when there was none. Raises OSError."""
    try:
        path.unlink()
    except FileNotFoundError:
        return False
    return True


def show_tail(path: Path, *, n_lines: int, follow: bool) -> int:
    """Prints the last lines of a log, and with `follow` those that come, until Ctrl-C. 1 when there is no log."""
    try:
        file = path.open(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        print(f"there is no log yet; it will be {path}")
        return 1
    with file:
        print(visible("".join(deque(file, maxlen=n_lines))), end="", flush=True)
        while follow:
            text = file.read()
            if text:
                print(visible(text), end="", flush=True)
            time.sleep(FOLLOW_EVERY_S)
    return 0


class ServiceState(NamedTuple):
    """`detail` is the manager's own word for it. `pid` is None where it runs not, or the manager does not say."""

    is_installed: bool
    is_running: bool
    detail: str
    pid: int | None = None


class Manager(Protocol):
    """All raise NotSupported where the manager is not there, and ServiceFailed for what it refuses to do."""

    name: str
    path: Path

    def install(self, plan: ServicePlan) -> None:
        """Writes the service's file, starts it, and has it started with every session. Safe to repeat."""

    def state(self) -> ServiceState: ...

    def show_logs(self, *, n_lines: int, follow: bool) -> int:
        """Prints the last lines of the daemon's output. The exit status."""

    def uninstall(self) -> bool:
        """Stops the daemon and removes the file. False when there was nothing."""
