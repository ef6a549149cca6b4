"""The chat page at `/`: which requests get it, its files, and the headers that keep it to itself.

The page is a few files of this package, read once: no build step, and nothing from elsewhere. It is a client like any
other: it lists `/v1/models`, streams `/v1/chat/completions`, and asks for an API key where one is refused.

Its policy runs only scripts of these files, so text of a model cannot become one, whatever the page did with it.
Does not: know models or keep conversations (the browser's storage does).
"""

from __future__ import annotations

from functools import cache
from importlib import resources

from localrun.server.http.exchange import Exchange
from localrun.server.http.failures import Headers
from localrun.server.runtime import Runtime

_POLICY = (
    b"default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; connect-src 'self'; "
    b"manifest-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_SAFE: Headers = [
    (b"content-security-policy", _POLICY),
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"DENY"),
    (b"referrer-policy", b"same-origin"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cross-origin-resource-policy", b"same-origin"),
    # A newer localrun has a newer page.
    (b"cache-control", b"no-cache"),
]
_VARIES = (b"vary", b"accept")  # what is at `/`
_SCRIPT = "text/javascript"
FILES = {
    "chat.css": "text/css",
    "chat.js": _SCRIPT,
    "chats.js": _SCRIPT,
    "icon.svg": "image/svg+xml",
    "manifest.webmanifest": "application/manifest+json",
    "markdown.js": _SCRIPT,
    "models.js": _SCRIPT,
    "server.js": _SCRIPT,
}


def wants_html(accept: str) -> bool:
    """Whether an Accept header names HTML; `*/*`, which every tool sends, does not."""
    for part in accept.lower().split(","):
        kind, *parameters = (text.strip() for text in part.split(";"))
        if kind == "text/html":
            return not any(text.replace(" ", "") in ("q=0", "q=0.0", "q=0.00", "q=0.000") for text in parameters)
    return False


async def root(_: Runtime, exchange: Exchange) -> None:
    """A browser gets the chat page; whoever does not ask for HTML gets what Ollama says there, by which its clients
    know a server."""
    if wants_html(exchange.header(b"accept")):
        await _send(exchange, "index.html", [_VARIES])
    else:
        plain: Headers = [(b"content-type", b"text/plain; charset=utf-8"), _VARIES]
        await exchange.answer(b"Ollama is running", headers=plain)


async def file(_: Runtime, exchange: Exchange) -> None:
    await _send(exchange, exchange.path.rpartition("/")[2], [])


async def _send(exchange: Exchange, name: str, more: Headers) -> None:
    kind = f"{FILES.get(name, 'text/html')}; charset=utf-8"
    await exchange.answer(_content(name), headers=[(b"content-type", kind.encode()), *_SAFE, *more])


@cache
def _content(name: str) -> bytes:
    return resources.files(__name__).joinpath(name).read_bytes()
