"""The chat page at `/` in a headless Chromium."""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager

from checks import FAKE_URL, PICTURE, URL, assert_cancelled, long_reply, run, says
from playwright.sync_api import Page, Route, expect, sync_playwright

MARKDOWN = """# A title

Some **bold**, `code` and [a link](https://example.org/x), but <b>no</b> <img src=x onerror="document.title='run'">,
[no script](javascript:alert(1)).

- one
- two

```python
print("hi")
```
"""


@contextmanager
def chat_page(url: str = FAKE_URL, path: str = "/") -> Iterator[Page]:
    """The page in a browser of its own. What the browser refuses or cannot do is an error."""
    with sync_playwright() as driver:
        # As root, in a container, there is no sandbox; no page but ours is opened.
        arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
        browser = driver.chromium.launch(executable_path=os.environ["LOCALRUN_TEST_CHROMIUM"], args=arguments)
        page = browser.new_page()
        wrong: list[str] = []
        asked: list[str] = []
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on("console", lambda said: wrong.append(said.text) if "Content Security Policy" in said.text else None)
        page.on("request", lambda request: asked.append(request.url))
        page.goto(url + path)
        expect(page.locator("#model option").first).to_be_attached()
        yield page
        browser.close()
        assert not wrong, wrong
        assert [one for one in asked if not one.startswith((url, "data:", "blob:"))] == []


def ask(page: Page, text: str) -> None:
    page.fill("#text", text)
    page.press("#text", "Enter")


def check_answer_and_numbers() -> None:
    with chat_page() as page:
        ask(page, says("some words"))
        expect(page.locator(".assistant .said")).to_have_text("some words")
        expect(page.locator("#numbers")).to_contain_text("first token")
        expect(page.locator("#send")).to_have_text("Send")
        ask(page, says("more words"))
        expect(page.locator(".assistant .said").nth(1)).to_have_text("more words")
        page.reload()
        expect(page.locator(".assistant .said").nth(1)).to_have_text("more words")
        page.click("#new")
        expect(page.locator(".turn")).to_have_count(0)
        page.reload()
        expect(page.locator(".greeting")).to_be_visible()


def check_markdown_is_never_html() -> None:
    with chat_page() as page:
        turns = [{"role": "user", "content": "<i>me</i>"}, {"role": "assistant", "content": MARKDOWN}]
        page.evaluate("turns => localStorage.setItem('localrun.chat', JSON.stringify(turns))", turns)
        page.reload()
        said = page.locator(".assistant .said")
        for name, text in (
            ("h1", "A title"),
            ("strong", "bold"),
            ("li", "one"),
            ("pre", 'print("hi")'),
            ("a", "a link"),
        ):
            expect(said.locator(name).first).to_have_text(text)
        expect(said.locator("a")).to_have_count(1)
        expect(said).to_contain_text("<b>no</b>")
        expect(page.locator(".turn b, .turn i, .turn img, .turn script")).to_have_count(0)
        assert page.title() == "localrun"


def check_stop() -> None:
    with chat_page() as page:
        ask(page, long_reply())
        expect(page.locator(".assistant .said")).to_contain_text("word word")
        expect(page.locator("#send")).to_have_text("Stop")
        page.keyboard.press("Escape")
        expect(page.locator(".assistant")).to_contain_text("Stopped.")
        expect(page.locator("#send")).to_have_text("Send")
        assert_cancelled(FAKE_URL)


def check_key() -> None:
    """A server with keys: asked for once, sent with every request, gone with the tab."""
    keys: list[str | None] = []

    def guarded(route: Route) -> None:
        keys.append(route.request.headers.get("authorization"))
        if keys[-1] == "Bearer secret":
            route.continue_()
        else:
            error = {"error": {"message": "an API key is missing"}}
            route.fulfill(status=401, content_type="application/json", body=json.dumps(error))

    with chat_page() as page:
        page.route("**/v1/**", guarded)
        page.reload()
        expect(page.locator("#key-problem")).to_be_empty()
        page.press("#key-text", "Escape")
        expect(page.locator("#notice")).to_contain_text("an API key is missing")
        ask(page, "too early")  # asks for the key again, and keeps the text
        expect(page.locator("#key-text")).to_be_visible()
        page.fill("#key-text", "wrong")
        page.press("#key-text", "Enter")
        expect(page.locator("#key-problem")).to_have_text("an API key is missing")
        expect(page.locator("#key-text")).to_have_value("")
        page.fill("#key-text", "secret")
        page.click("text=Use key")
        expect(page.locator("#model option").first).to_be_attached()
        ask(page, says("let in"))
        expect(page.locator(".assistant .said")).to_have_text("let in")
        assert keys == [None, None, "Bearer wrong", "Bearer secret", "Bearer secret"], keys
        assert "secret" not in page.evaluate("JSON.stringify(localStorage)")


def check_picture() -> None:
    with chat_page(URL) as page:
        page.select_option("#model", "tiny")
        expect(page.locator("#attach")).to_be_hidden()
        page.select_option("#model", "gemma3")
        expect(page.locator("#attach")).to_be_visible()
        picture = {"name": "a.png", "mimeType": "image/png", "buffer": base64.b64decode(PICTURE)}
        page.set_input_files("#file", picture)
        expect(page.locator("#pictures img")).to_have_count(1)
        with page.expect_request("**/v1/chat/completions") as sent:
            ask(page, "What is this?")
        parts = sent.value.post_data_json["messages"][0]["content"]
        assert [part["type"] for part in parts] == ["image_url", "text"]
        expect(page.locator(".user img")).to_have_count(1)
        expect(page.locator("#numbers")).to_contain_text("first token", timeout=60_000)
        page.keyboard.press("Escape")


def check_error_is_shown() -> None:
    with chat_page() as page:
        page.evaluate("document.getElementById('model').options[0].value = 'nothing'")
        ask(page, "hello")
        expect(page.locator(".assistant .wrong")).to_contain_text("'nothing' not found")


if __name__ == "__main__":
    run(globals())
