"""Chats that are kept, branched, searched and shown beside each other."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from localrun.errors import DaemonUnreachable
from localrun.tui.history import open_history
from localrun.tui.widgets.conversation_view import PAGE, ConversationView
from localrun.tui.widgets.messages import AnswerMessage, UserMessage
from localrun.tui.widgets.prompt import Prompt
from tests.tui.conftest import Desk

SIZE = (100, 30)
FILE = os.path.abspath("my.gguf")


async def _talk(desk: Any, pilot: Any, question: str, answer: str) -> None:
    n_before = len(desk.daemon.questions)
    await pilot.press(*question, "enter")
    await desk.until(pilot, lambda: len(desk.daemon.questions) == n_before + 1)
    desk.daemon.say(answer)
    desk.daemon.end_answer()
    await desk.until(pilot, lambda: not desk.app.screen.view.is_answering)


async def _type(desk: Any, pilot: Any, command: str) -> None:
    desk.app.screen.query_one(Prompt).put(command)
    await pilot.press("enter")


def _sent(desk: Any) -> list[str]:
    return [message["content"] for message in desk.daemon.questions[-1][1]]


async def test_a_chat_is_there_after_the_program_was_ended(desk: Any, tmp_path: Path) -> None:
    path = tmp_path / "chats.db"
    first = Desk(path)
    async with first.open(SIZE) as pilot:
        await _talk(first, pilot, "what is a fox", "An animal.")
    second = Desk(path)
    async with second.open(SIZE) as pilot:
        await pilot.press("ctrl+l")
        await second.see(pilot, "what is a fox")
        await pilot.press("enter")
        await second.see(pilot, "An animal.")
        await _talk(second, pilot, "more", "Red.")
        assert _sent(second) == ["what is a fox", "An animal.", "more"]


async def test_a_question_that_was_sent_is_kept_when_the_program_ends_while_the_model_loads(tmp_path: Path) -> None:
    path = tmp_path / "chats.db"
    first = Desk(path)
    async with first.open(SIZE) as pilot:
        await pilot.press(*"what is a fox", "enter")
        await first.until(pilot, lambda: first.daemon.questions)
    second = Desk(path)
    async with second.open(SIZE) as pilot:
        await pilot.press("ctrl+l")
        await second.see(pilot, "what is a fox")
        await pilot.press("enter")
        await second.see(pilot, "not answered")
        await pilot.press("tab", "ctrl+r")
        await second.until(pilot, lambda: second.daemon.questions)
        second.daemon.say("An animal.")
        second.daemon.end_answer()
        await second.see(pilot, "● done")
        assert _sent(second) == ["what is a fox"]
        assert "not answered" not in second.seen(second.app)
        assert "version" not in second.seen(second.app)


async def test_an_edited_question_keeps_the_other_branch(desk: Any) -> None:
    async with desk.open(SIZE) as pilot:
        await _talk(desk, pilot, "one", "first")
        await _type(desk, pilot, "/edit")
        await desk.until(pilot, lambda: desk.app.screen.query_one(Prompt).text == "one")
        await _talk(desk, pilot, " better", "second")
        assert _sent(desk) == ["one better"]
        desk.app.screen.query(UserMessage).last().focus()
        await pilot.press("left_square_bracket")
        await desk.see(pilot, "version 1 of 2")
        await desk.see(pilot, "first")
        await pilot.press("right_square_bracket")
        await desk.see(pilot, "second")


async def test_another_version_of_a_question_keeps_the_focus_and_stays_in_view(desk: Any) -> None:
    async with desk.open(SIZE) as pilot:
        await _talk(desk, pilot, "one", "\n\n".join(f"paragraph {number}" for number in range(60)))
        await pilot.press("tab", "shift+tab", "ctrl+r")
        await desk.until(pilot, lambda: len(desk.daemon.questions) == 2)
        desk.daemon.say("short")
        desk.daemon.end_answer()
        await desk.see(pilot, "version 2 of 2")
        await pilot.press("tab", "shift+tab")
        for key, version in (("left", 1), ("right", 2), ("left", 1)):
            await pilot.press(f"{key}_square_bracket")
            await desk.see(pilot, f"version {version} of 2")
            await desk.until(pilot, lambda: isinstance(desk.app.screen.focused, UserMessage))
        await desk.see(pilot, "paragraph 1")
        await pilot.pause(0.2)
        assert "version 1 of 2" in desk.seen(desk.app)


async def test_a_question_can_be_asked_again(desk: Any) -> None:
    async with desk.open(SIZE) as pilot:
        await _talk(desk, pilot, "one", "first")
        await pilot.press("tab", "shift+tab", "ctrl+r")
        await desk.until(pilot, lambda: len(desk.daemon.questions) == 2)
        desk.daemon.say("again")
        desk.daemon.end_answer()
        await desk.see(pilot, "again")
        assert _sent(desk) == ["one"]
        assert "first" not in desk.seen(desk.app)


async def test_search_rename_and_delete(desk: Any) -> None:
    async with desk.open(SIZE) as pilot:
        await _talk(desk, pilot, "about foxes", "They are red.")
        await pilot.press("ctrl+n")
        await _talk(desk, pilot, "about bears", "They are brown.")
        await _type(desk, pilot, "/chats brown")
        await desk.see(pilot, "model: They are [brown]")
        assert "about foxes" not in desk.seen(desk.app)
        await pilot.press("ctrl+r")
        await pilot.press("end", "ctrl+u", *"Bears", "enter")
        await desk.see(pilot, "about foxes")
        assert "Bears" in desk.seen(desk.app)
        await pilot.press("ctrl+d")
        await desk.see(pilot, "^d again deletes “Bears”")
        await pilot.press("ctrl+d")
        await desk.until(pilot, lambda: [chat.title for chat in desk.app.session.history.chats()] == ["about foxes"])


def _views(desk: Any) -> list[ConversationView]:
    return list(desk.app.screen.query(ConversationView))


async def test_two_chats_beside_each_other_are_answered_at_once(desk: Any) -> None:
    async with desk.open((120, 30)) as pilot:
        await pilot.press(*"left", "enter")
        await desk.until(pilot, lambda: desk.daemon.questions)
        desk.daemon.say("to the left")
        await desk.see(pilot, "to the left")
        await pilot.press("f5")
        await desk.see(pilot, "Tell me a story")
        await pilot.press(*"right", "enter")
        await desk.until(pilot, lambda: len(desk.daemon.questions) == 2)
        assert _sent(desk) == ["right"]
        assert sum(view.is_answering for view in _views(desk)) == 2
        assert "to the left" in desk.seen(desk.app)
        desk.daemon.end_answer()
        desk.daemon.say("said")
        desk.daemon.end_answer()
        await desk.until(pilot, lambda: not any(view.is_answering for view in _views(desk)))
        await pilot.press("f6", "f5")
        await desk.until(pilot, lambda: len([view for view in _views(desk) if view.display]) == 1)
        assert "to the left" in desk.seen(desk.app)


async def test_system_prompt_and_parameters_go_with_the_chat(desk: Any) -> None:
    async with desk.open(SIZE) as pilot:
        await _type(desk, pilot, "/system Be brief.")
        await _type(desk, pilot, "/set temperature 0.2")
        await _type(desk, pilot, "/think high")
        await desk.see(pilot, "Thinking is high")
        await _talk(desk, pilot, "one", "first")
        assert _sent(desk) == ["Be brief.", "one"]
        assert desk.daemon.settings == [({"temperature": 0.2}, "high")]
        await _type(desk, pilot, "/set")
        await desk.see(pilot, "temperature 0.2, think high")
        await _type(desk, pilot, "/unset temperature")
        await _type(desk, pilot, "/system")
        await _talk(desk, pilot, "two", "second")
        assert _sent(desk) == ["one", "first", "two"]
        assert desk.daemon.settings[-1] == (None, "high")


async def test_what_begins_like_a_command_and_is_none_stays_and_is_not_sent(desk: Any) -> None:
    async with desk.open(SIZE) as pilot:
        for text in ("/frobnicate", "/tools/export story.md"):
            await _type(desk, pilot, text)
            await desk.see(pilot, f"{text.split()[0]} is not a command")
            assert desk.app.screen.query_one(Prompt).text == text
        assert desk.daemon.questions == []
        await _type(desk, pilot, "//etc/hosts is a file")
        await desk.until(pilot, lambda: desk.daemon.questions)
        assert _sent(desk) == ["/etc/hosts is a file"]


async def test_a_command_that_makes_no_sense_says_why_and_leaves_the_prompt(desk: Any) -> None:
    async with desk.open(SIZE) as pilot:
        for command, why in (
            ("/tools", "no server of tools is configured"),
            ("/retry", "nothing was asked yet"),
            ("/export", "nothing to export yet"),
            ("/think maybe", "takes one of on, off"),
            ("/attach /nowhere/at/all", "was not found"),
            ("/detach a.png", "a.png is not attached"),
            ("/title x", "its first message"),
            ("/set temperature 9x", "temperature is '9x'"),
            ("/set top_p 1.5", "top_p is '1.5'"),
        ):
            await _type(desk, pilot, command)
            await desk.see(pilot, why)
            assert desk.app.screen.query_one(Prompt).text == ""
        await pilot.press("up")
        assert desk.app.screen.query_one(Prompt).text == "/set top_p 1.5"
        assert desk.daemon.questions == []


async def test_thinking_is_folded_and_tool_calls_are_shown(desk: Any) -> None:
    async with desk.open(SIZE) as pilot:
        await pilot.press(*"hm", "enter")
        desk.daemon.say(thinking="First I wonder about foxes.")
        await desk.see(pilot, "Thinking, 5 words")
        assert "I wonder" not in desk.seen(desk.app)
        desk.daemon.say("Foxes are red.", tool_calls=[{"function": {"name": "look_up", "arguments": {"what": "fox"}}}])
        desk.daemon.end_answer()
        await desk.see(pilot, "Thought, 5 words")
        await desk.see(pilot, 'calls look_up({"what": "fox"})')
        desk.app.screen.query_one(AnswerMessage).focus()
        await pilot.press("enter")
        await desk.see(pilot, "First I wonder about foxes.")
        await pilot.press("ctrl+y")
        await desk.see(pilot, "Copied 14 characters.")


async def test_a_file_goes_with_the_next_question_only(desk: Any, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("seven apples")
    async with desk.open(SIZE) as pilot:
        await _type(desk, pilot, f"/attach {tmp_path / 'notes.txt'}")
        await desk.see(pilot, "≡ notes.txt 12 B ✕")
        await _talk(desk, pilot, "how many", "seven")
        assert "seven apples" in _sent(desk)[0]
        await desk.see(pilot, "[with notes.txt]")
        await _talk(desk, pilot, "and now", "still")
        assert _sent(desk)[-1] == "and now"


@pytest.mark.parametrize("suffix", ["md", "json"])
async def test_export_writes_a_new_file_and_never_over_one(desk: Any, tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"chat.{suffix}"
    async with desk.open(SIZE) as pilot:
        await _talk(desk, pilot, "one", "first")
        await _type(desk, pilot, f"/export {path}")
        await desk.see(pilot, "Written to")
        await _type(desk, pilot, f"/export {path}")
        await desk.see(pilot, "File exists")
    text = path.read_text()
    assert "first" in text
    if suffix == "json":
        assert [message["role"] for message in json.loads(text)["messages"]] == ["user", "assistant"]


async def test_an_exported_chat_is_named_like_its_title(
    desk: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    async with desk.open(SIZE) as pilot:
        await _talk(desk, pilot, "नमस्ते, Welt!", "first")
        await _type(desk, pilot, "/export")
        await desk.see(pilot, "Written to")
    assert "नमस्ते--welt.md" in os.listdir(tmp_path)


async def test_commands_are_offered_while_one_types(desk: Any) -> None:
    async with desk.open(SIZE) as pilot:
        await pilot.press(*"/ex")
        await desk.see(pilot, "write this chat")
        await pilot.press("backspace", "backspace", "backspace")
        await desk.until(pilot, lambda: "write this chat" not in desk.seen(desk.app))


async def test_a_command_is_completed_and_so_is_what_follows_it(desk: Any, tmp_path: Path) -> None:
    (tmp_path / "Pictures").mkdir()
    (tmp_path / "Pictures" / "fox.txt").write_text("red")
    async with desk.open(SIZE) as pilot:
        prompt = desk.app.screen.query_one(Prompt)

        async def completed(keys: list[str], expected: str) -> None:
            await pilot.pause(0.1)
            await pilot.press(*keys)
            await desk.until(pilot, lambda: prompt.text == expected)
            assert prompt.has_focus

        await pilot.press("/")
        await completed(["up"], "/")
        await desk.see(pilot, "/quit")  # the last one, beyond what fits
        await completed(["down", "down", "down", "down", "tab"], "/model ")
        await completed(["q"], "/model q")
        await completed(["enter"], "/model qwen3:0.6b")
        await completed(["enter"], "")
        await desk.see(pilot, "qwen3:0.6b answers in this chat")
        await pilot.press(*"/set tem")
        await completed(["tab"], "/set temperature ")
        prompt.put(f"/attach {tmp_path}/Pic")
        await completed(["tab"], f"/attach {tmp_path}/Pictures/")
        await completed(["tab"], f"/attach {tmp_path}/Pictures/fox.txt")
        await completed(["enter"], "")
        await desk.see(pilot, "≡ fox.txt")
        await pilot.press(*"/think h")
        await completed(["enter"], "/think high")
        assert desk.daemon.questions == []


async def test_a_long_chat_is_mounted_from_its_end(desk: Any, tmp_path: Path) -> None:
    path = tmp_path / "chats.db"
    history = open_history(path).history
    chat, parent = history.begin("tiny", now_s=1.0), None
    for number in range(120):
        role = "assistant" if number % 2 else "user"
        parent = history.add(chat.id, parent, role, f"message number {number}\n" + "word " * 50, now_s=2.0).id
    history.close()
    desk = Desk(path)
    async with desk.open(SIZE) as pilot:
        await pilot.press("ctrl+l")
        await desk.see(pilot, "message number 0")
        await pilot.press("enter")
        await desk.see(pilot, "message number 119")
        view = desk.app.screen.view
        assert len(view.query("UserMessage, AnswerMessage")) == PAGE
        for _ in range(40):
            await pilot.press("pageup")
            if len(view.query("UserMessage, AnswerMessage")) > PAGE:
                break
        await desk.until(pilot, lambda: len(view.query("UserMessage, AnswerMessage")) == 2 * PAGE)


async def test_a_damaged_history_is_said_and_put_aside(tmp_path: Path) -> None:
    path = tmp_path / "chats.db"
    path.write_bytes(b"not a database, but long enough to be looked at as one" * 20)
    desk = Desk(path)
    async with desk.open(SIZE) as pilot:
        await desk.see(pilot, "was damaged")
        await _talk(desk, pilot, "one", "first")
    assert any(name.startswith("chats.damaged-") for name in os.listdir(tmp_path))


async def _ask_again(desk: Any, pilot: Any, key: str) -> None:
    desk.app.screen.query(UserMessage).last().focus()
    await pilot.press(key)


async def test_a_draft_comes_back_when_the_edited_question_is_asked(desk: Any) -> None:
    async with desk.open(SIZE) as pilot:
        await _talk(desk, pilot, "one", "first")
        await pilot.press(*"draft")
        await _ask_again(desk, pilot, "enter")
        prompt = desk.app.screen.query_one(Prompt)
        await desk.until(pilot, lambda: prompt.text == "one")
        await _talk(desk, pilot, " better", "second")
        assert _sent(desk) == ["one better"]
        assert prompt.text == "draft"


async def test_escape_gives_up_an_edit_and_up_brings_back_what_was_typed(desk: Any) -> None:
    async with desk.open(SIZE) as pilot:
        await _talk(desk, pilot, "one", "first")
        await _talk(desk, pilot, "two", "second")
        await pilot.press(*"draft")
        await _type(desk, pilot, "/edit")
        prompt = desk.app.screen.query_one(Prompt)
        await desk.until(pilot, lambda: prompt.text == "two")
        await desk.see(pilot, "● editing   Esc leaves it as it was")
        assert "second" not in desk.seen(desk.app)
        await pilot.press(*" times", "escape")
        await desk.see(pilot, "second")
        assert prompt.text == ""
        await desk.see(pilot, "● done")
        await pilot.press("up")
        assert prompt.text == "two times"
        await _talk(desk, pilot, "", "third")
        assert _sent(desk) == ["one", "first", "two", "second", "two times"]
        assert "version" not in desk.seen(desk.app)


async def test_what_was_typed_and_not_sent_is_there_when_the_next_window_begins(tmp_path: Path) -> None:
    path = tmp_path / "chats.db"
    first = Desk(path)
    async with first.open(SIZE) as pilot:
        await _talk(first, pilot, "about foxes", "They are red.")
        await pilot.press(*"and how ", "shift+enter", *"old?", "ctrl+q")
    second = Desk(path)
    async with second.open(SIZE) as pilot:
        await second.see(pilot, "They are red.")
        assert second.app.screen.query_one(Prompt).text == "and how \nold?"
        await _talk(second, pilot, "", "Three years.")
        assert _sent(second) == ["about foxes", "They are red.", "and how \nold?"]
        await pilot.press("ctrl+n", *"new idea")
    third = Desk(path)
    async with third.open(SIZE) as pilot:
        await third.see(pilot, "new idea")
        assert "They are red." not in third.seen(third.app)
        await pilot.press("ctrl+c")
    fourth = Desk(path)
    async with fourth.open(SIZE) as pilot:
        await fourth.see(pilot, "Tell me a story about a fox.")
        assert fourth.app.screen.query_one(Prompt).text == ""


async def test_what_is_being_written_stays_with_its_chat(desk: Any, tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    file.write_text("text of a file")
    async with desk.open(SIZE) as pilot:
        prompt = desk.app.screen.query_one(Prompt)
        await _talk(desk, pilot, "about foxes", "They are red.")
        await desk.app.screen.attach([file])
        await pilot.press(*"of foxes", "ctrl+n")
        assert (prompt.text, "a.txt" in desk.seen(desk.app)) == ("", False)
        await pilot.press(*"of a new one", "ctrl+n")
        assert prompt.text == "of a new one"
        await pilot.press("ctrl+l")
        await desk.see(pilot, "Enter opens")
        await pilot.press("enter")
        await desk.until(pilot, lambda: prompt.text == "of foxes")
        await desk.see(pilot, "a.txt")
        await pilot.press("f5")
        assert prompt.text == "of a new one"
        await pilot.press("f6")
        assert prompt.text == "of foxes"
        await pilot.press("f6")
        await _talk(desk, pilot, "", "Hello.")
        assert _sent(desk) == ["of a new one"]
        await pilot.press("ctrl+n")
        assert prompt.text == ""


@pytest.mark.parametrize(("size", "n_seen"), [((40, 15), 1), ((40, 24), 2), ((80, 24), 2)])
async def test_two_chats_in_a_narrow_window(desk: Any, size: tuple[int, int], n_seen: int) -> None:
    async with desk.open(size) as pilot:
        await _talk(desk, pilot, "one", "They are red and quick.")
        await pilot.press("f5", *"two", "enter")
        desk.daemon.say("They are brown and slow.")
        await desk.see(pilot, "They are brown and slow.")
        assert ("They are red and quick." in desk.seen(desk.app)) is (n_seen == 2)
        await pilot.press("f6")
        await desk.see(pilot, "They are red and quick.")
        desk.daemon.end_answer()


async def test_an_attached_text_is_no_title(desk: Any, tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    file.write_text("text of a file")
    async with desk.open(SIZE) as pilot:
        await desk.app.screen.attach([file])
        await _talk(desk, pilot, "what is this?", "A file.")
        assert desk.app.screen.view.conversation.title == "what is this?"


async def test_a_draft_of_a_chat_that_another_window_deleted_is_not_lost(tmp_path: Path) -> None:
    path = tmp_path / "chats.db"
    first, second = Desk(path), Desk(path)
    async with second.open(SIZE) as other:
        async with first.open(SIZE) as pilot:
            await _talk(first, pilot, "about foxes", "They are red.")
            await pilot.press(*"and how old?")
            await other.press("ctrl+l")
            await second.see(other, "about foxes")
            await other.press("ctrl+d", "ctrl+d")
            await second.see(other, "Deleted “about foxes”")
        await other.press("escape", "ctrl+n")
        await second.see(other, "and how old?")


async def test_an_answer_that_the_end_of_the_program_stopped_says_so_later(tmp_path: Path) -> None:
    path = tmp_path / "chats.db"
    first = Desk(path)
    async with first.open(SIZE) as pilot:
        await pilot.press(*"about foxes", "enter")
        first.daemon.say("They are")
        await first.see(pilot, "They are")
        await pilot.press("ctrl+q")
    second = Desk(path)
    async with second.open(SIZE) as pilot:
        await pilot.press("ctrl+l")
        await second.see(pilot, "about foxes")
        await pilot.press("enter")
        await second.see(pilot, "They are")
        await second.see(pilot, "stopped")


async def test_a_question_without_an_answer_is_no_version_of_the_next_one(desk: Any) -> None:
    async with desk.open(SIZE) as pilot:
        await pilot.press(*"about foxes", "enter")
        desk.daemon.fail_answer(DaemonUnreachable("the daemon went away"))
        prompt = desk.app.screen.query_one(Prompt)
        await desk.until(pilot, lambda: prompt.text == "about foxes")
        await pilot.press("ctrl+c")
        await _talk(desk, pilot, "3 + 4?", "7")
        assert _sent(desk) == ["3 + 4?"]
        await desk.see(pilot, "not answered")
        assert "about foxes" in desk.seen(desk.app)
        assert "version" not in desk.seen(desk.app)


async def test_a_question_that_failed_waits_for_what_was_typed_since(desk: Any) -> None:
    async with desk.open(SIZE) as pilot:
        await pilot.press(*"one", "enter")
        await desk.until(pilot, lambda: desk.daemon.questions)
        await pilot.press(*"two")
        desk.daemon.fail_answer(DaemonUnreachable("the daemon went away"))
        await desk.see(pilot, "The answer failed")
        await _talk(desk, pilot, "", "Two.")
        assert _sent(desk) == ["two"]
        assert desk.app.screen.query_one(Prompt).text == "one"


async def test_an_image_is_sent_again_with_its_question(desk: Any, tmp_path: Path) -> None:
    image = tmp_path / "fox.png"
    image.write_bytes(b"\x89PNG\r\n\x1a\nfox")
    desk.daemon.capabilities.append("vision")
    async with desk.open(SIZE) as pilot:
        await _type(desk, pilot, f"/attach {image}")
        await desk.see(pilot, "▣ fox.png 11 B ✕")
        await _talk(desk, pilot, "what is this", "A fox.")
        first = desk.daemon.questions[-1][1][-1]
        await _ask_again(desk, pilot, "ctrl+r")
        await desk.until(pilot, lambda: len(desk.daemon.questions) == 2)
        desk.daemon.say("A red fox.")
        desk.daemon.end_answer()
        await desk.until(pilot, lambda: not desk.app.screen.view.is_answering)
        await _ask_again(desk, pilot, "enter")
        await desk.see(pilot, "▣ fox.png 11 B ✕")
        await _talk(desk, pilot, " please", "A fox.")
    assert first["images"]
    assert [messages[-1] for _, messages in desk.daemon.questions] == [
        first,
        first,
        first | {"content": "what is this please"},
    ]


async def test_a_chat_that_is_deleted_while_it_is_open_leaves_the_screen(desk: Any) -> None:
    async with desk.open(SIZE) as pilot:
        await _talk(desk, pilot, "about foxes", "They are red.")
        await pilot.press(*"draft", "ctrl+l")
        await desk.see(pilot, "Enter opens")
        await pilot.press("ctrl+d", "ctrl+d", "escape")
        await desk.see(pilot, "Type below")
        assert "They are red." not in desk.seen(desk.app)
        assert desk.app.screen.query_one(Prompt).text == "draft"
        await _talk(desk, pilot, "", "Hello.")
        assert _sent(desk) == ["draft"]


async def test_the_delete_key_deletes_letters_and_a_chat_that_was_deleted_comes_back(desk: Any) -> None:
    async with desk.open(SIZE) as pilot:
        await _talk(desk, pilot, "about foxes", "They are red.")
        await pilot.press("ctrl+l")
        await desk.see(pilot, "about foxes")
        await pilot.press("ctrl+r", "home", *["delete"] * 6, "enter")
        await desk.see(pilot, "foxes  ")
        assert [chat.title for chat in desk.app.session.history.chats()] == ["foxes"]
        await pilot.press("ctrl+d", "x", "backspace", "ctrl+d")
        await desk.see(pilot, "^d again deletes “foxes”")
        await pilot.press("ctrl+d")
        await desk.see(pilot, "Deleted “foxes”. ^z")
        assert desk.app.session.history.chats() == []
        await pilot.press("escape", "ctrl+l", "ctrl+z")
        await desk.see(pilot, "foxes  ")
        await pilot.press("enter")
        await desk.see(pilot, "They are red.")
        await pilot.press("ctrl+l", "ctrl+z")
        await desk.see(pilot, "No chat was deleted")


async def test_two_windows_on_one_history(tmp_path: Path) -> None:
    first, second = Desk(tmp_path / "chats.db"), Desk(tmp_path / "chats.db")
    async with first.open(SIZE) as pilot, second.open(SIZE) as other:
        await _talk(first, pilot, "about foxes", "They are red.")
        await other.press("ctrl+l")
        await second.see(other, "about foxes")
        await other.press("ctrl+d", "ctrl+d")
        await second.see(other, "Deleted “about foxes”")
        await _type(first, pilot, "/title Foxes")
        await first.see(pilot, "deleted in another window")
        first.app.screen.query_one(Prompt).put("")
        await _talk(first, pilot, "more", "Much more.")
        await first.see(pilot, "no longer kept")
        await first.see(pilot, "Much more.")


async def test_an_unknown_model_is_refused(desk: Any) -> None:
    async with desk.open(SIZE) as pilot:
        await _type(desk, pilot, "/model ./my.gguf")  # of this folder, which is not the daemon's
        await desk.see(pilot, f"there is no model '{FILE[:20]}")
        await _type(desk, pilot, "/model nobody")
        await desk.see(pilot, "there is no model 'nobody'")
        assert desk.app.session.model == "tiny"
        assert desk.app.screen.query_one(Prompt).text == ""
