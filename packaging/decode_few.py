"""Prints what a build of llama.cpp computes: the module that computes, and greedy tokens of a small model, as JSON.

    PYTHONPATH=FOLDER python packaging/decode_few.py MODEL.gguf

FOLDER holds an unpacked wheel of llama-cpp-python. Meant to run under an emulator of another processor as well, so it
asks little: a short prompt in one batch, which takes the path of many rows, and then a few tokens one by one.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import sys
import types
from pathlib import Path

# The package's own module imports numpy, whose arithmetic refuses some emulated processors.
_package = types.ModuleType("llama_cpp")
_package.__path__ = [str(Path(folder, "llama_cpp")) for folder in sys.path if Path(folder, "llama_cpp").is_dir()][:1]
sys.modules["llama_cpp"] = _package

import llama_cpp.llama_cpp as native  # noqa: E402

PROMPT, N_OUTPUT = b"Once upon a time there was a fox", 12


def loaded_module() -> str:
    """The CPU backend that this process has opened: `haswell` of libggml-cpu-haswell.so, empty for a plain build."""
    found = re.findall(r"libggml-cpu-?([\w.]*?)\.so", Path("/proc/self/maps").read_text(encoding="utf-8"))
    return found[0] if found else ""


def main(model_path: str) -> None:
    library = native._lib
    if library.ggml_backend_reg_count() == 0:
        library.ggml_backend_load_all_from_path(os.fsencode(Path(library._name).parent))
    native.llama_backend_init()
    native.llama_log_set(_quiet, ctypes.c_void_p())
    model = native.llama_model_load_from_file(model_path.encode(), native.llama_model_default_params())
    parameters = native.llama_context_default_params()
    parameters.n_ctx, parameters.n_threads, parameters.n_threads_batch = 64, 1, 1
    context = native.llama_init_from_model(model, parameters)
    vocabulary = native.llama_model_get_vocab(model)
    n_vocabulary = native.llama_vocab_n_tokens(vocabulary)
    prompt = (native.llama_token * 64)()
    rows = prompt[: native.llama_tokenize(vocabulary, PROMPT, len(PROMPT), prompt, len(prompt), True, False)]
    tokens: list[int] = []
    while len(tokens) < N_OUTPUT:
        array = (native.llama_token * len(rows))(*rows)
        if native.llama_decode(context, native.llama_batch_get_one(array, len(rows))):
            sys.exit("llama_decode failed")
        logits = native.llama_get_logits_ith(context, -1)
        rows = [max(range(n_vocabulary), key=lambda token: logits[token])]
        tokens += rows
    print(json.dumps({"module": loaded_module(), "tokens": tokens}))


_quiet = native.llama_log_callback(lambda level, text, data: None)

if __name__ == "__main__":
    main(sys.argv[1])
