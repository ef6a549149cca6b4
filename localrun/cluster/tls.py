"""Encryption between the machines of a cluster: an authority that is made of the token, and certificates of its own.

Whoever has the token can make the authority's key, and nobody else can, so that a node needs the token alone to be
believed and to know the others. Every node makes itself a certificate when it joins, for its name and address, which
ends with the files: `cluster-tls` in the state folder. Ray asks for certificates on both sides; frames ask doors for
their token instead.

Does not: import `cryptography` unless certificates are made.
"""

from __future__ import annotations

import hmac
import ipaddress
import ssl
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from localrun import stored

if TYPE_CHECKING:
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey

# The order of P-256, below which its keys are.
_ORDER = 0xFFFFFFFF00000000FFFFFFFFFFFFFFFFBCE6FAADA7179E84F3B9CAC2FC632551
_DAYS = 3650


class Files(NamedTuple):
    authority: Path
    certificate: Path
    key: Path


def files(folder: Path) -> Files:
    return Files(*(folder / "cluster-tls" / f"{name}.pem" for name in Files._fields))


def make(folder: Path, token: str, node: str, address: str) -> None:
    """Certificates for a node, in place of those before. Raises OSError."""
    from cryptography import x509
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import ExtendedKeyUsageOID

    signing = _authority_key(token)
    own = ec.generate_private_key(ec.SECP256R1())
    identifier = x509.SubjectKeyIdentifier.from_public_key(signing.public_key())
    authority = (
        _begun("localrun cluster", signing)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(signs=True), critical=True)
        .add_extension(identifier, critical=False)
    )
    names = [
        *(x509.DNSName(name) for name in {"localhost", node} if name.isascii()),
        *(x509.IPAddress(ipaddress.ip_address(one)) for one in {"127.0.0.1", address}),
    ]
    usages = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
    certificate = (
        _begun("localrun node", own)
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(signs=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage(usages), critical=False)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(own.public_key()), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(identifier), critical=False)
    )
    where = files(folder)
    for path, begun in ((where.authority, authority), (where.certificate, certificate)):
        stored.replace(path, _signed(begun, signing).public_bytes(serialization.Encoding.PEM))
    plain = serialization.NoEncryption()
    stored.replace(where.key, own.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, plain))


def for_replicas(folder: Path) -> ssl.SSLContext:
    """Of the port for frames."""
    where = files(folder)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.load_cert_chain(where.certificate, where.key)
    return context


def for_doors(folder: Path) -> ssl.SSLContext:
    """Of who connects to that. Only this cluster's certificates are believed."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.load_verify_locations(files(folder).authority)
    return context


def environment(folder: Path) -> dict[str, str]:
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


def _begun(name: str, key: EllipticCurvePrivateKey) -> x509.CertificateBuilder:
    from cryptography import x509
    from cryptography.x509.oid import NameOID

    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]))
        .issuer_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "localrun cluster")]))
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1))  # clocks differ
        .not_valid_after(now + timedelta(days=_DAYS))
    )


def _signed(begun: x509.CertificateBuilder, key: EllipticCurvePrivateKey) -> x509.Certificate:
    from cryptography.hazmat.primitives import hashes

    return begun.sign(key, hashes.SHA256())


def _usage(*, signs: bool) -> x509.KeyUsage:
    from cryptography import x509

    return x509.KeyUsage(
        digital_signature=not signs, key_cert_sign=signs, crl_sign=signs, content_commitment=False,
        key_encipherment=False, data_encipherment=False, key_agreement=False, encipher_only=False, decipher_only=False,
    )  # fmt: skip
