"""What all pages of `/docs` have in common: one HTML document without anything from elsewhere, light or dark as the
reader's system is.

Pure. Does not: make content.
"""

from __future__ import annotations

from html import escape

# No script runs and nothing is loaded, whatever a page says.
CONTENT_POLICY = b"default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"

_STYLE = """
:root { color-scheme: light dark; --line: #8884; --quiet: #8889; --back: #8881; --link: light-dark(#0550ae, #79c0ff) }
* { box-sizing: border-box }
body { margin: 0 auto; max-width: 68rem; padding: 1rem 1.25rem 4rem; font: 16px/1.5 system-ui, sans-serif }
a { color: var(--link) }
h1, h2, h3 { line-height: 1.2 }
h2 { margin-top: 3rem; border-bottom: 1px solid var(--line) }
code, pre { font: 0.875em/1.45 ui-monospace, monospace }
pre { overflow-x: auto; padding: 0.75rem; background: var(--back); border-radius: 6px }
table { border-collapse: collapse; width: 100%; font-size: 0.9375rem }
th, td { text-align: left; vertical-align: top; padding: 0.3rem 0.75rem 0.3rem 0; border-top: 1px solid var(--line) }
td:first-child code { overflow-wrap: anywhere }
details { border: 1px solid var(--line); border-radius: 6px; margin: 0.5rem 0; padding: 0.4rem 0.75rem }
summary { cursor: pointer }
summary b { font: 600 0.9375rem ui-monospace, monospace }
.limit, .quiet { opacity: 0.75; font-size: 0.875rem }
.method { display: inline-block; min-width: 4.5rem; font: 600 0.8125rem ui-monospace, monospace }
nav ul { columns: 3 14rem; padding-left: 1.25rem }
.wide { overflow-x: auto }
"""


def page(title: str, content: str) -> str:
    """A whole document. `content` is HTML, `title` is text."""
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><style>{_STYLE}</style></head>'
        f"<body>{content}</body></html>"
    )
