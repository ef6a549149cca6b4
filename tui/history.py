"""The chats that were had, in SQLite: a tree of messages for each, and a full-text index over all of them.

Owner: the TUI's event loop; every call is a short transaction (milliseconds). Several TUIs may use one file at the same
time: write-ahead log, short waits, and nothing remembered between calls but the connection.

Pictures and sounds are files in a folder beside it (`media.py`).

A message knows what it answers (`parent_id`), so editing a question or asking again makes a sibling and loses nothing;
a chat's `leaf_id` says which branch is shown. What was stored is whole after a crash: a message is written once, when
it is complete, and an answer that was cut off is stored as what came of it.

How it fails: a damaged file is put aside under another name, and a new one begun with all chats that can be read in it
(`open_history` says so); a newer version's file, and a disk that refuses, are `HistoryUnavailable`, and the TUI goes on
without. SQLite has no checksums, so a damaged letter of a text is shown as it is.

Does not: know what is on the screen, or ask a model.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import re
import shutil
import sqlite3
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from localrun.attachments import Attachment, Kind, question_of
from localrun.stored import transaction
from localrun.tui.media import MediaFiles, examined, extra_of, media_of

# The tables and the version of what is in them. A later version adds statements and raises `VERSION`; what is stored is
# never thrown away. Version 1 had the bytes of pictures in `extra`, in base64; version 2 had no drafts.

VERSION = 3

# Texts that were typed and not sent when a window was closed; those without a chat belong to one that has not begun.
DRAFTS = """CREATE TABLE drafts (
         id INTEGER PRIMARY KEY,
         chat_id INTEGER REFERENCES chats (id) ON DELETE CASCADE,
         content TEXT NOT NULL)"""

SCHEMA = (
    """CREATE TABLE chats (
         id INTEGER PRIMARY KEY,
         title TEXT NOT NULL,
         model TEXT NOT NULL,
         system TEXT NOT NULL,
         parameters TEXT NOT NULL,
         leaf_id INTEGER REFERENCES messages (id),
         created_at_s REAL NOT NULL,
         changed_at_s REAL NOT NULL)""",
    """CREATE TABLE messages (
         id INTEGER PRIMARY KEY,
         chat_id INTEGER NOT NULL REFERENCES chats (id),
         parent_id INTEGER REFERENCES messages (id) ON DELETE CASCADE,
         role TEXT NOT NULL,
         content TEXT NOT NULL,
         extra TEXT NOT NULL,
         created_at_s REAL NOT NULL)""",
    "CREATE INDEX messages_of_chat ON messages (chat_id, parent_id)",
    "CREATE INDEX messages_by_parent ON messages (parent_id)",
    "CREATE INDEX chats_by_use ON chats (changed_at_s)",
    DRAFTS,
    # The index holds words only; the texts themselves are in `messages`.
    """CREATE VIRTUAL TABLE message_texts USING fts5 (
         content, content = 'messages', content_rowid = 'id', tokenize = 'unicode61 remove_diacritics 2')""",
    """CREATE TRIGGER message_added AFTER INSERT ON messages BEGIN
         INSERT INTO message_texts (rowid, content) VALUES (new.id, new.content);
       END""",
    """CREATE TRIGGER message_deleted AFTER DELETE ON messages BEGIN
         INSERT INTO message_texts (message_texts, rowid, content) VALUES ('delete', old.id, old.content);
       END""",
)


BUSY_TIMEOUT_S = 2.0
TITLE_CHARACTERS = 60
# What a search answers at most; a person refines the words rather than read more.
MAX_HITS = 200

_WORD = re.compile(r"\w+")


class HistoryUnavailable(Exception):
    """There is no history to be had; the message says why and what to do."""


class Chat(NamedTuple):
    """One conversation. `leaf_id` is the last message of the branch that is shown, None for one without messages."""

    id: int
    title: str
    model: str
    system: str
    parameters: dict[str, Any]
    leaf_id: int | None
    created_at_s: float
    changed_at_s: float


class Message(NamedTuple):
    """One message. `extra` holds what only some have: thinking, tool calls, attachments, the answer's numbers."""

    id: int
    chat_id: int
    parent_id: int | None
    role: str
    content: str
    extra: dict[str, Any]
    created_at_s: float


class Hit(NamedTuple):
    """A message that matches a search; `excerpt` has the words between `[` and `]`. Where only the chat's title
    matches, it is the last message of the chat, and there is no excerpt."""

    chat: Chat
    message_id: int
    role: str
    excerpt: str


class DeletedChat(NamedTuple):
    """A chat that was deleted, with all that is needed to restore it."""

    chat: Chat
    messages: list[Message]


class OpenedHistory(NamedTuple):
    """`put_aside` is where a damaged file went, if there was one; `n_rescued` of its chats are here again."""

    history: History
    put_aside: Path | None
    n_rescued: int = 0


def open_history(path: Path) -> OpenedHistory:
    """The history in `path`, made if there is none. Raises HistoryUnavailable."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        _keep_private(path)
        try:
            return OpenedHistory(History(path), None)
        except (sqlite3.Error, UnicodeDecodeError) as error:
            if not _is_damage(error):
                raise
            aside = _put_aside(path)
            _keep_private(path)
            history = History(path)
            return OpenedHistory(history, aside, _rescue(aside, history))
    except (OSError, sqlite3.Error, UnicodeDecodeError) as error:
        raise HistoryUnavailable(f"chats are not kept: {path} cannot be used ({error})") from error


class History:
    """See the module. Times are seconds since the epoch, given by the caller."""

    def __init__(self, path: Path) -> None:
        """Beside `path`, `files` keeps the pictures and sounds."""
        self.files = MediaFiles(None if str(path) == ":memory:" else path.with_suffix(".media"))
        self._db = _connected(path)
        try:
            self._db.execute("PRAGMA journal_mode = WAL")
            self._db.execute("PRAGMA synchronous = NORMAL")
            self._db.execute("PRAGMA foreign_keys = ON")
            self._migrate(path)
            self._check()
            self.files.collect(self._used_media)
        except BaseException:
            self._db.close()
            raise

    def close(self) -> None:
        self._db.close()

    # --- chats ---------------------------------------------------------------------------------------------------

    def begin(self, model: str, *, now_s: float, system: str = "", parameters: dict[str, Any] | None = None) -> Chat:
        """A new chat, without a title until it is asked something."""
        with transaction(self._db):
            chat_id = self._insert_chat("", model, system, parameters or {}, now_s, now_s)
        return self.chat(chat_id)

    def chat(self, chat_id: int) -> Chat:
        """Raises KeyError when it was deleted."""
        row = self._db.execute("SELECT * FROM chats WHERE id = ?", (chat_id,)).fetchone()
        if row is None:
            raise KeyError(chat_id)
        return _chat(row)

    def chats(self) -> list[Chat]:
        """A thousand at most, the latest used first; those without any message are left out."""
        rows = self._db.execute(
            "SELECT * FROM chats WHERE leaf_id IS NOT NULL ORDER BY changed_at_s DESC, id DESC LIMIT 1000"
        )
        return [_chat(row) for row in rows]

    def rename(self, chat_id: int, title: str) -> None:
        """Raises KeyError when it was deleted."""
        with transaction(self._db):
            found = self._db.execute("UPDATE chats SET title = ? WHERE id = ?", (_one_line(title), chat_id))
        if not found.rowcount:
            raise KeyError(chat_id)

    def configure(self, chat_id: int, *, model: str, system: str, parameters: dict[str, Any]) -> None:
        """What the next answers of this chat are made with."""
        with transaction(self._db):
            self._db.execute(
                "UPDATE chats SET model = ?, system = ?, parameters = ? WHERE id = ?",
                (model, system, json.dumps(parameters), chat_id),
            )

    def delete(self, chat_id: int) -> DeletedChat:
        """The chat with all its messages, which `restore` brings back. Raises KeyError when it was deleted already."""
        with transaction(self._db):
            chat = self.chat(chat_id)
            rows = self._db.execute("SELECT * FROM messages WHERE chat_id = ? ORDER BY id", (chat_id,))
            messages = [_message(row) for row in rows]
            self.files.use([medium for message in messages for medium in media_of(message.extra)])
            self._db.execute("UPDATE chats SET leaf_id = NULL WHERE id = ?", (chat_id,))
            # SQLite follows a cascade from question to answer to question, and gives up after a thousand of them.
            self._db.execute("UPDATE messages SET parent_id = NULL WHERE chat_id = ?", (chat_id,))
            self._db.execute("DELETE FROM messages WHERE chat_id = ?", (chat_id,))
            self._db.execute("DELETE FROM chats WHERE id = ?", (chat_id,))
        return DeletedChat(chat, messages)

    def restore(self, deleted: DeletedChat) -> Chat:
        """The chat as it was, with all branches. Its number and its messages' are new: theirs may be taken by now."""
        chat, ids = deleted.chat, dict[int | None, int | None]({None: None})
        with transaction(self._db):
            chat_id = self._insert_chat(*chat[1:5], chat.created_at_s, chat.changed_at_s)
            for message in deleted.messages:  # what a message answers comes before it
                ids[message.id] = self._insert(chat_id, message._replace(parent_id=ids[message.parent_id]))
            self._db.execute("UPDATE chats SET leaf_id = ? WHERE id = ?", (ids[chat.leaf_id], chat_id))
        return self.chat(chat_id)

    # --- messages ------------------------------------------------------------------------------------------------

    def add(
        self,
        chat_id: int,
        parent_id: int | None,
        role: str,
        content: str,
        *,
        now_s: float,
        extra: dict[str, Any] | None = None,
    ) -> Message:
        """A message below `parent_id`; it is the end of the shown branch from now on. The first question names a chat
        that has no name. Raises KeyError when the chat was deleted meanwhile."""
        with transaction(self._db):
            names = ", ".join(medium.name for medium in media_of(extra or {}))
            title = _one_line(question_of(content) or names) if role == "user" else ""
            found = self._db.execute(
                "UPDATE chats SET changed_at_s = ?, title = CASE WHEN title = '' THEN ? ELSE title END WHERE id = ?",
                (now_s, title, chat_id),
            )
            if not found.rowcount:
                raise KeyError(chat_id)
            message = Message(0, chat_id, parent_id, role, content, extra or {}, now_s)
            message = message._replace(id=self._insert(chat_id, message))
            self._db.execute("UPDATE chats SET leaf_id = ? WHERE id = ?", (message.id, chat_id))
        return message

    def branch(self, chat_id: int) -> list[Message]:
        """The shown messages, first to last. Raises KeyError when the chat was deleted."""
        leaf_id = self.chat(chat_id).leaf_id
        rows = self._db.execute(
            """WITH RECURSIVE line(id, depth) AS (
                 SELECT ?, 0 UNION ALL
                 SELECT messages.parent_id, depth + 1 FROM messages JOIN line ON messages.id = line.id
                 WHERE messages.parent_id < messages.id)
               SELECT messages.* FROM line JOIN messages ON messages.id = line.id ORDER BY depth DESC""",
            (leaf_id,),
        )
        return [_message(row) for row in rows]

    def siblings(self, message: Message) -> list[Message]:
        """All versions of a message, oldest first, itself among them."""
        rows = self._db.execute(
            "SELECT * FROM messages WHERE chat_id = ? AND parent_id IS ? ORDER BY id",
            (message.chat_id, message.parent_id),
        )
        return [_message(row) for row in rows]

    def show(self, message: Message) -> None:
        """Show the branch that goes through a message, and from there on the latest of each."""
        leaf_id = message.id
        while True:
            row = self._db.execute(
                "SELECT MAX(id) FROM messages WHERE parent_id = ? AND id > parent_id", (leaf_id,)
            ).fetchone()
            if row[0] is None:
                break
            leaf_id = row[0]
        with transaction(self._db):
            self._db.execute("UPDATE chats SET leaf_id = ? WHERE id = ?", (leaf_id, message.chat_id))

    def fork(self, chat_id: int, message_id: int, *, now_s: float) -> Chat:
        """A new chat with a copy of the shown branch up to a message."""
        source = self.chat(chat_id)
        forked = self.begin(source.model, now_s=now_s, system=source.system, parameters=source.parameters)
        parent_id = None
        for message in self.branch(chat_id):
            parent_id = self.add(
                forked.id, parent_id, message.role, message.content, now_s=now_s, extra=message.extra
            ).id
            if message.id == message_id:
                break
        self.rename(forked.id, f"{source.title} (branch)")
        return self.chat(forked.id)

    # --- drafts --------------------------------------------------------------------------------------------------

    def keep_draft(self, chat_id: int | None, text: str) -> None:
        """A text that was not sent, of a chat; of one that has not begun or was deleted, None."""
        with transaction(self._db):
            self._db.execute(
                "INSERT INTO drafts (chat_id, content) VALUES ((SELECT id FROM chats WHERE id = ?), ?)", (chat_id, text)
            )

    def drafted_chat(self) -> int | None:
        row = self._db.execute("SELECT chat_id FROM drafts ORDER BY id DESC LIMIT 1").fetchone()
        return None if row is None else row[0]

    def take_drafts(self, chat_id: int | None) -> list[str]:
        """The texts of a chat, the oldest first, which are no longer kept here."""
        rows = self._db.execute("SELECT id, content FROM drafts WHERE chat_id IS ? ORDER BY id", (chat_id,)).fetchall()
        for draft_id, _ in rows:
            self._db.execute("DELETE FROM drafts WHERE id = ?", (draft_id,))
        return [_text(content) for _, content in rows]

    # --- search --------------------------------------------------------------------------------------------------

    def search(self, text: str) -> list[Hit]:
        """Chats with words in their title that begin like all of these, where no message of theirs has them; then
        messages that have them, the best first; then those whose pictures and sounds have such names. Nothing for a
        text without any word."""
        words = _WORD.findall(text)
        if not words:
            return []
        # Quoted, so that no word is an operator of the index.
        query = " ".join(f'"{word}"*' for word in words)
        rows = self._db.execute(
            """SELECT message_texts.rowid, messages.role, messages.chat_id,
                      snippet(message_texts, 0, '[', ']', '…', 12)
               FROM message_texts JOIN messages ON messages.id = message_texts.rowid
               WHERE message_texts MATCH ? ORDER BY rank LIMIT ?""",
            (query, MAX_HITS),
        ).fetchall()
        found = {row[0] for row in rows}
        rows += [row for row in self._with_files_named(words) if row[0] not in found]
        said_in = {row[2] for row in rows}
        hits = [
            Hit(chat, chat.leaf_id, "", "")
            for chat in self.chats()
            if chat.leaf_id is not None and chat.id not in said_in and _has_words(chat.title, words)
        ]
        hits += [Hit(self.chat(row[2]), row[0], row[1], row[3]) for row in rows]
        return hits[:MAX_HITS]

    def _with_files_named(self, words: list[str]) -> list[tuple[int, str, int, str]]:
        """The latest first, as the rows of `search`; the index does not know the names."""
        rows = self._db.execute(
            """SELECT id, role, chat_id, extra FROM messages WHERE extra LIKE '%"media"%' ORDER BY id DESC"""
        )
        found = []
        for message_id, role, chat_id, extra in rows:
            names = ", ".join(medium.name for medium in media_of(_object(extra)))
            if _has_words(names, words):
                found.append((message_id, role, chat_id, names))
        return found

    # --- inside --------------------------------------------------------------------------------------------------

    def _insert_chat(
        self, title: str, model: str, system: str, parameters: dict[str, Any], created_at_s: float, changed_at_s: float
    ) -> int:
        added = self._db.execute(
            """INSERT INTO chats (title, model, system, parameters, created_at_s, changed_at_s)
               VALUES (?, ?, ?, ?, ?, ?)""",
            (title, model, system, json.dumps(parameters), created_at_s, changed_at_s),
        )
        return added.lastrowid or 0

    def _insert(self, chat_id: int, message: Message) -> int:
        """The number that the message got."""
        added = self._db.execute(
            "INSERT INTO messages (chat_id, parent_id, role, content, extra, created_at_s) VALUES (?,?,?,?,?,?)",
            (chat_id, *message[2:5], json.dumps(self._with_files(message.extra)), message.created_at_s),
        )
        return added.lastrowid or 0

    def _with_files(self, extra: dict[str, Any]) -> dict[str, Any]:
        """Pictures of version 1 as files. Raises OSError."""
        images = extra.get("images")
        if not isinstance(images, list):
            return extra
        media = []
        for number, image in enumerate(images, 1):
            with contextlib.suppress(ValueError, TypeError):
                data = base64.b64decode(image, validate=True)
                self.files.put(data)
                media.append(examined(Attachment(f"image {number}", Kind.PICTURE, data)).medium)
        others = {name: value for name, value in extra.items() if name != "images"}
        return others | extra_of([medium for medium in media if medium is not None])

    def _used_media(self) -> set[str]:
        rows = self._db.execute("""SELECT extra FROM messages WHERE extra LIKE '%"media"%'""")
        return {medium.sha256 for (extra,) in rows for medium in media_of(_object(extra))}

    def _migrate(self, path: Path) -> None:
        n_moved = 0
        with transaction(self._db):  # two that start at once: the second one finds it done
            version = self._db.execute("PRAGMA user_version").fetchone()[0]
            if version > VERSION:
                raise HistoryUnavailable(
                    f"chats are not kept: {path} was written by a newer localrun (version {version} of the format, "
                    f"this one knows {VERSION}); upgrade localrun, or move the file away"
                )
            if version < VERSION:
                if version == 0:
                    if self._db.execute("SELECT 1 FROM sqlite_master").fetchone():
                        raise sqlite3.DatabaseError("it has tables, and no version")
                    for statement in SCHEMA:
                        self._db.execute(statement)
                if version == 1:
                    n_moved = self._move_pictures()
                if version in (1, 2):
                    self._db.execute(DRAFTS)
                self._db.execute(f"PRAGMA user_version = {VERSION}")
        if n_moved:
            with contextlib.suppress(sqlite3.OperationalError):  # another window is open; the file stays large
                self._db.execute("VACUUM")

    def _move_pictures(self) -> int:
        rows = self._db.execute("""SELECT id, extra FROM messages WHERE extra LIKE '%"images"%'""").fetchall()
        for message_id, extra in rows:
            moved = json.dumps(self._with_files(_object(extra)))
            self._db.execute("UPDATE messages SET extra = ? WHERE id = ?", (moved, message_id))
        return len(rows)

    def _check(self) -> None:
        """Raises DatabaseError for a damaged file. Reads all of it: 0.1 s for 10,000 messages."""
        statements = {row[0] for row in self._db.execute("SELECT sql FROM sqlite_master")}
        found = self._db.execute("PRAGMA integrity_check(1)").fetchone()[0]
        if not statements.issuperset(SCHEMA) or found != "ok":
            raise sqlite3.DatabaseError(found if found != "ok" else "its tables are not the expected ones")
        # That looks at the tables of the index from outside only.
        self._db.execute("INSERT INTO message_texts (message_texts) VALUES ('integrity-check')")


def _connected(path: Path) -> sqlite3.Connection:
    connection = sqlite3.connect(path, timeout=BUSY_TIMEOUT_S, isolation_level=None)
    connection.text_factory = lambda text: text.decode(errors="replace")
    return connection


def _keep_private(path: Path) -> None:
    """Makes the file before SQLite does, which gives its two companions the file's own mode."""
    os.close(os.open(path, os.O_CREAT | os.O_RDWR, 0o600))
    for name in (path.name, f"{path.name}-wal", f"{path.name}-shm"):
        with contextlib.suppress(FileNotFoundError):
            path.with_name(name).chmod(0o600)


def _put_aside(path: Path) -> Path:
    """With what was written last and lies beside it."""
    aside = next(
        candidate for n in range(1, 1_000_000) if not (candidate := path.with_suffix(f".damaged-{n}.db")).exists()
    )
    path.rename(aside)
    path.with_name(f"{path.name}-shm").unlink(missing_ok=True)
    with contextlib.suppress(FileNotFoundError):
        path.with_name(f"{path.name}-wal").rename(aside.with_name(f"{aside.name}-wal"))
    return aside


# What SQLite says of a disk that refuses, or of another window that is writing.
_REFUSED = frozenset(
    {
        *(sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_READONLY, sqlite3.SQLITE_IOERR),
        *(sqlite3.SQLITE_FULL, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_PERM, sqlite3.SQLITE_NOMEM),
    }
)


def _is_damage(error: sqlite3.Error | UnicodeDecodeError) -> bool:
    """An error without a code is one of `_check`; one that is no text quotes the damaged file."""
    code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_CORRUPT)
    return code == sqlite3.SQLITE_IOERR_SHORT_READ or code & 0xFF not in _REFUSED


# So many unreadable rows one after the other end the search for more.
_MAX_UNREADABLE = 10_000


def _rescue(aside: Path, history: History) -> int:
    """Takes over what can be read in a damaged file: how many chats. A message whose question is lost begins anew."""
    # A copy is read: opening a file writes to it.
    with tempfile.TemporaryDirectory(dir=aside.parent) as folder:
        copied = Path(folder) / "chats.db"
        shutil.copyfile(aside, copied)
        with contextlib.suppress(FileNotFoundError):
            shutil.copyfile(f"{aside}-wal", f"{copied}-wal")
        with contextlib.closing(_connected(copied)) as damaged:
            chats = [_chat(row) for row in _readable(damaged, "chats")]
            messages = [_message(row) for row in _readable(damaged, "messages")]
    by_chat: dict[int, dict[int | None, Message]] = {chat.id: {} for chat in chats}
    for message in messages:
        known = by_chat.get(message.chat_id)
        if known is not None:
            known[message.id] = message if message.parent_id in known else message._replace(parent_id=None)
    for chat in chats:
        found = by_chat[chat.id]
        if found:
            leaf_id = chat.leaf_id if chat.leaf_id in found else max(message.id for message in found.values())
            history.restore(DeletedChat(chat._replace(leaf_id=leaf_id), list(found.values())))
    return sum(bool(found) for found in by_chat.values())


def _readable(damaged: sqlite3.Connection, table: str) -> Iterator[tuple[Any, ...]]:
    """The rows of a damaged table, in order of their numbers."""
    last_id = n_unreadable = 0
    while n_unreadable < _MAX_UNREADABLE:
        try:
            row = damaged.execute(f"SELECT * FROM {table} WHERE id > ? ORDER BY id LIMIT 1", (last_id,)).fetchone()
        except (sqlite3.Error, UnicodeDecodeError):
            last_id, n_unreadable = last_id + 1, n_unreadable + 1
            continue
        if row is None or not last_id < row[0]:
            return
        last_id, n_unreadable = row[0], 0
        yield row


def _one_line(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= TITLE_CHARACTERS else line[: TITLE_CHARACTERS - 1].rstrip() + "…"


def _chat(row: tuple[Any, ...]) -> Chat:
    chat_id, title, model, system, parameters, leaf_id, created_at_s, changed_at_s = row
    return Chat(
        chat_id, _text(title), _text(model), _text(system), _object(parameters), leaf_id,
        _number(created_at_s), _number(changed_at_s),
    )  # fmt: skip


def _message(row: tuple[Any, ...]) -> Message:
    message_id, chat_id, parent_id, role, content, extra, created_at_s = row
    return Message(
        message_id, chat_id, parent_id, _text(role), _text(content), _object(extra), _number(created_at_s)
    )  # fmt: skip


# What a damaged file has where something else was written.


def _text(value: object) -> str:
    return value if isinstance(value, str) else ""


def _number(value: object) -> float:
    return float(value) if isinstance(value, int | float) else 0.0


def _object(text: object) -> dict[str, Any]:
    try:
        value = json.loads(_text(text))
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def _has_words(text: str, beginnings: list[str]) -> bool:
    """Whether it has a word for each of these that begins so."""
    there = _WORD.findall(text.casefold())
    return all(any(word.startswith(begin.casefold()) for word in there) for begin in beginnings)
