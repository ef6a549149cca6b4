"""A real cluster that other machines could join: nodes at an address of this machine that is not loopback."""

from __future__ import annotations

import socket
import ssl
from collections.abc import Iterator
from pathlib import Path

import pytest

from localrun.access.certificate import own_addresses
from localrun.cluster import settings
from tests.cluster.test_three_nodes import Cluster, listening, texts
from tests.server.conftest import copies, small_model

__all__ = ["small_model"]

OUTSIDE = [str(one) for one in own_addresses() if one.version == 4 and not one.is_loopback]

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.slow,
    pytest.mark.skipif(not OUTSIDE, reason="this machine has no address but loopback"),
]


@pytest.fixture(scope="module")
def cluster(small_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("encrypted")
    cluster = Cluster(folder, copies(small_model, folder / "models"), *OUTSIDE[:1] * 3)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()


def test_a_model_is_computed_on_several_nodes(cluster: Cluster):
    cluster.head.run("deploy", "alpha", "--replicas", "2")
    app = cluster.ready("alpha", 2)
    assert len({replica["node"] for replica in app["replicas"]}) == 2
    one, other = (texts(cluster.streams(door, 4, 20)) for door in (cluster.head, cluster.second))
    assert one == other
    assert all(one)


def test_replicas_speak_to_nobody_in_the_clear(cluster: Cluster):
    for replica in cluster.ready("alpha", 2)["replicas"]:
        believed = settings.tls_for_doors(cluster.second.home / "state")
        with (
            socket.create_connection((replica["host"], replica["port"]), timeout=60) as connection,
            believed.wrap_socket(connection, server_hostname=replica["node"]) as encrypted,
        ):
            assert encrypted.version() == "TLSv1.3"
        with (
            socket.create_connection((replica["host"], replica["port"]), timeout=60) as connection,
            pytest.raises(ssl.SSLCertVerificationError),
        ):
            ssl.create_default_context().wrap_socket(connection, server_hostname="localhost")


def test_doors_are_where_they_were_asked_to_be(cluster: Cluster):
    """Also where nodes are reached from outside, clients are on loopback unless somebody wants them elsewhere."""
    at = {address for address, port, _ in listening(cluster.head) if port == cluster.head.port}
    assert at == {"127.0.0.1"}
