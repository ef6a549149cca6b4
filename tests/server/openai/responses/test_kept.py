"""Responses that are kept, within bounds."""

from __future__ import annotations

import pytest

from localrun.errors import NotFound
from localrun.server.openai.responses.kept import Kept, KeptResponses


def response(name: str, text: str = "") -> dict[str, object]:
    return {"id": name, "output": [{"id": f"msg_{name}", "type": "message", "text": text}]}


def test_what_is_kept_is_found_with_its_whole_conversation() -> None:
    kept = KeptResponses()
    kept.add(response("a"), [{"id": "in_a"}])
    kept.add(response("b"), [*kept.get("a").conversation, {"id": "in_b"}])
    assert [item["id"] for item in kept.get("b").conversation] == ["in_a", "msg_a", "in_b", "msg_b"]
    kept.delete("a")
    assert [item["id"] for item in kept.get("b").conversation] == ["in_a", "msg_a", "in_b", "msg_b"]
    assert kept.item("msg_a") is not None
    assert kept.item("msg_c") is None


def test_the_one_asked_for_longest_ago_goes_first() -> None:
    kept = KeptResponses(max_responses=2)
    kept.add(response("a"), [])
    kept.add(response("b"), [])
    kept.get("a")
    kept.add(response("c"), [])
    assert len(kept) == 2
    with pytest.raises(NotFound, match="'b'"):
        kept.get("b")
    assert kept.get("a")


def test_bytes_are_bounded_too() -> None:
    kept = KeptResponses(max_bytes=12_000)
    for name in "abcdefgh":
        kept.add(response(name, "x" * 3000), [])
    assert len(kept) == 3
    kept.delete("h")
    kept.add(response("i", "x" * 3000), [])
    assert len(kept) == 3, "what was deleted counts no more"
    kept.add(response("huge", "x" * 20_000), [])
    assert len(kept) == 0


def test_items_are_found_without_looking_through_what_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = KeptResponses(max_responses=2)
    kept.add(response("a"), [{"id": "in", "text": "old"}, {"id": ["no", "text"]}])
    kept.add(response("b"), [{"id": "in", "text": "new"}])
    with monkeypatch.context() as patched:
        patched.setattr(Kept, "conversation", property(lambda _: pytest.fail("a conversation was looked through")))
        assert kept.item("in") == {"id": "in", "text": "new"}
        assert kept.item("msg_a") is not None
        assert kept.item("msg_c") is None
    kept.delete("b")
    assert kept.item("in") == {"id": "in", "text": "old"}
    assert kept.item("msg_b") is None
    kept.add(response("c"), [])
    kept.add(response("d"), [])
    found = {name for name in ("in", "msg_a", "msg_b", "msg_c", "msg_d") if kept.item(name) is not None}
    assert found == {"msg_c", "msg_d"}, "nothing of what has gone is held on to"


def test_an_unknown_one_names_the_field_and_the_way_out() -> None:
    with pytest.raises(NotFound, match="whole conversation") as caught:
        KeptResponses().get("resp_1", field="previous_response_id")
    assert caught.value.field == "previous_response_id"
    with pytest.raises(NotFound):
        KeptResponses().delete("resp_1")


def test_nobody_s_responses_go_for_another_s() -> None:
    kept = KeptResponses(max_responses=2, max_bytes=12_000, max_bytes_of_all=15_000)
    kept.add(response("a"), [], b"alice")
    for name in "bcdefgh":
        kept.add(response(name, "x" * 3000), [], b"bob")
    assert kept.get("a", b"alice")
    assert kept.get("h", b"bob")
    with pytest.raises(NotFound):
        kept.get("a", b"bob")
    kept.add(response("i", "x" * 9000), [], b"carol")
    with pytest.raises(NotFound):
        kept.get("i", b"carol")
    assert kept.get("a", b"alice")
    assert kept.get("h", b"bob"), "there was no room for all, and those who came first keep theirs"


def test_one_id_of_two_owners_is_two_responses() -> None:
    kept = KeptResponses()
    kept.add(response("a", "one"), [], b"alice")
    kept.add(response("a", "two"), [], b"bob")
    kept.delete("a", b"bob")
    assert kept.get("a", b"alice").response["output"][0]["text"] == "one"


def test_what_many_small_values_take_is_counted() -> None:
    kept = KeptResponses(max_bytes=1_000_000)
    kept.add(response("a"), [{"junk": [[] for _ in range(20_000)]}])
    assert len(kept) == 0
