"""How a client gets in: whose certificate it trusts, and which key it shows.

To a daemon on loopback it speaks plain HTTP, with the key that this daemon made for the programs of its user. To any
other machine it speaks TLS and nothing else. A certificate counts if the system's authorities say so, or if the person
said so once: then it is kept in `hosts.json` in the data folder, by host and port, and only this one counts from then
on. `LOCALRUN_API_KEY` is the key for other machines, and goes before the local one.

Does not: ask the person (the command line does).
"""

from __future__ import annotations

import http.client
import ipaddress
import os
import re
import socket
import ssl
from collections.abc import Mapping
from typing import NamedTuple
from urllib.parse import urlsplit

import msgspec

from localrun import stored
from localrun.access import discovery, keys
from localrun.access.certificate import fingerprint, own_names
from localrun.config import DEFAULT_PORT, ConfigError, folders
from localrun.errors import DaemonUnreachable, UntrustedCertificate

API_KEY = "LOCALRUN_API_KEY"
FILE_NAME = "hosts.json"
VERSION = 1
_HANDSHAKE_TIMEOUT_S = 5.0
_WILDCARDS = {"0.0.0.0": "127.0.0.1", "::": "127.0.0.1"}


class Endpoint(NamedTuple):
    """Where a daemon is. `is_remote` if it is not behind a loopback address."""

    host: str
    port: int
    is_remote: bool

    @property
    def url(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'https' if self.is_remote else 'http'}://{host}:{self.port}"

    @property
    def name(self) -> str:
        """What its certificate is kept by."""
        return f"{self.host.lower()}:{self.port}"


def endpoint(host: str, port: int) -> Endpoint:
    """Where a client finds the daemon that listens on `host`. One that listens on an address of this machine is on
    loopback, too, and speaks plain HTTP wherever a hosts file has this machine's name."""
    if host in _WILDCARDS:
        return Endpoint(_WILDCARDS[host], port, is_remote=False)
    if host.lower().rstrip(".") in own_names():
        return Endpoint("127.0.0.1", port, is_remote=False)
    try:
        address = ipaddress.ip_address("127.0.0.1" if host.lower() == "localhost" else host)
    except ValueError:
        return Endpoint(host, port, is_remote=True)
    if address.is_loopback:
        return Endpoint(host, port, is_remote=False)
    return Endpoint("127.0.0.1", port, is_remote=False) if _is_own(address) else Endpoint(host, port, is_remote=True)


def endpoint_of(url: str) -> Endpoint:
    """Of a base URL that `Endpoint.url` made, or that a person gave."""
    parts = urlsplit(url)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    return Endpoint(parts.hostname or "", port, is_remote=parts.scheme == "https")


def _is_own(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> bool:
    with socket.socket(socket.AF_INET6 if address.version == 6 else socket.AF_INET, socket.SOCK_DGRAM) as asking:
        try:
            asking.bind((str(address), 0))
        except OSError:
            return False
    return True


def key_for(where: Endpoint, environ: Mapping[str, str] = os.environ) -> str:
    """The key to show there; empty for none. Read each time: a daemon that was restarted has another local one."""
    # What no header can have is no key, which the daemon says.
    own = re.sub(r"[^!-~]", "?", environ.get(API_KEY, "").strip())
    return own if own or where.is_remote else keys.local_key(folders(environ).state, where.port)


def headers_for(where: Endpoint) -> dict[str, str]:
    """What a request carries to get in."""
    key = key_for(where)
    return {"Authorization": f"Bearer {key}"} if key else {}


# --- certificates ---


class Host(msgspec.Struct, frozen=True):
    """A machine whose certificate (PEM) the person trusts."""

    certificate: str
    fingerprint: str


class _File(msgspec.Struct):
    version: int = VERSION
    hosts: dict[str, Host] = {}


class TrustedHosts:
    """The file; see the module."""

    def __init__(self) -> None:
        self.path = folders().data / FILE_NAME

    def all(self) -> dict[str, Host]:
        """By host and port. Raises ConfigError."""
        try:
            found = msgspec.json.decode(stored.contents(self.path), type=_File)
        except FileNotFoundError:
            return {}
        except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
            raise ConfigError(f"{self.path} cannot be read: {error}; remove it to begin anew") from None
        if found.version > VERSION:
            raise ConfigError(
                f"{self.path} was made by a newer localrun (version {found.version}, this one knows {VERSION}); use "
                f"that one, or remove the file to begin anew"
            )
        return found.hosts

    def trust(self, where: Endpoint, certificate: str) -> Host:
        """From now on this certificate, and no other one, counts there."""
        found = Host(certificate, fingerprint(certificate))
        with stored.locked(self.path):
            self._write(self.all() | {where.name: found})
        return found

    def forget(self, name: str) -> bool:
        """False when there was none by this host and port."""
        with stored.locked(self.path):
            hosts = self.all()
            if hosts.pop(name, None) is None:
                return False
            self._write(hosts)
        return True

    def _write(self, hosts: dict[str, Host]) -> None:
        stored.write(self.path, _File(hosts=hosts))


def context_for(where: Endpoint) -> ssl.SSLContext:
    """For connections to there."""
    kept = TrustedHosts().all().get(where.name)
    if kept is None:
        return ssl.create_default_context()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    # The certificate itself is what is trusted, whatever its names, and whoever signed it.
    context.check_hostname = False
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    try:
        context.load_verify_locations(cadata=kept.certificate)
    except (ValueError, ssl.SSLError):
        raise ConfigError(
            f"{TrustedHosts().path} has no certificate of {where.name} that can be read; trust it again with: localrun "
            f"hosts trust {where.name}"
        ) from None
    return context


def shown_certificate(where: Endpoint) -> str:
    """What the daemon shows, trusted or not, as PEM. Raises DaemonUnreachable."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE  # nothing is sent: only the certificate is looked at
    try:
        with (
            discovery.connect(where.host, where.port, _HANDSHAKE_TIMEOUT_S) as plain,
            context.wrap_socket(plain, server_hostname=where.host) as connection,
        ):
            der = connection.getpeercert(binary_form=True)
    except (OSError, ValueError) as error:
        raise DaemonUnreachable(f"no certificate was received from {where.url}: {error}") from None
    assert der is not None
    return ssl.DER_cert_to_PEM_cert(der)


class _TlsConnection(http.client.HTTPSConnection):
    """To a name that the system's resolver may not know."""

    def __init__(self, where: Endpoint, timeout_s: float) -> None:
        self._tls = context_for(where)
        self._where = where
        self._timeout_s = timeout_s
        super().__init__(where.host, where.port, timeout=timeout_s, context=self._tls)

    def connect(self) -> None:
        plain = discovery.connect(self._where.host, self._where.port, self._timeout_s)
        try:
            self.sock = self._tls.wrap_socket(plain, server_hostname=self._where.host)
        except BaseException:
            plain.close()
            raise


def http_connection(where: Endpoint, timeout_s: float) -> http.client.HTTPConnection:
    """For a few short questions, not connected yet."""
    if where.is_remote:
        return _TlsConnection(where, timeout_s)
    return http.client.HTTPConnection(where.host, where.port, timeout=timeout_s)


def untrusted(where: Endpoint) -> UntrustedCertificate:
    """Why the certificate there does not count, and what to do."""
    kept = TrustedHosts().all().get(where.name)
    now = fingerprint(shown_certificate(where))
    port = "" if where.port == DEFAULT_PORT else f" --port {where.port}"
    if kept is None:
        return UntrustedCertificate(
            f"the certificate of {where.name} is not known here; compare its SHA-256 fingerprint, {now}, with what "
            f"`localrun serve` shows there, and trust it with: localrun hosts trust {where.host}{port}"
        )
    if kept.fingerprint == now:
        return UntrustedCertificate(
            f"the certificate of {where.name} is the one that was trusted, and its time is over or has not come; check "
            f"the clocks, or get a new one there: `localrun serve` makes one when the old one has expired"
        )
    return UntrustedCertificate(
        f"the certificate of {where.name} is not the one that was trusted: the connection may be "
        f"intercepted, or the daemon has a new one. Its SHA-256 fingerprint was {kept.fingerprint} and is {now}. If "
        f"`localrun serve` shows the new one there: localrun hosts trust {where.host}{port} --fingerprint {now}"
    )
