"""Whether a model fits on any node, and what is said if it does not."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path

import pytest

from localrun.cluster.description import Description, Has, check_memory, described
from localrun.config import NOTHING_ASKED, LoadSettings, Settings
from localrun.errors import CannotFit
from localrun.models.storage.store import Store

MB, GB = 1_000_000, 1_000_000_000
SMALL, LARGE = Has(40 * MB), Has(64 * GB)
CARD, CARDS = Has(64 * GB, (24 * GB,)), Has(64 * GB, (24 * GB, 24 * GB))


@pytest.mark.parametrize("has", [Has(), SMALL, CARDS, Has(64 * GB, (80 * GB,) * 8 + (24 * GB,), 4711)])
def test_what_a_node_has_survives_its_labels(has: Has) -> None:
    labels = has.labels
    assert all(len(value) <= 63 and re.fullmatch(r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?", value)
               for value in labels.values())  # fmt: skip
    again = Has.of(labels)
    assert again.files_port == has.files_port
    assert len(again.gpu_bytes) == len(has.gpu_bytes)
    assert all(0 <= one - other < 2**20 for one, other in zip(has.gpu_bytes, again.gpu_bytes, strict=True))
    assert 0 <= has.ram_bytes - again.ram_bytes < 2**20


def test_labels_of_others_say_nothing() -> None:
    assert Has.of({"localrun/ram-mib": "much", "localrun/gpus-mib": "x", "market-type": "spot"}) == Has()


@pytest.mark.parametrize(
    ("n_gpus", "nodes", "fits"),
    [
        (0, {"a": SMALL, "b": LARGE}, True),
        (0, {"a": SMALL}, False),
        (0, {"a": Has()}, True),  # of an older node nothing is known
        (0, {}, True),
        (1, {"a": LARGE}, False),
        (1, {"a": CARD}, True),
        (2, {"a": CARD, "b": CARD}, False),
        (2, {"a": CARD, "b": CARDS}, True),
        (0.5, {"a": CARD}, True),
    ],
)
def test_a_model_fits_where_its_memory_and_its_gpus_are(
    models_dir: Path, n_gpus: float, nodes: dict[str, Has], fits: bool
) -> None:
    store = Store(models_dir)
    said = described(store, "alpha", NOTHING_ASKED, n_gpus)
    expected = contextlib.nullcontext() if fits else pytest.raises(CannotFit, match="; ".join(f"{n} .*" for n in nodes))
    with expected:
        check_memory(said, store.resolve("alpha"), Settings(), nodes.items())


def test_the_sentence_says_what_each_node_has_and_what_is_needed(models_dir: Path) -> None:
    model = Store(models_dir).resolve("alpha")
    said = Description(model="alpha", contents="", load=LoadSettings(num_ctx=2_000_000), n_gpus=1)
    with pytest.raises(CannotFit) as caught:
        check_memory(said, model, Settings(), {"studio": Has(40 * MB), "cellar": Has(200 * MB, (500 * MB,))}.items())
    assert re.fullmatch(
        r"'alpha' fits on no node: each replica needs [\d.]+ .B of memory with 1 GPU; cellar has 0.2 GB of RAM "
        r"and 1 x 0.5 GB on GPUs; studio has 40 MB of RAM and no GPU; of RAM 80% may be used. Take a smaller model .*",
        caught.value.message,
    )
