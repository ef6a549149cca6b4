"""The chat page: who gets it at `/`, with which headers, and what is in its files."""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib import resources
from urllib.parse import urljoin

import pytest

from localrun.server import web
from tests.daemon import Daemon, running_daemon

SCRIPTS = ("chat.js", "chats.js", "markdown.js", "models.js", "server.js")
FILES = {"chat.css": "text/css", "icon.svg": "image/svg+xml", "manifest.webmanifest": "application/manifest+json"}
FILES |= dict.fromkeys(SCRIPTS, "text/javascript")
BROWSER = "text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8"


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    with running_daemon() as running:
        yield running


@pytest.mark.parametrize("accept", [None, "*/*", "application/json", "text/plain", "text/html;q=0, */*", "text/*"])
def test_clients_get_what_ollama_says(accept: str | None, daemon: Daemon) -> None:
    headers = {} if accept is None else {"Accept": accept}
    answer = daemon.http.get("/", headers=headers)
    assert (answer.text, answer.headers["content-type"]) == ("Ollama is running", "text/plain; charset=utf-8")
    assert answer.headers["vary"] == "accept"
    assert daemon.http.head("/", headers=headers).headers["content-length"] == str(len("Ollama is running"))


@pytest.mark.parametrize(
    ("accept", "expected"),
    [(BROWSER, True), ("text/html", True), ("Text/HTML; q=0.5", True), ("text/html; q=0", False), ("", False)],
)
def test_who_asks_for_html(accept: str, expected: bool) -> None:
    assert web.wants_html(accept) is expected


@pytest.mark.parametrize("path", ["/", *(f"/web/{name}" for name in FILES)])
def test_headers_that_keep_the_page_to_itself(path: str, daemon: Daemon) -> None:
    answer = daemon.http.get(path, headers={"Accept": BROWSER})
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith(FILES.get(path.rpartition("/")[2], "text/html"))
    policy = dict(part.strip().partition(" ")[::2] for part in answer.headers["content-security-policy"].split(";"))
    assert policy["default-src"] == policy["frame-ancestors"] == policy["base-uri"] == "'none'"
    assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"
    assert "unsafe" not in answer.headers["content-security-policy"]
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["x-frame-options"] == "DENY"
    assert "access-control-allow-origin" not in answer.headers
    # Under `no-referrer` Firefox and WebKit give the page's own questions the origin `null`, which is refused.
    assert answer.headers["referrer-policy"] == "same-origin"


@pytest.mark.parametrize("path", ["/", "/web/chat.js"])
def test_hosts_and_origins_are_checked_as_everywhere(path: str, daemon: Daemon) -> None:
    for wrong in ({"Host": "evil.example"}, {"Origin": "https://evil.example"}, {"Sec-Fetch-Site": "cross-site"}):
        refused = daemon.http.get(path, headers={"Accept": BROWSER} | wrong)
        assert refused.status_code == 403
        assert "<html" not in refused.text
    assert daemon.http.get("/web/other.js").status_code == 404
    assert daemon.post("/").status_code == 405


def test_nothing_is_from_elsewhere_and_no_code_is_in_the_page() -> None:
    texts = {name: resources.files(web).joinpath(name).read_text("utf-8") for name in (*FILES, "index.html")}
    page = texts["index.html"]
    assert not re.search(r"<style|<script(?![^>]*\bsrc=)|\sstyle=|\son\w+=", page)
    addresses = re.compile(r"""(?:src|href|"src"|"start_url")(?:=|: )"([^"]*)"|from "([^"]*)"|URL\(`([^`$]*)""")
    named = {
        urljoin("/" if name == "index.html" else f"/web/{name}", "".join(found))
        for name, text in texts.items()
        for found in addresses.findall(text)
    }
    assert named == {*(f"/web/{name}" for name in FILES), "/docs", "/"}
    assert not any("".join(found).startswith("/") for found in addresses.findall("".join(texts.values()))), (
        "a proxy may have the page at a path of its own"
    )
    for name in SCRIPTS:
        wrong = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|setAttribute|\.style\b|DOMParser"
        assert not re.search(wrong, texts[name]), name


def test_the_page_stays_small() -> None:
    """All of it is sent as it is written."""
    sizes = {name: len(resources.files(web).joinpath(name).read_bytes()) for name in (*FILES, "index.html")}
    assert sum(sizes.values()) < 72_000, sizes
