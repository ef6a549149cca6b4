"""Plays macOS (`darwin`) or Windows (`win32`) to localrun's own modules, on Linux.

They import what the other system has and no more: each sees views of `sys`, `os`, `signal` and the like in which the
platform is the other one's and what that lacks is missing. Other packages see the real ones, for they bring code of
their own for each system. What cannot be told apart by the importer is changed for all: the ends of processes, the
steps of the clock, where libraries look for functions, and which methods event loops have.

What a native run would complain about in silence goes into the file PYTHON_EMULATED_LOG, a line each: files and
programs whose text has the system's encoding, and programs that would open a console window.

Does not: play file systems (names with a colon, open files that cannot be removed), consoles, or other processors.
"""

from __future__ import annotations

import asyncio
import asyncio.base_subprocess
import asyncio.selector_events
import asyncio.unix_events
import builtins
import codecs
import ctypes
import importlib.abc
import importlib.machinery
import importlib.util
import io
import os
import select
import signal
import socket
import stat
import subprocess
import sys
import time
import types
import warnings
from functools import cache
from pathlib import Path
from typing import Any

OURS = "localrun"
# Windows' own, for whatever is a file or a program's output.
CODE_PAGE = "cp1252"
CLOCK_STEP_S = 1 / 64
NO_WINDOW, NEW_GROUP, DETACHED = 0x08000000, 0x200, 8

MODULES = {
    "win32": {*("fcntl", "resource", "termios", "tty", "pty", "pwd", "grp", "readline", "syslog", "uvloop")},
    "darwin": set[str](),
}
HIDDEN = {
    "win32": {
        "os": """chown confstr ctermid fchmod fchown fork forkpty fpathconf get_blocking getegid geteuid getgid
            getgroups getloadavg getpgid getpgrp getpriority getsid getuid killpg lchown lockf mkfifo mknod nice
            openpty pathconf pipe2 posix_fadvise posix_fallocate posix_spawn pread preadv pwrite pwritev readv writev
            register_at_fork sched_getaffinity sched_setaffinity sched_yield sendfile set_blocking setegid seteuid
            setgid setgroups setpgid setpriority setsid setuid statvfs sync sysconf tcgetpgrp ttyname uname wait wait3
            wait4 waitid memfd_create eventfd pidfd_open copy_file_range getxattr setxattr getrandom O_NOFOLLOW
            O_CLOEXEC O_DIRECTORY O_NONBLOCK O_SYNC O_DIRECT O_TMPFILE O_PATH PRIO_PROCESS SCHED_IDLE
            WIFEXITED WIFSIGNALED WTERMSIG WEXITSTATUS WNOHANG""",
        "signal": """SIGALRM SIGBUS SIGCHLD SIGCONT SIGHUP SIGIO SIGKILL SIGPIPE SIGPROF SIGQUIT SIGSTOP SIGSYS SIGTRAP
            SIGTSTP SIGTTIN SIGTTOU SIGURG SIGUSR1 SIGUSR2 SIGVTALRM SIGWINCH SIGXCPU SIGXFSZ alarm pause setitimer
            getitimer pthread_kill pthread_sigmask sigpending sigwait sigwaitinfo sigtimedwait siginterrupt""",
        "socket": """AF_UNIX AF_NETLINK SO_REUSEPORT SO_PEERCRED MSG_DONTWAIT MSG_NOSIGNAL SOCK_CLOEXEC SOCK_NONBLOCK
            TCP_CORK TCP_QUICKACK TCP_USER_TIMEOUT sethostname if_nametoindex_ recvmsg sendmsg CMSG_LEN SCM_RIGHTS""",
        "select": "poll epoll",
        "time": "clock_gettime clock_settime CLOCK_MONOTONIC CLOCK_BOOTTIME pthread_getcpuclockid tzset",
    },
    "darwin": {
        "os": """sched_getaffinity sched_setaffinity posix_fadvise posix_fallocate memfd_create eventfd pidfd_open pipe2
            copy_file_range getxattr setxattr getrandom splice O_DIRECT O_TMPFILE O_PATH SCHED_IDLE SCHED_BATCH waitid
            getresuid""",
        "signal": "SIGPOLL SIGPWR SIGSTKFLT SIGRTMIN SIGRTMAX sigwaitinfo sigtimedwait",
        "socket": """AF_NETLINK AF_VSOCK SO_PEERCRED SOCK_CLOEXEC SOCK_NONBLOCK TCP_CORK TCP_QUICKACK TCP_USER_TIMEOUT
            MSG_CONFIRM""",
        "select": "epoll",
        "time": "CLOCK_BOOTTIME",
        "resource": "RLIMIT_NICE RLIMIT_RTPRIO RLIMIT_SIGPENDING RLIMIT_MSGQUEUE prlimit",
    },
}
# Of Linux' signals, by the status that Windows ends a process with. Terminating is an end with status 1.
STATUSES = {
    signal.SIGSEGV: 0xC0000005, signal.SIGILL: 0xC000001D, signal.SIGFPE: 0xC0000094, signal.SIGABRT: 0xC0000409,
    signal.SIGINT: 0xC000013A,
}  # fmt: skip


class View(types.ModuleType):
    """A module as the other system has it. What a test puts in the place of something real is seen through it."""

    def __init__(self, real: types.ModuleType, hidden: set[str], more: dict[str, Any]) -> None:
        super().__init__(real.__name__, real.__doc__)
        vars(self).update(
            _real=real, _hidden=hidden, _more=more, _before={name: getattr(real, name, None) for name in more}
        )

    def __getattribute__(self, name: str) -> Any:
        if name in ("__class__", "__dict__"):
            return super().__getattribute__(name)
        inside = super().__getattribute__("__dict__")
        real = inside["_real"]
        if name in inside["_hidden"]:
            raise AttributeError(f"module {real.__name__!r} has no attribute {name!r} on {_system}")
        if name in inside["_more"] and getattr(real, name, None) is inside["_before"][name]:
            return inside["_more"][name]
        return getattr(real, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(vars(self)["_real"], name, value)

    def __delattr__(self, name: str) -> None:
        delattr(vars(self)["_real"], name)

    def __dir__(self) -> list[str]:
        inside = vars(self)
        return sorted({*dir(inside["_real"]), *inside["_more"]} - inside["_hidden"])


_system = ""
_views: dict[str, View] = {}
_builtins: dict[str, Any] = {}


def play(system: str) -> None:
    """From now on this process is a `system`'s. Once, before localrun is imported."""
    global _system
    _system = system
    more = _windows() if system == "win32" else _macos()
    for name in {*HIDDEN[system], *more}:
        try:
            real = importlib.import_module(name)
        except ImportError:
            continue
        _views[name] = View(real, set(HIDDEN[system].get(name, "").split()), more.get(name, {}))
    _builtins.update(vars(builtins), __import__=_import, open=_opened)
    io.open = _opened  # type: ignore[assignment]  # pathlib's
    sys.meta_path.insert(0, _Finder())
    _watch_encodings()


# --- what our modules import -----------------------------------------------------------------------------------------


def _import(name: str, scope: Any = None, locals_: Any = None, fromlist: Any = (), level: int = 0) -> Any:
    top = name.partition(".")[0]
    if not level and top in MODULES[_system]:
        raise ModuleNotFoundError(f"No module named {name!r} on {_system}", name=name)
    if not level and name == "msvcrt" and _system == "win32":
        return _MSVCRT
    found = builtins.__import__(name, scope, locals_, fromlist, level)
    return found if level else _views.get(name if fromlist else top, found)


class _Finder(importlib.abc.MetaPathFinder):
    """Finds our modules as they are found, and runs them with `_builtins`; and none that the system lacks."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name == "uvloop" and _system == "win32":
            raise ModuleNotFoundError(f"No module named {name!r} on {_system}", name=name)
        if name.partition(".")[0] != OURS:
            return None
        for finder in sys.meta_path:
            spec = None if finder is self else finder.find_spec(name, path, target)
            if spec is not None:
                if isinstance(spec.loader, importlib.machinery.SourceFileLoader):
                    spec.loader = _Loader(spec.loader.name, spec.loader.path)
                return spec
        return None


class _Loader(importlib.machinery.SourceFileLoader):
    def get_code(self, name: str) -> Any:
        code = super().get_code(name)
        token = f"{name}:{len(_codes)}"
        _codes[token] = code
        return compile(f"import other_system; other_system.run({token!r}, globals())", self.path, "exec")


_codes: dict[str, Any] = {}


def run(token: str, scope: dict[str, Any]) -> None:
    """The code of a module, for `_Loader`."""
    scope["__builtins__"] = _builtins
    exec(_codes[token], scope)


# --- both ------------------------------------------------------------------------------------------------------------


def log(text: str) -> None:
    path = os.environ.get("PYTHON_EMULATED_LOG")
    if path:
        with builtins.open(path, "a", encoding="utf-8") as file:
            file.write(f"{text}\n")


def _opened(file: Any, *arguments: Any, **options: Any) -> Any:
    if isinstance(file, str | os.PathLike) and os.fspath(file).startswith(("/proc/", "/sys/")):  # type: ignore[arg-type]
        raise FileNotFoundError(2, "No such file or directory", os.fspath(file))
    return builtins.open(file, *arguments, **options)


def _watch_encodings() -> None:
    """With PYTHONWARNDEFAULTENCODING."""
    usual = warnings.showwarning

    def show(message: Any, category: Any, filename: str, lineno: int, *rest: Any) -> None:
        if category is not EncodingWarning:
            usual(message, category, filename, lineno, *rest)
        elif not any(part in filename for part in ("/site-packages/", "/lib/python", "/tests/", "/native_build/")):
            log(f"encoding: {filename}:{lineno}: {message}")

    warnings.showwarning = show
    warnings.filterwarnings("always", category=EncodingWarning)


def _process_class(memory: dict[str, str], hidden: set[str]) -> Any:
    """psutil's, with what it knows of memory on the other system: names of fields, by what Linux calls them."""
    import psutil

    fields = types.SimpleNamespace

    class Process(psutil.Process):  # type: ignore[misc]
        def __getattribute__(self, name: str) -> Any:
            if name in hidden:
                raise AttributeError(name)
            return super().__getattribute__(name)

        def memory_info(self) -> Any:
            found = super().memory_info()
            return fields(**{name: getattr(found, of) for name, of in memory.items()})

    return Process


def _macos() -> dict[str, dict[str, Any]]:
    real_poll = select.poll

    class Poll:
        """xnu's registers nothing for a descriptor whose events are none."""

        def __init__(self) -> None:
            self._poll = real_poll()

        def register(self, descriptor: Any, events: int = select.POLLIN) -> None:
            if events:
                self._poll.register(descriptor, events)

        def poll(self, timeout: float | None = None) -> Any:
            return self._poll.poll(timeout)

    names = {"rss": "rss", "vms": "vms", "pfaults": "rss", "pageins": "rss"}
    return {
        "sys": {"platform": "darwin"},
        "platform": {"system": lambda: "Darwin", "machine": lambda: "arm64", "processor": lambda: "arm"},
        "select": {"poll": Poll},
        "psutil": {"Process": _process_class(names, {"cpu_affinity", "rlimit", "ionice", "io_counters"})},
    }


# --- Windows ---------------------------------------------------------------------------------------------------------


def _windows() -> dict[str, dict[str, Any]]:
    codecs.register(lambda name: codecs.lookup("cp850") if name in ("oem", "mbcs") else None)
    _play_clock()
    _play_processes()
    _play_libraries()
    for name in ("add_reader", "add_writer"):
        setattr(asyncio.selector_events.BaseSelectorEventLoop, name, _not_implemented)
    for name in ("add_signal_handler", "create_unix_server", "create_unix_connection"):
        setattr(asyncio.unix_events._UnixSelectorEventLoop, name, _not_implemented)
    # What a native Python has there of its own accord; only what it is for matters here.
    windll = types.SimpleNamespace(kernel32=types.SimpleNamespace(SetStdHandle=lambda *_: 1, SetErrorMode=lambda *_: 0))
    names = {"rss": "rss", "vms": "vms", "private": "data", "wset": "rss", "pagefile": "data"}
    return {
        "sys": {"platform": "win32", "getwindowsversion": lambda: types.SimpleNamespace(build=22631)},
        "platform": {"system": lambda: "Windows", "machine": lambda: "AMD64", "processor": lambda: "Intel64 Family 6"},
        "os": {"kill": _kill, "startfile": _not_implemented, "O_BINARY": 0, "add_dll_directory": lambda path: None},
        "signal": {"SIGBREAK": 21, "CTRL_C_EVENT": 0, "CTRL_BREAK_EVENT": 1, "Signals": _signals},
        "socket": {"SO_EXCLUSIVEADDRUSE": socket.SO_REUSEADDR},
        "select": {"select": _select},
        "subprocess": {
            "CREATE_NO_WINDOW": NO_WINDOW, "CREATE_NEW_PROCESS_GROUP": NEW_GROUP, "DETACHED_PROCESS": DETACHED,
        },
        "ctypes": {"windll": windll},
        "psutil": {
            "Process": _process_class(names, {"num_fds", "rlimit", "terminal", "uids", "gids"}),
            "BELOW_NORMAL_PRIORITY_CLASS": 10, "IDLE_PRIORITY_CLASS": 19,
        },
    }  # fmt: skip


_MSVCRT = types.SimpleNamespace(get_osfhandle=lambda descriptor: descriptor, setmode=lambda *_: 0)


def _not_implemented(*_: Any, **__: Any) -> None:
    raise NotImplementedError


def _signals(number: int) -> Any:
    if number not in {*STATUSES, signal.SIGTERM, 21}:
        raise ValueError(f"{number} is not a valid Signals")
    return signal.Signals(number)


def _kill(pid: int, number: int) -> None:
    if number in (0, 1):
        raise AssertionError(f"os.kill({pid}, {number}) is Ctrl-C on Windows")
    is_fault = pid == os.getpid() and number in STATUSES  # how tests play one of native code
    os.kill(pid, number if is_fault else signal.SIGKILL)


def _select(*arguments: Any) -> Any:
    for each in [each for some in arguments[:3] for each in some]:
        if not stat.S_ISSOCK(os.fstat(each if isinstance(each, int) else each.fileno()).st_mode):
            raise OSError(10038, "An operation was attempted on something that is not a socket")
    return select.select(*arguments)


def _play_clock() -> None:
    """In steps, as before Python 3.13. Everybody's, since loops and what runs on them must agree."""
    fine, info = time.monotonic, time.get_clock_info
    time.monotonic = lambda: fine() // CLOCK_STEP_S * CLOCK_STEP_S

    def coarse(name: str) -> Any:
        found = info(name)  # type: ignore[arg-type]
        if name == "monotonic":
            found.resolution = CLOCK_STEP_S
        return found

    time.get_clock_info = coarse  # type: ignore[assignment]


def _status(returncode: int) -> int:
    return returncode if returncode >= 0 else STATUSES.get(signal.Signals(-returncode), 1)


def _play_processes() -> None:
    start, handle = subprocess.Popen.__init__, subprocess.Popen._handle_exitstatus  # type: ignore[attr-defined]

    def started(self: Any, args: Any, *rest: Any, **options: Any) -> None:
        flags = options.pop("creationflags", 0)
        if not flags & NO_WINDOW:
            log(f"window: {args}")
        if flags & NO_WINDOW and flags & DETACHED:
            log(f"both flags: {args}")
        for name in ("preexec_fn", "user", "group", "umask"):
            if options.get(name) not in (None, -1):
                raise ValueError(f"{name} is not supported on Windows platforms")
        start(self, args, *rest, **options)

    def ended(self: Any, *arguments: Any) -> None:
        handle(self, *arguments)
        if self.returncode is not None:
            self.returncode = _status(self.returncode)

    def terminate(self: Any) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)

    subprocess.Popen.__init__ = started  # type: ignore[method-assign]
    subprocess.Popen._handle_exitstatus = ended  # type: ignore[attr-defined]
    subprocess.Popen.terminate = subprocess.Popen.kill = terminate  # type: ignore[method-assign]
    exited = asyncio.base_subprocess.BaseSubprocessTransport._process_exited  # type: ignore[attr-defined]
    asyncio.base_subprocess.BaseSubprocessTransport._process_exited = lambda self, code: exited(self, _status(code))  # type: ignore[attr-defined]


@cache
def _defined(path: str) -> frozenset[str]:
    """The functions that a library defines itself: what GetProcAddress finds, where dlsym goes on to others."""
    ended = subprocess.run(
        ["nm", "-D", "--defined-only", "--format=posix", path], capture_output=True, encoding="utf-8", check=True,
        creationflags=NO_WINDOW,
    )  # fmt: skip
    return frozenset(line.split()[0].partition("@")[0] for line in ended.stdout.splitlines() if line)


def _play_libraries() -> None:
    start, look_up = ctypes.CDLL.__init__, ctypes.CDLL.__getitem__

    def opened(self: Any, name: Any, *rest: Any, **options: Any) -> None:
        path = Path(str(name))
        if path.suffix == ".dll":
            name = str(path.with_name(f"lib{path.stem}.so"))
            if not Path(name).is_file():
                raise FileNotFoundError(f"Could not find module '{path}' (or one of its dependencies).")
        start(self, name, *rest, **options)

    def found(self: Any, name: Any) -> Any:
        path = self._name
        if isinstance(name, str) and path and "llama_cpp" in str(path) and name not in _defined(str(path)):
            raise AttributeError(f"function '{name}' not found")
        return look_up(self, name)

    ctypes.CDLL.__init__ = opened  # type: ignore[method-assign]
    ctypes.CDLL.__getitem__ = found  # type: ignore[method-assign]
