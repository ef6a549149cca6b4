from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest

from localrun.tui.history import History, HistoryUnavailable, open_history


@pytest.fixture
def history(tmp_path: Path) -> Iterator[History]:
    opened = open_history(tmp_path / "state" / "history.db")
    assert opened.put_aside is None
    yield opened.history
    opened.history.close()


def test_a_chat_is_there_after_a_restart(tmp_path: Path):
    path = tmp_path / "history.db"
    first = open_history(path).history
    chat = first.begin("tiny", now_s=1.0, system="Be brief.", parameters={"temperature": 0.5})
    question = first.add(chat.id, None, "user", "What is\n a fox?", now_s=2.0)
    first.add(chat.id, question.id, "assistant", "An animal.", now_s=3.0, extra={"output_tokens": 3})
    first.close()
    second = open_history(path).history
    (found,) = second.chats()
    assert (found.title, found.model, found.system, found.parameters) == (
        "What is a fox?",
        "tiny",
        "Be brief.",
        {"temperature": 0.5},
    )
    assert [(message.role, message.content) for message in second.branch(found.id)] == [
        ("user", "What is\n a fox?"),
        ("assistant", "An animal."),
    ]
    assert second.branch(found.id)[1].extra == {"output_tokens": 3}
    second.close()


@pytest.mark.skipif(os.name == "nt", reason="Windows has no modes")
def test_chats_are_nobody_else_s(tmp_path: Path):
    path = tmp_path / "state" / "history.db"
    usual = os.umask(0o022)
    try:
        opened = open_history(path).history
    finally:
        os.umask(usual)
    opened.begin("tiny", now_s=1.0)
    files = sorted(path.parent.iterdir())
    assert [file.name for file in files] == ["history.db", "history.db-shm", "history.db-wal"]
    assert [file.stat().st_mode & 0o077 for file in files] == [0, 0, 0]
    opened.close()


def test_an_edited_question_is_a_sibling_and_both_branches_can_be_shown(history: History):
    chat = history.begin("tiny", now_s=1.0)
    first = history.add(chat.id, None, "user", "one", now_s=2.0)
    history.add(chat.id, first.id, "assistant", "answer to one", now_s=3.0)
    second = history.add(chat.id, None, "user", "two", now_s=4.0)
    assert [message.content for message in history.branch(chat.id)] == ["two"]
    history.add(chat.id, second.id, "assistant", "answer to two", now_s=5.0)
    assert [message.content for message in history.siblings(second)] == ["one", "two"]
    history.show(first)
    assert [message.content for message in history.branch(chat.id)] == ["one", "answer to one"]
    assert history.chat(chat.id).title == "one"


def test_a_fork_is_a_chat_of_its_own(history: History):
    chat = history.begin("tiny", now_s=1.0, system="Be brief.")
    question = history.add(chat.id, None, "user", "one", now_s=2.0)
    answer = history.add(chat.id, question.id, "assistant", "first", now_s=3.0)
    history.add(chat.id, answer.id, "user", "more", now_s=4.0)
    forked = history.fork(chat.id, answer.id, now_s=9.0)
    assert [message.content for message in history.branch(forked.id)] == ["one", "first"]
    assert (forked.title, forked.system) == ("one (branch)", "Be brief.")
    history.delete(chat.id)
    assert [found.id for found in history.chats()] == [forked.id]


def test_search_finds_words_by_their_beginning_in_any_chat(history: History):
    for text in ("The quick brown fox", "A brown bear", "Nothing of it"):
        history.add(history.begin("tiny", now_s=1.0).id, None, "user", text, now_s=2.0)
    assert {hit.chat.title for hit in history.search("brown")} == {"The quick brown fox", "A brown bear"}
    (hit,) = history.search("bro be")
    assert hit.excerpt == "A brown [bear]" or "[bear]" in hit.excerpt
    assert history.search('"; DROP') == []
    assert history.search("OR") == []
    assert history.search("  ") == []


def test_what_was_deleted_is_not_found(history: History):
    chat = history.begin("tiny", now_s=1.0)
    history.add(chat.id, None, "user", "secret words", now_s=2.0)
    history.delete(chat.id)
    assert history.search("secret") == []
    assert history.chats() == []
    with pytest.raises(KeyError):
        history.add(chat.id, None, "user", "late", now_s=3.0)


def test_chats_are_listed_by_their_latest_use_and_empty_ones_not_at_all(history: History):
    old, new, _ = (history.begin(name, now_s=1.0) for name in ("old", "new", "empty"))
    for at, chat in enumerate((old, new, old)):
        history.add(chat.id, history.chat(chat.id).leaf_id, "user", "x", now_s=2.0 + at)
    assert [chat.model for chat in history.chats()] == ["old", "new"]


def test_two_windows_share_one_file(tmp_path: Path):
    one, other = (open_history(tmp_path / "history.db").history for _ in range(2))
    chat = one.begin("tiny", now_s=1.0)
    one.add(chat.id, None, "user", "from one", now_s=2.0)
    other.add(chat.id, other.chat(chat.id).leaf_id, "assistant", "from the other", now_s=3.0)
    assert [message.content for message in one.branch(chat.id)] == ["from one", "from the other"]
    one.close()
    other.close()


def test_a_damaged_file_is_put_aside_not_deleted(tmp_path: Path):
    path = tmp_path / "history.db"
    path.write_bytes(b"this is no database, and long enough to be looked at" * 40)
    opened = open_history(path)
    assert opened.put_aside is not None
    assert opened.put_aside.read_bytes().startswith(b"this is no database")
    assert opened.history.chats() == []
    opened.history.close()


def test_a_damaged_index_is_found_before_a_message_meets_it(tmp_path: Path):
    path = tmp_path / "history.db"
    first = open_history(path).history
    chat = first.begin("tiny", now_s=1.0)
    first.add(chat.id, None, "user", "What is a fox?", now_s=2.0)
    first.close()
    with sqlite3.connect(path) as database:
        database.execute("UPDATE message_texts_config SET v = 99 WHERE k = 'version'")
    database.close()
    opened = open_history(path)
    assert opened.put_aside is not None
    assert opened.n_rescued == 1
    (rescued,) = opened.history.chats()
    opened.history.add(rescued.id, rescued.leaf_id, "assistant", "An animal.", now_s=3.0)
    assert [hit.role for hit in opened.history.search("fox")] == ["user"]
    opened.history.close()


def test_a_newer_file_is_left_alone(tmp_path: Path):
    path = tmp_path / "history.db"
    with sqlite3.connect(path) as database:
        database.execute("PRAGMA user_version = 99")
    database.close()
    before = path.read_bytes()
    with pytest.raises(HistoryUnavailable, match="newer localrun"):
        open_history(path)
    assert path.read_bytes()[:16] == before[:16]


def test_a_folder_that_cannot_be_is_said(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(HistoryUnavailable, match="chats are not kept"):
        open_history(tmp_path / "file" / "history.db")


def test_a_chat_of_thousands_of_messages_can_be_deleted_and_restored(history: History):
    chat, parent = history.begin("tiny", now_s=1.0), None
    for number in range(2_500):
        parent = history.add(chat.id, parent, "user", f"number {number}", now_s=2.0).id
    deleted = history.delete(chat.id)
    assert history.chats() == []
    assert history.search("number") == []
    with pytest.raises(KeyError):
        history.delete(chat.id)
    history.restore(deleted)
    (restored,) = history.chats()
    assert [message.content for message in history.branch(restored.id)] == [f"number {n}" for n in range(2_500)]


def test_a_restored_chat_has_its_branches_and_disturbs_no_other(history: History):
    chat = history.begin("tiny", now_s=1.0, system="Be brief.", parameters={"top_k": 3})
    first = history.add(chat.id, None, "user", "one", now_s=2.0, extra={"shown": "one!"})
    history.add(chat.id, first.id, "assistant", "answer to one", now_s=3.0)
    history.add(chat.id, None, "user", "two", now_s=4.0)
    deleted = history.delete(chat.id)
    other = history.begin("tiny", now_s=5.0)
    history.add(other.id, None, "user", "somebody else's", now_s=5.0)
    restored = history.restore(deleted)
    assert restored._replace(id=0, leaf_id=0) == deleted.chat._replace(id=0, leaf_id=0)
    (shown,) = history.branch(restored.id)
    siblings = history.siblings(shown)
    assert [(message.content, message.extra) for message in siblings] == [("one", {"shown": "one!"}), ("two", {})]
    history.show(siblings[0])
    assert [message.content for message in history.branch(restored.id)] == ["one", "answer to one"]
    assert [message.content for message in history.branch(other.id)] == ["somebody else's"]
    assert [hit.chat.id for hit in history.search("answer")] == [restored.id]


def test_a_search_knows_titles_of_which_no_message_has_the_words(history: History):
    named, other = (history.begin("tiny", now_s=1.0) for _ in range(2))
    first = history.add(named.id, None, "user", "What is an otter?", now_s=2.0)
    last = history.add(named.id, first.id, "assistant", "An animal.", now_s=3.0)
    history.add(other.id, None, "user", "holidays", now_s=4.0)
    history.rename(named.id, "Holidays in Ångström")
    assert [(hit.chat.id, hit.excerpt) for hit in history.search("holi")] == [(named.id, ""), (other.id, "[holidays]")]
    assert [(hit.chat.title, hit.message_id) for hit in history.search("ånG hol")] == [
        ("Holidays in Ångström", last.id)
    ]
    assert [hit.excerpt for hit in history.search("otter")] == ["What is an [otter]?"]
    assert history.search("holidays otter") == []
