"""Requests that really came: our own trace and three public ones, as they are published. Pure, but for reading files.

| format | columns or keys | becomes |
|---|---|---|
| own (.jsonl) | at_s, prompt, output_tokens; perhaps client, lane, target_itl_s | its parts |
| Mooncake (.jsonl) | timestamp (ms), input_length, output_length, hash_ids | a part of 512 tokens for each hash |
| Azure LLM inference (.csv) | TIMESTAMP, ContextTokens, GeneratedTokens | one part: nothing is shared |
| BurstGPT (.csv) | Timestamp, Request tokens, Response tokens | one part; failures, without an answer, are left out |

Timestamps of whole seconds are spread within their second. Nothing is downloaded.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import Annotated, NamedTuple

import msgspec

from localrun.errors import BadRequest, meant
from localrun.plan.workload import Limits, Part, Session, Turn, Workload, built_in, of_toml
from localrun.wire import Lane

HASHED_TOKENS = 512
_FORMS = (
    "a line has at_s, prompt and output_tokens (our own), or timestamp, input_length, output_length and hash_ids "
    "(Mooncake); a table has the columns TIMESTAMP, ContextTokens and GeneratedTokens (Azure), or Timestamp, Request "
    "tokens and Response tokens (BurstGPT)"
)

Count = Annotated[int, msgspec.Meta(ge=1, le=10_000_000)]


class _Own(msgspec.Struct):
    at_s: float
    prompt: Annotated[tuple[tuple[str, Count], ...], msgspec.Meta(min_length=1)]
    output_tokens: Count
    client: str = ""
    lane: Lane = Lane.DEFAULT
    target_itl_s: float | None = None


class _Mooncake(msgspec.Struct):
    timestamp: float
    input_length: Count
    output_length: Count
    hash_ids: tuple[int, ...]


class _Arrival(NamedTuple):
    at_s: float
    turn: Turn | None  # None for what never was answered


def named(text: str) -> Workload:
    """A workload by its name, or by the path of a file: TOML, or a trace. Raises BadRequest."""
    known = built_in()
    if text in known:
        return known[text]
    path = Path(text).expanduser()
    if not path.is_file():
        way_out = meant(text, known) or f"the names are {', '.join(known)}; a file is TOML or a trace"
        raise BadRequest(f"there is no workload '{text}', and no such file; {way_out}", field="workload")
    if path.suffix == ".toml":
        return of_toml(path)
    return of_trace(path)


def of_trace(path: Path) -> Workload:
    """Raises BadRequest, which names the line: for one that cannot be read, and for times that are negative or not in
    order."""
    found: list[tuple[float, Turn]] = []
    last_s = 0.0
    for number, (at_s, turn) in _arrivals(path):
        if not (at_s >= 0 and math.isfinite(at_s)):
            raise _broken(path, number, f"the time is {at_s:g}, before the trace begins")
        if at_s < last_s:
            raise _broken(path, number, f"its time, {at_s:g} s, is before that of the line above, {last_s:g} s")
        last_s = at_s
        if turn is not None:
            found.append((at_s, turn))
    if len(found) < 2 or found[-1][0] <= found[0][0]:
        raise BadRequest(f"{path} has {len(found)} requests at one time; a trace has several times", field="workload")
    first_s = found[0][0]
    times = _spread([at_s - first_s for at_s, _ in found])
    rate_per_s = (len(found) - 1) / times[-1]
    sessions = [Session(at_s * rate_per_s, (turn,)) for at_s, (_, turn) in zip(times, found, strict=True)]
    summary = f"{len(found)} requests of a trace, {rate_per_s:.3g} a second"
    return Workload(path.name, summary, Limits(), lambda n, _seed: sessions[:n], None, rate_per_s)


def _arrivals(path: Path) -> Iterator[tuple[int, _Arrival]]:
    """With the numbers of their lines."""
    with path.open(encoding="utf-8-sig", errors="replace", newline="") as file:
        first = file.readline()
        file.seek(0)
        if first.lstrip().startswith("{"):
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield number, _of_object(path, number, line)
            return
        rows = csv.DictReader(file)
        columns = [name.strip() for name in rows.fieldnames or ()]
        rows.fieldnames = columns
        if {"TIMESTAMP", "ContextTokens", "GeneratedTokens"} <= set(columns):
            began = None
            for row in rows:
                number = rows.line_num
                at = _when(path, number, row["TIMESTAMP"])
                began = began or at
                turn = _turn(path, number, row, "ContextTokens", "GeneratedTokens")
                yield number, _Arrival((at - began).total_seconds(), turn)
        elif {"Timestamp", "Request tokens", "Response tokens"} <= set(columns):
            for row in rows:
                number = rows.line_num
                turn = _turn(path, number, row, "Request tokens", "Response tokens")
                yield number, _Arrival(_number(path, number, row, "Timestamp"), turn)
        else:
            raise BadRequest(f"{path} is no trace: {_FORMS}", field="workload")


def _of_object(path: Path, number: int, line: str) -> _Arrival:
    try:
        is_mooncake = "hash_ids" in line
        if is_mooncake:
            mooncake = msgspec.json.decode(line, type=_Mooncake)
            return _Arrival(mooncake.timestamp / 1000, Turn(_hashed(mooncake, number), mooncake.output_length))
        own = msgspec.json.decode(line, type=_Own)
    except msgspec.DecodeError as error:
        raise _broken(path, number, f"{error}; {_FORMS}") from None
    return _Arrival(
        own.at_s, Turn(own.prompt, own.output_tokens, 0.0, own.client, own.lane, target_itl_s=own.target_itl_s)
    )


def _hashed(mooncake: _Mooncake, number: int) -> tuple[Part, ...]:
    """Each id stands for so many tokens, the last one for what is left."""
    parts, n_left = [], mooncake.input_length
    for hash_id in mooncake.hash_ids:
        n_tokens = min(HASHED_TOKENS, n_left)
        if n_tokens > 0:
            parts.append((f"{hash_id}/{n_tokens}", n_tokens))
        n_left -= n_tokens
    return (*parts, (f"line {number}", n_left)) if n_left > 0 else tuple(parts)


def _turn(path: Path, number: int, row: Mapping[str, str], prompt: str, output: str) -> Turn | None:
    n_prompt, n_output = int(_number(path, number, row, prompt)), int(_number(path, number, row, output))
    return Turn(((f"line {number}", n_prompt),), n_output) if n_prompt > 0 and n_output > 0 else None


def _number(path: Path, number: int, row: Mapping[str, str], column: str) -> float:
    try:
        return float(row[column])
    except (TypeError, ValueError):
        raise _broken(path, number, f"{column} is {row[column]!r}, which is not a number") from None


def _when(path: Path, number: int, text: str | None) -> datetime:
    try:
        return datetime.fromisoformat((text or "").strip())
    except ValueError:
        raise _broken(path, number, f"TIMESTAMP is {text!r}, which is not a time") from None


def _spread(times_s: list[float]) -> list[float]:
    """Arrivals at one whole second are spread within it, where all times are whole seconds."""
    if any(at_s % 1 for at_s in times_s):
        return times_s
    spread: list[float] = []
    begin = 0
    for at in range(1, len(times_s) + 1):
        if at == len(times_s) or times_s[at] != times_s[begin]:
            spread += [times_s[begin] + index / (at - begin) for index in range(at - begin)]
            begin = at
    return spread


def _broken(path: Path, number: int, what: str) -> BadRequest:
    return BadRequest(f"{path}, line {number}: {what}", field="workload")
