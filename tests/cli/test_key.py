"""`localrun key` and `localrun hosts`: what they keep, what they show, and what they refuse."""

from __future__ import annotations

import errno
import getpass
import json
import os
import re
import shutil
import socket
from pathlib import Path

import msgspec
import pytest

from localrun.access import certificate, keys
from localrun.access.keys import OUTPUT_TOKENS, REQUESTS, TOKENS, KeyFile, Limit
from localrun.access.trust import API_KEY, TrustedHosts, context_for, endpoint, key_for
from localrun.cli import exits, text
from localrun.config import ConfigError
from localrun.wire import Lane
from tests.daemon import running_daemon
from tests.says import says


@pytest.fixture
def home(environment: dict[str, str], tmp_path: Path) -> Path:
    return tmp_path / "home"


def test_a_key_with_everything(localrun, home):
    made = localrun(
        "key", "create", "--name", "zed", "--lane", "batch", "--rate", "60/min", "--rate", "1k/day", "--tokens",
        "1M/day", "--output-tokens", "2.5k/h", "--concurrency", "2", "--models", "qwen3*", "--expires", "30d",
        "--read-only",
    )  # fmt: skip
    assert made.returncode == exits.OK
    text = made.stdout.strip()
    assert text.startswith(keys.PREFIX)
    assert text not in made.stderr
    [kept] = KeyFile(home / "data").read()
    assert (kept.name, kept.lane, kept.models, kept.n_concurrent, kept.read_only) == (
        "zed", Lane.BATCH, ("qwen3*",), 2, True,
    )  # fmt: skip
    assert kept.limits == (
        Limit(REQUESTS, 60, 60.0), Limit(REQUESTS, 1000, 86400.0), Limit(TOKENS, 1_000_000, 86400.0),
        Limit(OUTPUT_TOKENS, 2500, 3600.0),
    )  # fmt: skip
    assert kept.expires_at_s - kept.created_at_s == pytest.approx(30 * 86400, abs=60)
    _, secret = keys.split(text)
    assert keys.is_secret(kept, secret)
    for path in home.rglob("*"):
        assert path.is_dir() or secret not in path.read_text(errors="replace")
    shown = localrun("key", "list").stdout
    assert "60/min requests, 1k/day requests, 1M/day tokens, 2.5k/h output, 2 at once" in shown
    assert secret not in shown


def test_set_changes_what_is_named_and_nothing_else(localrun, home):
    made = localrun("key", "create", "--name", "zed", "--rate", "60/min", "--tokens", "1M/day", "--models", "a").stdout
    [before] = KeyFile(home / "data").read()
    assert (
        localrun("key", "set", "zed", "--rate", "5/s", "--rate", "100/day", "--lane", "batch").stdout == "changed zed\n"
    )
    assert (
        localrun("key", "set", "zed", "--read-only", "--admin", "--expires", "2d", "--storage", "1.5G").returncode == 0
    )
    [kept] = KeyFile(home / "data").read()
    assert kept.limits == (
        Limit(REQUESTS, 5, 1.0), Limit(REQUESTS, 100, 86400.0), Limit(TOKENS, 1_000_000, 86400.0)
    )  # fmt: skip
    assert (kept.lane, kept.models, kept.storage_bytes) == (Lane.BATCH, ("a",), 1_500_000_000)
    assert kept.read_only
    assert kept.admin
    assert keys.is_secret(kept, keys.split(made.strip())[1])
    changed = localrun(
        "key", "set", "zed", "--rate", "none", "--tokens", "none", "--models", "all", "--expires", "never", "--lane",
        "interactive", "--no-read-only", "--no-admin", "--storage", "default", "--concurrency", "0", "--json",
    )  # fmt: skip
    [kept] = KeyFile(home / "data").read()
    assert kept == msgspec.structs.replace(before, limits=(), models=())
    assert "key" not in json.loads(changed.stdout)
    assert localrun("key", "set", "zed", "--storage", "none").returncode == 0
    assert KeyFile(home / "data").read()[0].storage_bytes == keys.NO_LIMIT
    audited = [json.loads(line)["what"] for line in (home / "state" / "audit.jsonl").read_text().splitlines()]
    assert audited[1] == "key set zed (lane, limits)"


def test_what_cannot_be_set(localrun, home):
    localrun("key", "create", "--name", "zed")
    for arguments in (
        (),
        ("--rate", "60"),
        ("--rate", "none", "--rate", "5/s"),
        ("--storage", "0"),
        ("--expires", "x"),
    ):
        refused = localrun("key", "set", "zed", *arguments)
        assert refused.returncode == exits.USAGE, arguments
    assert localrun("key", "set", "nobody", "--admin").returncode == exits.ERROR
    localrun("key", "revoke", "zed")
    refused = localrun("key", "set", "zed", "--admin")
    assert (refused.returncode, "was revoked" in refused.stderr) == (exits.ERROR, True)


def test_json_says_limits_in_words(localrun, home):
    localrun("key", "create", "--name", "zed", "--rate", "60/min", "--tokens", "1M/day", "--storage", "2G")
    [shown] = json.loads(localrun("key", "list", "--json").stdout)
    assert shown["limits"] == [
        {"kind": "requests", "limit": 60, "per": "minute"}, {"kind": "tokens", "limit": 1_000_000, "per": "day"}
    ]  # fmt: skip
    assert (shown["concurrency"], shown["storage_bytes"]) == (None, 2_000_000_000)


def test_a_file_from_before_is_read(localrun, home):
    localrun("key", "create", "--name", "zed", "--rate", "60/min")
    path = home / "data" / "keys.json"
    content = json.loads(path.read_text())
    assert content["keys"][0]["limits"] == [["requests", 60, 60.0]]
    for new in ("storage_bytes",):
        content["keys"][0].pop(new)
    path.write_text(json.dumps(content))
    assert "60/min requests" in localrun("key", "list").stdout


def test_the_list_fits_a_narrow_terminal(localrun, home, monkeypatch):
    name = "a-name-of-thirty-two-characters-"
    rules = ("--rate", "60/min", "--rate", "1k/day", "--tokens", "1M/day", "--output-tokens", "2.5k/h")
    localrun("key", "create", "--name", name, *rules, "--models", "qwen3*", "--expires", "30d", "--admin")
    monkeypatch.setattr(text, "terminal_columns", lambda: 80)
    narrow = localrun("key", "list").stdout.splitlines()
    assert max(map(len, narrow)) <= 80
    assert narrow[1].startswith(name + "  ")
    assert "qwen3*" in narrow[1]
    assert "LIMITS" not in narrow[0] or "…" in narrow[1]
    monkeypatch.setattr(text, "terminal_columns", lambda: 300)
    assert "2.5k/h output" in localrun("key", "list").stdout


def test_rotate_revoke_and_remove(localrun, home):
    first = localrun("key", "create", "--name", "zed", "--json").stdout
    second = localrun("key", "rotate", "zed").stdout.strip()
    assert json.loads(first)["key"] != second
    [kept] = KeyFile(home / "data").read()
    assert keys.is_secret(kept, keys.split(second)[1])
    assert not keys.is_secret(kept, keys.split(json.loads(first)["key"])[1])
    assert localrun("key", "revoke", "zed").returncode == exits.OK
    assert "revoked" in localrun("key", "list").stdout
    assert localrun("key", "rotate", "zed").returncode == exits.ERROR
    assert localrun("key", "rm", "zed").returncode == exits.OK
    assert localrun("key", "rm", "zed").returncode == exits.ERROR
    assert "there are no keys" in localrun("key", "list").stdout
    audited = (home / "state" / "audit.jsonl").read_text()
    assert [json.loads(line)["what"] for line in audited.splitlines()] == [
        "key create zed", "key rotate zed", "key revoke zed", "key rm zed"
    ]  # fmt: skip


@pytest.mark.parametrize(
    "arguments",
    [("--rate", "60"), ("--tokens", "0/day"), ("--expires", "soon"), ("--lane", "fast"), ("--name", "local")],
)
def test_what_cannot_be(localrun, home, arguments):
    refused = localrun("key", "create", "--name", "zed", *arguments)
    assert refused.returncode == exits.USAGE
    assert KeyFile(home / "data").read() == []


def test_a_name_that_is_taken(localrun):
    localrun("key", "create", "--name", "zed")
    again = localrun("key", "create", "--name", "zed")
    assert again.returncode == exits.ERROR
    assert "localrun key rotate zed" in again.stderr


def test_a_system_that_does_not_know_its_user_loses_no_key(localrun, monkeypatch):
    def nobody() -> str:
        raise OSError("no user name")

    monkeypatch.setattr(getpass, "getuser", nobody)
    assert localrun("key", "create", "--name", "zed").stdout.startswith(keys.PREFIX)


def test_beyond_loopback_nothing_is_served_without_a_key(localrun, home):
    refused = localrun("serve", "--host", "0.0.0.0", "--port", "0")
    assert refused.returncode == exits.USAGE
    assert "localrun key create" in refused.stderr
    KeyFile(home / "data").create("zed")
    KeyFile(home / "data").revoke("zed")
    assert localrun("serve", "--host", "0.0.0.0", "--port", "0").returncode == exits.USAGE


def test_which_key_a_program_shows(home, monkeypatch):
    here, there = endpoint("localhost", 11434), endpoint("studio.local", 11434)
    assert (here.url, there.url) == ("http://localhost:11434", "https://studio.local:11434")
    text = keys.make_local_key(home / "state", 11434)
    environ = {"LOCALRUN_HOME": str(home)}
    assert (key_for(here, environ), key_for(there, environ)) == (text, "")
    assert key_for(here, environ | {API_KEY: " own "}) == key_for(there, environ | {API_KEY: "own"}) == "own"


@pytest.mark.parametrize("name", ["Studio", "studio.local", "studio.home.example"])
def test_this_machine_by_its_name_is_reached_on_loopback(monkeypatch, name: str):
    monkeypatch.setattr(socket, "gethostname", lambda: "studio.home.example")
    assert endpoint(name, 11434).url == "http://127.0.0.1:11434"
    assert endpoint("studio.elsewhere", 11434).is_remote


def test_a_host_is_named_as_the_list_shows_it(localrun, home):
    made = certificate.kept(home / "tls", ["studio.local"])
    TrustedHosts().trust(endpoint("studio.local", 8443), made.certificate.read_text())
    assert "studio.local:8443" in localrun("hosts", "--seconds", "0.1").stdout
    assert localrun("hosts", "forget", "studio.local").returncode == exits.ERROR
    assert localrun("hosts", "forget", "Studio.local:8443").stdout == "studio.local:8443 is no longer trusted\n"


@pytest.mark.parametrize("damaged", ["key.pem", "certificate.pem"])
def test_a_certificate_and_a_key_that_are_no_pair(home, damaged):
    made = certificate.kept(home, ["studio.local"])
    other = certificate.kept(home / "other", ["studio.local"])
    shutil.copy(other.key.with_name(damaged), made.key.with_name(damaged))
    with pytest.raises(ConfigError, match=rf"delete {re.escape(str(home / 'tls'))} to get others"):
        certificate.kept(home, ["studio.local"])


def test_a_certificate_that_is_none(home):
    where = endpoint("studio.local", 8443)
    TrustedHosts().path.parent.mkdir(parents=True, exist_ok=True)
    for wrong, said in (
        (
            '{"hosts": {"studio.local:8443": {"certificate": "?", "fingerprint": "?"}}}',
            "no certificate of studio.local",
        ),
        ('{"hosts": {"\xff": 1}}', "cannot be read"),
        ('{"version": 2, "hosts": {}}', "made by a newer localrun"),
    ):
        TrustedHosts().path.write_text(wrong, encoding="latin-1")
        with pytest.raises(ConfigError, match=said):
            context_for(where)


def test_a_key_that_no_header_can_have(home):
    there = endpoint("studio.local", 11434)
    assert key_for(there, {"LOCALRUN_HOME": str(home), API_KEY: "lrk_\u00e9\nb"}) == "lrk_??b"


def test_hosts_that_nobody_trusts(localrun, home):
    assert localrun("hosts", "forget", "studio.local").returncode == exits.ERROR
    assert localrun("hosts", "trust", "127.0.0.1").returncode == exits.USAGE
    TrustedHosts().path.parent.mkdir(parents=True, exist_ok=True)
    TrustedHosts().path.write_text("{")
    assert "remove it to begin anew" in localrun("hosts", "forget", "studio.local").stderr


def test_patterns_beside_all_and_empty_ones(localrun, home):
    localrun("key", "create", "--name", "zed", "--models", "a")
    assert localrun("key", "set", "zed", "--models", "all", "--models", "b").returncode == 0
    assert KeyFile(home / "data").read()[0].models == ("all", "b")
    assert "an empty pattern is for no model" in localrun("key", "set", "zed", "--models", "").stderr
    assert localrun("key", "set", "zed", "--models", "ALL").returncode == 0
    assert KeyFile(home / "data").read()[0].models == ()


def test_a_damaged_file_is_one_line(localrun, home):
    localrun("key", "create", "--name", "zed")
    (home / "data" / "keys.json").write_text("{")
    for command in (("list",), ("revoke", "zed"), ("set", "zed", "--read-only")):
        ended = localrun("key", *command)
        assert ended.returncode == exits.USAGE
        assert ended.stderr.startswith(f"error: {home / 'data' / 'keys.json'} cannot be read")


def test_own_use_is_counted_without_keys(localrun):
    with running_daemon() as daemon:
        assert localrun("usage", port=daemon.port).stdout.startswith("nothing was used since ")
        assert localrun("run", "tiny", "hi", "--option", "num_predict=3", port=daemon.port).returncode == 0
        shown = json.loads(localrun("usage", "--json", port=daemon.port).stdout)
        (row,) = shown["rows"]
        assert (row["name"], row["requests"], row["output_tokens"]) == ("local", 1, 3)
        (row,) = json.loads(localrun("usage", "--by", "model", "--json", port=daemon.port).stdout)["rows"]
        assert (row["name"], row["requests"]) == ("tiny", 1)


def test_a_full_disk_leaves_the_keys_whole_and_names_a_way_out(localrun, environment, monkeypatch):
    assert localrun("key", "create", "--name", "first").returncode == 0

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        ended = localrun("key", "create", "--name", "second")
    assert ended.returncode == exits.ERROR
    assert says(ended.stderr, "keys.json is full; make room", "the keys are as they were")
    assert [row["name"] for row in json.loads(localrun("key", "list", "--json").stdout)] == ["first"]
