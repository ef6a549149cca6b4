"""A child process that speaks the engine's protocol and misbehaves as its first argument says. Run by tests only."""

from __future__ import annotations

import os
import resource
import signal
import sys
import time

import msgspec

from localrun import framing, wire

READY = wire.Ready(
    n_ctx=100, n_ctx_train=100, n_vocab=258, n_slots=2, n_kv_cells=256, n_threads=1, n_gpu_layers=0, model_size_bytes=0,
    kv_size_bytes=0, load_s=0.0, backend="scripted",
)  # fmt: skip
STATS = wire.StepStats(*[0] * 15)


def _send(message: object) -> None:
    sys.stdout.buffer.write(framing.encode(message))
    sys.stdout.buffer.flush()


def _delta(request_id: int, n_output: int, finish: wire.Finish | None = None) -> wire.Step:
    delta = wire.Delta(request_id, wire.Phase.DECODE, 1, n_output, text="x", tokens=[120], finish=finish)
    return wire.Step(sent_at_s=time.monotonic(), deltas=[delta], stats=STATS)


def _answer(message: wire.ToEngine, script: str) -> None:
    if isinstance(message, wire.Submit) and script == "flood":
        for n_output in range(1, 6000):
            _send(_delta(message.id, n_output))
    elif isinstance(message, wire.Submit) and script == "echo":
        _send(_delta(message.id, 1))
        _send(_delta(message.id, 2, wire.Finish.STOP))
    elif isinstance(message, wire.Cancel):
        _send(_delta(message.id, 0, wire.Finish.CANCELLED))
    elif isinstance(message, wire.Count) and script == "full":
        _send(wire.Counted(id=message.id, error="full", error_code="queue_full", retry_after_s=7.0))
    elif isinstance(message, wire.Count):
        _send(wire.Counted(id=message.id, tokens=tuple(b"".join(s.text.encode() for s in message.segments))))
    elif isinstance(message, wire.ClearCache) and script == "echo":
        _send(wire.Cleared(id=message.id, ram_bytes=7 * message.ram, disk_bytes=5 * message.disk))


def main(script: str) -> int:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    print("a line for the log", file=sys.stderr, flush=True)
    opened = framing.decode_to_engine(framing.read_body(sys.stdin.buffer) or b"")
    assert isinstance(opened, wire.Open)
    # Those that die only with quick kernels, and answer without: while loading, or of the first request.
    dies_of = {"quick-load": "load", "quick-submit": "submit", "always-submit": "submit"}.get(script, "")
    if opened.use_extra_bufts is False and script.startswith("quick"):
        dies_of = ""
    if dies_of == "load":
        os.kill(os.getpid(), signal.SIGSEGV)
    if script == "abort":
        os.abort()
    if script == "threads":
        print("libgomp: Thread creation failed: Resource temporarily unavailable", file=sys.stderr, flush=True)
        os.abort()
    if script == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if script == "exit":
        return 3
    if script == "refuse":
        _send(wire.OpenFailed(code="bad_model_file", message="no such architecture"))
        return 1
    if script == "hang":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(600)
    if script == "hang-alpha" and opened.model == "alpha":
        sys.stdin.buffer.read()
        return 0
    n_cells = opened.n_kv_cells
    _send(msgspec.structs.replace(READY, n_slots=opened.n_slots, n_kv_cells=n_cells, n_ctx=n_cells))
    if script == "garbage":
        sys.stdout.buffer.write(b"printf was here, and broke the framing")
        sys.stdout.buffer.flush()
        time.sleep(600)
    if script == "mute":
        os.close(1)
        time.sleep(600)
    if script == "long-line":
        os.write(2, b"y" * 1_000_000 + b"\n")
    while (body := framing.read_body(sys.stdin.buffer)) is not None:
        message = framing.decode_to_engine(body)
        if isinstance(message, wire.Submit) and dies_of == "submit":
            # The second of them, so that there is more than one to answer afterwards.
            if message.id == 2:
                os.kill(os.getpid(), signal.SIGILL)
            continue
        _answer(message, "echo" if "-" in script else script)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
