"""`packaging/install.sh` on machines that do not exist."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from tests.packaging.machine import Machine
from tests.says import says

NVIDIA = r"""
case $1 in
*compute_cap*) printf '9.0\n9.0\n' ;;
*name*) printf 'NVIDIA H100\nNVIDIA H100\n' ;;
esac
"""
ROCM = """
ROCk module is loaded
Agent 1
  Name:                    AMD EPYC 7763 64-Core Processor
Agent 2
  Name:                    gfx1100
  Marketing Name:          Radeon RX 7900 XTX
"""
VULKAN = """
Devices:
GPU0:
	deviceType         = PHYSICAL_DEVICE_TYPE_INTEGRATED_GPU
	deviceName         = Intel(R) Iris(R) Xe Graphics
GPU1:
	deviceType         = PHYSICAL_DEVICE_TYPE_CPU
	deviceName         = llvmpipe (LLVM 15.0.6, 256 bits)
"""


def line(plan: str, name: str) -> str:
    return next(text for text in plan.splitlines() if text.startswith(name + ":")).partition(":")[2].strip()


def test_without_a_gpu_it_is_the_processor(machine: Machine):
    plan = machine.plan()
    assert line(plan, "backend") == "cpu, for the processor"
    assert "-DGGML_NATIVE=ON -DGGML_OPENMP=OFF" in line(plan, "compile")
    # The processor is the real one, and the compiler may get its AMX wrong.
    assert not [text for text in plan.splitlines() if text.startswith("note:") and "AMX" not in text]


def test_a_dry_run_writes_nothing(machine: Machine):
    machine.plan()
    assert list(machine.home.iterdir()) == []


def test_nvidia(machine: Machine):
    machine.add("nvidia-smi", NVIDIA)
    machine.add("nvcc", "exit 0")
    plan = machine.plan()
    assert line(plan, "backend") == "cuda, for NVIDIA H100"
    assert "-DGGML_CUDA=ON -DCMAKE_CUDA_ARCHITECTURES=90" in line(plan, "compile")
    assert "[nvidia]" in plan  # what reads the card's memory comes along


def test_cards_of_two_generations_are_both_compiled_for(machine: Machine):
    machine.add("nvidia-smi", NVIDIA.replace(r"9.0\n9.0", r"8.6\n8.9\n8.6"))
    machine.add("nvcc", "exit 0")
    plan = machine.plan()
    assert "-DCMAKE_CUDA_ARCHITECTURES=86;89" in line(plan, "compile")


def test_a_compiler_beside_the_path_is_named_to_cmake(machine: Machine, tmp_path: Path):
    machine.add("nvidia-smi", NVIDIA)
    nvcc = tmp_path / "cuda" / "bin" / "nvcc"
    nvcc.parent.mkdir(parents=True)
    nvcc.touch()
    nvcc.chmod(stat.S_IRWXU)
    plan = machine.plan(CUDA_HOME=str(tmp_path / "cuda"))
    assert line(plan, "backend").startswith("cuda")
    assert line(plan, "variable") == f"CUDACXX={nvcc}"


def test_a_card_without_the_toolkit_is_said_and_not_chosen(machine: Machine):
    machine.add("nvidia-smi", NVIDIA)
    plan = machine.plan()
    assert line(plan, "backend").startswith("cpu")
    assert says(line(plan, "note"), "NVIDIA H100", "cuda", "(nvcc) is missing")


def test_a_driver_that_does_not_answer_is_no_card(machine: Machine):
    machine.add("nvidia-smi", "echo 'NVIDIA-SMI has failed' >&2; exit 9")
    machine.add("nvcc", "exit 0")
    assert line(machine.plan(), "backend").startswith("cpu")


def test_an_index_of_builds_needs_no_toolkit(machine: Machine):
    machine.add("nvidia-smi", NVIDIA)
    (machine.bin / "c++").unlink()
    plan = machine.plan("--index", "https://wheels.example.org/cu128")
    assert line(plan, "backend").startswith("cuda")
    assert line(plan, "compile").startswith("nothing")
    assert "--wheels https://wheels.example.org/cu128" in plan
    assert "CMAKE_ARGS" not in plan


@pytest.mark.parametrize("is_variable", [False, True])
def test_a_folder_of_wheels_is_an_index_too(machine: Machine, tmp_path: Path, is_variable: bool):
    (machine.bin / "c++").unlink()
    where = str(tmp_path)
    plan = machine.plan(LOCALRUN_WHEELS=where) if is_variable else machine.plan("--index", where)
    assert line(plan, "compile").startswith(f"nothing, if {tmp_path} has a wheel")
    assert f"--wheels {tmp_path}" in plan


def test_rocm(machine: Machine):
    machine.says("rocminfo", ROCM)
    machine.add("hipcc", "exit 0")
    machine.add("hipconfig", '[ "$1" = -l ] && echo /opt/rocm/llvm/bin || echo /opt/rocm')
    plan = machine.plan()
    assert line(plan, "backend") == "rocm, for gfx1100"
    assert "-DGGML_HIP=ON -DGPU_TARGETS=gfx1100" in line(plan, "compile")
    assert line(plan, "variable") == "HIPCXX=/opt/rocm/llvm/bin/clang"


def test_vulkan(machine: Machine):
    machine.says("vulkaninfo", VULKAN)
    machine.add("glslc", "exit 0")
    plan = machine.plan()
    assert line(plan, "backend") == "vulkan, for Intel(R) Iris(R) Xe Graphics"
    assert "-DGGML_VULKAN=ON" in line(plan, "compile")


def test_vulkan_without_its_headers_is_said_and_not_chosen(machine: Machine):
    machine.says("vulkaninfo", VULKAN)
    machine.add("glslc", "exit 0")
    missing = "probe.cpp:2:10: fatal error: vulkan/vulkan.h: No such file or directory"
    machine.add("c++", f'for last; do :; done; [[ $* != *-lvulkan* ]] || {{ echo "{missing}" >&2; exit 1; }}')
    plan = machine.plan()
    assert line(plan, "backend").startswith("cpu")
    assert says(line(plan, "note"), "Vulkan", "libvulkan")


def test_a_vulkan_device_that_is_the_processor_is_none(machine: Machine):
    machine.says("vulkaninfo", VULKAN.replace("INTEGRATED_GPU", "CPU"))
    machine.add("glslc", "exit 0")
    assert line(machine.plan(), "backend").startswith("cpu")


def test_the_makers_own_way_comes_before_vulkan(machine: Machine):
    machine.says("vulkaninfo", VULKAN)
    machine.add("glslc", "exit 0")
    machine.add("nvidia-smi", NVIDIA)
    machine.add("nvcc", "exit 0")
    assert line(machine.plan(), "backend").startswith("cuda")


@pytest.mark.parametrize(("processor", "backend", "is_metal"), [("arm64", "metal", True), ("x86_64", "cpu", False)])
def test_macs(machine: Machine, processor: str, backend: str, is_metal: bool):
    machine.is_system("Darwin", processor)
    machine.add("xcrun", "exit 0")
    plan = machine.plan()
    assert line(plan, "backend").startswith(backend)
    assert ("-DGGML_METAL=ON" in line(plan, "compile")) == is_metal


def test_an_x86_python_on_an_apple_processor_is_refused(machine: Machine):
    machine.is_system("Darwin", "x86_64")
    machine.add("sysctl", '[[ $2 == sysctl.proc_translated ]] && echo 1 || echo "Apple M3"')
    ran = machine.install("--dry-run")
    assert ran.returncode == 1
    assert "under Rosetta" in line(ran.stdout, "problem")
    assert "PYTHON=/opt/homebrew/bin/python3" in line(ran.stdout, "problem")


def test_what_was_asked_for_and_cannot_be_is_refused(machine: Machine):
    ran = machine.install("--backend", "cuda")
    assert ran.returncode == 1
    assert "(nvcc) is missing" in line(ran.stdout, "problem")
    assert list(machine.home.iterdir()) == []


def test_the_processor_may_be_asked_for_beside_a_card(machine: Machine):
    machine.add("nvidia-smi", NVIDIA)
    machine.add("nvcc", "exit 0")
    assert line(machine.plan("--backend", "cpu"), "backend").startswith("cpu")


def test_arguments_of_the_caller_win(machine: Machine):
    # CMake takes the last of several values.
    said = line(machine.plan(CMAKE_ARGS="-DGGML_NATIVE=OFF"), "compile")
    assert said.index("-DGGML_NATIVE=ON") < said.index("-DGGML_NATIVE=OFF")


def test_an_old_python_is_refused_with_the_way_out(machine: Machine):
    machine.add("python3", "exit 1")
    ran = machine.install("--dry-run")
    assert ran.returncode == 1
    assert "Python 3.11" in ran.stdout


def test_no_compiler_is_refused_with_the_way_out(machine: Machine):
    (machine.bin / "c++").unlink()
    ran = machine.install("--dry-run")
    assert ran.returncode == 1
    assert "no C++ compiler was found" in ran.stdout


@pytest.mark.parametrize("option", ["--index", "--package"])
def test_a_folder_that_is_not_there_is_refused_before_anything_is_done(machine: Machine, option: str):
    ran = machine.install("--dry-run", option, "/no/such/folder")
    assert ran.returncode == 1
    assert "there is no" in ran.stdout + ran.stderr
    assert "/no/such/folder" in ran.stdout + ran.stderr


@pytest.mark.parametrize("arguments", [["--backend", "tpu"], ["--backend"], ["--frobnicate"]])
def test_wrong_use(machine: Machine, arguments: list[str]):
    ran = machine.install(*arguments)
    assert ran.returncode == 2
    assert "--help" in ran.stderr


def test_uninstall_takes_what_was_installed_and_nothing_else(machine: Machine, tmp_path: Path):
    prefix = tmp_path / "prefix"
    program = prefix / "lib" / "localrun" / "bin" / "localrun"
    program.parent.mkdir(parents=True)
    program.touch(mode=0o755)
    (prefix / "bin").mkdir()
    (prefix / "bin" / "localrun").symlink_to(program)
    (prefix / "bin" / "other").touch()
    data = machine.home / ".local" / "share" / "localrun" / "models"
    data.mkdir(parents=True)
    said = machine.install("--uninstall", "--dry-run", "--prefix", str(prefix)).stdout
    assert f"would remove {prefix}/lib/localrun" in said
    assert program.exists()
    assert machine.install("--uninstall", "--prefix", str(prefix)).returncode == 0
    assert [path.name for path in (prefix / "bin").iterdir()] == ["other"]
    assert not (prefix / "lib" / "localrun").exists()
    assert data.is_dir()


def test_uninstall_leaves_a_folder_that_is_not_localrun_alone(machine: Machine, tmp_path: Path):
    precious = tmp_path / "lib" / "localrun" / "thesis.txt"
    precious.parent.mkdir(parents=True)
    precious.touch()
    ran = machine.install("--uninstall", "--prefix", str(tmp_path))
    assert ran.returncode == 1
    assert "not an installation of localrun" in ran.stderr
    assert precious.exists()
