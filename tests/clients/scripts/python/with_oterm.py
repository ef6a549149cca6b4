"""`oterm` without a terminal: its client layer, then the app itself, driven by keys."""

from __future__ import annotations

import asyncio
import base64
import os
from pathlib import Path
from typing import Any

from checks import FAKE_URL, PICTURE, QUESTION, URL, assert_cancelled, long_reply, raises, run, says, says_call

os.environ["OLLAMA_URL"] = URL
os.environ["OTERM_DATA_DIR"] = str(Path(os.environ["HOME"]) / "oterm")

from oterm.agent import get_agent
from oterm.config import envConfig
from oterm.providers import ollama as provider
from oterm.providers.capabilities import get_capabilities
from pydantic_ai import BinaryContent, Tool
from pydantic_ai.exceptions import ModelHTTPError


def look(city: str, warm: bool) -> str:
    """Look the weather up."""
    return says(f"{city}: {'warm' if warm else 'cold'}")


def fake(**fields: Any) -> Any:
    envConfig.OLLAMA_URL = FAKE_URL
    return get_agent(model="caller", **fields)


def real(**fields: Any) -> Any:
    envConfig.OLLAMA_URL = URL
    return get_agent(model="tiny", **fields)


def check_models() -> None:
    envConfig.OLLAMA_URL = URL
    names = {(model.model or "").removesuffix(":latest") for model in provider.list_models().models}
    assert {"tiny", "caller"} <= names
    assert get_capabilities("ollama", "caller").supports_tools
    assert not get_capabilities("ollama", "tiny").supports_vision
    shown = provider.show_model("tiny")
    assert provider.parse_modelfile_parameters(shown.parameters or "") is not None


async def check_chat() -> None:
    answer = await real(system="Be kind.", parameters={"temperature": 0.0, "max_tokens": 8}).run(QUESTION)
    assert answer.output
    assert answer.usage.output_tokens <= 8
    assert provider.running_context_length("tiny:latest"), "the footer's share of the context"


async def check_stream() -> None:
    async with fake().run_stream(says("some words")) as answer:
        text = "".join([piece async for piece in answer.stream_text(delta=True)])
    assert text == "some words"


async def check_tools() -> None:
    answer = await fake(tools=[Tool(look, takes_ctx=False)]).run(says_call("look", {"city": "Paris", "warm": False}))
    assert answer.output == "Paris: cold"


async def check_cancel() -> None:
    async with fake().run_stream(long_reply()) as answer:
        async for _ in answer.stream_text(delta=True):
            break
    await asyncio.to_thread(assert_cancelled, FAKE_URL)


async def check_errors() -> None:
    envConfig.OLLAMA_URL = URL
    with raises(ModelHTTPError) as missing:
        await get_agent(model="nowhere").run("x")
    assert missing[0].status_code == 404
    assert "nowhere" in str(missing[0])


async def check_the_app() -> None:
    """A chat that is in its store, opened in the app: a prompt typed with keys is answered on the screen."""
    envConfig.OLLAMA_URL = FAKE_URL
    from oterm.app.oterm import OTerm
    from oterm.app.widgets.chat import ChatItem
    from oterm.config import appConfig
    from oterm.store.store import Store
    from oterm.types import ChatModel

    appConfig.set("splash-screen", False)
    store = await Store.get_store()
    await store.save_chat(ChatModel(name="a chat", model="caller", provider="ollama"))
    app = OTerm()
    async with app.run_test(size=(120, 40)) as pilot:
        await pilot.pause()
        await pilot.press(*"Please", "space", *"SAY", "left_square_bracket", "left_square_bracket")
        await pilot.press(*"hello", "right_square_bracket", "right_square_bracket", "enter")
        for _ in range(200):
            await pilot.pause(0.05)
            said = [item.text for item in app.query(ChatItem) if item.author != "user"]
            if said and said[-1] == "hello":
                break
        assert said[-1:] == ["hello"], said
        await pilot.press("ctrl+q")


async def check_picture() -> None:
    envConfig.OLLAMA_URL = URL
    assert get_capabilities("ollama", "gemma3").supports_vision
    picture = BinaryContent(base64.b64decode(PICTURE), media_type="image/png")
    agent = get_agent(model="gemma3", parameters={"temperature": 0.0, "max_tokens": 4})
    blind, seeing = await agent.run(["what?"]), await agent.run(["what?", picture])
    assert seeing.usage.input_tokens > blind.usage.input_tokens


if __name__ == "__main__":
    run(globals())
