"""How much of the bare loop's decode rate a client gets: `python -m bench.ceiling` (also `make bench`).

For each number of streams it alternates, round by round, the bare loop (`bench.bare_loop`, which has no
scheduler, pipe, HTTP or text) and real clients of a real daemon, on the same GGUF, threads and KV cells, greedy and
without end tokens. Rates are compared inside one run because machines are noisy. Both measure from the first token to
the last: C * (n - 1) tokens over the time between the first token of any stream and the last of any.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import msgspec

from bench.servers import model_or_random
from localrun.bench.results import Options, StreamRecord, Target
from localrun.bench.servers import ServerFlags, local_server
from localrun.bench.streams import Endpoint
from localrun.errors import LocalrunError

N_PROMPT = 50
KV_CELLS = 32768


class Row(msgspec.Struct):
    """One line of the table; rates are medians of tokens per second, ratios are of the same round."""

    streams: int
    bare_tokens_per_s: float
    daemon_tokens_per_s: float
    ratio: float
    ratio_lowest: float
    ratio_highest: float
    rounds: int


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.ceiling", description=__doc__)
    parser.add_argument("--model", type=Path, help="a GGUF; without it a random 135M Q4_0 model is written first")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 4, 8])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--output-tokens", type=int, default=128)
    parser.add_argument("--json", type=Path, help="write the rows here, too")
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="localrun-bench-") as folder:
        model = model_or_random(args.model, Path(folder)).absolute()
        flags = ServerFlags(model=model, slots=max(args.streams), kv_cells=KV_CELLS, threads=0, latency="balanced")
        with local_server(flags, Path(folder)) as server:
            base_url = server.target.base_url
            rows = [_compare(base_url, model, n, args.rounds, args.output_tokens) for n in args.streams]
    print("| streams | bare loop tok/s | through the daemon tok/s | ratio (lowest to highest of the rounds) |")
    print("|---|---|---|---|")
    for row in rows:
        spread = f"{row.ratio:.2f} ({row.ratio_lowest:.2f} to {row.ratio_highest:.2f})"
        print(f"| {row.streams} | {row.bare_tokens_per_s:.0f} | {row.daemon_tokens_per_s:.0f} | {spread} |")
    if args.json:
        args.json.write_bytes(msgspec.json.format(msgspec.json.encode(rows), indent=2) + b"\n")
    return 0


def _compare(base_url: str, model: Path, n_streams: int, rounds: int, n_output: int) -> Row:
    _daemon_rate(base_url, model, n_streams, 8, seed=0)  # loads the model and warms it up
    pairs = []
    for index in range(rounds):
        bare = _bare_rate(model, n_streams, n_output)
        pairs.append((bare, _daemon_rate(base_url, model, n_streams, n_output, seed=index + 1)))
        print(f"{n_streams} streams: bare {pairs[-1][0]:.0f}, daemon {pairs[-1][1]:.0f} tok/s", file=sys.stderr)
    ratios = [through / bare for bare, through in pairs]
    return Row(
        streams=n_streams,
        bare_tokens_per_s=statistics.median(bare for bare, _ in pairs),
        daemon_tokens_per_s=statistics.median(through for _, through in pairs),
        ratio=statistics.median(ratios),
        ratio_lowest=min(ratios),
        ratio_highest=max(ratios),
        rounds=rounds,
    )


def _bare_rate(model: Path, n_streams: int, n_output: int) -> float:
    command = [sys.executable, "-m", "bench.bare_loop", str(model), "--streams", str(n_streams)]
    command += ["--prompt-tokens", str(N_PROMPT), "--output-tokens", str(n_output), "--kv-cells", str(KV_CELLS)]
    output = subprocess.run(command, check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL).stdout
    return float(msgspec.json.decode(output)["decode_tokens_per_s"])


def _daemon_rate(base_url: str, model: Path, n_streams: int, n_output: int, *, seed: int) -> float:
    """Every stream and every round has its own prompt, so that no prefix is shared."""
    prompts = [[(seed * 37 + stream * 131 + at * 17) % 1000 for at in range(N_PROMPT)] for stream in range(n_streams)]
    records = asyncio.run(_answered(Target("", base_url, str(model)), prompts, n_output))
    n_tokens = sum(record.n_output - 1 for record in records)
    first = min(record.arrivals_s[0] for record in records)
    return n_tokens / (max(record.arrivals_s[-1] for record in records) - first)


async def _answered(target: Target, prompts: list[list[int]], n_output: int) -> list[StreamRecord]:
    """All at once. Raises LocalrunError for one that fails."""
    endpoint = Endpoint(target, Options(seed=0))
    records = await asyncio.gather(*(endpoint.send(prompt, n_output) for prompt in prompts))
    if problem := next((record.problem for record in records if record.problem), ""):
        raise LocalrunError(problem)
    return records


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
