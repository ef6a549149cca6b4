"""A projector's memory, estimated and measured, in a table: `python -m tests.models.projector_rss FOLDER`.

A process of its own loads the built-in model, then a projector of random weights, and encodes the largest picture or
the longest piece of audio that it takes at once. What counts is its peak above what it had before the projector.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

from localrun.models.builtin import model_path
from localrun.models.gguf.reader import read_header
from localrun.models.memory import ProjectorMemory, projector_memory
from tests.projector_file import parts_of, write_parts

_MIB = 1024 * 1024


class Case(NamedTuple):
    """`shape` as `projector_file.parts_of` takes it; `pixels` are width and height, none for audio."""

    name: str
    kind: str
    shape: dict[str, int]
    pixels: tuple[int, int] = (0, 0)


_SIGLIP_BASE = {"n_embd": 768, "n_ff": 3072, "n_heads": 12, "patch": 16}

CASES = (
    Case("SigLIP base, 12 layers, 512 px", "gemma3",
         {**_SIGLIP_BASE, "n_layers": 12, "image": 512, "scale": 4}, (640, 480)),
    Case("SigLIP base, 1 layer, 1024 px", "gemma3",
         {**_SIGLIP_BASE, "n_layers": 1, "image": 1024, "scale": 4}, (640, 480)),
    Case("SigLIP so400m, 2 layers, 896 px", "gemma3",
         {"n_embd": 1152, "n_ff": 4304, "n_heads": 16, "n_layers": 2, "patch": 14, "image": 896, "scale": 4},
         (640, 480)),
    Case("SigLIP base in tiles, 2 layers, 512 px", "idefics3",
         {**_SIGLIP_BASE, "n_layers": 2, "image": 512, "scale": 4}, (900, 800)),
    Case("Qwen-VL, narrow, 1 layer, any size", "qwen2vl_merger",
         {"n_embd": 320, "n_ff": 1280, "n_heads": 4, "n_layers": 1, "patch": 14, "image": 560}, (1792, 1792)),
    Case("Whisper large, 2 layers", "ultravox", {"n_embd": 1280, "n_ff": 5120, "n_heads": 20, "n_layers": 2}),
)  # fmt: skip


class Measured(NamedTuple):
    """In bytes."""

    estimate: ProjectorMemory
    peak_bytes: int

    @property
    def error(self) -> float:
        return self.estimate.total_bytes / self.peak_bytes - 1


def measure(case: Case, folder: Path) -> Measured:
    """Writes the projector of `case` below `folder`. Linux only."""
    parts = parts_of(case.kind, read_header(model_path()).n_embd, **case.shape)
    path = write_parts(folder / "mmproj.gguf", parts, is_half=True)
    command = [sys.executable, "-c", _CHILD, str(model_path()), str(path), *map(str, case.pixels)]
    ran = subprocess.run(command, capture_output=True, text=True, check=True)
    estimate = projector_memory(read_header(path, kind="projector"))
    path.unlink()
    return Measured(estimate, json.loads(ran.stdout))


_CHILD = """
import ctypes, json, sys
import llama_cpp
from llama_cpp import mtmd_cpp as mtmd

def memory(name):
    for line in open("/proc/self/status"):
        if line.startswith(name + ":"):
            return int(line.split()[1]) * 1024

quiet = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)(lambda *_: None)
llama_cpp.llama_log_set(quiet, None)
mtmd.mtmd_helper_log_set(quiet, None)
parameters = llama_cpp.llama_model_default_params()
parameters.n_gpu_layers = 0
model = llama_cpp.llama_model_load_from_file(sys.argv[1].encode(), parameters)
before = memory("VmRSS")
opening = mtmd.mtmd_context_params_default()
opening.use_gpu = False
opening.n_threads = 2
context = mtmd.mtmd_init_from_file(sys.argv[2].encode(), model, opening)
assert context
width, height = map(int, sys.argv[3:])
if width:
    pixels = (ctypes.c_ubyte * (3 * width * height))(*range(256))
    bitmap = mtmd.mtmd_bitmap_init(width, height, pixels)
else:
    sound = (ctypes.c_float * (16_000 * 30))()
    bitmap = mtmd.mtmd_bitmap_init_from_audio(16_000 * 30, sound)
marker = mtmd.mtmd_default_marker()
said = mtmd.mtmd_input_text(text=marker, text_len=len(marker), add_special=False, parse_special=False)
chunks = mtmd.mtmd_input_chunks_init()
assert not mtmd.mtmd_tokenize(context, chunks, ctypes.byref(said), (mtmd.mtmd_bitmap_p_ctypes * 1)(bitmap), 1)
for index in range(mtmd.mtmd_input_chunks_size(chunks)):
    chunk = mtmd.mtmd_input_chunks_get(chunks, index)
    if mtmd.mtmd_input_chunk_get_type(chunk):
        assert not mtmd.mtmd_encode_chunk(context, chunk)
print(json.dumps(memory("VmHWM") - before))
"""


def main() -> None:
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    print("| projector | weights | compute | estimate | measured | off |")
    print("|---|---|---|---|---|---|")
    for case in CASES:
        seen = measure(case, folder)
        sizes = (seen.estimate.weights_bytes, seen.estimate.compute_bytes, seen.estimate.total_bytes, seen.peak_bytes)
        print(f"| {case.name} | {' | '.join(str(size // _MIB) for size in sizes)} | {seen.error:+.1%} |", flush=True)


if __name__ == "__main__":
    main()
