"""Feeding a parser, and its pieces in the form of the golden table."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

from localrun.server.parsing.parser import ParserPlan
from localrun.server.parsing.pieces import CallArguments, CallStart, Content, Piece, ReplyParser
from tests.server.parsing.golden import SCHEMAS, Golden


def parser_of(case: Golden, *, streams: bool = False) -> ReplyParser:
    plan = ParserPlan(
        call_format=case.format,
        tags=case.tags,
        control_tokens=case.control_tokens,
        calls_are_constrained=streams,
    )
    return plan.parser(SCHEMAS, opened=case.opened, is_thinking=case.is_thinking)


def read(parser: ReplyParser, parts: Iterable[str]) -> list[Piece]:
    pieces: list[Piece] = []
    for part in parts:
        pieces += parser.feed(part)
    return pieces + parser.finish()


def meaning(pieces: Sequence[Piece]) -> tuple[tuple[str, Any], ...]:
    """Neighbours joined, calls with their parsed arguments. Fails for pieces that break their own rules."""
    result: list[tuple[str, Any]] = []
    arguments: list[str] = []
    names: list[str] = []
    for piece in pieces:
        if isinstance(piece, CallStart):
            assert piece.index == len(names)
            names.append(piece.name)
            arguments.append("")
            result.append(("call", piece.index))
        elif isinstance(piece, CallArguments):
            arguments[piece.index] += piece.text
        else:
            kind = "content" if isinstance(piece, Content) else "thinking"
            assert piece.text
            if result and result[-1][0] == kind:
                result[-1] = (kind, result[-1][1] + piece.text)
            else:
                result.append((kind, piece.text))
    return tuple(
        (kind, (names[value], json.loads(arguments[value])) if kind == "call" else value) for kind, value in result
    )
