"""Prints what this build of llama.cpp is and can use, as JSON: `python -m localrun.engine.tools.build_report [--gpus]`.

With `--gpus` it prints the devices alone.

A process of its own, because loading the native library, which may not even load, is not for the daemon or the command
line. Ends at once.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import json
import sys

from localrun.engine.tools import own_stdout, say


def main() -> None:
    """One object: `version` of the bindings, `ggml`, `library`, `backends`, `modules` (files of backends that were
    opened for this processor) and `skipped` ones with the reason, `gpu_offload`, `cpu_features`, and `devices` as lists
    of `[name, free_bytes, is_shared, total_bytes]`."""
    lines = own_stdout()
    from localrun.engine.native.library import (
        backend_names,
        bound,
        ggml,
        gpus,
        library_folder,
        loaded_modules,
        native,
        skipped_modules,
    )

    devices = gpus()
    if sys.argv[1:] == ["--gpus"]:
        lines.write(json.dumps(devices) + "\n")
        return
    say(
        lines,
        version=importlib.metadata.version("llama-cpp-python"),
        ggml=bound("ggml_version", ctypes.c_char_p)().decode() if hasattr(ggml(), "ggml_version") else "",
        library=str(library_folder()),
        backends=backend_names(),
        modules=loaded_modules,
        skipped=skipped_modules(),
        gpu_offload=bool(native.llama_supports_gpu_offload()),
        cpu_features=cpu_features(native.llama_print_system_info().decode()),
        devices=devices,
    )


def cpu_features(system_info: str) -> list[str]:
    """The names that llama.cpp's line about itself sets to 1 for the CPU: `CPU : AVX = 1 | AVX2 = 1 | ...`."""
    _, _, of_cpu = system_info.rpartition("CPU : ")
    pairs = (pair.partition("=") for pair in of_cpu.split("|"))
    return [name.strip() for name, _, value in pairs if value.strip() == "1"]


if __name__ == "__main__":
    main()
