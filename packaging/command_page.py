"""`localrun/docs/cli.md`: every command with its options, from click itself."""

from __future__ import annotations

import command_tree

from localrun.cli import exits

HEAD = """\
# The command line

Every command with every option. `localrun COMMAND --help` says the same. `packaging/generate.py` writes this page from
the commands themselves.

A command that works with models starts a daemon in the background if none runs; that daemon exits after half an hour
without requests. [settings.md](settings.md) explains the settings, with their sources and defaults.

"""


def text() -> str:
    """The page."""
    parts = [HEAD]
    for entry in command_tree.entries():
        level = "##" if entry.path.count(" ") <= 1 else "###"
        parts.append(f"{level} {entry.path}\n\n```text\n{entry.usage}\n```\n\n")
        parts += [paragraph + "\n\n" for paragraph in entry.paragraphs]
        options = [(name, what) for name, what in entry.options if what]
        if options:
            parts.append("| option | |\n|---|---|\n")
            parts += [f"| `{_cell(name)}` | {_cell(what)} |\n" for name, what in options]
            parts.append("\n")
    parts.append("## Exit codes\n\n| code | meaning |\n|---|---|\n")
    parts += [f"| {code} | {meaning} |\n" for code, meaning in exits.MEANINGS.items()]
    return "".join(parts)


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
