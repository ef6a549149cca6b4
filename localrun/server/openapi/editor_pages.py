"""The pages on how to set up editors: Markdown files of the package, also to be read where the sources are.

Each begins with a heading, its title; its name is that of the file.

Does not: fetch or run anything.
"""

from __future__ import annotations

from functools import cache
from importlib import resources
from importlib.resources.abc import Traversable
from typing import NamedTuple

from localrun.errors import NotFound
from localrun.server.openapi.page_frame import page

# What is true of all editors.
INDEX = "README"
_FOLDER = resources.files("localrun") / "docs" / "editors"


class EditorPage(NamedTuple):
    """One page. `text` is Markdown."""

    name: str
    title: str
    text: str


@cache
def pages() -> tuple[EditorPage, ...]:
    """All pages, by name."""
    return tuple(_read(file) for file in _files() if file.name != INDEX + ".md")


def _files() -> list[Traversable]:
    found = (file for file in _FOLDER.iterdir() if file.name.endswith(".md"))
    return sorted(found, key=lambda file: file.name)


def _read(file: Traversable) -> EditorPage:
    text = file.read_text(encoding="utf-8")
    return EditorPage(file.name.removesuffix(".md"), text.partition("\n")[0].lstrip("# "), text)


@cache
def rendered(name: str) -> str:
    """A page as an HTML document. Raises NotFound."""
    # Not at the top: no start of a daemon has to wait for it.
    from markdown_it import MarkdownIt

    for one in (_read(_FOLDER / f"{INDEX}.md"), *pages()):
        if one.name == name:
            # HTML in the text would be shown as text; links lead from file to file where the sources are.
            content = MarkdownIt("commonmark", {"html": False}).enable("table").render(one.text)
            content = content.replace('.md"', '"')
            return page(f"localrun: {one.title}", f'<p><a href="/docs">localrun: API</a></p>{content}')
    listed = ", ".join(one.name for one in pages())
    raise NotFound(f"there is no page '{name[:40]}'; there are {listed}", field="name")
