"""Finds the certificate file that cannot be used, and says why, before anybody connects with it.

Nothing here needs `cryptography`, which only the machine that makes certificates has. Whether a certificate
belongs to its key and to its authority is found out as a connection would: by a TLS handshake, in memory.
"""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from pathlib import Path

_NO_CHECK_TIME = 0x200000
"""OpenSSL's X509_V_FLAG_NO_CHECK_TIME, which Python does not name: `CertificateWatch` tells of an end."""
_ANOTHER_KEY = "KEY_VALUES_MISMATCH"


@dataclass(frozen=True)
class UnusableFile:
    """A file that cannot be used, and why, as the end of a sentence about it."""

    path: Path
    why: str

    def __str__(self) -> str:
        return f"{self.path.name} {self.why}"


def content_fault(path: Path) -> UnusableFile | None:
    """Return why a file cannot be read or holds nothing; None where it holds something."""
    try:
        return None if path.read_bytes().strip() else UnusableFile(path, "is empty")
    except OSError as error:
        return UnusableFile(path, f"cannot be read: {error.strerror or error}")


def text_fault(path: Path) -> UnusableFile | None:
    """Return why a file holds no text; None where it holds some."""
    fault = content_fault(path)
    if fault is not None:
        return fault
    try:
        path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        return UnusableFile(path, "is damaged: it holds no text")
    return None


def certificates_fault(path: Path) -> UnusableFile | None:
    """Return why no certificate can be read from a file; None where one or more can."""
    fault = content_fault(path)
    if fault is not None:
        return fault
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(path)
    except OSError:  # ssl.SSLError is an OSError
        return UnusableFile(path, "holds no certificate, or a damaged one")
    return None


def pair_fault(certificate: Path, key: Path) -> UnusableFile | None:
    """Return why a certificate and its key cannot be shown; None where they can."""
    fault = certificates_fault(certificate) or content_fault(key)
    if fault is not None:
        return fault
    try:
        # An empty password, or OpenSSL would ask for one at the terminal.
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key, password="")
    except OSError as error:
        is_another = isinstance(error, ssl.SSLError) and error.reason == _ANOTHER_KEY
        return UnusableFile(
            key, f"is not the key of {certificate.name}" if is_another else "holds no key, or a damaged one"
        )
    return None


def signed_fault(
    *, authority: Path, certificate: Path, key: Path, peer: str | None = None
) -> UnusableFile | None:
    """Return which of three files does not belong to the others, or cannot be used at all; None if all fit.

    authority: the file of the authorities, one of which signed the certificate.
    peer: the name that the certificate must bear; None: any.
    """
    fault = certificates_fault(authority) or pair_fault(certificate, key)
    if fault is not None:
        return fault
    try:
        names = _names_in_handshake(authority, certificate, key)
    except ssl.SSLCertVerificationError:
        return UnusableFile(certificate, f"is not signed by {authority.name}, or one of the two is damaged")
    except ssl.SSLError:
        return UnusableFile(key, f"does not work with {certificate.name}: one of the two is damaged")
    if peer is not None and peer not in names:
        return UnusableFile(certificate, f"is that of {', '.join(names) or 'nobody'}, and not of {peer!r}")
    return None


def _names_in_handshake(authority: Path, certificate: Path, key: Path) -> list[str]:
    """Return the DNS names of the certificate that one end shows to another, which trusts the authority."""
    shows = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    shows.load_cert_chain(certificate, key)
    trusts = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    trusts.check_hostname = False
    trusts.verify_flags |= ssl.VerifyFlags(_NO_CHECK_TIME)
    trusts.load_verify_locations(authority)
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    server = shows.wrap_bio(to_server, to_client, server_side=True)
    client = trusts.wrap_bio(to_client, to_server)
    for end in (client, server, client):
        try:
            end.do_handshake()
        except ssl.SSLWantReadError:
            continue  # the other end has to write first
    names = (client.getpeercert() or {}).get("subjectAltName", ())
    assert isinstance(names, tuple), "as the ssl module documents it"
    return [str(value) for kind, value in names if kind == "DNS"]
