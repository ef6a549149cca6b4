"""Files from other machines: what a node gives and refuses, and how a file comes from several of them."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import hashlib
import itertools
import os
import random
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from localrun.errors import DigestMismatch, DiskFull, SourceRefused
from localrun.models.download import neighbours
from localrun.models.download.journal import Header, Range
from localrun.models.download.neighbours import Giver, Neighbours, path_to
from localrun.models.download.partial import Partial, paths_of
from localrun.models.download.plan import FetchLimits, Item
from localrun.models.storage.manifest import blob_path
from localrun.models.storage.store import Store
from tests.models.handmade import ENTRIES, file_bytes

TOKEN = b"secret"
PIECE = 64 * 1024
LIMITS = FetchLimits(
    part_bytes=PIECE, record_bytes=PIECE // 4, progress_bytes=1024, backoff_base_s=0.01, stall_s=2, reserve_bytes=0,
    is_in_order=False,
)  # fmt: skip
CONTENT = random.Random(1).randbytes(40 * PIECE + 77)
SHA256 = hashlib.sha256(CONTENT).hexdigest()
DIGEST, OTHER = f"sha256:{SHA256}", f"sha256:{64 * 'b'}"


class Node:
    """A machine with a models folder. `given` are the ranges that others got, `hold` may delay them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.blob = blob_path(folder, DIGEST)
        self.given: list[Range] = []
        self.hold: Callable[[Range], None] = lambda given: None
        self.giver = Giver(Store(folder, hub_cache_folder=folder / "hub"), "127.0.0.1", token=TOKEN)
        self.giver.RequestHandlerClass = type(
            "Answer", (self.giver.RequestHandlerClass,), {"end_headers": self._note()}
        )

    def _note(self) -> Callable[[Any], None]:
        node = self

        def end_headers(answer: Any) -> None:
            said = b"".join(answer._headers_buffer).decode()
            neighbours._Answer.end_headers(answer)
            if "Content-Range: bytes " in said:
                start, end = said.partition("Content-Range: bytes ")[2].partition("/")[0].split("-")
                node.given.append(Range(int(start), int(end) + 1))
                node.hold(node.given[-1])

        return end_headers

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.giver.port}"

    @property
    def n_given(self) -> int:
        return sum(one.size_bytes for one in self.given)

    def has(self, content: bytes = CONTENT) -> Node:
        self.blob.parent.mkdir(parents=True, exist_ok=True)
        self.blob.write_bytes(content)
        return self

    def has_begun(self, start: int, end: int) -> Node:
        """With this range of the file, as a fetch that was killed leaves it."""
        partial = Partial.open(self.blob, Header(size_bytes=len(CONTENT), sha256=SHA256), sync_bytes=1)
        partial.add(partial.write(start, CONTENT[start:end]))
        partial.close()
        return self

    async def fetch(self, *others: Node, limits: FetchLimits = LIMITS) -> None:
        item = Item(url=path_to(DIGEST, "m"), target=self.blob, name="m", size_bytes=len(CONTENT), sha256=SHA256)
        found = Neighbours(addresses=[one.address for one in others], token=TOKEN)
        await found.fetch([item], limits=limits)
        assert self.blob.read_bytes() == CONTENT


Nodes = Callable[[], Node]


@pytest.fixture
def nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Nodes]:
    monkeypatch.setattr(neighbours, "LACKS_S", 0.01)
    monkeypatch.setattr(neighbours, "BROKEN_S", 0.05)
    monkeypatch.setattr(neighbours, "LEAST_PIECE_BYTES", 1024)
    with contextlib.ExitStack() as running:

        def start() -> Node:
            node = Node(tmp_path / str(random.random()))
            running.enter_context(node.giver)
            return node

        yield start


async def test_a_file_comes_from_whoever_has_it(nodes: Nodes) -> None:
    one, other, lacking, getting = nodes().has(), nodes().has(), nodes(), nodes()
    await getting.fetch(one, other, lacking)
    assert one.n_given + other.n_given == len(CONTENT)
    assert min(one.n_given, other.n_given) > 0


async def test_nobody_has_it(nodes: Nodes) -> None:
    with pytest.raises(SourceRefused, match="no other node has m"):
        await nodes().fetch(nodes(), nodes())
    with pytest.raises(SourceRefused, match="no other node has m"):
        await nodes().fetch()


async def test_two_that_fetch_at_once_give_each_other_what_they_have(nodes: Nodes) -> None:
    middle = 20 * PIECE
    one, other = nodes().has_begun(0, middle), nodes().has_begun(middle, len(CONTENT))
    await asyncio.gather(one.fetch(other), other.fetch(one))
    assert one.n_given >= middle
    assert other.n_given >= len(CONTENT) - middle


async def test_who_has_pieces_is_asked_before_who_has_it_all(nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(neighbours, "LACKS_S", 0.0)
    source, begun, getting = nodes().has(), nodes().has_begun(0, 40 * PIECE), nodes()
    draws = itertools.cycle((1.0, 0.0, 0.0, 1.0))  # each is the first in turn, as far as chance decides
    monkeypatch.setattr(neighbours.random, "random", lambda: next(draws))
    await getting.fetch(source, begun, limits=dataclasses.replace(LIMITS, connections=1))
    assert 0 < source.n_given <= 2 * PIECE  # the end, and what was asked for before the other one gave a piece


async def test_what_came_before_a_kill_is_not_asked_for_again(nodes: Nodes) -> None:
    source, getting = nodes().has(), nodes().has_begun(0, 20 * PIECE)
    await getting.fetch(source)
    assert source.n_given == len(CONTENT) - 20 * PIECE


async def test_a_node_that_dies_in_the_middle_is_left_for_another(nodes: Nodes) -> None:
    dying, living, getting = nodes().has(), nodes().has(), nodes()

    def die(given: Range) -> None:
        if len(dying.given) > 3:
            raise ConnectionAbortedError

    dying.hold = die
    await getting.fetch(dying, living)
    assert dying.n_given > 0
    assert living.n_given < len(CONTENT)


async def test_a_node_that_is_slow_or_hangs_does_not_keep_the_others_waiting(nodes: Nodes) -> None:
    hanging, living, getting = nodes().has(), nodes().has(), nodes()
    is_over = threading.Event()
    hanging.hold = lambda given: (is_over.wait(), None)[1]
    try:
        await getting.fetch(hanging, living, limits=FetchLimits(**{**vars(LIMITS), "stall_s": 0.3}))
    finally:
        is_over.set()
    assert living.n_given == len(CONTENT)


async def test_another_content_is_refused(nodes: Nodes) -> None:
    wrong = bytes([CONTENT[0] ^ 1]) + CONTENT[1:]
    lying, getting = nodes().has(wrong), nodes()
    with pytest.raises(DigestMismatch):
        await getting.fetch(lying)
    assert not getting.blob.exists()
    assert not paths_of(getting.blob).partial.exists()


async def test_a_full_disk_is_said_before_anything_is_asked_for(nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    source, getting = nodes().has(), nodes()
    usage = shutil.disk_usage("/")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
    with pytest.raises(DiskFull, match="not enough disk space for m in"):
        await getting.fetch(source)
    assert source.given == []


@pytest.mark.parametrize(
    ("path", "headers", "status"),
    [
        (path_to(DIGEST, "m"), {"Authorization": "Bearer 00"}, 401),
        (path_to(DIGEST, "m"), {"Authorization": ""}, 401),
        (path_to(DIGEST, "m"), {"Range": "bytes=5-2"}, 400),
        (path_to(DIGEST, "m"), {"Range": ""}, 400),
        (path_to(DIGEST, "m"), {"Range": f"bytes={len(CONTENT)}-{len(CONTENT) + 5}"}, 416),
        (path_to(OTHER, "m"), {}, 404),
        ("/../../etc/passwd", {}, 400),
        ("/sha256:..%2f..%2fetc", {}, 400),
        (path_to(OTHER, "/etc/passwd"), {}, 404),
        (path_to(OTHER, "../x.gguf"), {}, 404),
        (path_to(DIGEST, "m"), {"Range": "bytes=3-6"}, 206),
        (path_to(DIGEST, "m", 5), {"Range": "bytes=3-6"}, 206),
    ],
)
async def test_only_files_that_are_named_by_their_digest_go_to_who_has_the_token(
    nodes: Nodes, path: str, headers: dict[str, str], status: int
) -> None:
    said = {"Authorization": f"Bearer {TOKEN.hex()}", "Range": "bytes=0-9"} | headers
    async with httpx2.AsyncClient(trust_env=False) as client:
        answer = await client.get(f"http://{nodes().has().address}{path}", headers=said)
    assert answer.status_code == status
    if status == 206:
        n_bytes = 5 if path.startswith(f"/{DIGEST}/5") else len(CONTENT)
        assert answer.content == CONTENT[3 : min(7, n_bytes)]
        assert answer.headers["content-range"].endswith(f"/{n_bytes}")
    else:
        assert answer.content == b""


async def test_a_file_whose_content_nobody_has_said_is_found_by_the_models_name(nodes: Nodes) -> None:
    content = file_bytes(ENTRIES)
    node = nodes()
    node.folder.mkdir(exist_ok=True)
    (node.folder / "plain.gguf").write_bytes(content)
    digest = f"sha256:{hashlib.sha256(content).hexdigest()}"
    assert node.giver.file(digest, "plain") == node.folder / "plain.gguf"
    assert node.giver.file(digest, "other") is None
    os.truncate(node.folder / "plain.gguf", len(content) - 1)
    assert node.giver.file(digest, "plain") is None
