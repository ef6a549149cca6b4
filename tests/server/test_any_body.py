"""Whatever a client sends, the daemon answers in the family's shape, never with a 5xx, and goes on."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.daemon import Daemon, running_daemon
from tests.depth import DEPTH

SMALL = {"num_predict": 2}
ROUTES: dict[str, dict[str, Any]] = {
    "/api/chat": {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "stream": False, "options": SMALL},
    "/api/generate": {"model": "tiny", "prompt": "hi", "stream": False, "options": SMALL},
    "/api/show": {"model": "tiny"},
    "/api/pull": {"model": "tiny"},
    "/v1/chat/completions": {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2},
    "/v1/completions": {"model": "tiny", "prompt": "hi", "max_tokens": 2},
    "/v1/embeddings": {"model": "tiny", "input": ["hi", "there"]},
    "/api/embed": {"model": "tiny", "input": ["hi", "there"]},
    "/api/embeddings": {"model": "tiny", "prompt": "hi"},
    "/v1/rerank": {"model": "tiny", "query": "hi", "documents": ["hi"]},
    "/v1/responses": {"model": "tiny", "input": "hi", "max_output_tokens": 2},
    "/v1/fim/completions": {"model": "tiny", "prompt": "hi", "max_tokens": 2},
    "/v1/messages": {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2},
    "/v1/messages/count_tokens": {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]},
    "/infill": {"model": "tiny", "input_prefix": "hi", "n_predict": 2},
}
FIELDS = [
    "model", "name", "messages", "prompt", "stream", "options", "system", "context", "raw", "keep_alive", "truncate",
    "logprobs", "top_logprobs", "template", "suffix", "images", "format", "think", "tools", "verbose", "n", "stop",
    "seed", "temperature", "top_p", "top_k", "min_p", "max_tokens", "max_completion_tokens", "logit_bias", "echo",
    "best_of", "stream_options", "response_format", "ignore_eos", "presence_penalty", "mirostat", "repeat_penalty",
    "input", "dimensions", "encoding_format", "query", "documents", "top_n", "return_documents",
    "input", "instructions", "previous_response_id", "text", "reasoning", "tool_choice", "parallel_tool_calls", "store",
    "include", "metadata", "truncation", "functions", "function_call", "reasoning_effort", "json_schema", "grammar",
    "documents", "chat_template_kwargs", "continue_final_message", "add_generation_prompt", "random_seed",
    "thinking", "stop_sequences", "output_config", "shift", "_debug_render_only",
    "input_prefix", "input_suffix", "input_extra", "response_fields", "n_predict",
]  # fmt: skip
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.integers(-3, 20)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=20)
    | st.sampled_from(["tiny", "../x", "/etc/passwd", "\x00", "<|im_end|>", "-1", "5m", "stop", "user", "\ud800"])
)
KEYS = st.text(max_size=8) | st.sampled_from(["role", "content", "type", "1", "num_ctx"])
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(KEYS, inner, max_size=4),
    max_leaves=8,
)


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    # A small context, so that a request without a limit ends soon.
    with running_daemon(LOCALRUN_KV_CELLS="256", LOCALRUN_SLOTS="1") as running:
        yield running
        assert "Traceback" not in running.log


@settings(max_examples=100 * DEPTH, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(path=st.sampled_from(sorted(ROUTES)), changes=st.dictionaries(st.sampled_from(FIELDS), VALUES, max_size=3))
def test_no_body_makes_the_daemon_fail(daemon: Daemon, path: str, changes: dict[str, Any]) -> None:
    content = json.dumps(ROUTES[path] | changes).encode()
    answer = daemon.http.post(path, content=content, headers={"content-type": "application/json"})
    assert answer.status_code < 500 or answer.status_code == 501, answer.text
    if answer.status_code >= 400:
        assert answer.headers["x-localrun-error"]
        assert answer.json()["error"]


@settings(max_examples=50 * DEPTH, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(path=st.sampled_from(sorted(ROUTES)), content=st.binary(max_size=60))
def test_no_bytes_make_the_daemon_fail(daemon: Daemon, path: str, content: bytes) -> None:
    answer = daemon.http.post(path, content=content, headers={"content-type": "application/json"})
    assert 400 <= answer.status_code < 500
    assert answer.json()["error"]
