"""`localrun plan --plot`: a PNG that is tried out before anything is simulated, and never costs a forecast."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from localrun.cli import exits
from localrun.cli.text import tell

if TYPE_CHECKING:
    from localrun.plan.search import Point


class Picture(click.Path):
    """The name of a PNG."""

    def __init__(self) -> None:
        super().__init__(dir_okay=False, path_type=Path)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        if Path(str(value)).suffix.lower() != ".png":
            self.fail(f"'{value}' is not the name of a PNG; it ends in .png", param, ctx)
        return Path(str(super().convert(value, param, ctx)))


def try_out(path: Path) -> None:
    """Whether it can be written; its folder is made. Raises NotSupported without matplotlib, and UsageError."""
    from localrun.bench.plot import require_matplotlib

    require_matplotlib()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        is_new = not path.exists()
        path.open("ab").close()
        if is_new:
            path.unlink()
    except OSError as error:
        raise click.UsageError(f"--plot {path} cannot be written: {error.strerror or error}") from None


def draw(path: Path | None, points: Sequence[Point], knee: Point, title: str) -> int:
    """The exit status: what fails here is told behind a forecast that was shown."""
    from localrun.plan import report

    if path is None:
        return exits.OK
    try:
        report.plot(path, points, knee, title)
    except Exception as error:
        words = error.strerror if isinstance(error, OSError) else None
        tell("error", f"{path} was not drawn: {words or error}")
        return exits.ERROR
    return exits.OK
