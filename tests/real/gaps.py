"""How long streams wait for a token while something large happens beside them.

    python -m tests.real.gaps MODEL.gguf [--tokens 4096] [--one-pool] [--slots 4] [--target-ms 45]

Three greedy streams run all the time. For each event the longest time between two tokens of any of them is printed, and
the longest that `Engine.step` took for anything but decoding, by the clock and in processor time of its thread, which
other programs change less. A chat of `--tokens` tokens is not computed: its
state is made of a short one that was, and put into the cache, for what copies take does not depend on what the bytes
say.
"""

from __future__ import annotations

import argparse
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from localrun.engine.cache.tree import PrefixKey
from localrun.engine.engine import Limits
from localrun.engine.native.llama import LlamaBackend
from localrun.hardware.thread_choice import Threads
from localrun.wire import Sampling, Submit
from tests.engine.stepped import SteppedEngine

GREEDY = Sampling(temperature=0)
N_STREAMS = 3
BLOCK_TOKENS = 256
WINDOW_S = 1.0  # after an event, for what it leaves to be done later


class Gaps:
    """An engine with its streams. `longest_s` is the longest gap since `begin`."""

    def __init__(self, path: Path, *, n_cells: int, n_slots: int, split: bool, n_threads: int, target_s: float) -> None:
        self.backend = LlamaBackend(
            str(path), n_cells=n_cells, n_seqs=n_slots, n_spare_seqs=64, n_batch=512, n_threads=n_threads,
            n_gpu_layers=0, kv_type="f16", may_split=split,
        )  # fmt: skip
        self.backend.set_threads(Threads(n_threads, n_threads), may_use_fewer=True)
        self.backend.n_ctx = self.backend.n_cells  # more than the model was made for, which only its answers show
        self.engine = SteppedEngine(self.backend, Limits(n_slots, 64, target_s, 6 << 30), time.perf_counter)
        self.longest_s = self.longest_decode_s = self.longest_rest_s = self.longest_cpu_s = 0.0
        self._last_s: dict[int, float] = {}
        self._ended: set[int] = set()
        self._decode_s = self._decode_cpu_s = 0.0
        self._n_asked = N_STREAMS
        self._arrived: list[Callable[[], None]] = []
        for name in ("decode", "sample"):
            setattr(self.backend, name, self._timed(getattr(self.backend, name)))

    def _timed(self, call: Callable) -> Callable:
        def timed(*given: object) -> object:
            began_s, began_cpu_s = time.perf_counter(), time.thread_time()
            try:
                return call(*given)
            finally:
                took_s = time.perf_counter() - began_s
                self._decode_s += took_s
                self.longest_decode_s = max(self.longest_decode_s, took_s)
                self._decode_cpu_s += time.thread_time() - began_cpu_s

        return timed

    def start(self) -> None:
        for stream in range(N_STREAMS):
            self._submit(stream, [300 + stream * 7 + at * 11 % 900 for at in range(40)], n_predict=100_000)
        self.run_for(2.0)

    def ask(self, tokens: list[int], n_predict: int = 4) -> int:
        self._n_asked += 1
        self._submit(self._n_asked, tokens, n_predict=n_predict)
        return self._n_asked

    def _submit(self, request_id: int, tokens: list[int], *, n_predict: int) -> None:
        submit = Submit(
            id=request_id, sampling=GREEDY, n_predict=n_predict, ignore_eos=True, arrived_at_s=time.perf_counter()
        )
        self.engine.submit(submit, tokens)

    def step(self) -> None:
        while self._arrived:
            self._arrived.pop()()
        self._decode_s = self._decode_cpu_s = 0.0
        began_s, began_cpu_s = time.perf_counter(), time.thread_time()
        step = self.engine.step()
        now_s = time.perf_counter()
        self.longest_cpu_s = max(self.longest_cpu_s, time.thread_time() - began_cpu_s - self._decode_cpu_s)
        background = self.backend.worker
        if not (background and background.is_busy):  # else most of it is waiting for that
            self.longest_rest_s = max(self.longest_rest_s, now_s - began_s - self._decode_s)
        for delta in step.deltas if step else ():
            if delta.finish is not None:
                self._ended.add(delta.id)
            if delta.id < N_STREAMS and delta.tokens:
                self.longest_s = max(self.longest_s, now_s - self._last_s.get(delta.id, now_s))
                self._last_s[delta.id] = now_s

    def run_for(self, seconds: float) -> None:
        ends_s = time.perf_counter() + seconds
        while time.perf_counter() < ends_s:
            self.step()

    def until_ended(self, request_id: int) -> None:
        while request_id not in self._ended:
            self.step()

    def measure(self, name: str, event: Callable[[], None]) -> None:
        self.run_for(0.5)
        self.longest_s = self.longest_decode_s = self.longest_rest_s = self.longest_cpu_s = 0.0
        began_s = time.perf_counter()
        event()
        self.run_for(WINDOW_S)
        took_s = time.perf_counter() - began_s
        longest = (self.longest_s, self.longest_decode_s, self.longest_rest_s, self.longest_cpu_s)
        print(f"{name:44}", *(f"{seconds * 1e3:9.0f} ms" for seconds in longest), f"{took_s:8.1f} s", flush=True)


def seed(gaps: Gaps, tokens: list[int]) -> None:
    """The cache has these tokens from now on, in memory."""
    backend = gaps.backend
    batch = backend.batch
    seq = backend.n_seqs - 1
    batch.token[:BLOCK_TOKENS], batch.pos[:BLOCK_TOKENS] = tokens[:BLOCK_TOKENS], range(BLOCK_TOKENS)
    batch.seq[:BLOCK_TOKENS], batch.wants_logits[:BLOCK_TOKENS] = seq, 0
    backend.decode(BLOCK_TOKENS)
    (data,) = backend.state_slices(seq, [(0, BLOCK_TOKENS)])
    backend.seq_remove(seq, 0)
    parent, tiers, key = None, gaps.engine.cache.tiers, PrefixKey(tokens)
    for start in range(0, len(tokens), BLOCK_TOKENS):
        part = tokens[start : start + BLOCK_TOKENS]
        rows = np.array(data[: len(part) * backend.state_token_bytes])
        parent = tiers.tree.graft(parent, start, part, root=key.root)
        assert tiers.keep(parent, rows)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", type=Path)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--slots", type=int, default=4)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--one-pool", action="store_true")
    parser.add_argument("--target-ms", type=float, default=45)
    asked = parser.parse_args()
    n_tokens = asked.tokens
    n_own = 4096  # a stream's, which must not outgrow its share while this lasts
    n_cells = 2 * n_tokens + 4 * n_own if asked.one_pool else (n_tokens + n_own) * asked.slots
    gaps = Gaps(
        asked.model,
        n_cells=n_cells,
        n_slots=asked.slots,
        split=not asked.one_pool,
        n_threads=asked.threads,
        target_s=asked.target_ms / 1e3,
    )
    chats = [[500 + which + at * 13 % 1300 for at in range(n_tokens)] for which in range(3)]
    for chat in chats:
        seed(gaps, chat)
    gaps.start()
    layout = "one pool" if asked.one_pool else "split"
    print(f"{asked.model.name}, {n_tokens} tokens, {layout}, target {asked.target_ms} ms")
    print(f"{'event':44} {'gap':>12} {'decode':>12} {'rest':>12} {'rest, CPU':>12} {'took':>10}")
    gaps.measure("nothing", lambda: gaps.run_for(3.0))

    def restore() -> None:
        gaps.until_ended(gaps.ask([*chats[0], *range(300, 340)]))

    def grow() -> None:
        gaps.until_ended(gaps.ask([*chats[0], *range(300, 340), *range(400, 500)]))
        gaps.run_for(3.0)

    def another() -> None:
        gaps.until_ended(gaps.ask([*chats[1], *range(300, 340)]))

    def cancel() -> None:
        request = gaps.ask([*chats[2], *range(300, 700)], n_predict=1000)
        gaps.run_for(0.1)
        gaps.engine.cancel(request)

    def save_whole() -> None:
        """Nothing of what runs is saved when it ends."""
        request = gaps.ask([*chats[1], *range(600, 640)], n_predict=1000)
        gaps.run_for(1.0)
        gaps.engine.clear_cache(ram=True, disk=True)
        gaps.run_for(0.2)
        gaps.engine.cancel(request)
        gaps.run_for(3.0)
        for chat in (chats[0], chats[2]):
            gaps.until_ended(gaps.ask(chat[:600]))

    def long_prompt() -> None:
        text = "The quick brown fox jumps over the lazy dog. " * 22_000

        def read() -> None:
            tokens = gaps.backend.tokenize(text, parse_special=False)
            gaps._arrived.append(lambda: gaps.ask(tokens) and None)

        thread = threading.Thread(target=read)
        thread.start()
        while thread.is_alive() or gaps._arrived:
            gaps.step()

    gaps.measure("a chat is restored, and goes on", restore)
    gaps.measure("it comes back, grows by 100 and is saved", grow)
    gaps.measure("another one takes its cells", another)
    gaps.measure("a third one is cancelled", cancel)
    gaps.measure("a whole chat is saved", save_whole)
    gaps.measure("a prompt of 1 MB", long_prompt)
    gaps.measure("the cache is cleared", lambda: gaps.engine.clear_cache(ram=True, disk=True))
    gaps.engine.close()
    gaps.backend.close()


if __name__ == "__main__":
    main()
