"""The chat, driven by keys: what is sent, what is seen, and that nothing typed is ever lost."""

from __future__ import annotations

from typing import Any

import pytest

from localrun.errors import Cancelled, EngineDied, LocalrunError
from localrun.tui.screens.chat import ChatScreen
from localrun.tui.widgets.conversation_view import ConversationView
from localrun.tui.widgets.prompt import Prompt

SIZE = (100, 30)


def _prompt(desk: Any) -> str:
    return str(desk.app.screen.query_one(Prompt).text)


async def test_typed_text_is_sent_and_the_answer_is_rendered_while_it_comes(desk: Any) -> None:
    async with desk.open(SIZE) as pilot:
        await pilot.press(*"hello there", "enter")
        desk.daemon.say("Once upon a **ti")
        await desk.see(pilot, "Once upon a")
        desk.daemon.say("me** there was a fox.\n\n- red\n- quick\n")
        await desk.see(pilot, "• quick")
        assert "Once upon a time there was a fox." in desk.seen(desk.app)
        desk.daemon.publish(desk.row(desk.request_id, output_tokens=40, tokens_per_s=51.0))
        await desk.see(pilot, "● decoding   51.0 tok/s   TTFT 310 ms   prompt 512   cached 480   output 40")
        desk.daemon.end_answer(n_output=87)
        await desk.see(pilot, "● done   100 tok/s")
        await desk.see(pilot, "87 tokens · 100 tok/s")
        model, messages = desk.daemon.questions[0]
        assert model == "tiny"
        assert messages == [{"role": "user", "content": "hello there"}]


async def test_the_second_question_carries_the_first_and_its_answer(desk: Any) -> None:
    async with desk.open(SIZE) as pilot:
        await pilot.press(*"one", "enter")
        desk.daemon.say("first")
        desk.daemon.end_answer()
        await desk.see(pilot, "● done")
        await pilot.press(*"two", "enter")
        await desk.until(pilot, lambda: len(desk.daemon.questions) == 2)
        assert [message["content"] for message in desk.daemon.questions[1][1]] == ["one", "first", "two"]


async def test_enter_in_the_empty_prompt_asks_the_marked_question(desk: Any) -> None:
    async with desk.open(SIZE) as pilot:
        await desk.see(pilot, "› Tell me a story about a fox.")
        await pilot.press("down")
        await desk.see(pilot, "› What is 3 + 4?")
        await pilot.press("enter")
        await desk.until(pilot, lambda: desk.daemon.questions)
        assert desk.daemon.questions[0][1][0]["content"] == "What is 3 + 4?"
        await desk.until(pilot, lambda: "What is localrun?" not in desk.seen(desk.app))


@pytest.mark.parametrize("size", [(40, 15), (40, 12), (60, 12), (100, 30)])
async def test_the_marked_question_is_seen_in_a_window_of_any_size(desk: Any, size: tuple[int, int]) -> None:
    async with desk.open(size) as pilot:
        desk.daemon.publish()
        await desk.see(pilot, "● ready")
        await desk.see(pilot, "› Tell me a story about a fox.")
        await desk.see(pilot, "  What is localrun?")
        await pilot.press("up")
        await desk.see(pilot, "› What is localrun?")


async def test_what_was_undone_can_be_had_back_and_then_the_key_copies(desk: Any) -> None:
    async with desk.open(SIZE) as pilot:
        await pilot.press(*"one", "enter")
        desk.daemon.say("first")
        desk.daemon.end_answer()
        await desk.see(pilot, "● done")
        await pilot.press(*"draft", "ctrl+z")
        assert _prompt(desk) == ""
        await pilot.press("ctrl+y")
        assert (_prompt(desk), desk.app.clipboard) == ("draft", "")
        await pilot.press("ctrl+y")
        assert (_prompt(desk), desk.app.clipboard) == ("draft", "first")


async def test_a_suggestion_can_be_clicked(desk: Any) -> None:
    async with desk.open(SIZE) as pilot:
        await desk.see(pilot, "What is localrun?")
        lines = desk.seen(desk.app).split("\n")
        y = next(index for index, text in enumerate(lines) if "What is localrun?" in text)
        await pilot.click(offset=(8, y))
        await desk.until(pilot, lambda: desk.daemon.questions)
        assert desk.daemon.questions[0][1][0]["content"] == "What is localrun?"


async def test_new_lines_in_the_prompt(desk: Any) -> None:
    async with desk.open(SIZE) as pilot:
        await pilot.press("a", "ctrl+j", "b", "shift+enter", "c", "alt+enter", "d")
        assert _prompt(desk) == "a\nb\nc\nd"
        await pilot.press("enter")
        await desk.until(pilot, lambda: desk.daemon.questions)
        assert desk.daemon.questions[0][1][0]["content"] == "a\nb\nc\nd"
        assert _prompt(desk) == ""


async def test_a_long_line_of_code_is_seen_whole(desk: Any) -> None:
    async with desk.open(SIZE) as pilot:
        await pilot.press(*"show", "enter")
        desk.daemon.say(f"```python\nprint({'1, ' * SIZE[0]}'the end')\n```\n")
        await desk.see(pilot, "'the end')")


@pytest.mark.parametrize("key", ["escape", "ctrl+c"])
async def test_a_key_stops_the_answer_and_keeps_what_came(desk: Any, key: str) -> None:
    async with desk.open(SIZE) as pilot:
        await pilot.press(*"go on", "enter")
        desk.daemon.say("This is only half")
        await desk.see(pilot, "only half")
        await pilot.press(key)
        await desk.see(pilot, "● stopped")
        assert desk.daemon.closed == 1
        assert "This is only half" in desk.seen(desk.app)
        await pilot.press(*"more", "enter")
        await desk.until(pilot, lambda: len(desk.daemon.questions) == 2)
        assert [message["content"] for message in desk.daemon.questions[1][1]] == ["go on", "This is only half", "more"]


async def test_ctrl_c_empties_the_prompt_and_then_says_what_quits(desk: Any) -> None:
    async with desk.open(SIZE) as pilot:
        await pilot.press(*"one", "shift+enter", *"two", "ctrl+c")
        assert _prompt(desk) == ""
        await pilot.press("ctrl+c")
        await desk.see(pilot, "^q quits")
        await pilot.press("ctrl+z")
        assert _prompt(desk) == "one\ntwo"


async def test_escape_before_the_first_word_gives_the_question_back(desk: Any) -> None:
    async with desk.open(SIZE) as pilot:
        await pilot.press(*"hm", "enter")
        await desk.until(pilot, lambda: desk.daemon.questions)
        await pilot.press("escape")
        await desk.until(pilot, lambda: _prompt(desk) == "hm")
        assert desk.daemon.closed == 1


async def test_an_answer_cancelled_by_somebody_else_is_stopped_too(desk: Any) -> None:
    async with desk.open(SIZE) as pilot:
        await pilot.press(*"hm", "enter")
        desk.daemon.say("half")
        desk.daemon.end_answer(reason="cancelled")
        await desk.see(pilot, "● stopped")
        await pilot.press(*"again", "enter")
        desk.daemon.fail_answer(Cancelled("the request was cancelled while its model was loading"))
        await desk.until(pilot, lambda: _prompt(desk) == "again")
        assert "failed" not in desk.seen(desk.app)


async def test_an_error_before_any_text_is_shown_and_the_question_comes_back(desk: Any) -> None:
    async with desk.open(SIZE) as pilot:
        await pilot.press(*"hello", "enter")
        desk.daemon.fail_answer(LocalrunError("the queue is full; try again in 2 s"))
        await desk.see(pilot, "The answer failed")
        await desk.see(pilot, "the queue is full; try again in 2 s")
        await desk.until(pilot, lambda: _prompt(desk) == "hello")
        await pilot.press("enter")
        await desk.until(pilot, lambda: len(desk.daemon.questions) == 2)
        assert [message["content"] for message in desk.daemon.questions[1][1]] == ["hello"]


async def test_an_error_in_mid_answer_keeps_the_text(desk: Any) -> None:
    async with desk.open(SIZE) as pilot:
        await pilot.press(*"hello", "enter")
        desk.daemon.say("Half of an answer")
        await desk.see(pilot, "Half of an answer")
        await pilot.press(*"next idea")
        desk.daemon.fail_answer(EngineDied("the engine of 'tiny' ended"))
        await desk.see(pilot, "the engine of 'tiny' ended")
        await desk.see(pilot, "● failed")
        assert "Half of an answer" in desk.seen(desk.app)
        assert _prompt(desk) == "next idea"


async def test_a_defect_is_a_message_and_not_the_end(desk: Any) -> None:
    async with desk.open(SIZE) as pilot:
        await pilot.press(*"hello", "enter")
        desk.daemon.fail_answer(RuntimeError("unexpected"))
        await desk.see(pilot, "RuntimeError: unexpected")
        assert isinstance(desk.app.screen, ChatScreen)


async def test_an_empty_answer_is_said_to_be_one(desk: Any) -> None:
    async with desk.open(SIZE) as pilot:
        await pilot.press(*"hello", "enter")
        desk.daemon.end_answer(n_output=0)
        await desk.see(pilot, "without a word")


async def test_what_was_typed_while_an_answer_runs_waits(desk: Any) -> None:
    async with desk.open(SIZE) as pilot:
        await pilot.press(*"one", "enter")
        await desk.until(pilot, lambda: desk.daemon.questions)
        await pilot.press(*"two", "enter")
        await desk.see(pilot, "still answering")
        assert _prompt(desk) == "two"
        assert len(desk.daemon.questions) == 1


async def test_up_brings_back_what_was_sent(desk: Any) -> None:
    async with desk.open(SIZE) as pilot:
        for text in ("first", "second"):
            await pilot.press(*text, "enter")
            desk.daemon.say("ok")
            desk.daemon.end_answer()
            await desk.until(pilot, lambda: not desk.app.screen.view.is_answering)
        await pilot.press("up")
        assert _prompt(desk) == "second"
        await pilot.press("up")
        assert _prompt(desk) == "first"
        await pilot.press("up")
        assert _prompt(desk) == "first"
        await pilot.press("down", "down")
        assert _prompt(desk) == ""


async def test_a_new_chat_begins_empty_and_the_other_answer_goes_on(desk: Any) -> None:
    async with desk.open(SIZE) as pilot:
        await pilot.press(*"one", "enter")
        desk.daemon.say("a long answer")
        await desk.see(pilot, "a long answer")
        await pilot.press("ctrl+n")
        await desk.see(pilot, "› Tell me a story about a fox.")
        assert "a long answer" not in desk.seen(desk.app)
        assert desk.daemon.closed == 0
        desk.daemon.say(" that has an end")
        desk.daemon.end_answer()
        await desk.until(pilot, lambda: not any(view.is_answering for view in desk.app.screen.query(ConversationView)))
        await pilot.press(*"two", "enter")
        await desk.until(pilot, lambda: len(desk.daemon.questions) == 2)
        assert [message["content"] for message in desk.daemon.questions[1][1]] == ["two"]
        await pilot.press("ctrl+l")
        await desk.see(pilot, "Enter opens")
        await pilot.press("down", "enter")
        await desk.see(pilot, "a long answer that has an end")


async def test_new_chat_again_and_again_while_answers_and_snapshots_come(desk: Any) -> None:
    async with desk.open(SIZE) as pilot:
        for number in range(6):
            desk.daemon.publish(desk.row(desk.request_id))
            desk.daemon.say("words")
            await pilot.press("enter", "ctrl+n", "ctrl+n")
            desk.daemon.publish(time_s=1000.0 + number)
        await pilot.press(*"still here", "enter")
        for _ in range(7):  # all those answers go on
            desk.daemon.end_answer()
        await desk.see(pilot, "● done")


@pytest.mark.parametrize("keys", [["tab"], ["tab", "shift+tab"], ["shift+tab"]])
@pytest.mark.parametrize("text", ["render the table", "explain this", "yes, try c [1] = 2"])
async def test_what_is_typed_on_a_message_goes_to_the_prompt_and_starts_nothing(
    desk: Any, keys: list[str], text: str
) -> None:
    async with desk.open(SIZE) as pilot:
        await pilot.press(*"one", "enter")
        desk.daemon.say("**seven**")
        desk.daemon.end_answer()
        await desk.see(pilot, "● done")
        await pilot.press(*keys)
        assert not desk.app.screen.query_one(Prompt).has_focus
        await pilot.press(text[0])
        await pilot.press(*text[1:])
        assert _prompt(desk) == text
        assert len(desk.daemon.questions) == 1
        assert desk.app.clipboard == ""


async def test_tab_goes_to_the_newest_message_and_back_and_never_from_a_text(desk: Any) -> None:
    async with desk.open(SIZE) as pilot:
        for text in ("one", "two"):
            await pilot.press(*text, "enter")
            desk.daemon.say(f"answer to {text}")
            desk.daemon.end_answer()
            await desk.until(pilot, lambda: not desk.app.screen.view.is_answering)
        await pilot.press("tab", "ctrl+y")
        assert desk.app.clipboard == "answer to two"
        await pilot.press("shift+tab", "shift+tab", "ctrl+y")
        assert desk.app.clipboard == "answer to one"
        await pilot.press("tab", "tab", "tab", *"x", "tab", *"y")
        assert _prompt(desk) == "xy"


async def test_the_last_answer_can_be_copied(desk: Any) -> None:
    async with desk.open(SIZE) as pilot:
        await pilot.press("ctrl+y")
        await desk.see(pilot, "no answer to copy")
        await pilot.press(*"one", "enter")
        desk.daemon.say("**seven**")
        desk.daemon.end_answer()
        await desk.see(pilot, "● done")
        await pilot.press("ctrl+y")
        await desk.see(pilot, "Copied 9 characters.")
        assert desk.app.clipboard == "**seven**"


async def test_escape_sequences_of_the_model_do_not_reach_the_terminal(desk: Any) -> None:
    async with desk.open(SIZE) as pilot:
        await pilot.press(*"one", "enter")
        desk.daemon.say("red \x1b[31mtext\x1b[2J")
        desk.daemon.end_answer()
        await desk.see(pilot, "red ␛[31mtext␛[2J")


async def test_ctrl_k_deletes_to_the_end_of_the_line_and_leaves_the_other_chat_alone(desk: Any) -> None:
    async with desk.open(SIZE) as pilot:
        await pilot.press("f5")
        marked = desk.app.screen.view
        await pilot.press(*"one two", *["left"] * 4, "ctrl+k")
        assert (_prompt(desk), desk.app.screen.view) == ("one", marked)
        await pilot.press("ctrl+p")
        assert desk.app.screen.view is not marked


@pytest.mark.parametrize("size", [(40, 20), (80, 24)])
async def test_a_notice_covers_nothing(desk: Any, size: tuple[int, int]) -> None:
    async with desk.open(size) as pilot:
        await pilot.press(*"one", "enter")
        desk.daemon.say("\n\n".join(f"paragraph {number}" for number in range(40)))
        desk.daemon.end_answer()
        await desk.see(pilot, "87 tokens")
        await pilot.press("ctrl+y")
        await desk.see(pilot, "Copied 548 characters.")
        lines = [text.strip(" │▌▁▂▃▄▅▆▇█") for text in desk.seen(desk.app).split("\n")]
        shown = [text for text in lines if text.startswith("paragraph")]
        assert shown == [f"paragraph {number}" for number in range(40)][-len(shown) :]
        notice = lines.index("Copied 548 characters.")
        assert lines.index("87 tokens · 100 tok/s") < notice < lines.index("Ask something, or / for commands")


async def test_a_long_answer_sticks_to_the_bottom_until_one_scrolls_up(desk: Any) -> None:
    async with desk.open(SIZE) as pilot:
        await pilot.press(*"one", "enter")
        desk.daemon.say("\n\n".join(f"paragraph {number}" for number in range(40)))
        await desk.see(pilot, "paragraph 39")
        await pilot.press("pageup")
        await desk.until(pilot, lambda: "paragraph 39" not in desk.seen(desk.app))
        desk.daemon.say("\n\nparagraph 40\n\nparagraph 41")
        desk.daemon.end_answer()
        await desk.see(pilot, "● done")
        assert "paragraph 41" not in desk.seen(desk.app)
        await pilot.press("pagedown", "pagedown", "pagedown")
        await desk.see(pilot, "paragraph 41")


async def test_a_short_chat_that_was_anchored_for_a_moment_stays_at_the_top(desk: Any) -> None:
    """As when it is laid out before its height is known."""
    async with desk.open(SIZE) as pilot:
        await pilot.press(*"hello", "enter")
        desk.daemon.say("Good day")
        await desk.see(pilot, "Good day")
        view = desk.app.screen.view
        view.anchor()
        view.refresh(layout=True)
        await desk.until(pilot, lambda: view.scroll_y < 0)
        view.on_resize()
        assert (view.is_anchored, view.scroll_y) == (False, 0)
        desk.daemon.end_answer()
        await desk.see(pilot, "● done")


async def test_the_daemon_goes_and_comes_back(desk: Any) -> None:
    async with desk.open(SIZE) as pilot:
        desk.daemon.publish()
        await desk.see(pilot, "● ready")
        await pilot.press(*"one", "enter")
        desk.daemon.say("the first answer")
        desk.daemon.end_answer()
        await desk.see(pilot, "● done")
        await pilot.press(*"draft")
        desk.daemon.go_away()
        await desk.see(pilot, "No daemon at 127.0.0.1:1")
        await pilot.press("enter")
        await desk.see(pilot, "no daemon answers")
        await desk.until(pilot, lambda: _prompt(desk) == "draft")
        desk.daemon.is_up = True
        desk.daemon.publish(time_s=1.0)
        await desk.until(pilot, lambda: "No daemon at" not in desk.seen(desk.app))
        assert "the first answer" in desk.seen(desk.app)
        await pilot.press("enter")
        await desk.until(pilot, lambda: len(desk.daemon.questions) == 2)
        assert [message["content"] for message in desk.daemon.questions[1][1]] == ["one", "the first answer", "draft"]
