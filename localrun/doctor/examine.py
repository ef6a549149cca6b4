"""All checks, in the order in which a person would ask. Findings come as they are found."""

from __future__ import annotations

import os
import platform
import sys
import time
from collections.abc import Iterator, Mapping

import msgspec

from localrun import __version__, config, kv_folders
from localrun.doctor import Finding, fail, ok, surroundings, warn
from localrun.doctor.gpu import cards, check_devices, check_gpu, compilers
from localrun.doctor.llama_build import ask_build, check_build, check_cpu, check_kernels, check_media
from localrun.doctor.stored_models import check_hub_cache, check_kv_cache, check_models
from localrun.doctor.surroundings import (
    check_network,
    check_packages,
    check_places,
    check_port,
    check_python,
    check_threads,
    own_requirements,
)
from localrun.hardware import kernels, processors, thread_choice
from localrun.hardware.memory import machine_memory
from localrun.models.storage.store import Store
from localrun.native_build.machine import Machine


class KnownState(msgspec.Struct, frozen=True, kw_only=True):
    """What the command line knows already: the settings, or why they are bad, and who answers at the port."""

    settings: config.Settings
    settings_problem: str = ""
    daemon_version: str | None = None
    port_problem: str = ""
    is_stopping: bool = False


def examine(seen: KnownState, *, is_deep: bool, environ: Mapping[str, str] = os.environ) -> Iterator[Finding]:
    """Every check. One that breaks is a finding itself, and the others go on."""
    for check in (_software, _settings, _daemon, _build, _machine, _files, _models, _network):
        try:
            yield from check(seen, is_deep, environ)
        except Exception as error:
            name = check.__name__.strip("_")
            yield fail(name, f"this check failed: {type(error).__name__}: {error}", "report it and quote this line")


def _software(seen: KnownState, is_deep: bool, environ: Mapping[str, str]) -> Iterator[Finding]:
    is_translated = sys.platform == "darwin" and processors.run_sysctl("sysctl.proc_translated") == "1"
    yield check_python(is_translated=is_translated)
    yield from check_packages(own_requirements())


def _settings(seen: KnownState, is_deep: bool, environ: Mapping[str, str]) -> Iterator[Finding]:
    path = config.folders(environ).config / "localrun.toml"
    if seen.settings_problem:
        yield fail("settings", seen.settings_problem, f"correct it in {path}, or in the variable named")
    else:
        yield ok(
            "settings", str(path) if path.is_file() else f"no file ({path}); defaults and environment variables apply"
        )
    for name, meant in config.slips(environ).items():
        yield warn("settings", f"{name} is no setting", f"set {meant} if that is meant")


def _daemon(seen: KnownState, is_deep: bool, environ: Mapping[str, str]) -> Iterator[Finding]:
    if seen.settings.port == 0:
        yield ok("daemon", "port 0 is set, so every daemon picks a free one")
        return
    yield check_port(
        seen.settings.host, seen.settings.port, own_version=__version__, daemon_version=seen.daemon_version,
        problem=seen.port_problem, is_stopping=seen.is_stopping,
    )  # fmt: skip


def _build(seen: KnownState, is_deep: bool, environ: Mapping[str, str]) -> Iterator[Finding]:
    report = ask_build()
    if isinstance(report, Finding):
        yield report
        for card in cards():
            yield warn("gpu", f"{card.name} was found", "fix llama.cpp first (see above), then run this again")
        return
    yield from check_build(report)
    if seen.settings.projectors == "on":
        yield check_media()
    yield from check_kernels(kernels.folder(config.folders(environ).cache), is_deep=is_deep)
    machine = Machine()
    yield check_cpu(report, machine.cpu_flags, machine=platform.machine())
    yield check_gpu(cards(), report, compilers=compilers(machine))
    yield from check_devices(report)


def _machine(seen: KnownState, is_deep: bool, environ: Mapping[str, str]) -> Iterator[Finding]:
    available_bytes, total_bytes = machine_memory()
    yield check_threads(
        processors.usable(), thread_choice.read(config.folders(environ).cache / thread_choice.FILE_NAME),
        wanted=seen.settings.threads,
    )  # fmt: skip
    yield surroundings.check_memory(available_bytes, total_bytes)
    models = config.models_folder(seen.settings, environ)
    yield surroundings.check_disk(models, surroundings.free_bytes(models))
    cache = config.folders(environ).cache
    yield from surroundings.check_cache_disk(
        cache, surroundings.free_bytes(cache), kv_limit_bytes=seen.settings.disk_cache_bytes,
        kv_used_bytes=sum(each.size_bytes for each in kv_folders.survey(kv_folders.kv_folder(cache))),
    )  # fmt: skip


def _files(seen: KnownState, is_deep: bool, environ: Mapping[str, str]) -> Iterator[Finding]:
    folders = config.folders(environ)
    names = ("data", "cache", "config", "state")
    places = {name: getattr(folders, name) for name in names}
    yield from check_places({**places, "models": config.models_folder(seen.settings, environ)})
    for folder in config.model_dirs(seen.settings):
        if not os.path.isdir(folder):  # `Path.is_dir` may raise before Python 3.14
            yield warn("folders", f"model_dirs names {folder}, which is not a folder", "correct LOCALRUN_MODEL_DIRS")


def _models(seen: KnownState, is_deep: bool, environ: Mapping[str, str]) -> Iterator[Finding]:
    store = Store.of(seen.settings, environ)
    yield from check_models(store, now_s=time.time(), is_deep=is_deep)
    root = kv_folders.kv_folder(config.folders(environ).cache)
    yield from check_kv_cache(kv_folders.survey(root), limit_bytes=seen.settings.disk_cache_bytes, root=root)
    yield check_hub_cache(store.hub_cache_folder)


def _network(seen: KnownState, is_deep: bool, environ: Mapping[str, str]) -> Iterator[Finding]:
    yield from check_network(environ)
