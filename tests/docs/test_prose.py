"""What the pages say in prose is what the program has: names in code marks, and numbers."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest

from localrun import config
from localrun.access import keys
from localrun.cli import daemon as background
from localrun.engine.schedule import policy
from localrun.models import fit
from localrun.server import app, routing
from localrun.server.batches import lines, routes, runner, service
from localrun.server.batches.files import MAX_FILE_BYTES
from localrun.server.engines import room
from localrun.server.http import access, connection, limits
from localrun.server.media import headers, sources
from localrun.server.openai.responses import kept
from localrun.server.openapi.operations import document
from localrun.server.prompting import ask
from localrun.tools import servers, toolbox
from localrun.tools.servers import MAX_MESSAGE_BYTES
from localrun.tui.keys import KEYS

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "localrun" / "docs"
GENERATED = {"cli.md", "settings.md", "metrics.md", "modelfile.md"}
# What the table of editors says of other programs is theirs; their clients' tests know it.
PAGES = [
    ROOT / "README.md",
    *sorted(page for page in DOCS.glob("*.md") if page.name not in GENERATED | {"editors.md"}),
]
SETTINGS = config.Settings()
# Words in code marks that are no name of the program: examples, and names of other programs and systems.
OTHERS = {
    *("NAME", "KEY", "MODEL", "owner", "repo", "registry.ollama.ai", "studio", "studio.local", "chat.example.org"),
    *("my-model", "my-model.gguf", "some-model-Q4_K_M.gguf", "mmproj-model-f32.gguf", "mmproj-NAME-F16.gguf"),
    *("mmproj-F16.gguf", "mmproj.gguf", "smollm2+style", "revision", "file.gguf", "QUANT", "AB", "CD", "photo.jpg"),
    *("signin", "lms", "load", "unload", "--estimate-only", "get", "log", "stream", "journalctl", "systemctl", "ssh"),
    *("NODE_EXTRA_CA_CERTS", "SSL_CERT_FILE", "LOGNAME", "libggml-cuda.so", "Application", "Support", "Caches"),
    *(
        "0.2s",
        "qwen3:30b-a3b-q8_0",
        "PORT",
        "daemon-PORT.log",
        "local-key-PORT",
        "batches.unreadable-1",
        "chats.damaged-1.db",
    ),
}


@cache
def known() -> frozenset[str]:
    """Every word of the program's text, and the spellings that it makes of settings and headers."""
    paths = [
        path for folder in ("localrun", "models", "tui", "packaging", "tests") for path in (ROOT / folder).rglob("*")
    ]
    files = [
        path
        for path in paths
        if path.suffix in (".py", ".js", ".toml", ".sh", ".json") and ROOT / "tests" not in path.parents
    ]
    files += [ROOT / "Makefile", ROOT / "pyproject.toml", ROOT / "packaging" / "Dockerfile"]
    words = set(re.findall(r"[a-z0-9_-]+", "\n".join(path.read_text(encoding="utf-8") for path in files).lower()))
    words |= {field.replace("_", "-") for field in config.FIELDS}
    words |= {f"x-ratelimit-{each}" for each in ("limit-requests", "remaining", "reset")}
    return frozenset(words | {word for path in paths for word in (path.name.lower(), path.stem.lower())})


def spans(page: Path) -> list[str]:
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    return [" ".join(each.split()) for each in re.findall(r"(?<!`)`([^`]+)`(?!`)", text)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_name_in_code_marks_is_one_of_the_program(page: Path):
    unknown = []
    for span in spans(page):
        for other in OTHERS:
            span = re.sub(rf"(?<![\w.-]){re.escape(other)}(?![\w-])", " ", span)
        for word in re.findall(r"[A-Za-z0-9_-]+", span):
            name = word.lower().strip("-_")
            if not name.isdigit() and name not in known() and word.lower() not in known():
                unknown.append(f"{word} in `{span}`")
    assert unknown == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_path_in_code_marks_is_a_route(page: Path):
    routes = set(document()["paths"]) | {"/api", "/v1", "/web", "/localrun/v1"}
    for span in spans(page):
        if re.fullmatch(r"/(?:api|v1|localrun|infill|docs|web)[a-z0-9_/.{}-]*", span) and span != "/api/v1":
            there = span.rstrip("/")
            assert there in routes or any(route.startswith(f"{there}/") for route in routes), span


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_number_beside_a_setting_is_its_default(page: Path):
    text = page.read_text(encoding="utf-8")
    beside = re.findall(r"`(\w+)` \(([\d,.]+)\)", text) + re.findall(r"\(`(\w+)`, ([\d,.]+)\)", text)
    for name, number in beside:
        if name in config.FIELDS:
            assert float(number.replace(",", "")) == getattr(SETTINGS, name), name


def _text(name: str) -> str:
    return (DOCS / name).read_text(encoding="utf-8")


def _mb(n_bytes: float) -> str:
    """As the pages count: in decimal megabytes."""
    return f"{n_bytes / 1e6:.3g} MB" if n_bytes < 1e9 else f"{n_bytes / 1e9:.3g} GB"


def _ms(mode: str) -> str:
    return f"| `{mode}` | {config.latency_target_s(mode) * 1000:.0f} ms |"


# A piece of a page, with the numbers that the program has.
SAID = {
    "serving.md": [
        *map(_ms, ("interactive", "balanced", "throughput")),
        f"After {policy.AGING_S:.0f} s without service a request rises by one lane, after {policy.STARVED_S:.0f} s",
        f"at most {2 * policy.AGING_S / policy.PREEMPTION_AGE_S:.0f} times",
        f"at most {fit.DEFAULT_POOL_CELLS:,} cells in all",
        f"| `q8_0` | {34 / 64:.2f} |",
        f"| `q4_0` | {18 / 64:.2f} |",
        f"up to {routing.PROBE_TOKENS} tokens that nobody sees",
        f"{lines.MAX_LINES:,} lines and {_mb(lines.MAX_INPUT_BYTES)}, one model; {_mb(MAX_FILE_BYTES)} for other files",
        f"{lines.MAX_REQUESTS:,} requests in one body",
        f"from `1s` to `{routes._LONGEST_S // 86_400}d`",
        f"after {service.WINDOW_S / 3600:.0f} hours",
        f"inputs {service.INPUTS_KEPT_S // 86_400} days",
        f"| {runner.RESULTS_KEPT_S / 86_400:.0f} days |",
    ],
    "models.md": [
        f"up to {config.MAX_ADAPTERS} of them",
        f"(-{config.MAX_SCALE:.0f} to {config.MAX_SCALE:.0f})",
        f"while they are among the last {config.MAX_ADAPTERS}",
    ],
    "sharing.md": [
        f"{connection.MAX_CONNECTIONS} of this machine, {connection.MAX_CONNECTIONS} of others and "
        f"{connection.MAX_CONNECTIONS // 2} of one address",
        f"uploads at once ({limits.MAX_UPLOADS})",
        f"{_mb(limits.MAX_TEXT_BYTES)} for bodies that cannot have pictures",
        f"{limits.MAX_BODIES} times".replace("8", "eight"),
        f"messages of a conversation ({ask.MAX_MESSAGES:,})",
        f"responses ({kept.MAX_RESPONSES:,} and {_mb(kept.MAX_BYTES)})",
        f"LOCALRUN_API_KEY={keys.PREFIX}",
    ],
    "media-and-tools.md": [
        f"{headers.MAX_PIXELS // 1_000_000} million pixels, {headers.MAX_SIDE:,} on a side",
        f"{headers.MAX_SOUND_S // 60} minutes;",
        f"at least {headers.MIN_SAMPLES} samples",
        f"a body of {_mb(SETTINGS.max_body_bytes)} (`max_body_bytes`)",
        f"up to {_mb(sources.MAX_BYTES)} in {sources.TIMEOUT_S:.0f} seconds",
        f"After {toolbox.MAX_ROUNDS} rounds",
        f"beyond the {servers.MAX_TOOLS}th of a server",
        f"more than {servers.MAX_SCHEMA_CHARS:,} characters of parameters",
        f"Messages beyond {_mb(MAX_MESSAGE_BYTES)}",
    ],
}


@pytest.mark.parametrize(("name", "said"), [(name, said) for name, each in SAID.items() for said in each])
def test_a_number_is_the_programs(name: str, said: str):
    assert said in " ".join(_text(name).split())


def test_numbers_in_words_are_the_programs():
    assert (access.FAILURES, access.FAILURE_EVERY_S) == (10, 6.0)
    assert "After ten wrong or missing keys" in _text("sharing.md")
    assert app._HANDSHAKE_TIMEOUT_S == room.DRAIN_AFTER_S == 10
    assert "closed after ten seconds" in _text("sharing.md")
    assert "ten seconds to become idle" in _text("models.md")
    assert background.IDLE_EXIT_S == 1800
    assert runner.QUIET_S == 60


def test_each_word_that_is_no_name_of_the_program_is_on_a_page():
    texts = " ".join(span for page in PAGES for span in spans(page))
    assert [word for word in OTHERS if word not in texts] == []


def test_the_keys_of_each_screen_are_in_its_row():
    rows = dict(re.findall(r"^\| (everywhere|chat|monitor|models|logs) \| (.*) \|$", _text("chat.md"), re.MULTILINE))
    for name, key in KEYS.items():
        screen = name.partition(".")[0].replace("app", "everywhere")
        for each in key.keys.split(",") if screen in rows else ():
            shown = {"slash": "`/`", "escape": "Esc", "end": "End"}.get(each, each)
            shown = f"`{each}`" if len(each) == 1 else shown.replace("ctrl+", "Ctrl-")
            assert re.search(rf"(?i)(?<!\w){re.escape(shown)}(?!\w)", rows[screen]), f"{name}: {shown}"
    assert set(rows) == {"everywhere", "chat", "monitor", "models", "logs"}
