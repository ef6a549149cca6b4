"""What is kept about kernels: for which pair, which models may use them, and files that are damaged."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from localrun.hardware import kernels
from localrun.hardware.kernels import Crash, Fault, Pair, Verdict

PAIR = Pair("1" * 16, "2" * 16)
FAULTY = Verdict(
    is_probed=True, quick_types=("F16", "Q4_0", "Q4_K"), faults=(Fault("F16", "recurrent", "crash (SIGSEGV)"),)
)


@pytest.fixture
def library(tmp_path: Path) -> Path:
    folder = tmp_path / "lib"
    folder.mkdir()
    (folder / "libggml-cpu.so").write_bytes(b"code")
    (folder / "libllama.so").write_bytes(b"more code")
    return folder


def test_what_was_kept_is_read_and_other_pairs_know_nothing(tmp_path: Path) -> None:
    kernels.keep(tmp_path / "new" / "kernels", PAIR, FAULTY)
    assert kernels.read(tmp_path / "new" / "kernels", PAIR) == FAULTY
    assert kernels.read(tmp_path / "new" / "kernels", PAIR._replace(processor="3" * 16)) == Verdict()
    assert [file.name for file in (tmp_path / "new" / "kernels").iterdir()] == [PAIR.file_name]


@pytest.mark.parametrize(
    "content", [b"", b"{", b"\xff\xfe", b"[]", b'{"faults": 3}', b'{"version": 0, "is_probed": true}']
)
def test_a_damaged_or_older_file_is_as_none(content: bytes, tmp_path: Path) -> None:
    (tmp_path / PAIR.file_name).write_bytes(content)
    assert kernels.read(tmp_path, PAIR) == Verdict()
    kernels.keep(tmp_path, PAIR, FAULTY)
    assert kernels.read(tmp_path, PAIR) == FAULTY


def test_a_folder_in_the_files_place_is_as_none_and_keeping_raises(tmp_path: Path) -> None:
    (tmp_path / PAIR.file_name).mkdir()
    assert kernels.read(tmp_path, PAIR) == Verdict()
    with pytest.raises(OSError, match=r"."):
        kernels.keep(tmp_path, PAIR, FAULTY)
    assert [file.name for file in tmp_path.iterdir()] == [PAIR.file_name], "nothing is left behind"


def test_only_models_with_the_type_and_the_memory_do_without() -> None:
    assert not FAULTY.allows_quick({"F32", "F16"}, "recurrent")
    assert FAULTY.allows_quick({"F32", "F16"}, "attention")
    assert FAULTY.allows_quick({"F32", "Q4_0"}, "recurrent")
    assert Verdict().allows_quick({"F16"}, "recurrent")


def test_a_crash_concerns_models_that_have_all_of_its_types() -> None:
    verdict = FAULTY.with_crash({"F32", "Q4_K", "Q6_K"}, "attention", "was killed by SIGSEGV", "some")
    assert not verdict.allows_quick({"F32", "Q6_K", "Q4_K"}, "attention")
    assert not verdict.allows_quick({"Q6_K", "Q4_K", "Q5_K"}, "attention")
    assert verdict.allows_quick({"Q4_K"}, "attention")
    assert verdict.allows_quick({"Q6_K", "Q4_K"}, "window")
    again = verdict.with_crash({"Q6_K", "Q4_K"}, "attention", "was killed by SIGILL", "other")
    assert again.crashes == (Crash(("Q4_K", "Q6_K"), "attention", "was killed by SIGILL", "other"),)
    assert again.faults == FAULTY.faults


def test_a_pair_changes_with_the_library_and_with_nothing_else(library: Path) -> None:
    first = kernels.present_pair(library)
    assert first is not None
    assert kernels.present_pair(library) == first
    os.utime(library / "libggml-cpu.so", ns=(1, 1))
    touched = kernels.present_pair(library)
    assert touched is not None
    assert touched.library != first.library
    assert touched.processor == first.processor
    (library / "libllama.so").write_bytes(b"other")
    assert kernels.present_pair(library) not in (first, touched)
    assert kernels.present_pair(library / "none") is None


def test_the_installed_library_is_found_as_its_package_finds_it(library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    installed = kernels.library_folder()
    assert installed is not None
    assert list(installed.glob("*llama*"))
    monkeypatch.setenv("LLAMA_CPP_LIB_PATH", str(library))
    assert kernels.library_folder() == library


def test_a_processor_is_what_it_can_do_and_not_what_it_does(tmp_path: Path) -> None:
    def lines(text: str) -> list[str]:
        (tmp_path / "cpuinfo").write_text(text)
        return kernels.processor_lines(tmp_path / "cpuinfo")

    text = (
        "processor\t: 0\nmodel name\t: Some\ncpu MHz\t\t: {}\nflags\t\t: fpu avx{}\n\nprocessor\t: 1\nflags\t\t: fpu\n"
    )
    assert lines(text.format(1000, "")) == lines(text.format(3000, ""))
    assert lines(text.format(1000, "")) != lines(text.format(1000, " amx_int8"))
    assert kernels.processor_lines(tmp_path / "none"), "a system without the file has another word for it"


def test_a_crash_of_a_model_without_quick_kernels_says_nothing_about_them():
    assert Verdict().with_crash({"F32"}, "attention", "was killed by SIGSEGV", "some") == Verdict()
    known = Verdict(is_probed=True, quick_types=("Q4_0", "Q4_K"))
    assert known.with_crash({"F16", "F32"}, "attention", "was killed by SIGSEGV", "tiny") == known
    assert not known.with_crash({"Q4_0"}, "attention", "was killed by SIGSEGV", "some").allows_quick(
        {"Q4_0"}, "attention"
    )
