#!/usr/bin/env python3
"""Checks localrun on the NVIDIA GPU of this machine: `make gpu-check`, or `python packaging/gpu_check.py`.

Builds llama-cpp-python with CUDA for the card into an environment below build/, runs the tests there, and the bench
workloads on random models of the shapes 1B and 8B in Q4_K, at 1 to 64 streams. Compares the bytes that decoding reads
with what the card's memory can deliver. Writes gpu-check.json and gpu-check.png into the folder given with --out.

Without a card it says that it was not run, in the JSON too, and ends with exit code 0, so that it can stand in any
pipeline. With one, exit code 1 says that something failed: the build, the tests, or that nothing lay on the GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
STREAMS = (1, 2, 4, 8, 16, 32, 64)
SHAPES = ("1b", "8b")
WORKLOADS = ("decode", "shared", "stall", "returning", "chat", "fairness", "overload", "restart")
KV_CELLS = 32768
SAMPLE_EVERY_S = 0.5
# Weights, KV cells (128 KiB each, f16, in the 8B shape) and buffers; a smaller card would hold a part of the model.
NEEDED_BYTES = {"1b": 3_500_000_000, "8b": 11_000_000_000}
# A double data rate: two transfers for each clock that the driver tells.
_TRANSFERS_PER_CLOCK = 2
_QUERY = "name,driver_version,memory.total,memory.used,compute_cap"


class Card(NamedTuple):
    name: str
    driver: str
    total_bytes: int
    used_bytes: int
    compute_capability: str


def find_card() -> Card | str:
    """The first NVIDIA card, or why there is none that can be used."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return "there is no NVIDIA card here, or no driver for it (nvidia-smi is not installed)"
    command = [program, f"--query-gpu={_QUERY}", "--format=csv,noheader,nounits"]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    lines = [line for line in ended.stdout.splitlines() if line.count(",") == _QUERY.count(",")]
    if ended.returncode or not lines:
        said = " ".join((ended.stderr or ended.stdout).split())
        return f"nvidia-smi finds no card that can be used: {said or 'it lists none'}"
    return parse_card(lines[0])


def parse_card(line: str) -> Card:
    """A line of nvidia-smi's, in the order of `_QUERY`; memory is in MiB there."""
    name, driver, total, used, capability = (part.strip() for part in line.split(","))
    return Card(name, driver, int(total) * 1024**2, int(used) * 1024**2, capability)


def memory_bandwidth(clock_mhz: int, bus_bits: int) -> float:
    """Bytes per second that the card's memory delivers at most."""
    return _TRANSFERS_PER_CLOCK * clock_mhz * 1e6 * bus_bits / 8


def card_bandwidth() -> float:
    """Of the first card, by NVIDIA's management library. Needs nvidia-ml-py."""
    import pynvml

    pynvml.nvmlInit()
    try:
        card = pynvml.nvmlDeviceGetHandleByIndex(0)
        clock_mhz = pynvml.nvmlDeviceGetMaxClockInfo(card, pynvml.NVML_CLOCK_MEM)
        return memory_bandwidth(clock_mhz, pynvml.nvmlDeviceGetMemoryBusWidth(card))
    finally:
        pynvml.nvmlShutdown()


def build(folder: Path) -> Path:
    """The interpreter of an environment with localrun and a CUDA build. Raises CalledProcessError."""
    python = folder / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    native = [sys.executable, "-m", "localrun.native_build", "install", "--backend", "cuda", "--python", str(python)]
    subprocess.run(native, check=True, cwd=ROOT)
    install = [str(python), "-m", "pip", "install", "--quiet", "--editable", f"{ROOT}[dev,bench,nvidia]"]
    subprocess.run(install, check=True)
    return python


class UsedMemory(threading.Thread):
    """The most memory of the card that was in use while this ran: evidence that a model lay there."""

    def __init__(self, before: Card) -> None:
        super().__init__(daemon=True)
        self._before = before
        self._ended = threading.Event()
        self.most_bytes = 0

    def run(self) -> None:
        while not self._ended.wait(SAMPLE_EVERY_S):
            card = find_card()
            if isinstance(card, Card):
                self.most_bytes = max(self.most_bytes, card.used_bytes - self._before.used_bytes)

    def end(self) -> int:
        self._ended.set()
        self.join()
        return self.most_bytes


def bench(shape: str, card: Card, bandwidth: float, streams: tuple[int, ...], workloads: tuple[str, ...]) -> Any:
    """One model through `localrun bench`. The entry of the model in the JSON; its `problems` are empty when all is
    well."""
    sys.path.insert(0, str(ROOT))
    from tests.support.synthesis.synthesize import synthesize

    with tempfile.TemporaryDirectory(prefix="localrun-gpu-check-") as folder:
        model, report = Path(folder, f"{shape}-q4_k.gguf"), Path(folder, "bench.json")
        print(f"gpu-check: {shape} Q4_K at {', '.join(str(n) for n in streams)} streams", flush=True)
        synthesize(shape, "Q4_K", model)
        environ = {name: value for name, value in os.environ.items() if not name.startswith("LOCALRUN_")}
        environ |= {"LOCALRUN_HOME": str(Path(folder, "home")), "LOCALRUN_PORT": "0"}
        command = [
            sys.executable,
            "-P",
            "-m",
            "localrun",
            "bench",
            *workloads,
            "--model",
            str(model),
            "--json",
            str(report),
        ]
        command += ["--streams", ",".join(str(n) for n in streams), "--slots", str(max(streams))]
        command += ["--kv-cells", str(KV_CELLS), "--bandwidth", str(bandwidth / 1e9)]
        used = UsedMemory(card)
        used.start()
        status = subprocess.run(command, env=environ, check=False).returncode
        used_bytes = used.end()
        outcome = json.loads(report.read_bytes()) if report.exists() else {"curves": {}, "results": []}
        return summary(
            outcome, status=status, used_bytes=used_bytes, weights_bytes=model.stat().st_size, bandwidth=bandwidth
        )


def summary(outcome: Any, *, status: int, used_bytes: int, weights_bytes: int, bandwidth: float) -> dict[str, Any]:
    """What is kept of a bench report: the curve with the bandwidth that each point achieves, and all metrics.

    The bound is `streams * bandwidth / bytes of a step`, so the share of the bound is the share of the bandwidth.
    """
    points = next(iter(outcome["curves"].values()), [])
    curve = [
        {
            "streams": point["streams"],
            "tokens_per_s": point["tokens_per_s"],
            "prefill_tokens_per_s": point["prefill_tokens_per_s"],
            "bandwidth_share": point["tokens_per_s"] / point["bound_tokens_per_s"],
            "bandwidth_bytes_per_s": point["tokens_per_s"] / point["bound_tokens_per_s"] * bandwidth,
        }
        for point in points
        if point["bound_tokens_per_s"]
    ]
    problems = []
    if status:
        problems.append(f"localrun bench ended with status {status}")
    if not curve:
        problems.append("decoding was not measured")
    # All layers but perhaps the input's embeddings, which stay in main memory.
    if used_bytes < weights_bytes // 2:
        problems.append(
            f"the card's memory in use grew by {used_bytes} bytes; the model has {weights_bytes}: it lay elsewhere"
        )
    return {
        "problems": problems,
        "weights_bytes": weights_bytes,
        "gpu_memory_bytes": used_bytes,
        "decode": curve,
        "workloads": {
            result["workload"]: {"note": result["note"], "metrics": result["metrics"]} for result in outcome["results"]
        },
    }


def run_tests() -> dict[str, Any]:
    """The project's own tests, in this environment."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not slow"]
    print("gpu-check: tests", flush=True)
    ended = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    lines = ended.stdout.strip().splitlines()
    return {"status": ended.returncode, "last_line": lines[-1] if lines else "", "failures": [
        line for line in lines if line.startswith(("FAILED", "ERROR"))
    ]}  # fmt: skip


def draw(path: Path, report: dict[str, Any]) -> None:
    """Decode rates and the share of the bandwidth, over the number of streams."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 9), layout="constrained")
    rates, shares = figure.subplots(2, 1)
    for marker, (shape, model) in zip("os^", report["models"].items(), strict=False):
        streams = [point["streams"] for point in model["decode"]]
        rates.plot(streams, [point["tokens_per_s"] for point in model["decode"]], marker=marker, label=f"{shape} Q4_K")
        percent = [100 * point["bandwidth_share"] for point in model["decode"]]
        shares.plot(streams, percent, marker=marker, label=f"{shape} Q4_K")
    card = report["card"]
    rates.set(title=f"{card['name']}, driver {card['driver']}", ylabel="tokens per second, all streams", yscale="log")
    bandwidth = report["bandwidth_bytes_per_s"] / 1e9
    shares.set(ylabel=f"% of the memory's {bandwidth:.0f} GB/s", xlabel="streams", ylim=(0, None))
    for axes in (rates, shares):
        axes.set_xscale("log", base=2)
        axes.set_xticks(list(STREAMS), [str(n) for n in STREAMS])
        axes.grid(visible=True, which="both", alpha=0.3)
        if axes.lines:
            axes.legend()
    figure.savefig(path, format="png", dpi=120)


def check(card: Card, args: argparse.Namespace) -> dict[str, Any]:
    """Everything that runs in the environment with the CUDA build: the report."""
    command = [sys.executable, "-P", "-m", "localrun.engine.tools.tasks", "build_report"]
    built = subprocess.run(command, capture_output=True, text=True, check=False)
    report: dict[str, Any] = {"ran": True, "problems": [], "card": card._asdict(), "models": {}}
    if built.returncode:
        report["problems"].append(f"llama.cpp does not load: {built.stderr.strip()[-400:]}")
        return report
    report["build"] = json.loads(built.stdout.strip().splitlines()[-1])
    if not report["build"]["devices"]:
        backends = ", ".join(report["build"]["backends"])
        report["problems"].append(f"this build of llama.cpp (backends {backends}) sees no GPU, so nothing was measured")
        return report
    report["bandwidth_bytes_per_s"] = bandwidth = card_bandwidth()
    if not args.skip_tests:
        report["tests"] = run_tests()
        if report["tests"]["status"]:
            report["problems"].append(f"tests: {report['tests']['last_line']}")
    for shape in args.shapes:
        if card.total_bytes < NEEDED_BYTES.get(shape, 0):
            report["models"][shape] = {"problems": [], "skipped": "the card is too small for it", "decode": []}
            continue
        report["models"][shape] = model = bench(shape, card, bandwidth, tuple(args.streams), tuple(args.workloads))
        report["problems"] += [f"{shape}: {problem}" for problem in model["problems"]]
    if not any(model["decode"] for model in report["models"].values()):
        report["problems"].append("no model was measured")
    draw(args.out / "gpu-check.png", report)
    return report


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "gpu-check", help="folder of the JSON and PNG")
    parser.add_argument("--built", action="store_true", help="do not build: this interpreter has localrun with CUDA")
    parser.add_argument("--skip-tests", action="store_true")
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES))
    parser.add_argument("--streams", nargs="+", type=int, default=list(STREAMS))
    parser.add_argument("--workloads", nargs="+", default=list(WORKLOADS))
    args = parser.parse_args(argv)
    args.out = args.out.absolute()
    args.out.mkdir(parents=True, exist_ok=True)
    card = find_card()
    if isinstance(card, str):
        print(f"gpu-check: NOT RUN: {card}")
        # A picture of an earlier run would be taken for this one's.
        (args.out / "gpu-check.png").unlink(missing_ok=True)
        _write(args.out, {"ran": False, "reason": card})
        return 0
    if not args.built:
        try:
            python = build(args.out / "venv")
        except subprocess.CalledProcessError as error:
            _write(args.out, {"ran": True, "problems": [f"the build failed: {error}"], "card": card._asdict()})
            print(f"gpu-check: FAILED: the build failed (is the CUDA toolkit installed?): {error}")
            return 1
        return subprocess.run([str(python), __file__, *argv, "--built"], check=False).returncode
    report = check(card, args)
    _write(args.out, report)
    for problem in report["problems"]:
        print(f"gpu-check: FAILED: {problem}")
    if not report["problems"]:
        print(f"gpu-check: passed on {card.name}; see {args.out / 'gpu-check.json'} and gpu-check.png")
    return 1 if report["problems"] else 0


def _write(folder: Path, report: dict[str, Any]) -> None:
    (folder / "gpu-check.json").write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
