"""Who is believed between the machines of a cluster: whoever made a certificate with its token."""

from __future__ import annotations

import asyncio
import ssl
from pathlib import Path

import pytest

from localrun.cluster import settings
from tests.cluster.test_settings import TOKEN

OTHER_TOKEN = "6b" * 32


async def spoken(server: ssl.SSLContext, client: ssl.SSLContext, name: str) -> bytes:
    """What a client hears of a server that it takes to be `name`."""

    async def speak(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"hello")
        writer.close()

    listening = await asyncio.start_server(speak, "127.0.0.1", 0, ssl=server)
    async with listening:
        port = listening.sockets[0].getsockname()[1]
        reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=client, server_hostname=name)
        said = await reader.read()
        writer.close()
        return said


@pytest.fixture
def nodes(tmp_path: Path) -> tuple[Path, Path]:
    """Two machines that were given the token and nothing else."""
    one, other = tmp_path / "one", tmp_path / "other"
    settings.make_certificates(one, TOKEN, "studio", "10.0.0.1")
    settings.make_certificates(other, TOKEN, "laptop", "10.0.0.2")
    return one, other


@pytest.mark.parametrize("name", ["laptop", "10.0.0.2", "localhost", "127.0.0.1"])
async def test_nodes_with_the_same_token_believe_each_other(nodes: tuple[Path, Path], name: str) -> None:
    one, other = nodes
    assert await spoken(settings.tls_for_replicas(other), settings.tls_for_doors(one), name) == b"hello"


@pytest.mark.parametrize("name", ["studio", "10.0.0.1"])
async def test_a_node_is_nobody_else(nodes: tuple[Path, Path], name: str) -> None:
    one, other = nodes
    with pytest.raises(ssl.SSLCertVerificationError):
        await spoken(settings.tls_for_replicas(other), settings.tls_for_doors(one), name)


async def test_another_token_is_another_cluster(nodes: tuple[Path, Path], tmp_path: Path) -> None:
    settings.make_certificates(tmp_path / "stranger", OTHER_TOKEN, "laptop", "10.0.0.2")
    with pytest.raises(ssl.SSLCertVerificationError):
        await spoken(settings.tls_for_replicas(tmp_path / "stranger"), settings.tls_for_doors(nodes[0]), "laptop")


def test_the_authority_has_one_key_for_each_token() -> None:
    keys = [settings._authority_key(token).private_numbers().private_value for token in (TOKEN, TOKEN, OTHER_TOKEN)]
    assert keys[0] == keys[1] != keys[2]
