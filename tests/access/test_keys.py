"""The key file: what is kept of a key, and what it opens."""

from __future__ import annotations

import json
import os
import stat
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from localrun.access import keys
from localrun.access.keys import REQUESTS, TOKENS, Key, KeyFile, Limit, parse_duration_s, parse_limit, parse_size_bytes
from localrun.config import ConfigError
from localrun.errors import Conflict, NotFound
from localrun.wire import Lane


def key(**fields: object) -> Key:
    return Key(**{"id": "a", "name": "a", "salt": b"", "hash": b"", "check": b"", "created_at_s": 0.0, **fields})  # type: ignore[arg-type]


def test_a_key_opens_by_its_text_and_by_no_other(tmp_path: Path) -> None:
    file = KeyFile(tmp_path)
    new, other = file.create("zed"), file.create("other")
    [kept, _] = file.read()
    id_, secret = keys.split(new.text) or ("", "")
    assert id_ == kept.id
    assert keys.is_probable(kept, secret)
    assert keys.is_secret(kept, secret)
    wrong = (keys.split(other.text) or ("", ""))[1]
    assert not keys.is_probable(kept, wrong)
    assert not keys.is_secret(kept, wrong)


def test_the_secret_is_not_in_the_file(tmp_path: Path) -> None:
    file = KeyFile(tmp_path)
    new = file.create("zed")
    content = file.path.read_text()
    assert new.key.id in content
    assert (keys.split(new.text) or ("", "?"))[1] not in content


@pytest.mark.skipif(sys.platform == "win32", reason="has no modes")
def test_the_file_is_for_its_owner_alone(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        file = KeyFile(tmp_path)
        file.create("zed")
        file.create("other")
        keys.make_local_key(tmp_path, 1)
    finally:
        os.umask(before)
    for path in (file.path, keys.local_key_path(tmp_path, 1)):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_rotating_changes_the_secret_and_nothing_else(tmp_path: Path) -> None:
    file = KeyFile(tmp_path)
    old = file.create("zed", lane=Lane.BATCH, limits=(Limit(REQUESTS, 60, 60.0),))
    new = file.rotate("zed")
    [kept] = file.read()
    assert (kept.id, kept.lane, kept.limits) == (old.key.id, Lane.BATCH, old.key.limits)
    assert keys.is_secret(kept, (keys.split(new.text) or ("", ""))[1])
    assert not keys.is_secret(kept, (keys.split(old.text) or ("", ""))[1])


def test_a_key_that_was_revoked_or_has_expired_says_so(tmp_path: Path) -> None:
    file = KeyFile(tmp_path)
    file.create("zed")
    assert file.revoke("zed").problem(0.0) == "was revoked"
    with pytest.raises(Conflict, match="key rm zed"):
        file.rotate("zed")
    assert key(expires_at_s=10.0).problem(9.9) is None
    assert key(expires_at_s=10.0).problem(10.0) == "has expired"
    file.remove("zed")
    assert file.read() == []
    for act in (file.revoke, file.rotate, file.remove):
        with pytest.raises(NotFound, match="key list"):
            act("zed")


def test_names(tmp_path: Path) -> None:
    file = KeyFile(tmp_path)
    file.create("zed")
    with pytest.raises(Conflict, match="rotate zed"):
        file.create("zed")
    for name in ("", "local", "a b", "-a", "ä", "a" * 33, 'a"'):
        with pytest.raises(ConfigError, match="cannot be a key's name"):
            file.create(name)


def test_many_writers_lose_nothing(tmp_path: Path) -> None:
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda number: KeyFile(tmp_path).create(f"k{number}"), range(12)))
    assert len(KeyFile(tmp_path).read()) == 12


def test_a_damaged_file_is_said_and_not_overwritten(tmp_path: Path) -> None:
    file = KeyFile(tmp_path)
    file.path.write_text('{"keys": [')
    with pytest.raises(ConfigError, match=r"keys\.json cannot be read"):
        file.create("zed")
    assert file.path.read_text() == '{"keys": ['


@pytest.mark.parametrize(
    ("wrong", "where"),
    [
        ({"limits": [["requests", 0, 60.0]]}, "limits"),
        ({"limits": [["requests", 5, 0.0]]}, "limits"),
        ({"limits": [["apples", 5, 60.0]]}, "limits"),
        ({"salt": "A" * 44}, "salt"),
        ({"n_concurrent": -1}, "n_concurrent"),
        ({"storage_bytes": -5}, "storage_bytes"),
        ({"expires_at_s": 1e300}, "expires_at_s"),
        ({"name": "local"}, "name"),
        ({"name": "a\nb"}, "name"),
        ({"name": "other"}, "name"),
        ({"id": "\u00e9"}, "id"),
    ],
)
def test_what_nobody_can_go_by_is_a_damaged_file(tmp_path: Path, wrong: dict[str, object], where: str) -> None:
    file = KeyFile(tmp_path)
    file.create("other")
    file.create("zed")
    content = json.loads(file.path.read_text())
    content["keys"][1] |= wrong
    file.path.write_text(json.dumps(content))
    with pytest.raises(ConfigError, match=rf"keys\.json cannot be read: .*{where}"):
        file.read()


def test_bytes_that_are_no_text_are_a_damaged_file(tmp_path: Path) -> None:
    file = KeyFile(tmp_path)
    file.create("zed")
    file.path.write_bytes(file.path.read_bytes().replace(b"zed", b"z\xff"))
    with pytest.raises(ConfigError, match=r"keys\.json cannot be read"):
        file.read()


def test_a_file_of_a_newer_version_is_neither_read_nor_written(tmp_path: Path) -> None:
    file = KeyFile(tmp_path)
    file.create("zed")
    content = json.loads(file.path.read_text())
    content["version"] = 2
    content["keys"][0]["only_from"] = "192.0.2.0/24"
    newer = json.dumps(content)
    file.path.write_text(newer)
    with pytest.raises(ConfigError, match="made by a newer localrun"):
        file.revoke("zed")
    assert file.path.read_text() == newer


@pytest.mark.parametrize(
    ("patterns", "name", "allowed"),
    [
        ((), "anything", True),
        (("qwen3*",), "qwen3:0.6b", True),
        (("qwen3*",), "llama3", False),
        (("tiny",), "tiny:latest", True),
        (("a", "b*"), "bc", True),
    ],
)
def test_patterns_of_models(patterns: tuple[str, ...], name: str, allowed: bool) -> None:
    assert key(models=patterns).allows_model(name) is allowed


def test_a_lane_is_the_best_that_a_key_gets() -> None:
    batch = key(lane=Lane.BATCH)
    assert [batch.lane_of(lane) for lane in Lane] == [Lane.BATCH] * 3
    assert [key().lane_of(lane) for lane in Lane] == list(Lane)
    assert key(lane=Lane.DEFAULT).lane_of(Lane.INTERACTIVE) is Lane.DEFAULT


@pytest.mark.parametrize(
    ("text", "amount", "per_s", "shown"),
    [
        ("60/min", 60, 60.0, "60/min"),
        ("1M/day", 1_000_000, 86400.0, "1M/day"),
        ("2.5k / h", 2500, 3600.0, "2.5k/h"),
        ("10/second", 10, 1.0, "10/s"),
        ("1_000/d", 1000, 86400.0, "1k/day"),
        ("1234567/day", 1234567, 86400.0, "1234567/day"),
    ],
)
def test_limits(text: str, amount: int, per_s: float, shown: str) -> None:
    limit = parse_limit(TOKENS, text)
    assert limit == Limit(TOKENS, amount, per_s)
    assert limit.text == shown


@pytest.mark.parametrize("text", ["", "60", "60/", "/min", "0/min", "-1/min", "60/year", "x/min", "1e9/min", "0.1/s"])
def test_what_is_no_limit(text: str) -> None:
    with pytest.raises(ConfigError, match="60/min"):
        parse_limit(REQUESTS, text)


def test_durations() -> None:
    assert [parse_duration_s(text) for text in ("30d", "12h", "90 min", "1.5h")] == [2_592_000, 43_200, 5400, 5400]
    for text in ("", "30", "d", "0d", "99999999d", "1month"):
        with pytest.raises(ConfigError, match="30d"):
            parse_duration_s(text)


@pytest.mark.parametrize(
    ("text", "n_bytes"), [("500M", 500_000_000), ("1.5 g", 1_500_000_000), ("2GB", 2_000_000_000), ("5000", 5000)]
)
def test_sizes(text: str, n_bytes: int) -> None:
    assert parse_size_bytes(text) == n_bytes


@pytest.mark.parametrize("text", ["", "0", "0.1", "-1G", "1X", "999999999T", "G"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(ConfigError, match="such as 500M, 1G"):
        parse_size_bytes(text)
