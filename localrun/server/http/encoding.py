"""Bodies that came compressed: gzip, deflate and zstd.

Pure. A body is unpacked whole, once all of it has arrived, so that a client that sends slowly holds no more than what
it has sent; and never beyond its limit, whatever it would become.
"""

from __future__ import annotations

import sys
import zlib
from collections.abc import Callable
from typing import Protocol

from localrun.errors import BadRequest

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

# A stream is given no more at once: what lies behind its end is copied, and a body may be millions of tiny streams.
_PIECE_BYTES = 4096
# Beyond 8 MiB decoders need not go (RFC 8878, 3.1.1.1.2), and each keeps that much.
_ZSTD_OPTIONS: dict[int, int] = {zstd.DecompressionParameter.window_log_max: 23}


class _Unpacker(Protocol):
    """As of zlib and zstd: of one stream; what comes behind it is left in `unused_data`."""

    @property
    def eof(self) -> bool: ...

    @property
    def unused_data(self) -> bytes: ...

    def decompress(self, data: bytes, max_length: int, /) -> bytes: ...


_UNPACKERS: dict[str, Callable[[bytes], _Unpacker]] = {
    "gzip": lambda _: zlib.decompressobj(zlib.MAX_WBITS | 16),
    # Some send it without the header that belongs to it.
    "deflate": lambda body: zlib.decompressobj(zlib.MAX_WBITS if body[0] & 15 == zlib.DEFLATED else -zlib.MAX_WBITS),
    "zstd": lambda _: zstd.ZstdDecompressor(options=_ZSTD_OPTIONS),
}
KNOWN = tuple(_UNPACKERS)


def unpacked(body: bytes, encoding: str, max_bytes: int) -> bytes:
    """At most `max_bytes` and one more, which tells that there is more. Raises BadRequest for what is not whole, or is
    not in that encoding."""
    found, at = bytearray(), 0
    while at < len(body) and len(found) <= max_bytes:
        unpacker = _UNPACKERS[encoding](body[at : at + 1])
        try:
            while at < len(body) and not unpacker.eof and len(found) <= max_bytes:
                piece = body[at : at + _PIECE_BYTES]
                found += unpacker.decompress(piece, max_bytes + 1 - len(found))
                at += len(piece) - len(unpacker.unused_data)
        except (zlib.error, zstd.ZstdError) as error:
            raise BadRequest(f"the body is not {encoding}, as its Content-Encoding says: {error}") from None
        if not unpacker.eof and len(found) <= max_bytes:
            raise BadRequest(f"the body breaks off: it is not whole {encoding}")
    return bytes(found)
