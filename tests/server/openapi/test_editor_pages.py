"""The editors' pages: one for each, whole, and true of what the daemon serves."""

from __future__ import annotations

import re

import pytest

from localrun.config import Settings
from localrun.errors import NotFound
from localrun.server.openapi import editor_pages
from localrun.server.openapi.document import document

NAMES = [
    *("aider", "claude-code", "cline", "codex", "continue", "jetbrains", "llm", "neovim", "open-webui"),
    *("vscode", "zed"),
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
    known = {f"LOCALRUN_{field.upper()}" for field in Settings.__struct_fields__} | _FOREIGN
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
