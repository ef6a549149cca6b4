"""Requests that really came: our own trace and public ones, as they are published. Pure, but for reading files.

| format | columns or keys | becomes |
|---|---|---|
| own (.jsonl) | at_s, prompt, output_tokens; perhaps client, lane, target_itl_s | its parts |
| Mooncake (.jsonl) | timestamp (ms), input_length, output_length; perhaps hash_ids | a part for each hash |
| with sessions (.jsonl) | the same; session_id, and delay (ms) in place of timestamp | turns that wait for an answer |
| Bailian (.jsonl) | as Mooncake with chat_id; its timestamp is in seconds | a part for each hash |
| Azure LLM inference (.csv) | TIMESTAMP, ContextTokens, GeneratedTokens | one part: nothing is shared |
| BurstGPT (.csv) | Timestamp, Request tokens, Response tokens | one part; failures, without an answer, are left out |

Tables have any separator, order, case and further columns, and times are seconds or dates. Timestamps of whole seconds
are spread within their second. What a hash stands for is found out from the lengths: 512 tokens, if these say nothing.
Nothing is downloaded.

What a daemon was asked is written in our own form. Two prompts that begin with the same blocks begin with the same
parts, those of answers among them, so that a turn of a conversation repeats the simulated answer to the one before.
Parts and clients have numbers for names: nothing is left of the digests by which they were told apart.
"""

from __future__ import annotations

import csv
import gzip
import re
import zlib
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, NamedTuple, TextIO

import msgspec

from localrun import stored
from localrun.bench.arrivals import ANSWER, Limits, Part, Positive, Session, Turn, Workload, built_in, of_toml
from localrun.errors import BadRequest, meant
from localrun.snapshot import TrafficRow
from localrun.wire import Lane

# Of a longer trace the beginning says enough, and a table of millions of lines takes no more memory.
MOST_REQUESTS = 200_000
MOST_TOKENS = 10_000_000
# Of dates as seconds, up to the year 5138: what is larger are milliseconds, and a thousand times that microseconds.
MOST_S = 1e11
# Between an answer and the next turn, as in a workload.
MOST_DELAY_MS = 1e9
# Of a digest of a `TrafficRow`.
BLOCK_TOKENS = 16
HASHED_TOKENS = 512
# What hashes stand for elsewhere, and how many lines are looked at to find it out.
_BLOCKS = (HASHED_TOKENS, 16, 32, 64, 128, 256, 1024)
_LOOKED_AT = 200
# As tables name them, in small letters.
_TIMES = ("timestamp", "arrival_time", "arrived_at", "created_time", "time")
_PROMPTS = ("contexttokens", "request tokens", "input_length", "input_tokens", "prompt_tokens", "prompt_length",
            "num_prefill_tokens", "prompttokencount")  # fmt: skip
_OUTPUTS = ("generatedtokens", "response tokens", "output_length", "output_tokens", "completion_tokens",
            "num_decode_tokens", "generatedtokencount")  # fmt: skip
_FORMS = (
    "a line has at_s, prompt and output_tokens (our own), or timestamp, input_length and output_length (Mooncake); a "
    "table has the columns TIMESTAMP, ContextTokens and GeneratedTokens (Azure), or Timestamp, Request tokens and "
    "Response tokens (BurstGPT)"
)

_TOKENS = f"a whole number of at least 1, and at most {MOST_TOKENS}"
# What the values of keys are.
_WANTED = {
    "at_s": "a number of seconds",
    "prompt": f"a list of [name, tokens], at least one, with 1 to {MOST_TOKENS} tokens each",
    "output_tokens": _TOKENS,
    "input_length": _TOKENS,
    "output_length": f"a whole number from 0 to {MOST_TOKENS}",
    "timestamp": "a number",
    "delay": f"from 0 to {MOST_DELAY_MS:g} milliseconds",
    "target_itl_s": "more than 0 seconds, and at most a million",
    "lane": f"one of {', '.join(Lane)}",
    "client": "a text",
    "hash_ids": "a list of whole numbers or texts",
    "session_id": "a text or a whole number",
    "chat_id": "a text or a whole number",
}

Count = Annotated[int, msgspec.Meta(ge=1, le=MOST_TOKENS)]


class _Own(msgspec.Struct):
    at_s: float
    prompt: Annotated[tuple[tuple[str, Count], ...], msgspec.Meta(min_length=1)]
    output_tokens: Count
    client: str = ""
    lane: Lane = Lane.DEFAULT
    target_itl_s: Positive | None = None


class _Hashed(msgspec.Struct):
    """Of Mooncake, and of what came after it. `timestamp` None is that of the answer before it, and `delay` on."""

    input_length: Count
    output_length: Annotated[int, msgspec.Meta(ge=0, le=MOST_TOKENS)]
    timestamp: float | None = None
    hash_ids: tuple[int | str, ...] = ()
    session_id: str | int | None = None
    delay: Annotated[float, msgspec.Meta(ge=0, le=MOST_DELAY_MS)] | None = None
    chat_id: int | str | None = None


class _Arrival(NamedTuple):
    """`at_s` None is after the answer in the same `session`, as the turn's `think_s` says."""

    at_s: float | None
    turn: Turn | None  # None for what never was answered
    session: str | int | None = None


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
    found: list[tuple[float, list[Turn]]] = []
    talks: dict[str | int, list[Turn]] = {}
    last_s, n_found = 0.0, 0
    for number, (at_s, turn, session) in _arrivals(path):
        if n_found == MOST_REQUESTS:
            break
        if at_s is None:
            if session not in talks:
                raise _broken(path, number, "it has no timestamp, and no line above it has the same session_id")
        elif found and at_s < last_s:
            above = f"its time, {at_s:g} s, is before that of the line above, {last_s:g} s"
            raise _broken(path, number, f"{above}; sort the file by time")
        elif not 0 <= at_s <= MOST_S:
            raise _broken(path, number, f"the time is {at_s:g} s; it is from 0 to {MOST_S:g}")
        last_s = last_s if at_s is None else at_s
        if turn is None:
            continue
        n_found += 1
        if at_s is None and session is not None:
            talks[session].append(turn)
        else:
            found.append((last_s, [turn]))
            if session is not None:
                talks[session] = found[-1][1]
    if len(found) < 2 or found[-1][0] <= found[0][0]:
        has = "1 request" if n_found == 1 else f"{n_found} requests at one time" if n_found else "no request"
        raise BadRequest(f"{path} has {has} with an answer; a trace has several times", field="workload")
    first_s = found[0][0]
    times = _spread([at_s - first_s for at_s, _ in found])
    rate_per_s = (n_found - 1) / times[-1]
    sessions = [Session(at_s * rate_per_s, tuple(turns)) for at_s, (_, turns) in zip(times, found, strict=True)]
    which = f"the first {n_found}" if n_found == MOST_REQUESTS else f"{n_found}"
    summary = f"{which} requests of a trace, {rate_per_s:.3g} a second"
    return Workload(path.name, summary, Limits(), lambda n, _seed: sessions[:n], None, rate_per_s)


def _arrivals(path: Path) -> Iterator[tuple[int, _Arrival]]:
    """With the numbers of their lines. Raises BadRequest."""
    try:
        yield from _read(path)
    except (EOFError, zlib.error, gzip.BadGzipFile):
        raise BadRequest(f"{path} is cut off or damaged; copy or download it again", field="workload") from None


def _read(path: Path) -> Iterator[tuple[int, _Arrival]]:
    with _opened(path) as file:
        beginning = list(islice(file, _LOOKED_AT))
        file.seek(0)
        first = next((line for line in beginning if line.strip()), "")
        if not first:
            raise BadRequest(f"{path} is empty", field="workload")
        if first.lstrip().startswith("["):
            raise BadRequest(
                f"{path} is one JSON array, and a trace has an object in each line: `jq -c '.[]' FILE` writes them so",
                field="workload",
            )
        if not first.lstrip().startswith("{"):
            yield from _of_table(path, file, first)
            return
        n_block = _block_tokens(beginning)
        for number, line in enumerate(file, 1):
            if line.strip():
                yield number, _of_object(path, number, line, n_block)


def _opened(path: Path) -> TextIO:
    """As spreadsheets, shells and archives leave text files."""
    with path.open("rb") as file:
        magic = file.read(3)
    encoding = "utf-16" if magic[:2] in (b"\xff\xfe", b"\xfe\xff") else "utf-8-sig"
    if magic[:2] == b"\x1f\x8b":
        return gzip.open(path, "rt", encoding=encoding, errors="replace", newline="")
    return path.open(encoding=encoding, errors="replace", newline="")


def _of_table(path: Path, file: TextIO, header: str) -> Iterator[tuple[int, _Arrival]]:
    rows = csv.reader(file, delimiter=max(",;\t", key=header.count), skipinitialspace=True)
    names: list[str] = []
    columns: list[int] = []
    began: datetime | None = None
    unit_s = 0.0
    try:
        for row in rows:
            cells = [cell.strip() for cell in row]
            if not any(cells):
                continue
            if not columns:
                names, columns = cells, _columns(path, cells)
                continue
            number = rows.line_num
            if len(cells) <= max(columns):
                raise _broken(path, number, f"it has {len(cells)} of {len(names)} columns")
            time, prompt, output = columns
            at = _when(path, number, names[time], cells[time])
            if unit_s if isinstance(at, datetime) else began is not None:
                above = "dates" if began else "numbers"
                raise _broken(path, number, f"{names[time]} is '{cells[time]}', and the lines above have {above}")
            if isinstance(at, datetime):
                began = began or at
                at = (at - began).total_seconds()
            else:
                unit_s = unit_s or _unit_s(at)
                at *= unit_s
            n_prompt, n_output = (_count(path, number, names[each], cells[each]) for each in (prompt, output))
            turn = Turn(((f"line {number}", n_prompt),), n_output) if n_prompt and n_output else None
            yield number, _Arrival(at, turn)
    except csv.Error as error:
        raise _broken(path, rows.line_num, str(error)) from None
    if not columns:
        _columns(path, [])


def _columns(path: Path, names: list[str]) -> list[int]:
    """Where the time, the prompt's tokens and the answer's are. Raises BadRequest."""
    known = [name.lower().removesuffix(" [utc]") for name in names]
    found = [next((known.index(name) for name in each if name in known), None) for each in (_TIMES, _PROMPTS, _OUTPUTS)]
    columns = [at for at in found if at is not None]
    if len(columns) < len(found):
        raise BadRequest(f"{path} is no trace: {_FORMS}", field="workload")
    return columns


def _of_object(path: Path, number: int, line: str, n_block: int) -> _Arrival:
    try:
        if "input_length" in line:
            hashed = msgspec.json.decode(line, type=_Hashed)
            unit_s = 1 if hashed.chat_id is not None else 0.001
            at_s = None if hashed.timestamp is None else hashed.timestamp * unit_s
            think_s = (hashed.delay or 0.0) / 1000 if at_s is None else 0.0
            turn = Turn(_hashed(hashed, number, n_block), hashed.output_length, think_s)
            return _Arrival(at_s, turn if hashed.output_length else None, hashed.session_id)
        own = msgspec.json.decode(line, type=_Own)
    except msgspec.DecodeError as error:
        raise _broken(path, number, _in_words(str(error))) from None
    return _Arrival(
        own.at_s, Turn(own.prompt, own.output_tokens, 0.0, own.client, own.lane, target_itl_s=own.target_itl_s)
    )


def _in_words(problem: str) -> str:
    """What msgspec says, in the words of whoever made the file."""
    if found := re.search(r"required field `(\w+)`", problem):
        return f"{found[1]} is missing; {_FORMS}"
    if (found := re.search(r"`\$\.(\w+)", problem)) and found[1] in _WANTED:
        return f"{found[1]} must be {_WANTED[found[1]]}"
    return f"it is no JSON object, or not a whole one; {_FORMS}"


def _unit_s(first: float) -> float:
    """Of times that begin there: seconds, unless that were a date of another age."""
    return next((unit_s for unit_s in (1.0, 1e-3, 1e-6, 1e-9) if not first * unit_s > MOST_S), 1.0)


def _block_tokens(beginning: list[str]) -> int:
    """How many tokens a hash stands for: what all lengths allow."""
    allowed = list(_BLOCKS)
    for line in beginning:
        try:
            hashed = msgspec.json.decode(line, type=_Hashed)
        except msgspec.DecodeError:
            continue  # whoever reads it says what is wrong with it
        if n_hashes := len(hashed.hash_ids):
            allowed = [n for n in allowed if (n_hashes - 1) * n < hashed.input_length <= n_hashes * n] or allowed
    return allowed[0]


def _hashed(hashed: _Hashed, number: int, n_block: int) -> tuple[Part, ...]:
    """Each id stands for so many tokens, the last one for what is left."""
    parts, n_left = [], hashed.input_length
    for hash_id in hashed.hash_ids:
        n_tokens = min(n_block, n_left)
        if n_tokens > 0:
            parts.append((f"{hash_id}/{n_tokens}", n_tokens))
        n_left -= n_tokens
    return (*parts, (f"line {number}", n_left)) if n_left > 0 else tuple(parts)


def _count(path: Path, number: int, column: str, text: str) -> int:
    """Of tokens; perhaps none."""
    try:
        value = float(text.replace(",", ""))
        if 0 <= value <= MOST_TOKENS:
            return int(value)
        problem = f"not from 0 to {MOST_TOKENS}"
    except ValueError:
        problem = "not a number"
    raise _broken(path, number, f"{column} is '{text}', which is {problem}")


def _when(path: Path, number: int, column: str, text: str) -> datetime | float:
    """Seconds, or a date, which is UTC where it does not say so."""
    try:
        return float(text)
    except ValueError:
        pass
    for read in (datetime.fromisoformat, _of_logs):
        try:
            at = read(text.removesuffix("UTC").rstrip())
        except ValueError:
            continue
        return at if at.tzinfo is not None else at.replace(tzinfo=UTC)
    raise _broken(path, number, f"{column} is '{text}', which is neither a date nor seconds")


def _of_logs(text: str) -> datetime:
    """As Azure's portal exports it."""
    return datetime.strptime(text, "%m/%d/%Y, %I:%M:%S.%f %p").replace(tzinfo=UTC)


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


def write(path: Path, rows: Iterable[TrafficRow]) -> None:
    """A file that only its owner can read. Raises OSError."""
    stored.replace(path, b"".join(_lines(rows)))


def _lines(rows: Iterable[TrafficRow]) -> Iterator[bytes]:
    """In order of arrival; times count from the first."""
    ordered = sorted(rows, key=lambda row: row.at_s)
    texts: list[list[Part]] = []  # of each prompt with its answer
    text_of: dict[str, int] = {}  # by the digest of a block, the first one that has it
    clients: dict[str, str] = {}
    for number, row in enumerate(ordered):
        n_known = next((at for at, block in enumerate(row.blocks) if block not in text_of), len(row.blocks))
        n_shared = min(row.prompt_tokens, BLOCK_TOKENS * n_known)
        parts = _cut(texts[text_of[row.blocks[n_known - 1]]], n_shared) if n_known else []
        if n_shared < row.prompt_tokens:
            parts.append((f"p{number}", row.prompt_tokens - n_shared))
        texts.append([*parts, (parts[-1][0] + ANSWER, row.output_tokens)])
        for block in row.blocks[n_known:]:
            text_of[block] = number
        said: dict[str, Any] = {
            "at_s": round(row.at_s - ordered[0].at_s, 4), "prompt": parts, "output_tokens": row.output_tokens,
            "client": clients.setdefault(row.client, f"c{len(clients)}"), "lane": row.lane,
        }  # fmt: skip
        if row.target_itl_s is not None:
            said["target_itl_s"] = row.target_itl_s
        yield msgspec.json.encode(said) + b"\n"


def _cut(parts: list[Part], n_tokens: int) -> list[Part]:
    """Their beginning: the first tokens of a part are those of a shorter one with its name."""
    found: list[Part] = []
    for name, n in parts:
        if n_tokens <= 0:
            break
        found.append((name, min(n, n_tokens)))
        n_tokens -= n
    return found
