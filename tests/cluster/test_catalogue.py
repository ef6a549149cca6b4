"""A door without any weights, and nodes that lack a model: all of it comes from a node that has it. Without Ray."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2
import msgspec
import pytest

from localrun.cluster import reports, settings
from localrun.cluster.catalogue import Shelf, adapters_of, at_hand
from localrun.cluster.description import Description, Has, described
from localrun.cluster.door import Door
from localrun.cluster.replica import Replica
from localrun.cluster.reports import AppReport, ClusterReport, NodeReport, ReplicaReport
from localrun.config import NOTHING_ASKED, Settings
from localrun.errors import BadModelFile, BadRequest, Conflict, DownloadFailed
from localrun.models import naming
from localrun.models.download.neighbours import Giver, Neighbours
from localrun.models.gguf.reader import card_bytes, read_header
from localrun.models.storage.manifest import Source
from localrun.models.storage.model import Model, Origin
from localrun.models.storage.store import Store
from localrun.server import app
from localrun.server.engines.resident import EngineLease, use_of
from localrun.server.engines.supervisor import Supervisor
from localrun.server.runtime import Runtime
from tests.cluster.test_settings import MEMBER, TOKEN
from tests.e2e.test_resume import OWN
from tests.fakes import ENGINE
from tests.lora_file import write_lora
from tests.models.synthesize_embedding import synthesize_embedding
from tests.models.test_shards import whole
from tests.server.media import making, seeing_engine
from tests.server.media.test_doors import SEEN, uri
from tests.server.waiting import until

Asking = Callable[..., AbstractAsyncContextManager[httpx2.AsyncClient]]


@pytest.fixture
def source(models_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Giver]:
    """The node that has the models."""
    settings.keep(MEMBER, TOKEN)
    monkeypatch.setattr(reports.Watch, "start", lambda self: None)
    with Giver(Store(models_dir), "127.0.0.1", token=settings.frames_token()) as giver:
        yield giver


def others(*givers: Giver) -> Neighbours:
    return Neighbours(addresses=[f"127.0.0.1:{one.port}" for one in givers], token=settings.frames_token())


@asynccontextmanager
async def replica(
    folder: Path, said: Description, source: Giver, engine: Sequence[str] = ENGINE
) -> AsyncIterator[ReplicaReport]:
    """One on a node that has nothing, as Serve would start it."""
    store = Store(folder)
    model = await at_hand(store, said, others(source))

    async def borrow() -> EngineLease:
        return await supervisor.acquire(model.name, -1, use_of(model.header), said.load)

    computing = Replica(
        borrow, token=settings.frames_token(), app=said.fingerprint, adapters=adapters_of(store, said, model)
    )
    supervisor = Supervisor(
        Settings(models_dir=str(folder), kv_cells=4096, keep_alive_s=-1), store, command=engine,
        on_step=computing.on_step, on_loaded=lambda link: None, on_ended=computing.on_ended,
    )  # fmt: skip
    supervisor.start()
    try:
        port = await computing.start("127.0.0.1")
        yield ReplicaReport(id="r", node="n2", host="127.0.0.1", port=port, pid=0, fingerprint=said.fingerprint)
    finally:
        await computing.stop()
        await supervisor.stop()


@asynccontextmanager
async def client_of(runtime: Runtime) -> AsyncIterator[httpx2.AsyncClient]:
    transport = httpx2.ASGITransport(app=app.build(runtime.settings, runtime))
    async with httpx2.AsyncClient(transport=transport, base_url="http://localhost", timeout=60) as http:
        yield http


@pytest.fixture
def asking(source: Giver, models_dir: Path, tmp_path: Path, running: Any) -> Asking:
    """A client of a door with an empty folder, in a cluster that runs a model."""

    @asynccontextmanager
    async def start(model: str = "alpha", engine: Sequence[str] = ENGINE) -> AsyncIterator[httpx2.AsyncClient]:
        said = described(Store(models_dir), model, NOTHING_ASKED, 0)
        door = Door()
        async with contextlib.AsyncExitStack() as stack:
            report = await stack.enter_async_context(replica(tmp_path / "node", said, source, engine))
            runtime = await stack.enter_async_context(
                running(elsewhere=door, models_dir=str(tmp_path / "door"), engine=engine)
            )
            node = NodeReport(
                node="n1", id="1", address="127.0.0.1", state="alive", is_head=False, n_cpus=1, n_gpus=0,
                has=Has(files_port=source.port),
            )  # fmt: skip
            told = AppReport(description=said, n_wanted=1, state="running", replicas=(report,))
            whole = ClusterReport(nodes=(node,), apps=(told,))
            door._on_report(whole)
            await until(lambda: door._apps)
            http = await stack.enter_async_context(client_of(runtime))
            http.door, http.report = door, whole  # type: ignore[attr-defined]
            yield http
            assert [path.name for path in (tmp_path / "door").rglob("*.gguf")] == []

    return start


async def answer(http: httpx2.AsyncClient, path: str, body: dict[str, Any] | None = None) -> Any:
    said = await (http.get(path) if body is None else http.post(path, json=body))
    assert said.status_code == 200, said.text
    return said.json()


def without(said: Any, *names: str) -> Any:
    """Without what differs from one call to the next."""
    if isinstance(said, list):
        return [without(one, *names) for one in said]
    if isinstance(said, dict):
        return {name: without(one, *names) for name, one in said.items() if name not in names}
    return said


HELLO = [{"role": "user", "content": "hello"}]
GREEDY = {"temperature": 0, "num_predict": 8}
OF_THE_MOMENT = OWN | {
    *("modified_at", "modified", "digest", "path", "source", "modelfile", "expires_at", "localrun", "loaded"),
    *("prompt_tokens_details", "usage", "created_timestamp"),
}
ASKED: dict[str, tuple[str, dict[str, Any] | None]] = {
    "ollama chat": ("/api/chat", {"messages": HELLO, "stream": False, "options": GREEDY}),
    "ollama generate": ("/api/generate", {"prompt": "hello", "stream": False, "options": GREEDY}),
    "openai chat": ("/v1/chat/completions", {"messages": HELLO, "max_tokens": 8, "temperature": 0}),
    "openai completion": ("/v1/completions", {"prompt": "hello", "max_tokens": 8, "temperature": 0}),
    "anthropic": ("/v1/messages", {"messages": HELLO, "max_tokens": 8, "temperature": 0}),
    "anthropic count": ("/v1/messages/count_tokens", {"messages": HELLO}),
    "responses": ("/v1/responses", {"input": "hello", "max_output_tokens": 16, "temperature": 0, "store": False}),
    "tokens": ("/tokenize", {"content": "hello <|im_end|>", "parse_special": True}),
    "template": ("/apply-template", {"messages": HELLO}),
    "show": ("/api/show", {}),
}


async def test_a_door_without_weights_answers_as_a_daemon_with_them(asking: Asking, running: Any) -> None:
    async with asking() as http, running() as alone, client_of(alone) as own:
        for name, (path, body) in ASKED.items():
            body = body | {"model": "alpha"} if body is not None else None
            there, here = await answer(http, path, body), await answer(own, path, body)
            assert without(there, *OF_THE_MOMENT) == without(here, *OF_THE_MOMENT), name
        (row,) = [row for row in (await answer(http, "/api/tags"))["models"] if row["model"] == "alpha:latest"]
        (usual,) = [row for row in (await answer(own, "/api/tags"))["models"] if row["model"] == "alpha:latest"]
        assert (row["size"], row["details"], row["source"]) == (usual["size"], usual["details"], "cluster")
        assert "alpha" in [one["id"] for one in (await answer(http, "/v1/models"))["data"]]


async def test_what_needs_the_weights_is_refused(asking: Asking) -> None:
    async with asking() as http:
        for path, body in {
            "/api/copy": {"source": "alpha", "destination": "beta"},
            "/api/create": {"model": "beta", "from": "alpha", "stream": False},
        }.items():
            refused = await http.post(path, json=body)
            assert refused.status_code in (400, 404)
            assert "its files are on other machines" in refused.text
        refused = await http.request("DELETE", "/api/delete", json={"model": "alpha"})
        assert (refused.status_code, "cluster deploy alpha --replicas 0" in refused.text) == (400, True)
        # When the cluster does not run it any more, it is nowhere.
        http.door._on_report(ClusterReport(nodes=(), apps=()))  # type: ignore[attr-defined]
        gone = await http.post("/api/generate", json={"model": "alpha", "prompt": "x", "stream": False})
        assert gone.status_code == 404
        assert all(row["model"] != "alpha:latest" for row in (await answer(http, "/api/tags"))["models"])


async def test_a_door_asks_again_for_what_nobody_gave_it(
    asking: Asking, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("localrun.cluster.door.TAKE_AGAIN_S", 0.01)
    async with asking() as http:
        door, whole = http.door, http.report  # type: ignore[attr-defined]
        door._on_report(msgspec.structs.replace(whole, apps=()))
        shutil.rmtree(home / "cache" / "cards")
        door._on_report(msgspec.structs.replace(whole, nodes=()))
        await until(lambda: door._refused)
        body = {"model": "alpha", "prompt": "x", "stream": False}
        refused = await http.post("/api/generate", json=body)
        assert refused.status_code == 404
        assert "no other node has the card of alpha" in refused.text
        await until(lambda: not door._taking)
        door._on_report(whole)
        await until(lambda: door._apps)
        await answer(http, "/api/generate", body)


@pytest.mark.parametrize(("kind", "path", "body"), [
    ("tiny-bert", "/api/embed", {"input": ["hello", "you"]}),
    ("tiny-bert", "/v1/embeddings", {"input": "hello"}),
    ("tiny-bert-reranker", "/v1/rerank", {"query": "a", "documents": ["b", "c"]}),
])  # fmt: skip
async def test_models_for_vectors_make_vectors(
    asking: Asking, running: Any, models_dir: Path, kind: str, path: str, body: dict[str, Any]
) -> None:
    synthesize_embedding(kind, models_dir / "vectors.gguf")
    body = body | {"model": "vectors"}
    async with asking("vectors") as http, running() as alone, client_of(alone) as own:
        there, here = await answer(http, path, body), await answer(own, path, body)
        assert without(there, *OF_THE_MOMENT) == without(here, *OF_THE_MOMENT)
        refused = await http.post("/api/generate", json={"model": "vectors", "prompt": "x", "stream": False})
        assert refused.status_code == 400


async def test_pictures_go_to_the_engine(asking: Asking, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Model, "media", ("vision",))
    async with asking(engine=[sys.executable, seeing_engine.__file__, "image"]) as http:
        picture = {"type": "image_url", "image_url": {"url": uri(making.encoded(making.noise(30, 20), "PNG"))}}
        body = {"model": "alpha", "messages": [{"role": "user", "content": [picture, {"type": "text", "text": "?"}]}]}
        for _ in range(2):
            said = await answer(http, "/v1/chat/completions", body)
            assert SEEN in json.loads(said["choices"][0]["message"]["content"])
            counted = await answer(http, "/v1/messages/count_tokens", {"model": "alpha", "messages": HELLO})
            assert counted["input_tokens"] > 0


async def test_a_picture_goes_again_to_the_engine_that_goes_on(asking: Asking, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first one dies of it, and the connection with it."""
    monkeypatch.setattr(Model, "media", ("vision",))
    async with asking(engine=[sys.executable, seeing_engine.__file__, "image"]) as http:
        picture = {"type": "image_url", "image_url": {"url": uri(making.encoded(making.noise(30, 20), "PNG"))}}
        content = [picture, {"type": "text", "text": "die"}]
        said = await answer(
            http, "/v1/chat/completions", {"model": "alpha", "messages": [{"role": "user", "content": content}]}
        )
        text = said["choices"][0]["message"]["content"]
        assert text.startswith("half ")
        assert SEEN in json.loads(text.removeprefix("half "))


async def test_adapters_are_asked_for_by_name(asking: Asking, running: Any, models_dir: Path) -> None:
    write_lora(models_dir / "alpha.gguf", models_dir / "style.gguf")
    write_lora(models_dir / "alpha.gguf", models_dir / "later.gguf", seed=2)
    (models_dir / "later.gguf").rename(models_dir.parent / "later.gguf")
    async with asking() as http, running() as alone, client_of(alone) as own:
        for name in ("alpha", "alpha+style", "alpha+style=0.5"):
            body = {"model": name, "prompt": "hello", "stream": False, "options": GREEDY}
            there, here = await answer(http, "/api/generate", body), await answer(own, "/api/generate", body)
            assert there["response"] == here["response"]
        assert "alpha+style" in [one["id"] for one in (await answer(http, "/v1/models"))["data"]]
        # One that this machine alone has.
        door = models_dir.parent / "door"
        door.mkdir(exist_ok=True)
        own_file = (models_dir.parent / "later.gguf").rename(door / "later.gguf")
        refused = await http.post("/api/generate", json={"model": "alpha+later", "prompt": "x", "stream": False})
        own_file.unlink()
        assert refused.status_code == 400
        assert "without one of the adapters later" in refused.text


# --- files ------------------------------------------------------------------------------------------------------------


async def test_a_node_gets_a_model_once_and_keeps_it(source: Giver, models_dir: Path, tmp_path: Path) -> None:
    write_lora(models_dir / "alpha.gguf", models_dir / "style.gguf")
    said = described(Store(models_dir), "alpha", NOTHING_ASKED, 0)
    assert [one.manifest.name for one in said.adapters] == ["style"]
    store = Store(tmp_path / "node")
    model = await at_hand(store, said, others(source))
    assert model.path.read_bytes() == (models_dir / "alpha.gguf").read_bytes()
    assert len(adapters_of(store, said, model)) == 1
    assert store.resolve("alpha").origin is Origin.MANIFEST
    again = await at_hand(store, said, others())  # nobody is asked
    assert again.path == model.path
    naming.remove(store, "alpha")
    naming.remove(store, "style")
    assert store.blobs.all() == []


async def test_nodes_that_begin_together_get_the_same(source: Giver, models_dir: Path, tmp_path: Path) -> None:
    said = described(Store(models_dir), "alpha", NOTHING_ASKED, 0)
    stores = [Store(tmp_path / name) for name in ("one", "other")]
    # Two replicas on one of them.
    found = await asyncio.gather(*(at_hand(store, said, others(source)) for store in (*stores, stores[0])))
    assert [one.name for one in found] == ["alpha"] * 3


async def test_a_model_in_several_files_is_one_again(source: Giver, models_dir: Path, tmp_path: Path) -> None:
    whole(models_dir)
    split = Store(models_dir).resolve("model")
    said = described(Store(models_dir), "model", NOTHING_ASKED, 0)
    node, door = Store(tmp_path / "node"), Store(tmp_path / "door")
    model = await at_hand(node, said, others(source))
    shards = [path.read_bytes() for path in model.header.shard_paths]
    assert shards == [path.read_bytes() for path in split.header.shard_paths]
    card = await Shelf(door).put(said, others(source))
    assert (card.size_bytes, card.header.n_params) == (model.size_bytes, model.header.n_params)
    assert sum(path.stat().st_size for path in card.header.shard_paths) < model.size_bytes


async def test_another_model_of_that_name_is_left_alone(source: Giver, models_dir: Path, tmp_path: Path) -> None:
    said = described(Store(models_dir), "alpha", NOTHING_ASKED, 0)
    node = tmp_path / "node"
    node.mkdir()
    synthesize_embedding("tiny-bert", node / "alpha.gguf")
    for getting in (at_hand(Store(node), said, others(source)), Shelf(Store(node)).put(said, others(source))):
        with pytest.raises(Conflict, match="with other contents"):
            await getting
    assert list(node.iterdir()) == [node / "alpha.gguf"]


async def test_another_adapter_of_that_name_is_left_alone(source: Giver, models_dir: Path, tmp_path: Path) -> None:
    style = write_lora(models_dir / "alpha.gguf", models_dir / "style.gguf")
    said = described(Store(models_dir), "alpha", NOTHING_ASKED, 0)
    node = tmp_path / "node"
    node.mkdir()
    write_lora(style.with_name("alpha.gguf"), node / "file.gguf", seed=2)
    store = Store(node)
    naming.copy(store, "file", "style")
    theirs = store.adapter("style", field="model").sha256
    with pytest.raises(Conflict, match="'style' is something else here"):
        await at_hand(store, said, others(source))
    await Shelf(store).put(said, others(source))
    assert store.adapter("style", field="model").sha256 == theirs


async def test_what_nobody_has_is_said(source: Giver, models_dir: Path, tmp_path: Path) -> None:
    said = described(Store(models_dir), "alpha", NOTHING_ASKED, 0)
    (models_dir / "alpha.gguf").unlink()
    with pytest.raises(DownloadFailed, match="no other node has model of alpha"):
        await at_hand(Store(tmp_path / "node"), said, others(source))
    with pytest.raises(DownloadFailed, match="no other node has the card of alpha"):
        await Shelf(Store(tmp_path / "door")).put(said, others(source))


async def test_what_no_node_has_is_pulled_from_where_it_was_pulled_first(
    source: Giver, models_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = described(Store(models_dir), "alpha", NOTHING_ASKED, 0)
    assert said.files is not None
    content = (models_dir / "alpha.gguf").read_bytes()
    (models_dir / "alpha.gguf").unlink()
    asked = []

    async def pulled(name: str, *, context: Any, observer: Any) -> None:
        asked.append(name)
        context.store.folder.mkdir(exist_ok=True)
        (context.store.folder / "alpha.gguf").write_bytes(content)

    monkeypatch.setattr("localrun.models.pull.pull", pulled)
    # A name that only these machines have may be another model's elsewhere.
    with pytest.raises(DownloadFailed):
        await at_hand(Store(tmp_path / "node"), said, others(source))
    assert asked == []
    manifest = msgspec.structs.replace(said.files.manifest, source=Source(kind="registry"))
    said = msgspec.structs.replace(said, files=msgspec.structs.replace(said.files, manifest=manifest))
    assert (await at_hand(Store(tmp_path / "node"), said, others(source))).name == "alpha"
    assert asked == ["alpha"]


async def test_a_node_that_gives_something_else_is_found_out(source: Giver, models_dir: Path, tmp_path: Path) -> None:
    said = described(Store(models_dir), "alpha", NOTHING_ASKED, 0)
    assert said.files is not None
    lying = tmp_path / "lying"
    (lying / "blobs").mkdir(parents=True)
    content = (models_dir / "alpha.gguf").read_bytes()
    blob = lying / "blobs" / said.files.manifest.main.digest.replace(":", "-")
    blob.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with Giver(Store(lying), "127.0.0.1", token=settings.frames_token()) as liar:
        with pytest.raises(DownloadFailed, match="instead of"):
            await at_hand(Store(tmp_path / "node"), said, others(liar))
        model = await at_hand(Store(tmp_path / "node"), said, others(liar, source))
    assert model.path.read_bytes() == content


async def test_what_machines_say_to_each_other_is_encrypted_and_who_says_nothing_keeps_nobody_waiting(
    models_dir: Path, tmp_path: Path
) -> None:
    settings.keep(MEMBER, TOKEN)
    settings.make_certificates(tmp_path, TOKEN, "studio", "127.0.0.1")
    said = described(Store(models_dir), "alpha", NOTHING_ASKED, 0)
    token = settings.frames_token()
    with Giver(Store(models_dir), "127.0.0.1", token=token, tls=settings.tls_for_replicas(tmp_path)) as giver:
        _, silent = await asyncio.open_connection("127.0.0.1", giver.port)
        found = Neighbours(addresses=[f"127.0.0.1:{giver.port}"], token=token, tls=settings.tls_for_doors(tmp_path))
        await at_hand(Store(tmp_path / "node"), said, found)
        silent.close()
        # Of another cluster.
        settings.make_certificates(tmp_path, TOKEN[::-1], "studio", "127.0.0.1")
        stranger = Neighbours(addresses=found.addresses, token=token, tls=settings.tls_for_doors(tmp_path))
        with pytest.raises(DownloadFailed, match="certificate verify failed"):
            await at_hand(Store(tmp_path / "other"), said, stranger)


def test_a_card_is_all_that_a_header_needs_and_nothing_to_load(models_dir: Path, tmp_path: Path) -> None:
    path = models_dir / "alpha.gguf"
    card = tmp_path / "card.gguf"
    n_bytes = card_bytes(path)
    card.write_bytes(path.read_bytes()[:n_bytes])
    sizes = {card.name: path.stat().st_size}
    one, other = read_header(path), read_header(card, sizes=sizes)
    assert (one.metadata, one.tensors, one.size_bytes) == (other.metadata, other.tensors, other.size_bytes)
    assert one.control_tokens() == other.control_tokens()
    with pytest.raises(BadModelFile, match="truncated"):
        read_header(card)
    card.write_bytes(path.read_bytes()[: n_bytes - 1])
    with pytest.raises(BadModelFile, match="became shorter"):
        read_header(card, sizes=sizes)


def test_adapters_that_do_not_fit_are_not_deployed(models_dir: Path) -> None:
    store = Store(models_dir)
    write_lora(models_dir / "alpha.gguf", models_dir / "style.gguf")
    write_lora(models_dir / "alpha.gguf", models_dir / "other.gguf", architecture="gemma")
    plain, one = (described(store, "alpha", NOTHING_ASKED, 0, names) for names in ((), ("style",)))
    assert plain == one
    (models_dir / "style.gguf").unlink()
    assert described(store, "alpha", NOTHING_ASKED, 0).fingerprint != one.fingerprint
    with pytest.raises(BadRequest, match="'other' cannot be used with 'alpha'"):
        described(store, "alpha", NOTHING_ASKED, 0, ["other"])
