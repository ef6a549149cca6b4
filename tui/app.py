"""The app: three modes, a model picker, help, themes, and the one event feed behind them.

Runs in the terminal's process, with one asyncio loop. Owns the client of the daemon for as long as it lives; screens
get a `Session` with what they share.

Does not: know how a daemon is started; it is given a function for that.
"""

from __future__ import annotations

import asyncio
import codecs
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from rich.console import RenderableType
from textual import on
from textual.app import App, ScreenStackError
from textual.binding import Binding, BindingType
from textual.events import Resize
from textual.geometry import Size
from textual.messages import InBandWindowResize

from localrun.client import Client
from localrun.config import folders
from localrun.errors import LocalrunError
from localrun.last_model import BUILT_IN, kept_at, last_model
from localrun.tools.toolbox import toolbox
from localrun.tui import preferences
from localrun.tui.daemon import RETRY_DELAYS_S, SNAPSHOTS_PER_S, Connect, Daemon, Feed
from localrun.tui.history import History, HistoryUnavailable, open_history
from localrun.tui.keys import TerminalInput, bind, key_of, shown
from localrun.tui.pictures import Draw, Thumbnails, as_blocks, as_placeholders, is_kitty, is_kitty_around_tmux
from localrun.tui.preferences import DARK, LIGHT, Pictures, Preferences
from localrun.tui.screens.chat import ChatScreen
from localrun.tui.screens.chat_commands import carry_out
from localrun.tui.screens.dialog import Dialog
from localrun.tui.screens.help import HelpScreen
from localrun.tui.screens.logs import LogsScreen
from localrun.tui.screens.models import ModelsScreen
from localrun.tui.screens.monitor import MonitorScreen
from localrun.tui.session import Session
from localrun.tui.short_text import line

# In sixteen colours the shades of a theme run together, so such a terminal's own colours are used as they are.
_SIXTEEN_COLOURS_THEME = "ansi-dark"
_START = "start"
# A recording is played again when asked only.
_NEVER = (1e9,)
MIN_COLUMNS = 10


def _connect(base_url: str, name: str) -> Daemon:
    return Client(base_url, name=name)


class _Terminal:
    """What the app draws on. One that has vanished takes everything, so that the app ends in order and keeps what came
    of an answer."""

    def __init__(self, file: Any) -> None:
        self._file = file

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def write(self, text: str) -> None:
        with suppress(OSError):
            self._file.write(text)

    def flush(self) -> None:
        with suppress(OSError):
            self._file.flush()


def own_app(
    base_url: str,
    *,
    first: str = "chat",
    connect: Connect = _connect,
    start_daemon: Callable[[], object] | None = None,
    is_replay: bool = False,
) -> LocalrunApp:
    """The app with the person's own keys, theme and chats. `start_daemon` and `is_replay` as `LocalrunApp` has them."""
    sys.__stderr__ = _Terminal(sys.__stderr__)  # type: ignore[misc, assignment]  # textual draws on it
    own = folders()
    chosen = preferences.load(own.config / "tui.toml")
    if sys.platform != "win32":
        from textual.drivers import linux_driver

        bound = (key.strip() for keys in chosen.keys.values() for key in keys.split(","))
        TerminalInput.alt_keys = frozenset(key for key in bound if "alt+" in key)
        linux_driver.XTermParser = TerminalInput  # type: ignore[attr-defined]
        # Bytes that are not UTF-8 end nothing: a terminal may have another encoding, or report the mouse as of old.
        decoder = partial(codecs.getincrementaldecoder("utf-8"), errors="replace")
        linux_driver.getincrementaldecoder = lambda _: decoder  # type: ignore[attr-defined]
    if chosen.pictures is Pictures.AUTO and is_kitty_around_tmux(os.environ):
        chosen = chosen._replace(pictures=Pictures.KITTY)
    if chosen.pictures is Pictures.KITTY or is_kitty(os.environ):
        os.environ.setdefault("COLORTERM", "truecolor")  # SSH does not carry it
    app = LocalrunApp(
        base_url,
        connect=connect,
        first=first,
        history_file=own.data / "chats.db",
        permissions_file=own.data / "tool-permissions.json",
        last_model_file=None if is_replay else kept_at(base_url),
        preferences=chosen,
        start_daemon=start_daemon,
        is_replay=is_replay,
    )
    TerminalInput.has_text = staticmethod(lambda: _has_text(app))
    return app


def _has_text(app: App[Any]) -> bool:
    """Whether the focus is in a box that is not empty."""
    with suppress(ScreenStackError):
        return bool(getattr(app.focused, "text", "") or getattr(app.focused, "value", ""))
    return False


def _history(path: Path | None) -> tuple[History, str | None]:
    """The history, and what there is to say about it. Where none can be kept, one in memory."""
    if path is None:
        return History(Path(":memory:")), None
    try:
        history, put_aside, n_rescued = open_history(path)
    except HistoryUnavailable as error:
        return History(Path(":memory:")), str(error)
    if put_aside is None:
        return history, None
    return history, (
        f"The chat history was damaged. It is now {put_aside}, and a new one was begun, with what could be read of "
        f"{n_rescued} chats."
    )


class LocalrunApp(App[None]):
    """`connect` makes the client; the name it is given is unique to this process, so that its requests are known.

    `retry_delays_s` are the pauses between attempts to reach a daemon that does not answer. `first` is the mode to
    begin in. Chats are kept in `history_file`, and without one in memory; so is what tools were allowed, in
    `permissions_file`, and the model that was used last, in `last_model_file`. `preferences` are the person's own keys,
    theme and servers of tools. `start_daemon` starts one where none answers, in a thread; it may raise LocalrunError.
    `is_replay` says that what `connect` makes is a recording, which plays once and again when asked. `clock` gives
    seconds since the epoch.
    """

    TITLE = "localrun"
    # Its usual key, ^p, goes to the other of two chats.
    COMMAND_PALETTE_BINDING = "ctrl+backslash"
    CSS_PATH = "theme.tcss"

    BINDINGS: ClassVar[list[BindingType]] = [
        bind("app.chat", "show('chat')"),
        bind("app.monitor", "show('monitor')"),
        bind("app.models", "show('models')", show=False, priority=True),
        bind("app.logs", "show('logs')", show=False),
        bind("app.help", "help"),
        bind("app.reconnect", "reconnect", show=False),
        bind("app.quit", "quit", priority=True),
    ]

    def __init__(
        self,
        base_url: str,
        *,
        connect: Connect = _connect,
        retry_delays_s: Sequence[float] = RETRY_DELAYS_S,
        first: str = "chat",
        history_file: Path | None = None,
        permissions_file: Path | None = None,
        last_model_file: Path | None = None,
        preferences: Preferences | None = None,
        start_daemon: Callable[[], object] | None = None,
        is_replay: bool = False,
        clock: Callable[[], float] = time.time,
    ) -> None:
        super().__init__()
        self._first = first
        self._start_daemon = start_daemon
        self._preferences = preferences or Preferences()
        # Chosen now: another theme at the start means to parse and to apply all style sheets again.
        self.register_theme(DARK)
        self.register_theme(LIGHT)
        is_sixteen = self.console.color_system == "standard" and not self.no_color  # greys of black are black
        self.theme = _SIXTEEN_COLOURS_THEME if is_sixteen else DARK.name
        self._problems = [*self._preferences.problems, *self._choose_theme()]
        history, self._history_trouble = _history(history_file)
        client_name = f"tui-{os.getpid()}"
        daemon = connect(base_url, client_name)
        self.session = Session(
            self,
            daemon=daemon,
            base_url=base_url,
            client_name=client_name,
            model=BUILT_IN if last_model_file is None else last_model(last_model_file) or BUILT_IN,
            history=history,
            clock=clock,
            thumbnails=Thumbnails(self._way_to_draw(self._preferences.pictures), self._write),
            can_start=start_daemon is not None,
            is_replay=is_replay,
            keymap=self._preferences.keys,
            toolbox=toolbox(self._preferences.servers, permissions_file),
            last_model_file=last_model_file,
        )
        self._feed = Feed(
            open=lambda: daemon.events(SNAPSHOTS_PER_S),
            take=self.session.take,
            on_lost=self.session.lose,
            retry_delays_s=_NEVER if is_replay else retry_delays_s,
        )

    @property
    def size(self) -> Size:
        """Of the screen, part of which a terminal of fewer columns shows: textual ends where a text has none."""
        width, height = super().size
        return Size(max(width, MIN_COLUMNS), height)

    def _check_resize(self) -> None:
        if self._resize_event is not None:
            self._resize_event = Resize.from_dimensions(self.size, self._resize_event.pixel_size)
        super()._check_resize()

    def _way_to_draw(self, pictures: Pictures) -> Draw | None:
        if pictures is Pictures.OFF:
            return None
        # The numbers of real pictures are colours, which must arrive as they are.
        is_exact = self.console.color_system == "truecolor" and not self.no_color
        return as_placeholders() if pictures is Pictures.KITTY and is_exact else as_blocks

    @on(InBandWindowResize)
    def _use_kitty_graphics(self, message: InBandWindowResize) -> None:
        """The terminal has answered textual; what that has to do with pictures, `pictures.py` says."""
        if message.supported and self._preferences.pictures is Pictures.AUTO and is_kitty(os.environ):
            self.session.thumbnails.draw = self._way_to_draw(Pictures.KITTY)

    def _write(self, sequences: str) -> None:
        """To the terminal, between two updates of the screen."""
        if self._driver is not None and sequences:
            self._driver.write(sequences)

    def get_key_display(self, binding: Binding) -> str:
        return shown(binding.key)

    async def on_mount(self) -> None:
        if sys.platform != "win32":
            # Otherwise the terminal would stay as the app has it: without a cursor, on its other screen.
            for number in (signal.SIGTERM, signal.SIGHUP):
                asyncio.get_running_loop().add_signal_handler(number, self.exit)
        self.set_keymap(self._preferences.keys)
        await self.session.daemon.__aenter__()
        self.add_mode("chat", lambda: ChatScreen(self.session, carry_out))
        self.add_mode("monitor", lambda: MonitorScreen(self.session))
        self.add_mode("logs", lambda: LogsScreen(self.session))
        await self.switch_mode(self._first)
        self.run_worker(self._feed.run(), name="events", group="events")
        self.session.pulled.subscribe(self, self._on_pulled)
        self.app_resume_signal.subscribe(self, lambda _: self.session.thumbnails.send_again())
        self.app_resume_signal.subscribe(self, lambda _: self.refresh(layout=True))
        if self._history_trouble is not None:
            self._problems.append(self._history_trouble)
        for problem in self._problems:
            self.notify(line(problem), severity="warning", timeout=15, markup=False)

    def _choose_theme(self) -> list[str]:
        """The person's own theme. Returns what is wrong with it."""
        theme = self._preferences.theme
        if theme is None:
            return []
        if theme not in self.available_themes:
            return [f"tui.toml: there is no theme {theme!r}; there are {', '.join(sorted(self.available_themes))}"]
        self.theme = theme
        return []

    def exit(self, result: None = None, return_code: int = 0, message: RenderableType | None = None) -> None:
        """Leaves; while the terminal still shows the app, it is told to forget its pictures."""
        self.session.thumbnails.close()
        super().exit(result, return_code, message)

    async def on_unmount(self) -> None:
        self.session.stop_recording()
        self.session.history.close()
        await self.session.pulls.close()
        if self.session.toolbox is not None:
            await self.session.toolbox.close()
        await self.session.daemon.__aexit__(None, None, None)

    def _on_pulled(self, ended: tuple[str, str | None]) -> None:
        model, problem = ended
        if problem is None:
            self.notify(line(f"{model} is here; F3 chooses it."), markup=False)
        else:
            self.notify(line(problem), title=line(f"{model} was not pulled"), severity="error", markup=False)

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """The footer says how to get elsewhere, and not to where one is."""
        return action != "show" or parameters != (self.current_mode,)

    async def action_show(self, where: str) -> None:
        if where == "models":
            await self.push_screen(ModelsScreen(self.session), self._choose_model)
        else:
            await self.switch_mode(where)

    async def action_leave(self, where: str) -> None:
        """Closes the dialogs and goes to a mode, which may be the one below them."""
        while isinstance(self.screen, Dialog):
            await self.pop_screen()
        await self.switch_mode(where)

    async def _choose_model(self, model: str | None) -> None:
        if model is not None:
            self.session.choose(model)
            await self.switch_mode("chat")

    def action_help_quit(self) -> None:
        """Ctrl-C, where nothing is marked that it would copy: as in a shell, and it says what quits."""
        if not (isinstance(self.screen, ChatScreen) and self.screen.interrupt()):
            self.notify(f"{key_of('app.quit', self.session.keymap)} quits; the daemon goes on.")

    async def action_help(self) -> None:
        await self.push_screen(HelpScreen(self.session.keymap))

    def action_reconnect(self) -> None:
        if self.session.trouble is None or self._start_daemon is None:
            self._feed.retry_now()
        elif not any(worker.group == _START and not worker.is_finished for worker in self.workers):
            self.run_worker(self._start(self._start_daemon), name=_START, group=_START)

    async def _start(self, start_daemon: Callable[[], object]) -> None:
        self.notify("Starting the daemon…")
        try:
            await asyncio.to_thread(start_daemon)
        except (LocalrunError, OSError) as error:
            self.notify(line(str(error)), title="The daemon was not started", severity="error", markup=False)
            return
        self._feed.retry_now()
