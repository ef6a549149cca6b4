"""The page at `/docs`: everything is on it, and nothing comes from elsewhere."""

from __future__ import annotations

import html
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

import localrun
from localrun.errors import NotFound
from localrun.server.openapi import page
from localrun.server.openapi.operations import OPERATIONS, document, reference
from localrun.server.openapi.page import pages, rendered
from localrun.server.openapi.refusals import REFUSALS

TABLES = Path(__file__).parents[3] / "localrun" / "server" / "README.md"
_TAG = re.compile(r"<[^>]+>")


def section(operation_id: str) -> str:
    start = reference().index(f'<details id="{operation_id}">')
    return reference()[start : reference().index("</details>", start)]


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
    shown = text_of(reference())
    for refusal in REFUSALS:
        assert refusal.what.replace("`", "") in shown
        assert refusal.why.replace("`", "") in shown


@pytest.mark.parametrize(
    ("heading", "listed"),
    [
        ("field | why", " ".join(refusal.what for refusal in REFUSALS)),
        ("field | what happens", text_of(reference())),
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
    for document_ in (reference(), *(rendered(one.name) for one in pages())):
        assert "<script" not in document_
        assert not re.search(r"<(img|link|iframe|object)\b|\bsrc=|url\(|@import", document_)
    for address in re.findall(r'href="([^"]*)"', reference()):
        assert address.startswith(("#", "/docs", "/openapi.json"))


def test_links_within_the_page_lead_somewhere():
    shown = reference()
    anchors = set(re.findall(r'id="([^"]+)"', shown))
    assert set(re.findall(r'href="#([^"]+)"', shown)) <= anchors


def test_it_is_light_or_dark_as_the_reader_likes():
    assert "color-scheme: light dark" in reference()


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
    parser.feed(reference())
    assert parser.open == []


def test_text_is_escaped():
    assert "<title>&lt;b&gt;</title>" in page.page("<b>", "")
    for shown in (
        page.type_html({"const": "<b>"}),
        page.type_html({"enum": ["<b>"]}),
        page.default_html({"default": "<b>"}),
    ):
        assert "&lt;b&gt;" in shown


PAGES = {one.name: one for one in pages()}
_PATH = re.compile(r"`(/(?:api|v1|localrun|infill|docs)[a-z0-9_/.-]*)")


def test_every_page_of_the_documentation_is_one():
    folder = Path(localrun.__file__).parent / "docs"
    assert set(PAGES) == {path.stem for path in folder.glob("*.md")}
    assert {"README", "editors", "settings"} <= set(PAGES)


@pytest.mark.parametrize("name", ["editors", "serving", "media-and-tools", "sharing"])
def test_the_routes_that_it_names_exist(name: str):
    paths = set(document()["paths"])
    for path in _PATH.findall(PAGES[name].text):
        there = path.rstrip("/.")
        assert there == "/v1" or any(known == there or known.startswith(f"{there}/") for known in paths), path


@pytest.mark.parametrize("name", sorted(PAGES))
def test_links_lead_to_headings_of_pages_that_are_served(name: str):
    anchors = {one: set(re.findall(r'<h[23] id="([^"]+)"', rendered(one))) for one in PAGES}
    for address in re.findall(r'href="([^"]*)"', rendered(name)):
        if re.match(r"[a-z]+:|/|\.\./docs$", address):
            continue
        target, _, anchor = address.partition("#")
        assert (target or name) in PAGES, address
        assert not anchor or anchor in anchors[target or name], address


def test_markup_in_a_page_is_text(monkeypatch: pytest.MonkeyPatch):
    bad = page.DocsPage("bad", "Bad", "# Bad\n\n<script>alert(1)</script> [x](javascript:alert(1))")
    monkeypatch.setattr(page, "pages", lambda: (bad,))
    shown = rendered("bad")
    assert "<script" not in shown
    assert "javascript:" not in re.findall(r'href="([^"]*)"', shown)


def test_an_unknown_page_names_those_there_are():
    with pytest.raises(NotFound, match="editors"):
        rendered("emacs")
