"""localrun on arm64 Linux, under QEMU on a machine of another kind: the same answers as here.

Not part of `make test`: `make test-arm64` makes the root that this runs in (`root.py`). It says nothing of speed, of
GPUs, or of the order of stores in memory, which this machine keeps more strictly than ARM promises.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest

from localrun.doctor.probe_models import WEIGHT_TYPES
from localrun.models.gguf.reader import read_header
from localrun.models.memory import copied_output_bytes
from tests.arm64 import root
from tests.arm_machines import MACHINES, ArmMachine
from tests.daemon import running_daemon
from tests.support.synthesis.synthesize import synthesize

TINY = root.REPOSITORY / "models/builtin/tiny.gguf"
SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}, "s": {"enum": ["fox", "dog"]}},
          "required": ["n", "s"], "additionalProperties": False}  # fmt: skip
STORY = "Once upon a time there was a fox. " * 30
# A processor, as QEMU plays it, and the module of llama.cpp that suits.
PROCESSORS = {"cortex-a53": "armv8.0_1", "cortex-a76": "armv8.2_2", "max,sve=off": "armv8.6_0", "max": "armv8.6_1"}

pytestmark = [
    pytest.mark.skipif(os.environ.get("LOCALRUN_TEST_ARM64") != "1", reason="make test-arm64 runs it"),
    pytest.mark.slow,
]


@pytest.fixture(scope="module", autouse=True)
def made() -> None:
    try:
        root.make()
    except root.CannotMake as error:
        pytest.skip(f"no arm64 root: {error}")


def run(shared: Path, *arguments: str, **more: Any) -> str:
    """What a program of the root prints."""
    command, environ = root.command(shared, *arguments, **more)
    ended = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=3000, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


# --- llama.cpp alone -------------------------------------------------------------------------------------------------


@cache
def tokens_here() -> list[int]:
    program = [sys.executable, str(root.REPOSITORY / "packaging/decode_few.py"), str(TINY)]
    return list(json.loads(subprocess.run(program, capture_output=True, text=True, check=True).stdout)["tokens"])


@pytest.mark.parametrize(("cpu", "module"), PROCESSORS.items())
def test_each_kind_of_processor_gets_its_module_and_the_same_tokens(tmp_path: Path, cpu: str, module: str) -> None:
    model = "/checkout/models/builtin/tiny.gguf"
    said = json.loads(run(tmp_path, "python3", "/checkout/packaging/decode_few.py", model, cpu=cpu))
    assert (said["module"], said["tokens"]) == (module, tokens_here())


_PROBE = """
import msgspec
from localrun.doctor.kernel_probe import probe
print(msgspec.json.encode(probe(timeout_s=3000)).decode())
"""


# `max` has vectors of 512 bits, with which the plain kernels for Q4_K and Q6_K are wrong; the quick ones are not.
@pytest.mark.parametrize("cpu", ["cortex-a53", "cortex-a76", "max,sve=off", "max,sve-default-vector-length=32", "max"])
def test_no_weight_type_is_computed_wrongly(tmp_path: Path, cpu: str) -> None:
    verdict = json.loads(run(tmp_path, "python3", "-c", _PROBE, cpu=cpu))
    assert (verdict.get("faults", []), verdict.get("wrong", []), verdict.get("broken", "")) == ([], [], "")
    quick = {"Q4_0", "Q8_0", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "MXFP4"} if cpu != "cortex-a53" else set()
    assert set(verdict.get("quick_types", [])) == quick
    assert quick <= set(WEIGHT_TYPES)


_REPACK = """
import sys
from localrun.engine.tools import probe
probe.native.llama_log_set(probe._log_callback, None)
probe.native.llama_backend_init()
with probe._opened(sys.argv[1], 1, is_quick=True):
    print(b"".join(probe._log_lines).decode())
"""


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0"])
def test_what_is_copied_at_load_is_what_the_estimate_says(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "tied.gguf"
    synthesize("tiny", kind, path)
    header = read_header(path)
    printed = run(tmp_path, "python3", "-c", _REPACK, str(path))
    said = re.search(r"CPU_REPACK model buffer size = +([\d.]+) MiB", printed)
    assert said is not None, printed
    copied_bytes = sum(tensor.size_bytes for tensor in header.tensors if len(tensor.shape) > 1)
    assert float(said[1]) * 2**20 == pytest.approx(copied_bytes, rel=0.02)
    # The layers' matrices, and the embedding as the output's.
    embedding = next(tensor for tensor in header.tensors if tensor.name == "token_embd.weight")
    assert copied_output_bytes(header, "aarch64") == embedding.size_bytes


# --- the daemon, with pages of each size that kernels for ARM have ---------------------------------------------------


class Served:
    """A daemon's answers."""

    def __init__(self, url: str) -> None:
        self.http = httpx.Client(base_url=url, timeout=1200)

    def post(self, path: str, **body: Any) -> Any:
        answer = self.http.post(path, json=body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def generated(self, prompt: str) -> tuple[str, int, int]:
        said = self.post("/api/generate", model="tiny", prompt=prompt, stream=False,
                         options={"temperature": 0, "num_predict": 24})  # fmt: skip
        return said["response"], said["prompt_eval_count"], said["eval_count"]

    def two_streams(self) -> list[tuple[str, int, int]]:
        with ThreadPoolExecutor(2) as pool:
            return list(pool.map(self.generated, ("What is a fox?", "Tell me a story.")))

    def completed(self, prompt: str) -> tuple[str, int]:
        said = self.post("/v1/completions", model="tiny", prompt=prompt, temperature=0, max_tokens=12)
        details = said["usage"].get("prompt_tokens_details") or {}
        return said["choices"][0]["text"], details.get("cached_tokens", 0)

    def chatted(self) -> tuple[str, int]:
        messages = [{"role": "user", "content": "Tell me of a fox, a dog, a cat and a horse."}]
        said = self.post("/v1/chat/completions", model="tiny", temperature=0, max_tokens=12, messages=messages)
        return said["choices"][0]["message"]["content"], said["usage"]["prompt_tokens_details"]["cached_tokens"]

    def by_schema(self) -> Any:
        said = self.post(
            "/v1/chat/completions", model="tiny", temperature=0, max_tokens=60,
            messages=[{"role": "user", "content": "Name an animal and a number."}],
            response_format={"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": SCHEMA}},
        )  # fmt: skip
        return said["choices"][0]["message"]["content"]

    def embedded(self) -> list[float]:
        return list(self.post("/v1/embeddings", model="tiny", input="a fox")["data"][0]["embedding"])


@contextlib.contextmanager
def serving(shared: Path, page_bytes: int) -> Iterator[Served]:
    """A daemon in the root; it ends as at a stop by the system."""
    command, environ = root.command(
        shared, "python3", "-m", "localrun", "serve", "--port", "0", page_bytes=page_bytes,
        LOCALRUN_SLOTS="4", LOCALRUN_KV_CELLS="2048", LOCALRUN_THREADS="1",
    )  # fmt: skip
    with (
        (shared / "log").open("a") as log,
        subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, stderr=log, text=True) as process,
    ):
        assert process.stdout is not None
        too_late = threading.Timer(600, process.kill)
        too_late.start()
        line = process.stdout.readline()
        too_late.cancel()
        try:
            assert line.startswith("localrun is listening on"), (shared / "log").read_text()
            served = Served(line.split()[-1])
            with served.http:
                yield served
        finally:
            process.terminate()
            assert process.wait(timeout=300) == 0, (shared / "log").read_text()


@pytest.fixture(scope="module")
def here() -> Iterator[Served]:
    with running_daemon(fake=False, LOCALRUN_KV_CELLS="2048") as daemon:
        served = Served(daemon.url)
        with served.http:
            yield served


@pytest.mark.parametrize("page_bytes", [4096, 16_384, 65_536])
def test_answers_are_those_of_this_machine_and_states_outlive_a_restart(
    tmp_path: Path, here: Served, page_bytes: int
) -> None:
    with serving(tmp_path, page_bytes) as there:
        assert there.generated("What is a fox?") == here.generated("What is a fox?")
        assert there.two_streams() == here.two_streams()
        first, again = there.completed(STORY), there.completed(STORY)
        assert first == (here.completed(STORY)[0], 0)
        assert again[0] == first[0]
        assert again[1] > 200
        assert there.by_schema() == here.by_schema()
        if page_bytes == 4096:
            assert there.embedded() == pytest.approx(here.embedded(), abs=1e-3)
        chatted = there.chatted()
        assert chatted[0] == here.chatted()[0]
    with serving(tmp_path, page_bytes) as there:
        assert there.chatted() == (chatted[0], pytest.approx(30, abs=15))


# --- the build -------------------------------------------------------------------------------------------------------

# The check of the language's library is the same for all, and takes the emulator half a minute.
_PLAN = """
import subprocess, sys
patient = subprocess.run
subprocess.run = lambda *command, timeout, **more: patient(*command, timeout=3000, **more)
from localrun.native_build import plan as plans
from localrun.native_build.machine import Machine
if sys.argv[1] != "pi-5":
    plans.LANGUAGE_SOURCE = "int main() { return 0; }"
machine = Machine()
plan, portable = plans.make_plan(machine, "cpu"), plans.make_portable_plan(machine)
arch = [option.partition("=")[2] for option in plan.options if "ARM_ARCH" in option]
print(repr((machine.cpu_name, plan.problems, plan.notes, arch, list(portable.unsound_modules))))
"""


@pytest.mark.parametrize("machine", MACHINES, ids=lambda machine: machine.name)
def test_the_oldest_gcc_of_a_system_in_use_builds_for_every_machine(tmp_path: Path, machine: ArmMachine) -> None:
    """GCC 12's own answer for `-mcpu=native`, by the /proc/cpuinfo of each."""
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text(machine.cpuinfo)
    said = run(tmp_path, "python3", "-c", _PLAN, machine.name, cpuinfo=cpuinfo, cpu="max", PYTHONPATH="/checkout")
    name, problems, notes, arch, left_out = eval(said)
    assert (problems, notes) == ([], [])
    # The board is not played, only the processor.
    assert machine.called.endswith(name)
    expected = [] if machine.native == "right" else ["+".join(["armv8.2-a", *machine.tags])]
    assert arch == expected
    assert left_out == ["armv9.2_1", "armv9.2_2"], "GCC 12 does not know SME"


# --- the unit tests that depend on the processor ---------------------------------------------------------------------


@pytest.mark.parametrize("page_bytes", [4096, 65_536])
def test_unit_tests_of_what_depends_on_the_processor(tmp_path: Path, page_bytes: int) -> None:
    places = ("test_processors.py", "test_kernels.py", "test_library_problems.py", "models/test_memory.py",
              "engine/native/test_unused_cells.py", "engine/native/test_llama_states.py")  # fmt: skip
    run(
        tmp_path, "sh", "-c", f"cd /checkout && exec python3 -m pytest -q -p no:cacheprovider "
        f"{' '.join(f'tests/{place}' for place in places)}", page_bytes=page_bytes,
        LOCALRUN_TEST_PATIENCE="30", PYTHONPATH="/site:/checkout",
    )  # fmt: skip
