"""A command line value such as `1,4,8`."""

from __future__ import annotations

import click


class NumberList(click.ParamType[tuple[int, ...]]):
    """Positive whole numbers separated by commas, as a tuple."""

    name = "N,N,..."

    def convert(
        self, value: str | tuple[int, ...], param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[int, ...]:
        if isinstance(value, tuple):
            return value  # click converts what it has converted once more
        words = value.replace(" ", "").split(",")
        if not all(word.isascii() and word.isdigit() and int(word) > 0 for word in words):
            self.fail(f"{value!r} is not a list such as 1,4,8", param, ctx)
        return tuple(int(word) for word in words)
