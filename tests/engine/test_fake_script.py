"""What a fake engine is told to say."""

from __future__ import annotations

from tests.fakes.tokens import scripted_token

START, END = 256, 257


def reply(prompt: str) -> str:
    tokens = [START, *b"user\n", *prompt.encode(), END, START, *b"assistant\n"]
    written = b""
    while (token := scripted_token(tokens, start=START, end=END)) not in (None, END):
        written += bytes([token])
        tokens.append(token)
    return written.decode()


def test_the_last_script_is_the_reply():
    assert reply('SAY[[one]] and SAY[[{"two": "é"}]] please') == '{"two": "é"}'


def test_without_a_script_nothing_is_said():
    tokens = [START, *b"user\nhello", END, START, *b"assistant\n"]
    assert scripted_token(tokens, start=START, end=END) is None
    assert scripted_token([*b"SAY[[x]]"], start=START, end=END) is None


def test_what_was_written_otherwise_ends():
    tokens = [START, *b"user\nSAY[[one]]", START, *b"assistant\nx"]
    assert scripted_token(tokens, start=START, end=END) == END
