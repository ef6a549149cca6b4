"""The README's pictures, made from the real program: `python packaging/screenshots.py`.

Starts a daemon of its own with the built-in model, lets several clients ask it, runs the interface against it in
textual's headless terminal and the chat page in Chromium, and writes what is to be seen to packaging/images/*.png.
Needs `rsvg-convert`, Chromium with its driver and the font DejaVu Sans Mono (on Debian and Ubuntu: `apt install
librsvg2-bin chromium-driver fonts-dejavu-core`) and the `dev` extra.

Does not: touch the person's own daemon, chats or settings.
"""

from __future__ import annotations

import asyncio
import base64
import html
import itertools
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx2
from PIL import Image
from textual.pilot import Pilot

from localrun.snapshot import RequestState
from localrun.tui.app import LocalrunApp
from localrun.tui.screens.chat import ChatScreen

IMAGES = Path(__file__).parent / "images"
CHAT_SIZE, MONITOR_SIZE = (100, 30), (136, 36)
WIDTH_PIXELS = 1000
PATIENCE_S = 60.0
MONITOR_S = 25.0
# Of one character in textual's picture; in this font, and then in this size, characters are just as wide.
_CELL_WIDTH = 12.2
_FONT, _FONT_SIZE = "DejaVu Sans Mono", 20.266
CLIENTS = ("zed", "continue", "open-webui", "aider")
QUESTION = "Write down the fox's story in ten lines for the children, and say where it lived and what it ate. "


@contextmanager
def _daemon() -> Iterator[str]:
    """The address of a new daemon with nothing in it but `tiny`."""
    with tempfile.TemporaryDirectory() as home:
        environment = {name: value for name, value in os.environ.items() if not name.startswith(("LOCALRUN_", "HF_"))}
        environment |= {"LOCALRUN_HOME": home, "HF_HOME": f"{home}/hub"}
        command = [sys.executable, "-m", "localrun", "serve", "--port", "0", "--slots", "6", "--kv-cells", "16384"]
        process = subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        try:
            assert process.stdout is not None
            yield process.stdout.readline().split()[-1]
        finally:
            process.terminate()
            process.wait(timeout=60)


async def _ask_for_ever(url: str, client: str, number: int) -> None:
    """One client, which asks one question after the other; all share their beginning."""
    headers = {"X-Localrun-Client": client}
    async with httpx2.AsyncClient(base_url=url, headers=headers, timeout=None, trust_env=False) as http:
        for turn in itertools.count():
            prompt = QUESTION * 8 + f"This is turn {turn} of {client}."
            body = {"model": "tiny", "prompt": prompt, "max_tokens": 1000 + 300 * number, "ignore_eos": True}
            await http.post("/v1/completions", json=body)


async def _until(pilot: Pilot[Any], condition: Callable[[], object]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not condition():
            await pilot.pause(0.05)


async def _take(url: str) -> None:
    app = LocalrunApp(url)
    async with app.run_test(size=CHAT_SIZE) as pilot:
        screen = app.screen
        assert isinstance(screen, ChatScreen)
        for question in ("", "What is localrun?", "Tell me a story about a baker."):
            n_before = len(screen.view.conversation.messages)
            await pilot.press(*question, "enter")
            await _until(pilot, lambda n=n_before: len(screen.view.conversation.messages) == n + 2)
            await _until(pilot, lambda: not screen.view.is_answering)
        await pilot.pause(1.5)  # the last numbers come with the next snapshots
        _write("chat", app)
        clients = [asyncio.create_task(_ask_for_ever(url, client, n)) for n, client in enumerate(CLIENTS)]
        await pilot.resize_terminal(*MONITOR_SIZE)
        await pilot.press("f2")
        await pilot.pause(MONITOR_S)
        await _until(pilot, lambda: _n_decoding(app) >= len(CLIENTS) - 1)
        await pilot.press("home")  # the running ones are at the top
        await pilot.pause(0.4)
        _write("monitor", app)
        for task in clients:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task


def _n_decoding(app: LocalrunApp) -> int:
    rows = app.session.snapshot.requests if app.session.snapshot else []
    return sum(row.state is RequestState.DECODE for row in rows)


def _write(name: str, app: LocalrunApp) -> None:
    IMAGES.mkdir(exist_ok=True)
    svg = _placed(app.export_screenshot(title=f"localrun: {name}"))
    path = IMAGES / f"{name}.png"
    subprocess.run(["rsvg-convert", "-w", str(WIDTH_PIXELS), "-o", str(path)], input=svg.encode(), check=True)
    _shrink(path)


def _shrink(path: Path) -> None:
    """Few colours are in it; a palette makes it a third as large."""
    with Image.open(path) as picture:
        small = picture.convert("RGB").quantize(colors=192, method=Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
    small.save(path, optimize=True)
    print(f"{path}: {path.stat().st_size / 1000:.0f} kB")


def _placed(svg: str) -> str:
    """The picture with every word in its own cell. The converter runs spaces together and knows no `textLength`."""
    svg = svg.replace("Fira Code", _FONT).replace("font-size: 20px", f"font-size: {_FONT_SIZE}px")
    return re.sub(
        r'<text class="([^"]*)" x="([\d.]+)" y="([\d.]+)"[^>]*(clip-path="[^"]*")>([^<]*)</text>', _words, svg
    )


def _words(found: re.Match[str]) -> str:
    style, x, y, clip, text = found.groups()
    return "".join(
        f'<text class="{style}" x="{float(x) + word.start() * _CELL_WIDTH:.1f}" y="{y}" {clip}>'
        f"{html.escape(word.group())}</text>"
        for word in re.finditer(r"[^\xa0 ]+", html.unescape(text))
    )


_BROWSER = ["--headless", "--no-sandbox", "--disable-gpu", f"--window-size={WIDTH_PIXELS},640", "--hide-scrollbars"]
_CHROMEDRIVER_PORT = 9517


def _take_page(url: str) -> None:
    """The chat page after a question, by the browser's driver (https://www.w3.org/TR/webdriver2/)."""
    driver = subprocess.Popen(["chromedriver", f"--port={_CHROMEDRIVER_PORT}"], stdout=subprocess.DEVNULL)
    try:
        with httpx2.Client(base_url=f"http://127.0.0.1:{_CHROMEDRIVER_PORT}", timeout=PATIENCE_S) as http:
            _drive(http, url)
    finally:
        driver.terminate()
        driver.wait(timeout=60)


def _drive(http: httpx2.Client, url: str) -> None:
    deadline_s = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline_s:
        with suppress(httpx2.TransportError):
            if http.get("/status").json()["value"]["ready"]:
                break
        time.sleep(0.1)
    wanted = {"browserName": "chrome", "goog:chromeOptions": {"args": _BROWSER}}
    session = f"/session/{_value(http, 'POST', '/session', {'capabilities': {'alwaysMatch': wanted}})['sessionId']}"
    _value(http, "POST", f"{session}/url", {"url": url})

    def run(script: str) -> Any:
        return _value(http, "POST", f"{session}/execute/sync", {"script": f"return {script}", "args": []})

    def wait_for(script: str) -> None:
        while not run(script):
            assert time.monotonic() < deadline_s + PATIENCE_S, script
            time.sleep(0.1)

    wait_for("document.querySelector('#model option') !== null")
    [text] = _value(http, "POST", f"{session}/element", {"using": "css selector", "value": "#text"}).values()
    for number, question in enumerate(("What is localrun?", "Tell me a story about a baker.")):
        _value(http, "POST", f"{session}/element/{text}/value", {"text": f"{question}\ue007"})
        is_done = "document.querySelector('#send').textContent === 'Send'"
        wait_for(f"document.querySelectorAll('.assistant .numbers').length === {number + 1} && {is_done}")
    path = IMAGES / "page.png"
    path.write_bytes(base64.b64decode(_value(http, "GET", f"{session}/screenshot")))
    http.request("DELETE", session)
    _shrink(path)


def _value(http: httpx2.Client, method: str, path: str, body: Any = None) -> Any:
    return http.request(method, path, json=body).raise_for_status().json()["value"]


if __name__ == "__main__":
    os.environ |= {"TERM": "xterm-256color", "COLORTERM": "truecolor"}
    os.environ.pop("NO_COLOR", None)
    with _daemon() as address:
        asyncio.run(_take(address))
        _take_page(address)
