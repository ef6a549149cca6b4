"""Tries the native library's quick kernels on this processor and keeps what came of it.

`python -m localrun.doctor.kernel_probe [--polite]`, started by the daemon in a quiet moment; the doctor calls `probe`.
It writes small models of random weights to a temporary folder and has `localrun.engine.tools.probe`, a process of its
own, compute each of them with and without extra buffers. That process may die in any case; it is then started again
behind it, so that one crash hides nothing.

How far apart right kernels may be: both ways round activations to 8 bits, each in its own order, so that now and then
one value falls on the other side of a step; kernels for other processors round whole rows instead of blocks. On AVX-512
with interleaved rows most logits agreed to 3e-7 and the worst row to 1.6 % of its size. Logits of a kernel that gives
zeros were 100 to 155 % apart. `TOLERANCE` lies between. Logits of right kernels were up to 6 % off those of the same
weights as F32, since these round no activations; on ARM with vectors of 512 bits plain kernels were 220 % off and more.

Does not: load the library into its own process, or decide what a model may use (`kernels.Verdict`).
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path

import msgspec
import psutil

from localrun import config
from localrun.doctor.probe_models import write_probe_models
from localrun.hardware import kernels
from localrun.hardware.kernels import Fault, Verdict
from localrun.processes import run_text, signal_name, step_back

TOLERANCE = 0.1
MAX_ERROR = 0.3
# The whole takes less than two seconds on two cores; a machine may be busy, and old.
TIMEOUT_S = 120.0
# More threads wait for each other at every barrier: beside a busy program two took more than 25 s, one has no barriers.
N_THREADS = 1
COMMAND = (sys.executable, "-P", "-m", "localrun.engine.tools.probe")
_POLITENESS = 19


class ProbeFailed(Exception):
    """The probe came to no result: nothing is known about the kernels. Says why."""


class ProbeTooSlow(ProbeFailed):
    """It was not ready in time: of a machine that is slow or busy."""


class ProbeLine(msgspec.Struct, frozen=True):
    """A line of `localrun.engine.tools.probe`."""

    case: int
    path: str = ""
    difference: float | None = None
    plain_error: float = 0.0
    quick_error: float = 0.0
    buffers: tuple[str, ...] = ()
    signal: int = 0
    error: str = ""


class Case(msgspec.Struct, frozen=True):
    weight_type: str
    memory: str
    path: Path
    reference: Path | None = None

    @property
    def line(self) -> str:
        return f"{self.path}\t{self.reference or ''}\n"


def probe(command: Sequence[str] = COMMAND, *, timeout_s: float = TIMEOUT_S) -> Verdict:
    """Computes everything and judges. Raises ProbeFailed when the process can compute nothing, or takes too long."""
    for left in Path(tempfile.gettempdir()).glob("localrun-probe-*-*"):  # by one that was killed
        pid = left.name.split("-")[2]
        if pid.isdecimal() and not psutil.pid_exists(int(pid)):
            shutil.rmtree(left, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=f"localrun-probe-{os.getpid()}-") as folder:
        cases = [Case(*written) for written in write_probe_models(Path(folder))]
        seen = _CaseResults(cases)
        while not seen.is_done:
            seen.run([*command, str(N_THREADS)], timeout_s)
    return seen.verdict()


class _CaseResults:
    """What was found of each case until now."""

    def __init__(self, cases: Sequence[Case]) -> None:
        self._cases = cases
        self._n_tried = 0
        self._faults: dict[tuple[str, str], Fault] = {}
        self._quick_types: dict[str, None] = {}
        self._doubted: set[str] = set()
        self._wrong: list[str] = []
        self._broken = ""

    @property
    def is_done(self) -> bool:
        return self._n_tried == len(self._cases)

    def verdict(self) -> Verdict:
        return Verdict(
            is_probed=True,
            quick_types=tuple(self._quick_types),
            faults=tuple(self._faults.values()),
            wrong=tuple(self._wrong),
            broken=self._broken,
        )

    def run(self, command: Sequence[str], timeout_s: float) -> None:
        """One process over the cases that are left, until its end. Raises ProbeFailed."""
        first = self._n_tried
        paths = "".join(case.line for case in self._cases[first:])
        try:
            ended = run_text(command, timeout_s, input=paths)
        except subprocess.TimeoutExpired:
            raise ProbeTooSlow(f"it took more than {timeout_s:g} s") from None
        last = None
        for line in ended.stdout.splitlines():
            with contextlib.suppress(msgspec.DecodeError):
                said = msgspec.json.decode(line, type=ProbeLine)
                self._take(self._cases[first + said.case], said, last)
                last = said
        if last is None:
            said_last = ended.stderr.strip().splitlines()[-1:]
            raise ProbeFailed(said_last[0] if said_last else _end_in_words(ended.returncode))
        is_open = last.difference is None and not last.signal and not last.error
        if is_open:
            self._died(self._cases[first + last.case], last.path, ended.returncode)
        self._n_tried = first + last.case + 1

    def _take(self, case: Case, said: ProbeLine, before: ProbeLine | None) -> None:
        for_quick = "quick" if before is None else before.path
        if said.signal:
            self._died(case, for_quick, -said.signal)
        elif said.error:
            self._failed(case, for_quick, f"fail ({said.error})")
        elif said.difference is not None:
            if said.buffers:
                self._quick_types[case.weight_type] = None
            if not 0 <= said.plain_error <= MAX_ERROR:
                self._doubted.add(case.weight_type)
                if not (said.buffers and 0 <= said.quick_error <= MAX_ERROR):
                    self._wrong.append(case.weight_type)
            # Where the plain kernels are wrong, a difference says nothing of the quick ones.
            if case.weight_type not in self._doubted and not 0 <= said.difference <= TOLERANCE:
                off = f"{said.difference:.0%} off" if said.difference >= 0 else "not numbers"
                self._failed(case, "quick", f"compute wrong logits ({off})")

    def _died(self, case: Case, path: str, returncode: int) -> None:
        self._failed(case, path, f"crash ({_end_in_words(returncode)})")

    def _failed(self, case: Case, path: str, how: str) -> None:
        if path == "plain":
            self._broken = self._broken or how
        else:
            self._quick_types[case.weight_type] = None
            self._faults.setdefault((case.weight_type, case.memory), Fault(case.weight_type, case.memory, how))


def probe_and_keep(verdicts: Path, command: Sequence[str] = COMMAND, *, anew: bool = False) -> Verdict:
    """As `probe`; what engines told before stays, unless everything is to be found out `anew`. Raises ProbeFailed."""
    pair = kernels.present_pair()
    if pair is None:
        raise ProbeFailed("there is no llama.cpp")
    found = probe(command)
    verdict = found if anew else msgspec.structs.replace(found, crashes=kernels.read(verdicts, pair).crashes)
    with contextlib.suppress(OSError):  # a disk that is full costs the next one a second probe
        kernels.keep(verdicts, pair, verdict)
    return verdict


def _end_in_words(returncode: int) -> str:
    return signal_name(returncode) or f"status {returncode}"


def _leave_with_parent() -> None:
    """As Ctrl-C does, which removes the models on the way out."""
    with contextlib.suppress(OSError):
        while os.read(0, 1024):
            pass
    if sys.platform == "win32":  # where kill() ends the process at once, whatever the signal
        signal.raise_signal(signal.SIGINT)
    else:
        os.kill(os.getpid(), signal.SIGINT)


def main(argv: Sequence[str]) -> int:
    """Exit code 0 when a verdict was kept, whatever it says. Ends with its parent, which holds stdin open."""
    try:
        if "--polite" in argv:
            step_back(_POLITENESS)
            # A shell's background jobs ignore it, and so does everything that they start.
            signal.signal(signal.SIGINT, signal.default_int_handler)
            threading.Thread(target=_leave_with_parent, daemon=True).start()
        verdict = probe_and_keep(kernels.folder(config.folders().cache))
    except ProbeFailed as error:
        print(f"the native library cannot be probed: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 1
    print(msgspec.json.encode(verdict).decode())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
