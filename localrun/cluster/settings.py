"""What this machine keeps of the cluster that it is in: in the state folder, for its owner alone.

`cluster.json` says where the head is, how the node is called, and which process holds it; `cluster.token` is the
cluster's secret. Whoever has that can run any program on any node: it is Ray's, and what replicas ask of doors is
derived from it, so that who sees the one does not know the other; so is the authority of the nodes' certificates, which
they need as soon as the head can be reached from other machines.

Does not: talk to Ray, or let anything be reached without the token.
"""

from __future__ import annotations

import hmac
import ipaddress
import os
import secrets
import shutil
import socket
import ssl
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import psutil

from localrun import stored
from localrun.access import certificate
from localrun.config import ConfigError, folders, host_and_port
from localrun.errors import NotFound, PortBusy

if TYPE_CHECKING:
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey

HEAD_PORT = 11433
TOKEN_BYTES = 32
# Ray's processes outlive a lost head for so long; by themselves they end after a minute, and streams with them.
HEADLESS_S = 24 * 3600


class Membership(msgspec.Struct, frozen=True, kw_only=True):
    """`head` is HOST:PORT, `address` this node's own. `is_kuberay` is for a pod: the operator asks Ray's dashboard, in
    the clear, and the pods' network keeps others out. `pid` and `started_at_s` are of the process that holds it."""

    head: str
    address: str
    node: str
    is_head: bool
    is_kuberay: bool = False
    pid: int = 0
    started_at_s: float = 0.0

    @property
    def is_encrypted(self) -> bool:
        """Whether more than one machine can be in it: what nodes say to each other is encrypted then."""
        return not self.is_kuberay and not ipaddress.ip_address(self.head.rpartition(":")[0]).is_loopback

    def tls_to_listen(self) -> ssl.SSLContext | None:
        """For what others of the cluster connect to here; None where nothing is encrypted."""
        return tls_for_replicas(folders().state) if self.is_encrypted else None

    def tls_to_connect(self) -> ssl.SSLContext | None:
        """For connections to the others; None where nothing is encrypted."""
        return tls_for_doors(folders().state) if self.is_encrypted else None

    @property
    def books(self) -> tuple[str, int]:
        """Where the head's daemon tells doors of keys and quotas (`state.py`)."""
        host, _, port = self.head.rpartition(":")
        return host, int(port) - 1

    @property
    def is_held(self) -> bool:
        """Whether that process is still there."""
        try:
            return bool(psutil.Process(self.pid).create_time() == self.started_at_s)
        except psutil.Error:
            return False


_decoder = msgspec.json.Decoder(Membership)


def file() -> Path:
    return folders().state / "cluster.json"


def token_file() -> Path:
    return folders().state / "cluster.token"


def temp_folder() -> Path:
    """Of Ray's sockets and logs. Paths of sockets end at 107 characters, and Ray's own part of them takes 60."""
    kept = folders().cache / "ray"
    name = f"localrun-{hmac.digest(b'', bytes(kept), 'sha256').hex()[:8]}-{os.getuid()}"
    return (kept if len(bytes(kept)) < 40 else Path("/tmp") / name) / "r"


def session() -> str:
    """What Ray calls the life of the cluster that this node is in: another one after the head's end."""
    return os.path.basename(os.path.realpath(temp_folder() / "session_latest"))


def clear_temp_folder(*, anew: bool) -> None:
    """What is in it goes; `anew` makes it, where nobody else can get to: Ray lets everybody write to its own. Raises
    OSError for a folder of somebody else."""
    outer = temp_folder().parent
    shutil.rmtree(outer, ignore_errors=True)
    if anew:
        outer.parent.mkdir(parents=True, exist_ok=True)
        outer.mkdir(mode=0o700)


def membership() -> Membership:
    """Raises NotFound for a machine that is in no cluster."""
    kept = stored.read(file(), _decoder)
    if kept is None or not kept.is_held:
        raise NotFound(
            "this machine is in no cluster; `localrun cluster up` starts one, and `localrun cluster join` joins one"
        )
    return kept


def keep(member: Membership, token: str) -> None:
    """Of this process. Raises ConfigError while another one holds a node here, and OSError."""
    other = stored.read(file(), _decoder)
    if other is not None and other.is_held:
        raise ConfigError(
            f"this machine is '{other.node}' of the cluster of {other.head} already (process {other.pid}); "
            f"`localrun cluster down` ends that"
        )
    own = psutil.Process()
    stored.replace(token_file(), token.encode("ascii"))
    if member.is_encrypted:
        make_certificates(folders().state, token, member.node, member.address)
    stored.write(file(), msgspec.structs.replace(member, pid=own.pid, started_at_s=own.create_time()))


def forget() -> None:
    """The token stays: a head that comes back has the same."""
    file().unlink(missing_ok=True)


def own_token(environ: Mapping[str, str] = os.environ) -> str:
    """The one of the cluster that is begun here, which stays the same; RAY_AUTH_TOKEN names another. Raises
    ConfigError for one that is none."""
    if "RAY_AUTH_TOKEN" in environ:
        return _checked_token(environ["RAY_AUTH_TOKEN"].strip(), "RAY_AUTH_TOKEN")
    try:
        return read_token(token_file())
    except ConfigError:
        return secrets.token_hex(TOKEN_BYTES)


def read_token(path: Path) -> str:
    """Raises ConfigError."""
    try:
        text = stored.contents(path).decode("ascii").strip()
        is_open = os.name != "nt" and path.stat().st_mode & 0o077
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read as a cluster's token: {error}") from None
    if is_open:
        raise ConfigError(f"{path} can be read by others; whoever has a cluster's token owns it: chmod 600 {path}")
    return _checked_token(text, str(path))


def _checked_token(text: str, where: str) -> str:
    if len(text) != 2 * TOKEN_BYTES or not set(text) <= set("0123456789abcdef"):
        raise ConfigError(f"{where} holds no cluster's token, which is {2 * TOKEN_BYTES} hexadecimal digits")
    return text


def frames_token() -> bytes:
    """What doors show to replicas. Raises ConfigError."""
    return hmac.digest(read_token(token_file()).encode("ascii"), b"localrun: frames", "sha256")


def books_folder() -> Path:
    """Of a door that is not the head: what it keeps of this cluster's books."""
    cluster = hmac.digest(frames_token(), b"localrun: books", "sha256").hex()[:8]
    return folders().data / f"cluster-{cluster}"


def environment(member: Membership, environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Of every process with Ray in it. Raises ConfigError where somebody wants it without a token."""
    if environ.get("RAY_AUTH_MODE", "token").lower() != "token":
        raise ConfigError("RAY_AUTH_MODE must be token or unset: without a token anybody could run programs here")
    others = {name: value for name, value in environ.items() if name not in ("RAY_AUTH_TOKEN", "RAY_ADDRESS")}
    return others | (_tls_environment(folders().state) if member.is_encrypted else {}) | {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(token_file()),
        "RAY_gcs_rpc_server_reconnect_timeout_s": str(HEADLESS_S),
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_DEFAULT_PYTHON_VERSION_MATCH_LEVEL": "minor",
        "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
        # What names macOS and Windows counts everywhere: with it Ray takes 127.0.0.1 for another address of the
        # machine, if that has one, and listens on all interfaces.
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "1" if member.is_encrypted else "0",
        "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0",  # what runs goes on elsewhere
        # At 95 % of the memory in use, which is usual where models are, Ray would kill whatever began last.
        "RAY_memory_monitor_refresh_ms": "0",
        # One that hangs cannot end in peace, and another one is needed.
        "RAY_SERVE_FORCE_STOP_UNHEALTHY_REPLICAS": "1",
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "1",  # a replica that was given no GPU sees none
    }  # fmt: skip


def own_address(text: str) -> str:
    """An address of this machine, for a node of it. Raises ConfigError."""
    address = address_of(text)
    try:
        with socket.create_server((address, 0)):
            return address
    except OSError:
        raise ConfigError(f"{address} is no address of this machine, so that no node of it can have it") from None


def check_ports(member: Membership) -> None:
    """Ray's, and that of the daemon's books, of a head that is to be started here. Raises PortBusy."""
    host, _, port = member.head.rpartition(":")
    for place in ((host, int(port)), member.books):
        try:
            with socket.create_server(place):
                pass
        except OSError as error:
            raise PortBusy(
                f"the head cannot listen at {place[0]}:{place[1]}, as another cluster's may do: "
                f"{os.strerror(error.errno or 0)}; give --head-port"
            ) from None


def address_of(host: str) -> str:
    """Raises ConfigError for what other nodes cannot connect to."""
    try:
        address = ipaddress.IPv4Address(socket.gethostbyname(host))
    except (OSError, ValueError):
        raise ConfigError(f"{host[:100]!r} is no address (IPv4) of a machine; give one such as 192.168.0.7") from None
    if address.is_unspecified or address.is_multicast:
        raise ConfigError(f"{host[:100]!r} is no single machine's address; give one such as 192.168.0.7")
    return str(address)


def address_towards(head: str) -> str:
    """This machine's address, as the head sees it. Raises ConfigError where there is no way to it."""
    host, _, port = head.rpartition(":")
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:  # sends nothing
            probe.connect((host, int(port)))
            address: str = probe.getsockname()[0]
            return address
    except OSError as error:
        raise ConfigError(f"there is no way to {host}: {error.strerror}") from None


def checked_head(text: str) -> str:
    """HOST:PORT of HOST or HOST:PORT. Raises ConfigError."""
    host, port = host_and_port(text, "HOST")
    return f"{address_of(host)}:{port or HEAD_PORT}"


# --- encryption: an authority that is made of the token, and certificates of its own ---
# Whoever has the token can make the authority's key, and nobody else can, so that a node needs the token alone to be
# believed and to know the others. Every node makes itself a certificate when it joins, for its name and address, which
# ends with the files: `cluster-tls` in the state folder. Ray asks for certificates on both sides; frames ask doors for
# their token instead.

# The order of P-256, below which its keys are.
_ORDER = 0xFFFFFFFF00000000FFFFFFFFFFFFFFFFBCE6FAADA7179E84F3B9CAC2FC632551
_AUTHORITY = "localrun cluster"


class Files(NamedTuple):
    authority: Path
    certificate: Path
    key: Path


def files(folder: Path) -> Files:
    return Files(*(folder / "cluster-tls" / f"{name}.pem" for name in Files._fields))


def make_certificates(folder: Path, token: str, node: str, address: str) -> None:
    """Certificates for a node, in place of those before. Raises OSError."""
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import ExtendedKeyUsageOID

    signing = _authority_key(token)
    own = ec.generate_private_key(ec.SECP256R1())
    identifier = x509.SubjectKeyIdentifier.from_public_key(signing.public_key())
    authority = (
        certificate.begun(_AUTHORITY, signing)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(signs=True), critical=True)
        .add_extension(identifier, critical=False)
    )
    names = [
        *(x509.DNSName(name) for name in {"localhost", node} if name.isascii()),
        *(x509.IPAddress(ipaddress.ip_address(one)) for one in {"127.0.0.1", address}),
    ]
    usages = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
    of_node = (
        certificate.begun("localrun node", own, _AUTHORITY)
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(signs=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage(usages), critical=False)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(own.public_key()), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(identifier), critical=False)
    )
    where = files(folder)
    certificate.keep(where.authority, authority, signing)
    certificate.keep(where.certificate, of_node, signing)
    certificate.keep_key(where.key, own)


def tls_for_replicas(folder: Path) -> ssl.SSLContext:
    """Of the port for frames."""
    where = files(folder)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.load_cert_chain(where.certificate, where.key)
    return context


def tls_for_doors(folder: Path) -> ssl.SSLContext:
    """Of who connects to that. Only this cluster's certificates are believed."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.load_verify_locations(files(folder).authority)
    return context


def _tls_environment(folder: Path) -> dict[str, str]:
    """Of every process with Ray in it."""
    where = files(folder)
    return {
        "RAY_USE_TLS": "1",
        "RAY_TLS_CA_CERT": str(where.authority),
        "RAY_TLS_SERVER_CERT": str(where.certificate),
        "RAY_TLS_SERVER_KEY": str(where.key),
    }


def _authority_key(token: str) -> EllipticCurvePrivateKey:
    from cryptography.hazmat.primitives.asymmetric import ec

    # Twice the digits that are needed, so that every key is as likely as another.
    digits = b"".join(hmac.digest(token.encode("ascii"), b"localrun: authority %d" % n, "sha256") for n in range(2))
    return ec.derive_private_key(1 + int.from_bytes(digits, "big") % (_ORDER - 1), ec.SECP256R1())


def _usage(*, signs: bool) -> x509.KeyUsage:
    from cryptography import x509

    return x509.KeyUsage(
        digital_signature=not signs, key_cert_sign=signs, crl_sign=signs, content_commitment=False,
        key_encipherment=False, data_encipherment=False, key_agreement=False, encipher_only=False, decipher_only=False,
    )  # fmt: skip
