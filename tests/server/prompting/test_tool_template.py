"""Over HTTP: a file with a template of its own for tools."""

from __future__ import annotations

from pathlib import Path

from tests.daemon import running_daemon
from tests.models.handmade import ENTRIES, STRING, entry, file_bytes, text

DEFAULT = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
FOR_TOOLS = "TOOLS: {{ tools[0].function.name }} {# <tool_call> #}" + DEFAULT


def test_a_file_s_template_for_tools_is_used_with_tools(tmp_path: Path) -> None:
    entries = (
        *ENTRIES,
        entry("tokenizer.chat_template", STRING, text(DEFAULT)),
        entry("tokenizer.chat_template.tool_use", STRING, text(FOR_TOOLS)),
    )
    (tmp_path / "two.gguf").write_bytes(file_bytes(entries))
    tools = [{"type": "function", "function": {"name": "get_time", "parameters": {"type": "object"}}}]
    body = {"model": "two", "messages": [{"role": "user", "content": "hello"}]}
    with running_daemon(LOCALRUN_MODELS=str(tmp_path)) as daemon:
        assert daemon.post("/apply-template", body).json()["prompt"] == "[user]hello"
        assert daemon.post("/apply-template", body | {"tools": tools}).json()["prompt"] == "TOOLS: get_time [user]hello"
        assert "tools" in daemon.post("/api/show", model="two").json()["capabilities"]
