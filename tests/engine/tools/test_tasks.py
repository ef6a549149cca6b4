"""The tasks of llama.cpp: the quantizer's progress, result, refusal, and its end with its parent."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from localrun.models.gguf.reader import read_header


def start(source: Path, target: Path, file_type: int) -> subprocess.Popen[str]:
    argv = [
        sys.executable,
        "-P",
        "-m",
        "localrun.engine.tools.tasks",
        "quantize",
        str(source),
        str(target),
        str(file_type),
        "1",
    ]
    return subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_a_model_is_quantized(tiny_gguf: Path, tmp_path: Path) -> None:
    process = start(tiny_gguf, tmp_path / "out.gguf", 7)
    assert process.stdout is not None
    lines = [json.loads(line) for line in process.stdout]
    process.communicate()
    assert process.returncode == 0
    total = len(read_header(tiny_gguf).tensors)
    assert [line["done"] for line in lines] == list(range(1, total + 1))
    assert {line["total"] for line in lines} == {total}
    header = read_header(tmp_path / "out.gguf")
    assert header.quantization == "Q8_0"
    assert header.size_bytes < tiny_gguf.stat().st_size


# What is written by C++'s streams has a name in the system's code page on Windows.
_CODE_PAGE = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdio.h>
#include <string.h>
FILE *fopen64(const char *name, const char *mode) {
  if (strchr(mode, 'w'))
    for (const char *at = name; *at; at++)
      if (*at & 0x80) { errno = ENOENT; return NULL; }
  return ((FILE *(*)(const char *, const char *)) dlsym(RTLD_NEXT, "fopen64"))(name, mode);
}
FILE *fopen(const char *name, const char *mode) { return fopen64(name, mode); }
"""


def test_the_folder_may_have_letters_that_the_code_page_lacks(
    tiny_gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = shutil.which("cc")
    if sys.platform != "linux" or compiler is None:
        pytest.skip("needs Linux and a C compiler")
    source, library, folder = tmp_path / "page.c", tmp_path / "page.so", tmp_path / "張 庭"
    source.write_text(_CODE_PAGE)
    subprocess.run([compiler, "-shared", "-fPIC", "-o", str(library), str(source), "-ldl"], check=True)
    folder.mkdir()
    monkeypatch.setenv("LD_PRELOAD", str(library))
    monkeypatch.chdir(folder.parent)
    process = start(tiny_gguf, folder.relative_to(tmp_path) / "out.gguf", 7)
    assert process.stdout is not None
    said = process.stdout.read()
    process.communicate()
    assert process.returncode == 0, said
    assert read_header(folder / "out.gguf").quantization == "Q8_0"


def test_a_file_that_is_none_is_refused(tmp_path: Path) -> None:
    (tmp_path / "bad.gguf").write_bytes(b"GGUF nonsense")
    process = start(tmp_path / "bad.gguf", tmp_path / "out.gguf", 7)
    assert process.stdout is not None
    (line,) = process.stdout
    process.communicate()
    assert process.returncode == 1
    assert json.loads(line)["error"]


@pytest.mark.skipif(sys.platform == "win32", reason="no named pipes")
def test_it_does_not_outlive_its_parent(tmp_path: Path) -> None:
    fifo = tmp_path / "never.gguf"
    os.mkfifo(fifo)  # opening it blocks until somebody writes
    process = start(fifo, tmp_path / "out.gguf", 7)
    assert process.stdin is not None
    process.stdin.close()
    assert process.wait(timeout=60) == 1
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    process.stderr.close()
