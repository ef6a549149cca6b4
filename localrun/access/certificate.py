"""The certificate that other machines know this one by: the person's own, or one that is made on the spot and kept.

The one that is made is self-signed, ECDSA on P-256, for the machine's names and addresses, and lasts ten years: clients
trust it by its fingerprint (`trust.py`), or are given the file as their list of authorities. Both files are in `tls` in
the data folder, mode 0600; without them the next start makes new ones, and clients refuse those until they are told.

Does not: import `cryptography` unless a certificate is made.
"""

from __future__ import annotations

import hashlib
import ipaddress
import socket
import ssl
from collections.abc import Iterable
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from localrun import stored
from localrun.config import ConfigError
from localrun.stored import FileStamp

if TYPE_CHECKING:
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey

_DAYS = 3650
# Forward secrecy and authenticated encryption only; TLS 1.3 has nothing else anyway.
_CIPHERS = "ECDHE+AESGCM:ECDHE+CHACHA20"


class Certificate(NamedTuple):
    """The files, and what people compare. `is_new` if it was made just now."""

    certificate: Path
    key: Path
    fingerprint: str
    is_new: bool = False


def fingerprint(certificate: str) -> str:
    """SHA-256 of a certificate (PEM), as `openssl x509 -fingerprint -sha256` writes it. Raises ValueError."""
    digest = hashlib.sha256(ssl.PEM_cert_to_DER_cert(certificate)).hexdigest().upper()
    return ":".join(digest[at : at + 2] for at in range(0, len(digest), 2))


def of_files(certificate: str, key: str) -> Certificate:
    """The person's own. Raises ConfigError."""
    if not (certificate and key):
        missing = "tls_key" if certificate else "tls_cert"
        raise ConfigError(f"{missing} is missing: a certificate and its private key belong together")
    files = Path(certificate).expanduser(), Path(key).expanduser()
    try:
        text = stored.contents(files[0]).decode("ascii")
        own = fingerprint(text[text.index(ssl.PEM_HEADER) :].partition(ssl.PEM_FOOTER)[0] + ssl.PEM_FOOTER)
    except (OSError, ValueError) as error:
        raise ConfigError(f"tls_cert: {files[0]} cannot be read as a certificate (PEM): {error}") from None
    return Certificate(*files, own)


def kept(folder: Path, names: Iterable[str]) -> Certificate:
    """The one in `folder`, made first if there is none or if it has expired. Raises ConfigError."""
    files = folder / "tls" / "certificate.pem", folder / "tls" / "key.pem"
    if not (files[0].exists() and files[1].exists()) or _has_expired(files[0]):
        try:
            _make(*files, names)
        except OSError as error:
            raise ConfigError(f"no certificate can be kept in {folder / 'tls'}: {error}") from None
        return of_files(str(files[0]), str(files[1]))._replace(is_new=True)
    found = of_files(str(files[0]), str(files[1]))
    try:
        context(found)
    except ConfigError as error:
        raise ConfigError(
            f"{error}; restore them, or delete {folder / 'tls'} to get others, which clients have to be told to trust"
        ) from None
    return found


def context(certificate: Certificate) -> ssl.SSLContext:
    """For the daemon's sockets. Once the files are renewed, new connections get the new ones. Raises ConfigError for
    files that are no pair."""
    made = latest = _context(certificate)
    seen = _stamps(certificate)

    def renew(connection: ssl.SSLObject, _: str | None, __: ssl.SSLContext) -> None:
        nonlocal latest, seen
        if (found := _stamps(certificate)) != seen:
            with suppress(ConfigError):  # one of them is still the old one: the next connection looks again
                latest, seen = _context(certificate), found
        connection.context = latest

    made.sni_callback = renew  # is called without a name, too
    return made


def _stamps(certificate: Certificate) -> tuple[FileStamp | None, ...]:
    return FileStamp.found(certificate.certificate), FileStamp.found(certificate.key)


def _context(certificate: Certificate) -> ssl.SSLContext:
    made = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    made.minimum_version = ssl.TLSVersion.TLSv1_2
    made.set_ciphers(_CIPHERS)
    made.set_alpn_protocols(["http/1.1"])
    try:
        for file in (certificate.certificate, certificate.key):
            stored.contents(file)  # what the library reads may never end
        made.load_cert_chain(certificate.certificate, certificate.key)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(
            f"{certificate.certificate} and {certificate.key} cannot be used as a certificate and its key: {error}"
        ) from None
    return made


def _has_expired(path: Path) -> bool:
    from cryptography import x509

    try:
        return x509.load_pem_x509_certificate(stored.contents(path)).not_valid_after_utc < datetime.now(UTC)
    except ValueError:
        return True


def begun(name: str, key: EllipticCurvePrivateKey, issuer: str = "") -> x509.CertificateBuilder:
    """A certificate for the key, without extensions yet; self-signed unless there is an `issuer`."""
    from cryptography import x509
    from cryptography.x509.oid import NameOID

    subject, signing = (
        x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, one)]) for one in (name[:64], (issuer or name)[:64])
    )
    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(signing)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1))  # clocks differ
        .not_valid_after(now + timedelta(days=_DAYS))
    )


def keep(path: Path, signed: x509.CertificateBuilder, signing: EllipticCurvePrivateKey) -> None:
    """The finished certificate, signed, as PEM. Raises OSError."""
    from cryptography.hazmat.primitives import hashes, serialization

    stored.replace(path, signed.sign(signing, hashes.SHA256()).public_bytes(serialization.Encoding.PEM))


def keep_key(path: Path, key: EllipticCurvePrivateKey) -> None:
    """As PEM, in the clear. Raises OSError."""
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

    stored.replace(path, key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))


def _make(certificate: Path, key: Path, names: Iterable[str]) -> None:
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import ExtendedKeyUsageOID

    private = ec.generate_private_key(ec.SECP256R1())
    alternatives: list[x509.GeneralName] = [x509.DNSName(one) for one in sorted({"localhost", *names}) if one.isascii()]
    alternatives += [x509.IPAddress(address) for address in own_addresses()]
    identifier = x509.SubjectKeyIdentifier.from_public_key(private.public_key())
    made = (
        begun(f"localrun on {socket.gethostname()}", private)
        .add_extension(x509.SubjectAlternativeName(alternatives), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(identifier, critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(identifier), critical=False)
    )
    keep_key(key, private)
    keep(certificate, made, private)


def own_names() -> frozenset[str]:
    """This machine's host name in lower case, alone and with `.local`; nothing for one without a name."""
    own = socket.gethostname().lower().rstrip(".")
    short = own.partition(".")[0]
    return frozenset((own, short, f"{short}.local")) if short else frozenset()


def own_addresses() -> list[ipaddress.IPv4Address | ipaddress.IPv6Address]:
    """This machine's addresses, loopback first."""
    import psutil

    found = {ipaddress.ip_address("127.0.0.1"), ipaddress.ip_address("::1")}
    for addresses in psutil.net_if_addrs().values():
        for one in addresses:
            if one.family in (socket.AF_INET, socket.AF_INET6):
                found.add(ipaddress.ip_address(one.address.partition("%")[0]))
    return sorted(found, key=lambda address: (not address.is_loopback, address.version, int(address)))
