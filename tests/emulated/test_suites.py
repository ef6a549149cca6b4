"""The unit tests that apply, on macOS and Windows as `hook/other_system.py` plays them. Minutes for each system."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.emulated.test_programs import SYSTEMS, hooked

ROOT = Path(__file__).parents[2]
PLACES = (
    *("service", "doctor", "access", "models/storage", "server/engines/test_child.py"),
    *("server/engines/test_machine.py", "server/engines/test_mac_memory.py", "engine/test_process.py"),
    *("test_config.py", "test_kernels.py", "test_kv_folders.py", "test_last_model.py"),
    *("test_priority.py", "test_stored.py", "test_processes.py", "test_processors.py", "test_thread_choice.py"),
)
# Whose fault it is that these fail there: never the product's.
LEFT_OUT = {
    "darwin": {
        "service/test_real_systemd.py": "runs systemd, and the service is launchd's",
        "doctor/test_devices.py": "gives a process one second, in which the hook starts as well",
        "doctor/test_gpu.py::test_a_gpu_build_that_sees_none_says_where_to_look": "asks for Linux' words",
        "server/engines/test_machine.py::test_how_a_process_ended_that_finds_none_is_said": "gives it one second",
        "test_priority.py": "reads /proc to see what it did",
        "test_processors.py::test_this_machine_says_what_is_idle_and_unused": "compares with Linux' own figures",
        "test_processors.py::test_a_process_that_is_bound_to_one_processor_uses_one_thread": "macOS binds no process",
    },
}
LEFT_OUT["win32"] = LEFT_OUT["darwin"] | {
    "doctor/test_devices.py": "gives a process one second, and its RPC servers the time of a quiet machine",
    "doctor/test_llama_build.py::test_the_command_fits_the_shell": "asks for the words of Linux' shells",
    "doctor/test_surroundings.py::test_folders_that_are_not_sound": "Windows has no permission bits",
    "models/storage/test_other_programs.py::test_a_fifo_or_a_device_for_a_manifest_holds_nothing_up": "no FIFOs",
    "server/engines/test_machine.py::test_private_memory_of_a_process": "Linux has no such figure of its own",
    "test_kv_folders.py::test_a_note_that_is_no_file_is_none": "there are no FIFOs, and links only with special rights",
    "test_processes.py::test_an_end_means_the_same_on_every_system": "SIGKILL has no name there",
    "test_processes.py::test_abort_has_a_small_number_on_windows": "begins as another system",
    "service/test_windows.py::test_what_the_scheduler_knows": "its stand-in writes UTF-8 and no code page",
    "service/test_windows.py::test_a_command_line_that_fails_leaves_its_reason_in_the_log": "Linux does not let two "
    "sockets have one port as Windows does",
}


@pytest.mark.deep
@pytest.mark.skipif(sys.platform != "linux", reason="plays the others on Linux")
@pytest.mark.parametrize("system", SYSTEMS)
def test_the_unit_tests(system: str, tmp_path: Path) -> None:
    left_out = [f"--deselect=tests/{name}" for name in LEFT_OUT[system]]
    # Warnings are errors in tests, and those about encodings would be the tests' own.
    mine = {name: value for name, value in hooked(system, tmp_path / "complaints").items() if "ENCODING" not in name}
    environment = os.environ | mine | {"LOCALRUN_TEST_DEPTH": "1"}
    ended = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "--tb=short", "-p", "no:cacheprovider", *left_out,
         *(f"tests/{place}" for place in PLACES)],
        cwd=ROOT, env=environment,
        capture_output=True, encoding="utf-8", errors="replace", check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stdout[-10_000:]
