"""The names that other machines may call this one by. Does not: ask a name server."""

from __future__ import annotations

import ipaddress

from localrun.access.certificate import own_names
from localrun.config import Settings

_WILDCARDS = frozenset({"0.0.0.0", "::"})


def is_wildcard(host: str) -> bool:
    """Whether the address stands for all of this machine's."""
    return host in _WILDCARDS


def is_loopback_address(host: str) -> bool:
    """Whether it is an address that only this machine reaches."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def bracketed(host: str) -> str:
    """As a URL and a Host header have it."""
    return f"[{host}]" if ":" in host else host


def served(settings: Settings) -> frozenset[str]:
    """Lower-case host names: the machine's own, alone and with `.local`, the address listened on if it is a name, and
    those of `settings.host_names`."""
    more = (name.strip().lower().rstrip(".") for name in settings.host_names.split(","))
    found = {*own_names(), *more, settings.host.lower()}
    return frozenset(name for name in found if name and ":" not in name and not is_wildcard(name))
