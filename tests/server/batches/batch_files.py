"""Inputs of batches, and waiting for a batch's end."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

from openai import OpenAI
from openai.types import Batch

from tests.daemon import Daemon

CHAT = "/v1/chat/completions"
ENDED = ("completed", "failed", "cancelled", "expired")
LONGEST_S = 120.0


def chat_line(custom_id: str, *, model: str = "tiny", n_tokens: int = 4, **body: Any) -> dict[str, Any]:
    asked = {"model": model, "max_tokens": n_tokens, "messages": [{"role": "user", "content": f"hello {custom_id}"}]}
    return {"custom_id": custom_id, "method": "POST", "url": CHAT, "body": asked | body}


def encoded(lines: list[dict[str, Any]]) -> bytes:
    return b"".join(json.dumps(line).encode() + b"\n" for line in lines)


# What keeps no connection need not be closed.
ONCE = {"connection": "close"}


def client_of(daemon: Daemon, key: str = "any") -> OpenAI:
    return OpenAI(base_url=f"{daemon.url}/v1", api_key=key, max_retries=0, default_headers=ONCE)


def begun(client: OpenAI, content: bytes, *, endpoint: Any = CHAT, window: Any = "24h", **fields: Any) -> Batch:
    file = client.files.create(file=("lines.jsonl", content), purpose="batch")
    return client.batches.create(input_file_id=file.id, endpoint=endpoint, completion_window=window, **fields)


def until(is_so: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + LONGEST_S
    while not is_so():
        assert time.monotonic() < deadline_s
        time.sleep(0.02)


def ended(client: OpenAI, batch: Batch) -> Batch:
    until(lambda: client.batches.retrieve(batch.id).status in ENDED)
    return client.batches.retrieve(batch.id)


def lines_of(client: OpenAI, file_id: str | None) -> list[dict[str, Any]]:
    return [] if file_id is None else [json.loads(line) for line in client.files.content(file_id).text.splitlines()]
