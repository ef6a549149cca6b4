"""Compressed bodies: what they are unpacked to, and where that ends."""

from __future__ import annotations

import gzip
import sys
import time
import zlib
from collections.abc import Callable

import pytest

from localrun.errors import BadRequest
from localrun.server.http.limits import ENCODINGS, unpacked
from tests.server.http.test_limits import JSON, LIMIT_BYTES, LOCAL, Answer, Handler, ask

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

BODY = b'{"model": "tiny", "prompt": "abcabcabc"}'


def raw_deflate(body: bytes) -> bytes:
    packer = zlib.compressobj(wbits=-zlib.MAX_WBITS)
    return packer.compress(body) + packer.flush()


PACKED: list[tuple[str, Callable[[bytes], bytes]]] = [
    ("gzip", gzip.compress),
    ("deflate", zlib.compress),
    ("deflate", raw_deflate),
    ("zstd", zstd.compress),
    ("zstd", lambda body: zstd.compress(body, level=19)),
]


def sent(body: bytes, encoding: str, handler: Handler, *, n_pieces: int = 1, path: str = "/api/chat") -> Answer:
    headers = [*LOCAL, *JSON, ("transfer-encoding", "chunked"), ("content-encoding", encoding)]
    step = -(-len(body) // n_pieces)
    pieces = [body[start : start + step] for start in range(0, len(body), step)]
    return ask(handler, method="POST", path=path, headers=headers, chunks=pieces)


@pytest.mark.parametrize(("encoding", "packed"), PACKED)
@pytest.mark.parametrize("n_pieces", [1, 7])
def test_a_handler_gets_what_was_packed(encoding: str, packed: Callable[[bytes], bytes], n_pieces: int) -> None:
    for body in (BODY, b"x" * LIMIT_BYTES):
        handler = Handler()
        assert sent(packed(body), encoding.upper(), handler, n_pieces=n_pieces).status == 200
        assert handler.body == body


@pytest.mark.parametrize(("encoding", "packed"), PACKED)
def test_what_unpacks_to_more_than_the_limit_is_refused(encoding: str, packed: Callable[[bytes], bytes]) -> None:
    for n_bytes in (LIMIT_BYTES + 1, 64 * 1024 * 1024):
        bomb = packed(bytes(n_bytes))
        handler = Handler()
        answer = sent(bomb, encoding, handler) if len(bomb) <= LIMIT_BYTES else None
        assert answer is None or (answer.status, handler.body) == (413, b"")
        assert len(unpacked(bomb, encoding, 1000)) == 1001


def test_many_parts_are_one_body_and_bounded_together() -> None:
    for encoding, packed in (("gzip", gzip.compress), ("zstd", zstd.compress)):
        assert unpacked(packed(b"ab") + packed(b"") + packed(b"c"), encoding, 3) == b"abc"
        assert len(unpacked(packed(b"ab") * 1000, encoding, 100)) == 101


def test_what_many_parts_take_grows_with_them() -> None:
    """What lies behind a part must not be copied for each of them."""
    empty = gzip.compress(b"")

    def seconds(n_parts: int) -> float:
        body = empty * n_parts
        began_s = time.thread_time()
        assert unpacked(body, "gzip", 10) == b""
        return time.thread_time() - began_s

    few, many = (min(seconds(n_parts) for _ in range(3)) for n_parts in (10_000, 40_000))
    assert many < 8 * few, "four times as many"


def test_a_part_may_be_longer_than_what_is_unpacked_at_once() -> None:
    long = bytes(range(256)) * 1000
    for encoding, packed in PACKED:
        assert unpacked(packed(long), encoding, len(long)) == long


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_what_is_not_whole_or_not_packed_is_refused(encoding: str) -> None:
    packed = dict(PACKED)[encoding](BODY)
    for broken in (packed[:-1], packed[: len(packed) // 2], packed + b"x", BODY, packed[:4]):
        with pytest.raises(BadRequest, match=encoding):
            unpacked(broken, encoding, 10_000)
    assert unpacked(b"", encoding, 10) == b""


def test_a_window_beyond_what_decoders_must_have_is_refused() -> None:
    options = {zstd.CompressionParameter.window_log: 27, zstd.CompressionParameter.compression_level: 1}
    packer = zstd.ZstdCompressor(options=options)
    wide = packer.compress(bytes(100)) + packer.flush()
    with pytest.raises(BadRequest):
        unpacked(wide, "zstd", 1000)


@pytest.mark.parametrize("encoding", ["br", "gzip, zstd", "aws-chunked"])
def test_other_encodings_are_refused_by_the_names_of_those_that_are_known(encoding: str) -> None:
    handler = Handler()
    answer = sent(BODY, encoding, handler)
    assert (answer.status, handler.body) == (415, None)
    assert b"gzip, deflate or zstd" in answer.body


def test_files_are_sent_as_they_are() -> None:
    handler = Handler()
    answer = sent(gzip.compress(BODY), "gzip", handler, path="/api/blobs/sha256:" + "0" * 64)
    assert (answer.status, handler.body) == (415, None)
