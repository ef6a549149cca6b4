"""What each operation says of each kind of name, to the daemon's admin and to a key that may use some models."""

from __future__ import annotations

import base64
import re
import shutil
from collections.abc import Iterable
from itertools import product
from pathlib import Path
from typing import Any

import httpx2
import pytest

from localrun.access.keys import KeyFile
from localrun.config import Settings, Tier
from localrun.models import builtin
from localrun.server import app
from localrun.server.runtime import Runtime
from tests.fakes import ENGINE
from tests.lora_file import write_lora
from tests.server.media.making import png

# The key may use `tiny`, `fox` and `style`. It lists the tier `closed` as well, but may not use one of its models.
NAMES = {
    "unknown": "nowhere",
    "hidden": "secret",
    "tier": "Shared:latest",
    "hidden tier": "closed",
    "broken tier": "gone",
    "adapter": "tiny+style",
    "hidden adapter": "tiny+covert",
    "tier+adapter": "shared+style",
    "hidden tier+adapter": "closed+style",
    "bad scale": "secret+style=x",
    "hosted": "gpt-4o",
    "empty": "",
    "none": None,
}
TIERS = (
    Tier(name="shared", small="tiny", large="fox", file=Path("localrun.toml")),
    Tier(name="closed", small="tiny", large="secret", file=Path("localrun.toml")),
    Tier(name="gone", small="tiny", large="nothing", file=Path("localrun.toml")),
)
SEEN = ("tiny", "fox", "style", "nowhere", "gpt-4o", "made", "shared", "closed", "gone", "nothing")

PICTURE = base64.b64encode(png()).decode()
URI = "data:image/png;base64," + PICTURE
HELLO = [{"role": "user", "content": "hi"}]
IMAGE = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": URI}}]}]
TWO = {"options": {"num_predict": 2}, "stream": False}
# A route, which part of it has the name if that is not `model`, and what else is sent; of a GET the query.
OPERATIONS: dict[str, dict[str, Any]] = {
    "POST /api/chat": TWO | {"messages": HELLO},
    "POST /api/chat (image)": TWO | {"messages": [HELLO[0] | {"images": [PICTURE]}]},
    "POST /api/chat (load)": {},
    "POST /api/chat (unload)": {"keep_alive": 0},
    "POST /api/generate": TWO | {"prompt": "hi"},
    "POST /api/generate (suffix)": TWO | {"prompt": "hi", "suffix": "x"},
    "POST /api/generate (image)": TWO | {"prompt": "hi", "images": [PICTURE]},
    "POST /api/generate (context)": TWO | {"prompt": "hi", "context": [1]},
    "POST /api/generate (load)": {},
    "POST /api/generate (unload)": {"keep_alive": 0},
    "POST /api/embed": {"input": "hi"},
    "POST /api/embeddings": {"prompt": "hi"},
    "POST /api/show": {},
    "POST /api/pull": {"stream": False},
    "POST /api/copy source": {"destination": "tiny"},
    "POST /api/copy destination": {"source": "tiny"},
    "DELETE /api/delete": {},
    "POST /api/create": {"from": "tiny", "stream": False},
    "POST /v1/chat/completions": {"messages": HELLO, "max_tokens": 2},
    "POST /v1/chat/completions (image)": {"messages": IMAGE, "max_tokens": 2},
    "POST /v1/chat/completions (lora)": {"messages": HELLO, "max_tokens": 2, "lora": [{"id": "style", "scale": 1}]},
    "POST /v1/chat/completions draft": {"model": "tiny", "messages": HELLO, "max_tokens": 2},
    "POST /v1/chat/completions/input_tokens": {"messages": HELLO},
    "POST /v1/completions": {"prompt": "hi", "max_tokens": 2},
    "POST /v1/completions (tokens)": {"prompt": [1, 2], "max_tokens": 2},
    "POST /v1/completions (suffix)": {"prompt": "hi", "suffix": "x", "max_tokens": 2},
    "POST /v1/fim/completions": {"prompt": "hi", "suffix": "x", "max_tokens": 2},
    "POST /v1/responses": {"input": "hi", "max_output_tokens": 2},
    "POST /v1/responses (image)": {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": URI}]}]},
    "POST /v1/responses/input_tokens": {"input": "hi"},
    "POST /v1/embeddings": {"input": "hi"},
    "POST /v1/embeddings (image)": {"messages": IMAGE},
    "POST /v1/rerank": {"query": "hi", "documents": ["a"]},
    "GET /v1/models/": {},
    "POST /v1/messages": {"messages": HELLO, "max_tokens": 2},
    "POST /v1/messages/count_tokens": {"messages": HELLO},
    "POST /completion": {"prompt": "hi", "n_predict": 2},
    "POST /completion (tokens)": {"prompt": [1, 2], "n_predict": 2},
    "POST /completion (image)": {"prompt": {"prompt_string": "<__media__>", "multimodal_data": [PICTURE]}},
    "POST /infill": {"input_prefix": "a", "input_suffix": "b", "n_predict": 2},
    "POST /embedding": {"content": "hi"},
    "POST /tokenize": {"content": "hi"},
    "POST /detokenize": {"tokens": [65]},
    "POST /apply-template": {"messages": HELLO},
    "POST /apply-template (image)": {"messages": IMAGE},
    "GET /tokenizer_info": {},
    "GET /props": {},
    "GET /slots": {},
    "GET /lora-adapters": {},
    "POST /models/load": {},
    "POST /models/unload": {},
    "POST /api/v0/chat/completions": {"messages": HELLO, "max_tokens": 2},
    "POST /api/v0/completions": {"prompt": "hi", "max_tokens": 2},
    "POST /api/v0/embeddings": {"input": "hi"},
    "GET /api/v0/models/": {},
    "GET /localrun/v1/fit": {},
    "GET /localrun/v1/fit draft": {"model": "tiny"},
    "DELETE /localrun/v1/pulls": {},
    "DELETE /localrun/v1/cache": {},
    # Last, for it makes a model.
    "POST /api/create from": {"model": "made", "stream": False},
}
# Below operations that answer alike: what they tell the admin of each kind of name, and then the key.
ANSWERS = """
POST /api/chat
POST /api/generate
  404 200=secret 200=tiny 200=tiny 404:not_found 200=tiny+style 200=tiny+covert 400 400 400 404 400 400
  404 404 200=tiny 404 404:not_found 200=tiny+style 404 400 404 400 404 404 400
POST /api/chat (image)
POST /api/generate (suffix)
POST /api/generate (image)
  404 400 400 400 404:not_found 400 400 400 400 400 404 400 400
  404 404 400 404 404:not_found 400 404 400 404 400 404 404 400
POST /api/chat (load)
POST /api/generate (load)
  404 200=secret 200=Shared:latest 200=closed 404:not_found 200=tiny+style 200=tiny+covert 400 400 400 404 400 400
  404 404 200=Shared:latest 404 404:not_found 200=tiny+style 404 400 404 400 404 404 400
POST /api/chat (unload)
POST /api/generate (unload)
  404 200=secret 200=Shared:latest 200=closed 404 200=tiny+style 200=tiny+covert 400 400 400 404 400 400
  404 404 200=Shared:latest 404 404 200=tiny+style 404 400 404 400 404 404 400
POST /api/generate (context)
  404 200=secret 400 400 400 200=tiny+style 200=tiny+covert 400 400 400 404 400 400
  404 404 400 404 400 200=tiny+style 404 400 404 400 404 404 400
POST /api/embed
  404 200=secret 400 400 400 400 400 400 400 400 404 400 400
  404 404 400 404 400 400 404 400 404 404 404 404 400
POST /api/embeddings
  404 200 400 400 400 400 400 400 400 400 404 400 400
  404 404 400 404 400 400 404 400 404 404 404 404 400
POST /api/show
  404 200 200 200 404:not_found 200 200 400 400 400 404 400 400
  404 404 200 404 404:not_found 200 404 400 404 400 404 400 400
POST /api/pull
  200 400 400 400 200 200 404 404 400 400 400
  404 400 404 400 200 404 404 404 400 400 400
POST /api/copy source
  404 400 400 400 400 400 400 400 400 400 404 400 400
  404 404 400 404 400 400 404 400 404 400 404 404 400
POST /api/copy destination
  409:conflict 400 400 400 400 400 400 400 400 400 400
  404 400 404 400 400 404 400 404 400 404 400
DELETE /api/delete
  404 400 400 400 400 400 400 400 400 404 400 400
  404 400 404 400 400 404 400 404 400 404 400 400
POST /api/create
  409:conflict 400 400 400 400 400 400 400 400 400 400
  404 400 404 400 400 404 400 404 400 400 400
POST /api/create from
  200 400 400 400 400 400 400 400 400 400 400
  404 400 404 400 400 404 400 400 404 400 400
POST /v1/chat/completions
POST /v1/completions
POST /v1/responses
POST /v1/messages
POST /completion
POST /api/v0/chat/completions
POST /api/v0/completions
  404 200=secret 200=tiny 200=tiny 404:not_found 200=tiny+style 200=tiny+covert 400 400 400 404 200=tiny 200=tiny
  404 404 200=tiny 404 404:not_found 200=tiny+style 404 400 404 400 404 200=tiny 200=tiny
POST /v1/chat/completions (image)
  404 400/messages 400/messages 400/messages 404:not_found 400/messages 400/messages 400 400 400 404 400/messages
  400/messages
  404 404 400/messages 404 404:not_found 400/messages 404 400 404 400 404 400/messages 400/messages
POST /v1/chat/completions (lora)
  404 200=secret 400/lora 400/lora 400/lora 200=tiny+style 200=tiny+covert 400 400 400 404 200=tiny 200=tiny
  404 404 400/lora 404 400/lora 200=tiny+style 404 400 404 400 404 200=tiny 200=tiny
POST /v1/chat/completions draft
GET /localrun/v1/fit draft
  400/draft 200=tiny 400/draft 400/draft 400/draft 400/draft 400/draft 400/draft 400/draft 400/draft 400/draft
  200=tiny 200=tiny
  400/draft 404 400/draft 400/draft 400/draft 400/draft 404 400/draft 400/draft 404 400/draft 200=tiny 200=tiny
POST /v1/chat/completions/input_tokens
POST /v1/responses/input_tokens
GET /v1/models/
POST /v1/messages/count_tokens
GET /api/v0/models/
  404 200 200 200 404:not_found 200 200 400 400 400 404 200 200
  404 404 200 404 404:not_found 200 404 400 404 400 404 200 200
POST /v1/completions (tokens)
POST /completion (tokens)
  404 200=secret 400/prompt 400/prompt 400/prompt 200=tiny+style 200=tiny+covert 400 400 400 404 200=tiny 200=tiny
  404 404 400/prompt 404 400/prompt 200=tiny+style 404 400 404 400 404 200=tiny 200=tiny
POST /v1/completions (suffix)
  404 400/suffix 400/suffix 400/suffix 404:not_found 400/suffix 400/suffix 400 400 400 404 400/suffix 400/suffix
  404 404 400/suffix 404 404:not_found 400/suffix 404 400 404 400 404 400/suffix 400/suffix
POST /v1/fim/completions
POST /infill
  404 400 400 400 404:not_found 400 400 400 400 400 404 400 400
  404 404 400 404 404:not_found 400 404 400 404 400 404 400 400
POST /v1/responses (image)
  404 400/input 400/input 400/input 404:not_found 400/input 400/input 400 400 400 404 400/input 400/input
  404 404 400/input 404 404:not_found 400/input 404 400 404 400 404 400/input 400/input
POST /v1/embeddings
POST /api/v0/embeddings
  404 200=secret 400 400 400 400 400 400 400 400 404 200=secret 200=secret
  404 404 400 404 400 400 404 400 404 404 404 200=fox 200=fox
POST /v1/embeddings (image)
POST /apply-template (image)
  404 400/messages 400 400 400 400/messages 400/messages 400 400 400 404 400/messages 400/messages
  404 404 400 404 400 400/messages 404 400 404 404 404 400/messages 400/messages
POST /v1/rerank
  404 400 400 400 400 400 400 400 400 400 404 400 400
  404 404 400 404 400 400 404 400 404 404 404 400 400
POST /completion (image)
  404 400/prompt 400/prompt 400/prompt 404:not_found 400/prompt 400/prompt 400 400 400 404 400/prompt 400/prompt
  404 404 400/prompt 404 404:not_found 400/prompt 404 400 404 400 404 400/prompt 400/prompt
POST /embedding
GET /tokenizer_info
GET /props
GET /lora-adapters
  404 200 400 400 400 400 400 400 400 400 404 200 200
  404 404 400 404 400 400 404 400 404 404 404 200 200
POST /tokenize
POST /detokenize
POST /apply-template
  404 200 400 400 400 200 200 400 400 400 404 200 200
  404 404 400 404 400 200 404 400 404 404 404 200 200
GET /slots
  200 200 200 200 200 400 400 400 400 400 200 200 200
  200 200 200 200 200 400 400 400 400 400 200 200 200
POST /models/load
POST /models/unload
  404 200 400 400 400 200 200 400 400 400 404 400 400
  404 404 400 404 400 200 404 400 404 404 404 404 400
GET /localrun/v1/fit
  404 200=secret 400 400 400 200=tiny 200=tiny 404 404 400 404 400 400
  404 404 400 404 400 200=tiny 404 404 404 400 404 400 400
DELETE /localrun/v1/pulls
  404:not_found 404:not_found 404:not_found 404:not_found 404:not_found 400 400 400 400 400 404:not_found 400 400
  404:not_found 404 404:not_found 404:not_found 404:not_found 400 404 400 400 404 404:not_found 400 400
DELETE /localrun/v1/cache
  404 200 404 404 404 400 400 400 400 400 404 200 200
  403:forbidden/- 403:forbidden/- 403:forbidden/- 403:forbidden/- 403:forbidden/- 403:forbidden/- 403:forbidden/-
  403:forbidden/- 403:forbidden/- 403:forbidden/- 403:forbidden/- 403:forbidden/- 403:forbidden/-
"""
# With a default model, of a hosted name and of none. The others want a name, which that of a hosted model is not.
HAVE_DEFAULT = {
    "POST /v1/chat/completions": "200=fox 200=fox",
    "POST /v1/completions": "200=fox 200=fox",
    "POST /v1/responses": "200=fox 200=fox",
    "POST /v1/messages": "200=fox 200=fox",
    "POST /completion": "200=fox 200=fox",
    "POST /tokenize": "200 200",
    "GET /tokenizer_info": "200 200",
    "GET /props": "404 200",
    "POST /api/chat": "404 400",
    "POST /api/embed": "404 400",
    "POST /models/load": "404 400",
    "POST /v1/fim/completions": "400 400",
}
# What makes something, or asks another machine.
NOT_ASKED = {
    ("POST /api/pull", "unknown"), ("POST /api/pull", "hosted"),
    ("POST /api/copy destination", "unknown"), ("POST /api/copy destination", "hosted"),
    ("POST /api/create", "unknown"), ("POST /api/create", "hosted"), ("POST /api/create from", "unknown"),
    ("POST /api/create from", "hosted"),
    ("DELETE /api/delete", "hidden"),
}  # fmt: skip


def told(answer: httpx2.Response) -> str:
    """The status, and the model that answers. Of an error its code after a colon, if that is not the usual one, and
    the beginning of its field after a slash, if that is not `model`."""
    said = answer.json() if answer.content else None
    if answer.status_code == 200:
        return f"200={said['model']}" if isinstance(said, dict) and said.get("model") else "200"
    status, code = str(answer.status_code), answer.headers["x-localrun-error"]
    error = said["error"]
    has_field = isinstance(error, dict) and not {"param", "field"}.isdisjoint(error)
    field = (error.get("param") or error.get("field") or "-") if has_field else "model"
    usual = {"400": "bad_request", "404": "model_not_found"}
    where = "" if field == "model" else "/" + re.split(r"[.\[]", field)[0]
    return status + ("" if code == usual.get(status) else f":{code}") + where


async def asked(http: httpx2.AsyncClient, operation: str, kind: str, headers: dict[str, str]) -> httpx2.Response:
    method, path, *rest = operation.split()
    field = next((word for word in rest if not word.startswith("(")), "model")
    name = NAMES[kind]
    sent = OPERATIONS[operation] | ({} if name is None else {field: name})
    if path.endswith("/"):
        return await http.request(method, path + (name or ""), headers=headers)
    if method == "GET" or path.startswith("/localrun/"):
        return await http.request(method, path, params=sent, headers=headers)
    return await http.request(method, path, json=sent, headers=headers)


async def answers(home: Path, operations: Iterable[str], kinds: Iterable[str], **settings: Any) -> dict[str, list[str]]:
    """What is told of each operation, first to the admin and then to the key, of each kind of name."""
    models = home / "data" / "models"
    models.mkdir(parents=True)
    for name in ("fox", "secret"):
        shutil.copy(builtin.model_path(), models / f"{name}.gguf")
    keys = KeyFile(home / "data")
    of_admin = {"x-api-key": keys.create("admin", admin=True).text}
    of_key = {"x-api-key": keys.create("narrow", models=SEEN).text}
    runtime = Runtime(Settings(slots=2, kv_cells=2048, max_models=8, tiers=TIERS, **settings), engine_command=ENGINE)
    await runtime.start()
    found: dict[str, list[str]] = {}
    try:
        transport = httpx2.ASGITransport(app=app.build(runtime.settings, runtime))
        async with httpx2.AsyncClient(transport=transport, base_url="http://localhost", timeout=300) as http:
            for name, seed in (("style", 1), ("covert", 2)):
                path = write_lora(builtin.model_path(), home / f"{name}.gguf", seed=seed)
                body = {"model": name, "from": str(path), "stream": False}
                made = await http.post("/api/create", json=body, headers=of_admin)
                assert made.json() == {"status": "success"}, made.text
            for operation, headers in product(operations, (of_admin, of_key)):
                # Whoever names no model means the one that is loaded.
                await http.post("/api/chat", json={"model": "tiny", "keep_alive": -1}, headers=of_admin)
                for kind in kinds:
                    if (operation, kind) in NOT_ASKED:
                        continue
                    answer = await asked(http, operation, kind, headers)
                    if headers is of_key:
                        heard = answer.text.replace(NAMES[kind] or "\0", "")
                        assert not re.search("secret|covert", heard), (operation, kind, answer.text)
                    found.setdefault(operation, []).append(told(answer))
                    if "unload" in operation:
                        await http.post("/api/chat", json={"model": "tiny", "keep_alive": -1}, headers=of_admin)
    finally:
        await runtime.stop()
    return found


def expected() -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    alike: list[str] = []
    for line in ANSWERS.strip().splitlines():
        if line.startswith(" "):
            for operation in alike:
                found.setdefault(operation, []).extend(line.split())
        else:
            alike = [*([] if alike and alike[-1] in found else alike), line]
    return found


@pytest.fixture(autouse=True)
def nobody_else_is_asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:1")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    monkeypatch.setenv("OLLAMA_MODELS", str(tmp_path / "ollama"))


async def test_every_operation_tells_of_every_kind_of_name_what_it_told_before(home: Path) -> None:
    found, wanted = await answers(home, OPERATIONS, NAMES), expected()
    assert list(found) == list(OPERATIONS)
    assert {name: row for name, row in found.items() if row != wanted[name]} == {
        name: row for name, row in wanted.items() if row != found[name]
    }


async def test_a_default_model_stands_in_for_hosted_ones(home: Path) -> None:
    found = await answers(home, HAVE_DEFAULT, ("hosted", "empty"), default_model="fox")
    as_admin = {name: " ".join(row[:2]) for name, row in found.items()}
    assert as_admin == HAVE_DEFAULT
