"""A native library whose quick kernel for Q4_K is broken: a preloaded function takes its place.

ggml exports its kernels, so whatever is named in LD_PRELOAD is called instead. That is as near to a compiler's mistake
as it gets on a processor that has none.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from localrun.hardware import kernels

# For many rows and for one. x86 since AVX2 and Arm with int8 matrices use them.
_FUNCTIONS = ("ggml_gemm_q4_K_8x8_q8_K", "ggml_gemv_q4_K_8x8_q8_K")
# The probe keeps the priority it was started with: at the lowest it would wait minutes for the tests beside it.
_SOURCE = """
#include <signal.h>
#include <stddef.h>
#include <string.h>
static void broken(float *s, size_t stride, int rows, int columns) {
#ifdef SIGNAL
  raise(SIGNAL);
#endif
  for (int row = 0; row < rows; row++) memset(s + row * stride, 0, columns * sizeof(float));
}
int setpriority(int which, int who, int niceness) { return 0; }
"""
_FUNCTION = """
void %s(int n, float *s, size_t stride, const void *x, const void *y, int rows, int columns) {
  broken(s, stride, rows, columns);
}
"""


def broken_q4_k(folder: Path, signal_name: str = "") -> str:
    """The path for LD_PRELOAD: it raises the signal, or makes all products zero. Skips the test where that is not
    possible."""
    compiler = shutil.which("cc")
    library = kernels.library_folder()
    if sys.platform != "linux" or compiler is None or library is None:
        pytest.skip("needs Linux and a C compiler")
    exported = b"".join(file.read_bytes() for file in library.glob("libggml-cpu*.so"))
    if not all(name.encode() in exported for name in _FUNCTIONS):
        pytest.skip("this build's kernels have other names")
    source, target = folder / "broken.c", folder / f"broken{signal_name}.so"
    source.write_text(_SOURCE + "".join(_FUNCTION % name for name in _FUNCTIONS))
    define = [f"-DSIGNAL={signal_name}"] if signal_name else []
    subprocess.run([compiler, "-shared", "-fPIC", *define, "-o", str(target), str(source)], check=True)
    return str(target)
