"""The comparison with llama-server: one file of measured figures, and the tables and sentences that pages make of it.

    PYTHONPATH=packaging python -m bench --workloads decode --streams 1,4,8 --json decode.json    measures
    python packaging/figures.py decode.json stall.json ... --machine "..."         condenses, and writes the pages

`localrun/bench/figures.json` is what is kept: per file its date, its options and the ratios that a table shows. The
tables stand between two marks in each page, so they cannot differ; `generate.py --check figures` compares. Where
several files measured the same, the last one named counts. Without files the pages are written anew from what is kept.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

ROOT = Path(__file__).parents[1]
KEPT = ROOT / "localrun/bench/figures.json"
README, BENCH = ROOT / "README.md", ROOT / "localrun/bench/README.md"
PERFORMANCE = ROOT / "localrun/docs/performance.md"
PAGES = (README, BENCH, PERFORMANCE)
BEGIN, END = "<!-- figures: written by packaging/figures.py -->", "<!-- end of the figures -->"
MODES = ("interactive", "balanced", "throughput")
NOT_MEASURED = "not measured"
# The workloads of which drafts are the point, and how the names of llama-servers end that have them.
DRAFTING = ("edit", "list", "json", "prose")
SPECULATION = " --spec-default"


class Ratio(msgspec.Struct, frozen=True):
    """localrun / llama-server: the median of the rounds, the lowest and the highest; and both sides' own medians."""

    median: float
    lowest: float
    highest: float
    n_rounds: int
    localrun: float
    opponent: float
    opponent_name: str


class Drafts(msgspec.Struct, frozen=True):
    """What drafts did for one workload and number of streams. `gain` is tokens/s over those without drafts: localrun's
    (median, lowest, highest) of the rounds, and llama-server's by its medians. `accepted` of what was drafted. `ratio`
    is localrun / llama-server, the better of it with and without drafts. None is not measured, or nothing drafted."""

    n_rounds: int
    gain: tuple[float, float, float] | None
    accepted: float | None
    peer_gain: float | None
    peer_accepted: float | None
    ratio: Ratio | None


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """One file of `python -m bench`. `ratios` by `workload:metric`, `drafts` by `workload:c<streams>`."""

    date: str
    processor: str
    model: str
    slots: int
    kv_cells: int
    threads: int
    latency: str
    environment: dict[str, str]
    rounds: int
    workloads: list[str]
    ratios: dict[str, Ratio]
    drafts: dict[str, Drafts] = {}
    machine: str


class Figures(msgspec.Struct, frozen=True):
    """`Measured.machine` is a sentence's end: on what this was measured."""

    measured: list[Measured]


class Row(NamedTuple):
    """A line of the tables. `label` is that of the bench's page, `headline` that of performance.md, empty for
    none there. `beside` is a workload that the same file has, where the metric is of everything that ran before it."""

    label: str
    headline: str
    metric: str
    latency: str = "balanced"
    beside: str = ""


def _stall_rows(latency: str) -> list[Row]:
    is_default = latency == "balanced"
    return [
        Row(f"stall, {latency}: {label}", headline if is_default else "", f"stall:{metric}", latency)
        for label, headline, metric in (
            ("longest gap", "a long prompt arrives while streams run: longest gap in a stream", "longest_gap_s"),
            ("TTFT of the long prompt", "the same: TTFT of the long prompt", "long_ttft_s"),
            ("wall until all are done", "the same: wall time until the prompt and all streams are done", "wall_s"),
        )
    ]


def _outgrow_rows() -> list[Row]:
    """Of prompts that are longer than a slot's share of the cells."""
    rows = []
    for n_long in (4800, 12_000):
        for n_streams in (3, 1, 0):
            for label, metric in (
                ("TTFT", "long_ttft_s"),
                ("wall until all are done", "wall_s"),
                ("longest gap", "longest_gap_s"),
                ("its ITL", "long_itl_p50_s"),
                ("the streams' ITL while it answers", "after_itl_p50_s"),
            ):
                beside = f"outgrow, {n_long:,} tokens beside {n_streams} streams: {label}"
                headline = f"a prompt beyond a slot's share ({n_long:,} tokens) beside {n_streams} streams: {label}"
                is_headline = n_streams == 3 and metric in ("long_ttft_s", "wall_s", "longest_gap_s")
                name = f"outgrow:{n_long}_beside_{n_streams}_{metric}"
                if n_streams or metric not in ("longest_gap_s", "after_itl_p50_s"):
                    rows.append(Row(beside, headline if is_headline else "", name))
        rows.append(Row(f"outgrow, {n_long:,} tokens and 232 more: TTFT", "", f"outgrow:{n_long}_again_ttft_s"))
    for n_clients in (1, 2):
        label = f"agent, 20 turns to 30,000 tokens, clients at once: {n_clients}, wall"
        rows.append(Row(label, label, f"agent:clients_{n_clients}_wall_s"))
    return rows


ROWS = (
    *_stall_rows("balanced"),
    *_stall_rows("interactive"),
    *_stall_rows("throughput"),
    *_outgrow_rows(),
    Row("shared, cold: wall", "cold requests with a shared prefix: wall time", "shared:cold_wall_s"),
    Row("shared, warm: TTFT p50", "warm requests with a shared prefix: TTFT p50", "shared:warm_ttft_p50_s"),
    Row("shared, warm: wall", "", "shared:warm_wall_s"),
    *(Row(f"returning: TTFT p50 of round {n}", "", f"returning:round{n}_ttft_p50_s") for n in (1, 2, 3)),
    Row("restart: TTFT after the restart", "a known prompt after a restart: TTFT", "restart:restarted_ttft_s"),
    Row("restart: TTFT of the first prompt after a first start", "", "restart:cold_ttft_s"),
    *(Row(label, label, f"decode:c{n}_decode_tokens_per_s") for n, label in (
        (1, "decode, 1 stream: tokens/s"), (4, "decode, 4 streams: tokens/s"), (8, "decode, 8 streams: tokens/s"),
    )),
    Row("resident memory after decode", "resident memory after decode", "memory:rss_bytes", beside="decode"),
    Row("resident memory after stall, shared and restart", "resident memory after the other workloads",
        "memory:rss_bytes", beside="stall"),
    Row("overload: requests answered", "", "overload:burst_completion_ratio"),
    Row("overload: wall of 64 requests at once", "", "overload:burst_wall_s"),
    Row("fairness: slowdown of the small client", "", "fairness:mouse_slowdown"),
    Row("chat: goodput", "", "chat:goodput_requests_per_s"),
)  # fmt: skip

# What README.md says, favourable or not: the metric, what a lower and what a higher figure of localrun's means, and the
# sentence around the comparison.
SENTENCES = (
    ("stall:longest_gap_s", "balanced", "shorter", "longer",
        "When somebody sends a long prompt, the longest pause in the answers that are running is {}."),
    ("stall:long_ttft_s", "balanced", "shorter", "longer", "That long prompt's own wait for its first token is {}."),
    ("outgrow:4800_beside_3_long_ttft_s", "balanced", "sooner", "later",
        "A prompt that is longer than a slot's share of the cells has its first token {}."),
    ("agent:clients_1_wall_s", "balanced", "sooner", "later",
        "Twenty turns of an agent, up to 30,000 tokens, are done {}."),
    ("shared:cold_wall_s", "balanced", "sooner", "later",
        "Requests that begin with the same long system prompt are all answered {}."),
    ("restart:restarted_ttft_s", "balanced", "sooner", "later",
        "After a restart, the answer to a prompt that was computed before begins {}."),
    ("decode:c1_decode_tokens_per_s", "balanced", "slower", "faster", "A lone answer is written {}."),
    ("decode:c8_decode_tokens_per_s", "balanced", "slower", "faster", "Eight answers at once are written {}."),
)  # fmt: skip


def condensed(peer: dict[str, Any], processor: str, machine: str) -> Measured:
    """What is kept of the JSON of `python -m bench`. `processor` counts where the file does not name its own."""
    flags, shown = peer["flags"], {row.metric for row in ROWS}
    ratios = {}
    for each in peer["comparisons"]:
        name, ratio = f"{each['workload']}:{each['metric']}", _ratio(each)
        if name in shown and ratio is not None:
            ratios[name] = ratio
    return Measured(
        date=min(run["result"]["started_at"] or "9" for run in peer["runs"])[:10],
        processor=peer.get("processor") or processor,
        model=Path(flags["model"]).name,
        slots=flags["slots"],
        kv_cells=flags["kv_cells"],
        threads=flags["threads"],
        latency=flags["latency"],
        # Where files lie changes no figure.
        environment={name: value for name, value in peer["environment"].items() if name != "LOCALRUN_HOME"},
        rounds=peer["rounds"],
        workloads=sorted({each["workload"] for each in peer["comparisons"]} - {"memory"}),
        ratios=ratios,
        drafts=_drafts(peer["comparisons"]),
        machine=machine,
    )


def _ratio(comparison: dict[str, Any]) -> Ratio | None:
    ratio = comparison["ratio"]
    if ratio is None:
        return None
    theirs = comparison["opponents"][comparison["opponent"]]["median"]
    return Ratio(
        *(_rounded(ratio[key]) for key in ("median", "lowest", "highest")), ratio["n_rounds"],
        _rounded(comparison["subject"]["median"]), _rounded(theirs), comparison["opponent"],
    )  # fmt: skip


def _drafts(comparisons: Sequence[dict[str, Any]]) -> dict[str, Drafts]:
    by_name = {(each["workload"], each["metric"]): each for each in comparisons}
    found = {}
    for (workload, metric), each in by_name.items():
        streams = re.fullmatch(r"(c\d+)_tokens_per_s", metric)
        if workload not in DRAFTING or streams is None:
            continue
        gain = by_name.get((workload, f"{streams[1]}_gain_ratio"))
        accepted = by_name.get((workload, f"{streams[1]}_acceptance_ratio"))
        # One that never drafts accepts nothing, so only those that did are among these.
        theirs = [spread["median"] for spread in accepted["opponents"].values()] if accepted else []
        found[f"{workload}:{streams[1]}"] = Drafts(
            n_rounds=each["subject"]["n_rounds"],
            gain=tuple(_rounded(gain["subject"][key]) for key in ("median", "lowest", "highest")) if gain else None,
            accepted=_rounded(accepted["subject"]["median"]) if accepted else None,
            peer_gain=_peer_gain(each["opponents"]),
            peer_accepted=_rounded(max(theirs)) if theirs else None,
            ratio=_ratio(each),
        )
    return found


def _peer_gain(opponents: dict[str, dict[str, Any]]) -> float | None:
    """The best llama-server with drafts over the best one without."""
    drafting = [spread["median"] for name, spread in opponents.items() if name.endswith(SPECULATION)]
    plain = [spread["median"] for name, spread in opponents.items() if not name.endswith(SPECULATION)]
    return _rounded(max(drafting) / max(plain)) if drafting and plain else None


def _rounded(number: float) -> float:
    return float(f"{number:.6g}")


def find(measured: Sequence[Measured], row: Row) -> tuple[Measured, Ratio] | None:
    """The last file that has this row."""
    for each in reversed(measured):
        ratio = each.ratios.get(row.metric)
        if ratio is not None and each.latency == row.latency and (not row.beside or row.beside in each.workloads):
            return each, ratio
    return None


def tables(figures: Figures) -> dict[Path, str]:
    """What stands between the marks of each page."""
    found = [(row, *hit) for row in ROWS if (hit := find(figures.measured, row)) is not None]
    rows = [[_label(row, measured), _shown(ratio)] for row, measured, ratio in found]
    headlines = [[row.headline, _shown(ratio)] for row, _, ratio in found if row.headline]
    header = ("workload", "ratio, median (lowest to highest)")
    conditions = _conditions([measured for _, measured, _ in found])
    modes = _table(
        ("`latency`", "longest gap of a stream while a 2,400-token prompt arrives", "first token of that prompt"),
        [[f"`{mode}`", *(_cell(figures.measured, row) for row in _stall_rows(mode)[:2])] for mode in MODES],
    )
    return {
        README: _sentences(figures.measured),
        PERFORMANCE: f"{_table(header, headlines)}\n\n{modes}\n\n{conditions}",
        BENCH: f"{_table(header, rows)}\n\n{conditions}" + _speculation(figures),
    }  # fmt: skip


def _sentences(measured: Sequence[Measured]) -> str:
    """A list, each ratio in words that say which side it favours."""
    lines = []
    for metric, latency, less, more, sentence in SENTENCES:
        hit = find(measured, Row("", "", metric, latency))
        if hit is not None:
            wrapped = _wrapped(f"- {sentence.format(_compared(hit[1].median, less, more))}")
            lines += [wrapped[0], *(f"  {line}" for line in wrapped[1:])]
    return "\n".join(lines)


def _compared(ratio: float, less: str, more: str) -> str:
    """0.07 is "14 times shorter", 1.11 "11 % longer"."""
    if ratio <= 0.5 or ratio >= 2:
        return f"{max(ratio, 1 / ratio):.2g} times {less if ratio < 1 else more}"
    percent = round(100 * abs(ratio - 1))
    return f"{percent} % {less if ratio < 1 else more}" if percent else f"neither {less} nor {more}"


def _speculation(figures: Figures) -> str:
    """A second table, of what drafts gained, under a heading of its own; empty where nobody measured it."""
    drafts: dict[tuple[str, str], tuple[Measured, Drafts]] = {}
    for each in figures.measured:
        drafts |= {(each.model, name): (each, found) for name, found in each.drafts.items()}
    if not drafts:
        return ""
    order = sorted(drafts, key=lambda key: (key[0], DRAFTING.index(key[1].partition(":")[0])))
    header = ("model, workload, streams", "gain by drafts, median (lowest to highest)", "accepted",
              "gain of llama-server --spec-default", "accepted", "localrun / llama-server")  # fmt: skip
    rows = []
    for model, name in order:
        _, found = drafts[model, name]
        workload, _, streams = name.partition(":c")
        gain = "-" if found.gain is None else "{:.2f} ({:.2f} to {:.2f})".format(*found.gain)
        peer_gain = NOT_MEASURED if found.peer_gain is None else f"{found.peer_gain:.2f}"
        ratio = NOT_MEASURED if found.ratio is None else _shown(found.ratio)
        shares = [f"{share:.0%}" if share is not None else "-" for share in (found.accepted, found.peer_accepted)]
        rows.append([f"{model}, {workload}, {streams}", gain, shares[0], peer_gain, shares[1], ratio])
    conditions = _conditions(list({id(each): each for each, _ in drafts.values()}.values()))
    return f"\n\n**Speculation**, tokens/s:\n\n{_table(header, rows)}\n\n{conditions}"


def _label(row: Row, measured: Measured) -> str:
    return f"{row.label}, {measured.kv_cells:,} cells" if row.metric.startswith("returning:") else row.label


def _cell(measured: Sequence[Measured], row: Row) -> str:
    hit = find(measured, row)
    return NOT_MEASURED if hit is None else _shown(hit[1])


def _shown(ratio: Ratio) -> str:
    if ratio.n_rounds == 1:
        return f"{ratio.median:.2f} (one round)"
    return f"{ratio.median:.2f} ({ratio.lowest:.2f} to {ratio.highest:.2f})"


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("|" + "|".join(cell if cell == "---" else f" {cell} " for cell in line) + "|" for line in lines)


def _conditions(used: Sequence[Measured]) -> str:
    """For each machine two sentences: on what, when, and how often."""
    machines = dict.fromkeys(each.machine for each in used)
    texts = [_measured_on(machine, [each for each in used if each.machine == machine]) for machine in machines]
    return "\n".join(_wrapped(" ".join(texts)))


def _measured_on(machine: str, used: Sequence[Measured]) -> str:
    dates = sorted({each.date for each in used})
    when = dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}"
    sizes = {(each.slots, each.threads, each.model) for each in used}
    how = "; ".join(f"{model}, {slots} slots, {threads} threads" for slots, threads, model in sorted(sizes))
    cells = " or ".join(f"{n:,}" for n in sorted({each.kv_cells for each in used}, reverse=True))
    rounds: dict[str, None] = {}
    for each in used:
        names = ", ".join(each.workloads) + ("" if each.latency == "balanced" else f" ({each.latency})")
        rounds[f"{each.rounds} of {names}"] = None
    changed = {f"{name}={value}" for each in used for name, value in each.environment.items()}
    settings = f" Settings: {', '.join(sorted(changed))}." if changed else ""
    return f"Measured on {machine}, {when}: {how}, {cells} KV cells. Rounds: {'; '.join(rounds)}.{settings}"


def _wrapped(text: str, width: int = 120) -> list[str]:
    import textwrap

    return textwrap.wrap(text, width, break_long_words=False, break_on_hyphens=False)


def page(path: Path, figures: Figures | None = None) -> str:
    """A page with its table as the figures have it. Raises ValueError for a page without the marks."""
    text = path.read_text(encoding="utf-8")
    pattern = re.compile(f"{re.escape(BEGIN)}.*?{re.escape(END)}", re.DOTALL)
    if len(pattern.findall(text)) != 1:
        raise ValueError(f"{path.name} must have the marks of the figures once")
    table = tables(figures or kept())[path]
    return pattern.sub(lambda _: f"{BEGIN}\n{table}\n\n{END}", text)


def kept() -> Figures:
    """The committed figures."""
    return msgspec.json.decode(KEPT.read_bytes(), type=Figures)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python packaging/figures.py", description=__doc__)
    parser.add_argument(
        "files", nargs="*", type=Path, help="what `python -m bench --json` wrote; replaces what is kept, but for --add"
    )
    parser.add_argument("--machine", default="this machine", help="on what this was measured, in words")
    parser.add_argument("--add", action="store_true", help="keep what is there, too; what came last counts")
    args = parser.parse_args(arguments)
    measured = kept().measured if KEPT.is_file() and (args.add or not args.files) else []
    if args.files:
        from localrun.hardware.processors import usable

        name = usable().name
        files = [msgspec.json.decode(file.read_bytes()) for file in args.files]
        measured = [*measured, *(condensed(each, name, args.machine) for each in files)]
    figures = Figures(measured)
    KEPT.write_bytes(msgspec.json.format(msgspec.json.encode(figures), indent=1) + b"\n")
    for path in (README, BENCH, PERFORMANCE):
        path.write_text(page(path, figures), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
