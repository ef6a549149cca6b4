"""Decides which models load without the quick kernels, by what was found out and by how engines end, and has the
kernels probed when nobody waits.

Runs in the daemon's event loop. The rule is that of `hardware.kernels.Verdict`. It is read anew for every load, in a
thread and in a millisecond, so a library that was replaced or probed by somebody else meanwhile is noticed.

As long as nothing is known models load with all kernels: the first answer waits for nothing. The supervisor answers a
crash by a second start, and the probe follows in the first quiet moment: no load and no request for `QUIET_S`, or at
last after `LONGEST_WAIT_S`. It takes two seconds of processor time at the lowest priority, once for each library. What
it finds wrong concerns models that are loaded already, too: `on_found` is called, and the supervisor sees to them. What
cannot be written to the cache folder counts until the daemon ends.

Does not: compute (`localrun.doctor.kernel_probe`, a process), or start engines again (supervisor.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
from collections.abc import Callable, Hashable, Sequence
from pathlib import Path

import msgspec

from localrun.errors import EngineFailed
from localrun.hardware import kernels
from localrun.hardware.kernels import Pair, Verdict
from localrun.models.gguf.header import Header
from localrun.models.memory import memory_kind
from localrun.processes import HIDDEN, end_child
from localrun.server.engines.link import EngineLink

QUIET_S = 2.0
LOOK_EVERY_S = 0.5
LONGEST_WAIT_S = 300.0
# A probe that is told to go has so long to remove its files.
LEAVE_S = 2.0
PROBE_COMMAND = (sys.executable, "-P", "-m", "localrun.doctor.kernel_probe", "--polite")

_log = logging.getLogger(__name__)


class Kernels:
    """See the module. Without `folder` everything is allowed and nothing is probed: engines are fakes.

    `is_quiet` says whether nobody waits for anything; `on_found` is given a verdict that forbids something.
    """

    def __init__(
        self,
        folder: Path | None,
        *,
        is_quiet: Callable[[], bool],
        on_found: Callable[[Verdict], None],
        command: Sequence[str] = PROBE_COMMAND,
    ) -> None:
        self._folder = folder
        self._is_quiet = is_quiet
        self._on_found = on_found
        self._command = command
        self._probing: asyncio.Task[None] | None = None
        self._unkept: dict[Pair, Verdict] = {}
        # How engines of files crashed that had computed nothing; and whose quick kernels have computed something, so
        # that it was not they.
        self._suspects: dict[Hashable, str] = {}
        self._proven: set[Hashable] = set()

    def start(self) -> asyncio.Task[None] | None:
        """The task that waits for a quiet moment and probes, None without a folder."""
        if self._folder is not None:
            self._probing = asyncio.create_task(self._probe(self._folder))
        return self._probing

    async def stop(self) -> None:
        if self._probing is not None:
            self._probing.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._probing

    async def allow_quick(self, header: Header) -> bool:
        """Whether a model may use the quick kernels, as far as anybody knows. Raises EngineFailed for a model that is
        computed wrongly by all kernels."""
        if self._folder is None:
            return True
        verdict = await asyncio.to_thread(self._known, self._folder)
        if wrong := wrong_types(verdict, header):
            raise EngineFailed(
                f"this build of llama.cpp computes {', '.join(wrong)} wrongly on this processor; `localrun doctor` "
                "says how to rebuild it, or take a file of another quantization"
            )
        return is_allowed(verdict, header)

    def suspects(self, file: Hashable) -> bool:
        """Whether the last engine of these files crashed with the quick kernels before it had computed anything."""
        return file in self._suspects

    def suspects_after(self, link: EngineLink, file: Hashable, *, is_quick: bool) -> bool:
        """After an end: whether the next engine goes without the quick kernels.

        An engine that crashes before it has computed anything most likely met a kernel that is wrong on this processor.
        All crashes count: besides SIGSEGV and SIGILL kernels end in SIGBUS (alignment, on Arm), SIGFPE and SIGABRT
        (their own assertions about shapes). Where the cause is another one, that costs a second load, and the second
        crash says so.
        """
        if not is_quick and not link.has_answered:
            self._suspects.pop(file, None)  # it was not they
        if not is_quick or link.has_answered or link.crash is None or file in self._proven:
            return False
        self._suspects[file] = link.crash
        _log.warning(
            "the engine of model '%s' %s before its first token; it is started once more without the quick kernels "
            "(`localrun doctor` looks into it)", link.model, link.crash,
        )  # fmt: skip
        return True

    def answered(self, file: Hashable, *, is_quick: bool) -> str | None:
        """Something was computed. Returns how the engine before crashed, if it was the quick kernels."""
        if is_quick:
            self._proven.add(file)
            return None
        return self._suspects.pop(file, None)

    async def learn(self, header: Header, how: str, model: str) -> None:
        """An engine died as `how` says, and the next one answered without the quick kernels."""
        if self._folder is not None:
            await asyncio.to_thread(self._keep_crash, self._folder, header, how, model)

    async def _probe(self, folder: Path) -> None:
        try:
            await self._probe_when_quiet(folder)
        except Exception:
            _log.exception("the quick kernels were not probed")

    async def _probe_when_quiet(self, folder: Path) -> None:
        pair = await asyncio.to_thread(kernels.present_pair)
        if pair is None or (await asyncio.to_thread(self._known, folder)).is_probed:
            return
        await self._quiet_moment()
        process = await asyncio.create_subprocess_exec(
            *self._command, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE, start_new_session=True, **HIDDEN,
        )  # fmt: skip
        try:
            assert process.stdout is not None
            assert process.stderr is not None
            found, said = await asyncio.gather(process.stdout.read(), process.stderr.read())
            if await process.wait():
                reason = said.decode(errors="replace").strip().rpartition("\n")[2]
                _log.warning("the quick kernels were not probed: %s", reason)
                return
        finally:
            await end_child(process, leave_s=LEAVE_S)  # it removes its models when its stdin is closed
        verdict = msgspec.json.decode(found, type=Verdict)
        if not (await asyncio.to_thread(kernels.read, folder, pair)).is_probed:
            # As the probe does with those that were kept.
            crashes = (await asyncio.to_thread(self._known, folder)).crashes
            self._unkept[pair] = msgspec.structs.replace(verdict, crashes=crashes)
            _log.warning("what was found about the kernels cannot be kept in %s", folder)
        for fault in verdict.faults:
            _log.warning("the quick kernels for %s in %s models %s", fault.weight_type, fault.memory, fault.how)
        if verdict.broken:
            _log.error("llama.cpp cannot compute on this processor: its kernels %s", verdict.broken)
        if verdict.wrong:
            _log.error("llama.cpp computes %s wrongly on this processor", ", ".join(verdict.wrong))
        if verdict.faults or verdict.wrong:
            self._on_found(verdict)

    def _known(self, folder: Path) -> Verdict:
        """In a thread: reads the disk."""
        pair = kernels.present_pair()
        if pair is None:
            return Verdict()
        return self._unkept.get(pair) or kernels.read(folder, pair)

    def _keep_crash(self, folder: Path, header: Header, how: str, model: str) -> None:
        """In a thread: writes to the disk."""
        pair = kernels.present_pair()
        if pair is None:
            return
        types = {tensor.type_name for tensor in header.tensors}
        verdict = self._known(folder).with_crash(types, memory_kind(header), how, model)
        try:
            kernels.keep(folder, pair, verdict)
            self._unkept.pop(pair, None)
        except OSError as error:
            self._unkept[pair] = verdict
            _log.warning("what was learned about the kernels cannot be kept: %s", error)

    async def _quiet_moment(self) -> None:
        clock = asyncio.get_running_loop().time
        last_busy_s = began_s = clock()
        while clock() - last_busy_s < QUIET_S and clock() - began_s < LONGEST_WAIT_S:
            await asyncio.sleep(LOOK_EVERY_S)
            if not self._is_quiet():
                last_busy_s = clock()


def is_allowed(verdict: Verdict, header: Header) -> bool:
    """Whether a verdict lets a model use the quick kernels."""
    return verdict.allows_quick({tensor.type_name for tensor in header.tensors}, memory_kind(header))


def wrong_types(verdict: Verdict, header: Header) -> list[str]:
    """The weight types of a model that no kernel computes rightly."""
    return sorted({tensor.type_name for tensor in header.tensors}.intersection(verdict.wrong))
