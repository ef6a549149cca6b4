"""The chat page at `/` in a headless Chromium."""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from checks import FAKE_URL, PICTURE, URL, assert_cancelled, long_reply, run, says
from playwright.sync_api import Page, Route, expect, sync_playwright

MARKDOWN = """# A title

Some **bold**, `code` and [a link](https://example.org/x), but <b>no</b> <img src=x onerror="document.title='run'">,
[no script](javascript:alert(1)), ![no picture](https://example.org/x.png) and <a href="javascript:alert(1)">no</a>.
[quotes](https://example.org/"onmouseover="alert(1)) <https://example.org/ok>

| Name | Size | <i>Note</i> |
|:-----|-----:|:-:|
| `a\\|b` | 2 | <img src=x onerror="document.title='run'"> |
| c \\| d | 10 | **[x](javascript:alert(1))** |

- one
  1. deeper
- two

```python
print("<script>document.title='run'</script>")
```
"""


@contextmanager
def chat_page(url: str = FAKE_URL, path: str = "/") -> Iterator[Page]:
    """The page in a browser of its own. What the browser refuses or cannot do is an error."""
    with sync_playwright() as driver:
        # As root, in a container, there is no sandbox; no page but ours is opened.
        arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
        browser = driver.chromium.launch(executable_path=os.environ["LOCALRUN_TEST_CHROMIUM"], args=arguments)
        page = browser.new_context().new_page()
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


def chats(page: Page) -> list[str]:
    return page.locator("#chats .title").all_text_contents()


def check_answer_and_numbers() -> None:
    with chat_page() as page:
        ask(page, says("some words"))
        expect(page.locator(".assistant .said")).to_have_text("some words")
        expect(page.locator(".numbers")).to_contain_text("first token")
        expect(page.locator("#send")).to_have_text("Send")
        ask(page, says("more words"))
        expect(page.locator(".assistant .said").nth(1)).to_have_text("more words")
        expect(page.locator("#status")).to_contain_text("The answer is complete")
        page.reload()
        expect(page.locator(".assistant .said").nth(1)).to_have_text("more words")
        expect(page.locator(".assistant .numbers").first).to_contain_text("first token")


def check_several_conversations() -> None:
    with chat_page() as page:
        ask(page, says("one"))
        expect(page.locator(".assistant .said")).to_have_text("one")
        page.keyboard.press("Alt+N")
        expect(page.locator(".greeting")).to_be_visible()
        ask(page, says("two"))
        expect(page.locator(".assistant .said")).to_have_text("two")
        assert len(chats(page)) == 2
        page.locator("#chats").get_by_text("Rename").click()
        page.fill("#chats input", "The second <b>one</b>")
        page.press("#chats input", "Enter")
        assert chats(page)[0] == "The second <b>one</b>"
        page.reload()
        expect(page.locator(".assistant .said")).to_have_text("two")
        page.locator("#chats .title").nth(1).click()
        expect(page.locator(".assistant .said")).to_have_text("one")
        page.once("dialog", lambda asked: asked.accept())
        page.locator("#chats").get_by_text("Delete").click()
        expect(page.locator(".assistant .said")).to_have_text("two")
        assert chats(page) == ["The second <b>one</b>"]
        page.once("dialog", lambda asked: asked.accept())
        page.locator("#chats").get_by_text("Delete").click()
        expect(page.locator(".greeting")).to_be_visible()
        assert "two" not in page.evaluate("JSON.stringify(localStorage)")


def check_an_answer_goes_on_while_another_conversation_is_read() -> None:
    with chat_page() as page:
        ask(page, says("first"))
        expect(page.locator(".numbers")).to_contain_text("first token")
        page.click("#new")
        ask(page, long_reply())
        expect(page.locator(".assistant .said")).to_contain_text("word word")
        page.locator("#chats .title").nth(1).click()
        expect(page.locator(".assistant .said")).to_have_text("first")
        expect(page.locator("#send")).to_have_text("Send")
        page.locator("#chats .title").first.click()
        expect(page.locator("#send")).to_have_text("Stop")
        seen = len(page.locator(".assistant .said").inner_text())
        page.wait_for_function("n => document.querySelector('.assistant .said').innerText.length > n", arg=seen)
        page.keyboard.press("Escape")
        expect(page.locator(".assistant")).to_contain_text("Stopped.")
        assert_cancelled(FAKE_URL)


def check_a_page_that_is_closed_keeps_what_came() -> None:
    with chat_page() as page:
        ask(page, long_reply())
        expect(page.locator(".assistant .said")).to_contain_text("word word")
        page.reload()
        expect(page.locator(".assistant .said")).to_contain_text("word word")
        expect(page.locator(".assistant .wrong")).not_to_be_empty()
        assert_cancelled(FAKE_URL)


def check_edit_and_answer_again() -> None:
    with chat_page() as page:
        ask(page, says("one"))
        expect(page.locator(".assistant .said")).to_have_text("one")
        ask(page, says("two"))
        expect(page.locator(".assistant .said").nth(1)).to_have_text("two")
        page.locator(".assistant").nth(1).get_by_text("Again").click()
        expect(page.locator(".assistant .said")).to_have_text(["one", "two"])
        page.press("#text", "ArrowUp")
        expect(page.locator("#text")).to_have_value(says("two"))
        page.keyboard.press("Escape")
        expect(page.locator("#text")).to_have_value("")
        page.locator(".user").first.get_by_text("Edit").click()
        with page.expect_request("**/v1/chat/completions") as sent:
            ask(page, says("three"))
        assert [one["content"] for one in sent.value.post_data_json["messages"]] == [says("three")]
        expect(page.locator(".assistant .said")).to_have_text(["three"])
        expect(page.locator(".user")).to_have_count(1)


def check_again_and_edit_keep_the_earlier_versions() -> None:
    with chat_page() as page:
        ask(page, says("one"))
        expect(page.locator(".assistant .said")).to_have_text("one")
        ask(page, says("two"))
        expect(page.locator(".assistant .said")).to_have_text(["one", "two"])
        expect(page.locator("#send")).to_have_text("Send")
        page.locator(".assistant").first.get_by_text("Again").click()
        expect(page.locator(".assistant")).to_contain_text(["2/2"])
        expect(page.locator("#send")).to_have_text("Send")
        page.locator(".user").get_by_text("Edit").click()
        ask(page, says("three"))
        expect(page.locator(".assistant .said")).to_have_text(["three"])
        expect(page.locator("#status")).to_contain_text("The answer is complete")
        page.reload()
        expect(page.locator(".user")).to_contain_text(["2/2"])
        page.get_by_label("Earlier version").click()
        expect(page.locator(".assistant")).to_contain_text(["2/2"])
        expect(page.locator(".assistant .said")).to_have_text(["one"])
        page.locator(".assistant").get_by_label("Earlier version").click()
        expect(page.locator(".assistant .said")).to_have_text(["one", "two"])
        page.reload()
        expect(page.locator(".assistant .said")).to_have_text(["one", "two"])
        with page.expect_download() as begun:
            page.locator("#chats").get_by_text("JSON").click()
        turns = json.loads(Path(begun.value.path()).read_text(encoding="utf-8"))["turns"]
        assert [turn["role"] for turn in turns] == ["user", "assistant"] * 2
        page.once("dialog", lambda asked: asked.accept())
        page.locator("#chats").get_by_text("Delete").click()
        expect(page.locator(".greeting")).to_be_visible()
        assert "three" not in page.evaluate("JSON.stringify(localStorage)")


def check_a_conversation_of_one_line_opens_as_before() -> None:
    """As versions kept it that had no versions of turns."""
    turns = [{"role": role, "content": f"the {role}'s {n}"} for n in (1, 2) for role in ("user", "assistant")]
    with chat_page() as page:
        page.evaluate("text => localStorage.setItem('localrun.chat.x', text)", json.dumps({"turns": turns}))
        page.reload()
        expect(page.locator(".turn .said")).to_have_text([turn["content"] for turn in turns])
        page.locator(".user").last.get_by_text("Edit").click()
        ask(page, says("three"))
        expect(page.locator(".assistant .said").last).to_have_text("three")
        expect(page.locator("#send")).to_have_text("Send")
        page.get_by_label("Earlier version").click()
        expect(page.locator(".turn .said")).to_have_text([turn["content"] for turn in turns])


def check_system_prompt_and_sampling() -> None:
    with chat_page() as page:
        page.click("#setup")
        page.fill("#system", "Be brief")
        page.fill("[name=temperature]", "0.5")
        page.fill("[name=max_tokens]", "7")
        page.press("[name=max_tokens]", "Enter")
        with page.expect_request("**/v1/chat/completions") as sent:
            ask(page, says("yes"))
        body = sent.value.post_data_json
        assert body["messages"][0] == {"role": "system", "content": "Be brief"}
        assert (body["temperature"], body["max_tokens"], "top_p" in body) == (0.5, 7, False)
        page.reload()
        page.click("#setup")
        expect(page.locator("#system")).to_have_value("Be brief")
        expect(page.locator("[name=temperature]")).to_have_value("0.5")


def check_export() -> None:
    with chat_page() as page:
        ask(page, says("some **words**"))
        expect(page.locator(".assistant strong")).to_have_text("words")
        expect(page.locator("#send")).to_have_text("Send")
        for label, suffix in (("Markdown", ".md"), ("JSON", ".json")):
            with page.expect_download() as begun:
                page.locator("#chats").get_by_text(label).click()
            content = Path(begun.value.path()).read_text(encoding="utf-8")
            assert begun.value.suggested_filename.endswith(suffix)
            assert "some **words**" in content
            if suffix == ".json":
                assert [turn["role"] for turn in json.loads(content)["turns"]] == ["user", "assistant"]


def check_damaged_storage() -> None:
    with chat_page() as page:
        page.evaluate(
            """() => {
                for (const [index, text] of ["no JSON", "null", "[]", '{"turns":[{"role":"x"},null,{"role":"user"}]}',
                    '{"turns":{},"sampling":7,"name":{}}'].entries())
                    localStorage.setItem(`localrun.chat.${index}`, text);
                localStorage.setItem("localrun.chat", '{"no":"list"}');
            }"""
        )
        page.reload()
        ask(page, says("all the same"))
        expect(page.locator(".assistant .said")).to_have_text("all the same")


def check_storage_that_is_full_or_forbidden() -> None:
    """The page works, says that nothing is kept, and lists the conversation all the same, to be exported."""
    full = "Storage.prototype.setItem = () => { throw new DOMException('full', 'QuotaExceededError'); };"
    forbidden = """for (const name of ["localStorage", "sessionStorage"])
        Object.defineProperty(window, name, { get() { throw new DOMException("denied", "SecurityError"); } });"""
    for script in (full, forbidden):
        with chat_page() as page:
            page.add_init_script(script)
            page.reload()
            expect(page.locator("#model option").first).to_be_attached()
            ask(page, says("not kept"))
            expect(page.locator(".assistant .said")).to_have_text("not kept")
            expect(page.locator("#notice")).to_contain_text("This browser keeps no more")
            assert chats(page) == [says("not kept")]
            with page.expect_download() as begun:
                page.locator("#chats").get_by_text("Markdown").click()
            assert "not kept" in Path(begun.value.path()).read_text(encoding="utf-8")


@contextmanager
def two_tabs() -> Iterator[tuple[Page, Page]]:
    """With the same conversation of one answer."""
    with chat_page() as page:
        ask(page, says("one"))
        expect(page.locator("#status")).to_contain_text("The answer is complete")
        other = page.context.new_page()
        other.goto(FAKE_URL)
        expect(other.locator(".assistant .said")).to_have_text("one")
        expect(other.locator("#model option").first).to_be_attached()
        yield page, other


def check_two_tabs_lose_no_turn() -> None:
    with two_tabs() as (page, other):
        ask(page, long_reply())
        expect(page.locator(".assistant .said").nth(1)).to_contain_text("word word")
        expect(other.locator(".user")).to_have_count(2)
        ask(other, says("other"))
        expect(page.locator("#notice")).to_contain_text("Another tab")
        expect(other.locator(".assistant .said").last).to_have_text("other")
        page.keyboard.press("Escape")
        expect(page.locator(".assistant")).to_contain_text(["one", "Stopped."])
        for tab in (page, other):
            tab.reload()
            expect(tab.locator("#chats .title")).to_have_count(2)
        expect(page.locator(".assistant .said").nth(1)).to_contain_text("word word")
        expect(other.locator(".assistant .said").last).to_have_text("other")


def check_an_edit_beside_another_tab_is_kept() -> None:
    with two_tabs() as (page, other):
        other.locator(".user").first.get_by_text("Edit").click()
        ask(page, says("two"))
        expect(page.locator(".assistant .said").nth(1)).to_have_text("two")
        expect(other.locator("#notice")).to_contain_text("Another tab")
        ask(other, says("three"))
        expect(other.locator(".assistant .said")).to_have_text("three")
        expect(other.locator("#status")).to_contain_text("The answer is complete")
        for tab, answers in ((page, ["one", "two"]), (other, ["three"])):
            tab.reload()
            expect(tab.locator(".assistant .said")).to_have_text(answers)


def check_what_another_tab_deletes_is_gone() -> None:
    with two_tabs() as (page, other):
        ask(page, long_reply())
        expect(page.locator(".assistant .said").nth(1)).to_contain_text("word word")
        other.once("dialog", lambda asked: asked.accept())
        other.locator("#chats").get_by_text("Delete").click()
        expect(page.locator(".greeting")).to_be_visible()
        assert_cancelled(FAKE_URL)
        page.reload()
        assert chats(page) == []


def check_a_name_being_typed_outlives_an_answer() -> None:
    with chat_page() as page:
        ask(page, long_reply())
        expect(page.locator(".assistant .said")).to_contain_text("word word")
        page.click("#new")
        ask(page, says("short"))
        expect(page.locator("#send")).to_have_text("Send")
        page.locator("#chats").get_by_text("Rename").click()
        page.fill("#chats input", "half a na")
        other = page.context.new_page()  # a write there has the list shown anew
        other.goto(FAKE_URL)
        other.evaluate('localStorage.setItem(\'localrun.chat.x\', \'{"turns":[{"role":"user","content":"x"}]}\')')
        page.wait_for_function("() => localStorage.getItem('localrun.chat.x') !== null")
        expect(page.locator("#chats input")).to_have_value("half a na")
        page.press("#chats input", "Enter")
        expect(page.locator("#chats .title", has_text="half a na")).to_have_count(1)
        expect(page.locator("#chats .title")).to_have_count(3)


def check_a_list_over_a_page_that_gets_wide() -> None:
    with chat_page() as page:
        page.set_viewport_size({"width": 390, "height": 844})
        page.click("#list")
        expect(page.locator("#shade")).to_be_visible()
        page.set_viewport_size({"width": 1200, "height": 844})
        expect(page.locator("#shade")).to_be_hidden()
        expect(page.locator("#side")).to_be_visible()


def check_answer_again_leaves_an_edit() -> None:
    with chat_page() as page:
        for word in ("one", "two"):
            ask(page, says(word))
            expect(page.locator(".assistant .said").last).to_have_text(word)
            expect(page.locator("#send")).to_have_text("Send")
        page.locator(".user").last.get_by_text("Edit").click()
        page.locator(".assistant").first.get_by_text("Again").click()
        expect(page.locator("#editing")).to_be_hidden()
        expect(page.locator("#text")).to_have_value("")


def check_a_daemon_that_does_not_answer() -> None:
    with chat_page() as page:
        page.route("**/v1/chat/completions", lambda route: route.abort("connectionrefused"))
        ask(page, "hello")
        expect(page.locator(".assistant .wrong")).to_contain_text("does not answer; is the daemon running?")


def check_names_for_screen_readers_and_a_phone() -> None:
    with chat_page() as page:
        ask(page, says("| a | b |\n|---|---|\n| 1 | 2 |"))
        expect(page.locator(".assistant td")).to_have_text(["1", "2"])
        nameless = page.evaluate(
            """() => [...document.querySelectorAll("button, select, textarea, input:not([hidden])")]
                .filter((one) => !(one.textContent.trim() || one.ariaLabel || one.labels?.length))
                .map((one) => one.outerHTML)"""
        )
        assert nameless == []
        page.set_viewport_size({"width": 390, "height": 844})
        assert page.evaluate("document.documentElement.scrollWidth") == 390
        expect(page.locator("#side")).to_be_hidden()
        page.click("#list")
        expect(page.locator("#side")).to_be_visible()
        expect(page.locator("#list")).to_have_attribute("aria-expanded", "true")
        page.keyboard.press("Escape")
        expect(page.locator("#side")).to_be_hidden()


def check_markdown_is_never_html() -> None:
    with chat_page() as page:
        turns = [{"role": "user", "content": "<i>me</i>"}, {"role": "assistant", "content": MARKDOWN}]
        page.evaluate("turns => localStorage.setItem('localrun.chat', JSON.stringify(turns))", turns)
        page.reload()
        said = page.locator(".assistant .said")
        for name, text in (
            ("h1", "A title"),
            ("strong", "bold"),
            ("ul > li > ol > li", "deeper"),
            ("pre", "print(\"<script>document.title='run'</script>\")"),
            ("a", "a link"),
            ("td.right", "2"),
            ("th.center", "<i>Note</i>"),
        ):
            expect(said.locator(name).first).to_have_text(text)
        expect(said.locator("td").nth(3)).to_have_text("c | d")
        links = said.locator("a").evaluate_all("all => all.map((one) => one.href)")
        assert all(one.startswith("https://example.org/") for one in links), links
        attributes = said.evaluate(
            "it => [...new Set([...it.querySelectorAll('*')].flatMap((one) => one.getAttributeNames()))]"
        )
        assert not [one for one in attributes if one.startswith("on") or one in ("style", "src", "srcdoc")], attributes
        expect(said).to_contain_text("<b>no</b>")
        expect(page.locator(".turn b, .turn i, .turn img, .turn script, .turn iframe")).to_have_count(0)
        assert page.title() == "localrun"


def check_markdown_as_others_read_it() -> None:
    cases = {
        "```ls``` lists\n\n**b**": "<p><code>ls</code> lists</p><p><strong>b</strong></p>",
        "my__own__name and __init__": "<p>my__own__name and <strong>init</strong></p>",
        "\\*no\\* 5 \\* 3": "<p>*no* 5 * 3</p>",
        "***both***": "<p><strong><em>both</em></strong></p>",
        "# Learn C#": "<h1>Learn C#</h1>",
        "## Closed ##": "<h2>Closed</h2>",
        "a\r\n\r\n- c\r\n- d": '<p>a</p><ul dir="auto"><li>c</li><li>d</li></ul>',
    }
    with chat_page() as page:
        for text, html in cases.items():
            made = page.evaluate(
                """async (text) => {
                    const { element, markdown } = await import("/web/markdown.js");
                    return element("div", {}, markdown(text)).innerHTML;
                }""",
                text,
            )
            assert made == html, (text, made)
        address = "https://example.org/A_(b)"
        page.evaluate("turns => localStorage.setItem('localrun.chat', JSON.stringify(turns))",
                      [{"role": "assistant", "content": f"[a]({address}), {address}."}])  # fmt: skip
        page.reload()
        assert page.locator(".said a").evaluate_all("all => all.map((one) => one.href)") == [address, address]


def check_endless_marks_do_not_stop_the_page() -> None:
    """What a model that repeats itself writes is drawn in a moment, whatever it is."""
    with chat_page() as page:
        took = page.evaluate(
            """async () => {
                const { markdown } = await import("/web/markdown.js");
                const all = ["`", "*", "_", "[", "| ", "> ", "- ", "~~", "`a", "**a", "[a](", "https://", "|-|\\n"];
                const from = performance.now();
                for (const mark of all) markdown("a " + mark.repeat(5000));
                const spaces = " ".repeat(200_000);
                const hashes = "#".repeat(200_000);
                for (const text of [`# a${spaces}x`, `# ${hashes}x`, `|\\n|-${spaces}x`, `# ${spaces}\\u2028x`])
                    markdown(text);
                const steps = (mark) => Array.from({ length: 500 }, (_, n) => mark.repeat(n) + "- x").join("\\n");
                for (const mark of ["> ", "- ", "  "]) markdown(steps(mark));
                return performance.now() - from;
            }"""
        )
        assert took < 60_000, took  # without bounds it would be hours


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
        expect(page.locator(".numbers")).to_contain_text("first token", timeout=60_000)
        page.keyboard.press("Escape")


def check_the_model_that_answered_last_is_begun_with() -> None:
    with chat_page(URL) as page:
        expect(page.locator("#model")).not_to_have_value("tiny")
        for name in ("gemma3", "tiny"):
            page.select_option("#model", name)
            ask(page, "hello")
            expect(page.locator(".numbers").last).to_contain_text("first token", timeout=60_000)
            page.keyboard.press("Escape")
            expect(page.locator("#send")).to_have_text("Send")
        page.once("dialog", lambda asked: asked.accept())
        page.locator("#chats").get_by_text("Delete").click()
        expect(page.locator(".greeting")).to_be_visible()
        page.reload()
        expect(page.locator("#model")).to_have_value("gemma3")


def check_error_is_shown() -> None:
    with chat_page() as page:
        page.evaluate("document.getElementById('model').selectedOptions[0].value = 'nothing'")
        ask(page, "hello")
        expect(page.locator(".assistant .wrong")).to_contain_text("'nothing' not found")


if __name__ == "__main__":
    run(globals())
