"""`draft` in requests of every API, in `create` and `show`, and what `fit` says of it: a daemon with fake engines."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from localrun.models import builtin
from tests.daemon import Daemon, running_daemon

HELLO = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    with running_daemon() as running:
        (running.home / "data" / "models").mkdir(parents=True, exist_ok=True)
        shutil.copy(builtin.model_path(), _file(running, "small"))
        yield running


def _file(daemon: Daemon, name: str) -> Path:
    """Of a model besides the built-in one, of the same vocabulary."""
    return daemon.home / "data" / "models" / f"{name}.gguf"


REQUESTS: list[tuple[str, dict[str, Any], str]] = [
    ("/api/chat", {"messages": HELLO}, "draft"),
    ("/api/chat", {"messages": HELLO}, "options"),
    ("/api/generate", {"prompt": "hello"}, "options"),
    ("/api/generate", {"prompt": "hello", "raw": True}, "draft"),
    ("/v1/chat/completions", {"messages": HELLO, "max_tokens": 2}, "draft"),
    ("/v1/completions", {"prompt": "hello", "max_tokens": 2}, "draft"),
    ("/v1/responses", {"input": "hello", "max_output_tokens": 2}, "draft"),
    ("/v1/fim/completions", {"prompt": "hello", "max_tokens": 2}, "draft"),
    ("/v1/messages", {"messages": HELLO, "max_tokens": 2}, "draft"),
]


@pytest.mark.parametrize(("path", "body", "where"), REQUESTS)
def test_every_api_takes_a_draft_model(path: str, body: dict[str, Any], where: str, daemon: Daemon) -> None:
    def ask(draft: str | None) -> Any:
        more = {"options": {"draft": draft, "num_predict": 2}} if where == "options" else {"draft": draft}
        return daemon.post(path, {"model": "tiny"} | body | more)

    refused = ask("nowhere")
    if path != "/v1/fim/completions":  # the built-in model cannot fill in, which is said before
        assert refused.status_code == 400
        assert "draft: 'nowhere' is not here; get it first (localrun pull nowhere)" in refused.text
        for fine in ("small", "", None):
            assert ask(fine).status_code == 200, fine
    assert "draft" in ask("x" * 5000).text


def create(daemon: Daemon, **body: Any) -> Any:
    return daemon.post("/api/create", {"stream": False} | body)


def test_a_modelfile_s_draft_line_is_kept_and_shown(daemon: Daemon) -> None:
    small = _file(daemon, "small")
    text = "FROM tiny\nDRAFT small\nPARAMETER speculation off\n"
    assert create(daemon, model="drafting", modelfile=text).json() == {"status": "success"}
    shown = daemon.post("/api/show", model="drafting").json()
    assert shown["localrun"]["draft"] == "small"
    assert "\nDRAFT small\n" in shown["modelfile"]
    assert "\nPARAMETER speculation false\n" in shown["modelfile"]
    assert create(daemon, model="again", modelfile=shown["modelfile"]).json() == {"status": "success"}
    assert daemon.post("/api/show", model="again").json()["localrun"]["draft"] == "small"

    relative = {"modelfile": "FROM drafting\nDRAFT ./small.gguf", "modelfile_folder": str(small.parent)}
    assert create(daemon, model="by-path", **relative).json() == {"status": "success"}
    assert daemon.post("/api/show", model="by-path").json()["localrun"]["draft"] == str(small)
    assert create(daemon, model="inherits", **{"from": "drafting"}).json() == {"status": "success"}
    assert daemon.post("/api/show", model="inherits").json()["localrun"]["draft"] == "small"
    for none in ({"from": "drafting", "draft": ""}, {"modelfile": 'FROM drafting\nDRAFT ""'}):
        assert create(daemon, model="without", **none).json() == {"status": "success"}
        assert daemon.post("/api/show", model="without").json()["localrun"]["draft"] == ""


@pytest.mark.parametrize(
    ("draft", "message"),
    [("nowhere", "localrun pull nowhere"), ("tiny", "'tiny' itself"), ("./small.gguf", "give the absolute path")],
)
def test_what_cannot_draft_makes_no_model(draft: str, message: str, daemon: Daemon) -> None:
    answer = create(daemon, model="refused", draft=draft, **{"from": "tiny"})
    assert answer.status_code == 400
    assert message in answer.json()["error"]
    assert daemon.post("/api/show", model="refused").status_code == 404


def test_fit_says_what_the_draft_model_costs(daemon: Daemon) -> None:
    def fit(model: str, draft: str = "") -> Any:
        return daemon.http.get(f"/localrun/v1/fit?model={model}&draft={quote(draft)}")

    assert create(daemon, model="fitted", draft="small", **{"from": "tiny"}).json() == {"status": "success"}
    alone, own, asked = fit("tiny").json(), fit("fitted").json(), fit("tiny", "small").json()
    assert alone["draft"] is None
    assert own["draft"] == asked["draft"]
    cost = own["draft"]
    assert (cost["model"], cost["device"]) == ("small", own["devices"][0]["name"])
    parts = [cost[f"{part}_bytes"] for part in ("weights", "kv", "compute", "other")]
    assert sum(parts) == cost["total_bytes"] == own["total_bytes"] - alone["total_bytes"]
    assert own["devices"][0]["other_bytes"] - alone["devices"][0]["other_bytes"] == cost["total_bytes"]
    refused = fit("tiny", "nowhere")
    assert (refused.status_code, "localrun pull nowhere" in refused.text) == (400, True)


def test_fit_says_why_the_draft_model_would_be_left_out(daemon: Daemon) -> None:
    shutil.copy(_file(daemon, "small"), _file(daemon, "leaving"))
    assert create(daemon, model="left", draft="leaving", **{"from": "tiny"}).json() == {"status": "success"}
    _file(daemon, "leaving").unlink()
    answer = daemon.http.get("/localrun/v1/fit?model=left").json()
    assert (answer["fits"], answer["draft"]) == (True, None)
    assert "without its draft model: 'leaving' is not here" in answer["notes"][-1]


def test_who_removes_a_draft_model_is_told_who_misses_it(daemon: Daemon) -> None:
    by_path = _file(daemon, "useful")
    shutil.copy(builtin.model_path(), by_path)
    create(daemon, model="by-name", draft="Useful:latest", **{"from": "tiny"})
    create(daemon, model="by-its-path", draft=str(by_path), **{"from": "tiny"})
    create(daemon, model="of-another", draft="small", **{"from": "tiny"})
    create(daemon, model="of-nobody", **{"from": "tiny"})

    def removed(model: str) -> list[str]:
        return daemon.http.request("DELETE", "/api/delete", json={"model": model}).json()["notes"]

    notes = removed("useful")
    assert sorted(note.split("'")[1] for note in notes) == ["by-its-path", "by-name"]
    assert "runs without its draft model 'Useful:latest' from its next load on; give it another one" in str(notes)
    assert removed("of-nobody") == []
    for model in ("by-name", "by-its-path", "of-another"):
        assert removed(model) == []
