"""`localrun dev`: tools for those who work on localrun."""

from __future__ import annotations

from pathlib import Path

import click

from localrun import errors


@click.group("dev")
def command() -> None:
    """Tools for developing localrun."""


@command.command("synth")
@click.argument("shape")
@click.argument("type_name", metavar="TYPE")
@click.argument("out", type=click.Path(dir_okay=False, path_type=Path))
@click.option("--seed", type=int, default=0, show_default=True, help="Seed of the weights.")
def synth(shape: str, type_name: str, out: Path, seed: int) -> None:
    """Write a GGUF of a real model's SHAPE and quantization TYPE, with random weights, to OUT.

    It loads and runs at the speed of the real one, and says nothing of sense. A wrong SHAPE or TYPE lists the known
    ones.
    """
    from localrun.models.synthesize import synthesize

    try:
        synthesize(shape, type_name, out, seed)
    except errors.BadRequest as error:
        raise click.UsageError(error.message) from None
    print(f"wrote {out} ({out.stat().st_size} bytes)")
