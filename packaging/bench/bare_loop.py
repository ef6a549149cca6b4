"""The ceiling: decode and greedy sampling in a bare loop over the backend, with nothing around it.

`python -m bench.bare_loop MODEL --streams 8` prints one JSON line. No scheduler, pipe, HTTP or text:
what the daemon reaches, client included, is compared with this number on the same file and the same threads.
"""

from __future__ import annotations

import argparse
import sys
import time

import msgspec

from localrun.engine.native.llama import LlamaBackend
from localrun.hardware.processors import usable
from localrun.wire import Sampling


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.bare_loop", description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--streams", type=int, default=1)
    parser.add_argument("--prompt-tokens", type=int, default=50)
    parser.add_argument("--output-tokens", type=int, default=128)
    parser.add_argument("--kv-cells", type=int, default=32768)
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--gpu-layers", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=1)
    args = parser.parse_args(argv)
    backend = LlamaBackend(
        args.model,
        n_cells=args.kv_cells,
        n_seqs=args.streams,
        n_batch=512,
        n_threads=args.threads or usable().usual_threads,
        n_gpu_layers=args.gpu_layers,
        kv_type="f16",
    )
    for _ in range(args.rounds):
        rate = decode_rate(backend, args.streams, args.prompt_tokens, args.output_tokens)
        row = {"streams": args.streams, "decode_tokens_per_s": round(rate, 2), "threads": backend.n_threads}
        sys.stdout.buffer.write(msgspec.json.encode(row) + b"\n")
        sys.stdout.flush()
    backend.close()
    return 0


def decode_rate(backend: LlamaBackend, n_streams: int, n_prompt: int, n_output: int) -> float:
    """Tokens per second of `n_streams` greedy streams between their first and their last token, prompts excluded."""
    batch = backend.batch
    samplers = [backend.sampler(Sampling(temperature=0), ignore_eos=True) for _ in range(n_streams)]
    tokens = []
    for seq in range(n_streams):
        batch.token[:n_prompt] = [(seq * 131 + at * 17) % 256 + 3 for at in range(n_prompt)]
        batch.pos[:n_prompt] = range(n_prompt)
        batch.seq[:n_prompt] = seq
        batch.wants_logits[:n_prompt] = 0
        batch.wants_logits[n_prompt - 1] = 1
        backend.decode(n_prompt)
        tokens.append(samplers[seq].sample(n_prompt - 1))
    batch.seq[:n_streams] = range(n_streams)
    batch.wants_logits[:n_streams] = 1
    started_at_s = time.perf_counter()
    for step in range(n_output - 1):
        batch.token[:n_streams] = tokens
        batch.pos[:n_streams] = n_prompt + step
        backend.decode(n_streams)
        tokens = [sampler.sample(row) for row, sampler in enumerate(samplers)]
    rate = n_streams * (n_output - 1) / (time.perf_counter() - started_at_s)
    for seq in range(n_streams):
        backend.seq_remove(seq, 0)
    return rate


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
