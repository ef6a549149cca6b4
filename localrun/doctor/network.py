"""Whether pulls can go out, as far as settings decide it. Pure. Does not: connect to anything."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from urllib.parse import urlsplit

from localrun.doctor.finding import Finding, ok, warn

_TRUE = ("1", "true", "yes", "on")
_PROXIES = ("https_proxy", "http_proxy", "all_proxy")


def check_network(environ: Mapping[str, str]) -> Iterator[Finding]:
    """By the variables that huggingface_hub and HTTP clients read."""
    offline = [name for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE") if environ.get(name, "").lower() in _TRUE]
    if offline:
        yield warn("network", f"offline: {offline[0]}={environ[offline[0]]}", f"unset {offline[0]} to pull models")
    endpoint = environ.get("HF_ENDPOINT")
    proxies = [(name, value) for name in _PROXIES if (value := environ.get(name) or environ.get(name.upper()))]
    parts = [f"{name} {_without_password(value)}" for name, value in proxies]
    if endpoint:
        parts.append(f"HF_ENDPOINT {_without_password(endpoint)}")
    if not offline:
        yield ok("network", ", ".join(parts) or "direct, no proxy set")
    spared = (environ.get("no_proxy") or environ.get("NO_PROXY") or "").replace(" ", "").split(",")
    if proxies and not {"*", "localhost", "127.0.0.1", "127.0.0.0/8"} & set(spared):
        yield warn(
            "network", "a proxy is set, and NO_PROXY does not except this machine: editors may ask it for the daemon",
            "export NO_PROXY=localhost,127.0.0.1,::1",
        )  # fmt: skip


def _without_password(url: str) -> str:
    parts = urlsplit(url)
    return url if "@" not in parts.netloc else parts._replace(netloc="***@" + parts.netloc.rpartition("@")[2]).geturl()
