"""The Prometheus page parses, has histograms, and agrees with what ran."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace
from prometheus_client.parser import text_string_to_metric_families

from localrun import wire
from localrun.errors import ModelNotFound
from localrun.server.runtime import Runtime

HISTOGRAMS = (
    "localrun_time_to_first_token_seconds", "localrun_inter_token_seconds", "localrun_queue_seconds",
    "localrun_request_seconds", "localrun_request_prefill_tokens", "localrun_step_seconds",
    "localrun_model_load_seconds",
)  # fmt: skip


def _samples(runtime: Runtime) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    page, content_type = runtime.telemetry.metrics.page("")
    assert content_type.startswith("text/plain")
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(page.decode())
        for sample in family.samples
    }


def _key(name: str, **labels: str) -> tuple[str, frozenset[tuple[str, str]]]:
    return name, frozenset(labels.items())


async def test_histograms_and_counters_agree_with_what_ran(running: Any, generate: Any) -> None:
    async with running() as runtime:
        usages = [(await generate(runtime, text="the same prompt " * 10, n_predict=10))[-1].usage for _ in range(2)]
        n_cached = sum(usage.n_cached for usage in usages)
        with pytest.raises(ModelNotFound):
            await generate(runtime, "made-up")
        assert n_cached > 100
        samples = _samples(runtime)
        for name in HISTOGRAMS:
            buckets = [key for key in samples if key[0] == f"{name}_bucket"]
            assert len(buckets) > 5, name
        assert samples[_key("localrun_time_to_first_token_seconds_count", model="alpha")] == 2
        assert samples[_key("localrun_inter_token_seconds_count", model="alpha")] == 18
        assert samples[_key("localrun_queue_seconds_count", model="alpha")] == 2
        assert samples[_key("localrun_request_seconds_count", model="alpha", api="/test")] == 2
        assert samples[_key("localrun_model_load_seconds_count", model="alpha")] == 1
        assert samples[_key("localrun_request_prefill_tokens_sum", model="alpha")] == 320 - n_cached
        assert samples[_key("localrun_prompt_tokens_total", model="alpha")] == 320
        assert samples[_key("localrun_cached_tokens_total", model="alpha")] == n_cached
        assert samples[_key("localrun_output_tokens_total", model="alpha")] == 20
        assert samples[_key("localrun_requests_total", model="alpha", api="/test", outcome="done")] == 2
        assert samples[_key("localrun_requests_total", model="", api="/test", outcome="failed")] == 1
        assert samples[_key("localrun_step_seconds_count", model="alpha")] >= 20


async def test_gauges_are_those_of_the_moment(running: Any, generate: Any) -> None:
    async with running() as runtime:
        assert _samples(runtime)[_key("localrun_models_loaded")] == 0
        await generate(runtime)
        samples = _samples(runtime)
        assert samples[_key("localrun_models_loaded")] == 1
        assert samples[_key("localrun_kv_cells", model="alpha")] == 4096
        assert _key("localrun_kv_cells_used", model="alpha") in samples
        assert samples[_key("localrun_requests_running", model="alpha")] == 0
        assert samples[_key("localrun_requests_queued", model="alpha")] == 0
        assert samples[_key("localrun_requests_loading")] == 0
        assert _key("localrun_ram_cache_bytes", model="alpha") in samples
        await runtime.supervisor.unload("alpha")
        samples = _samples(runtime)
        assert samples[_key("localrun_models_loaded")] == 0
        assert _key("localrun_kv_cells", model="alpha") not in samples


async def test_restored_tokens_are_counted_by_tier(running: Any, generate: Any) -> None:
    async with running() as runtime:
        await generate(runtime)
        (resident,) = runtime.supervisor.residents()
        link = resident.link
        for ram, disk in ((5, 0), (5, 7), (9, 8)):
            stats = replace(link.stats, ram_restored_tokens_total=ram, disk_restored_tokens_total=disk, disk_entries=2)
            link.stats = stats
            runtime.telemetry.engine_step(link, wire.Step(sent_at_s=0.0, deltas=[], stats=stats))
        samples = _samples(runtime)
        assert samples[_key("localrun_restored_tokens_total", model="alpha", tier="ram")] == 9
        assert samples[_key("localrun_restored_tokens_total", model="alpha", tier="disk")] == 8
        assert samples[_key("localrun_disk_cache_entries", model="alpha")] == 2
        row = runtime.supervisor.loaded()[0]
        assert (row.ram_restored_tokens_total, row.disk_restored_tokens_total, row.disk_entries) == (9, 8, 2)


async def test_names_that_clients_made_up_are_not_labels(running: Any, generate: Any) -> None:
    async with running() as runtime:
        for number in range(3):
            with pytest.raises(ModelNotFound):
                await generate(runtime, f"made-up-{number}")
        assert b"made-up" not in runtime.telemetry.metrics.page("")[0]


async def test_two_runtimes_do_not_share_counters(running: Any, generate: Any) -> None:
    async with running() as one, running() as other:
        await generate(one)
        assert _key("localrun_requests_total", model="alpha", api="/test", outcome="done") in _samples(one)
        assert _key("localrun_requests_total", model="alpha", api="/test", outcome="done") not in _samples(other)


async def test_openmetrics_for_those_who_ask_for_it(running: Any) -> None:
    async with running() as runtime:
        page, content_type = runtime.telemetry.metrics.page("application/openmetrics-text; version=1.0.0")
        assert content_type.startswith("application/openmetrics-text")
        assert page.endswith(b"# EOF\n")
