"""From what stands in a field to bytes, and from a prompt with markers to one with media."""

from __future__ import annotations

import base64
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from localrun.errors import BadRequest, BadTemplate
from localrun.server.media import sources
from localrun.server.prompting.ask import MAX_MEDIA, Attachments, joined
from localrun.server.prompting.segments import placed, shown
from localrun.wire import Media, MediaKind, Segment

PICTURE, SOUND = Media(MediaKind.IMAGE, "/a", b"a"), Media(MediaKind.AUDIO, "/b", b"b")


@given(
    st.binary(max_size=100), st.sampled_from(["", "data:image/png;base64,", "DATA:;base64,", "data:a/b;c=d;base64,"])
)
def test_base64_with_and_without_a_prefix(data: bytes, prefix: str) -> None:
    assert sources.bytes_of(prefix + base64.b64encode(data).decode(), "f") == data


@given(st.binary(max_size=100))
def test_base64_without_its_end_and_with_spaces(data: bytes) -> None:
    written = base64.b64encode(data).decode()
    assert sources.bytes_of(written.rstrip("="), "f") == data
    assert sources.bytes_of(f"data:image/png;base64, {written[:3]} {written[3:]}", "f") == data


@pytest.mark.parametrize("wrap", ["\n", "\r\n"])
def test_long_ones_in_lines(wrap: str) -> None:
    data = random.Random(1).randbytes(1_500_000)
    text = base64.b64encode(data).decode()
    lines = wrap.join(text[at : at + 76] for at in range(0, len(text), 76))
    assert sources.bytes_of(lines, "f") == data
    assert sources.bytes_of(text, "f") == data


@pytest.mark.parametrize(
    "text",
    [
        "a", "ab=c", "a===", "====", "ab==ab==", "ab-_", "aé==", "data:image/png,abcd",
        "data:;base64", "file:///etc/passwd", "ftp://host/x", "blob:x", "\0\0\0\0", "aGk=" + "A" * 1_000_000,
        "A" * 524_286 + "==" + "AAAA", "A" * 524_288 + "A",
    ],
)  # fmt: skip
def test_what_is_no_base64(text: str) -> None:
    with pytest.raises(BadRequest) as caught:
        sources.bytes_of(text, "images[0]")
    assert caught.value.field == "images[0]"
    assert len(caught.value.message) < 300


def test_what_is_a_url() -> None:
    assert sources.url_of("https://host/x") == "https://host/x"
    assert sources.url_of("HTTP:host") == "HTTP:host"
    assert sources.url_of("data:image/png;base64,https://") is None
    assert sources.url_of("httpsAAAA") is None


def test_parts_stand_on_lines_of_their_own_but_not_beside_a_picture() -> None:
    media = Attachments()
    one, two = media.add("x", "f"), media.add("y", "g")
    assert joined(["a", "b"], "\n") == "a\nb"
    assert joined(["a", one, "b", "c", two], "\n") == f"a{one}b\nc{two}"
    assert joined([one, two, "a"], "\n\n") == f"{one}{two}a"
    assert joined(["", "a"], "\n") == "\na"
    assert (joined([], "\n"), type(joined([one], "\n"))) == ("", str)


def test_a_request_has_a_most_of_media_and_other_markers_each_time() -> None:
    media, other = Attachments(), Attachments()
    markers = {media.add("x", "f") for _ in range(MAX_MEDIA)}
    assert len(markers) == MAX_MEDIA
    assert other.add("x", "f") not in markers
    assert len(other.all()[0].marker) > 32
    with pytest.raises(BadRequest, match=r"g: the limit is 16 pictures and recordings"):
        media.add("x", "g")


def test_a_prompt_gets_what_its_markers_stand_for() -> None:
    media = Attachments()
    one, two = media.add("x", "f"), media.add("y", "g")
    decoded = {one: PICTURE, two: SOUND}
    prompt = (Segment(f"a{one}b"), Segment(f"{two}c", trusted=False), Segment("d"))
    messages = [{"role": "user", "content": f"{one}{two}"}]
    made = placed(prompt, media.all(), decoded, messages)
    assert made == (
        Segment("a"), Segment("", media=PICTURE, field="f"), Segment("b"), Segment("", media=SOUND, field="g"),
        Segment("c", trusted=False), Segment("d"),
    )  # fmt: skip
    assert shown(made) == ("a[img-0]b[img-1]cd", 2)
    with pytest.raises(BadTemplate, match="g: the chat template leaves it out"):
        placed((Segment(one),), media.all(), decoded, messages)
    with pytest.raises(BadTemplate, match="f: the chat template has it more than once"):
        placed((Segment(f"{one}{two}{one}"),), media.all(), decoded, messages)
    # Of a conversation that lost its oldest messages.
    assert placed((Segment(two),), media.all(), decoded, [{"content": two}]) == (Segment("", media=SOUND, field="g"),)
