"""The files of pictures and sounds: kept once, beside the chats, and no longer than they are needed."""

from __future__ import annotations

import base64
import json
import os
import sqlite3
import stat
import sys
import time
from contextlib import closing
from pathlib import Path

import pytest

from localrun.attachments import Attachment, Kind
from localrun.tui.conversation import Conversation
from localrun.tui.history import History, open_history
from localrun.tui.media import UNUSED_FILES_STAY_S, AttachedFile, MediaFiles, examined, extra_of, media_of

PNG = b"\x89PNG\r\n\x1a\nno picture"


def _picture(name: str, data: bytes = PNG) -> AttachedFile:
    return examined(Attachment(name, Kind.PICTURE, data))


def _names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_file_is_kept_once_and_for_its_owner(tmp_path: Path):
    files = MediaFiles(tmp_path / "media")
    files.put(PNG)
    files.put(PNG)
    medium = _picture("a.png").medium
    assert medium is not None
    assert _names(tmp_path / "media") == [medium.sha256]
    assert files.get(medium.sha256) == PNG
    assert files.get("0" * 64) is None
    assert files.get("../media/" + medium.sha256) is None
    if sys.platform != "win32":
        assert stat.S_IMODE((tmp_path / "media").stat().st_mode) == 0o700
        assert stat.S_IMODE((tmp_path / "media" / medium.sha256).stat().st_mode) == 0o600


def test_a_file_that_was_changed_is_not_sent_as_what_it_was(tmp_path: Path):
    files = MediaFiles(tmp_path)
    files.put(PNG)
    medium = _picture("a.png").medium
    (tmp_path / medium.sha256).write_bytes(b"something else")
    assert files.get(medium.sha256) is None


def test_what_cannot_be_written_is_kept_in_memory_and_said(tmp_path: Path):
    (tmp_path / "media").write_text("a file is in the way")
    files = MediaFiles(tmp_path / "media")
    with pytest.raises(OSError, match="media"):
        files.put(PNG)
    assert files.get(_picture("a.png").medium.sha256) == PNG


def test_unused_files_stay_for_a_day(tmp_path: Path):
    history = History(tmp_path / "chats.db")
    chat = history.begin("tiny", now_s=1.0)
    folder = tmp_path / "chats.media"
    pictures = {name: _picture(name, PNG + name.encode()) for name in ("used", "deleted", "old", "new")}
    for picture in pictures.values():
        history.files.put(picture.file.data)
    history.add(chat.id, None, "user", "one", now_s=2.0, extra=extra_of([pictures["used"].medium]))
    other = history.begin("tiny", now_s=1.0)
    history.add(other.id, None, "user", "two", now_s=2.0, extra=extra_of([pictures["deleted"].medium]))
    long_ago = time.time() - UNUSED_FILES_STAY_S - 60
    for name in ("used", "deleted", "old"):
        os.utime(folder / pictures[name].medium.sha256, (long_ago, long_ago))
    deleted = history.delete(other.id)  # which counts as a use: it can be brought back
    history.close()
    history = History(tmp_path / "chats.db")
    assert _names(folder) == sorted(pictures[name].medium.sha256 for name in ("used", "deleted", "new"))
    (message,) = history.branch(history.restore(deleted).id)
    assert media_of(message.extra) == (pictures["deleted"].medium,)
    history.close()


def test_pictures_of_version_1_become_files(tmp_path: Path):
    path = tmp_path / "chats.db"
    history = History(path)
    chat = history.begin("tiny", now_s=1.0)
    first = history.add(chat.id, None, "user", "what is this?", now_s=2.0)
    history.add(chat.id, first.id, "assistant", "a fox", now_s=3.0)
    history.close()
    image = base64.b64encode(PNG + b"\0" * 200_000).decode()
    extra = {"shown": "what is this?\n[with fox.png]", "images": [image, "no base64!"]}
    with closing(sqlite3.connect(path)) as old:
        old.execute("UPDATE messages SET extra = ? WHERE id = ?", (json.dumps(extra), first.id))
        old.execute("DROP TABLE drafts")
        old.execute("PRAGMA user_version = 1")
        old.commit()
    opened = open_history(path)
    assert opened.put_aside is None
    message, answer = opened.history.branch(chat.id)
    (medium,) = media_of(message.extra)
    assert (message.extra["shown"], "images" in message.extra, medium.size_bytes) == (extra["shown"], False, 200_018)
    assert answer.extra == {}
    assert opened.history.files.get(medium.sha256) == base64.b64decode(image)
    opened.history.close()
    assert path.stat().st_size < 100_000
    assert open_history(path).history.chat(chat.id).title == "what is this?"


def test_a_damaged_list_of_media_is_not_the_end(tmp_path: Path):
    good = _picture("a.png").medium
    assert media_of({"media": [*extra_of([good])["media"], {"sha256": 3}, "x", None]}) == (good,)
    assert media_of({"media": "x"}) == media_of({}) == ()


def test_a_question_of_a_picture_alone_names_the_chat_by_it(tmp_path: Path):
    history = History(tmp_path / "chats.db")
    conversation = Conversation(history, "tiny", lambda: 1.0)
    conversation.asked("", extra_of([_picture("fox.png").medium]))
    assert conversation.title == "fox.png"
    assert conversation.media
    history.close()


def test_a_search_knows_the_names_of_files(tmp_path: Path):
    history = History(tmp_path / "chats.db")
    chat = history.begin("tiny", now_s=1.0)
    fox = extra_of([_picture("Fox at dusk.png").medium])
    asked = history.add(chat.id, None, "user", "", now_s=2.0, extra=fox)
    said = history.add(chat.id, asked.id, "assistant", "a fox", now_s=3.0)
    history.add(chat.id, said.id, "user", "this fox", now_s=4.0, extra=fox)
    assert [(hit.message_id, hit.excerpt) for hit in history.search("dusk fo")][-1] == (asked.id, "Fox at dusk.png")
    assert len(history.search("fox")) == 3
    assert history.search("wolf") == []
    history.close()


def test_a_request_carries_the_newest_media_that_the_model_takes(tmp_path: Path):
    history = History(tmp_path / "chats.db")
    conversation = Conversation(history, "tiny", lambda: 1.0)
    pictures = [_picture(f"{number}.png", PNG + bytes([number])) for number in range(17)]
    sound = examined(Attachment("a.wav", Kind.SOUND, b"RIFF\0\0\0\0WAVE"))
    conversation.keep([*pictures, sound])
    conversation.asked("all", extra_of([sound.medium, *(each.medium for each in pictures[:10])]))
    conversation.answered("ten", {})
    conversation.asked("more", extra_of([each.medium for each in pictures[10:]]))
    taken = frozenset({Kind.TEXT, Kind.PICTURE})
    first, _, last = conversation.to_send(taken)
    sent = [base64.b64encode(each.file.data).decode() for each in pictures]
    assert (first["images"], last["images"]) == (sent[1:10], sent[10:])
    assert [len(media) for media in conversation.left_out(taken)] == [1, 1]
    assert "images" not in conversation.to_send(frozenset({Kind.TEXT}))[0]
    history.close()


def test_a_full_disk_ends_the_keeping_and_not_the_chat(tmp_path: Path):
    (tmp_path / "chats.media").write_text("a file is in the way")
    history = History(tmp_path / "chats.db")
    conversation = Conversation(history, "tiny", lambda: 1.0)
    fox = _picture("fox.png")
    conversation.keep([fox])
    assert "cannot be kept" in str(conversation.trouble)
    conversation.asked("what", extra_of([fox.medium]))
    assert conversation.to_send()[0]["images"] == [base64.b64encode(PNG).decode()]
    assert history.chats() == []
    history.close()
