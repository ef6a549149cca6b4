"""Errors that a script may want to tell apart have codes of their own."""

from __future__ import annotations

import pytest

from localrun import errors
from localrun.cli import exits


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (errors.PortBusy("x"), 3),
        (errors.DaemonUnreachable("x"), 4),
        (errors.ModelNotFound("x"), 5),
        (errors.NotFound("x"), 1),
        (errors.CannotFit("x"), 1),
        (errors.LocalrunError("x"), 1),
    ],
)
def test_codes(error, code):
    assert exits.code_of(error) == code
    assert code in exits.MEANINGS
