from __future__ import annotations

import asyncio
import random
import subprocess
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from localrun.errors import DigestMismatch, DiskFull, DownloadFailed, SourceChanged, SourceRefused
from localrun.models.download.fetch import fetch, new_client
from localrun.models.download.partial import find_stale, remove_stale
from localrun.models.download.plan import FetchLimits, Item
from tests.hub.repository import Repository
from tests.hub.server import TOKEN, Hub

from .conftest import CONTENT, FILE, LIMITS, REPO, SIZE_BYTES, Seen, fetch_now

SLOW_BYTES_PER_S = 2_000_000


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir()) if folder.exists() else []


def assert_whole_and_alone(item: Item, content: bytes = CONTENT) -> None:
    assert item.target.read_bytes() == content
    assert names(item.target.parent) == [item.target.name]


def lose_content(item: Item) -> None:
    with item.target.with_name(item.target.name + ".localrun-partial").open("r+b") as file:
        file.write(bytes(SIZE_BYTES))


def assert_never_backwards(seen: Seen) -> None:
    for done in seen.done.values():
        assert done == sorted(done)


async def until(holds: Callable[[], bool]) -> None:
    while True:
        await asyncio.sleep(0.005)
        if holds():
            return


def cancel_midway(item: Item, hub: Hub, limits: FetchLimits = LIMITS) -> int:
    """Fetches slowly and cancels after a third; how many bytes were there by then."""
    hub.faults.bytes_per_s = SLOW_BYTES_PER_S
    seen = Seen()

    async def run() -> None:
        async with new_client() as client:
            task = asyncio.create_task(fetch([item], client=client, limits=limits, progress=seen))
            await until(lambda: task.done() or seen.n_bytes(item) >= SIZE_BYTES // 3)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

    asyncio.run(run())
    hub.faults.bytes_per_s = None
    hub.record.clear()
    assert not item.target.exists()
    return seen.done[item.name][-1]


def test_a_file_arrives_in_parts_whole_and_alone(hub: Hub, item: Item):
    seen = fetch_now([item])
    assert_whole_and_alone(item)
    assert_never_backwards(seen)
    assert hub.record.content_bytes == SIZE_BYTES
    assert len(hub.record.of("storage")) == 12
    assert (seen.done[FILE][0], seen.done[FILE][-1]) == (0, SIZE_BYTES)
    assert seen.verified == [FILE]


def test_the_way_to_the_storage_is_asked_for_once(hub: Hub, item: Item):
    fetch_now([item])
    assert len(hub.record.of("hub")) == 1


def test_connections_serve_part_after_part(hub: Hub, item: Item):
    fetch_now([item])
    # One to the hub, and the storage's.
    assert hub.record.n_connections <= 1 + LIMITS.connections


def test_what_is_there_is_not_fetched_again(hub: Hub, item: Item):
    fetch_now([item])
    hub.record.clear()
    seen = fetch_now([item])
    assert hub.record.requests == []
    assert seen.done[FILE] == [SIZE_BYTES]


def test_several_items_share_one_fetch(hub: Hub, item: Item):
    other = replace(item, target=item.target.with_name("second"), name="second")
    seen = fetch_now([item, other, item])
    assert names(item.target.parent) == sorted([item.target.name, "second"])
    assert hub.record.content_bytes == 2 * SIZE_BYTES
    assert {name: done[-1] for name, done in seen.done.items()} == {FILE: SIZE_BYTES, "second": SIZE_BYTES}


@pytest.mark.parametrize("seed", range(4))
def test_connections_that_break_anywhere_cost_nothing_twice(hub: Hub, item: Item, seed: int):
    draws = random.Random(seed)
    hub.faults.drop_after = lambda n: draws.randrange(2_000, 200_000)
    seen = fetch_now([item])
    assert_whole_and_alone(item)
    assert_never_backwards(seen)
    assert hub.record.content_bytes == SIZE_BYTES
    assert len(hub.record.of("storage")) > 12


def test_a_server_without_ranges_sends_the_whole(hub: Hub, item: Item):
    hub.faults.ignore_range = True
    seen = fetch_now([item])
    assert_whole_and_alone(item)
    assert_never_backwards(seen)
    assert seen.done[FILE][-1] == SIZE_BYTES


def test_a_server_without_ranges_that_breaks_off_is_asked_again(hub: Hub, item: Item):
    hub.faults.ignore_range = True
    hub.faults.drop_after = lambda n: 1_000_000 + n * 100_000 if n < 8 else None
    assert_never_backwards(fetch_now([item]))
    assert_whole_and_alone(item)


def test_wrong_content_gets_no_name_and_is_not_kept(hub: Hub, item: Item):
    hub.faults.flip_byte_at = 1_234_567
    with pytest.raises(DigestMismatch, match="sha256"):
        fetch_now([item])
    assert names(item.target.parent) == []


def test_a_body_that_ends_early_is_no_whole_one(hub: Hub, item: Item):
    hub.faults.short_by = 10
    with pytest.raises(DownloadFailed, match="ended the answer early"):
        fetch_now([item])
    assert not item.target.exists()
    hub.faults.short_by = 0
    hub.record.clear()
    seen = fetch_now([item])
    assert_whole_and_alone(item)
    assert 0 < hub.record.content_bytes == SIZE_BYTES - seen.done[FILE][0] < SIZE_BYTES


def test_a_body_without_an_end_is_not_read_to_its_end(hub: Hub, item: Item):
    hub.faults.endless = True
    seen = fetch_now([item])
    assert_whole_and_alone(item)
    assert seen.done[FILE][-1] == SIZE_BYTES


def test_a_token_stays_at_its_own_origin(hub: Hub, item: Item):
    fetch_now([replace(item, headers={"Authorization": f"Bearer {TOKEN}"})])
    assert {request.headers.get("authorization") for request in hub.record.of("hub")} == {f"Bearer {TOKEN}"}
    assert {request.headers.get("authorization") for request in hub.record.of("storage")} == {None}


def test_an_encrypted_source_may_not_redirect_to_an_unencrypted_one(tmp_path: Path):
    import httpx2

    def answer(request: httpx2.Request) -> httpx2.Response:
        return httpx2.Response(302, headers={"Location": "http://elsewhere.example/file"})

    async def run(target: Path) -> None:
        item = Item(url="https://hub.example/file", target=target, name="file", size_bytes=10)
        async with httpx2.AsyncClient(transport=httpx2.MockTransport(answer)) as client:
            await fetch([item], client=client, limits=LIMITS)

    with pytest.raises(SourceRefused, match=r"unencrypted address at elsewhere\.example"):
        asyncio.run(run(tmp_path / "file"))
    assert names(tmp_path) == []


@pytest.mark.parametrize("status", [401, 403, 404, 410])
def test_a_refusal_ends_it_at_once_and_leaves_nothing(hub: Hub, item: Item, status: int):
    hub.faults.hub_answers = [(status, {"X-Error-Message": "not for you"})] * 10
    with pytest.raises(SourceRefused, match=rf"{status} .not for you") as refusal:
        fetch_now([item])
    assert refusal.value.source_status == status
    assert len(hub.record.requests) <= LIMITS.connections
    assert names(item.target.parent) == []


@pytest.mark.parametrize("status", [429, 500, 503])
def test_a_busy_server_is_asked_again(hub: Hub, item: Item, status: int):
    hub.faults.hub_answers = [(status, {"Retry-After": "0"})] * 2
    hub.faults.storage_answers = [(status, {})] * 3
    fetch_now([item])
    assert_whole_and_alone(item)
    assert hub.record.content_bytes == SIZE_BYTES


def test_a_server_that_stays_busy_is_given_up(hub: Hub, item: Item):
    hub.faults.hub_answers = [(503, {})] * 100
    with pytest.raises(DownloadFailed, match=r"503.* 5 times"):
        fetch_now([item])


def test_a_wait_of_hours_is_refused(hub: Hub, item: Item):
    hub.faults.hub_answers = [(429, {"Retry-After": "7200"})] * 100
    with pytest.raises(DownloadFailed, match="wait 7200 s"):
        fetch_now([item])


def test_an_expired_link_is_asked_for_again(hub: Hub, item: Item):
    hub.faults.requests_per_link = 3
    fetch_now([item])
    assert_whole_and_alone(item)
    assert hub.record.content_bytes == SIZE_BYTES
    assert len(hub.record.of("hub")) >= 4


def test_a_storage_that_refuses_fresh_links_is_a_refusal(hub: Hub, item: Item):
    hub.faults.refuse_storage = True
    with pytest.raises(SourceRefused, match="403"):
        fetch_now([item])
    assert names(item.target.parent) == []


def test_a_stalled_connection_is_left(hub: Hub, item: Item):
    hub.faults.n_stalls = 2
    fetch_now([item], replace(LIMITS, stall_s=0.5))
    assert_whole_and_alone(item)


def test_a_cancelled_fetch_goes_on_where_it_was(hub: Hub, item: Item):
    n_there = cancel_midway(item, hub)
    seen = fetch_now([item])
    assert_whole_and_alone(item)
    assert seen.done[FILE][0] == n_there >= SIZE_BYTES // 3
    assert hub.record.requested_bytes == SIZE_BYTES - n_there


def test_content_that_changed_is_never_mixed(hub: Hub, item: Item):
    unnamed = replace(item, sha256=None)
    cancel_midway(unnamed, hub)
    changed = CONTENT[::-1]
    hub.repositories[REPO] = Repository(REPO, {FILE: changed})
    hub.faults.storage_etag = '"storage-2"'
    seen = fetch_now([unnamed])
    assert_whole_and_alone(unnamed, changed)
    assert_never_backwards(seen)


def test_content_without_any_name_is_not_gone_on_with(hub: Hub, item: Item):
    hub.faults.storage_etag = None
    unnamed = replace(item, sha256=None)
    cancel_midway(unnamed, hub)
    hub.repositories[REPO] = Repository(REPO, {FILE: CONTENT[::-1]})
    assert fetch_now([unnamed]).done[FILE][0] == 0
    assert_whole_and_alone(unnamed, CONTENT[::-1])


def test_a_digest_outweighs_the_names_that_a_storage_gives(hub: Hub, item: Item):
    tags = iter(f'"machine-{n}"' for n in range(1000))
    n_there = cancel_midway(item, hub)
    hub.faults.drop_after = lambda n: setattr(hub.faults, "storage_etag", next(tags))  # type: ignore[func-returns-value]
    fetch_now([item])
    assert_whole_and_alone(item)
    assert hub.record.requested_bytes == SIZE_BYTES - n_there


def test_content_that_was_wrong_and_is_mended_meanwhile_is_fetched_anew(hub: Hub, item: Item):
    def mend(n_answers: int) -> None:
        if n_answers == 6:
            hub.faults.flip_byte_at = None
            hub.faults.storage_etag = '"storage-2"'

    hub.faults.flip_byte_at = 10
    hub.faults.drop_after = mend  # type: ignore[assignment]
    seen = fetch_now([item])
    assert_whole_and_alone(item)
    assert_never_backwards(seen)
    assert seen.verified == [FILE, FILE]


def test_another_size_is_another_file(hub: Hub, item: Item):
    hub.repositories[REPO] = Repository(REPO, {FILE: CONTENT + b"more"})
    with pytest.raises(SourceChanged, match=rf"{SIZE_BYTES + 4} bytes .* instead of {SIZE_BYTES}"):
        fetch_now([item])
    assert names(item.target.parent) == []


def test_an_unknown_size_is_asked_for(hub: Hub, item: Item):
    fetch_now([replace(item, size_bytes=None)])
    assert_whole_and_alone(item)


def test_a_server_that_does_not_say_the_size_is_told_so(hub: Hub, item: Item):
    hub.faults.ignore_range = hub.faults.no_length = True
    with pytest.raises(DownloadFailed, match="does not say how large"):
        fetch_now([replace(item, size_bytes=None)])


def test_an_empty_file_is_a_file(hub: Hub, tmp_path: Path):
    fetch_now([Item(url=hub.resolve_url(REPO, FILE), target=tmp_path / "empty", name="empty", size_bytes=0)])
    assert (tmp_path / "empty").read_bytes() == b""


def test_two_fetches_at_once_transfer_it_once(hub: Hub, item: Item):
    async def run() -> None:
        async with new_client() as client:
            await asyncio.gather(*(fetch([item], client=client, limits=LIMITS) for _ in range(3)))

    asyncio.run(run())
    assert_whole_and_alone(item)
    assert hub.record.content_bytes == SIZE_BYTES


def test_a_disk_without_room_is_told_before_anything_is_asked(hub: Hub, item: Item):
    with pytest.raises(DiskFull, match=r"fox-Q4_K_M\.gguf.*localrun rm"):
        fetch_now([item], replace(LIMITS, reserve_bytes=10**18))
    assert hub.record.requests == []
    assert names(item.target.parent) == []


def test_a_folder_that_cannot_be_is_an_error_of_ours(hub: Hub, item: Item, tmp_path: Path):
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(DownloadFailed, match="cannot be written"):
        fetch_now([replace(item, target=tmp_path / "file" / "model")])


@pytest.fixture
def small_disk(tmp_path: Path):
    folder = tmp_path / "small"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "none", str(folder)], capture_output=True)
    if mounted.returncode:
        pytest.skip("only root may make a file system to fill")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_disk_that_is_full_leaves_nothing_that_looks_finished(
    hub: Hub, item: Item, small_disk: Path, monkeypatch: pytest.MonkeyPatch
):
    # As if another program took the room after it was looked at.
    monkeypatch.setattr("localrun.models.download.fetch.check_disk", lambda *_, **__: None)
    small = replace(item, target=small_disk / "model")
    with pytest.raises(DiskFull, match="is full"):
        fetch_now([small])
    assert names(small_disk) == []


def test_the_bandwidth_limit_holds_for_all_connections_together(hub: Hub, item: Item):
    rate = 4_000_000
    began_s = time.monotonic()
    fetch_now([item], replace(LIMITS, rate_bytes_per_s=rate))
    # The last chunk of each connection is paid for afterwards.
    assert time.monotonic() - began_s >= (SIZE_BYTES - LIMITS.connections * 65_536) / rate


def test_what_the_disk_lost_is_fetched_again(hub: Hub, item: Item):
    """After a power cut: recorded, but the content never reached the disk."""
    cancel_midway(item, hub, replace(LIMITS, sync_bytes=10**9))
    lose_content(item)
    seen = fetch_now([item])
    assert_whole_and_alone(item)
    assert seen.done[FILE][0] == 0
    assert seen.verified == [FILE]


def test_a_disk_that_lost_what_it_had_confirmed_is_found_out_by_the_digest(hub: Hub, item: Item):
    n_there = cancel_midway(item, hub, replace(LIMITS, sync_bytes=1))
    lose_content(item)
    seen = fetch_now([item])
    assert_whole_and_alone(item)
    assert seen.done[FILE][0] == n_there
    assert seen.verified == [FILE, FILE]
    assert_never_backwards(seen)


def test_a_journal_that_is_damaged_is_believed_as_far_as_it_is_sound(hub: Hub, item: Item):
    cancel_midway(item, hub)
    journal = item.target.with_name(item.target.name + ".localrun-journal")
    text = journal.read_bytes()
    journal.write_bytes(text[: len(text) // 2] + b"\xff" + text[len(text) // 2 + 1 :])
    fetch_now([item])
    assert_whole_and_alone(item)
    assert 0 < hub.record.content_bytes < SIZE_BYTES


def test_what_an_abandoned_fetch_left_can_be_found_and_removed(hub: Hub, item: Item):
    cancel_midway(item, hub)
    folder = item.target.parent
    now_s = time.time()
    assert find_stale([folder], now_s=now_s, min_age_s=3600) == []
    [left] = find_stale([folder.parent], now_s=now_s + 7200, min_age_s=3600)
    assert left.target == item.target
    assert 7000 < left.age_s < 7300
    assert left.size_bytes >= SIZE_BYTES // 3
    assert remove_stale(left) > 0
    assert names(folder) == []
    assert fetch_now([item]).done[FILE][0] == 0


def test_a_fetch_that_runs_is_not_stale(hub: Hub, item: Item):
    hub.faults.bytes_per_s = SLOW_BYTES_PER_S
    seen = Seen()

    async def run() -> None:
        async with new_client() as client:
            task = asyncio.create_task(fetch([item], client=client, limits=LIMITS, progress=seen))
            await until(lambda: seen.n_bytes(item) >= 300_000)
            assert find_stale([item.target.parent], now_s=time.time(), min_age_s=0) == []
            hub.faults.bytes_per_s = None
            await task

    asyncio.run(run())
    assert_whole_and_alone(item)
