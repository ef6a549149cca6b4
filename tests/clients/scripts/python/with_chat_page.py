"""The chat page at `/` in a browser (`pages`)."""

from __future__ import annotations

import base64
import io
import json
import random
import unittest
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import resources
from typing import Any

import pypdf
from checks import FAKE_URL, PICTURE, URL, assert_cancelled, long_reply, run, says
from pages import BROWSER, Page, expect, opened

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
def chat_page(url: str = FAKE_URL, path: str = "/", script: str = "") -> Iterator[Page]:
    with opened(url, path, script) as page:
        expect(page.locator("#model option").first).to_be_attached()
        yield page


def ask(page: Page, text: str) -> None:
    """Once the answer before it is complete: until then what is written stays where it is."""
    expect(page.locator("#send")).to_have_text("Send")
    page.fill("#text", text)
    page.press("#text", "Enter")


def sent(page: Page, n: int = 1) -> dict[str, Any]:
    """The body of the question that is the n-th."""
    body: dict[str, Any] = page.server.sent("/v1/chat/completions", n)[n - 1]
    return body


def keep(page: Page, turns: list[dict[str, Any]]) -> None:
    """Opens the page with a conversation of these turns, stored as versions kept it that had no versions of turns."""
    page.evaluate("(text) => localStorage.setItem('localrun.chat.x', text)", json.dumps({"turns": turns}))
    page.goto("/test/script.js")
    page.goto("/#x")
    expect(page.locator("#model option").first).to_be_attached()


def delete(page: Page) -> None:
    page.locator("#chats").get_by_text("Delete").click()
    page.accept()


def chats(page: Page) -> list[str]:
    return page.locator("#chats .title").texts()


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
        page.keys("Alt", "n")
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
        delete(page)
        expect(page.locator(".assistant .said")).to_have_text("two")
        assert chats(page) == ["The second <b>one</b>"]
        delete(page)
        expect(page.locator(".greeting")).to_be_visible()
        assert "two" not in page.evaluate("() => JSON.stringify(localStorage)")


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
        seen = len(page.locator(".assistant .said").texts()[0])
        page.wait_for("(n) => document.querySelector('.assistant .said').textContent.length > n", seen)
        page.keys("Escape")
        expect(page.locator(".assistant")).to_contain_text("Stopped.")
        assert_cancelled(FAKE_URL)


def check_a_page_that_is_closed_keeps_what_came() -> None:
    with chat_page() as page:
        ask(page, long_reply())
        expect(page.locator(".assistant .said")).to_contain_text("word word")
        page.reload()
        expect(page.locator(".assistant .said")).to_contain_text("word word")
        expect(page.locator(".assistant .wrong")).to_have_text("The page was closed.")
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
        page.keys("Escape")
        expect(page.locator("#text")).to_have_value("")
        page.locator(".user").first.get_by_text("Edit").click()
        ask(page, says("three"))
        body = sent(page, 4)
        assert [one["content"] for one in body["messages"]] == [says("three")]
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
        _, content = page.export("JSON")
        turns = json.loads(content)["turns"]
        assert [turn["role"] for turn in turns] == ["user", "assistant"] * 2
        delete(page)
        expect(page.locator(".greeting")).to_be_visible()
        assert "three" not in page.evaluate("() => JSON.stringify(localStorage)")


def check_a_conversation_of_one_line_opens_as_before() -> None:
    """As versions kept it that had no versions of turns."""
    turns = [{"role": role, "content": f"the {role}'s {n}"} for n in (1, 2) for role in ("user", "assistant")]
    with chat_page() as page:
        keep(page, turns)
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
        ask(page, says("yes"))
        body = sent(page)
        assert body["messages"][0] == {"role": "system", "content": "Be brief"}
        assert (body["temperature"], body["max_tokens"], "top_p" in body) == (0.5, 7, False)
        page.reload()
        page.click("#setup")
        expect(page.locator("#system")).to_have_value("Be brief")
        expect(page.locator("[name=temperature]")).to_have_value("0.5")


def check_conversations_are_found_and_named_in_the_tab() -> None:
    with chat_page() as page:
        for word in ("apple", "pear"):
            page.keys("Alt", "n")
            ask(page, says(f"an {word}"))
            expect(page.locator(".assistant .said")).to_have_text(f"an {word}")
        assert page.evaluate("() => document.title").endswith("an pear]] · localrun")
        page.fill("#find", "APPLE")
        expect(page.locator("#chats .title")).to_have_count(1)
        page.press("#find", "Escape")
        expect(page.locator("#chats .title")).to_have_count(2)
        expect(page.locator(".numbers")).to_contain_text("prompt ")
        expect(page.locator("#model option").first).to_contain_text("MB)")


def check_thinking_is_switched() -> None:
    with chat_page() as page:
        for n, (value, wanted) in enumerate([("0", False), ("1", True), ("", None)], 1):
            page.click("#setup")
            page.select_option("[name=think]", value)
            page.fill("[name=min_p]", "0.1")
            page.press("[name=min_p]", "Enter")
            ask(page, says("yes"))
            expect(page.locator(".assistant .said")).to_have_count(n)
            expect(page.locator("#send")).to_have_text("Send")
            body = sent(page, n)
            assert (body.get("enable_thinking"), body["min_p"], "think" in body) == (wanted, 0.1, False)


def check_export() -> None:
    with chat_page() as page:
        ask(page, says("some **words**"))
        expect(page.locator(".assistant strong")).to_have_text("words")
        expect(page.locator("#send")).to_have_text("Send")
        for label, suffix in (("Markdown", ".md"), ("JSON", ".json")):
            name, content = page.export(label)
            assert name.endswith(suffix)
            assert "some **words**" in content
            if suffix == ".json":
                assert [turn["role"] for turn in json.loads(content)["turns"]] == ["user", "assistant"]


def check_a_title_is_cut_between_signs_and_files_keep_vowels() -> None:
    with chat_page() as page:
        begin = "नमस्ते दुनिया " + "x" * 45
        keep(page, [{"role": "user", "content": f"{begin}😀 and more"}])
        assert chats(page) == [f"{begin}😀…"]
        name, _ = page.export("Markdown")
        assert name == f"{begin}.md"


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
    for script, said in ((full, "keeps no more; delete"), (forbidden, "keeps nothing of this page; export")):
        with chat_page(script=script) as page:
            ask(page, says("not kept"))
            expect(page.locator(".assistant .said")).to_have_text("not kept")
            expect(page.locator("#notice")).to_contain_text(said)
            assert chats(page) == [says("not kept")]
            _, content = page.export("Markdown")
            assert "not kept" in content


@contextmanager
def two_tabs(script: str = "") -> Iterator[tuple[Page, Page]]:
    """With the same conversation of one answer."""
    with chat_page(script=script) as page:
        ask(page, says("one"))
        expect(page.locator("#status")).to_contain_text("The answer is complete")
        other = page.other()
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
        page.keys("Escape")
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
        delete(other)
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
        # As another window writes it; to open one would take the focus from the name.
        page.evaluate(
            """() => {
                localStorage.setItem("localrun.chat.x", '{"turns":[{"role":"user","content":"x"}]}');
                dispatchEvent(new StorageEvent("storage", { key: "localrun.chat.x", newValue: "{}" }));
            }"""
        )
        expect(page.locator("#chats input")).to_have_value("half a na")
        page.press("#chats input", "Enter")
        expect(page.locator("#chats").get_by_text("half a na")).to_have_count(1)
        expect(page.locator("#chats .title")).to_have_count(3)


def check_a_list_over_a_page_that_gets_wide() -> None:
    with chat_page() as page:
        page.resize(390, 844)
        page.click("#list")
        expect(page.locator("#shade")).to_be_visible()
        page.resize(1200, 844)
        expect(page.locator("#shade")).to_be_hidden()
        expect(page.locator("#side")).to_be_visible()


def check_a_keyboard_s_focus_outlives_what_is_shown_anew() -> None:
    with chat_page() as page:

        def press_enter(on: str, at: int = -1, *, is_asked: bool = False) -> None:
            page.evaluate("([css, at]) => [...document.querySelectorAll(css)].at(at).focus()", [on, at])
            if is_asked and BROWSER == "webkit":  # whose driver waits for the key's end, which the question holds up
                page.locator(on).last.click()
            else:
                page.keys("Enter")

        for word in ("one", "two"):
            page.click("#new")
            ask(page, says(word))
            expect(page.locator("#send")).to_have_text("Send")
        press_enter(".assistant .acts button", 0)
        expect(page.locator("#log:focus")).to_have_count(1)
        expect(page.locator("#send")).to_have_text("Send")
        ask(page, long_reply())
        page.evaluate("() => document.querySelector('[aria-label^=Rename]').focus()")
        page.click("#send")
        page.evaluate("() => document.querySelector('[aria-label^=Rename]').focus()")
        page.evaluate("() => dispatchEvent(new StorageEvent('storage', { key: 'localrun.chat.x', newValue: null }))")
        expect(page.locator("[aria-label^=Rename]:focus")).to_have_count(1)
        press_enter("[aria-label^=Delete]", is_asked=True)
        page.accept()
        expect(page.locator("#chats .title:focus")).to_have_text(says("one"))


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


def refuse(path: str, _: Any) -> None:
    if path == "/v1/chat/completions":
        raise ConnectionResetError


def check_a_daemon_that_does_not_answer() -> None:
    with chat_page() as page:
        page.server.answer = refuse
        ask(page, "hello")
        expect(page.locator(".assistant .wrong")).to_contain_text("does not answer; is the daemon running?")
        expect(page.locator(".assistant .numbers")).to_have_text("")


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
        page.resize(390, 844)
        assert page.evaluate("() => document.documentElement.scrollWidth - innerWidth") == 0
        assert page.evaluate("() => document.getElementById('model').offsetWidth") > 160, "room for a model's name"
        expect(page.locator("#side")).to_be_hidden()
        page.click("#list")
        expect(page.locator("#side")).to_be_visible()
        expect(page.locator("#list")).to_have_attribute("aria-expanded", "true")
        page.keys("Escape")
        expect(page.locator("#side")).to_be_hidden()


def check_markdown_is_never_html() -> None:
    with chat_page() as page:
        turns = [{"role": "user", "content": "<i>me</i>"}, {"role": "assistant", "content": MARKDOWN}]
        keep(page, turns)
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
        links = said.locator("a").evaluate_all("(all) => all.map((one) => one.href)")
        assert all(one.startswith("https://example.org/") for one in links), links
        attributes = said.locator("*").evaluate_all(
            "(all) => [...new Set(all.flatMap((one) => one.getAttributeNames()))]"
        )
        assert not [one for one in attributes if one.startswith("on") or one in ("style", "src", "srcdoc")], attributes
        expect(said).to_contain_text("<b>no</b>")
        expect(page.locator(".turn b, .turn i, .turn img, .turn script, .turn iframe")).to_have_count(0)
        assert page.evaluate("() => document.title") != "run"


def check_markdown_as_others_read_it() -> None:
    cases = {
        "```ls``` lists\n\n**b**": "<p><code>ls</code> lists</p><p><strong>b</strong></p>",
        "my__own__name, __init__ and __two words__": "<p>my__own__name, __init__ and <strong>two words</strong></p>",
        "\\*no\\* 5 \\* 3": "<p>*no* 5 * 3</p>",
        "***both***": "<p><em><strong>both</strong></em></p>",
        "# Learn C#": "<h1>Learn C#</h1>",
        "## Closed ##": "<h2>Closed</h2>",
        "1. a\n3. b\n7. c": '<ol dir="auto" start="1"><li>a</li><li value="3">b</li><li value="7">c</li></ol>',
        "1. a\n1. b": '<ol dir="auto" start="1"><li>a</li><li>b</li></ol>',
        "so\n\n2. b": '<p>so</p><ol dir="auto" start="2"><li>b</li></ol>',
        "so[^1] and[^b][^a b]\n\n[^1]: **why**\n    more\n[^b]: [^0-9]": "<p>so<sup>1</sup> and<sup>b</sup>[^a b]</p>"
        '<div class="note"><sup>1</sup><div><p><strong>why</strong><br>more</p></div></div>'
        '<div class="note"><sup>b</sup><div><p>[^0-9]</p></div></div>',
        "[^abc]: no letter\n[^1]: no mark": "<p>[^abc]: no letter<br>[^1]: no mark</p>",
        "[^x](http://a/) ![^y](http://a/)": '<p><a href="http://a/" title="" target="_blank" '
        'rel="noopener noreferrer nofollow">^x</a> !<a href="http://a/" title="" target="_blank" '
        'rel="noopener noreferrer nofollow">^y</a></p>',
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
        keep(page, [{"role": "assistant", "content": f"[a]({address}), {address}."}])
        assert page.locator(".said a").evaluate_all("(all) => all.map((one) => one.href)") == [address, address]


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
        page.keys("Escape")
        expect(page.locator(".assistant")).to_contain_text("Stopped.")
        expect(page.locator(".assistant .wrong")).to_have_count(0)
        expect(page.locator("#send")).to_have_text("Send")
        assert_cancelled(FAKE_URL)


def check_key() -> None:
    """A server with keys: asked for once, sent with every request, gone with the tab."""
    keys: list[str | None] = []

    def guarded(path: str, headers: Any) -> tuple[int, Any] | None:
        if not path.startswith("/v1/"):
            return None
        keys.append(headers["authorization"])
        return None if keys[-1] == "Bearer secret" else (401, {"error": {"message": "an API key is missing"}})

    with chat_page() as page:
        page.server.answer = guarded
        page.goto()
        expect(page.locator("#key")).to_be_visible()
        assert page.locator("#key-problem").texts() == [""]
        page.press("#key-text", "Escape")
        expect(page.locator("#notice")).to_contain_text("an API key is missing")
        ask(page, "too early")  # asks for the key again, and keeps the text
        expect(page.locator("#key-text")).to_be_visible()
        page.fill("#key-text", "wrong")
        page.press("#key-text", "Enter")
        expect(page.locator("#key-problem")).to_have_text("an API key is missing")
        expect(page.locator("#key-text")).to_have_value("")
        page.fill("#key-text", "secret")
        page.click("#key .main")
        expect(page.locator("#model option").first).to_be_attached()
        ask(page, says("let in"))
        expect(page.locator(".assistant .said")).to_have_text("let in")
        assert keys == [None, None, "Bearer wrong", "Bearer secret", "Bearer secret"], keys
        assert "secret" not in page.evaluate("() => JSON.stringify(localStorage)")


def check_picture() -> None:
    with chat_page(URL) as page:
        page.select_option("#model", "tiny")
        expect(page.locator("#attach")).to_be_hidden()
        page.select_option("#model", "gemma3")
        expect(page.locator("#attach")).to_be_visible()
        page.add_files(("a.png", "image/png", base64.b64decode(PICTURE)))
        expect(page.locator("#pictures img")).to_have_count(1)
        ask(page, "What is this?")
        body = sent(page)
        parts = body["messages"][0]["content"]
        assert [part["type"] for part in parts] == ["image_url", "text"]
        expect(page.locator(".user img")).to_have_count(1)
        expect(page.locator(".numbers")).to_contain_text("first token")
        page.keys("Escape")


def check_the_model_that_answered_last_is_begun_with() -> None:
    with chat_page(URL) as page:
        expect(page.locator("#model")).not_to_have_value("tiny")
        for name in ("gemma3", "tiny"):
            page.select_option("#model", name)
            ask(page, "hello")
            expect(page.locator(".numbers").last).to_contain_text("first token")
            page.keys("Escape")
            expect(page.locator("#send")).to_have_text("Send")
        delete(page)
        expect(page.locator(".greeting")).to_be_visible()
        page.reload()
        expect(page.locator("#model")).to_have_value("gemma3")


def check_a_model_that_is_chosen_is_there_after_a_reload() -> None:
    with chat_page() as page:
        ask(page, says("one"))
        expect(page.locator("#send")).to_have_text("Send")
        for name in ("caller", "tiny"):
            page.select_option("#model", name)
            page.reload()
            expect(page.locator("#model")).to_have_value(name)


def check_models_are_pulled_used_and_unloaded() -> None:
    with chat_page() as page:
        page.click("#pick")
        expect(page.locator("#load")).to_contain_text("0 answering, 0 waiting")
        expect(page.locator("#catalogue option[value='qwen3:8b']")).to_be_attached()
        page.select_option("#catalogue", "qwen3:8b")
        expect(page.locator("#pulled")).to_have_value("qwen3:8b")
        page.fill("#pulled", "no/such/model/here")
        page.press("#pulled", "Enter")
        expect(page.locator("#models-problem")).to_contain_text("no/such/model/here")
        page.fill("#pulled", "org/fox-GGUF")
        page.press("#pulled", "Enter")
        page.get_by_label("Use org/fox-GGUF").click()
        expect(page.locator("#models")).to_be_hidden()
        (name,) = page.evaluate("() => [document.getElementById('model').value]")
        assert name.startswith("org/fox-GGUF"), name
        ask(page, says("Hello."))
        expect(page.locator(".assistant .numbers")).to_contain_text("1% of the context")
        page.click("#pick")
        expect(page.locator("#here")).to_contain_text("4,096 tokens · loaded, ")
        page.get_by_label(f"Unload {name}").click()
        expect(page.get_by_label(f"Unload {name}")).to_have_count(0)
        page.evaluate(
            "(model) => fetch('/api/delete', { method: 'DELETE', body: JSON.stringify({ model }) })"
            ".then((answer) => answer.status)",
            name,
        )


def check_conversations_stand_below_their_days() -> None:
    days = {"today": 0, "yesterday": 1, "last week": 5, "long ago": 60}
    with chat_page() as page:
        page.evaluate(
            """(days) => { for (const [name, n] of Object.entries(days)) localStorage.setItem("localrun.chat." + name,
                JSON.stringify({ at: Date.now() - n * 864e5, turns: [{ role: "user", content: name }] })); }""",
            days,
        )
        page.reload()
        assert chats(page) == list(days)
        *known, last = page.locator("#chats ul").evaluate_all("(all) => all.map((one) => one.ariaLabel)")
        assert known == ["Today", "Yesterday", "Last 7 days"]
        assert last == page.evaluate(
            "() => new Date(Date.now() - 60 * 864e5).toLocaleDateString('en', { month: 'long', year: 'numeric' })"
        )


def check_error_is_shown() -> None:
    with chat_page() as page:
        page.evaluate("() => { document.getElementById('model').selectedOptions[0].value = 'nothing'; }")
        ask(page, "hello")
        expect(page.locator(".assistant .wrong")).to_contain_text("'nothing' not found")


def draft(page: Page) -> str:
    value: str = page.evaluate("() => document.getElementById('text').value")
    return value


def send_key(page: Page, **event: Any) -> None:
    """An Enter as another keyboard or input method sends it."""
    page.evaluate(
        """(given) => document.getElementById("text").dispatchEvent(
            new KeyboardEvent("keydown", { key: "Enter", bubbles: true, cancelable: true, ...given }))""",
        event,
    )


def check_an_input_method_ends_without_sending() -> None:
    """Chromium and Firefox say that they compose; Safari has ended, and says 229."""
    with chat_page() as page:
        page.fill("#text", "日本")
        for event in ({"isComposing": True}, {"keyCode": 229}):
            send_key(page, **event)
            assert page.server.sent("/v1/chat/completions") == []
            assert draft(page) == "日本"
        page.locator("#chats")
        send_key(page)
        expect(page.locator(".user .said")).to_have_text("日本")


def check_a_keyboard_on_a_screen_starts_a_new_line() -> None:
    coarse = """const real = window.matchMedia.bind(window);
        window.matchMedia = (query) => (query === "(pointer: coarse)" ? { matches: true } : real(query));"""
    with chat_page(script=coarse) as page:
        page.fill("#text", "one")
        page.press("#text", "Enter")
        assert draft(page) == "one\n"
        page.fill("#text", says("one\n  two"))
        page.click("#send")
        expect(page.locator(".assistant .said")).to_have_text("onetwo")
        page.fill("#text", says("three"))
        send_key(page, ctrlKey=True)
        expect(page.locator(".assistant .said").last).to_have_text("three")


def check_a_double_click_sends_once_and_stops_nothing() -> None:
    with chat_page() as page:
        page.fill("#text", says("whole"))
        page.double_click("#send")
        expect(page.locator(".assistant .said")).to_have_text("whole")
        expect(page.locator("#send")).to_have_text("Send")
        assert page.locator(".assistant .wrong").texts() == [""]
        assert len(page.server.sent("/v1/chat/completions")) == 1


def check_what_is_written_is_sent_with_its_indentation() -> None:
    with chat_page() as page:
        page.fill("#text", "\n    if x:\n\ty  \n\n")
        page.press("#text", "Enter")
        assert sent(page)["messages"] == [{"role": "user", "content": "    if x:\n\ty"}]


def check_drafts_outlive_reloads_edits_and_other_chats() -> None:
    with chat_page() as page:
        page.fill("#text", "before any chat")
        page.reload()
        expect(page.locator("#text")).to_have_value("before any chat")
        ask(page, says("one"))
        expect(page.locator(".assistant .said")).to_have_text("one")
        expect(page.locator("#text")).to_have_value("")
        page.fill("#text", "half a thought")
        page.locator(".user").get_by_text("Edit").click()
        expect(page.locator("#text")).to_have_value(says("one"))
        page.keys("Escape")
        expect(page.locator("#text")).to_have_value("half a thought")
        page.locator(".user").get_by_text("Edit").click()
        ask(page, says("two"))
        expect(page.locator("#text")).to_have_value("half a thought")
        expect(page.locator(".assistant .said")).to_have_text("two")
        page.click("#new")
        expect(page.locator("#text")).to_have_value("")
        page.locator("#chats .title").click()
        expect(page.locator("#text")).to_have_value("half a thought")


def check_an_edit_outlives_other_chats_and_reloads() -> None:
    with chat_page() as page:
        ask(page, says("one"))
        expect(page.locator(".assistant .said")).to_have_text("one")
        page.fill("#text", "half a thought")
        page.locator(".user").get_by_text("Edit").click()
        page.fill("#text", says("another"))
        page.click("#new")
        expect(page.locator("#text")).to_have_value("")
        expect(page.locator("#editing")).to_be_hidden()
        page.locator("#chats .title").click()
        expect(page.locator("#text")).to_have_value(says("another"))
        expect(page.locator("#editing")).to_be_visible()
        page.reload()
        expect(page.locator("#text")).to_have_value(says("another"))
        page.press("#text", "Enter")
        expect(page.locator(".assistant .said")).to_have_text("another")
        expect(page.locator("#text")).to_have_value("half a thought")
        expect(page.locator("#send")).to_have_text("Send")
        page.locator(".user").get_by_text("Edit").click()
        page.fill("#text", "given up")
        page.keys("Escape")
        page.reload()
        expect(page.locator("#text")).to_have_value("half a thought")
        expect(page.locator("#editing")).to_be_hidden()


def check_back_closes_the_list_on_a_phone() -> None:
    with chat_page() as page:
        ask(page, says("one"))
        expect(page.locator(".assistant .said")).to_have_text("one")
        expect(page.locator("#send")).to_have_text("Send")
        page.resize(390, 844)
        for way in ("() => history.back()", "() => document.getElementById('shade').click()"):
            page.click("#list")
            expect(page.locator("#shade")).to_be_visible()
            page.evaluate(way)
            expect(page.locator("#shade")).to_be_hidden()
            page.wait_for("() => history.state === null")
        page.click("#list")
        page.click("#new")
        expect(page.locator(".greeting")).to_be_visible()
        page.evaluate("() => history.back()")
        expect(page.locator(".assistant .said")).to_have_text("one")


def check_models_are_listed_again_when_one_comes_back() -> None:
    names = ["one", "two"]

    def models(path: str, _: Any) -> tuple[int, Any] | None:
        rows = [{"id": name, "meta": {"capabilities": ["completion"]}} for name in names]
        return (200, {"data": rows}) if path == "/v1/models" else None

    with chat_page() as page:
        page.server.answer = models
        page.goto()
        expect(page.locator("#model option")).to_have_text(["one", "two"])
        page.select_option("#model", "two")
        names[:] = ["new", "two"]
        page.evaluate("() => dispatchEvent(new Event('focus'))")
        expect(page.locator("#model option")).to_have_text(["new", "two"])
        expect(page.locator("#model")).to_have_value("two")


def check_answers_leave_connections_to_other_tabs() -> None:
    """A browser has six, for all tabs together."""
    with chat_page() as page:
        for n in range(7):
            ask(page, long_reply())
            expect(page.locator(".assistant" if n > 3 else ".assistant .said")).not_to_be_empty()
            page.click("#new")
        other = page.other("/#other")
        expect(other.locator("#model option").first).to_be_attached()
        assert len(page.server.sent("/v1/chat/completions")) == 4
        for _ in range(7):
            page.locator("#chats .title").first.click()
            delete(page)


def check_chats_have_addresses_and_back_goes_through_them() -> None:
    with chat_page() as page:
        ask(page, says("one"))
        expect(page.locator(".assistant .said")).to_have_text("one")
        address = page.evaluate("() => location.hash")
        page.click("#new")
        ask(page, says("two"))
        expect(page.locator(".assistant .said")).to_have_text("two")
        page.evaluate("() => history.back()")
        expect(page.locator(".assistant .said")).to_have_text("one")
        assert page.evaluate("() => location.hash") == address
        page.evaluate("() => history.forward()")
        expect(page.locator(".assistant .said")).to_have_text("two")
        other = page.other("/" + address)
        expect(other.locator(".assistant .said")).to_have_text("one")
        for unknown in ("/#%", "/#nothing"):
            other.goto("/test/script.js")
            other.goto(unknown)
            expect(other.locator(".greeting")).to_be_visible()


def check_a_tab_out_of_the_history_loses_nothing() -> None:
    """Neither when the browser had kept the page as it was, nor when it slept and was told nothing."""
    with two_tabs() as (page, other):
        page.goto("/test/script.js")
        ask(other, says("precious"))
        expect(other.locator(".assistant .said")).to_have_text(["one", "precious"])
        expect(other.locator("#send")).to_have_text("Send")
        if BROWSER != "webkit":  # whose driver loses a page that comes back
            page.back()
            expect(page.locator(".assistant .said")).to_have_text(["one", "precious"])
    deaf = """const add = window.addEventListener.bind(window);
        window.addEventListener = (name, ...rest) => name === "storage" ? undefined : add(name, ...rest);"""
    with two_tabs(deaf) as (page, other):
        ask(other, says("precious"))
        expect(other.locator(".assistant .said")).to_have_text(["one", "precious"])
        expect(other.locator("#send")).to_have_text("Send")
        ask(page, says("mine"))
        expect(page.locator(".assistant .said")).to_have_text(["one", "mine"])
        expect(page.locator("#notice")).to_contain_text("as a copy")
        page.reload()
        expect(page.locator("#chats .title")).to_have_count(2)
        other.reload()
        expect(other.locator(".assistant .said")).to_have_text(["one", "precious"])


def check_a_key_that_no_header_may_have_is_asked_for_again() -> None:
    with chat_page() as page:
        page.server.answer = lambda path, headers: (
            (401, {"error": {"message": "an API key is missing"}})
            if path.startswith("/v1/") and headers["authorization"] != "Bearer secret"
            else None
        )
        page.goto()
        for wrong in ("ключ-🔑", "“secret”", "sécret"):
            expect(page.locator("#key")).to_be_visible()
            page.fill("#key-text", wrong)
            page.press("#key-text", "Enter")
            expect(page.locator("#key-problem")).to_contain_text("without accents")
        page.fill("#key-text", " \u200bsecret\ufeff ")
        page.press("#key-text", "Enter")
        expect(page.locator("#model option").first).to_be_attached()


def check_files_for_a_model_without_eyes() -> None:
    with chat_page() as page:
        for by in ("paste", "drop"):
            page.add_files(("a.png", "image/png", b"x"), by=by)
            expect(page.locator("#notice")).to_contain_text("does not see pictures")
            page.add_files(("a.txt", "text/plain", b"x"), by=by)
            expect(page.locator("#notice")).to_contain_text("a.txt is no PNG, JPEG, WebP or GIF file")
        expect(page.locator("#pictures img")).to_have_count(0)


def check_copy_gives_the_source_also_over_plain_http() -> None:
    for clipboard in ("{ writeText: async (text) => { window.copied = text; } }", "undefined"):
        script = f"""Object.defineProperty(navigator, "clipboard", {{ value: {clipboard} }});
            addEventListener("copy", (event) => {{ window.copied = event.clipboardData.getData("text/plain"); }});"""
        with chat_page(script=script) as page:
            text = "- *some*\n  ```py\n  if x:\n  \ty\n  ```\n"
            keep(page, [{"role": "user", "content": "?"}, {"role": "assistant", "content": text}])
            page.locator(".assistant .acts").get_by_text("Copy").click()
            expect(page.locator(".assistant .acts")).to_contain_text("Copied")
            assert page.evaluate("() => window.copied") == text
            page.locator(".code").get_by_text("Copy").click()
            expect(page.locator(".code")).to_contain_text("Copied")
            assert page.evaluate("() => window.copied") == "if x:\n\ty"


def check_code_can_be_copied_while_it_grows() -> None:
    """The button that is pressed is the one that is let go."""
    script = """Object.defineProperty(navigator, "clipboard",
        { value: { writeText: async (text) => { window.copied = text; } } });"""
    with chat_page(script=script) as page:
        ask(page, says("- so\n\n  ```py\n" + "  word\n" * 1000 + "  ```"))
        expect(page.locator(".code")).to_contain_text("word word")
        page.evaluate("() => { window.button = document.querySelector('.code button'); }")
        seen = len(page.locator(".code code").texts()[0])
        page.wait_for("(n) => document.querySelector('.code code').textContent.length > n", seen)
        page.evaluate("() => window.button.click()")
        assert page.evaluate("() => window.button.isConnected && window.copied.length") > seen
        expect(page.locator(".code")).to_contain_text("Copied")
        page.keys("Escape")


def check_what_is_selected_has_no_labels_of_buttons() -> None:
    with chat_page() as page:
        keep(page, [{"role": "user", "content": "?"}, {"role": "assistant", "content": "a\n\n```py\nx\n```"}])
        copied = page.evaluate(
            """() => { getSelection().selectAllChildren(document.querySelector(".assistant .said"));
                return getSelection().toString(); }"""
        )
        assert copied.split() == ["a", "x"], copied


def check_the_field_grows_with_its_text() -> None:
    with chat_page() as page:
        keep(page, [{"role": "user", "content": "?"}, {"role": "assistant", "content": "line\n\n" * 200}])
        height = "() => document.getElementById('text').clientHeight"
        one = page.evaluate(height)
        page.fill("#text", "a\n" * 5)
        six = page.evaluate(height)
        assert six > 3 * one, (one, six)
        page.wait_for(  # what one answers to stays in view
            "() => { const { scrollHeight, scrollTop, clientHeight } = document.getElementById('log');"
            "return scrollHeight - scrollTop - clientHeight < 5; }"
        )
        page.fill("#text", "a\n" * 100)
        assert six < page.evaluate(height) < 15 * one
        page.fill("#text", "")
        assert page.evaluate(height) == one


def check_renaming_leaves_the_view_where_it_is() -> None:
    with chat_page() as page:
        keep(page, [{"role": "user", "content": "?"}, {"role": "assistant", "content": "line\n\n" * 200}])
        page.evaluate("() => { document.getElementById('log').scrollTop = 0; }")
        page.locator("#chats").get_by_text("Rename").click()
        page.fill("#chats input", "another")
        page.press("#chats input", "Enter")
        expect(page.locator("#chats .title")).to_have_text("another")
        assert page.evaluate("() => [document.getElementById('log').scrollTop, document.activeElement.className]") == [
            0,
            "title",
        ]


def check_a_long_chat_is_printed_whole() -> None:
    if BROWSER == "webkit":
        raise unittest.SkipTest("WebKitGTK's driver does not print")
    with chat_page() as page:
        lines = [f"line {n} of it" for n in range(120)]
        keep(page, [{"role": "user", "content": "?"}, {"role": "assistant", "content": "\n\n".join(lines)}] * 2)
        printed = pypdf.PdfReader(io.BytesIO(base64.b64decode(page.focus().print_page())))
        text = "".join(one.extract_text() for one in printed.pages)
        assert [text.count(line) for line in lines] == [2] * len(lines)
        assert "Send" not in text


def check_accessibility() -> None:
    """No rule of axe is broken: empty, in a chat, while editing, in the dialogs; light and dark."""
    axe = resources.files("axe_core_python").joinpath("axe.min.js").read_text(encoding="utf-8")
    with chat_page() as page:
        for theme in ("light", "dark"):
            for step in ("empty", "chat", "editing", "settings", "models"):
                if step == "chat":
                    keep(page, [{"role": "user", "content": "?"}, {"role": "assistant", "content": MARKDOWN}])
                page.evaluate("(theme) => { document.documentElement.dataset.theme = theme; }", theme)
                if step == "editing":
                    page.locator(".user").get_by_text("Edit").click()
                if step == "settings":
                    page.click("#setup")
                if step == "models":
                    page.keys("Escape")
                    page.click("#pick")
                    page.get_by_label("Use tiny").element()
                page.focus().execute_script(axe)
                found = page.evaluate(
                    "async () => (await axe.run()).violations.map((one) => [one.id, one.nodes[0].html])"
                )
                assert found == [], (theme, step, found)
            page.evaluate("() => localStorage.clear()")
            page.goto("/test/script.js")
            page.goto()
            expect(page.locator("#model option").first).to_be_attached()


SAID = r"""f(*args, **kwargs)|char *p|2*3*4|x**2 + y**2|src/**/*.js|*.py|a_b_c|__init__|5 > 3|<T>|Vec<String>|C#|#1|:)
~5 to ~10|$x_i^*$|\(a*b*c\)|don't|日本語|é|AT&T|[x]|(y)|a / b|-|+1|1.5|100 %|*|**|/* no */|C:\dir|<input>|👨‍👩‍👧"""
CODE = [
    "if x:",
    "    y",
    "\ttab",
    "# no title",
    "- no item",
    "1. no item",
    "> no quote",
    "* * *",
    "",
    "a  b",
    "**no**",
    "~~",
    "``",
]


def written(chance: random.Random, depth: int = 0) -> tuple[list[str], list[str], list[str]]:
    """Lines of Markdown as models write it, with the words and the code that one should see."""
    lines, words, codes = [], [], []
    for _ in range(chance.randint(1, 4)):
        kind = chance.choice(["text", "text", "code", "item", "quote"] if depth < 4 else ["text", "code"])
        if kind == "text":
            said = ["so", *chance.choices(SAID.replace("\n", "|").split("|"), k=chance.randint(1, 6))]
            found = [" ".join(said)], [" ".join(said)], []
        elif kind == "code":
            code = [*chance.choices(CODE, k=chance.randint(0, 5)), "end"]
            fence = chance.choice(["```", "~~~~", "```py"])
            blanks = " " * chance.randint(0, 3)
            found = [blanks + one for one in (fence, *code, fence.strip("py"))], [], ["\n".join(code)]
        else:
            inner = written(chance, depth + 1)
            mark = "> " if kind == "quote" else chance.choice(["- ", "* ", "1. ", "10. ", "2)  "])
            more = "> " if kind == "quote" else " " * len(mark)
            first = mark if kind == "quote" else mark + "so\n" + more
            text = (first + f"\n{more}".join(inner[0])).split("\n")
            found = (
                [one if one.strip() else "" for one in text],
                [*(["so"] if kind == "item" else []), *inner[1]],
                inner[2],
            )
        for all_, some in zip((lines, words, codes), found, strict=True):
            all_ += some
        lines.append("")
    return lines, words, codes


def check_what_is_said_is_what_is_seen() -> None:
    """Of generated answers, drawn whole and as they come in pieces."""
    chance = random.Random(11)
    cases = [written(chance) for _ in range(300)]
    with chat_page() as page:
        seen = page.evaluate(
            """async (texts) => {
                const { element, show } = await import("/web/markdown.js");
                return texts.map(([text, cuts]) => {
                    const whole = element("div"), pieces = element("div");
                    show(whole, text);
                    for (const cut of cuts) show(pieces, text.slice(0, cut));
                    show(pieces, text);
                    const codes = [...whole.querySelectorAll("pre")].map((one) => one.textContent);
                    const same = whole.isEqualNode(pieces);
                    for (const one of whole.querySelectorAll(".code")) one.remove();
                    return [same, whole.textContent, codes];
                });
            }""",
            [
                ["\n".join(lines), sorted(chance.sample(range(len("\n".join(lines))), k=3))]
                for lines, *_ in cases
                if len("\n".join(lines)) > 3
            ],
        )
        for (lines, words, codes), (same, text, blocks) in zip(cases, seen, strict=True):
            assert blocks == codes, ("\n".join(lines), blocks, codes)
            assert "".join(text.split()) == "".join("".join(words).split()), ("\n".join(lines), text)
            assert same, "\n".join(lines)


if __name__ == "__main__":
    run(globals())
