"""The documentation's pages: links lead somewhere, and quoted messages are those of the program."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "localrun" / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
TROUBLESHOOTING = DOCS / "troubleshooting.md"
GAP = "…"


def texts_of(node: ast.AST) -> str | None:
    """A text of the source, with a gap for everything that is put in when it runs."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(str(part.value) if isinstance(part, ast.Constant) else GAP for part in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        left, right = texts_of(node.left), texts_of(node.right)
        return f"{GAP if left is None else left}{GAP if right is None else right}"
    return None


@cache
def messages() -> str:
    """Every text of the source, one a line, gaps beside each other as one."""
    found = []
    for folder in ("localrun", "models", "tui"):
        for path in (ROOT / folder).rglob("*.py"):
            tree = ast.parse(path.read_text(encoding="utf-8"))
            found += [text for node in ast.walk(tree) if (text := texts_of(node)) is not None]
    return "\n".join(without_double_gaps(text) for text in found)


def without_double_gaps(text: str) -> str:
    return re.sub(f"{GAP}+", GAP, text)


def quoted() -> list[str]:
    lines = TROUBLESHOOTING.read_text(encoding="utf-8").splitlines()
    return [line[2:] for line in lines if line.startswith("> ")]


def test_a_good_number_of_messages_is_explained():
    assert len(quoted()) > 25


@pytest.mark.parametrize("message", quoted())
def test_a_quoted_message_is_one_of_the_program(message: str):
    assert without_double_gaps(message) in messages(), "the source has no such message any more"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(DOCS)))
def test_links_within_the_tree_lead_somewhere(page: Path):
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        if re.match(r"[a-z]+:", target) or target.startswith("#"):
            continue
        assert (page.parent / target.partition("#")[0]).exists(), f"{page.name} links to {target}"


def test_the_readme_leads_to_every_page_of_its_own_folder():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    for page in DOCS.glob("*.md"):
        assert f"localrun/docs/{page.name}" in readme, f"README.md does not name {page.name}"


def test_the_readmes_links_lead_somewhere():
    for target in re.findall(r"\]\(([^)\s]+)\)", (ROOT / "README.md").read_text(encoding="utf-8")):
        if not re.match(r"[a-z]+:|#", target):
            assert (ROOT / target.partition("#")[0]).exists(), f"README.md links to {target}"
