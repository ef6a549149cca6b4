"""A snapshot says what the jobs themselves saw; the Prometheus page parses, and agrees with what ran."""

from __future__ import annotations

import asyncio
import os
import time
from typing import Any

import msgspec
import psutil
import pytest
from msgspec.structs import replace
from prometheus_client.parser import text_string_to_metric_families

from localrun import wire
from localrun.errors import ModelNotFound
from localrun.server.engines.machine import MachineSampler
from localrun.server.jobs.job import JobRequest
from localrun.server.metering import telemetry
from localrun.server.runtime import Runtime
from localrun.snapshot import RequestState, Snapshot

SHARED = "a beginning that they share " * 5
HISTOGRAMS = (
    "localrun_time_to_first_token_seconds", "localrun_inter_token_seconds", "localrun_queue_seconds",
    "localrun_request_seconds", "localrun_request_prefill_tokens", "localrun_step_seconds",
    "localrun_model_load_seconds",
)  # fmt: skip


async def test_totals_are_the_sums_over_the_jobs(running: Any, generate: Any, submit: Any) -> None:
    async with running(slots=4) as runtime:
        asked = [(model, number) for model in ("alpha", "beta") for number in range(4)]
        answers = await asyncio.gather(
            *(generate(runtime, model, text=f"{SHARED}{number}", n_predict=10 + number) for model, number in asked)
        )
        answers.append(await generate(runtime, "alpha", text=SHARED + "0", n_predict=5))
        with pytest.raises(ModelNotFound):
            await generate(runtime, "nowhere")
        async with runtime.job(JobRequest(model="alpha", api="/test")) as job:
            await submit(job, n_predict=100_000)
            cancelled = await anext(job)
        snapshot = await runtime.telemetry.snapshot()
        usages = [answer[-1].usage for answer in answers]
        n_tokens = sum(len(delta.tokens) for answer in answers for delta in answer)
        aggregate = snapshot.aggregate
        assert aggregate.requests_total == len(answers) + 2
        assert (aggregate.failed_total, aggregate.cancelled_total) == (1, 1)
        assert aggregate.output_tokens_total >= n_tokens + len(cancelled.tokens)
        assert aggregate.output_tokens_total == sum(row.output_tokens for row in snapshot.requests)
        assert aggregate.prompt_tokens_total == sum(usage.n_prompt for usage in usages) + len("hello")
        assert aggregate.cached_tokens_total >= usages[-1].n_cached > 100
        assert aggregate.prefix_hit_rate == pytest.approx(aggregate.cached_tokens_total / aggregate.prompt_tokens_total)
        assert aggregate.ttft_s.count == len(answers) + 1
        assert aggregate.itl_s.count == aggregate.output_tokens_total - aggregate.ttft_s.count
        assert (aggregate.running, aggregate.queued, aggregate.loading) == (0, 0, 0)


async def test_rows_agree_with_what_the_jobs_received(running: Any, generate: Any) -> None:
    async with running() as runtime:
        began_s = time.monotonic()
        answer = await generate(runtime, n_predict=12)
        wall_s = time.monotonic() - began_s
        row = (await runtime.telemetry.snapshot()).requests[0]
        usage = answer[-1].usage
        assert (row.prompt_tokens, row.cached_tokens, row.output_tokens) == (
            usage.n_prompt,
            usage.n_cached,
            usage.n_output,
        )
        assert (row.state, row.finish_reason, row.computed_tokens) == (RequestState.DONE, "length", usage.n_prompt)
        assert 0 < row.ttft_s <= row.age_s <= wall_s


async def test_rates_of_running_streams(running: Any, submit: Any) -> None:
    async with running(step_ms=5) as runtime:

        async def stream() -> None:
            async with runtime.job(JobRequest(model="alpha", api="/test")) as job:
                await submit(job, n_predict=100_000)
                async for _ in job:
                    pass

        tasks = [asyncio.create_task(stream()) for _ in range(4)]
        snapshot, steps_s = await runtime.telemetry.snapshot(), list[float]()
        while not snapshot.requests or min(row.output_tokens for row in snapshot.requests) < 60:
            await asyncio.sleep(0.05)
            snapshot = await runtime.telemetry.snapshot()
            steps_s += [engine.step_s for engine in snapshot.engines if engine.step_s is not None]
        aggregate, engine = snapshot.aggregate, snapshot.engines[0]
        of_rows = sum(row.tokens_per_s for row in snapshot.requests if row.tokens_per_s is not None)
        assert aggregate.running == 4
        assert aggregate.decode_tokens_per_s == pytest.approx(of_rows, rel=0.25)
        assert aggregate.decode_tokens_per_s < 4 / 0.005 * 1.1
        assert {row.slot for row in snapshot.requests} == {0, 1, 2, 3}
        assert (engine.state, engine.slots, engine.slots_busy) == ("ready", 8, 4)
        assert engine.kv_cells == 4096
        assert engine.kv_cells_used > 4 * 60
        assert engine.rss_bytes is not None
        assert engine.rss_bytes > 1_000_000
        assert max(steps_s) >= 0.005, "one that comes after a late one is shorter"
        for task in tasks:
            task.cancel()


async def test_a_running_request_counts_in_the_share_of_cached_tokens(running: Any, generate: Any, submit: Any) -> None:
    async with running() as runtime:
        await generate(runtime, text=SHARED + "0", n_predict=5)
        async with runtime.job(JobRequest(model="alpha", api="/test")) as job:
            await submit(job, text=SHARED + "0", n_predict=100_000)
            await anext(job)
            snapshot = await runtime.telemetry.snapshot()
            ended, row = snapshot.requests
            n_prompt, n_cached = ended.prompt_tokens + row.prompt_tokens, ended.cached_tokens + row.cached_tokens
            assert row.cached_tokens > 100
            assert snapshot.aggregate.prefix_hit_rate == pytest.approx(n_cached / n_prompt)
            assert snapshot.aggregate.prompt_tokens_total == ended.prompt_tokens


async def test_an_idle_runtime_shows_the_machine_and_no_invented_numbers(running: Any) -> None:
    async with running() as runtime:
        snapshot = await runtime.telemetry.snapshot()
        assert snapshot.aggregate.prefix_hit_rate is None
        assert snapshot.aggregate.ttft_s.p50 is None
        assert snapshot.aggregate.decode_tokens_per_s == 0
        assert snapshot.system.memory_total_bytes == psutil.virtual_memory().total
        assert 0 < snapshot.system.memory_available_bytes <= snapshot.system.memory_total_bytes
        assert snapshot.system.daemon_rss_bytes > 1_000_000
        assert snapshot.system.cores >= 1


@pytest.fixture
def samplers(monkeypatch: pytest.MonkeyPatch) -> list[MachineSampler]:
    """Those that look at the machine for the snapshots."""
    made: list[MachineSampler] = []

    def make() -> MachineSampler:
        made.append(MachineSampler())
        return made[-1]

    monkeypatch.setattr(telemetry, "MachineSampler", make)
    return made


async def test_many_watchers_share_one_encoding_and_one_look_at_the_machine(
    running: Any, generate: Any, samplers: list[MachineSampler]
) -> None:
    async with running() as runtime:
        pages = await asyncio.gather(*(runtime.telemetry.encoded_snapshot(10.0) for _ in range(20)))
        again = await runtime.telemetry.encoded_snapshot(10.0)
        assert [sampler.n_samples for sampler in samplers] == [1]
        assert again in pages
        await generate(runtime, n_predict=2)
        fresh = msgspec.json.decode(await runtime.telemetry.encoded_snapshot(0.0), type=Snapshot)
        assert fresh.aggregate.requests_total == 1


async def test_nothing_is_sampled_when_nobody_looks(
    running: Any, generate: Any, samplers: list[MachineSampler]
) -> None:
    async with running() as runtime:
        await generate(runtime)
        assert [sampler.n_samples for sampler in samplers] == [0]


async def test_a_sample_is_renewed_after_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("localrun.server.engines.machine.SAMPLE_EVERY_S", 3600.0)
    sampler = MachineSampler()
    first = await sampler.sample([os.getpid(), 2**22 + 1])
    assert await sampler.sample([]) is first
    assert list(first.rss_by_pid) == [os.getpid()]
    monkeypatch.setattr("localrun.server.engines.machine.SAMPLE_EVERY_S", 0.0)
    assert await sampler.sample([]) is not first


async def test_an_engine_that_died_leaves_the_rates_and_is_counted(running: Any, generate: Any) -> None:
    async with running() as runtime:
        await generate(runtime, n_predict=50)
        link = runtime.supervisor.residents()[0].link
        os.kill(link.pid, 9)
        await asyncio.wait_for(runtime.supervisor.residents()[0].ended.wait(), 60)
        snapshot = await runtime.telemetry.snapshot()
        assert snapshot.engines == []
        assert snapshot.aggregate.decode_tokens_per_s == 0
        assert b'localrun_engine_deaths_total{model="alpha"} 1.0' in runtime.telemetry.metrics.page("")[0]


@pytest.mark.parametrize("kind", ["no_numbers", "unknown_token"])
async def test_what_llama_cpp_handed_back_and_could_not_be_used_is_counted(
    running: Any, submit: Any, kind: str
) -> None:
    async with running() as runtime:
        for code in (kind, "bad_request", kind):
            async with runtime.job(JobRequest(model="alpha", api="/test")) as job:
                await submit(job, n_predict=100_000)
                failed = wire.Delta(
                    1, wire.Phase.DONE, 5, 1, finish=wire.Finish.ERROR, error_code=code, error_message="no"
                )
                job.on_delta(failed, time.monotonic())
        labels = frozenset({("model", "alpha"), ("kind", kind)})
        counted = {
            name_and_labels: value
            for name_and_labels, value in _samples(runtime).items()
            if name_and_labels[0] == "localrun_unusable_results_total"
        }
        assert counted == {("localrun_unusable_results_total", labels): 2.0}


async def test_steps_of_an_unknown_engine_are_ignored(running: Any) -> None:
    async with running() as runtime:
        step = wire.Step(sent_at_s=0.0, deltas=[], stats=wire.StepStats(*[0] * 15))
        runtime.telemetry.engine_step(object(), step)
        assert (await runtime.telemetry.snapshot()).aggregate.decode_tokens_per_s == 0


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


async def test_what_the_background_computes_is_no_step(running: Any, generate: Any) -> None:
    """The engine tells of its rows with the step of before; their rate is over the time that they took."""
    async with running() as runtime:
        await generate(runtime, n_predict=2)
        [resident] = runtime.supervisor.residents()
        before = _samples(runtime)[_key("localrun_step_seconds_count", model="alpha")]
        stats, began_s = resident.link.stats, time.monotonic() + 10
        for n_batches in (1, 2):
            told = msgspec.structs.replace(
                stats, step_s=0.01, n_prefill_rows=500, background_s=0.5,
                prefill_tokens_total=stats.prefill_tokens_total + 500 * n_batches,
            )  # fmt: skip
            runtime.telemetry.engine_step(
                resident.link, wire.Step(sent_at_s=began_s + n_batches / 2, deltas=[], stats=told)
            )
        assert _samples(runtime)[_key("localrun_step_seconds_count", model="alpha")] == before
        assert runtime.telemetry._meters[resident.link].prefill.per_s(began_s + 1) == pytest.approx(1000)


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
        assert _samples(runtime)[_key("localrun_restored_tokens_total", model="alpha", tier="disk")] == 0
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


async def test_what_became_of_media_is_counted(running: Any, generate: Any) -> None:
    async with running() as runtime:
        await generate(runtime)
        (resident,) = runtime.supervisor.residents()
        for media in (wire.MediaCounts(1, 0, 256, 0.5), wire.MediaCounts(2, 3, 1280, 1.25, 4096)):
            stats = replace(resident.link.stats, media=media)
            runtime.telemetry.engine_step(resident.link, wire.Step(sent_at_s=0.0, deltas=[], stats=stats))
        samples = _samples(runtime)
        assert samples[_key("localrun_media_chunks_total", model="alpha", rows="encoded")] == 2
        assert samples[_key("localrun_media_chunks_total", model="alpha", rows="kept")] == 3
        assert samples[_key("localrun_media_tokens_total", model="alpha")] == 1280
        assert samples[_key("localrun_media_encode_seconds_total", model="alpha")] == 1.25
