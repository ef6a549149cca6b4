"""The page at `/docs`: everything is on it, and nothing comes from elsewhere."""

from __future__ import annotations

import html
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from localrun.config import FIELDS
from localrun.errors import NotFound
from localrun.server.openapi import page
from localrun.server.openapi import page as editor_pages
from localrun.server.openapi.document import OPERATIONS, document
from localrun.server.openapi.page import pages, rendered
from localrun.server.openapi.refusals import REFUSALS

TABLES = Path(__file__).parents[3] / "localrun" / "server" / "README.md"
_TAG = re.compile(r"<[^>]+>")


def section(operation_id: str) -> str:
    start = page.reference().index(f'<details id="{operation_id}">')
    return page.reference()[start : page.reference().index("</details>", start)]


def text_of(markup: str) -> str:
    return html.unescape(_TAG.sub("", markup))


def test_every_operation_is_on_it_with_every_field_of_its_body():
    schemas = document()["components"]["schemas"]
    for operation in OPERATIONS:
        shown = section(operation.id)
        body = document()["paths"][operation.path][operation.method.lower()].get("requestBody", {})
        for content in body.get("content", {}).values():
            if "schema" not in content:
                continue
            for field, schema in schemas[content["schema"]["$ref"].rpartition("/")[2]]["properties"].items():
                assert f"<td><code>{html.escape(field)}</code>" in shown
                assert schema["description"].replace("`", "") in text_of(shown)


def test_the_fields_inside_bodies_are_on_it():
    for name, schema in document()["components"]["schemas"].items():
        shown = section(f"shape-{name}")
        assert all(f"<code>{html.escape(field)}</code>" in shown for field in schema.get("properties", {}))


def test_limits_are_on_it():
    shown = text_of(section("post-api-chat"))
    assert "at least 0, at most 20" in shown
    assert "at most 16 items" in text_of(section("shape-Options"))


def test_everything_that_is_refused_is_on_it():
    shown = text_of(page.reference())
    for refusal in REFUSALS:
        assert refusal.what.replace("`", "") in shown
        assert refusal.why.replace("`", "") in shown


@pytest.mark.parametrize(
    ("heading", "listed"),
    [
        ("field | why", " ".join(refusal.what for refusal in REFUSALS)),
        ("field | what happens", text_of(page.reference())),
    ],
    ids=["refused", "ollama"],
)
def test_the_tables_of_the_readme_are_on_it(heading: str, listed: str):
    """What the sources say of fields that are refused or without effect, users can read as well."""
    text = TABLES.read_text(encoding="utf-8")
    tables = re.findall(rf"^\| {re.escape(heading)} \|\n\|---\|---\|\n((?:\|.*\|\n)+)", text, re.MULTILINE)
    rows = [line.split(" | ")[0] for table in tables for line in table.splitlines()]
    names = [name for row in rows for name in re.findall(r"`([^`]+)`", row)]
    assert len(names) > 10
    assert [name for name in names if name not in listed] == []


def test_nothing_comes_from_elsewhere():
    for document_ in (page.reference(), *(rendered(one.name) for one in pages())):
        assert "<script" not in document_
        assert not re.search(r"<(img|link|iframe|object)\b|\bsrc=|url\(|@import", document_)
        for address in re.findall(r'href="([^"]*)"', document_):
            assert address.startswith(("#", "/docs", "/openapi.json")) or re.fullmatch(r"[a-z-]+", address)


def test_links_within_the_page_lead_somewhere():
    shown = page.reference()
    anchors = set(re.findall(r'id="([^"]+)"', shown))
    assert set(re.findall(r'href="#([^"]+)"', shown)) <= anchors


def test_it_is_light_or_dark_as_the_reader_likes():
    assert "color-scheme: light dark" in page.reference()


class Balance(HTMLParser):
    """The tags that are open."""

    EMPTY = frozenset({"meta", "br"})

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: object) -> None:
        if tag not in self.EMPTY:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag, self.getpos()


def test_every_tag_is_closed():
    parser = Balance()
    parser.feed(page.reference())
    assert parser.open == []


def test_text_is_escaped():
    assert "<title>&lt;b&gt;</title>" in page.page("<b>", "")
    for shown in (
        page.type_html({"const": "<b>"}),
        page.type_html({"enum": ["<b>"]}),
        page.default_html({"default": "<b>"}),
    ):
        assert "&lt;b&gt;" in shown


NAMES = [
    *("aider", "claude-code", "cline", "codex", "continue", "jetbrains", "llm", "neovim", "open-webui"),
    *("opencode", "vscode", "zed"),
]
PAGES = {one.name: one for one in editor_pages.pages()}
_PATH = re.compile(r"`(/(?:api|v1|localrun|infill|docs)[a-z0-9_/.-]*)")
# Of other programs.
_FOREIGN = {"LOCALRUN_API_KEY"}


def test_every_editor_has_one():
    assert sorted(PAGES) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_it_says_what_to_set_what_is_called_and_where_the_traps_are(name: str):
    text = PAGES[name].text
    assert re.search(r"(127\.0\.0\.1|localhost):11434", text) or name in ("codex", "llm")
    assert "It calls" in text or "What" in text
    assert "Traps" in text or name == "neovim"
    assert "```" in text or name in ("jetbrains", "cline")


@pytest.mark.parametrize("name", NAMES)
def test_the_routes_that_it_names_exist(name: str):
    paths = set(document()["paths"])
    for path in _PATH.findall(PAGES[name].text):
        assert path.rstrip("/.") in paths or path == "/v1", path


def test_the_settings_that_are_named_exist():
    known = {f"LOCALRUN_{field.upper()}" for field in FIELDS} | _FOREIGN
    text = "".join(one.text for one in PAGES.values())
    assert set(re.findall(r"LOCALRUN_[A-Z_]+", text)) <= known


def test_links_lead_to_pages_here_and_where_the_sources_are():
    for one in PAGES.values():
        for target in re.findall(r"\]\(([^)]+)\)", one.text):
            assert target.removesuffix(".md") in PAGES
        assert ".md" not in re.findall(r'href="([^"]*)"', editor_pages.rendered(one.name))


def test_the_index_lists_all_of_them():
    assert sorted(re.findall(r'href="([a-z-]+)"', editor_pages.rendered(editor_pages.INDEX))) == NAMES


def test_markup_in_a_page_is_text(monkeypatch: pytest.MonkeyPatch):
    bad = editor_pages.EditorPage("bad", "Bad", "# Bad\n\n<script>alert(1)</script> [x](javascript:alert(1))")
    monkeypatch.setattr(editor_pages, "pages", lambda: (bad,))
    shown = editor_pages.rendered("bad")
    assert "<script" not in shown
    assert "javascript:" not in re.findall(r'href="([^"]*)"', shown)


def test_an_unknown_page_names_those_there_are():
    with pytest.raises(NotFound, match="zed"):
        editor_pages.rendered("emacs")
