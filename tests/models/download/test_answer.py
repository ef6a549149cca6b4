from __future__ import annotations

from datetime import UTC, datetime

import pytest

from localrun.errors import DownloadFailed, SourceChanged, SourceRefused
from localrun.models.download.journal import Range
from localrun.models.download.link import Answer, PassingFailure, answer_of, strong_etag

ASKED = Range(100, 200)


def answered(status: int, **headers: str) -> Answer:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return answer_of(status, named, ASKED, name="fox.gguf", host="hub", now=datetime(2026, 11, 21, tzinfo=UTC))


def test_a_range_and_a_whole():
    assert answered(206, content_range="bytes 100-199/1000", etag='"v"') == Answer(100, 1000, '"v"')
    assert answered(200, content_length="1000") == Answer(0, 1000, "")
    assert answered(200) == Answer(0, None, "")


@pytest.mark.parametrize("said", ["", "bytes 0-99/1000", "bytes */1000", "pages 100-199/1000"])
def test_a_range_that_was_not_asked_for_is_not_taken(said: str):
    with pytest.raises(PassingFailure):
        answered(206, content_range=said)


def test_passing_failures_carry_what_the_server_asks_for():
    with pytest.raises(PassingFailure) as failure:
        answered(429, retry_after="7")
    assert failure.value.wait_s == 7


def test_the_rest_is_final():
    with pytest.raises(SourceChanged):
        answered(416)
    with pytest.raises(SourceRefused, match=r"status 404 .Entry not found."):
        answered(404, x_error_message="Entry not found")
    with pytest.raises(SourceRefused):
        answered(304)
    with pytest.raises(DownloadFailed, match="compressed"):
        answered(200, content_encoding="gzip")


@pytest.mark.parametrize(
    ("header", "etag"), [('"a"', '"a"'), ('W/"a"', ""), (None, ""), ("a", ""), ('""', ""), (' "a b" ', '"a b"')]
)
def test_only_a_strong_etag_names_bytes(header: str | None, etag: str):
    assert strong_etag(header) == etag


def test_a_reason_of_the_server_is_bounded_and_printable():
    with pytest.raises(SourceRefused) as refusal:
        answered(403, x_error_message="x" * 5000)
    assert len(refusal.value.message) < 500
    with pytest.raises(SourceRefused) as refusal:
        answered(403, x_error_message="\x1b[31mred")
    assert "\x1b" not in refusal.value.message
