"""Latencies, cache and machine in six aligned lines."""

from __future__ import annotations

from textual.content import Content
from textual.reactive import reactive
from textual.widget import Widget

from localrun.snapshot import Percentiles, Snapshot
from localrun.tui import quantity

_LABEL_WIDTH = 7
_EIGHTHS = " ▏▎▍▌▋▊▉"


class Vitals(Widget):
    """Shows one snapshot; nothing before the first."""

    snapshot: reactive[Snapshot | None] = reactive(None)

    def render(self) -> Content:
        if self.snapshot is None:
            return Content("")
        lines = [
            self._percentiles("TTFT", self.snapshot.aggregate.ttft_s),
            self._percentiles("ITL", self.snapshot.aggregate.itl_s),
            self._kv_cells(self.snapshot),
            self._load(self.snapshot),
            self._step(self.snapshot),
            self._machine(self.snapshot),
        ]
        if self.snapshot.system.gpus:  # the table of engines has the step too
            lines[-2] = self._gpus(self.snapshot)
        return Content("\n").join(lines)

    def _percentiles(self, label: str, percentiles: Percentiles) -> Content:
        texts = [
            f"p50 {quantity.seconds(percentiles.p50):<7}",
            f"p95 {quantity.seconds(percentiles.p95):<7}",
            f"p99 {quantity.seconds(percentiles.p99)}",
        ]
        return _line(label, " ".join(texts[: 3 if self.size.width >= _LABEL_WIDTH + 36 else 2]))

    def _kv_cells(self, snapshot: Snapshot) -> Content:
        used = sum(engine.kv_cells_used for engine in snapshot.engines)
        total = sum(engine.kv_cells for engine in snapshot.engines)
        if not total:
            return _line("KV", "no model loaded")
        text = f" {quantity.count(used, widest=9_999)} of {quantity.count(total, widest=9_999)}"
        width = max(4, self.size.width - _LABEL_WIDTH - len(text))
        filled, rest = bar(used / total, width)
        return Content.assemble(
            _label("KV"),
            Content.styled(filled, "$primary"),
            Content.styled(rest, "$foreground 20%"),
            Content.styled(text, "$foreground"),
        )

    def _load(self, snapshot: Snapshot) -> Content:
        aggregate = snapshot.aggregate
        hits = quantity.percent(aggregate.prefix_hit_rate)
        return _line("prefix", f"{hits} cached   queue {aggregate.queued + aggregate.loading}")

    def _step(self, snapshot: Snapshot) -> Content:
        """The engine whose step takes longest, against its own target."""
        timed = [(engine.step_s, engine.target_itl_s) for engine in snapshot.engines if engine.step_s is not None]
        if not timed:
            return _line("step", quantity.NOTHING)
        step_s, target_itl_s = max(timed, key=lambda pair: pair[0])
        target = f" of {quantity.seconds(target_itl_s)} target" if target_itl_s else ", no target"
        return _line("step", quantity.seconds(step_s) + target)

    def _gpus(self, snapshot: Snapshot) -> Content:
        """All GPUs together: the busiest one, and the memory of all."""
        gpus = snapshot.system.gpus
        used, total = sum(gpu.memory_used_bytes for gpu in gpus), sum(gpu.memory_total_bytes for gpu in gpus)
        busy = max(gpu.busy_percent for gpu in gpus)
        return _line("GPU", f"{busy:.0f}%".ljust(5) + f"VRAM {used / 1e9:.1f} of {total / 1e9:.1f} GB")

    def _machine(self, snapshot: Snapshot) -> Content:
        system = snapshot.system
        used = system.memory_total_bytes - system.memory_available_bytes
        memory = f"{used / 1e9:.1f} of {system.memory_total_bytes / 1e9:.1f} GB"
        return _line("CPU", f"{system.cpu_percent:.0f}%".ljust(5) + f"RAM {memory}")


def bar(share: float, width: int) -> tuple[str, str]:
    """A bar of `width` cells in eighths of a cell: the filled part and the rest. More than nothing is always seen."""
    eighths = round(min(1.0, max(0.0, share)) * width * 8)
    if share > 0:
        eighths = max(1, eighths)
    whole, part = divmod(eighths, 8)
    filled = "█" * whole + (_EIGHTHS[part] if part else "")
    return filled, "░" * (width - len(filled))


def _label(text: str) -> Content:
    return Content.styled(text.ljust(_LABEL_WIDTH), "$foreground 60%")


def _line(label: str, text: str) -> Content:
    return Content.assemble(_label(label), Content.styled(text, "$foreground"))
