"""How often a greedy answer differs when others run beside it: `python -m bench.divergence`.

The engine gives every request the same tokens in any company, but kernels add numbers in another order for another
batch shape, and where two tokens are nearly equally likely the last bit decides. This asks every prompt alone, then
again among seven others, and reports the share of answers that differ.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
from pathlib import Path

from localrun.bench.servers import ServerFlags, local_server
from localrun.client import Client

GROUP = 8
KV_CELLS = 32768
_ANIMALS = ("fox", "owl", "bear", "cat", "dog", "mouse", "rabbit", "frog", "horse", "duck")
_PROMPTS = (
    "Tell me a story about a {animal}.",
    "What is {a} + {b}?",
    "Repeat after me: the {animal} has {a} red boxes",
    "Hi, my name is {animal}. What is my name?",
)


def prompts(count: int) -> list[str]:
    """`count` different prompts, the same ones every time."""
    made = []
    for index in range(count):
        animal, a, b = _ANIMALS[index // 4 % 10], index // 4 % 9 + 1, index // 36 + 1
        made.append(_PROMPTS[index % 4].format(animal=animal, a=a, b=b))
    return made


async def differing(base_url: str, model: str, asked: list[str]) -> list[str]:
    """The prompts whose greedy answer alone is not the answer among seven others."""
    async with Client(base_url, name="divergence") as client:
        alone = [await _answer(client, model, prompt) for prompt in asked]
        together: list[str] = []
        for start in range(0, len(asked), GROUP):
            group = asked[start : start + GROUP]
            together += await asyncio.gather(*(_answer(client, model, prompt) for prompt in group))
    return [prompt for prompt, one, other in zip(asked, alone, together, strict=True) if one != other]


async def _answer(client: Client, model: str, prompt: str) -> str:
    messages = [{"role": "user", "content": prompt}]
    return "".join([piece.text async for piece in client.chat(model, messages, options={"temperature": 0})])


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.divergence", description=__doc__)
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--prompts", type=int, default=80)
    args = parser.parse_args(argv)
    flags = ServerFlags(model=Path(args.model), slots=GROUP, kv_cells=KV_CELLS, threads=0, latency="balanced")
    with tempfile.TemporaryDirectory(prefix="localrun-bench-") as folder, local_server(flags, Path(folder)) as server:
        asked = prompts(args.prompts)
        different = asyncio.run(differing(server.target.base_url, args.model, asked))
    print(f"{len(different)} of {len(asked)} greedy answers differ among {GROUP - 1} others: {different}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
