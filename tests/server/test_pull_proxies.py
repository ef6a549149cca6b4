"""Pulls go through the proxies of the environment, and say which one is at fault."""

from __future__ import annotations

from collections.abc import Iterator

import httpx2
import pytest

from tests.daemon import running_daemon
from tests.hub.repository import Repository
from tests.hub.server import Hub
from tests.hub.socks import socks_proxy
from tests.models.handmade import VALID

REPO = "o/small-GGUF"


@pytest.fixture(scope="module")
def hub() -> Iterator[Hub]:
    with Hub(Repository(REPO, {"small-Q8_0.gguf": VALID})) as running:
        yield running


@pytest.fixture(autouse=True)
def no_proxies_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)


def pulled(hub: Hub, **proxies: str) -> httpx2.Response:
    with running_daemon(HF_ENDPOINT=hub.endpoint, **proxies) as daemon:
        answer = daemon.post("/api/pull", model=REPO, stream=False)
        if answer.is_error:
            found = daemon.http.get("/localrun/v1/search", params={"query": "small"}).json()
            assert found["problem"] == answer.json()["error"]
        return answer


@pytest.mark.parametrize("scheme", ["socks5", "socks5h", "socks"])
def test_through_socks(hub: Hub, scheme: str):
    with socks_proxy() as proxy:
        assert pulled(hub, ALL_PROXY=f"{scheme}://{proxy.address}/").json() == {"status": "success"}
        assert {host for host, _ in proxy.targets} == {"127.0.0.1", "localhost"}, "the hub and its storage"


@pytest.mark.parametrize(
    ("variable", "proxy", "said"),
    [
        ("all_proxy", "socks4://127.0.0.1:9", "all_proxy is socks4://127.0.0.1:9, and only http, https, socks5"),
        ("HTTP_PROXY", "http://me:secret@[::1", "HTTP_PROXY is "),
        ("ALL_PROXY", "socks5://me:secret@127.0.0.1:9", "through the proxy socks5://***@127.0.0.1:9"),
        ("http_proxy", "127.0.0.1:9", "through the proxy 127.0.0.1:9"),
    ],
)
def test_a_proxy_that_does_not_do_is_named(hub: Hub, variable: str, proxy: str, said: str):
    answer = pulled(hub, **{variable: proxy})
    assert answer.status_code == 502
    assert said in answer.json()["error"]
    assert "secret" not in answer.text
