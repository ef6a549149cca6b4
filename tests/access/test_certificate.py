"""The certificate that connections get while the daemon runs."""

from __future__ import annotations

import shutil
import ssl
from contextlib import suppress
from pathlib import Path

from localrun.access import certificate
from localrun.access.certificate import Certificate


def _shown(server: ssl.SSLContext) -> str:
    """The fingerprint that a client sees who names no host."""
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname, client.verify_mode = False, ssl.CERT_NONE
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    sides = client.wrap_bio(to_client, to_server), server.wrap_bio(to_server, to_client, server_side=True)
    for _ in range(3):
        for side in sides:
            with suppress(ssl.SSLWantReadError):
                side.do_handshake()
    shown = sides[0].getpeercert(binary_form=True)
    assert shown is not None
    return certificate.fingerprint(ssl.DER_cert_to_PEM_cert(shown))


def test_renewed_files_are_used_without_a_restart(tmp_path: Path) -> None:
    first, second = (certificate.kept(tmp_path / name, ["studio.local"]) for name in ("first", "second"))
    used = Certificate(tmp_path / "chain.pem", tmp_path / "key.pem", first.fingerprint)

    def replace(part: str, made: Certificate) -> None:
        target = getattr(used, part)
        shutil.copy(getattr(made, part), f"{target}.new")
        Path(f"{target}.new").replace(target)

    for part in ("certificate", "key"):
        replace(part, first)
    server = certificate.context(used)
    assert _shown(server) == first.fingerprint
    replace("key", second)
    assert _shown(server) == first.fingerprint, "half of a pair"
    replace("certificate", second)
    assert _shown(server) == second.fingerprint
    used.key.unlink()
    assert _shown(server) == second.fingerprint
