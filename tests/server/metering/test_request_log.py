"""With `request_log` every request leaves one line, whatever became of it, and never what was in it."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from tests.daemon import Daemon, running_daemon

SECRET = "nobody may read this"
CHAT: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": SECRET}], "max_tokens": 3}


def send_all(daemon: Daemon) -> list[str]:
    """Five requests: an answer, a stream, and three refusals by three layers. Their ids."""
    headers = {"X-Request-Id": "my-42"}
    answers = [daemon.http.post("/v1/chat/completions", json=CHAT, headers=headers)]
    answers.append(daemon.post("/v1/chat/completions", CHAT | {"stream": True}))
    answers.append(daemon.post("/api/chat", CHAT | {"model": "none-such"}))
    answers.append(daemon.http.post("/api/chat", json=CHAT, headers={"origin": "https://elsewhere.example"}))
    answers.append(daemon.http.get("/api/no%0Athing?q=" + SECRET.replace(" ", "+")))
    assert [answer.status_code for answer in answers] == [200, 200, 404, 403, 404]
    return [answer.headers["x-request-id"] for answer in answers]


@pytest.mark.parametrize("setting", [(), ("--request-log", "off")])
def test_by_default_there_is_none(setting: tuple[str, ...]) -> None:
    with running_daemon(*setting) as daemon:
        send_all(daemon)
        assert daemon.stop() == 0
        assert "localrun.requests" not in daemon.log


def test_a_line_of_json_for_each_request() -> None:
    with running_daemon("--request-log", "json", "--log-level", "warning") as daemon:
        ids = send_all(daemon)
        assert daemon.stop() == 0
        assert SECRET.split()[0] not in daemon.log
        lines = [json.loads(line) for line in daemon.log.splitlines() if line.startswith("{")]
    lines.sort(key=lambda line: ids.index(line["id"]))  # a line comes after its answer, so the next one may be sooner
    assert [line["id"] for line in lines] == ids
    assert [line["status"] for line in lines] == [200, 200, 404, 403, 404]
    assert [line["reason"] for line in lines] == ["length", "length", "model_not_found", "forbidden", "not_found"]
    for line in lines[:2]:
        assert (line["method"], line["path"], line["model"]) == ("POST", "/v1/chat/completions", "tiny")
        assert (line["output_tokens"], line["from"]) == (3, "127.0.0.1")
        assert line["prompt_tokens"] > line["cached_tokens"] >= 0
        assert line["duration_s"] >= line["ttft_s"] > 0
        assert line["time"].endswith("+00:00")
    assert lines[0]["client_id"] == "my-42"
    assert "client_id" not in lines[1]
    assert lines[4]["path"] == "/api/no\nthing"


def test_a_line_of_text_for_each_request() -> None:
    with running_daemon("--request-log", "text") as daemon:
        ids = send_all(daemon)
        assert daemon.stop() == 0
        lines = [line for line in daemon.log.splitlines() if "localrun.requests: " in line]
    lines.sort(key=lambda line: ids.index(re.findall(r" id=(\S+)", line)[0]))
    assert [re.findall(r" id=(\S+)", line) for line in lines] == [[each] for each in ids]
    shown = lines[0].partition("localrun.requests: ")[2]
    assert re.match(r"POST /v1/chat/completions 200 \d+\.\d{3}s id=req_\w+ model=tiny prompt_tokens=\d+ ", shown)
    assert shown.endswith(" client_id=my-42")
    assert r'GET "/api/no\nthing" 404 ' in lines[4]
