"""How Ollama's lists name models, and that they can be asked for by those names."""

from __future__ import annotations

import pytest

from localrun.models.storage.manifest import Source, in_full
from tests.daemon import Daemon, running_daemon


@pytest.mark.parametrize(
    ("name", "source", "full"),
    [
        ("tiny", Source(kind="built-in"), "tiny:latest"),
        ("fox:1b", Source(kind="create"), "fox:1b"),
        ("Org/Repo:Q8_0", Source(kind="hub", repo="org/repo"), "hf.co/Org/Repo:Q8_0"),
        ("org/repo@main", Source(kind="hub", repo="org/repo"), "hf.co/org/repo@main:latest"),
        ("qwen3:0.6b", Source(kind="hub", repo="Qwen/Qwen3-0.6B-GGUF"), "qwen3:0.6b"),
        ("me/copy", Source(kind="hub", repo="org/repo"), "me/copy:latest"),
        ("registry.ollama.ai/me/own", Source(kind="foreign", repo="Ollama"), "me/own:latest"),
        ("Owner/Fox-GGUF:Q4_K_M", Source(kind="foreign", repo="Ollama"), "hf.co/Owner/Fox-GGUF:Q4_K_M"),
        ("127.0.0.1:5000/me/own", Source(kind="registry", repo="me/own"), "127.0.0.1:5000/me/own:latest"),
        ("/models/a.gguf", Source(kind="path"), "/models/a.gguf"),
    ],
)
def test_a_name_in_full(name: str, source: Source, full: str) -> None:
    assert in_full(name, source) == full


def test_either_form_works_on_every_route() -> None:
    own = "m" * 80 + "/" + "n" * 80 + ":" + "t" * 80
    with running_daemon() as daemon:
        for name in ("_x", own):
            assert daemon.post("/api/copy", source="library/tiny", destination=name).status_code == 200
        assert listed(daemon) == {"tiny:latest", "_x:latest", own}
        names = ("tiny:latest", "registry.ollama.ai/library/TINY", "https://registry.ollama.ai/library/tiny:latest")
        for name in (*names, "_x", "library/_x:latest", own):
            bodies = {
                "/api/show": {"model": name},
                "/api/chat": {"model": name, "messages": [], "stream": False},
                "/api/generate": {"model": name, "prompt": "a", "stream": False, "options": {"num_predict": 1}},
                "/v1/completions": {"model": name, "prompt": "a", "max_tokens": 1},
                "/v1/chat/completions": {
                    "model": name,
                    "messages": [{"role": "user", "content": "a"}],
                    "max_tokens": 1,
                },
                "/tokenize": {"model": name, "content": "a"},
            }
            for path, body in bodies.items():
                assert daemon.post(path, body).status_code == 200, (path, name)
            assert daemon.http.get(f"/v1/models/{name}").status_code == 200, name
        for name in ("library/_x:latest", own):
            assert daemon.http.request("DELETE", "/api/delete", json={"model": name}).status_code == 200
        assert listed(daemon) == {"tiny:latest"}


def listed(daemon: Daemon) -> set[str]:
    return {row["name"] for row in daemon.http.get("/api/tags").json()["models"]}
