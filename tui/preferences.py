"""The two themes, and a person's own choices for the interface, from `tui.toml` in the configuration folder:

    theme = "localrun-light"
    pictures = "blocks"

    [keys]
    "chat.new" = "f7"
    "monitor.cancel" = "k,delete"

    [mcp.files]
    command = "some-mcp-server"

Read once at the start. What is wrong in the file is left out, and said; the rest counts.

Does not: write the file.
"""

from __future__ import annotations

import tomllib
from enum import StrEnum
from pathlib import Path
from typing import Any, NamedTuple

from rich.style import Style
from textual.app import App
from textual.color import Color
from textual.theme import Theme

from localrun import stored
from localrun.tools import config
from localrun.tools.config import ServerSettings
from localrun.tui.keys import KEYS

# Quiet greys, one green for what runs, one amber for what waits or is being read in. Meaning is never carried by
# colour alone: every state is also a word, so monochrome terminals lose nothing.

DARK = Theme(
    name="localrun-dark",
    dark=True,
    background="#11161b",
    surface="#171d24",
    panel="#222b35",
    foreground="#d6dee7",
    primary="#5fc4ae",
    secondary="#8db4f2",
    accent="#eab765",
    success="#7fcb95",
    warning="#eab765",
    error="#ee7f79",
    variables={
        "footer-key-foreground": "#5fc4ae",
        "footer-background": "#11161b",
        "footer-description-foreground": "#93a1b0",
        "footer-item-background": "#11161b",
        "block-cursor-background": "#2a3a44",
        "block-cursor-foreground": "#eef4f8",
        "block-cursor-text-style": "none",
        "input-selection-background": "#33505a",
        "border": "#3b4856",
        "border-blurred": "#2a343f",
    },
)

LIGHT = Theme(
    name="localrun-light",
    dark=False,
    background="#faf8f3",
    surface="#f2eee5",
    panel="#e6dfd1",
    foreground="#2a2f35",
    primary="#0c7265",
    secondary="#3558a8",
    accent="#96590a",
    success="#25713f",
    warning="#96590a",
    error="#b1332f",
    variables={
        "footer-key-foreground": "#0c7265",
        "footer-background": "#faf8f3",
        "footer-description-foreground": "#6a6f75",
        "footer-item-background": "#faf8f3",
        "block-cursor-background": "#d5e3da",
        "block-cursor-foreground": "#1c2126",
        "block-cursor-text-style": "none",
        "input-selection-background": "#bfd8d0",
        "border": "#b9b09d",
        "border-blurred": "#d6cebd",
    },
)


class Pictures(StrEnum):
    """How pictures are drawn: as the terminal can, as real ones by kitty's protocol, as half blocks, or not at all."""

    AUTO = "auto"
    KITTY = "kitty"
    BLOCKS = "blocks"
    OFF = "off"


class Preferences(NamedTuple):
    """`theme` None is the usual one. `servers` are those of tools. `problems` are sentences for the person."""

    theme: str | None = None
    keys: dict[str, str] = {}  # noqa: RUF012 - nobody changes it
    problems: tuple[str, ...] = ()
    pictures: Pictures = Pictures.AUTO
    servers: dict[str, ServerSettings] = {}  # noqa: RUF012


def rich_style(app: App[Any], colour: str) -> Style:
    """A colour of the theme, such as `warning`, for what rich draws."""
    return Style(color=Color.parse(app.theme_variables[colour]).rich_color)


def load(path: Path) -> Preferences:
    """Never raises; a file that is not there is no problem."""
    try:
        content = tomllib.loads(stored.contents(path).decode("utf-8-sig"))
    except FileNotFoundError:
        return Preferences()
    except (OSError, tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        return Preferences(problems=(f"{path} cannot be read: {error}",))
    unknown = sorted(content.keys() - {"theme", "pictures", "keys", "mcp"})
    problems = [f"{path.name}: {name!r} is unknown; there are theme, pictures, keys and mcp" for name in unknown]
    theme = content.get("theme")
    if theme is not None and not isinstance(theme, str):
        problems.append(f"{path.name}: theme must be a text")
        theme = None
    pictures = content.get("pictures", Pictures.AUTO)
    if pictures not in list(Pictures):
        problems.append(f"{path.name}: pictures is {pictures!r}, but must be one of {', '.join(Pictures)}")
        pictures = Pictures.AUTO
    table = content.get("keys", {})
    keys: dict[str, str] = {}
    if not isinstance(table, dict):
        problems.append(f"{path.name}: keys must be a table")
        table = {}
    for name, value in table.items():
        if name not in KEYS:
            problems.append(f"{path.name}: keys has {name!r}, which is none of {', '.join(KEYS)}")
        elif not isinstance(value, str) or not value.strip():
            problems.append(f"{path.name}: the key of {name!r} must be a text such as ctrl+t")
        else:
            keys[name] = value.strip()
    servers, its_problems = config.configured(content.get("mcp", {}), path.name)
    return Preferences(theme, keys, (*problems, *its_problems), Pictures(pictures), servers)
