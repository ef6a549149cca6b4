"""What the most expensive headers cost: less than 64 MiB and a second, whatever they claim."""

from __future__ import annotations

import os
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from localrun.models.gguf.reader import MAX_ENTRIES, MAX_SHARDS, MAX_TENSORS
from tests.models.handmade import (
    ENTRIES,
    F64,
    STRING,
    TYPE_F32,
    U32,
    U64,
    array,
    entry,
    file_bytes,
    tensor,
    text,
    u32,
    u64,
)

# Reads every file of a folder; prints for each the process's peak memory so far, less that at the start, and CPU time.
# The first line is how long this machine takes now for millions of the smallest calls: a factor for all other times.
MEASURE = """
import sys, time
from pathlib import Path
from localrun.errors import BadModelFile
from localrun.models.gguf.reader import read_header
def peak_kib():
    return int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0])
before = peak_kib()
started = time.process_time()
for number in range(3_000_000):
    divmod(number, 7)
print(time.process_time() - started)
for path in sorted(Path(sys.argv[1]).iterdir()):
    if path.stem.endswith("-of-01000") and "-00001-" not in path.name:
        continue
    started = time.process_time()
    try:
        header = read_header(path)
        header.control_tokens()
        result = "read"
    except BadModelFile as error:
        result = "refused"
    print(path.name, result, (peak_kib() - before) // 1024, time.process_time() - started)
"""


# About a second on an idle machine, which takes 0.2 s for these calls.
MOST_FACTORS = 5
U16 = 2
TERABYTE = 1 << 40
N_TEXTS = 1_999_999
N_CONTROL = 16_000


def vocabulary() -> bytes:
    texts = text("token") * N_CONTROL + text("") * (N_TEXTS - N_CONTROL)
    types = u32(1) * (N_TEXTS - N_CONTROL) + u32(3) * N_CONTROL
    return file_bytes(
        (
            *ENTRIES[:4],
            array("tokenizer.ggml.tokens", STRING, N_TEXTS, texts),
            array("tokenizer.ggml.token_type", 5, N_TEXTS, types),
        ),
        (),
    )


def tensors() -> bytes:
    described = (tensor(f"tensor-{i:056}", (1, 1, 1, 8), TYPE_F32, 32 * i) for i in range(MAX_TENSORS))
    return file_bytes(ENTRIES, tuple(described), data=bytes(32 * MAX_TENSORS))


def split(folder: Path) -> dict[str, str]:
    """A model of as many files as may be, which use up the limits together."""
    n_tensors = (MAX_TENSORS - 2) // (MAX_SHARDS - 1)
    n_texts = N_TEXTS // MAX_SHARDS
    for number in range(MAX_SHARDS):
        place = (
            entry("split.no", U16, struct.pack("<H", number)),
            entry("split.count", U16, struct.pack("<H", MAX_SHARDS)),
            entry("split.tensors.count", U32, u32(2 + n_tensors * (MAX_SHARDS - 1))),
        )
        path = folder / f"split-{number + 1:05}-of-{MAX_SHARDS:05}.gguf"
        if number == 0:
            path.write_bytes(file_bytes((*ENTRIES, *place)))
            continue
        described = (tensor(f"t{number:05}-{i:050}", (8,), TYPE_F32, 32 * i) for i in range(n_tensors))
        vocabulary = array("tokenizer.x", STRING, n_texts, text("") * n_texts)
        path.write_bytes(file_bytes((*place, vocabulary), tuple(described), data=bytes(32 * n_tensors)))
    return {f"split-00001-of-{MAX_SHARDS:05}.gguf": ""}


def with_entries(*more: bytes) -> bytes:
    return file_bytes((*ENTRIES, *more))


@pytest.mark.skipif(sys.platform != "linux", reason="peak memory is read from /proc")
def test_the_most_expensive_headers_stay_within_memory_and_time(tmp_path: Path) -> None:
    wide_text = text("\U0001f600" + "a" * 100_000)
    costly = {
        "16,384-tensors": tensors(),
        "4,096-entries": with_entries(
            *(entry(f"key-{i:01000}", F64, bytes(8)) for i in range(MAX_ENTRIES - len(ENTRIES)))
        ),
        "arrays-of-texts": with_entries(*(array(f"k{i}", STRING, 1024, text("ab") * 1024) for i in range(62))),
        "vocabulary": vocabulary(),
        "wide-texts": with_entries(*(entry(f"k{i}", STRING, wide_text) for i in range(40))),
    }
    # The rest of these is zeros that take no room on the disk.
    refused = {
        "numbers-of-1-TB": with_entries(array("k", U64, TERABYTE // 8, b"")),
        "text-of-1-TB": with_entries(entry("k", STRING, u64(TERABYTE))),
        "texts-without-end": file_bytes((array("tokenizer.x", STRING, N_TEXTS, b""),), (), data=b""),
    }
    for name, content in (costly | refused).items():
        (tmp_path / name).write_bytes(content)
    costly |= split(tmp_path)
    for name in refused:
        os.truncate(tmp_path / name, 2 * TERABYTE)
    run = subprocess.run([sys.executable, "-c", MEASURE, str(tmp_path)], capture_output=True, text=True, timeout=60)
    assert run.returncode == 0, run.stderr
    factor_s, *rows = [line.split() for line in run.stdout.splitlines()]
    assert {name: result for name, result, _, _ in rows} == dict.fromkeys(costly, "read") | dict.fromkeys(
        refused, "refused"
    )
    for _, _, peak_mib, cpu_s in rows:
        assert int(peak_mib) < 64, run.stdout
        assert float(cpu_s) < MOST_FACTORS * float(factor_s[0]), run.stdout
