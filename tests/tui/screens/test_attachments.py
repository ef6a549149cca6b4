"""Pictures and sounds in the chat: attached by command, by dropping and never to a model that does not take them."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from textual import events

from localrun.attachments import Kind
from localrun.errors import BadRequest
from localrun.tui.app import LocalrunApp
from localrun.tui.media import Medium
from localrun.tui.pictures import has_placeholders
from localrun.tui.preferences import Pictures, Preferences
from localrun.tui.widgets.gallery import Gallery, summary
from localrun.tui.widgets.prompt import Attachments, Prompt
from tests.tui.conftest import Desk

SIZE = (100, 30)
PICTURES = ("blue 2.png", "green 1.png", "red 0.png")
WAV = b"RIFF\x24\0\0\0WAVEfmt "


@pytest.fixture
def folder(tmp_path: Path, desk: Any) -> Path:
    desk.daemon.capabilities += ["vision", "audio"]
    for number, colour in enumerate(("red", "green", "blue")):
        Image.new("RGB", (60, 40), colour).save(tmp_path / f"{colour} {number}.png")
    (tmp_path / "memo.wav").write_bytes(WAV)
    (tmp_path / "notes.txt").write_text("seven apples")
    return tmp_path


async def _type(desk: Any, pilot: Any, text: str) -> None:
    desk.app.screen.query_one(Prompt).text = text
    await pilot.press("enter")


async def _drop(desk: Any, pilot: Any, text: str) -> None:
    """As a terminal does with files that are dropped on it."""
    desk.app.post_message(events.Paste(text))
    await pilot.pause()


async def _answer(desk: Any, pilot: Any, question: str, n_questions: int = 1) -> list[dict[str, Any]]:
    await _type(desk, pilot, question)
    await desk.until(pilot, lambda: len(desk.daemon.questions) == n_questions)
    desk.daemon.say("An answer.")
    desk.daemon.end_answer()
    await desk.until(pilot, lambda: not desk.app.screen.view.is_answering)
    return list(desk.daemon.questions[-1][1])


def _sent(path: Path) -> str:
    return base64.b64encode(path.read_bytes()).decode()


async def test_dropped_files_are_attached_and_sent_in_their_order(desk: Any, folder: Path) -> None:
    async with desk.open(SIZE) as pilot:
        await pilot.press(*"what is ")
        await _drop(desk, pilot, f"'{folder}/red 0.png' {folder}/memo.wav\n")
        await desk.see(pilot, "▣ red 0.png")
        await desk.see(pilot, "♪ memo.wav 16 B ✕")
        assert desk.app.screen.query_one(Prompt).text == "what is "
        (message,) = await _answer(desk, pilot, "what is this?")
        assert message == {
            "role": "user",
            "content": "what is this?",
            "images": [_sent(folder / "red 0.png"), _sent(folder / "memo.wav")],
        }
        again = await _answer(desk, pilot, "and now?", 2)
        assert again[0] == message
        assert "images" not in again[2]


async def test_other_text_is_pasted_as_it_is(desk: Any, folder: Path) -> None:
    async with desk.open(SIZE) as pilot:
        for text in (f"{folder}/notes.txt", f"see {folder}/memo.wav", f"{folder}/nowhere.png"):
            desk.app.screen.query_one(Prompt).text = ""
            await _drop(desk, pilot, text)
            await desk.until(pilot, lambda text=text: desk.app.screen.query_one(Prompt).text == text)
        assert desk.app.screen.query_one(Attachments).files == ()


async def test_a_model_that_cannot_see_is_named_at_once(desk: Any, folder: Path) -> None:
    desk.daemon.capabilities[:] = ["completion"]
    async with desk.open(SIZE) as pilot:
        await _type(desk, pilot, f"/attach {folder}/memo.wav")
        await desk.see(pilot, "memo.wav: tiny cannot hear sound")
        desk.app.screen.query_one(Prompt).text = ""
        await _drop(desk, pilot, f"{folder}/red\\ 0.png")
        await desk.see(pilot, "red 0.png: tiny cannot see pictures")
        assert desk.app.screen.query_one(Prompt).text == f"{folder}/red\\ 0.png"
        assert desk.app.screen.query_one(Attachments).files == ()


async def test_a_model_that_was_chosen_later_is_asked_what_it_takes(desk: Any, folder: Path) -> None:
    async with desk.open(SIZE) as pilot:
        await _type(desk, pilot, f"/attach {folder}/memo.wav")
        await desk.see(pilot, "♪ memo.wav")
        desk.daemon.capabilities.remove("audio")
        await _type(desk, pilot, "what do you hear?")
        await desk.see(pilot, "memo.wav: tiny cannot hear sound")
        await desk.see(pilot, "♪ memo.wav 16 B ✕")  # given back with the question
        assert desk.app.screen.query_one(Prompt).text == "what do you hear?"
        assert desk.daemon.questions == []


async def test_earlier_pictures_are_not_sent_to_a_model_that_cannot_see(desk: Any, folder: Path) -> None:
    async with desk.open(SIZE) as pilot:
        await _type(desk, pilot, f"/attach '{folder}/red 0.png' {folder}/notes.txt")
        await desk.see(pilot, "≡ notes.txt")
        first = await _answer(desk, pilot, "what is this?")
        assert (len(first[0]["images"]), "seven apples" in first[0]["content"]) == (1, True)
        desk.daemon.capabilities.remove("vision")
        second = await _answer(desk, pilot, "and now?", 2)
        assert "images" not in second[0]
        await desk.see(pilot, "Not sent again: 1 earlier picture of this")


async def test_files_that_failed_in_a_chat_out_of_sight_come_back_with_it(desk: Any, folder: Path) -> None:
    desk.daemon.rows.append({**desk.daemon.rows[0], "name": "blue"})
    async with desk.open(SIZE) as pilot:
        screen, attachments = desk.app.screen, desk.app.screen.query_one(Attachments)
        await _type(desk, pilot, "/model blue")
        await desk.see(pilot, "This is blue")
        await _answer(desk, pilot, "first")
        first = screen.view
        await screen.attach([folder / "red 0.png"])
        await _type(desk, pilot, "what is this?")
        await desk.until(pilot, lambda: len(desk.daemon.questions) == 2)
        await screen.action_new()
        desk.daemon.fail_answer(BadRequest("no"))
        await desk.until(pilot, lambda: not first.is_answering)
        assert (attachments.files, screen.query_one(Prompt).text) == ((), "")
        await screen.open_chat(first.conversation.chat_id)
        assert screen.query_one(Prompt).text == "what is this?"
        assert [each.file.name for each in attachments.files] == ["red 0.png"]


async def test_ways_to_take_a_file_away(desk: Any, folder: Path) -> None:
    async with desk.open(SIZE) as pilot:
        attachments = desk.app.screen.query_one(Attachments)

        def names() -> list[str]:
            return [attached.file.name for attached in attachments.files]

        await desk.app.screen.attach([folder / name for name in (*PICTURES, "memo.wav")])
        assert names() == [*PICTURES, "memo.wav"]
        await desk.see(pilot, "♪ memo.wav")
        await pilot.press("backspace")
        await desk.until(pilot, lambda: len(names()) == 3)
        cross = desk.seen(desk.app).splitlines()[attachments.region.y].index("✕")
        await pilot.click(attachments, offset=(cross - attachments.region.x, 0))
        await desk.until(pilot, lambda: names() == ["green 1.png", "red 0.png"])
        await _type(desk, pilot, "/detach green 1.png")
        await desk.until(pilot, lambda: names() == ["red 0.png"])
        await _type(desk, pilot, "/detach")
        await desk.until(pilot, lambda: names() == [])
        await pilot.press("backspace")
        assert not attachments.display


async def test_more_than_a_request_carries_is_refused(desk: Any, folder: Path) -> None:
    async with desk.open(SIZE) as pilot:
        await desk.app.screen.attach([folder / "memo.wav"] * 16)
        await desk.see(pilot, "more")
        assert desk.app.screen.query_one(Attachments).size.height == 3
        await _type(desk, pilot, f"/attach {folder}/memo.wav")
        await desk.see(pilot, "17 pictures and sounds are too many")


async def test_a_picture_needs_no_words(desk: Any, folder: Path) -> None:
    async with desk.open(SIZE) as pilot:
        await desk.app.screen.attach([folder / "red 0.png"])
        (message,) = await _answer(desk, pilot, "")
        assert (message["content"], len(message["images"])) == ("", 1)
        await desk.see(pilot, "▣ red 0.png · 60×40")
        assert desk.app.screen.view.conversation.title == "red 0.png"


async def test_a_chat_with_pictures_is_opened_again(folder: Path, desk: Any, tmp_path: Path) -> None:
    kept = Desk(tmp_path / "chats.db")
    kept.daemon.capabilities += ["vision"]
    async with kept.open(SIZE) as pilot:
        await kept.app.screen.attach([folder / name for name in PICTURES])
        await _answer(kept, pilot, "what are these?")
    (tmp_path / "chats.media").iterdir().__next__().unlink()
    again = Desk(tmp_path / "chats.db")
    again.daemon.capabilities += ["vision"]
    async with again.open(SIZE) as pilot:
        await pilot.press("ctrl+l")
        await again.see(pilot, "what are these?")
        await pilot.press("enter")
        await again.see(pilot, "An answer.")
        gallery = again.app.screen.query_one(Gallery)
        # Two are drawn beside each other, and a line is left of the one whose file is gone.
        await again.until(pilot, lambda: gallery.size.height == 7 + 1 + 1)
        messages = await _answer(again, pilot, "and now?")
        assert len(messages[0]["images"]) == 2
        await again.see(pilot, "Not sent, as gone from the disk")
        screen = again.app.screen
        first = screen.view.conversation.messages[0]
        await screen.retry(first)
        await again.see(pilot, "green 1.png is gone")
        assert len(screen.view.conversation.messages) == 4
        await screen.edit(first)
        assert len(screen.query_one(Attachments).files) == 2
        # Giving the edit up, one opens the chat again.
        await screen.open_chat(first.chat_id)
        await again.see(pilot, "and now?")
        assert len(screen.view.conversation.messages) == 4


async def test_an_unanswered_question_does_not_mix_with_what_was_attached_since(desk: Any, folder: Path) -> None:
    async with desk.open(SIZE) as pilot:
        screen, attachments = desk.app.screen, desk.app.screen.query_one(Attachments)
        await screen.attach([folder / "red 0.png"] * 16)
        await pilot.press("enter")
        await desk.until(pilot, lambda: len(desk.daemon.questions) == 1)
        await screen.attach([folder / "memo.wav"])
        desk.daemon.fail_answer(BadRequest("no"))
        await desk.until(pilot, lambda: not screen.view.is_answering)
        await pilot.pause()
        assert [each.file.name for each in attachments.files] == ["memo.wav"]
        (message,) = await _answer(desk, pilot, "what do you hear?", 2)
        assert message["images"] == [_sent(folder / "memo.wav")]
        assert len(attachments.files) == 16


async def test_real_pictures_keep_their_colour_behind_a_dialog(folder: Path) -> None:
    """It is the number of the picture: in another one the terminal draws another picture, or none."""
    desk = Desk()
    desk.daemon.capabilities += ["vision"]
    desk.app = LocalrunApp(
        "http://127.0.0.1:1", connect=desk.daemon.connect, preferences=Preferences(pictures=Pictures.KITTY)
    )
    async with desk.open((SIZE[0], 3 * SIZE[1])) as pilot:  # so high that the dialog does not cover it
        await _drop(desk, pilot, f"'{folder / PICTURES[0]}'")
        await _type(desk, pilot, "what is it?")
        desk.daemon.say("blue")
        desk.daemon.end_answer()

        def colours() -> set[Any]:
            strips = desk.app.screen._compositor.render_strips()
            parts = [part for strip in strips for part in strip if has_placeholders(part.text)]
            return {part.style.color for part in parts if part.style}

        await desk.until(pilot, colours)
        before = colours()
        assert len(before) == 1
        await desk.app.action_help()
        await desk.until(pilot, lambda: desk.app.screen.is_modal and colours())
        assert colours() == before


async def test_a_terminal_of_sixteen_colours_has_lines(desk: Any, folder: Path) -> None:
    desk.app.console._color_system = desk.app.console._color_system.__class__.STANDARD
    async with desk.open(SIZE) as pilot:
        await desk.app.screen.attach([folder / "red 0.png", folder / "memo.wav"])
        await _answer(desk, pilot, "what are these?")
        await desk.see(pilot, "▣ red 0.png · 60×40")
        assert desk.app.screen.query_one(Gallery).size.height == 2


@pytest.mark.parametrize(
    ("width", "line"),
    [
        (60, "▣ a picture of a fox.png · 4032×3024 · 5.0 MB"),
        (31, "▣ a pictu… · 4032×3024 · 5.0 MB"),
        (22, "▣ a picture … · 5.0 MB"),
        (10, "▣ a pictu…"),
    ],
)
def test_a_line_has_the_name_and_what_fits_beside_it(width: int, line: str) -> None:
    medium = Medium("0", "a picture of a fox.png", Kind.PICTURE, 5_000_000, 4032, 3024)
    assert summary(medium, width) == line
