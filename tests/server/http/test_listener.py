"""The listening socket."""

from __future__ import annotations

import socket
from contextlib import closing

import pytest

from localrun.config import ConfigError
from localrun.errors import PortBusy
from localrun.server.http import listener


def test_port_zero_takes_a_free_one() -> None:
    with closing(listener.bind("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        assert listener.url(listening) == f"http://127.0.0.1:{port}"
        with closing(socket.create_connection(("127.0.0.1", port), timeout=10)):
            pass


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST", "127.0.0.1", "127.0.0.2"])
def test_loopback_addresses(host: str) -> None:
    listener.bind(host, 0).close()


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.2", "example.com", "", "127.0.0.1.evil.com", "8.8.8.8"])
def test_other_addresses_are_refused_by_name(host: str) -> None:
    with pytest.raises(ConfigError, match=r"127\.0\.0\.1"):
        listener.bind(host, 0)


def test_a_busy_port_names_itself_and_the_way_out() -> None:
    with closing(listener.bind("127.0.0.1", 0)) as first:
        port = first.getsockname()[1]
        with pytest.raises(PortBusy, match=rf"port {port} .*--port"):
            listener.bind("127.0.0.1", port)


def test_ipv6_has_brackets_in_its_url() -> None:
    try:
        listening = listener.bind("::1", 0)
    except ConfigError:
        pytest.skip("this machine has no IPv6 loopback")
    with closing(listening):
        assert listener.url(listening).startswith("http://[::1]:")
