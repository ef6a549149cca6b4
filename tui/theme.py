"""The two themes of localrun, a dark and a light one.

Quiet greys, one green for what runs, one amber for what waits or is being read in. Meaning is never carried by colour
alone: every state is also a word, so monochrome terminals lose nothing.
"""

from __future__ import annotations

from textual.theme import Theme

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
