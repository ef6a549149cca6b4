from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from localrun.bench.arrivals import Limits
from localrun.bench.roofline import StepBytes, decode_bound_tokens_per_s
from localrun.config import Settings
from localrun.errors import BadRequest, CannotFit
from localrun.models.gguf.header import Header
from localrun.models.gguf.reader import read_header
from localrun.plan.roofline import EFFICIENCIES as ALL
from localrun.plan.roofline import LEAST_BAND, active_weights, band, device, estimate_of, machines, step_s
from localrun.plan.search import Search
from tests.plan.published import header_of
from tests.plan.test_search import alike


@pytest.fixture(scope="module")
def header(tiny_gguf: Path) -> Header:
    return read_header(tiny_gguf)


def test_every_machine_is_plausible() -> None:
    for name, found in machines().items():
        assert found.backend in ALL, name
        assert found.source
        assert 5 <= 1000 * found.tflops / found.gb_per_s <= 1000, name
        assert found.arithmetic == "f16" or found.tflops_source, name


def test_an_unknown_machine_gets_the_nearest_name() -> None:
    with pytest.raises(BadRequest, match="did you mean 'rtx-4090'"):
        device("rtx4090")
    with pytest.raises(BadRequest, match="localrun plan machines"):
        device("typewriter")


def test_the_bound_of_large_models() -> None:
    """140 GB at 3 TB/s; 70.6 GB at 3.35 TB/s with 57 streams of 1,000 tokens of 164 kB."""
    assert decode_bound_tokens_per_s(StepBytes(140e9, 0), 3e12, [0.0]) == pytest.approx(21.4, abs=0.05)
    together = decode_bound_tokens_per_s(StepBytes(70.6e9, 164e3), 3.35e12, [1000.0] * 57)
    assert together == pytest.approx(2390, rel=0.01)


def test_more_of_anything_is_never_slower(header: Header) -> None:
    usual = device("rtx-4090")
    for n_rows in (1, 8, 64, 512):
        own_s = step_s(header, usual, n_rows)
        for field in ("gb_per_s", "tflops"):
            better = msgspec.structs.replace(usual, **{field: 2 * getattr(usual, field)})
            assert step_s(header, better, n_rows) <= own_s
        assert step_s(header, usual, n_rows + 8) >= own_s
    assert 0 < active_weights(header) < 1e9


def test_no_band_is_narrower_than_the_least() -> None:
    for efficiency in ALL.values():
        slower, faster = band(efficiency)
        assert slower >= 1 / (1 - LEAST_BAND)
        assert faster <= 1 / (1 + LEAST_BAND)


def test_a_faster_machine_carries_more(header: Header) -> None:
    search = Search(alike(200, 20, 60), Limits())
    rates = [search.carries(estimate_of(header, name, Settings()).setup).rate_per_s for name in ("l4", "h100-sxm")]
    assert rates[0] < rates[1]


def test_what_does_not_fit_is_said(header: Header, monkeypatch: pytest.MonkeyPatch) -> None:
    small = msgspec.structs.replace(device("l4"), memory_gb=0.3)
    monkeypatch.setattr("localrun.plan.roofline.machines", lambda: {"l4": small})
    with pytest.raises(CannotFit, match=r"too many for l4 with 0\.3 GB"):
        estimate_of(header, "l4", Settings())


def test_several_gpus_add_up_their_memory(tmp_path: Path) -> None:
    """70B in Q4_K_M is 42.5 GB: too much for 24, not for 48."""
    large = header_of("Llama 3 70B", "Q4_K", tmp_path)
    with pytest.raises(CannotFit, match=r"too many for rtx-4090 with 24 GB"):
        estimate_of(large, "rtx-4090", Settings())
    assert estimate_of(large, "rtx-4090x2", Settings()).setup.layout.n_gpu_layers == 81


def test_a_step_of_several_gpus(tmp_path: Path) -> None:
    """By layers the same bytes are read one after the other, and 8,192 floats go over one link of 32 GB/s; by tensors
    half is read by each, and in 80 layers they meet twice, each time with half of the two rounds of a ring."""
    large = header_of("Llama 3 70B", "Q4_K", tmp_path)
    alone_s, layers_s, tensors_s = (
        step_s(large, device(name, split), 1)
        for name, split in (("rtx-4090", "layer"), ("rtx-4090x2", "layer"), ("rtx-4090x2", "tensor"))
    )
    row_s = 8192 * 4 / 32e9
    assert layers_s - alone_s == pytest.approx(row_s + 3e-5)
    launch_s = ALL["cuda"].launch_s
    assert tensors_s - launch_s == pytest.approx((alone_s - launch_s) / 2 + 160 * (row_s + 3e-5))
    assert device("h100-sxmx4", "tensor").exchange_s(80, 8192, 1) == pytest.approx(
        160 * (1.5 * 8192 * 4 / 450e9 + 1e-5)
    )


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("rtx4090x2", "no machine 'rtx4090'; did you mean 'rtx-4090'"),
        ("rtx-4090x0", "from 1 to 16"),
        ("rtx-4090x17", "from 1 to 16"),
        ("m4-maxx2", "has no link to another one"),
    ],
)
def test_what_cannot_stand_together_is_said(name: str, words: str) -> None:
    with pytest.raises(BadRequest, match=words):
        device(name)
