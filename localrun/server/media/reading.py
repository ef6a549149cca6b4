"""From what a client wrote into a field to the bytes of a file: base64, data URIs and, where it is allowed, URLs.

Base64 is strict, but for line endings, which many programs put in. A long one is decoded piece by piece, so that the
thread that does it never keeps others from running. A `data:` prefix is accepted wherever base64 is, and what type it
names does not count: the bytes decide.

Does not: look into the bytes (`headers.py`), or connect to anything (`fetching.py`).
"""

from __future__ import annotations

import binascii
import re

from localrun.errors import BadRequest

# A multiple of four; about a millisecond's work.
_PIECE_CHARACTERS = 512 * 1024
_DATA_URI = re.compile(r"data:[^,]{0,200};base64,", re.IGNORECASE)
_SCHEME = re.compile(r"([a-z][a-z0-9+.-]{0,20}):", re.IGNORECASE)
_MOST_QUOTED = 40


def url_of(source: str) -> str | None:
    """The source, if it is an http(s) URL."""
    found = _SCHEME.match(source)
    return source if found is not None and found[1].lower() in ("http", "https") else None


def bytes_of(source: str, field: str) -> bytes:
    """Of base64 or a data URI. Raises BadRequest naming `field`."""
    start = 0
    scheme = _SCHEME.match(source)
    if scheme is not None:
        prefix = _DATA_URI.match(source)
        if scheme[1].lower() != "data":
            raise BadRequest(
                f"{field}: {scheme[0][:_MOST_QUOTED]!r} addresses are not read here; send the file as base64 or as a "
                f"data URI (data:image/png;base64,...)",
                field=field,
            )
        if prefix is None:
            raise BadRequest(f"{field}: a data URI that is not base64; use data:image/png;base64,...", field=field)
        start = prefix.end()
    made, rest, is_over = bytearray(), "", False
    try:
        for at in range(start, len(source), _PIECE_CHARACTERS):
            piece = rest + "".join(source[at : at + _PIECE_CHARACTERS].split())
            whole = len(piece) // 4 * 4
            if is_over and piece:
                raise binascii.Error("data after its end")
            made += binascii.a2b_base64(piece[:whole], strict_mode=True)
            rest, is_over = piece[whole:], piece.endswith("=", 0, whole)
        if rest and is_over:
            raise binascii.Error("data after its end")
        made += binascii.a2b_base64(rest + "=" * (-len(rest) % 4), strict_mode=True)  # some clients leave the end out
    except ValueError as error:  # binascii.Error, or letters beyond ASCII
        raise BadRequest(
            f"{field}: not valid base64 ({error}); send the file's bytes as base64, with or without "
            f"'data:image/png;base64,' before",
            field=field,
        ) from None
    return bytes(made)
