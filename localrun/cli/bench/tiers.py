"""`localrun bench tiers`: which requests a tier's small model answers, and what that saves."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from localrun import __version__, errors
from localrun.cli import exits
from localrun.cli.arguments import with_settings
from localrun.cli.daemon import ensure_daemon
from localrun.cli.text import columns, progress
from localrun.config import Settings
from localrun.visible import visible

if TYPE_CHECKING:
    from localrun.bench.tiers import TierAnswer


@click.command("tiers")
@click.argument("name")
@click.option(
    "--rounds", type=click.IntRange(min=1), default=1, show_default=True, help="How many times to send the whole mix."
)
@click.option("--seed", type=int, help="Seed of the prompts. Default: a new one, so that nothing is cached.")
@click.option(
    "--price-per-hour",
    type=click.FloatRange(min=0),
    help="Price of this machine per hour, for the cost in your currency.",
)
@click.option("--json", "json_path", type=click.Path(dir_okay=False, path_type=Path),
              help="Write everything to this file, with every request.")  # fmt: skip
@with_settings
def tiers_command(
    name: str, rounds: int, seed: int | None, price_per_hour: float | None, json_path: Path | None, settings: Settings
) -> int:
    """Measure the tier NAME of the running daemon against its small and its large model alone.

    The mix is 8 short questions, a long text, a question with a tool and one with a schema, and one for each effort
    that the tier has a rule for. Requests are sent one at a time. A tier is a table [tiers.NAME]
    of localrun.toml: one name for a small and a large model.
    """
    from localrun.bench.session import random_seed
    from localrun.bench.tiers import COST_HEADER, SHARE_HEADER, cost_rows, measure, share_rows

    seed = random_seed() if seed is None else seed
    url = ensure_daemon(settings)
    progress(f"{url}, tier {name}, seed {seed}")
    run = measure(url, name, rounds, seed, _show)
    header = COST_HEADER if price_per_hour is None else (*COST_HEADER, "COST")
    print(columns(SHARE_HEADER, share_rows(run)))
    print("\n" + columns(header, cost_rows(run, price_per_hour)))
    print("\nPROMPT to PROBE are tokens. OF LARGE: seconds, compared with the large model alone.")
    print(visible(f"small: {run.tier['small']}, large: {run.tier['large']}"))
    if json_path is not None:
        import msgspec

        json_path.write_bytes(msgspec.json.encode({"localrun": __version__, "seed": seed, "run": run}))
    if run.problems:
        raise errors.LocalrunError(f"requests that one of the three did not answer are left out: {run.problems[0]}")
    return exits.OK


def _show(answer: TierAnswer) -> None:
    if answer.problem:
        progress(f"{answer.asked}, {answer.kind}: {answer.problem}")
        return
    rule = f" ({answer.rule})" if answer.rule else ""
    progress(f"{answer.asked}, {answer.kind}: {answer.model}{rule}, {answer.seconds:.2f} s")
