"""The documentation's pages: links lead somewhere, quoted messages are those of the program, recommended models fit."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import click
import pytest

from localrun.cli.root import cli
from localrun.models import catalog
from localrun.models.fit import USABLE_RAM, rough_bytes
from localrun.models.name import ModelName
from localrun.models.quant_choice import RemoteFile, choose

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "localrun" / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
TROUBLESHOOTING = DOCS / "troubleshooting.md"
GAP = "…"


def texts_of(node: ast.AST) -> str | None:
    """A text of the source, with a gap for everything that is put in when it runs, groups of a match among it."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return re.sub(r"\\[1-9]", GAP, node.value)
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
    for path in sources():
        tree = ast.parse(path.read_text(encoding="utf-8"))
        found += [text for node in ast.walk(tree) if (text := texts_of(node)) is not None]
    return "\n".join(without_double_gaps(text) for text in found)


def sources() -> list[Path]:
    return [path for folder in ("localrun", "models", "tui") for path in (ROOT / folder).rglob("*.py")]


def without_double_gaps(text: str) -> str:
    return re.sub(f"{GAP}+", GAP, text)


def quoted() -> list[str]:
    lines = TROUBLESHOOTING.read_text(encoding="utf-8").splitlines()
    return [line[2:] for line in lines if line.startswith("> ")]


def test_a_good_number_of_messages_is_explained():
    assert len(quoted()) > 20


@pytest.mark.parametrize("message", quoted())
def test_a_quoted_message_is_one_of_the_program(message: str):
    assert without_double_gaps(message) in messages(), "the source has no such message any more"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(DOCS)))
def test_links_within_the_tree_lead_somewhere(page: Path):
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        if re.match(r"[a-z]+:", target) or target.startswith("#"):
            continue
        assert (page.parent / target.partition("#")[0]).exists(), f"{page.name} links to {target}"


def test_a_module_names_modules_that_are_there():
    paths = [f"/{path.relative_to(ROOT)}" for path in sources()]
    for path in sources():
        said = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
        for name in re.findall(r"(?<![\w/.])[a-z_0-9/]+\.py\b", said):
            assert any(there.endswith(f"/{name}") for there in paths), f"{path.relative_to(ROOT)} names {name}"


def test_the_index_leads_to_every_page_and_the_readme_to_the_index():
    assert "(localrun/docs/README.md)" in (ROOT / "README.md").read_text(encoding="utf-8")
    index = (DOCS / "README.md").read_text(encoding="utf-8")
    for page in {*DOCS.glob("*.md")} - {DOCS / "README.md"}:
        assert f"({page.name})" in index, f"the index does not name {page.name}"


def test_the_readme_is_read_in_a_few_minutes():
    assert len((ROOT / "README.md").read_text(encoding="utf-8").split()) <= 1000


def test_the_documentation_is_read_in_an_hour():
    """What is written by hand for who uses one machine; planning and clusters have pages of their own, and settings,
    commands, metrics and Modelfiles are looked up."""
    looked_up = {"settings.md", "cli.md", "metrics.md", "modelfile.md", "architecture.md", "planning.md", "cluster.md"}
    pages = [ROOT / "README.md", *(page for page in PAGES if page.name not in looked_up)]
    texts = [
        re.sub(r"<!-- figures.*?<!-- end", "", page.read_text(encoding="utf-8"), flags=re.DOTALL) for page in pages
    ]
    assert sum(len(text.split()) for text in texts) <= 12_000


def test_the_readmes_links_lead_somewhere():
    for target in re.findall(r"\]\(([^)\s]+)\)", (ROOT / "README.md").read_text(encoding="utf-8")):
        if not re.match(r"[a-z]+:|#", target):
            assert (ROOT / target.partition("#")[0]).exists(), f"README.md links to {target}"


@pytest.mark.parametrize("page", [ROOT / "README.md", *PAGES], ids=lambda page: page.name)
def test_a_command_of_the_pages_has_the_options_that_it_is_shown_with(page: Path):
    text = page.read_text(encoding="utf-8")
    shown = [
        line.partition("#")[0]
        for block in re.findall(r"```sh\n(.*?)```", text, re.DOTALL)
        for line in block.split("\n")
    ]
    shown += [" ".join(parts) for parts in re.findall(r"`(localrun [^`]+)`(?:: `(-[^`]+)`)?", text)]
    for line in shown:
        found = re.match(r"localrun(?: [a-z]+)*", line.strip())
        if found is None:
            continue
        there = options_of(found[0].split()[1:])
        for option in re.findall(r"(?<= )--?[a-z][\w-]*", line):
            assert option in there, f"{line} has no {option}"


def options_of(words: list[str]) -> set[str]:
    """Those of the command that the words begin with."""
    command: click.Command = cli
    context = click.Context(cli)
    for word in words:
        below = command.get_command(context, word) if isinstance(command, click.Group) else None
        if below is None:
            break
        command = below
    return {"--help", *(name for param in command.params for name in (*param.opts, *param.secondary_opts))}


def recommended() -> list[tuple[str, ...]]:
    """The README's table of models by memory: memory in GB, name, download in GB, quantization, what it takes in GB."""
    row = r"^\| (\d+) GB \| `localrun pull (\S+)` \| ([\d.]+) GB, (\w+) \| ([\d.]+) GB \|$"
    return re.findall(row, (ROOT / "README.md").read_text(encoding="utf-8"), re.MULTILINE)


def test_a_model_is_recommended_for_each_size_of_memory():
    assert [int(row[0]) for row in recommended()] == [8, 16, 24, 64]


@pytest.mark.parametrize(("memory_gb", "name", "download_gb", "quant", "takes_gb"), recommended())
def test_a_recommended_model_fits_and_is_what_pull_would_choose(
    memory_gb: str, name: str, download_gb: str, quant: str, takes_gb: str
):
    found = catalog.find(ModelName.parse(name))
    assert found is not None
    files = [RemoteFile(f"model-{each}.gguf", round(size * 1e9)) for each, size in found.entry.quants.items()]
    # A machine has a little less than what is written on the box.
    memory_bytes = int(memory_gb) * 1_000_000_000
    choice = choose(files, tag=found.quant, memory_bytes=memory_bytes, repo=found.entry.repo)
    size_bytes = sum(file.size_bytes for file in choice.files)
    assert choice.quant == quant
    assert size_bytes / 1e9 == pytest.approx(float(download_gb))
    assert rough_bytes(size_bytes) / 1e9 == pytest.approx(float(takes_gb), abs=0.5)
    assert rough_bytes(size_bytes) <= memory_bytes * USABLE_RAM


def test_the_gains_by_streams_are_those_of_the_table():
    performance = (DOCS / "performance.md").read_text(encoding="utf-8")
    rates = re.findall(r"^\| (\d+) \| \d+ \| (\d+) \| 0\.\d+ \(", performance, re.MULTILINE)
    assert [streams for streams, _ in rates] == ["1", "4", "8"]
    one, four, eight = (int(rate) for _, rate in rates)
    gains = re.search(r"four streams get (\d+) % more than one, and eight (\d+) % more than four", performance)
    assert gains is not None
    assert [int(gain) for gain in gains.groups()] == [round(100 * (four / one - 1)), round(100 * (eight / four - 1))]


def test_the_pages_and_messages_count_in_decimal_units():
    for page in (ROOT / "README.md", *PAGES):
        assert not re.search(r"\d [KMG]iB\b", page.read_text(encoding="utf-8")), page.name
    assert not re.search(rf"{GAP} ?[KMG]iB\b", messages())


def test_the_page_on_installing_takes_by_hand_what_was_built_for_this_machine_with_tested_versions():
    """A wheel in a folder is taken before a cached one that was built elsewhere, and works in every shell."""
    install = re.findall(r"^uv tool install .*$", (DOCS / "install.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert install == ["uv tool install . --find-links wheels --constraints packaging/constraints.txt"]
