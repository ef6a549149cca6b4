"""The tables of the chat history (`history.py`), and the version of their shape.

A later version adds statements and raises `VERSION`; what is stored is never thrown away.
"""

from __future__ import annotations

VERSION = 1

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
