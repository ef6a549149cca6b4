"""What a streamed token costs the daemon: `python -m tests.server.streaming_cost`, from the folder of the sources.

A daemon with fake engines is made to emit 5,000 tokens a second in all, to 8 and to 32 streams that a client in this
process reads. The daemon's own processor time (user and system, engine and template worker are processes apart) over
the whole run, divided by the tokens, is everything that a token costs there: the frame, the bookkeeping, the encoding,
the send. Beside it, the encoding alone.

Does not: run with the tests; a busy machine changes the figures.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from typing import Any

import psutil

from localrun.server.anthropic.messages import Output as Blocks
from localrun.server.ollama.chat import Lines, Parts
from localrun.server.openai.answer import ChatChunks
from localrun.server.openai.responses.output import Events, Output
from localrun.server.parsing.pieces import PlainParser, Reply
from localrun.wire import Delta, Phase
from tests.daemon import Daemon, running_daemon

TOKENS_PER_S = 5000
N_TOKENS = 40_000
N_ENCODED = 200_000
MESSAGES = [{"role": "user", "content": "hello"}]


def body(path: str, n_tokens: int) -> dict[str, Any]:
    """A streamed request for exactly so many tokens."""
    common = {"model": "tiny", "stream": True}
    if path == "/v1/responses":
        return common | {"input": "hello", "max_output_tokens": n_tokens}
    if path in ("/v1/chat/completions", "/v1/messages"):
        return common | {"messages": MESSAGES, "max_tokens": n_tokens}
    return common | {"messages": MESSAGES, "options": {"num_predict": n_tokens}}


async def read(daemon: Daemon, path: str, n_tokens: int) -> None:
    """One stream, read to its end by as little code as can be."""
    reader, writer = await asyncio.open_connection("127.0.0.1", daemon.port)
    content = json.dumps(body(path, n_tokens)).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1:{daemon.port}\r\nContent-Type: application/json\r\n"
    writer.write(head.encode() + b"Connection: close\r\nContent-Length: %d\r\n\r\n" % len(content) + content)
    while await reader.read(1 << 20):
        pass
    writer.close()


def measure(path: str, n_streams: int) -> None:
    """Prints one row."""
    wanted_s = n_streams / TOKENS_PER_S
    tried_s, _, _ = run(path, n_streams, step_s=wanted_s, n_tokens=N_TOKENS // 4)
    # What the fake engine itself takes for a step, beside the time that it sleeps, is slept less; that the machine was
    # busy just then must not make it race.
    step_s = max(0.75 * wanted_s, wanted_s - (tried_s - wanted_s))
    step_s, tokens_per_s, cpu_s = run(path, n_streams, step_s=step_s, n_tokens=N_TOKENS)
    print(
        f"{path:22} {n_streams:3} streams  {tokens_per_s:6.0f} tokens/s  {1e6 * cpu_s:5.1f} us a token  "
        f"{100 * cpu_s * tokens_per_s:4.1f} % of a core"
    )


def run(path: str, n_streams: int, *, step_s: float, n_tokens: int) -> tuple[float, float, float]:
    """Seconds that a step took, tokens a second in all, and seconds of the daemon's processor for each."""
    with running_daemon(
        LOCALRUN_SLOTS=str(n_streams),
        LOCALRUN_KV_CELLS="65536",
        LOCALRUN_FAKE_STEP_MS=f"{1000 * step_s:.3f}",
        LOCALRUN_FAKE_ENDLESS="1",
    ) as daemon:

        async def all_streams(each: int) -> None:
            await asyncio.gather(*(read(daemon, path, each) for _ in range(n_streams)))

        asyncio.run(all_streams(4))
        process = psutil.Process(daemon.process.pid)
        before, started_s, n_before = process.cpu_times(), time.monotonic(), counted(daemon)
        asyncio.run(all_streams(n_tokens // n_streams))
        after, wall_s, total = process.cpu_times(), time.monotonic() - started_s, counted(daemon) - n_before
        cpu_s = after.user + after.system - before.user - before.system
        return wall_s * n_streams / total, total / wall_s, cpu_s / total


def counted(daemon: Daemon) -> int:
    """Tokens that the engine has generated so far."""
    return int(daemon.http.get("/localrun/v1/snapshot").json()["aggregate"]["output_tokens_total"])


def encoding(name: str, encode: Callable[[Delta], object]) -> None:
    """Prints what putting one token into bytes takes."""
    delta = Delta(1, Phase.DECODE, 1, 1, " token", [1])
    started_s = time.process_time()
    for _ in range(N_ENCODED):
        encode(delta)
    print(f"{name:22} encoding alone {1e6 * (time.process_time() - started_s) / N_ENCODED:5.2f} us a token")


def main() -> None:
    """Prints all rows."""
    for path in ("/v1/chat/completions", "/v1/responses", "/v1/messages", "/api/chat"):
        for n_streams in (8, 32):
            measure(path, n_streams)
    chunks = ChatChunks(request_id="1", model="tiny", replies=[Reply(PlainParser())])
    encoding("/v1/chat/completions", lambda delta: chunks.update(0, delta))
    reply, output = Reply(PlainParser()), Output(Events(), {}, summarizes=False)
    encoding("/v1/responses", lambda delta: output.take(reply.take(delta), None))
    message, blocks = Reply(PlainParser()), Blocks()
    encoding("/v1/messages", lambda delta: blocks.take(message.take(delta)))
    lines, chat, parts = Lines("tiny", is_chat=True), Reply(PlainParser()), Parts()
    encoding(
        "/api/chat",
        lambda delta: [lines.text(part.text) for part in parts.take(chat.take(delta), is_end=False)],
    )


if __name__ == "__main__":
    main()
