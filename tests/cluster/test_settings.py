"""What a node keeps of its cluster, and what it refuses to be part of."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import msgspec
import psutil
import pytest

from localrun import stored
from localrun.cluster import settings
from localrun.config import ConfigError
from localrun.errors import NotFound

TOKEN = "5a" * settings.TOKEN_BYTES
MEMBER = settings.Membership(head="127.0.0.1:11433", address="127.0.0.2", node="studio", is_head=False)


def test_what_is_kept_is_there_for_its_owner_alone_until_it_is_forgotten():
    settings.keep(MEMBER, TOKEN)
    kept = settings.membership()
    assert (kept.head, kept.address, kept.node, kept.pid) == ("127.0.0.1:11433", "127.0.0.2", "studio", os.getpid())
    assert {path.stat().st_mode & 0o777 for path in (settings.file(), settings.token_file())} == {0o600}
    settings.forget()
    with pytest.raises(NotFound, match="in no cluster"):
        settings.membership()
    assert settings.own_token() == TOKEN


def test_a_token_may_be_in_the_environment_as_operators_put_it_there():
    assert settings.own_token({"RAY_AUTH_TOKEN": f"{TOKEN}\n"}) == TOKEN
    with pytest.raises(ConfigError, match="RAY_AUTH_TOKEN holds no cluster's token"):
        settings.own_token({"RAY_AUTH_TOKEN": "secret"})


def test_pods_leave_encryption_to_their_network():
    pod = msgspec.structs.replace(MEMBER, head="10.0.0.7:6379")
    assert pod.is_encrypted
    assert not msgspec.structs.replace(pod, is_kuberay=True).is_encrypted


def test_a_process_that_is_gone_holds_no_node():
    gone = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, check=True)
    stored.write(
        settings.file(), settings.Membership(head="h", address="a", node="n", is_head=True, pid=int(gone.stdout))
    )
    with pytest.raises(NotFound):
        settings.membership()
    settings.keep(MEMBER, TOKEN)


def test_another_process_with_the_same_number_holds_no_node():
    other = settings.Membership(head="h", address="a", node="n", is_head=True, pid=os.getpid(), started_at_s=1.0)
    assert not other.is_held


def test_a_machine_is_in_one_cluster():
    other = psutil.Process(os.getppid())
    held = settings.Membership(
        head="h:1", address="a", node="n", is_head=True, pid=other.pid, started_at_s=other.create_time()
    )
    stored.write(settings.file(), held)
    with pytest.raises(ConfigError, match="'n' of the cluster of h:1 already"):
        settings.keep(MEMBER, TOKEN)


@pytest.mark.parametrize(
    ("content", "mode", "message"),
    [
        (TOKEN, 0o644, "chmod 600"),
        (TOKEN[:-2], 0o600, "64 hexadecimal digits"),
        ("x" * 64, 0o600, "64 hexadecimal digits"),
        ("é" * 64, 0o600, "cannot be read"),
    ],
)
def test_a_file_that_holds_no_token_is_refused(tmp_path: Path, content: str, mode: int, message: str):
    path = tmp_path / "token"
    path.write_text(content)
    path.chmod(mode)
    with pytest.raises(ConfigError, match=message):
        settings.read_token(path)


def test_frames_have_a_secret_of_their_own():
    settings.keep(MEMBER, TOKEN)
    assert len(settings.frames_token()) == 32
    assert settings.frames_token().hex() != TOKEN


def test_ray_always_asks_for_the_token():
    said = settings.environment(MEMBER, {"RAY_AUTH_TOKEN": "other", "RAY_ADDRESS": "elsewhere", "PATH": "/bin"})
    assert said["RAY_AUTH_MODE"] == "token"
    assert said["RAY_AUTH_TOKEN_PATH"] == str(settings.token_file())
    assert "RAY_AUTH_TOKEN" not in said
    assert said["PATH"] == "/bin"
    with pytest.raises(ConfigError, match="RAY_AUTH_MODE"):
        settings.environment(MEMBER, {"RAY_AUTH_MODE": "disabled"})


@pytest.mark.parametrize("text", ["0.0.0.0", "224.0.0.1", "::1", "no.such.machine.invalid", "192.0.2.77"])
def test_what_is_no_address_of_this_machine_is_refused(text: str):
    with pytest.raises(ConfigError):
        settings.own_address(text)


def test_heads_are_named_with_or_without_a_port():
    assert settings.checked_head("127.0.0.1") == "127.0.0.1:11433"
    assert settings.checked_head("localhost:7000") == "127.0.0.1:7000"
    for text in ("127.0.0.1:0", "127.0.0.1:x", "127.0.0.1:70000"):
        with pytest.raises(ConfigError, match="is not a port; use a number from 1 to 65535"):
            settings.checked_head(text)


def test_a_node_has_the_address_that_its_head_sees():
    assert settings.address_towards("127.0.0.1:7000") == "127.0.0.1"
    assert settings.own_address("localhost") == "127.0.0.1"


@pytest.mark.parametrize(
    ("head", "is_encrypted"), [("127.0.0.1:1", False), ("127.0.9.9:1", False), ("10.0.0.7:1", True)]
)
def test_between_machines_everything_is_encrypted(head: str, is_encrypted: bool):
    member = msgspec.structs.replace(MEMBER, head=head)
    settings.keep(member, TOKEN)
    said = settings.environment(member, {})
    assert (said["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] == "0") == (not is_encrypted)
    assert (said.get("RAY_USE_TLS") == "1") == member.is_encrypted == is_encrypted
    if is_encrypted:
        assert Path(said["RAY_TLS_SERVER_KEY"]).stat().st_mode & 0o777 == 0o600
