"""What is known of one model, and how it would be laid out on this machine.

Shows what `/api/show` and `/localrun/v1/fit` say, and nothing else.
"""

from __future__ import annotations

from typing import Any, ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.content import Content
from textual.screen import ModalScreen
from textual.widgets import Static

from localrun.errors import LocalrunError
from localrun.tui import quantity
from localrun.tui.plain_text import block, line
from localrun.tui.session import Session

_LABEL_WIDTH = 16
_LICENCE_LINES = 3


class ModelDetailScreen(ModalScreen[None]):
    """`model` is the name of one that is here."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape,enter,q,ctrl+g", "dismiss", "Close")]

    def __init__(self, session: Session, model: str) -> None:
        super().__init__()
        self._session = session
        self._model = model
        self._text = Static("Asking the daemon…")

    def compose(self) -> ComposeResult:
        with VerticalScroll() as box:
            box.border_title = line(self._model)
            box.border_subtitle = "Esc closes"
            yield self._text

    def on_mount(self) -> None:
        self.run_worker(self._load(), name="detail")

    async def _load(self) -> None:
        daemon = self._session.daemon
        try:
            facts = [*model_facts(await daemon.show(self._model)), *fit_facts(await daemon.fit(self._model))]
        except LocalrunError as error:
            self._text.update(Content(line(error.message)))
            return
        lines = [
            Content.assemble(Content.styled(label.ljust(_LABEL_WIDTH), "$foreground 60%"), block(text))
            for label, text in facts
        ]
        self._text.update(Content("\n").join(lines))


def model_facts(shown: dict[str, Any]) -> list[tuple[str, str]]:
    """Label and text of what `/api/show` says."""
    details, info = shown.get("details") or {}, shown.get("model_info") or {}
    architecture = info.get("general.architecture", details.get("family", ""))
    context = info.get(f"{architecture}.context_length")
    licence = " ".join(str(shown.get("license") or "").split("\n")[:_LICENCE_LINES])
    found = [
        ("architecture", str(architecture)),
        ("parameters", str(details.get("parameter_size") or "")),
        ("quantization", str(details.get("quantization_level") or "")),
        ("trained context", quantity.count(context) if isinstance(context, int) else ""),
        ("can", ", ".join(map(str, shown.get("capabilities") or ()))),
        ("parameters set", str(shown.get("parameters") or "").replace("\n", ", ")),
        ("system prompt", str(shown.get("system") or "")),
        ("licence", line(licence)),
    ]
    return [(label, text) for label, text in found if text]


def fit_facts(fit: dict[str, Any]) -> list[tuple[str, str]]:
    """Label and text of what `/localrun/v1/fit` says of this machine."""
    found = [
        ("", ""),
        ("on this machine", "fits" if fit.get("fits") else line(str(fit.get("problem") or "does not fit"))),
    ]
    if fit.get("kv_cells"):
        context = f"{quantity.count(fit['context'])} tokens, {fit['slots']} slots"
        found.append(("context", f"{context}, KV cells {quantity.count(fit['kv_cells'])} in {fit['kv_type']}"))
    for device in fit.get("devices") or ():
        parts = [
            f"{name} {quantity.size(device[f'{name}_bytes'])}"
            for name in ("weights", "kv", "compute", "other")
            if device.get(f"{name}_bytes")
        ]
        total = f"{quantity.size(device['total_bytes'])} of {quantity.size(device['usable_bytes'])}"
        found.append((line(str(device["name"])), f"{total}: {', '.join(parts)}"))
    found += [("", line(str(note))) for note in fit.get("notes") or ()]
    return found
