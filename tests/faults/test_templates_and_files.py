"""Faults 23 to 31: chat templates and model files, which come from anywhere."""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import sys
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import httpx2
import psutil
import pytest

from localrun.models.gguf.reader import read_header
from tests.daemon import Daemon, running_daemon
from tests.depth import DEPTH
from tests.faults import raw
from tests.faults.postcondition import unharmed
from tests.faults.test_requests import refusal
from tests.models.gguf.test_reader import FAULTS
from tests.models.handmade import (
    ARCHITECTURE,
    ARRAY,
    BOOL,
    ENTRIES,
    STRING,
    TYPE_F32,
    VALID,
    array,
    entry,
    file_bytes,
    tensor,
    text,
    u32,
    u64,
)
from tests.server.templates.test_worker import CHATML, GEMMA, LLAMA_3, MISTRAL
from tests.support.synthesis.synthesize import synthesize

MESSAGES = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    with running_daemon(LOCALRUN_TEMPLATE_TIMEOUT_S="1", LOCALRUN_TEMPLATE_OUTPUT_BYTES="1000000") as running:
        yield running


class Whole(NamedTuple):
    """A model that llama.cpp loads."""

    header: bytes
    data: bytes


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Whole:
    path = tmp_path_factory.mktemp("model") / "whole.gguf"
    synthesize("tiny", "F16", path)
    content, start = path.read_bytes(), read_header(path).data_offset
    return Whole(content[:start], content[start:])


def rendered(daemon: Daemon, template: str) -> httpx2.Response:
    """What a template makes of a prompt, without any model's answer to it."""
    body = {"model": "tiny", "prompt": "hello", "template": template, "stream": False, "_debug_render_only": True}
    return daemon.post("/api/generate", body)


def bad_template(daemon: Daemon, template: str) -> str:
    return refusal(rendered(daemon, template), status=422, code="bad_template")


def complete(daemon: Daemon, model: Path, **more: Any) -> httpx2.Response:
    return daemon.post("/v1/completions", {"model": str(model), "prompt": "hello", "max_tokens": 3} | more)


def chat(daemon: Daemon, model: Path) -> httpx2.Response:
    return daemon.post("/v1/chat/completions", {"model": str(model), "messages": MESSAGES, "max_tokens": 3})


def model_with(template: str | None) -> bytes:
    more = () if template is None else (entry("tokenizer.chat_template", STRING, text(template)),)
    return file_bytes((*ENTRIES, *more))


# --- templates ------------------------------------------------------------------------------------------------------


def test_fault_23_a_template_that_climbs_out_of_its_sandbox_reaches_nothing(daemon: Daemon, tmp_path: Path) -> None:
    sentinel = tmp_path / "reached"
    command = f"touch {sentinel}"
    templates = [
        f"{{{{ ''.__class__.__mro__[1].__subclasses__()[0]('{command}') }}}}",
        f"{{{{ cycler.__init__.__globals__.os.system('{command}') }}}}",
        f"{{{{ namespace.__init__.__globals__['os'].popen('{command}').read() }}}}",
        f"{{{{ (messages|attr('__class__')|attr('__mro__')) }}}}{{{{ '{command}' }}}}",
        f"{{{{ '{{0.__class__.__init__.__globals__[os]}}'.format(namespace) }}}}{{{{ '{command}' }}}}",
        f"{{{{ '%s'|format(''.__class__) }}}}{{{{ '{command}' }}}}",
        f"{{{{ raise_exception.__globals__.sys.modules.os.system('{command}') }}}}",
        f"{{{{ self.__init__.__globals__.__builtins__.open('{sentinel}', 'w') }}}}",
        f"{{% set x = messages.append.__self__.__class__ %}}{{{{ '{command}' }}}}",
        f"{{{{ joiner|attr('\\x5f\\x5finit\\x5f\\x5f') }}}}{{{{ '{command}' }}}}",
        f"{{{{ messages|map(attribute='__class__')|list }}}}{{{{ '{command}' }}}}",
        "{% include '/etc/passwd' %}",
        "{% import '/etc/passwd' as x %}",
        "{% extends '/etc/passwd' %}",
    ]
    with unharmed(daemon):
        for template in templates:
            assert "root:" not in bad_template(daemon, template)
        hostile = daemon.home / "hostile.gguf"
        hostile.write_bytes(model_with(templates[1]))
        refusal(chat(daemon, hostile), status=422, code="bad_template")
        assert not sentinel.exists()
        assert rendered(daemon, "{{ messages[0].content }}!").status_code == 200


def test_fault_24_a_template_without_end_is_stopped_and_the_daemon_answers_meanwhile(daemon: Daemon) -> None:
    loops = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    endless = {loops: "longer than 1 s", "{{ 10 ** (10 ** 10) }}": "longer than 1 s"}
    bounded = {
        "{{ 'x' * 10**10 }}": "memory",
        "{{ '%1000000000000d' % 1 }}": "",
        "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}": "too deeply",
        "{% for a in range(10**9) %}{% endfor %}": "Range too big",
        "{% for a in range(99999) %}{{ 'x' * 1000 }}{% endfor %}": "1000000 bytes",
        "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}": "",
        "x" * 2_000_000: "2000000 characters",
    }
    with unharmed(daemon):
        for template, why in bounded.items():
            assert why in bad_template(daemon, template)
        for template, why in endless.items():
            worker, n_answered = _worker(daemon), 0
            with ThreadPoolExecutor(1) as pool, httpx2.Client(base_url=daemon.url, trust_env=False) as http:
                stuck = pool.submit(bad_template, daemon, template)
                while not stuck.done():
                    assert http.get("/health").status_code == 200
                    n_answered += 1
            assert why in stuck.result()
            assert n_answered > 20, "in about a second"
            assert _worker(daemon) != worker, "it was killed"
            assert rendered(daemon, "{{ messages[0].content }}").status_code == 200


def _worker(daemon: Daemon) -> int:
    """The template worker's process."""
    children = psutil.Process(daemon.process.pid).children()
    return next((child.pid for child in children if "localrun.server.templates.worker" in child.cmdline()), 0)


def test_fault_25_a_template_that_refuses_says_why_and_one_that_is_missing_has_a_substitute(daemon: Daemon) -> None:
    model = daemon.home / "refuses.gguf"
    with unharmed(daemon):
        model.write_bytes(model_with("{{ raise_exception('Only a system message, please') }}"))
        assert refusal(chat(daemon, model)) == "Only a system message, please"
        assert refusal(rendered(daemon, "{{ raise_exception('no') }}")) == "no"
        assert "line 2" in bad_template(daemon, "\n{% for %}")
        model.write_bytes(model_with(None))
        assert chat(daemon, model).status_code == 200


FRAGMENTS = (
    "{{", "}}", "{%", "%}", "{#", "#}", "-%}", "{%- ", " if ", " else ", "endif", " for x in ", "endfor", "endmacro",
    "macro m(a)", "set ", "ns.", "namespace(x=0)", "loop.index0", "loop.previtem", "messages", "messages[1:]", "[-1]",
    "|tojson", "|trim", "|length", "|join", "|map(attribute='content')", "|selectattr('role')", "|sort", "|batch(0)",
    "raise_exception('x')", "strftime_now('%Y')", ".content", ".items()", ".split('')", " ~ ", " + 1", " * 99999",
    "(", ")", "'", '"', "\\", "\x00", "\ud7ff", "😀", "none", "range(9999)", "is defined", "not ", "**9", "//0",
    "{% break %}", "{% raw %}", "{% call m(1) %}", "{% generation %}", "{% do messages.append(1) %}", "\n", "  ",
)  # fmt: skip


def test_a_thousand_mutated_templates_make_a_prompt_or_a_clear_refusal(daemon: Daemon) -> None:
    drawn = random.Random(11)
    outcomes: Counter[int] = Counter()
    with unharmed(daemon):
        for _ in range(1000 if DEPTH > 1 else 150):
            template = _mutated(drawn, drawn.choice((CHATML, GEMMA, LLAMA_3, MISTRAL)))
            answer = rendered(daemon, template)
            outcomes[answer.status_code] += 1
            if answer.status_code == 200:
                assert "rendered_template" in answer.json()["_debug_info"]
            else:
                assert answer.status_code in (400, 422), template
                assert answer.json()["error"], template
        assert min(outcomes[200], outcomes[422]) > 0, "some still work, others do not"


def _mutated(drawn: random.Random, template: str) -> str:
    for _ in range(drawn.randint(1, 4)):
        start = drawn.randrange(len(template))
        end = min(len(template), start + drawn.randint(0, 30))
        match drawn.choice(("insert", "replace", "cut", "repeat", "move")):
            case "insert":
                template = template[:start] + drawn.choice(FRAGMENTS) + template[start:]
            case "replace":
                template = template[:start] + drawn.choice(FRAGMENTS) + template[end:]
            case "cut":
                template = (template[:start] + template[end:]) or "x"
            case "repeat":
                template = template[:end] + template[start:end] * drawn.randint(1, 3) + template[end:]
            case _:
                to = drawn.randrange(len(template))
                template = template[:to] + template[start:end] + template[to:]
    return template


# --- model files ----------------------------------------------------------------------------------------------------


def test_fault_26_every_damaged_header_is_refused_with_its_reason(daemon: Daemon) -> None:
    """The table of llama.cpp's own tests and more, by way of the API; a tensor without elements is refused, too."""
    model = daemon.home / "model.gguf"
    with unharmed(daemon):
        for fault, (content, reason) in FAULTS.items():
            model.write_bytes(content)
            for answer in (complete(daemon, model), daemon.post("/api/show", model=str(model))):
                message = refusal(answer, status=422, code="bad_model_file")
                # By name an adapter may be meant, so there is more to say about it.
                said = "is an adapter of a kind" if fault == "an adapter" else reason
                assert said.replace("model.bin", model.name) in message, fault
        model.write_bytes(VALID)
        assert complete(daemon, model).status_code == 200


def test_fault_27_a_file_that_ends_too_early_is_refused_and_nothing_of_the_memory_is_read(
    daemon: Daemon, whole: Whole
) -> None:
    model = daemon.home / "cut.gguf"
    with unharmed(daemon):
        model.write_bytes(b"".join(whole))
        for n_pages in range(len(b"".join(whole)) // 4096, -1, -1 if DEPTH > 1 else -16):
            os.truncate(model, n_pages * 4096)
            assert "truncated" in refusal(complete(daemon, model), status=422, code="bad_model_file")
        # What lies beyond the end of a file is not the model's: not to be loaded, copied or shown.
        for offset in (1 << 40, 4096, 32):
            beyond = file_bytes(tensors=(tensor("token_embd.weight", (64,), TYPE_F32, offset),))
            digest = "sha256:" + hashlib.sha256(beyond).hexdigest()
            assert daemon.http.post(f"/api/blobs/{digest}", content=beyond).status_code == 201
            created = daemon.post("/api/create", model="beyond", files={"m.gguf": digest}, stream=False)
            refusal(created, status=422, code="bad_model_file")
        assert not any(row["name"].startswith("beyond") for row in daemon.http.get("/api/tags").json()["models"])


def test_fault_28_sizes_that_only_a_header_claims_cost_no_memory(daemon: Daemon) -> None:
    claims = [
        entry("key", STRING, u64(1 << 40)),
        array("key", 10, 1 << 37, b""),
        array("key", STRING, 1 << 40, b""),
        array("tokenizer.ggml.tokens", STRING, 1 << 31, text("a") * 1000),
        entry("k", ARRAY, (u32(ARRAY) + u64(1)) * 10_000),
    ]
    model = daemon.home / "claims.gguf"
    with unharmed(daemon):
        before_bytes = raw.rss_bytes(daemon)
        for claim in claims:
            model.write_bytes(file_bytes((*ENTRIES, claim)))
            # A large file, of which nothing is there: no claim is beyond its end.
            for size_bytes in (model.stat().st_size, 1 << 42):
                os.truncate(model, size_bytes)
                refusal(complete(daemon, model), status=422, code="bad_model_file")
        model.unlink()
        assert raw.rss_bytes(daemon) - before_bytes < 64 * 1024 * 1024


def test_fault_29_a_hostile_vocabulary_is_refused_and_ends_no_engine(real_daemon: Daemon, whole: Whole) -> None:
    byte = ("the", "<0x-1>")
    adds_bos = (entry("tokenizer.ggml.add_bos_token", BOOL, b"\0"), entry("tokenizer.ggml.add_bos_token", BOOL, b"\1"))
    no_bos = ("tokenizer.ggml.bos_token_id", "tokenizer.ggml.bos_token_xx")
    # Kind of vocabulary, what else is wrong with it, a text, and what comes of it.
    models: list[tuple[str, list[tuple[Any, Any]], str, int]] = [
        ("plamo2", [byte], "hello", 422),
        ("none", [], "hello", 422),
        ("rwkv", [adds_bos, no_bos], "hello", 200),
        ("rwkv", [adds_bos, no_bos], "there is no token for é", 422),
        ("llama", [], "Hello world ä 1234", 422),
        ("llama", [byte], "hello", 422),
    ]
    model = Path()
    with unharmed(real_daemon):
        for kind, changes, prompt, status in models:
            kinds = [entry("tokenizer.ggml.model", STRING, text(each)) for each in ("gpt2", kind)]
            if kind != model.stem:
                model = real_daemon.home / f"{kind}.gguf"
                model.write_bytes(_changed(whole, [(kinds[0], kinds[1]), *changes]))
            answer = complete(real_daemon, model, prompt=prompt)
            assert answer.status_code == status, (kind, answer.text)


def _changed(whole: Whole, changes: list[tuple[Any, Any]]) -> bytes:
    """The model with other bytes in its header. Its name grows, so that the data keeps its alignment."""
    header = whole.header
    for change in changes:
        before, after = (part if isinstance(part, bytes) else text(part) for part in change)
        assert header.count(before) == 1
        header = header.replace(before, after)
    name = "synthetic tiny F16"
    padded = name + " " * (-(len(header) - len(whole.header)) % 32)
    return header.replace(text(name), text(padded)) + whole.data


def test_fault_30_what_cannot_run_here_is_refused_before_it_is_loaded(daemon: Daemon) -> None:
    unknown = file_bytes((entry("general.architecture", STRING, text("nonesuch")), *ENTRIES[1:]))
    renamed = [each.replace(b"llama.", b"clip.") for each in ENTRIES]
    n_wide = 1 << 20
    huge = file_bytes(tensors=(tensor("token_embd.weight", (n_wide, n_wide), TYPE_F32, 0),), data=b"")
    model = daemon.home / "cannot.gguf"
    with unharmed(daemon):
        for content in (unknown, file_bytes((ARCHITECTURE.replace(b"llama", b"clip"), *renamed[1:]))):
            model.write_bytes(content)
            refusal(complete(daemon, model), status=422, code="bad_model_file")
        model.write_bytes(huge)
        os.truncate(model, len(huge) + 4 * n_wide * n_wide)
        said = refusal(complete(daemon, model), status=507, code="cannot_fit")
        assert "weights 4398.0 GB" in said
        assert "is available" in said
        model.unlink()
        assert not [row for row in daemon.http.get("/localrun/v1/snapshot").json()["engines"] if row["model"] != "tiny"]


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="elsewhere a mapped file cannot be cut")
@pytest.mark.parametrize("change", ["cut", "replaced"])
def test_fault_31_a_file_that_changes_under_its_engine_harms_no_other_model(
    real_daemon: Daemon, whole: Whole, change: str
) -> None:
    model = real_daemon.home / "changes.gguf"
    model.write_bytes(b"".join(whole))
    body: dict[str, Any] = {"model": str(model), "prompt": "Tell me", "stream": True, "ignore_eos": True}
    body["max_tokens"] = 1500 if change == "cut" else 200
    with unharmed(real_daemon):
        assert complete(real_daemon, Path("tiny")).status_code == 200
        tiny = _pid(real_daemon, "tiny")
        with real_daemon.http.stream("POST", "/v1/completions", json=body) as response:
            lines = (line for line in response.iter_lines() if line)
            next(lines)
            if change == "cut":
                os.truncate(model, 4096)
            else:
                shutil.copy(model, model.with_suffix(".new"))
                model.with_suffix(".new").replace(model)
            last = list(lines)[-1]
        if change == "cut":
            # Its engine has died (SIGBUS), and what is left of the file loads no other one.
            assert "truncated" in json.loads(last.removeprefix("data: "))["error"]["message"]
            assert "truncated" in refusal(complete(real_daemon, model), status=422, code="bad_model_file")
        else:
            assert last == "data: [DONE]", "the engine has the old file"
            assert complete(real_daemon, model).status_code == 200
        assert _pid(real_daemon, "tiny") == tiny


def _pid(daemon: Daemon, model: str) -> int:
    engines = daemon.http.get("/localrun/v1/snapshot").json()["engines"]
    return int(next(row["pid"] for row in engines if row["model"] == model))
