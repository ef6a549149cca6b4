"""The proxies of the environment: which ones can be used, and how they are shown.

httpx2 and huggingface_hub find them by themselves, and fail on one that they do not know when a client is made.

Does not: go through one, or read what systems keep outside the environment.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

import httpx2

from localrun.errors import DownloadFailed

_VARIABLES = ("https_proxy", "http_proxy", "all_proxy")


def named(environ: Mapping[str, str]) -> dict[str, str]:
    """The proxies by their variables, which count in lower case first. `socks` without a number is SOCKS 5, as desktops
    write it."""
    names = [each if each in environ else each.upper() for each in _VARIABLES]
    found = {name: value for name in names if (value := environ.get(name))}
    return {name: f"socks5{value[5:]}" if value.startswith("socks://") else value for name, value in found.items()}


def problem_of(environ: Mapping[str, str]) -> str:
    """What keeps clients from being made; "" for nothing."""
    for name, value in named(environ).items():
        try:
            httpx2.Proxy(value if "://" in value else f"http://{value}")
        except (ValueError, httpx2.InvalidURL):
            return f"{name} is {without_password(value)}, and only http, https, socks5 and socks5h proxies can be used"
    return ""


def prepare() -> None:
    """Before a client is made. Raises DownloadFailed for a proxy that no client can use."""
    os.environ.update(named(os.environ))
    if problem := problem_of(os.environ):
        raise DownloadFailed(f"{problem}: change that variable, or unset it, and start the daemon again")


def way_of(error: httpx2.TransportError) -> str:
    """Ends what is said of a failure to reach a server: the proxy that was in between; "" for none."""
    try:
        url = error.request.url
    except RuntimeError:  # it was told of already
        return ""
    proxies = {} if proxy_bypass(url.host) else getproxies()
    proxy = proxies.get(url.scheme) or proxies.get("all")
    return f" through the proxy {without_password(proxy)}" if proxy else ""


def without_password(url: str) -> str:
    try:
        parts = urlsplit(url)
    except ValueError:  # half an address, such as http://[
        return url.rpartition("@")[2]
    return url if "@" not in parts.netloc else parts._replace(netloc="***@" + parts.netloc.rpartition("@")[2]).geturl()
