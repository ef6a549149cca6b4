"""The page at `/docs`: everything is on it, and nothing comes from elsewhere."""

from __future__ import annotations

import html
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from localrun.server.openapi import editor_pages, page
from localrun.server.openapi.document import OPERATIONS, document
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
    for document_ in (page.reference(), *(editor_pages.rendered(one.name) for one in editor_pages.pages())):
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
    assert "it&#x27;s" in page._row("it's", {}, "", is_required=False)
    assert "&lt;b&gt;" in page._row("<b>", {}, "", is_required=False)
